"""The Cross-Entropy search: what it promises of its answers."""

from dataclasses import fields
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from smoe_solvers.choices import Effort, Goal
from smoe_solvers.cross_entropy import cross_entropy
from smoe_solvers.descent import descend
from smoe_solvers.methods.exact import enumerate_placements
from smoe_solvers.objectives import score
from smoe_solvers.problem import build_problem, check_placement, contract, group_mask
from smoe_solvers.solve import confirm, validation_gains
from tests.solvers.reference import balanced, clustered_rows, clusters, cut_down, in_blocks, layer, popularity_of, swaps

GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]


# The search.


@cache
def best_of_cut_down(goal, ranks, case):
    problem = cut_down(goal, ranks, case)
    return score(problem, enumerate_placements(problem)).objective


@cache
def best_in_blocks(goal, block):
    return enumerate_placements(in_blocks(goal, block))


@pytest.mark.parametrize(("effort", "share"), [(Effort.FAST, 0.7), (Effort.DEFAULT, 0.9)])
@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
@pytest.mark.parametrize("ranks", [2, 3])
def test_search_reaches_the_best_of_all_placements_in_nearly_all_seeds(goal, ranks, effort, share):
    hits = []
    for case in range(3):
        problem = cut_down(goal, ranks, case)
        best = best_of_cut_down(goal, ranks, case)
        for seed in range(4):
            reached = cross_entropy(problem, goal, effort, np.random.default_rng(seed)).objective
            assert reached >= best - 1e-12
            hits.append(reached <= best + 1e-12)
    assert np.mean(hits) >= share


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("effort", [Effort.FAST, Effort.DEFAULT])
@pytest.mark.parametrize("block", [128, 20])
def test_search_is_never_worse_than_contiguous_or_a_seed(goal, effort, block):
    """At 20 rows a block the search sees 12 of 20 blocks, the promise is for all."""
    problem = in_blocks(goal, block)
    generator = np.random.default_rng(1)
    seeds = {f"seed {i}": generator.permutation(problem.contiguous()) for i in range(3)}
    seeds["best"] = best_in_blocks(goal, block)
    found = cross_entropy(problem, goal, effort, np.random.default_rng(0), seeds)
    check_placement(found.placement, 3, problem.allowed)
    assert found.objective == pytest.approx(score(problem, found.placement).objective, abs=1e-12)
    for placement in [problem.contiguous(), *seeds.values()]:
        assert found.objective <= score(problem, placement).objective + 1e-12


@pytest.mark.parametrize("case", range(4))
def test_a_seed_that_only_unseen_blocks_favour_is_not_lost(case):
    """The search looks at twelve of twenty blocks; here the others are long and routed in another way."""
    generator = np.random.default_rng(case)
    seen = set(np.linspace(0, 19, 12).round().astype(int).tolist())
    near, far = (clustered_rows(np.random.default_rng([case, i]), 500, 24, 3, 5) for i in (0, 1))
    blocks = [near[8 * b : 8 * b + 8] if b in seen else far[40 * (b % 8) : 40 * (b % 8) + 40] for b in range(20)]
    rows, starts = np.concatenate(blocks), np.cumsum([0, *map(len, blocks)])
    problem = build_problem(Goal.LAR, 4, rows, starts, popularity_of(rows, 24))
    polished = [descend(problem, generator.permutation(problem.contiguous()), generator) for _ in range(20)]
    seed = min(polished, key=lambda placement: score(problem, placement).objective)
    found = cross_entropy(problem, Goal.LAR, Effort.FAST, generator, {"whole": seed})
    assert found.objective <= score(problem, seed).objective + 1e-12


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("effort", [Effort.FAST, Effort.DEFAULT])
def test_no_swap_improves_the_answer_on_all_blocks(goal, effort):
    problem = in_blocks(goal, 20)
    for seed in range(3):
        found = cross_entropy(problem, goal, effort, np.random.default_rng(seed))
        for swapped in swaps(found.placement):
            assert score(problem, swapped).objective >= found.objective - 1e-9


