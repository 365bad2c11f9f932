"""Exchanges over gloo give the sums, rows and bits that a plain computation with everything in one place gives."""

import pytest
import torch

from smoe_cli.runtime.collectives import CollectiveExchange, rank_bits, rms_norm
from smoe_cli.runtime.exchange import Norm, Plan, Routed
from tests.runtime.ranks import ranks

H, K = 24, 3
SIZES = (0, 1, 2, 3, 4, 5, 8, 17)
"""With two and four ranks: no token, fewer than ranks, one more and one less than ranks, uneven."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_plan(tokens, number, seed):
    """Any plan under the quota: tokens in random order over places, some places empty anywhere."""
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-tokens // number)
    places = torch.randperm(number * capacity, generator=generator)[:tokens].to(torch.int32)
    token_of_place = torch.full((number * capacity,), -1, dtype=torch.int32)
    token_of_place[places.long()] = torch.arange(tokens, dtype=torch.int32)
    return Plan(token_of_place, places, number)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_rank_order(parts, dtype, residual=None):
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total = total + part.float()
    return (total if residual is None else total + residual.float()).to(dtype)


def sum_and_gather(tokens, dtype):
    exchange = CollectiveExchange()
    rank, number = exchange.rank, exchange.num_ranks
    plan = random_plan(tokens, number, tokens)
    partials, residual = noise(number, tokens, H, seed=1, dtype=dtype), noise(tokens, H, seed=2, dtype=dtype)
    norm = Norm(noise(H, seed=3, dtype=dtype), 1e-6)
    whole = in_rank_order(partials, dtype, residual)
    before = exchange.scatter(residual, plan)
    summed, normed = exchange.reduce_scatter(partials[rank], plan, before, norm)
    assert torch.equal(summed, exchange.scatter(whole, plan))
    assert torch.equal(normed, rms_norm(summed, norm))
    plain, same = exchange.reduce_scatter(partials[rank], plan)
    assert plain is same
    assert torch.equal(plain, exchange.scatter(in_rank_order(partials, dtype), plan))
    home = plan.place_of_token // max(plan.rows_per_rank, 1)
    labels = torch.full((plan.rows_per_rank,), 7 * rank + 1, dtype=torch.uint8)
    rows, known = exchange.all_gather(summed, plan, labels)
    assert torch.equal(rows, whole)
    assert torch.equal(known, (7 * home + 1).to(torch.uint8))
    assert exchange.all_gather(summed, plan)[1] is None
    assert torch.equal(exchange.all_reduce(partials[rank]), in_rank_order(partials, dtype))


def send_and_combine(capacity, dtype, needs):
    """needs: [G * C] of all ranks."""
    exchange = CollectiveExchange()
    rank, number = exchange.rank, exchange.num_ranks
    rows = noise(number * capacity, H, seed=4, dtype=dtype)
    experts = torch.arange(number * capacity * K, dtype=torch.int32).view(-1, K)
    weights = noise(number * capacity, K, seed=5)
    parts = noise(number, number * capacity, H, seed=6, dtype=dtype)
    own = slice(rank * capacity, (rank + 1) * capacity)
    routed = Routed(rows[own], experts[own], weights[own], needs[own])
    received = exchange.dispatch(routed)
    wanted = rank_bits(needs, number)
    assert torch.equal(received.needs, needs)
    here = wanted[:, rank]
    for found, sent in ((received.rows, rows), (received.experts, experts), (received.weights, weights)):
        assert torch.equal(found[here], sent[here])
    poisoned = torch.where(here[:, None], parts[rank], torch.nan)
    mixed = exchange.combine(poisoned, routed)
    expected = torch.zeros(capacity, H)
    for other in range(number):
        expected = torch.where(wanted[own, other, None], expected + parts[other, own].float(), expected)
    assert torch.equal(mixed, expected.to(dtype))


@pytest.mark.parametrize("number", [2, 4])
def test_reduce_scatter_and_all_gather_equal_a_sum_in_rank_order(number):
    for dtype in DTYPES:
        for tokens in SIZES:
            ranks(number).run(sum_and_gather, tokens, dtype)


@pytest.mark.parametrize("number", [2, 4])
def test_dispatch_and_combine_move_each_row_to_the_ranks_it_needs(number):
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for capacity in (0, 1, 5):
            needs = torch.randint(0, 1 << number, (number * capacity,), generator=generator, dtype=torch.int32)
            ranks(number).run(send_and_combine, capacity, dtype, needs)


@pytest.mark.parametrize("mask", [0, 1, 2, 3])
def test_all_rows_to_one_rank_or_to_none(mask):
    ranks(2).run(send_and_combine, 3, torch.float32, torch.full((6,), mask, dtype=torch.int32))


def test_ranks_without_a_row_take_part():
    needs = torch.tensor([2, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    ranks(4).run(send_and_combine, 2, torch.float32, needs)
