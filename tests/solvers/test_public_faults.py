"""Faults that similar tools have had in public, and what this one does instead."""

import numpy as np
import pytest
from hypothesis import given, settings

from smoe_cli.placement import Placement
from smoe_solvers.assignment import assign_exact, assign_rule
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.objectives import score
from smoe_solvers.solve import solve
from tests.solvers.reference import layer, placements


@settings(max_examples=40, deadline=None)
@given(first=placements(12, 4), second=placements(12, 4))
def test_a_map_that_router_and_weights_read_differently_cannot_be_made(first, second):
    """A round-robin map had no matching loader. Here slots, hosts and ranks are views of one array."""
    placed = Placement.of_ranks((3, 4), np.stack([first, second]), 4)
    for index, ranked in enumerate((first, second)):
        for slot, expert in enumerate(placed.physical_to_logical[index]):
            assert placed.slot_to_rank[slot] == ranked[expert] == placed.expert_to_rank[index, expert]
            assert placed.hosts[index, expert].nonzero()[0].tolist() == [ranked[expert]]


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT, Goal.BLEND, Goal.ILP])
def test_an_expert_without_tokens_is_given_none(goal):
    """Experts of no tokens were counted with one, and local numbers were taken for global ones."""
    rows = np.array([[8, 9], [9, 10], [8, 10]] * 40, np.uint16)
    problem = layer(goal, 3, 12, rows, block=60)
    assert problem.load[:8].tolist() == [0] * 8
    assert int(problem.load.sum()) == rows.size
    solution = solve(problem, goal, Method.CE, Effort.FAST, np.random.default_rng(0))
    assert np.bincount(solution.placement, minlength=3).tolist() == [4, 4, 4]
    if goal is not Goal.ILP:
        together = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], np.int32)  # the used experts on one rank
        assert solution.objective <= score(problem, together).objective + 1e-12


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.FANOUT])
def test_one_rank_serves_everything_at_home(goal):
    """With one rank."""
    rows = np.array([[0, 1], [2, 3], [0, 3]], np.uint16)
    found = score(layer(goal, 1, 4, rows), np.zeros(4, np.int32))
    assert (found.lar, found.fanout, found.load_deviation) == (1.0, 1.0, 0.0)


def test_equal_scores_go_by_position_and_the_same_way_every_time():
    """Ties were broken at random, so that two runs gave two files."""
    equal = np.full((12, 4), 7, np.uint8)
    assert assign_exact(equal, 3).tolist() == assign_exact(equal, 3).tolist()
    assert assign_rule(equal, 3).tolist() == assign_rule(equal, 3).tolist()
    every_pair = np.array([[a, b] for a in range(8) for b in range(a)], np.uint16)
    problem = layer(Goal.FANOUT, 4, 8, every_pair)
    found = [solve(problem, Goal.FANOUT, Method.CE, Effort.FAST, np.random.default_rng(5)).placement for _ in range(2)]
    assert found[0].tolist() == found[1].tolist() == problem.contiguous().tolist()


def test_with_a_rank_for_every_expert_all_methods_agree():
    """Mixtral on eight ranks: there is one placement, up to the names of ranks."""
    rows = np.array([[a, b] for a in range(8) for b in range(a)] * 5, np.uint16)
    problem = layer(Goal.BLEND, 8, 8, rows, block=70)
    methods = [Method.CONTIGUOUS, Method.LOAD, Method.METIS, Method.KMEANS2D, Method.ILS, Method.CE, Method.EXACT]
    found = {solve(problem, Goal.BLEND, method, Effort.FAST, np.random.default_rng(0)).objective for method in methods}
    assert max(found) - min(found) < 1e-12