def test_rounds_reach_further_than_the_seeds_they_start_from():
    gains = []
    for case in range(6):
        problem = layer(Goal.LAR, 4, 24, clustered_rows(np.random.default_rng(case), 600, 24, 4, 7), block=256)
        found = cross_entropy(problem, Goal.LAR, Effort.DEFAULT, np.random.default_rng(0))
        reached = {stage.name: stage.objective for stage in found.stages}
        gains.append(reached["seeds polished"] - reached["cross-entropy"])
    assert sum(gain > 1e-6 for gain in gains) >= 4


@pytest.mark.parametrize("goal", GOALS)
def test_search_returns_a_seed_nothing_beats(goal):
    """Rows that stay inside scattered clusters: the seed that holds them is the only optimum."""
    members = np.random.default_rng(2).permutation(12).reshape(3, 4)
    rows = np.array([pair for group in members for pair in product(group, group) if pair[0] < pair[1]], np.uint16)
    problem = layer(goal, 3, 12, np.tile(rows, (8, 1)))
    seed = np.empty(12, np.int32)
    seed[members] = np.arange(3)[:, None]
    found = cross_entropy(problem, goal, Effort.FAST, np.random.default_rng(0), {"planted": seed})
    assert clusters(found.placement) == clusters(seed)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("effort", [Effort.FAST, Effort.DEFAULT])
def test_one_seed_gives_one_plan(goal, effort):
    first, second = (cross_entropy(in_blocks(goal, 20), goal, effort, np.random.default_rng([3, 17])) for _ in range(2))
    assert first.placement.tobytes() == second.placement.tobytes()
    assert (first.objective, first.origin, first.stopped) == (second.objective, second.origin, second.stopped)
    assert first.stages == second.stages


@pytest.mark.parametrize("goal", GOALS)
def test_search_leaves_the_problem_and_its_seeds_alone(goal):
    problem = in_blocks(goal, 20)
    before = {field.name: np.copy(getattr(problem, field.name)) for field in fields(problem) if field.name != "weights"}
    seed = np.random.default_rng(0).permutation(problem.contiguous())
    given_seed = seed.copy()
    cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0), {"given": seed})
    for name, array in before.items():
        assert (getattr(problem, name) == array).all(), name
    assert (seed == given_seed).all()


@pytest.mark.parametrize("goal", GOALS)
def test_stages_never_lose_on_the_blocks_that_are_searched(goal):
    problem = cut_down(goal, 3, 1)
    found = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0))
    names = [stage.name for stage in found.stages]
    assert names == ["contiguous", "seeds", "seeds polished", "cross-entropy", "polish"]
    reached = [stage.objective for stage in found.stages]
    assert reached[0] == pytest.approx(score(problem, problem.contiguous()).objective)
    assert all(after <= before + 1e-12 for before, after in pairwise(reached))
    assert found.objective <= reached[-1] + 1e-12
    assert found.stopped["rounds"] == found.settings["rounds"] == 12
    assert found.reasons == {"rounds": 12.0}


def test_a_search_that_meets_its_bound_stops_at_once_as_proved():
    """Rows that never mix: nothing can be missed, so the first descent is the proof."""
    rows = np.repeat(np.array([[0, 3, 6], [1, 4, 7], [2, 5, 8]], np.uint16), 40, axis=0)
    found = cross_entropy(layer(Goal.LAR, 3, 9, rows, theta=0.0), Goal.LAR, Effort.DEFAULT, np.random.default_rng(0))
    assert found.objective == pytest.approx(0, abs=1e-12)
    assert found.stopped["rounds"] == 0
    assert set(found.reasons) == {"optimum"}


@pytest.mark.parametrize("goal", GOALS)
def test_a_time_limit_that_is_over_ends_the_rounds_and_keeps_what_was_found(goal):
    problem = in_blocks(goal, 20)
    found = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0), time_limit=0.0)
    assert found.stopped["rounds"] == 0
    assert "seconds" in found.reasons
    check_placement(found.placement, 3, problem.allowed)
    assert found.objective < score(problem, problem.contiguous()).objective
    without = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0))
    assert "seconds" not in without.reasons


def test_fast_has_no_rounds():
    found = cross_entropy(cut_down(Goal.LAR, 3, 0), Goal.LAR, Effort.FAST, np.random.default_rng(0))
    assert found.stopped["rounds"] == 0
    assert "cross-entropy" not in [stage.name for stage in found.stages]


