"""The request router that serves is the one that evaluate measures."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoe_cli.runtime.requests import RequestRouter
from smoe_solvers.requests import route

L, V = 3, 50


def tables(ranks, seed):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (L, V, ranks), np.uint8), generator.integers(0, 256, (L, ranks), np.uint8)


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 9))
def test_requests_go_where_the_solver_sends_them(ranks, requests, seed):
    token_scores, popularity = tables(ranks, seed)
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, V + 4, generator.integers(1, 9)) for _ in range(requests)]  # some ids unknown
    row = np.concatenate([token_scores, np.repeat(popularity[:, None], 4, axis=1)], axis=1).sum(axis=0, dtype=np.int64)
    expected = route(np.array([row[prompt].sum(axis=0) for prompt in prompts], np.int64).reshape(-1, ranks))
    router = RequestRouter.of_tables(torch.from_numpy(np.concatenate([token_scores, popularity[:, None]], axis=1)))
    found = [router.rank(number, torch.from_numpy(prompt)) for number, prompt in enumerate(prompts)]
    assert found == expected.tolist()


def test_equal_scores_go_to_the_lower_rank_and_a_round_touches_every_rank():
    router = RequestRouter(torch.ones(5, 4, dtype=torch.int64))
    assert [router.rank(number, torch.tensor([1])) for number in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_request_stays_on_its_rank_while_it_decodes():
    router = RequestRouter(torch.tensor([[9, 0], [0, 9], [0, 0]]))
    assert router.rank("a", torch.tensor([0])) == 0
    assert [router.rank("a", torch.tensor([0, 1, 1, 1])) for _ in range(3)] == [0, 0, 0]
    assert router.rank("b", torch.tensor([0])) == 1  # asking again took no rank of the round
    router.finish("a")
    assert router.rank("a", torch.tensor([1])) == 1
