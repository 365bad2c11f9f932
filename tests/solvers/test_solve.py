"""From problem to checked placement: enumeration where it is cheap, METIS, and whether a gain is confirmed."""

from dataclasses import fields
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.methods.exact import balanced_placements, count_placements, enumerate_placements
from smoe_solvers.methods.metis import _equal_parts, metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import check_placement, group_mask
from smoe_solvers.solve import confirm, solve, validation_gains
from tests.solvers.reference import balanced, clustered_rows, layer, placements, routings

some = settings(max_examples=15, deadline=None)
METHODS = [Method.CE, Method.CONTIGUOUS, Method.METIS]


def solved(problem, goal, method=Method.CE, effort=Effort.FAST, seed=0, **options):
    return solve(problem, goal, method, effort, np.random.default_rng(seed), **options)


def clustered(goal, ranks, experts, seed=0, **options):
    return layer(goal, ranks, experts, clustered_rows(np.random.default_rng(seed), 300, experts, 2, 5), **options)


# Enumeration.


@pytest.mark.parametrize(
    ("experts", "ranks", "count"), [(8, 2, 35), (8, 4, 105), (6, 3, 15), (6, 1, 1), (4, 4, 1), (12, 2, 462)]
)
def test_all_balanced_placements_are_listed_once(experts, ranks, count):
    listed = [tuple(placement) for placement in balanced_placements(experts, ranks)]
    assert len(listed) == len(set(listed)) == count_placements(experts, ranks) == count
    if ranks**experts < 10**5:
        assert set(listed) == {tuple(placement) for placement in balanced(experts, ranks)}


def test_placements_are_counted_beyond_what_can_be_listed():
    assert count_placements(12, 3) == 5775
    assert count_placements(160, 8) > 10**100


@pytest.mark.parametrize("goal", Goal)
@some
@given(rows=routings(6, 2, min_rows=3))
def test_enumeration_finds_the_best_of_all(goal, rows):
    problem = layer(goal, 3, 6, rows, block=10)
    best = min(score(problem, np.array(placement)).objective for placement in balanced(6, 3))
    assert score(problem, enumerate_placements(problem)).objective == pytest.approx(best, abs=1e-12)


def test_enumeration_keeps_contiguous_where_nothing_is_better():
    rows = np.array(list(permutations(range(6), 2)), np.uint16)
    problem = layer(Goal.FANOUT, 2, 6, rows)
    assert enumerate_placements(problem).tolist() == [0, 0, 0, 1, 1, 1]


def test_enumeration_keeps_router_groups_on_their_ranks():
    problem = clustered(Goal.LAR, 4, 8, allowed=group_mask(8, 4, 2))
    halves = [np.array(half) for half in balanced(4, 2)]
    best = min(score(problem, np.concatenate([low, high + 2])).objective for low, high in product(halves, halves))
    placement = enumerate_placements(problem)
    check_placement(placement, 4, problem.allowed)
    assert score(problem, placement).objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("goal", Goal)
@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_experts_are_solved_by_trying_all(goal, ranks):
    problem = clustered(goal, ranks, 8)
    best = min(score(problem, np.array(placement)).objective for placement in balanced(8, ranks))
    found = solved(problem, goal)
    assert found.origin == "enumeration"
    assert found.objective == pytest.approx(best, abs=1e-12)


# What every method promises.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", Goal)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("experts", [8, 12])
def test_no_method_is_worse_than_contiguous(method, goal, groups, experts):
    problem = clustered(goal, 4, experts, block=64, allowed=group_mask(experts, 4, groups))
    before = {field.name: np.copy(getattr(problem, field.name)) for field in fields(problem) if field.name != "weights"}
    found = solved(problem, goal, method)
    check_placement(found.placement, 4, problem.allowed)
    assert found.objective <= score(problem, problem.contiguous()).objective
    assert found.objective == pytest.approx(score(problem, found.placement).objective, abs=1e-12)
    assert found.stages[0].name == "contiguous"
    for name, array in before.items():
        assert (getattr(problem, name) == array).all(), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", Goal)
def test_one_seed_gives_one_plan_with_every_method(method, goal):
    first, second = (solved(clustered(goal, 4, 12, block=64), goal, method, Effort.DEFAULT, seed=5) for _ in range(2))
    assert first.placement.tobytes() == second.placement.tobytes()
    assert first.stages == second.stages


def test_contiguous_stays_contiguous():
    problem = clustered(Goal.LAR, 4, 12)
    found = solved(problem, Goal.LAR, Method.CONTIGUOUS)
    assert (found.placement == problem.contiguous()).all()
    assert found.origin == "contiguous"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", Goal)
def test_contiguous_clusters_stay_where_they_are(method, goal):
    rows = np.array([pair for g in range(3) for pair in permutations(range(4 * g, 4 * g + 4), 2)], np.uint16)
    problem = layer(goal, 3, 12, np.tile(rows, (6, 1)))
    found = solved(problem, goal, method)
    assert found.objective == score(problem, problem.contiguous()).objective
    assert [sorted(np.flatnonzero(found.placement == found.placement[4 * g])) for g in range(3)] == [
        list(range(4 * g, 4 * g + 4)) for g in range(3)
    ]


def test_contiguous_is_returned_where_metis_is_worse():
    """Goal load alone: contiguous shares every pair between the ranks, METIS joins the pairs, hot ones too."""
    rows = np.repeat(np.array([[0, 4], [1, 5], [2, 6], [3, 7]], np.uint16), [90, 10, 10, 10], axis=0)
    problem = layer(Goal.LAR, 2, 8, rows, theta=1.0)
    seeds = metis_placements(coactivation(problem), 2)
    assert min(score(problem, placement).objective for placement in seeds) > 0.5
    found = solved(problem, Goal.LAR, Method.METIS)
    assert (found.objective, found.origin) == (0, "contiguous")
    assert (found.placement == problem.contiguous()).all()


