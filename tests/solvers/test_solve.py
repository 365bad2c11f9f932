"""From problem to checked placement: what every method promises, and whether a gain is confirmed."""

from dataclasses import fields
from itertools import permutations

import numpy as np
import pytest

from smoe_solvers.bounds import Proved
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import check_placement, group_mask
from smoe_solvers.solve import confirm, solve, validation_gains
from tests.solvers.reference import balanced, clustered_rows, layer

GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]
METHODS = list(Method)


def solved(problem, goal, method=Method.CE, effort=Effort.FAST, seed=0, **options):
    return solve(problem, goal, method, effort, np.random.default_rng(seed), **options)


def clustered(goal, ranks, experts, seed=0, **options):
    return layer(goal, ranks, experts, clustered_rows(np.random.default_rng(seed), 300, experts, 2, 5), **options)


# What every method promises.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("experts", "groups"), [(8, 1), (8, 2), (9, 1)])
def test_no_method_is_worse_than_contiguous(method, goal, groups, experts):
    """Also where router groups stay whole, and where ranks are unequal."""
    problem = clustered(goal, 4, experts, block=64, allowed=group_mask(experts, 4, groups) if groups > 1 else None)
    before = {field.name: np.copy(getattr(problem, field.name)) for field in fields(problem) if field.name != "weights"}
    found = solved(problem, goal, method)
    check_placement(found.placement, 4, problem.allowed)
    assert found.objective <= score(problem, problem.contiguous()).objective
    assert found.objective == pytest.approx(score(problem, found.placement).objective, abs=1e-12)
    assert found.stages[0].name == "contiguous"
    for name, array in before.items():
        assert (getattr(problem, name) == array).all(), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", GOALS)
def test_one_seed_gives_one_plan_with_every_method(method, goal):
    experts = 8 if method is Method.EXACT else 12
    problems = [clustered(goal, 4, experts, block=64) for _ in range(2)]
    first, second = (solved(problem, goal, method, Effort.DEFAULT, seed=5) for problem in problems)
    assert first.placement.tobytes() == second.placement.tobytes()
    assert first.stages == second.stages


def test_contiguous_stays_contiguous():
    problem = clustered(Goal.LAR, 4, 12)
    found = solved(problem, Goal.LAR, Method.CONTIGUOUS)
    assert (found.placement == problem.contiguous()).all()
    assert found.origin == "contiguous"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", GOALS)
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


# Exact answers.


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_experts_are_solved_by_trying_all_and_that_is_proved(goal, ranks):
    problem = clustered(goal, ranks, 8)
    best = min(score(problem, np.array(placement)).objective for placement in balanced(8, ranks))
    for method in (Method.CE, Method.EXACT):
        found = solved(problem, goal, method)
        assert found.origin == "enumeration"
        assert found.objective == pytest.approx(best, abs=1e-12)
        assert (found.certificate.kind, found.certificate.gap) == (Proved.OPTIMAL, 0)


def test_nothing_is_proved_by_a_search():
    assert solved(clustered(Goal.LAR, 4, 16), Goal.LAR).certificate.kind is Proved.UNKNOWN


def test_an_exact_answer_out_of_reach_is_refused_with_its_size():
    """A token table demands something of every expert: 300 ids, 64 experts and 16 ranks are too many together."""
    problem = clustered(Goal.BLEND, 16, 64, demand=np.full((64, 300), 2 / 64), token_id=np.arange(300))
    with pytest.raises(ValueError, match=r"the exact programme would have [\d,]+ variables, more than 250,000"):
        solved(problem, Goal.BLEND, Method.EXACT)


def test_a_time_limit_keeps_the_better_of_incumbent_and_search_and_says_so():
    """HiGHS can prove nothing about 24 experts in a tenth of a second; the answer is still a good placement."""
    problem = clustered(Goal.FANOUT, 4, 24)
    found = solved(problem, Goal.FANOUT, Method.EXACT, time_limit=0.1)
    assert found.objective <= solved(problem, Goal.FANOUT).objective
    assert found.note.startswith("HiGHS")
    assert found.certificate.kind is not Proved.OPTIMAL


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
