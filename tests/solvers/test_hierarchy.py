"""Placements on ranks that are not equally far apart, against enumeration and planted clusters."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import cross_entropy
from smoe_solvers.hierarchy import (
    CROSS_NODE,
    Links,
    align_names,
    excess_weight,
    linked_objective,
    mean_travel,
    rename_ranks,
    solve_linked,
)
from smoe_solvers.objectives import score
from smoe_solvers.solve import solve, validation_gains
from tests.solvers.reference import balanced, clustered_rows, layer, mean_fanout, placements, routings, swaps

EXPERTS, RANKS = 8, 4
COST = np.array([[0, 2, 9, 7], [3, 0, 8, 8], [9, 6, 0, 2], [7, 9, 4, 0]], float)
"""Two unlike nodes, not symmetric, least cost 2."""


def travel_by_hand(rows, placement, cost) -> float:
    total = 0.0
    for row in rows:
        needed = {int(placement[e]) for e in row}
        total += min(sum(cost[home][g] for g in needed) for home in needed)
    return total / len(rows)


def nodes_cost(ranks: int, size: int) -> np.ndarray:
    node = np.arange(ranks) // size
    cost = np.where(node[:, None] == node[None, :], 1.0, CROSS_NODE)
    np.fill_diagonal(cost, 0)
    return cost


def two_level_rows(generator, rows: int, ranks: int, nodes: int, each: int):
    """Rows of hidden clusters of `each` experts: two rows in three from one alone, the others with one of its node.

    Returns rows [N, 3] and the hidden rank of every expert.
    """
    hidden = generator.permutation(np.arange(ranks * each) % ranks)
    members = [np.flatnonzero(hidden == g) for g in range(ranks)]
    size, drawn = ranks // nodes, []
    for _ in range(rows):
        g = generator.integers(ranks)
        sibling = (g // size) * size + (g + 1 + generator.integers(size - 1)) % size
        own = generator.choice(members[g], 3, replace=False)
        drawn.append(own if generator.random() < 2 / 3 else [*own[:2], generator.choice(members[sibling])])
    return np.array(drawn, np.uint16), hidden


@given(rows=routings(EXPERTS, 3), placement=placements(EXPERTS, RANKS))
@settings(deadline=None)
def test_travel_equals_a_count_by_hand(rows, placement):
    problem = layer(Goal.FANOUT, RANKS, EXPERTS, rows)
    found = mean_travel(problem, placement, Links.of_cost(COST, RANKS))
    assert found == pytest.approx(travel_by_hand(rows, placement, COST / 2))


@given(rows=routings(EXPERTS, 3), placement=placements(EXPERTS, RANKS), goal=st.sampled_from(list(Goal)[:4]))
@settings(deadline=None)
def test_equal_costs_leave_every_goal_as_it_is(rows, placement, goal):
    problem = layer(goal, RANKS, EXPERTS, rows)
    even = Links.of_nodes(RANKS, 1)
    assert linked_objective(problem, placement, even) == pytest.approx(score(problem, placement).objective)
    assert mean_travel(problem, placement, even) == pytest.approx(float(mean_fanout(rows, placement)) - 1)


@given(rows=routings(EXPERTS, 3), placement=placements(EXPERTS, RANKS))
@settings(deadline=None)
def test_the_joint_objective_replaces_fan_out_by_travel(rows, placement):
    links = Links.of_cost(COST, RANKS)
    for goal in (Goal.FANOUT, Goal.BLEND, Goal.LAR):
        problem = layer(goal, RANKS, EXPERTS, rows)
        extra = travel_by_hand(rows, placement, COST / 2) - (float(mean_fanout(rows, placement)) - 1)
        price = {Goal.FANOUT: 1.0, Goal.BLEND: 0.25 / 3, Goal.LAR: 0.9 / 3}[goal]
        assert excess_weight(problem) * len(rows) == pytest.approx(price)
        by_hand = score(problem, placement).objective + price * extra
        assert linked_objective(problem, placement, links) == pytest.approx(by_hand)


@pytest.mark.parametrize("goal", [Goal.FANOUT, Goal.BLEND, Goal.LAR])
@pytest.mark.parametrize("cost", [COST, nodes_cost(RANKS, 2)], ids=["measured", "nodes"])
def test_eight_experts_get_the_best_of_all_placements_and_names(goal, cost):
    rows = clustered_rows(np.random.default_rng(3), 60, EXPERTS, 3, RANKS)
    problem, links = layer(goal, RANKS, EXPERTS, rows), Links.of_cost(cost, RANKS)
    every = (
        np.array(names, np.int32)[placement]
        for placement in balanced(EXPERTS, RANKS)
        for names in permutations(range(RANKS))
    )
    best = min(linked_objective(problem, placement, links) for placement in every)
    flat = problem.contiguous()
    found = solve_linked(problem, goal, links, flat, Effort.FAST, np.random.default_rng(0))
    assert found.objective == pytest.approx(best)
    assert linked_objective(problem, found.placement, links) == pytest.approx(best)


@pytest.mark.parametrize("goal", [Goal.FANOUT, Goal.BLEND])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (8, 2)])
def test_planted_clusters_come_back_with_their_nodes(goal, ranks, nodes):
    rows, hidden = two_level_rows(np.random.default_rng(1), 1200, ranks, nodes, each=4)
    problem, links = layer(goal, ranks, ranks * 4, rows, block=300), Links.of_nodes(ranks, nodes)
    flat = cross_entropy(problem, goal, Effort.FAST, np.random.default_rng(0)).placement
    found = solve_linked(problem, goal, links, flat, Effort.FAST, np.random.default_rng(0)).placement
    size = ranks // nodes
    for expert in range(len(hidden)):
        np.testing.assert_array_equal(found == found[expert], hidden == hidden[expert])
        np.testing.assert_array_equal(found // size == found[expert] // size, hidden // size == hidden[expert] // size)


@pytest.mark.parametrize("goal", [Goal.FANOUT, Goal.BLEND, Goal.LAR])
@pytest.mark.parametrize("ranks", [4, 8])
def test_joint_search_is_never_worse_than_the_flat_placement(goal, ranks):
    rows = clustered_rows(np.random.default_rng(ranks), 300, 32, 4, 8)
    problem, links = layer(goal, ranks, 32, rows, block=150), Links.of_nodes(ranks, 2)
    flat = cross_entropy(problem, goal, Effort.FAST, np.random.default_rng(0)).placement
    kept = flat.copy()
    found = solve_linked(problem, goal, links, flat, Effort.FAST, np.random.default_rng(0))
    np.testing.assert_array_equal(flat, kept)
    assert (np.bincount(found.placement, minlength=ranks) == 32 // ranks).all()
    assert found.objective == pytest.approx(linked_objective(problem, found.placement, links))
    assert found.objective <= linked_objective(problem, rename_ranks(problem, flat, links), links) + 1e-12
    assert found.objective < linked_objective(problem, problem.contiguous(), links)


def test_no_swap_improves_the_joint_objective_of_fan_out():
    rows = clustered_rows(np.random.default_rng(5), 200, 16, 3, RANKS)
    problem, links = layer(Goal.FANOUT, RANKS, 16, rows), Links.of_cost(COST, RANKS)
    found = solve_linked(problem, Goal.FANOUT, links, problem.contiguous(), Effort.FAST, np.random.default_rng(0))
    assert min(linked_objective(problem, other, links) for other in swaps(found.placement)) >= found.objective - 1e-9


@given(rows=routings(EXPERTS, 3), placement=placements(EXPERTS, RANKS))
@settings(max_examples=20, deadline=None)
def test_renaming_finds_the_best_names_of_few_ranks(rows, placement):
    problem, links = layer(Goal.FANOUT, RANKS, EXPERTS, rows), Links.of_cost(COST, RANKS)
    renamed = rename_ranks(problem, placement, links)
    best = min(travel_by_hand(rows, np.array(names)[placement], COST) for names in permutations(range(RANKS)))
    assert travel_by_hand(rows, renamed, COST) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_aligned_names_agree_most_among_those_that_keep_nodes(seed):
    generator = np.random.default_rng(seed)
    placement = generator.permutation(np.repeat(np.arange(RANKS, dtype=np.int32), 2))
    towards = generator.integers(0, 9, (EXPERTS, RANKS)).astype(float)
    cost = nodes_cost(RANKS, 2)
    found = align_names(placement, towards, Links.of_nodes(RANKS, 2), np.full(RANKS, 2))
    keeping = [name for name in map(np.array, permutations(range(RANKS))) if (cost[np.ix_(name, name)] == cost).all()]
    assert len(keeping) == 8
    agreement = [sum(towards[e, name[placement[e]]] for e in range(EXPERTS)) for name in keeping]
    assert sum(towards[e, found[e]] for e in range(EXPERTS)) == max(agreement)
    assert any((name[placement] == found).all() for name in keeping)


def test_names_stay_where_costs_allow_no_other():
    placement = np.repeat(np.arange(RANKS, dtype=np.int32), 2)
    towards = np.roll(np.eye(RANKS)[placement], 1, axis=1)
    found = align_names(placement, towards, Links.of_cost(COST, RANKS), np.full(RANKS, 2))
    np.testing.assert_array_equal(found, placement)


def test_nodes_are_read_off_a_measured_matrix():
    noisy = nodes_cost(8, 4) * np.random.default_rng(0).uniform(0.9, 1.1, (8, 8))
    assert Links.of_cost(noisy, 8).node_of_rank().tolist() == [0] * 4 + [1] * 4
    assert Links.of_nodes(8, 1).node_of_rank().tolist() == [0] * 8
    assert Links.of_nodes(8, 8).node_of_rank().tolist() == [0] * 8
    assert Links.of_cost(np.zeros((1, 1)), 1).node_of_rank().tolist() == [0]


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (np.zeros((3, 3)), r"shape \(3, 3\) does not fit 4 ranks"),
        (np.full((4, 4), 1.0), "itself must be zero"),
        (-nodes_cost(4, 2), "not negative"),
        (np.where(np.eye(4) > 0, 0, np.nan), "finite"),
    ],
)
def test_a_cost_matrix_that_cannot_be_is_refused(cost, says):
    with pytest.raises(ValueError, match=says):
        Links.of_cost(cost, 4)


@pytest.mark.parametrize("nodes", [0, 3, 5, 8])
def test_ranks_a_node_that_do_not_divide_are_refused(nodes):
    with pytest.raises(ValueError, match="4 ranks cannot be shared equally"):
        Links.of_nodes(4, nodes)


def test_solve_places_linked_ranks_and_validation_judges_by_the_same_objective():
    rows = clustered_rows(np.random.default_rng(2), 200, EXPERTS, 3, RANKS)
    problem, links = layer(Goal.BLEND, RANKS, EXPERTS, rows), Links.of_cost(COST, RANKS)
    found = solve(problem, Goal.BLEND, Method.CE, Effort.FAST, np.random.default_rng(0), links=links)
    assert found.objective == pytest.approx(linked_objective(problem, found.placement, links))
    gain = linked_objective(problem, problem.contiguous(), links) - found.objective
    assert validation_gains([problem], found.placement, links) == pytest.approx([gain])
