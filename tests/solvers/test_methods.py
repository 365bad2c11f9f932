"""The methods beside the Cross-Entropy search: exact answers, partitioners, greedy, spectral, local search."""

import sys
from dataclasses import astuple, replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import OptimizeResult

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.methods import mtkahypar as mtkahypar_module
from smoe_solvers.methods.alternating import alternating
from smoe_solvers.methods.ce_plain import _draw_and_repair, ce_plain
from smoe_solvers.methods.exact import balanced_placements, count_placements, enumerate_placements
from smoe_solvers.methods.ils import ils
from smoe_solvers.methods.kmeans2d import kmeans2d
from smoe_solvers.methods.load import load
from smoe_solvers.methods.metis import metis, metis_placements
from smoe_solvers.methods.mtkahypar import mtkahypar
from smoe_solvers.methods.partition import equal_parts
from smoe_solvers.methods.programme import build_programme, checked, prove
from smoe_solvers.methods.spectral import embedding, spectral
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Weights, check_placement, group_mask
from smoe_solvers.solve import SEARCHES, solve
from tests.solvers.reference import balanced, clustered_rows, layer, placements, routings, swaps

GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]
some = settings(max_examples=15, deadline=None)


def clustered(goal, ranks, experts, seed=0, rows=300, top_k=2, **options):
    drawn = clustered_rows(np.random.default_rng(seed), rows, experts, min(top_k, experts), 5)
    return layer(goal, ranks, experts, drawn, **options)


# Enumeration.


@pytest.mark.parametrize(
    ("experts", "ranks", "count"), [(8, 2, 35), (8, 4, 105), (6, 3, 15), (6, 1, 1), (4, 4, 1), (12, 2, 462)]
)
def test_all_balanced_placements_are_listed_once(experts, ranks, count):
    listed = [tuple(placement) for placement in balanced_placements(experts, ranks)]
    assert len(listed) == len(set(listed)) == count_placements(experts, ranks) == count
    if ranks**experts < 10**5:
        assert set(listed) == {tuple(placement) for placement in balanced(experts, ranks)}


