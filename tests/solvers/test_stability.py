"""Staying near an old placement: moves that do not pay are undone, and nothing gets worse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Goal
from smoe_solvers.descent import descend
from smoe_solvers.objectives import score
from smoe_solvers.problem import check_placement, group_mask
from smoe_solvers.stability import moved, settle
from tests.solvers.reference import clustered_rows, layer, placements


def planted(seed, goal=Goal.FANOUT):
    rows = clustered_rows(np.random.default_rng(seed), 300, 12, 3, 3)
    return layer(goal, 3, 12, rows, block=100)


@settings(max_examples=25, deadline=None)
@given(old=placements(12, 3), new=placements(12, 3), seed=st.integers(0, 5), charge=st.sampled_from([0.0, 1e-3, 0.05]))
def test_settled_is_balanced_and_never_worse_than_old_with_its_charges(old, new, seed, charge):
    problem = planted(seed)
    kept = old.copy(), new.copy()
    settled = settle(problem, old, new, charge)
    assert (old == kept[0]).all()
    assert (new == kept[1]).all()
    check_placement(settled, 3, problem.allowed)
    price = charge * score(problem, old).objective
    assert score(problem, settled).objective + price * moved(old, settled) <= score(problem, old).objective + 1e-9


@pytest.mark.parametrize("goal", [Goal.FANOUT, Goal.LAR, Goal.BLEND])
def test_the_same_clusters_under_other_names_move_nothing(goal):
    problem = planted(1, goal)
    old = descend(problem, problem.contiguous(), np.random.default_rng(0))
    renamed = np.array([2, 0, 1], np.int32)[old]
    assert moved(old, renamed) == 12
    assert moved(old, settle(problem, old, renamed)) == 0


def test_a_higher_charge_moves_fewer_experts():
    problem = planted(2)
    new = descend(problem, problem.contiguous(), np.random.default_rng(0))
    old = np.random.default_rng(5).permutation(problem.contiguous())
    moves = [moved(old, settle(problem, old, new, charge)) for charge in (0.0, 0.02, 0.1, 10.0)]
    assert moves[0] > 0
    assert moves == sorted(moves, reverse=True)
    assert moves[-1] == 0


def test_one_pair_that_pays_moves_alone():
    problem = planted(3)
    best = descend(problem, problem.contiguous(), np.random.default_rng(1))
    old = best.copy()
    first, second = np.flatnonzero(old == 0)[0], np.flatnonzero(old == 1)[0]
    old[first], old[second] = 1, 0
    settled = settle(problem, old, best)
    assert np.flatnonzero(settled != old).tolist() == sorted([first, second])


def test_groups_that_must_stay_on_their_ranks_stay_there():
    rows = clustered_rows(np.random.default_rng(0), 200, 12, 3, 3)
    allowed = group_mask(12, 6, 3)
    problem = layer(Goal.FANOUT, 6, 12, rows, block=100, allowed=allowed)
    old = problem.contiguous()
    new = descend(problem, old, np.random.default_rng(0))
    check_placement(settle(problem, old, new, 0.0), 6, allowed)