# METIS.


def test_metis_is_balanced_with_every_seed_and_its_seeds_are_real():
    joint = coactivation(clustered(Goal.FANOUT, 4, 32))
    placements = metis_placements(joint, 4)
    assert len(placements) == 40
    for placement in placements:
        check_placement(placement, 4, np.ones((32, 4), np.bool_))
    inside = {int(sum(joint[placement == g][:, placement == g].sum() for g in range(4))) for placement in placements}
    assert len(inside) > 5
    again = metis_placements(joint, 4, seeds=3)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in placements[:3]]


@pytest.mark.parametrize(("experts", "ranks"), [(8, 8), (12, 3), (60, 6), (24, 8), (9, 3), (6, 1)])
def test_metis_is_balanced_whatever_the_size(experts, ranks):
    joint = coactivation(clustered(Goal.FANOUT, ranks, experts, seed=experts))
    for placement in metis_placements(joint, ranks, seeds=10):
        check_placement(placement, ranks, np.ones((experts, ranks), np.bool_))


def test_metis_places_experts_no_row_uses():
    rows = np.tile(np.array([[0, 5], [1, 6]], np.uint16), (20, 1))
    joint = coactivation(layer(Goal.FANOUT, 4, 8, rows))
    for placement in metis_placements(joint, 4, seeds=5):
        check_placement(placement, 4, np.ones((8, 4), np.bool_))


def test_metis_leaves_the_graph_alone():
    joint = coactivation(clustered(Goal.FANOUT, 4, 12))
    before = joint.copy()
    metis_placements(joint, 4, seeds=3)
    assert (joint == before).all()


def test_metis_keeps_clusters_whole_that_never_mix():
    members = np.random.default_rng(3).permutation(16).reshape(4, 4)
    rows = np.array([pair for group in members for pair in permutations(group.tolist(), 2)], np.uint16)
    problem = layer(Goal.FANOUT, 4, 16, rows)
    assert min(score(problem, one).fanout for one in metis_placements(coactivation(problem), 4, seeds=5)) == 1


@some
@given(rows=routings(8, 3, min_rows=4), start=placements(8, 4))
def test_repair_leaves_equal_parts_alone(rows, start):
    joint = coactivation(layer(Goal.FANOUT, 4, 8, rows))
    assert _equal_parts(start.copy(), joint, 4).tolist() == start.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_repair_moves_no_more_experts_than_needed(seed):
    generator = np.random.default_rng(seed)
    joint = coactivation(clustered(Goal.FANOUT, 4, 12, seed))
    unequal = generator.integers(0, 4, 12).astype(np.int32)
    surplus = np.maximum(np.bincount(unequal, minlength=4) - 3, 0).sum()
    repaired = _equal_parts(unequal.copy(), joint, 4)
    check_placement(repaired, 4, np.ones((12, 4), np.bool_))
    assert (repaired != unequal).sum() == surplus


def test_repair_makes_the_move_that_loses_least():
    """Expert 2 hangs on rank 0 by one row and would find two on rank 1; 0 and 1 belong together."""
    joint = np.zeros((6, 6), np.int64)
    for a, b, rows in ((0, 1, 9), (0, 2, 1), (2, 4, 2), (3, 1, 3)):
        joint[a, b] = joint[b, a] = rows
    assert _equal_parts(np.array([0, 0, 0, 0, 1, 1], np.int32), joint, 2).tolist() == [0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("goal", Goal)
def test_metis_method_is_the_best_of_its_seeds(goal):
    problem = clustered(goal, 4, 32, block=100)
    reached = [score(problem, placement).objective for placement in metis_placements(coactivation(problem), 4)]
    assert max(reached) > min(reached) + 1e-3
    assert solved(problem, goal, Method.METIS).objective == pytest.approx(min(reached), abs=1e-12)


@pytest.mark.parametrize("goal", Goal)
def test_search_from_metis_seeds_is_never_worse_than_metis(goal):
    problem = clustered(goal, 4, 16, block=20)
    found = solved(problem, goal, metis_seeds=True)
    assert found.objective <= solved(problem, goal, Method.METIS).objective + 1e-12
    assert found.stopped["seeds"] == solved(problem, goal).stopped["seeds"] + 40


# Confirming a gain.


def test_a_gain_is_confirmed_beyond_two_standard_errors_by_hand():
    judged = confirm(np.array([1.0, 2.0, 3.0]))
    assert judged.mean_gain == pytest.approx(2)
    assert judged.two_standard_errors == pytest.approx(2 / 3**0.5)
    assert judged.confirmed
    assert not confirm(np.array([0.0, 2.0, 4.0]) - 0.5).confirmed


@pytest.mark.parametrize("gains", [[0.0, 0.0, 0.0], [5.0], [-1.0, -1.1, -0.9], [0.1, -0.1, 0.1, -0.1]])
def test_no_gain_is_confirmed_from_nothing_or_from_one_block(gains):
    assert not confirm(np.array(gains)).confirmed


def test_validation_gains_are_differences_from_contiguous_block_by_block():
    rows = clustered_rows(np.random.default_rng(0), 96, 8, 2, 2)
    blocks = [layer(Goal.BLEND, 2, 8, rows[start : start + 32]) for start in (0, 32, 64)]
    placement = solved(layer(Goal.BLEND, 2, 8, rows), Goal.BLEND).placement
    by_hand = [score(b, b.contiguous()).objective - score(b, placement).objective for b in blocks]
    assert validation_gains(blocks, placement).tolist() == by_hand
    assert not validation_gains(blocks, blocks[0].contiguous()).any()
