"""One real layer (gpt-oss-20b, layer 12; see fixtures/routing/README.md): the search against METIS with real seeds."""

from pathlib import Path

import numpy as np
import pytest

from smoe_solvers.choices import Assignment, Effort, Goal, Method
from smoe_solvers.cross_entropy import cross_entropy
from smoe_solvers.figures import home_by_scores, home_without_shuffle, measure
from smoe_solvers.methods.exact import enumerate_placements
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.predictors import local_counts
from smoe_solvers.problem import build_problem
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import solve
from tests.solvers.reference import layer, popularity_of

FIXTURE = Path(__file__).parents[1] / "fixtures/routing/gptoss20b_layer12.npz"
EXPERTS, RANKS = 32, 4


@pytest.fixture(scope="module")
def sequences():
    """The layer's rows, one array a sequence."""
    with np.load(FIXTURE) as archive:
        assert (int(archive["num_experts"]), int(archive["top_k"])) == (EXPERTS, archive["ids"].shape[1])
        return np.split(archive["ids"].astype(np.uint16), np.cumsum(archive["seq_len"])[:-1])


@pytest.fixture(scope="module")
def rows(sequences):
    return np.concatenate(sequences)


def search(problem, goal, seed, effort=Effort.DEFAULT):
    return solve(problem, goal, Method.CE, effort, np.random.default_rng(seed))


def test_fixture_is_whole_sequences_of_distinct_experts(sequences, rows):
    assert [len(sequence) for sequence in sequences[:3]] == [151, 104, 52]
    assert len(rows) == 3978
    assert rows.max() < EXPERTS
    assert all(len(set(row)) == 4 for row in rows.tolist())


@pytest.mark.parametrize(("theta", "lead"), [(0.0, 0.06), (0.1, 0.10)])
def test_search_beats_40_metis_seeds_in_lar(rows, theta, lead):
    problem = layer(Goal.LAR, RANKS, EXPERTS, rows, theta=theta)
    seeds = metis_placements(coactivation(problem), RANKS)
    assert len(seeds) == 40
    metis = min(score(problem, placement).objective for placement in seeds)
    reached = sorted(search(problem, Goal.LAR, seed).objective for seed in range(3))
    assert reached[-1] < metis - lead
    assert reached[-1] - reached[0] < 0.003  # a tie among solver seeds


@pytest.mark.parametrize("goal", [Goal.FANOUT, Goal.BLEND])
def test_search_is_not_worse_than_40_metis_seeds(goal, rows):
    problem = layer(goal, RANKS, EXPERTS, rows)
    metis = solve(problem, goal, Method.METIS, Effort.DEFAULT, np.random.default_rng(0))
    for seed in range(3):
        assert search(problem, goal, seed, Effort.FAST).objective <= metis.objective


def test_lar_of_the_search_is_what_a_shuffle_by_true_routing_keeps(rows):
    """The objective and the figures are computed apart, and agree to the activation."""
    problem = layer(Goal.LAR, RANKS, EXPERTS, rows)
    placement = search(problem, Goal.LAR, 0, Effort.FAST).placement
    counts = local_counts(rows, single_hosts(placement, RANKS))
    figures = measure(counts, home_by_scores(counts, 1024, Assignment.EXACT), 1024, counts)
    scored = score(problem, placement)
    assert figures.lar == pytest.approx(scored.lar, abs=1e-12)
    assert figures.fanout == pytest.approx(scored.fanout)


def test_what_half_the_sequences_teach_holds_for_the_others(sequences):
    fit, held = np.concatenate(sequences[0::2]), np.concatenate(sequences[1::2])
    problem = layer(Goal.BLEND, RANKS, EXPERTS, fit)
    placement = search(problem, Goal.BLEND, 0).placement
    kept = []
    for where in (problem.contiguous(), placement):
        counts = local_counts(held, single_hosts(where, RANKS))
        homes = home_by_scores(counts, 1024, Assignment.RULE)
        kept += [
            measure(counts, home, 1024, None).lar for home in (home_without_shuffle(len(held), RANKS, 1024), homes)
        ]
    contiguous, shuffled, placed, both = kept
    assert contiguous == pytest.approx(1 / RANKS, abs=0.03)
    assert placed == pytest.approx(1 / RANKS, abs=0.03)  # a placement alone moves no token
    assert both > shuffled + 0.05 > contiguous + 0.15


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND])
@pytest.mark.parametrize("ranks", [2, 3])
def test_search_reaches_the_best_of_all_placements_of_the_hottest_experts(goal, ranks, rows):
    """Twelve hottest experts, rows with two of them or more, their first two."""
    hottest = np.argsort(-popularity_of(rows, EXPERTS), kind="stable")[:12]
    number = {int(expert): i for i, expert in enumerate(np.sort(hottest))}
    hot = [[number[e] for e in row if e in number][:2] for row in rows.tolist()]
    pairs = np.array([row for row in hot if len(row) == 2], np.uint16)[:1024]
    assert len(pairs) == 1024
    problem = build_problem(goal, ranks, pairs, np.array([0, 1024]), popularity_of(pairs, 12), theta=0.0)
    best = score(problem, enumerate_placements(problem)).objective
    reached = [cross_entropy(problem, goal, Effort.DEFAULT, np.random.default_rng(seed)).objective for seed in range(4)]
    assert min(reached) >= best - 1e-12
    assert sum(one <= best + 1e-12 for one in reached) >= 3
