"""Bounds hold for every placement there is, and are tight where that is known."""

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.bounds import (
    AFFORDABLE,
    Certificate,
    Proved,
    certificate,
    certify,
    dual_bound,
    largest_sum,
    supporting_lines,
)
from smoe_solvers.choices import Effort, Goal
from smoe_solvers.methods.exact import balanced_placements, enumerate_placements
from smoe_solvers.objectives import coactivation, score
from tests.solvers.reference import clustered_rows, layer, routings

GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]
few = settings(max_examples=15, deadline=None)


def inside(weights, placement):
    """Summed weight of all ordered pairs on one rank, the diagonal included, counted pair by pair."""
    everyone = range(len(placement))
    return sum(weights[a, b] for a in everyone for b in everyone if placement[a] == placement[b])


def symmetric(experts):
    """Weights of any sign, symmetric."""
    count = experts * (experts + 1) // 2
    return st.lists(st.integers(-5, 9), min_size=count, max_size=count).map(lambda drawn: _symmetric(experts, drawn))


def _symmetric(experts, drawn):
    weights = np.zeros((experts, experts))
    weights[np.triu_indices(experts)] = drawn
    return weights + np.triu(weights, 1).T


@pytest.mark.parametrize(("experts", "ranks"), [(6, 3), (6, 2), (7, 3), (5, 2), (4, 4)])
@few
@given(data=st.data())
def test_no_placement_keeps_more_than_the_bound(experts, ranks, data):
    weights = data.draw(symmetric(experts))
    most = max(inside(weights, placement) for placement in balanced_placements(experts, ranks))
    assert largest_sum(weights, ranks)[0] >= most


@few
@given(weights=symmetric(6), multiplier=symmetric(6))
def test_any_multipliers_give_a_valid_bound(weights, multiplier):
    """Weak duality: stopping early, or never starting, may only make the bound loose."""
    most = max(inside(weights, placement) for placement in balanced_placements(6, 3))
    assert dual_bound(weights, multiplier, 3) >= most - 1e-9


def test_bound_is_tight_on_planted_clusters():
    cluster = np.random.default_rng(0).permutation(np.arange(16) % 4)
    weights = (cluster[:, None] == cluster).astype(float)
    bound, relaxed = largest_sum(weights, 4)
    assert bound == pytest.approx(weights.sum(), rel=1e-4)
    assert np.allclose(relaxed, weights, atol=0.01)


def test_bound_does_not_depend_on_the_size_of_counts():
    rows = clustered_rows(np.random.default_rng(0), 200, 12, 3, 3)
    joint = coactivation(layer(Goal.FANOUT, 3, 12, rows)).astype(float)
    assert largest_sum(joint * 1e12, 3)[0] == pytest.approx(1e12 * largest_sum(joint, 3)[0], rel=1e-6)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("experts", "ranks", "top_k"), [(8, 2, 3), (8, 4, 2), (7, 3, 3)])
def test_certificate_holds_for_the_best_of_all_placements(goal, experts, ranks, top_k):
    rows = clustered_rows(np.random.default_rng(experts), 120, experts, top_k, 3)
    problem = layer(goal, ranks, experts, rows, block=40)
    best = enumerate_placements(problem)
    found = certify(problem, best, Effort.DEFAULT)
    objective = score(problem, best).objective
    assert found.kind is Proved.BOUND
    assert 0 < found.value <= objective
    assert found.gap == pytest.approx((objective - found.value) / objective)
    joint = coactivation(problem)
    kept = [inside(joint, placement) / joint.sum() for placement in balanced_placements(experts, ranks)]
    assert max(kept) <= found.pairs_bound <= max(kept) + 0.1
    assert found.pairs == pytest.approx(inside(joint, best) / joint.sum())


@pytest.mark.parametrize("goal", GOALS)
def test_certificate_holds_for_the_demand_of_a_token_table(goal):
    generator = np.random.default_rng(4)
    rows = clustered_rows(generator, 90, 8, 2, 3)
    demand = generator.dirichlet(np.full(8, 0.3), 9).T * 2
    problem = layer(goal, 4, 8, rows, block=30, token_id=np.arange(90) % 9, demand=demand)
    best = score(problem, enumerate_placements(problem)).objective
    assert certify(problem, problem.contiguous(), Effort.DEFAULT).value <= best


def test_fan_out_of_pairs_is_proved_to_four_digits():
    """With two experts a row fan-out is 2 less the pairs kept, so its bound is as tight as theirs."""
    members = np.random.default_rng(3).permutation(16).reshape(4, 4)
    rows = np.array([pair for group in members for pair in permutations(group.tolist(), 2)], np.uint16)
    problem = layer(Goal.FANOUT, 4, 16, rows)
    best = np.zeros(16, np.int32)
    for rank, group in enumerate(members):
        best[group] = rank
    assert certify(problem, best, Effort.DEFAULT).gap < 2e-3
    assert certify(problem, problem.contiguous(), Effort.DEFAULT).gap > 0.2


@few
@given(rows=routings(8, 3, min_rows=6))
def test_certificate_holds_for_rows_of_any_kind(rows):
    problem = layer(Goal.BLEND, 4, 8, rows, block=10)
    best = enumerate_placements(problem)
    found = certify(problem, best, Effort.DEFAULT)
    assert found.value <= score(problem, best).objective


@pytest.mark.parametrize(("size", "ranks", "capacity"), [(6, 4, 16), (6, 8, 8), (4, 2, 3), (3, 3, 1), (1, 2, 2)])
def test_lines_under_fan_out_touch_it_and_cross_it_nowhere(size, ranks, capacity):
    """Against every way to put the experts of a row on ranks."""
    points = set()
    for cuts in combinations(range(size + ranks - 1), ranks - 1):
        edges = [-1, *cuts, size + ranks - 1]
        parts = [after - before - 1 for before, after in pairwise(edges)]
        if max(parts) <= capacity:
            points.add((sum(part * (part - 1) // 2 for part in parts), sum(part > 0 for part in parts)))
    heights, slopes = supporting_lines(size, ranks, capacity)
    for height, slope in zip(heights, slopes, strict=True):
        distance = [used - (height + slope * pairs) for pairs, used in points]
        assert min(distance) == pytest.approx(0, abs=1e-9)


def test_effort_decides_what_is_bounded():
    rows = clustered_rows(np.random.default_rng(0), 60, 8, 2, 2)
    problem = layer(Goal.BLEND, 2, 8, rows)
    assert certify(problem, problem.contiguous(), Effort.FAST) == Certificate()
    assert AFFORDABLE[Effort.DEFAULT] == 128
    one_rank = layer(Goal.BLEND, 1, 8, rows)
    assert certify(one_rank, one_rank.contiguous(), Effort.DEFAULT) == Certificate()


def test_a_certificate_says_what_a_bound_is_worth():
    assert certificate(2.0, 1.5) == Certificate(Proved.BOUND, 1.5, 0.25)
    assert certificate(2.0, 2.0, proved=True) == Certificate(Proved.OPTIMAL, 2.0, 0.0)
    assert certificate(2.0, None) == Certificate(Proved.UNKNOWN, None, None)
