"""Descents end where no swap of two experts helps, and never above where they started."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Goal
from smoe_solvers.descent import descend, pair_descent
from smoe_solvers.objectives import coactivation, score, search_view
from smoe_solvers.problem import check_placement, contract, group_mask, token_demand
from tests.solvers.reference import clustered_rows, layer, placements, routings, swaps

some = settings(max_examples=25, deadline=None)
GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]
seeds = st.integers(0, 2**32 - 1)


def check_descent(problem, start, seed):
    """Balanced, allowed, not worse, and no allowed swap better by brute force. Returns where it ended."""
    before = start.copy()
    end = descend(search_view(problem), start, np.random.default_rng(seed))
    assert (start == before).all()
    check_placement(end, problem.num_ranks, problem.allowed)
    reached = score(problem, end).objective
    assert reached <= score(problem, start).objective + 1e-12
    for swapped in swaps(end):
        if problem.allowed[np.arange(len(swapped)), swapped].all():
            assert score(problem, swapped).objective >= reached - 1e-9
    return end


@pytest.mark.parametrize("goal", GOALS)
@some
@given(
    rows=routings(8, 3, min_rows=4, max_rows=30),
    start=placements(8, 4),
    seed=seeds,
    theta=st.sampled_from([0.0, 0.1, 0.5]),
    block=st.sampled_from([5, 8, 30]),
)
def test_no_swap_improves_a_descent(goal, rows, start, seed, theta, block):
    check_descent(layer(goal, 4, 8, rows, block=block, theta=theta), start, seed)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("seed", range(3))
def test_no_swap_improves_a_descent_on_clustered_rows(goal, seed):
    generator = np.random.default_rng(seed)
    problem = layer(goal, 4, 12, clustered_rows(generator, 300, 12, 3, 4), block=128)
    start = generator.permutation(problem.contiguous())
    end = check_descent(problem, start, seed)
    assert score(problem, end).objective < score(problem, start).objective


@pytest.mark.parametrize("goal", GOALS)
def test_no_swap_improves_a_descent_on_a_token_table(goal):
    generator = np.random.default_rng(8)
    rows = clustered_rows(generator, 200, 8, 2, 4)
    token_id = rows.min(axis=1).astype(np.int64) * 10 + generator.integers(0, 3, 200)
    counts = (np.repeat(token_id, 2), rows.reshape(-1), np.ones(400, np.int64))
    demand = token_demand(np.unique(token_id), counts, np.bincount(rows.reshape(-1), minlength=8), 2, 4.0)
    problem = layer(goal, 4, 8, rows, block=64, token_id=token_id, demand=demand)
    check_descent(problem, generator.permutation(problem.contiguous()), 1)


@pytest.mark.parametrize("goal", GOALS)
@some
@given(rows=routings(8, 3, min_rows=4), seed=seeds)
def test_a_descent_keeps_router_groups_on_their_ranks(goal, rows, seed):
    problem = layer(goal, 4, 8, rows, block=10, allowed=group_mask(8, 4, 2))
    check_descent(problem, problem.contiguous(), seed)


@pytest.mark.parametrize("goal", GOALS)
@some
@given(rows=routings(8, 3, min_rows=4), start=placements(8, 4), seed=seeds, bits=st.integers(0, 2**32 - 1))
def test_a_descent_keeps_every_expert_where_it_may_be(goal, rows, start, seed, bits):
    mask = np.array([bits >> i & 1 for i in range(32)], np.bool_).reshape(8, 4)
    mask[np.arange(8), start] = True
    check_descent(layer(goal, 4, 8, rows, block=10, allowed=mask), start, seed)


@pytest.mark.parametrize("goal", GOALS)
@some
@given(rows=routings(8, 3, min_rows=4), start=placements(4, 2), seed=seeds)
def test_no_swap_of_whole_groups_improves_a_descent(goal, rows, start, seed):
    check_descent(contract(layer(goal, 2, 8, rows, block=10), np.arange(8) // 2), start, seed)


@pytest.mark.parametrize("goal", GOALS)
def test_a_descent_from_its_end_stays(goal):
    problem = layer(goal, 4, 12, clustered_rows(np.random.default_rng(1), 200, 12, 3, 4), block=64)
    problem = search_view(problem)
    end = descend(problem, problem.contiguous(), np.random.default_rng(0))
    assert descend(problem, end, np.random.default_rng(5)).tobytes() == end.tobytes()


def test_a_descent_repeats_with_its_seed():
    problem = layer(Goal.BLEND, 4, 12, clustered_rows(np.random.default_rng(1), 200, 12, 3, 4), block=64)
    first, second = (descend(problem, problem.contiguous(), np.random.default_rng(7)) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def kept_inside(joint, placement):
    experts = range(len(placement))
    return sum(int(joint[a, b]) for a in experts for b in experts if a < b and placement[a] == placement[b])


@some
@given(rows=routings(8, 3, min_rows=4), start=placements(8, 4), seed=seeds, bits=st.integers(0, 2**32 - 1))
def test_no_swap_keeps_more_coactivation_inside_than_a_pair_descent(rows, start, seed, bits):
    allowed = np.array([bits >> i & 1 for i in range(32)], np.bool_).reshape(8, 4)
    allowed[np.arange(8), start] = True
    problem = layer(Goal.FANOUT, 4, 8, rows, allowed=allowed)
    joint, before = coactivation(problem), start.copy()
    end = pair_descent(joint, start, problem, np.random.default_rng(seed))
    assert (start == before).all()
    check_placement(end, 4, allowed)
    assert kept_inside(joint, end) >= kept_inside(joint, start)
    for swapped in swaps(end):
        if allowed[np.arange(8), swapped].all():
            assert kept_inside(joint, swapped) <= kept_inside(joint, end)


def test_a_pair_descent_joins_what_is_used_together():
    joint = coactivation(
        layer(Goal.FANOUT, 4, 8, np.tile(np.array([[0, 7], [1, 6], [2, 5], [3, 4]], np.uint16), (9, 1)))
    )
    problem = layer(Goal.FANOUT, 4, 8, np.array([[0, 7]], np.uint16))
    end = pair_descent(joint, problem.contiguous(), problem, np.random.default_rng(0))
    assert [end[e] == end[7 - e] for e in range(4)] == [True] * 4
