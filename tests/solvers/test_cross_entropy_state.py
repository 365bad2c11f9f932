"""What the Cross-Entropy search keeps between its rounds: its labels, its distribution, and what can be put away."""

from copy import deepcopy
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Effort, Goal
from smoe_solvers.cross_entropy import FLOOR, SEED_SHARE, SETTINGS, STALE_ROUNDS, Candidate, CrossEntropy, relabel
from smoe_solvers.descent import Descent
from smoe_solvers.methods.exact import enumerate_placements
from smoe_solvers.objectives import score
from smoe_solvers.problem import check_placement, group_mask, rank_capacity
from tests.solvers.reference import clustered_rows, clusters, cut_down, in_blocks, layer, placements

some = settings(max_examples=40, deadline=None)
GOALS = [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP]


# Labels.


@some
@given(placement=placements(8, 4), towards=st.lists(st.integers(0, 9), min_size=32, max_size=32))
def test_relabelling_keeps_clusters_and_agrees_as_much_as_labels_can(placement, towards):
    target = np.array(towards, np.float64).reshape(8, 4)
    before = placement.copy()
    renamed = relabel(placement, target, rank_capacity(*target.shape))
    assert (placement == before).all()
    assert clusters(renamed) == clusters(placement)
    agreement = [sum(target[e, names[g]] for e, g in enumerate(placement)) for names in permutations(range(4))]
    assert sum(target[e, g] for e, g in enumerate(renamed)) == max(agreement)


@some
@given(placement=placements(8, 4), names=st.permutations(range(4)))
def test_relabelling_undoes_new_names(placement, names):
    assert (
        relabel(np.array(names, np.int32)[placement], np.eye(4)[placement], rank_capacity(len(placement), 4)).tolist()
        == placement.tolist()
    )


# The distribution.


def search(problem, seed=0, placement=None):
    start = problem.contiguous() if placement is None else placement
    return CrossEntropy(
        problem, Candidate(start, score(problem, start).objective, "start"), np.random.default_rng(seed)
    )


def check_distribution(state):
    """Rows sum to one, nothing allowed is out of reach, nothing else is in reach."""
    allowed = state.problem.allowed
    assert state.probability.sum(axis=1) == pytest.approx(np.ones(len(allowed)))
    assert (state.probability[allowed] >= FLOOR / allowed.shape[1] / 2).all()
    assert not state.probability[~allowed].any()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_draws_are_balanced_and_allowed(groups):
    state = search(cut_down(Goal.BLEND, 4, 0, allowed=group_mask(12, 4, groups)))
    for _ in range(5):
        drawn = state.ask(40)
        assert len(drawn) > 0
        for placement in drawn:
            check_placement(placement, 4, state.problem.allowed)
        ranked = sorted(
            (Candidate(p, score(state.problem, p).objective, "drawn") for p in drawn), key=lambda c: c.objective
        )
        state.tell(ranked[:4])
        check_distribution(state)


