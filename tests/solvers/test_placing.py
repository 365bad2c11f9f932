"""From an array of expert ids to a placement and its figures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers import Goal, place, placement_figures
from smoe_solvers.problem import check_placement
from tests.test_imports import ROOT

ROUTING = np.load(ROOT / "tests/fixtures/routing/gptoss20b_layer12.npz")["ids"]


@pytest.mark.parametrize("goal", [goal for goal in Goal if goal is not Goal.TIME])
def test_real_routing_is_placed_better_on_rows_it_never_saw(goal):
    expert_to_rank = place(ROUTING[:3000], 4, num_experts=32, goal=goal, effort="fast")
    check_placement(expert_to_rank, 4, np.ones((32, 4), bool))
    contiguous = np.repeat(np.arange(4), 8)
    found, before = (placement_figures(ROUTING[3000:], where) for where in (expert_to_rank, contiguous))
    assert found.fanout < before.fanout


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 60), st.integers(0, 99), st.data())
def test_any_rows_are_placed_evenly_and_never_worse_than_in_order(top_k, experts, rows, seed, data):
    top_k, ranks = min(top_k, experts), data.draw(st.integers(1, experts))
    drawn = np.argsort(np.random.default_rng(seed).random((rows, experts)), axis=1)[:, :top_k]
    found = place(drawn, ranks, num_experts=experts, goal="fanout", effort="fast", batch=16)
    contiguous = np.repeat(np.arange(ranks), np.bincount(found))
    assert np.bincount(found).tolist() == sorted(np.bincount(found), reverse=True)
    assert max(np.bincount(found)) - min(np.bincount(found)) <= 1
    assert placement_figures(drawn, found).fanout <= placement_figures(drawn, contiguous).fanout


def test_the_same_rows_and_seed_give_the_same_placement():
    first, second = (place(ROUTING[:1500].astype(kind), 4, effort="fast", seed=3) for kind in (np.uint8, np.int64))
    assert (first == second).all()


def test_ranks_may_hold_one_expert_more_where_they_do_not_divide():
    assert np.bincount(place(ROUTING[:500], 5, goal="fanout", effort="fast")).tolist() == [7, 7, 6, 6, 6]


def test_figures_equal_a_count_by_hand():
    expert_to_rank = np.arange(32) % 4
    home = np.arange(len(ROUTING)) % 4
    found = placement_figures(ROUTING, expert_to_rank, home=home)
    ranks = [{int(expert_to_rank[e]) for e in row} for row in ROUTING]
    local = sum(expert_to_rank[e] == home[t] for t, row in enumerate(ROUTING) for e in row)
    assert found.lar == local / ROUTING.size
    assert found.fanout == pytest.approx(np.mean([len(held) for held in ranks]))
    assert found.remote_fanout == pytest.approx(np.mean([len(held - {home[t]}) for t, held in enumerate(ranks)]))


@pytest.mark.parametrize(
    ("experts", "num_ranks", "message"),
    [
        (np.array([[0, 1], [2, 2]]), 2, "row 1 names an expert twice"),
        (np.array([[0, 9], [1, 2]]), 2, r"expert id 9 is outside \[0, 4\)"),
        (np.array([[0, -1], [1, 2]]), 2, "expert id -1 is outside"),
        (np.array([0, 1, 2]), 2, r"int64 \[3\]; integers \[tokens, K\] were expected"),
        (np.array([[0.0, 1.0]]), 2, "float64"),
        (np.empty((0, 2), int), 2, r"\[0, 2\]"),
        (np.array([[0, 1], [2, 3]]), 5, "4 experts cannot be shared by 5 ranks"),
    ],
)
def test_rows_that_cannot_be_are_refused(experts, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        place(experts, num_ranks, num_experts=4)


def test_a_goal_that_needs_a_machine_is_refused():
    with pytest.raises(ValueError, match="goal time"):
        place(ROUTING[:100], 4, goal="time")