@pytest.mark.parametrize(("experts", "ranks"), [(5, 2), (7, 3), (8, 3), (5, 4), (7, 5)])
def test_placements_on_unequal_ranks_are_listed_once_up_to_names(experts, ranks):
    """Against all assignments of experts to ranks with the right sizes, ranks of one size having no names."""
    sizes = [experts // ranks + (g < experts % ranks) for g in range(ranks)]
    groups = set()
    for placement in product(range(ranks), repeat=experts):
        if [placement.count(g) for g in range(ranks)] == sizes:
            groups.add(frozenset(tuple(e for e in range(experts) if placement[e] == g) for g in range(ranks)))
    listed = [placement.tolist() for placement in balanced_placements(experts, ranks)]
    assert all([placement.count(g) for g in range(ranks)] == sizes for placement in listed)
    found = [frozenset(tuple(e for e in range(experts) if one[e] == g) for g in range(ranks)) for one in listed]
    assert set(found) == groups
    assert len(found) == len(groups) == count_placements(experts, ranks)


def test_placements_are_counted_beyond_what_can_be_listed():
    assert count_placements(12, 3) == 5775
    assert count_placements(160, 8) > 10**100


@pytest.mark.parametrize("goal", GOALS)
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
def test_repair_leavesequal_parts_alone(rows, start):
    joint = coactivation(layer(Goal.FANOUT, 4, 8, rows))
    assert equal_parts(start.copy(), joint, 4).tolist() == start.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_repair_moves_no_more_experts_than_needed(seed):
    generator = np.random.default_rng(seed)
    joint = coactivation(clustered(Goal.FANOUT, 4, 12, seed))
    unequal = generator.integers(0, 4, 12).astype(np.int32)
    surplus = np.maximum(np.bincount(unequal, minlength=4) - 3, 0).sum()
    repaired = equal_parts(unequal.copy(), joint, 4)
    check_placement(repaired, 4, np.ones((12, 4), np.bool_))
    assert (repaired != unequal).sum() == surplus


def test_repair_makes_the_move_that_loses_least():
    """Expert 2 hangs on rank 0 by one row and would find two on rank 1; 0 and 1 belong together."""
    joint = np.zeros((6, 6), np.int64)
    for a, b, rows in ((0, 1, 9), (0, 2, 1), (2, 4, 2), (3, 1, 3)):
        joint[a, b] = joint[b, a] = rows
    assert equal_parts(np.array([0, 0, 0, 0, 1, 1], np.int32), joint, 2).tolist() == [0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("goal", GOALS)
def test_metis_is_the_best_of_forty_real_seeds(goal):
    """Another seed, another forty; each time about as good as the forty seeds counted by hand."""
    problem = clustered(goal, 4, 32, block=100)
    reached = [score(problem, placement).objective for placement in metis_placements(coactivation(problem), 4)]
    found = [metis(problem, np.random.default_rng(seed)) for seed in range(3)]
    assert len({placement.tobytes() for placement in found}) > 1
    assert max(score(problem, placement).objective for placement in found) < np.mean(reached)


def test_metis_seeds_are_added_to_the_search():
    problem = clustered(Goal.BLEND, 4, 16, block=20)
    found, alone = (
        solve(problem, Goal.BLEND, Method.CE, Effort.FAST, np.random.default_rng(0), metis_seeds=seeds)
        for seeds in (True, False)
    )
    best = min(score(problem, one).objective for one in metis_placements(coactivation(problem), 4))
    assert found.objective <= best + 1e-12
    assert found.stopped["seeds"] == alone.stopped["seeds"] + 40


# HiGHS.


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("experts", "ranks"), [(6, 3), (8, 2), (7, 2)])
def test_highs_proves_what_enumeration_finds(goal, experts, ranks):
    problem = clustered(goal, ranks, experts, block=20, rows=40)
    best = score(problem, enumerate_placements(problem)).objective
    proof = prove(problem)
    assert proof.proved
    assert score(problem, proof.placement).objective == pytest.approx(best, abs=1e-9)
    assert proof.bound == pytest.approx(best, abs=1e-6)


def test_highs_keeps_router_groups_on_their_ranks():
    problem = clustered(Goal.FANOUT, 4, 8, allowed=group_mask(8, 4, 2))
    best = score(problem, enumerate_placements(problem)).objective
    assert score(problem, prove(problem).placement).objective == pytest.approx(best)


def answer(problem, placement, **claims):
    """What HiGHS would return for a placement, as scipy hands it on."""
    x = (np.array(placement)[:, None] == np.arange(problem.num_ranks)).astype(float).reshape(-1)
    given = {"x": x, "status": 0, "fun": 0.0, "mip_dual_bound": 0.0, "message": "Optimization terminated successfully."}
    return OptimizeResult(given | claims)


@pytest.mark.parametrize("placement", [[0, 0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]])
def test_a_solution_called_optimal_that_breaks_a_constraint_is_dropped(placement):
    """HiGHS has called infeasible integer points optimal after presolve."""
    problem = clustered(Goal.FANOUT, 2, 8, allowed=group_mask(8, 2, 2))
    proof = checked(problem, answer(problem, placement))
    assert proof.placement is None
    assert not proof.proved
    assert "cannot be" in proof.note


def test_an_optimum_that_is_not_what_it_claims_proves_nothing():
    """The placement is legal, the claimed objective is another's: it may be used, but is no proof."""
    problem = clustered(Goal.FANOUT, 2, 8)
    counted = score(problem, problem.contiguous()).objective
    proof = checked(problem, answer(problem, problem.contiguous(), fun=counted - 0.01, mip_dual_bound=counted - 0.01))
    assert (proof.proved, proof.bound) == (False, None)
    assert "claimed" in proof.note
    true = checked(problem, answer(problem, problem.contiguous(), fun=counted, mip_dual_bound=counted))
    assert (true.proved, true.note) == (True, "")


def test_an_incumbent_at_the_time_limit_is_used_and_a_missing_one_is_said():
    """An incumbent must not be lost with the status, nor assumed where there is none."""
    problem = clustered(Goal.FANOUT, 2, 8)
    late = {"status": 1, "message": "Time limit reached. (HiGHS Status 13: Time limit reached)", "fun": 1.5}
    kept = checked(problem, answer(problem, [0, 1] * 4, **late, mip_dual_bound=1.2))
    assert kept.placement.tolist() == [0, 1] * 4
    assert (kept.proved, kept.bound) == (False, 1.2)
    assert "Time limit" in kept.note
    none = checked(
        problem, OptimizeResult(x=None, fun=None, mip_dual_bound=None, **{k: late[k] for k in ("status", "message")})
    )
    assert (none.placement, none.proved, none.bound) == (None, False, None)
    assert "no placement" in none.note


@pytest.mark.parametrize("goal", GOALS)
def test_counts_of_any_size_build_the_same_programme(goal):
    """Coefficients of many orders of magnitude make feasible models infeasible: counts enter as shares."""
    problem = clustered(goal, 2, 8, block=20, rows=40)
    million = 10**6
    large = replace(
        problem,
        multiplicity=problem.multiplicity * million,
        quota=problem.quota * million,
        set_weight=problem.set_weight * million,
        load=problem.load * million,
        activations=problem.activations * million,
        weights=Weights(*(price / million for price in astuple(problem.weights))),
    )
    small, big = build_programme(problem), build_programme(large)
    for one, other in zip(small.cost, big.cost, strict=True):
        assert np.allclose(one, other, rtol=1e-12)
    for one, other in zip(small.entries, big.entries, strict=True):
        assert np.allclose(one[2], other[2], rtol=1e-12)
        assert np.abs(other[2]).max() <= 1
    assert prove(large).placement.tolist() == prove(problem).placement.tolist()


# Every other method.

OTHERS = [method for name, method in SEARCHES.items() if name is not Method.CONTIGUOUS]


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize(
    ("experts", "ranks", "groups"), [(12, 4, 1), (16, 4, 2), (13, 4, 1), (8, 8, 1), (6, 1, 1), (9, 2, 1)]
)
def test_every_rank_gets_its_share_and_every_expert_a_place(method, experts, ranks, groups):
    """Also unequal ranks, router groups kept whole, one rank, and as many ranks as experts."""
    allowed = group_mask(experts, ranks, groups) if groups > 1 else None
    problem = clustered(Goal.BLEND, ranks, experts, block=64, allowed=allowed)
    check_placement(method(problem, np.random.default_rng(1)), ranks, problem.allowed)


@pytest.mark.parametrize("method", OTHERS)
def test_experts_no_row_uses_are_placed(method):
    rows = np.tile(np.array([[0, 5], [1, 6]], np.uint16), (20, 1))
    problem = layer(Goal.BLEND, 4, 8, rows)
    check_placement(method(problem, np.random.default_rng(0)), 4, problem.allowed)


@pytest.mark.parametrize("method", [metis, mtkahypar, kmeans2d, spectral, alternating, ils, ce_plain])
def test_clusters_that_never_mix_are_found(method):
    members = np.random.default_rng(3).permutation(16).reshape(4, 4)
    rows = np.array([three for group in members for three in permutations(group.tolist(), 3)], np.uint16)
    problem = layer(Goal.FANOUT, 4, 16, rows)
    assert score(problem, method(problem, np.random.default_rng(0))).fanout == 1


@pytest.mark.parametrize("method", [metis, kmeans2d, spectral, alternating, ils, ce_plain])
def test_a_method_told_to_stop_still_answers(method):
    problem = clustered(Goal.LAR, 4, 12, block=64)
    asked = []
    placement = method(problem, np.random.default_rng(0), lambda: asked.append(1) or True)
    check_placement(placement, 4, problem.allowed)
    assert len(asked) == 1


def test_load_is_greedy_by_hand():
    rows = np.repeat(np.array([[0, 1], [2, 3], [4, 5]], np.uint16), [50, 30, 10], axis=0)
    problem = layer(Goal.LAR, 2, 6, rows)
    assert load(problem, np.random.default_rng(0)).tolist() == [0, 1, 0, 1, 0, 1]
    loads = layer(Goal.LAR, 2, 4, np.repeat(np.array([[0, 1], [2, 3], [1, 3]], np.uint16), [9, 4, 3], axis=0)).load
    assert loads.tolist() == [9, 12, 4, 7]  # 12 | 9, then 7 joins 9, and 4 fills what is left
    assert load(
        layer(Goal.LAR, 2, 4, np.repeat(np.array([[0, 1], [2, 3], [1, 3]], np.uint16), [9, 4, 3], axis=0)), None
    ).tolist() == [1, 0, 0, 1]


def test_km1_of_mtkahypar_is_fan_out():
    """The partitioner's own figure against ours; its answer beats forty METIS seeds on it."""
    problem = clustered(Goal.FANOUT, 4, 32, rows=600, top_k=4)
    found = score(problem, mtkahypar(problem, np.random.default_rng(0))).fanout
    seeds = [score(problem, placement).fanout for placement in metis_placements(coactivation(problem), 4)]
    assert found < np.mean(seeds)


def test_a_spectral_embedding_separates_what_never_meets():
    joint = np.kron(np.eye(3, dtype=np.int64), np.ones((4, 4), np.int64)) - np.eye(12, dtype=np.int64)
    points = embedding(joint, 3)
    cosine = points @ points.T
    assert np.allclose(cosine, np.kron(np.eye(3), np.ones((4, 4))), atol=1e-9)


def test_local_search_ends_where_no_swap_helps():
    problem = clustered(Goal.LAR, 4, 12, block=100)
    placement = ils(problem, np.random.default_rng(0))
    reached = score(problem, placement).objective
    assert min(score(problem, swapped).objective for swapped in swaps(placement)) >= reached - 1e-12


def test_plain_draws_are_repaired_by_the_least_moves():
    probability = np.full((6, 3), 0.1)
    probability[:, 0] = 0.8
    drawn = _draw_and_repair(probability, np.random.default_rng(0).random((50, 6)), np.array([2, 2, 2]))
    assert {tuple(np.bincount(row, minlength=3)) for row in drawn} == {(2, 2, 2)}


@pytest.mark.parametrize("name", ["pymetis", "mtkahypar"])
def test_a_package_that_is_not_installed_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    mtkahypar_module._library.cache_clear()
    problem = clustered(Goal.FANOUT, 2, 8)
    with pytest.raises(ModuleNotFoundError) as caught:
        {"pymetis": metis, "mtkahypar": mtkahypar}[name](problem, np.random.default_rng(0))
    assert caught.value.name == name
