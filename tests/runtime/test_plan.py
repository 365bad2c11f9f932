"""Plans on the device: the rule of smoe_solvers to the last place, in plain torch; test_symmetric has its kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.runtime import plan as runtime_plan
from smoe_cli.runtime.plan import identity_plan, make_plan, plan_hash, plan_of_places
from smoe_solvers import assignment
from smoe_solvers.assignment import assign_rule, row_chunks


def scores_of(tokens, ranks, high=256, seed=0):
    return np.random.default_rng(seed).integers(0, high, (tokens, ranks)).astype(np.uint8)


def check(scores):
    """The plan of these scores, held against the assignment and counted by hand."""
    tokens, ranks = scores.shape
    capacity = -(-tokens // ranks)
    plan = make_plan(torch.from_numpy(scores), ranks)
    to_rank = assign_rule(scores, capacity)
    assert plan.rows_per_rank == capacity
    assert (plan.place_of_token.dtype, plan.token_of_place.dtype) == (torch.int32, torch.int32)
    places = plan.place_of_token.tolist()
    assert [place // capacity for place in places] == to_rank.tolist()
    expected = [-1] * (ranks * capacity)
    for token, place in enumerate(places):
        expected[place] = token
    assert plan.token_of_place.tolist() == expected
    return places, to_rank, capacity


def test_the_rule_has_the_same_constants_on_the_device():
    for name in ("ROUNDS", "FIRST_STEP", "SMALLER", "CROWDED", "NARROWEST", "UNIT", "LEVELS", "COSTS"):
        assert getattr(runtime_plan, name) == getattr(assignment, name), name


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 8), tokens=st.integers(0, 90), high=st.sampled_from([1, 2, 7, 256]), seed=st.integers(0, 2**32)
)
def test_plan_puts_every_token_where_the_rule_says_in_order_of_position(ranks, tokens, high, seed):
    scores = scores_of(tokens, ranks, high, seed)
    if not tokens:
        plan = make_plan(torch.from_numpy(scores), ranks)
        assert (len(plan.token_of_place), len(plan.place_of_token)) == (0, 0)
        return
    places, to_rank, capacity = check(scores)
    met = [0] * ranks
    for place, rank in zip(places, to_rank, strict=True):
        assert place == rank * capacity + met[rank]
        met[rank] += 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_plan_of_batches_of_all_sizes_about_the_number_of_ranks(ranks):
    for tokens in (1, ranks - 1, ranks, ranks + 1, 257, 1000):
        check(scores_of(tokens, ranks))


@pytest.mark.parametrize(("tokens", "ranks"), [(64, 8), (1000, 8), (1000, 16)])
def test_plan_of_few_kinds_of_token_which_move_far(tokens, ranks):
    """Several passes of moves, at costs of all levels."""
    generator = np.random.default_rng(tokens)
    check(scores_of(3, ranks)[generator.integers(0, 3, tokens)])


@pytest.mark.parametrize(("tokens", "ranks"), [(2049, 8), (5003, 8), (4100, 3), (8200, 2)])
def test_plan_of_several_chunks_lets_their_tokens_take_turns(tokens, ranks):
    places, to_rank, capacity = check(scores_of(tokens, ranks))
    rows = row_chunks(capacity, ranks, capacity)
    for number in range(rows.max() + 1):
        slots = np.flatnonzero(rows == number)
        for rank in range(ranks):
            members = [t for t in range(tokens) if rows[t // ranks] == number and to_rank[t] == rank]
            assert [places[t] for t in members] == (rank * capacity + slots[: len(members)]).tolist()


def test_identity_plan_leaves_rows_where_they_are():
    plan = identity_plan(10, 4, "cpu")
    assert plan.place_of_token.tolist() == list(range(10))
    assert plan.token_of_place.tolist() == [*range(10), -1, -1]


def test_hash_of_a_plan_tells_it_from_any_with_two_tokens_exchanged():
    places = make_plan(torch.from_numpy(scores_of(40, 4)), 4).place_of_token
    hashes = {int(plan_hash(plan_of_places(places, 4)))}
    for first in range(0, 40, 3):
        for second in range(first):
            other = places.clone()
            other[[first, second]] = places[[second, first]]
            hashes.add(int(plan_hash(plan_of_places(other, 4))))
    assert len(hashes) == 1 + sum(range(0, 40, 3))
    assert int(plan_hash(plan_of_places(places.clone(), 4))) in hashes