def test_search_keeps_router_groups_on_their_ranks_and_finds_the_best_there():
    """Two groups of six experts on two ranks each: a hundred placements, tried by hand."""
    problem = cut_down(Goal.BLEND, 4, 2, allowed=group_mask(12, 4, 2))
    halves = [np.array(half) for half in balanced(6, 2)]
    best = min(score(problem, np.concatenate([low, high + 2])).objective for low, high in product(halves, halves))
    for seed in range(5):
        found = cross_entropy(problem, Goal.BLEND, Effort.DEFAULT, np.random.default_rng(seed))
        check_placement(found.placement, 4, problem.allowed)
        assert found.objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
def test_search_places_whole_groups(goal):
    problem = contract(layer(goal, 2, 12, clustered_rows(np.random.default_rng(5), 200, 12, 3, 4)), np.arange(12) // 2)
    best = min(score(problem, np.array(placement)).objective for placement in balanced(6, 2))
    found = cross_entropy(problem, goal, Effort.FAST, np.random.default_rng(0))
    assert found.objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("theta", [0.0, 1.0])
@pytest.mark.parametrize("goal", GOALS)
def test_search_takes_either_end_of_theta(goal, theta):
    problem = cut_down(goal, 3, 0, theta=theta)
    found = cross_entropy(problem, goal, Effort.FAST, np.random.default_rng(0))
    check_placement(found.placement, 3, problem.allowed)
    assert found.objective <= score(problem, problem.contiguous()).objective + 1e-12


def test_theta_1_is_load_alone():
    problem = cut_down(Goal.LAR, 3, 0, theta=1.0)
    found = cross_entropy(problem, Goal.LAR, Effort.DEFAULT, np.random.default_rng(0))
    deviation = {tuple(p): score(problem, np.array(p)).load_deviation for p in ([0, 1, 2] * 4, [0, 0, 1, 1, 2, 2] * 2)}
    assert found.objective == pytest.approx(score(problem, found.placement).load_deviation)
    assert found.objective <= min(deviation.values())


# Extremes.


EDGES = {
    "an expert never used": (4, 8, np.array([[0, 1], [2, 3], [4, 5], [0, 6]] * 5, np.uint16)),
    "one expert with all the load": (2, 6, np.full((30, 1), 4, np.uint16)),
    "top 1": (2, 6, np.array([[0], [5], [3], [3], [1]] * 6, np.uint16)),
    "one rank": (1, 6, np.array([[0, 5], [2, 3]] * 4, np.uint16)),
    "as many ranks as experts": (6, 6, np.array([[0, 5], [2, 3], [1, 4]] * 4, np.uint16)),
    "one token": (2, 6, np.array([[1, 4]], np.uint16)),
    "all experts used by every token": (2, 4, np.tile(np.arange(4, dtype=np.uint16), (7, 1))),
}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("edge", EDGES)
def test_extremes_are_solved_to_the_best_placement(edge, goal):
    ranks, experts, rows = EDGES[edge]
    problem = layer(goal, ranks, experts, rows)
    found = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0))
    check_placement(found.placement, ranks, problem.allowed)
    best = min(score(problem, np.array(placement)).objective for placement in balanced(experts, ranks))
    assert found.objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("goal", GOALS)
def test_ranks_of_unequal_size_are_filled_and_searched(goal):
    """Seven experts on three ranks hold 3, 2, 2; the pairs that belong together fit only one way."""
    rows = np.array([[0, 4, 6]] * 9 + [[1, 5, 5]] * 6 + [[2, 3, 3]] * 6, np.uint16)[:, :2]
    problem = layer(goal, 3, 7, np.concatenate([rows, np.array([[4, 6], [0, 6]] * 5, np.uint16)]))
    found = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0))
    check_placement(found.placement, 3, problem.allowed)
    assert np.bincount(found.placement).tolist() == [3, 2, 2]
    sizes = set(permutations([0, 0, 0, 1, 1, 2, 2]))
    best = min(score(problem, np.array(placement)).objective for placement in sizes)
    assert found.objective == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
