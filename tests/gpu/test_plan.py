"""The plan's kernel on a GPU: equal to the plain plan, also replayed from a graph."""

import pytest
import torch

from smoe_cli.runtime.plan import make_plan, plain_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def batch(tokens, ranks, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, high, (500, ranks), generator=generator, dtype=torch.uint8)
    return table.cuda(), torch.randint(0, 500, (tokens,), generator=generator).cuda()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("high", [4, 256])
def test_kernel_makes_the_plain_plan(ranks, high):
    from smoe_cli.runtime.plan_kernel import plan_rows

    for tokens in (1, ranks - 1, ranks, ranks + 1, 64, 1000, 1024, 5003, 16384):
        table, index = batch(tokens, ranks, high, seed=tokens)
        plain = plain_plan(table[index].cpu(), ranks)
        for plan in (plan_rows(table, index), make_plan(table[index], ranks)):
            assert torch.equal(plan.place_of_token.cpu(), plain.place_of_token), tokens
            assert torch.equal(plan.token_of_place.cpu(), plain.token_of_place), tokens


@pytest.mark.parametrize("ranks", [3, 8])
def test_kernel_makes_the_plain_plan_of_few_kinds_and_of_a_crowded_rank(ranks):
    from smoe_cli.runtime.plan_kernel import plan_rows

    for tokens in (64, 1000, 5003):
        table, index = batch(tokens, ranks, 256, seed=ranks)
        crowded = table.clone()
        crowded[:, 1] = 255
        for scores in (table[index % 3], crowded[index]):
            plain = plain_plan(scores.cpu(), ranks)
            assert torch.equal(plan_rows(scores.contiguous()).token_of_place.cpu(), plain.token_of_place)


def test_a_graph_replays_the_plan_of_what_lies_in_its_inputs():
    from smoe_cli.runtime.plan_kernel import plan_rows

    table, index = batch(1000, 8, 256)
    plan_rows(table, index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_rows(table, index)
    for seed in (3, 1, 2):
        index.copy_(batch(1000, 8, 256, seed)[1])
        graph.replay()
        assert torch.equal(plan.place_of_token.cpu(), plain_plan(table[index].cpu(), 8).place_of_token)


def test_ranks_compile_one_kernel_whatever_the_sizes():
    from smoe_cli.runtime.plan_kernel import _plan_kernel, plan_rows

    for tokens in (513, 1000, 1024):
        plan_rows(*batch(tokens, 8, 256))
    before = sum(len(cache[0]) for cache in _plan_kernel.device_caches.values())
    for tokens in (514, 768, 1008, 1023):
        plan_rows(*batch(tokens, 8, 256))
    assert sum(len(cache[0]) for cache in _plan_kernel.device_caches.values()) == before
