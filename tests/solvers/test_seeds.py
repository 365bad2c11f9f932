"""Placements to start from: balanced, allowed, and exact where they claim to be."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Goal
from smoe_solvers.objectives import rank_scores, score
from smoe_solvers.problem import UNIT, check_placement, group_mask
from smoe_solvers.seeds import pair_cut, place_experts, random_placement, rank_demand, soft_kmeans
from tests.solvers.reference import clustered_rows, layer, placements, routings

some = settings(max_examples=40, deadline=None)
MAKERS = (random_placement, soft_kmeans, pair_cut)


def blend(ranks, experts, seed=0, **options):
    return layer(Goal.BLEND, ranks, experts, clustered_rows(np.random.default_rng(seed), 200, experts, 2, 4), **options)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_seeds_are_balanced_and_allowed(maker, groups, seed):
    problem = blend(4, 12, block=64, allowed=group_mask(12, 4, groups))
    check_placement(maker(problem, np.random.default_rng(seed)), 4, problem.allowed)


@pytest.mark.parametrize("maker", MAKERS)
def test_seeds_repeat_with_their_generator_and_differ_without(maker):
    problem = blend(4, 12, block=64)
    drawn = [maker(problem, np.random.default_rng(seed)).tobytes() for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_random_placements_favour_no_placement():
    """Four experts on two ranks: six placements, each a sixth of the draws (five standard deviations)."""
    problem = blend(2, 4)
    generator = np.random.default_rng(0)
    drawn = [random_placement(problem, generator).tobytes() for _ in range(1200)]
    counts = [drawn.count(one) for one in set(drawn)]
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts) < 5 * (1200 * 5 / 36) ** 0.5


@some
@given(affinity=st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=6, max_size=6))
def test_experts_go_where_their_summed_affinity_is_highest(affinity):
    problem = blend(3, 6)
    best = max(sum(affinity[e][g] for e, g in enumerate(names)) for names in set(permutations([0, 0, 1, 1, 2, 2])))
    placement = place_experts(np.array(affinity, np.float64), problem)
    assert np.bincount(placement).tolist() == [2, 2, 2]
    assert sum(affinity[e][g] for e, g in enumerate(placement)) == best


def test_affinity_does_not_leave_the_allowed_ranks():
    allowed = group_mask(4, 4, 2)
    problem = blend(4, 4, allowed=allowed)
    affinity = np.random.default_rng(1).random((4, 4)) + 5 * ~allowed
    legal = [p for p in permutations(range(4)) if all(allowed[e, g] for e, g in enumerate(p))]
    best = max(legal, key=lambda p: sum(affinity[e, g] for e, g in enumerate(p)))
    assert tuple(place_experts(affinity, problem)) == best


@some
@given(rows=routings(6, 2, min_rows=3), placement=placements(6, 3), block=st.sampled_from([4, 9, 30]))
def test_rank_demand_is_what_the_assigned_rows_demand(rows, placement, block):
    """All demand is somewhere, and a rank's own experts get what the score calls local."""
    problem = layer(Goal.LAR, 3, 6, rows, block=block)
    demand = rank_demand(problem, rank_scores(problem.demand, placement, 3))
    assert demand.sum(axis=1).tolist() == (problem.load * UNIT).tolist()
    local = sum(demand[e, g] for e, g in enumerate(placement))
    assert local / (rows.size * UNIT) == pytest.approx(score(problem, placement).lar)


@pytest.mark.parametrize(("maker", "tries"), [(soft_kmeans, 6), (pair_cut, 3)])
def test_seeds_find_clusters_that_never_mix(maker, tries):
    members = np.random.default_rng(3).permutation(12).reshape(4, 3)
    rows = np.array([pair for group in members for pair in product(group, group) if pair[0] != pair[1]], np.uint16)
    problem = layer(Goal.LAR, 4, 12, np.tile(rows, (10, 1)), theta=0.0)
    generator = np.random.default_rng(0)
    assert max(score(problem, maker(problem, generator)).lar for _ in range(tries)) == 1
