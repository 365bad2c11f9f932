"""A layer's traffic as a problem: demand, blocks, router groups, and what makes a placement valid."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Goal
from smoe_solvers.objectives import coactivation, score, search_view
from smoe_solvers.problem import build_problem, check_placement, contract, group_mask, token_demand
from tests.solvers.reference import (
    UNIT,
    clustered_rows,
    lar_of_exact_shuffle,
    layer,
    mean_fanout,
    one_hot,
    placements,
    popularity_of,
    routings,
)

some = settings(max_examples=40, deadline=None)
GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]

# Ids 2 and 5 of a top-2 layer with four experts: id 2 was seen three times, id 5 once.
COUNTS = (np.array([2, 2, 2, 5, 5, 9]), np.array([0, 1, 3, 1, 2, 3]), np.array([3, 2, 1, 1, 1, 8]))
POPULARITY = np.array([30, 50, 10, 10])


def test_token_demand_is_counts_shrunk_to_popularity_by_hand():
    demand = token_demand(np.array([2, 5, 7]), COUNTS, POPULARITY, top_k=2, pseudo=4.0)
    prior = [Fraction(2 * one, 100) for one in (30, 50, 10, 10)]
    by_hand = [
        [(count + 4 * share) / (seen + 4) for count, share in zip(counts, prior, strict=True)]
        for counts, seen in (((3, 2, 0, 1), 3), ((0, 1, 1, 0), 1), ((0, 0, 0, 0), 0))
    ]
    assert demand == pytest.approx(np.array(by_hand, float).T)


@some
@given(
    counts=st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 5)), st.integers(1, 50), min_size=1),
    kinds=st.sets(st.integers(0, 12), min_size=1),
    popularity=st.lists(st.integers(1, 100), min_size=6, max_size=6),
    pseudo=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_every_token_demands_k_activations(counts, kinds, popularity, pseudo):
    token, expert = (np.array(axis) for axis in zip(*counts, strict=True))
    triples = (token, expert, np.array(list(counts.values())))
    demand = token_demand(np.array(sorted(kinds)), triples, np.array(popularity), top_k=3, pseudo=pseudo)
    assert demand.shape == (6, len(kinds))
    assert demand.sum(axis=0) == pytest.approx(np.full(len(kinds), 3.0))
    assert (demand >= 0).all()


def test_more_rows_of_a_token_move_it_away_from_popularity():
    far = []
    for times in (1, 10, 100):
        counts = (np.array([0, 0]), np.array([2, 3]), np.array([times, times]))
        far.append(token_demand(np.array([0]), counts, POPULARITY, top_k=2, pseudo=4.0)[2, 0])
    assert far == sorted(far)
    assert far[-1] == pytest.approx((100 + 4 * 0.2) / 104)


def test_more_ranks_than_experts_are_refused():
    rows = np.array([[0, 1]], np.uint16)
    with pytest.raises(ValueError, match="8 experts cannot be shared by 16 ranks"):
        layer(Goal.LAR, 16, 8, rows)


def test_the_first_ranks_hold_one_more_where_ranks_do_not_divide_the_experts():
    rows = np.array([[0, 1]], np.uint16)
    assert np.bincount(layer(Goal.LAR, 3, 8, rows).contiguous()).tolist() == [3, 3, 2]


def test_contiguous_is_where_every_engine_starts():
    problem = layer(Goal.LAR, 4, 8, np.array([[0, 1]], np.uint16))
    assert problem.contiguous().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (problem.num_experts, problem.num_ranks, problem.num_blocks) == (8, 4, 1)


def test_a_block_s_quota_is_its_rows_shared_and_rounded_up():
    problem = layer(Goal.LAR, 4, 8, clustered_rows(np.random.default_rng(0), 37, 8, 2, 2), block=16)
    assert problem.quota.tolist() == [4, 4, 2]
    assert [int(problem.multiplicity[a:b].sum()) for a, b in pairwise(problem.block_start)] == [16, 16, 5]


@some
@given(rows=routings(6, 2, min_rows=1, max_rows=20))
def test_equal_rows_merge_and_none_is_lost(rows):
    problem = layer(Goal.BLEND, 2, 6, rows, block=7)
    for block, (start, stop) in enumerate(pairwise(problem.block_start)):
        found = sorted(
            tuple(np.flatnonzero(problem.demand[:, kind]))
            for kind, times in zip(problem.kind[start:stop], problem.multiplicity[start:stop], strict=True)
            for _ in range(times)
        )
        assert found == sorted(tuple(sorted(map(int, row))) for row in rows[7 * block : 7 * block + 7])
        assert len(set(problem.kind[start:stop])) == stop - start
    assert set(np.unique(problem.demand)) <= {0, UNIT}
    assert problem.set_weight.sum() == len(rows)


def test_order_inside_a_row_does_not_count():
    rows = clustered_rows(np.random.default_rng(2), 60, 8, 3, 2)
    one, other = layer(Goal.BLEND, 2, 8, rows), layer(Goal.BLEND, 2, 8, rows[:, ::-1])
    assert score(one, one.contiguous()) == score(other, other.contiguous())


def test_building_a_problem_leaves_its_input_alone():
    rows = clustered_rows(np.random.default_rng(2), 60, 8, 3, 2)
    popularity, starts, before = popularity_of(rows, 8), np.array([0, 30, 60]), rows.copy()
    for goal in Goal:
        problem = build_problem(goal, 2, rows, starts, popularity)
        score(problem, problem.contiguous())
    assert (rows == before).all()
    assert (popularity == popularity_of(rows, 8)).all()
    assert starts.tolist() == [0, 30, 60]


# Blocks for searching.


def test_few_blocks_of_few_are_all():
    problem = layer(Goal.LAR, 2, 8, clustered_rows(np.random.default_rng(0), 40, 8, 2, 2), block=10)
    assert problem.few_blocks(4) is problem
    assert problem.few_blocks(9) is problem


@pytest.mark.parametrize(("rows", "count", "chosen"), [(80, 3, [0, 4, 7]), (77, 2, [0, 7]), (75, 4, [0, 2, 5, 7])])
def test_few_blocks_score_their_own_rows_on_the_scale_of_all(rows, count, chosen):
    routed = clustered_rows(np.random.default_rng(5), rows, 8, 2, 2)
    problem = layer(Goal.BLEND, 2, 8, routed, block=10, theta=0.0, mu=0.25)
    few = problem.few_blocks(count)
    assert few.num_blocks == count
    assert few.set_weight.sum() == int(rows * count / problem.num_blocks)
    assert {*map(tuple, few.sets.tolist())} <= {*map(tuple, problem.sets.tolist())}
    blocks = [routed[10 * b : 10 * b + 10] for b in chosen]
    kept, starts = np.concatenate(blocks), np.cumsum([0, *map(len, blocks)])
    for seed in range(5):
        placement = np.random.default_rng(seed).permutation(problem.contiguous())
        lar = lar_of_exact_shuffle(one_hot(kept, 8), range(len(kept)), starts, placement, 2) / 2
        fanout = float(mean_fanout(np.repeat(few.sets, few.set_weight, axis=0), placement))
        found = score(few, placement)
        assert found.lar == pytest.approx(lar)
        assert found.fanout == pytest.approx(fanout)
        assert found.objective == pytest.approx(1 - lar + 0.25 * fanout / 2)


def test_a_set_that_most_rows_have_is_not_lost_when_searching_few_blocks():
    rare = np.array([[0, 2], [5, 6], [2, 3]] * 34)[:100]
    rows = np.random.default_rng(0).permutation(np.concatenate([np.tile([[0, 4]], (900, 1)), rare]))
    few = layer(Goal.BLEND, 2, 8, rows.astype(np.uint16), block=100, theta=0.0).few_blocks(5)
    weight = {tuple(row): int(count) for row, count in zip(few.sets.tolist(), few.set_weight, strict=True)}
    assert weight[(0, 4)] == pytest.approx(450, abs=1)
    assert sum(weight.values()) == 500


# What a goal ignores, and pairs.


@pytest.mark.parametrize("goal", GOALS)
def test_the_search_sees_the_same_objective(goal):
    problem = layer(goal, 4, 8, clustered_rows(np.random.default_rng(4), 50, 8, 3, 3), block=20)
    for seed in range(5):
        placement = np.random.default_rng(seed).permutation(problem.contiguous())
        assert score(search_view(problem), placement).objective == score(problem, placement).objective


@some
@given(rows=routings(6, 3))
def test_coactivation_counts_rows_that_use_both(rows):
    joint = coactivation(layer(Goal.FANOUT, 2, 6, rows))
    for a in range(6):
        for b in range(6):
            both = sum(a in row and b in row for row in rows.tolist()) if a != b else 0
            assert joint[a, b] == both


# Router groups.


def test_group_mask_keeps_each_group_on_its_own_ranks():
    assert group_mask(8, 4, 2).astype(int).tolist() == [[1, 1, 0, 0]] * 4 + [[0, 0, 1, 1]] * 4
    assert group_mask(8, 4, 4).astype(int).tolist() == [row for row in np.eye(4, dtype=int).tolist() for _ in (0, 1)]
    assert group_mask(6, 2, 1).all()


@pytest.mark.parametrize(("experts", "ranks", "groups"), [(8, 4, 2), (160, 16, 8), (256, 8, 8)])
def test_group_mask_allows_the_contiguous_placement(experts, ranks, groups):
    contiguous = np.arange(experts) // (experts // ranks)
    check_placement(contiguous, ranks, group_mask(experts, ranks, groups))


@some
@given(rows=routings(8, 3), placement=placements(4, 2))
def test_whole_groups_score_as_their_experts_do(rows, placement):
    """Four router groups of two on two ranks: a placement of groups is the placement of their experts."""
    unit = np.arange(8) // 2
    for goal in Goal:
        if goal is Goal.ILP and len(rows) % 2:
            continue
        problem = layer(goal, 2, 8, rows, block=9, theta=0.2)
        whole = contract(problem, unit)
        assert whole.num_experts == 4
        by_group, by_expert = score(whole, placement), score(problem, placement[unit])
        assert by_group.objective == pytest.approx(by_expert.objective, abs=1e-12)
        assert (by_group.lar, by_group.fanout) == (by_expert.lar, by_expert.fanout)
        assert by_group.load_deviation == by_expert.load_deviation


def test_coactivation_of_groups_counts_rows_that_use_both_groups():
    rows = np.array([[0, 1, 2], [0, 1, 3], [4, 6, 7], [1, 4, 6]], np.uint16)
    joint = coactivation(contract(layer(Goal.FANOUT, 2, 8, rows), np.arange(8) // 2))
    assert joint.tolist() == [[0, 2, 1, 1], [2, 0, 0, 0], [1, 0, 0, 2], [1, 0, 2, 0]]


def test_contracting_leaves_the_problem_alone():
    problem = layer(Goal.BLEND, 2, 8, clustered_rows(np.random.default_rng(3), 40, 8, 3, 2))
    sets, demand = problem.sets.copy(), problem.demand.copy()
    contract(problem, np.arange(8) // 2)
    assert (problem.sets == sets).all()
    assert (problem.demand == demand).all()


# Valid placements.


@some
@given(placement=placements(8, 4))
def test_balanced_placements_pass(placement):
    check_placement(placement, 4, np.ones((8, 4), np.bool_))


@pytest.mark.parametrize(
    "placement",
    [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2]],
)
def test_an_unbalanced_placement_is_refused(placement):
    with pytest.raises(ValueError, match="were expected"):
        check_placement(np.array(placement), 2, np.ones((8, 2), np.bool_))


def test_a_rank_below_zero_is_refused():
    with pytest.raises(ValueError):  # noqa: PT011 (numpy's own words)
        check_placement(np.array([-1, 0, 1, 1]), 2, np.ones((4, 2), np.bool_))


def test_an_expert_outside_its_group_s_ranks_is_refused():
    with pytest.raises(ValueError, match="router group"):
        check_placement(np.array([0, 2, 1, 1, 0, 2, 3, 3]), 4, group_mask(8, 4, 2))