@pytest.mark.parametrize("seed", range(5))
def test_draws_that_end_where_an_expert_may_not_be_are_dropped(seed):
    """A ragged mask: the last experts drawn may find only ranks that are not theirs."""
    allowed = np.random.default_rng(seed).random((12, 4)) < 0.4
    allowed[np.arange(12), np.arange(12) // 3] = True
    drawn = search(cut_down(Goal.BLEND, 4, 0, allowed=allowed)).ask(200)
    assert 0 < len(drawn) < 200
    for placement in drawn:
        check_placement(placement, 4, allowed)


def test_without_a_mask_every_draw_counts():
    state = search(cut_down(Goal.BLEND, 3, 0))
    assert state.ask(40).shape == (40, 12)


def test_draws_follow_the_probabilities():
    """Two experts on two ranks: the first on rank 0 nine times in ten if drawn first, the second's pull is even."""
    problem = layer(Goal.LAR, 2, 2, np.array([[0, 1]], np.uint16))
    state = search(problem)
    state.probability = np.array([[0.9, 0.1], [0.5, 0.5]])
    first_on_zero = (state.ask(4000)[:, 0] == 0).mean()
    assert first_on_zero == pytest.approx((0.9 + 0.5) / 2, abs=5 * 0.5 / 4000**0.5)


def test_a_told_elite_draws_more_of_itself():
    problem = cut_down(Goal.LAR, 3, 1)
    best = enumerate_placements(problem)
    state = search(problem)
    told = Candidate(best, score(problem, best).objective, "told")
    shares = []
    for _ in range(3):
        shares.append(np.mean([clusters(p) == clusters(best) for p in state.ask(300)]))
        for _ in range(4):
            state.tell([told])
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    check_distribution(state)


def test_the_incumbent_changes_only_for_a_better_one():
    problem = cut_down(Goal.LAR, 3, 1)
    best = enumerate_placements(problem)
    contiguous = Candidate(problem.contiguous(), score(problem, problem.contiguous()).objective, "contiguous")
    better = Candidate(best, score(problem, best).objective, "best")
    state = search(problem)
    state.tell([contiguous])
    assert (state.incumbent.origin, state.stale) == ("start", 1)
    state.tell([better, contiguous])
    assert (state.incumbent.origin, state.stale) == ("best", 0)
    state.tell([contiguous])
    state.tell([contiguous])
    assert (state.incumbent.origin, state.stale) == ("best", 2)
    state.restart([best])
    assert (state.incumbent.origin, state.stale) == ("best", 0)


def test_a_restart_is_the_mean_of_its_seeds_mixed_with_the_uniform():
    """Two seeds that differ in experts 0 and 4."""
    state = search(layer(Goal.LAR, 2, 8, clustered_rows(np.random.default_rng(0), 50, 8, 2, 2)))
    one, other = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([1, 0, 0, 0, 0, 1, 1, 1])
    state.restart([one, other])
    rest = (1 - SEED_SHARE) / 2
    assert state.probability[[0, 4]] == pytest.approx(np.full((2, 2), 0.5))
    assert state.probability[1:4] == pytest.approx(np.array([[SEED_SHARE + rest, rest]] * 3))
    assert state.probability[5:] == pytest.approx(np.array([[rest, SEED_SHARE + rest]] * 3))


def test_names_of_an_elite_s_ranks_do_not_blur_the_distribution():
    problem = cut_down(Goal.LAR, 3, 1)
    one, other = search(problem), search(problem)
    told = np.random.default_rng(9).permutation(problem.contiguous())
    one.tell([Candidate(told, 0.5, "told")])
    other.tell([Candidate((told + 1) % 3, 0.5, "told")])
    assert one.probability == pytest.approx(other.probability)


# Put away, and stopped.


def by_hand(state, descent):
    """One round with the answers written out: what `advance` does, for a search that is asked and told from outside."""
    drawn = [Candidate(p, descent.score(p), "drawn") for p in state.ask(20)]
    ends = [Candidate(*descent.run(start, state.generator), "descent") for start in [drawn[0].placement, state.kick()]]
    state.tell(sorted([*ends, *drawn[1:4]], key=lambda c: c.objective))


def everything(state):
    saved = state.save()
    arrays = [saved[name].tobytes() for name in ("probability", "placements", "objectives", "fresh", "counts")]
    return [*arrays, saved["origins"], saved["generator"]]


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("rounds", [0, 3, 11])
def test_a_search_that_was_put_away_goes_on_to_the_same_end(goal, rounds):
    """Twenty rounds in one go, or some, a copy of the plain arrays into a new search, and the rest."""
    problem = in_blocks(goal, 64)
    descent = Descent(problem)

    def started():
        fresh = np.random.default_rng(5)
        return CrossEntropy(
            problem,
            Candidate(problem.contiguous(), descent.score(problem.contiguous()), "start"),
            np.random.default_rng(3),
            fresh=[fresh.permutation(problem.contiguous()) for _ in range(2)],
        )

    whole = started()
    for _ in range(20):
        by_hand(whole, descent)
    first = started()
    for _ in range(rounds):
        by_hand(first, descent)
    saved = deepcopy(first.save())
    for _ in range(3):  # what is done after does not change what was put away
        by_hand(first, descent)
    second = CrossEntropy(problem, Candidate(problem.contiguous(), 0.0, "other"), np.random.default_rng(99))
    second.load(saved)
    assert second.rounds == rounds
    for _ in range(20 - rounds):
        by_hand(second, Descent(problem))
    assert everything(second) == everything(whole)


def stopped_search(**options):
    problem = cut_down(Goal.BLEND, 3, 0)
    start = Candidate(problem.contiguous(), score(problem, problem.contiguous()).objective, "start")
    state = CrossEntropy(problem, start, np.random.default_rng(0), **options)
    return state, [Candidate(start.placement, start.objective, "again")]


def test_a_search_stops_for_the_reasons_met_and_names_them():
    state, same = stopped_search(settings=replace(SETTINGS[Effort.DEFAULT], rounds=20, restarts=2))
    reasons = []
    while not (found := state.stop()):
        state.tell(same)
        reasons.append(state.restarts)
    assert found == {"restarts": 2.0}
    assert (state.rounds, reasons.count(0)) == (2 * STALE_ROUNDS, STALE_ROUNDS - 1)
    for _ in range(4):
        state.tell(same)
    assert state.stop() == {"restarts": 2.0, "rounds": 20.0}


def test_a_better_incumbent_takes_the_count_of_restarts_back():
    state, same = stopped_search()
    for _ in range(STALE_ROUNDS):
        state.tell(same)
    assert state.restarts == 1
    state.tell([Candidate(same[0].placement, same[0].objective - 1, "better")])
    assert (state.restarts, state.stale) == (0, 0)