def test_at_least_95_of_100_random_layers_are_solved_to_the_optimum(goal):
    reached = 0
    for case in range(34):
        generator = np.random.default_rng([7, case])
        experts, ranks = [(8, 2), (8, 4), (9, 3), (10, 2), (10, 5), (12, 2)][case % 6]
        rows = clustered_rows(generator, int(generator.integers(30, 200)), experts, int(generator.integers(1, 4)), 3)
        problem = layer(goal, ranks, experts, rows, block=64, theta=float(generator.choice([0.0, 0.1])))
        best = score(problem, enumerate_placements(problem)).objective
        found = cross_entropy(problem, goal, Effort.DEFAULT, generator).objective
        assert found >= best - 1e-12
        reached += found <= best + 1e-12
    assert reached >= 33


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
def test_new_numbers_of_experts_permute_the_optimum(goal):
    """The search draws by expert number, so only its optimum carries over: the same value, on renumbered experts."""
    rows = clustered_rows(np.random.default_rng(3), 300, 12, 3, 4)
    number = np.random.default_rng(4).permutation(12)
    one, other = (layer(goal, 3, 12, routed) for routed in (rows, number[rows].astype(np.uint16)))
    found, renumbered = (cross_entropy(p, goal, Effort.DEFAULT, np.random.default_rng(0)) for p in (one, other))
    assert renumbered.objective == pytest.approx(found.objective, abs=1e-12)
    assert score(other, found.placement[np.argsort(number)]).objective == pytest.approx(found.objective, abs=1e-12)


@pytest.mark.parametrize("goal", GOALS)
def test_new_names_of_ranks_change_no_score_and_no_descent(goal):
    problem = cut_down(goal, 4, 2)
    start, names = np.random.default_rng(1).permutation(problem.contiguous()), np.array([2, 0, 3, 1], np.int32)
    ends = [descend(problem, placement, np.random.default_rng(6)) for placement in (start, names[start])]
    assert names[ends[0]].tolist() == ends[1].tolist()
    assert score(problem, ends[0]).objective == pytest.approx(score(problem, ends[1]).objective, abs=1e-12)


def test_planted_clusters_are_found_exactly():
    """Eight scattered clusters of eight experts, rows of six of one cluster and one in ten of anything."""
    generator = np.random.default_rng(11)
    members = generator.permutation(64).reshape(8, 8)
    inside = np.array([generator.choice(members[generator.integers(8)], 6, replace=False) for _ in range(900)])
    noise = np.array([generator.choice(64, 6, replace=False) for _ in range(100)])
    rows = generator.permutation(np.concatenate([inside, noise])).astype(np.uint16)
    for goal in (Goal.LAR, Goal.FANOUT, Goal.BLEND):
        found = cross_entropy(layer(goal, 8, 64, rows), goal, Effort.DEFAULT, np.random.default_rng(0))
        assert clusters(found.placement) == {frozenset(group.tolist()) for group in members}


def test_uniform_routing_has_no_gain_to_confirm():
    """What the search finds in noise does not hold on blocks it has not seen."""
    generator = np.random.default_rng(8)
    rows = generator.permuted(np.tile(np.arange(16, dtype=np.uint16), (2048, 1)), axis=1)[:, :2]
    fitted, unseen = rows[:1024], rows[1024:]
    problem = layer(Goal.BLEND, 4, 16, fitted, block=256)
    found = cross_entropy(problem, Goal.BLEND, Effort.DEFAULT, np.random.default_rng(0))
    assert found.objective < score(problem, problem.contiguous()).objective
    blocks = [layer(Goal.BLEND, 4, 16, unseen[start : start + 128]) for start in range(0, 1024, 128)]
    assert not confirm(validation_gains(blocks, found.placement)).confirmed


GOLDEN = {
    Goal.LAR: "3312110012320203",
    Goal.FANOUT: "3321220021310103",
    Goal.BLEND: "2231330031210102",
    Goal.ILP: "3310112210302023",
}


@pytest.mark.parametrize("goal", GOALS)
def test_placements_of_a_seed_are_those_on_record(goal):
    """A change here changes every user's placements: it must be meant."""
    problem = layer(goal, 4, 16, clustered_rows(np.random.default_rng(21), 600, 16, 3, 5), block=256)
    placement = cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(0)).placement
    assert "".join(map(str, placement)) == GOLDEN[goal]
