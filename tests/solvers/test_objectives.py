"""The objective of a placement against docs/terms.md written as loops, goal by goal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Goal
from smoe_solvers.objectives import rank_scores, score, set_rank_counts
from smoe_solvers.problem import build_problem, token_demand
from tests.solvers.reference import (
    UNIT,
    balanced,
    ilp_objective,
    lar_of_exact_shuffle,
    layer,
    load_deviation,
    mean_fanout,
    one_hot,
    placements,
    popularity_of,
    routings,
)

some = settings(max_examples=40, deadline=None)
EXPERTS, RANKS, TOP_K = 6, 3, 2
WHOLE_UNITS = 1 / (UNIT * TOP_K)
"""The most that charging whole units for a row off the quota can change the ilp objective."""
weights = st.sampled_from([0.0, 0.1, 0.5, 0.9])


def starts_of(rows, block):
    return np.array([*range(0, len(rows), block), len(rows)], np.int64)


@st.composite
def layers(draw):
    """(rows, block starts, popularity of a larger part that holds the rows, placement)."""
    rows = draw(routings(EXPERTS, TOP_K))
    more = draw(st.lists(st.integers(0, 40), min_size=EXPERTS, max_size=EXPERTS))
    block = draw(st.integers(3, 24))
    return rows, starts_of(rows, block), popularity_of(rows, EXPERTS) + more, draw(placements(EXPERTS, RANKS))


def expected_objective(goal, lar, fanout, deviation, theta, mu):
    return {
        Goal.LAR: (1 - theta) * (1 - lar) + theta * deviation,
        Goal.BLEND: (1 - theta) * (1 - lar) + theta * deviation + mu * fanout / TOP_K,
        Goal.FANOUT: fanout,
    }[goal]


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.BLEND, Goal.FANOUT])
@some
@given(data=layers(), theta=weights, mu=weights)
def test_score_equals_the_formula_by_hand(goal, data, theta, mu):
    rows, starts, popularity, placement = data
    found = score(build_problem(goal, RANKS, rows, starts, popularity, theta=theta, mu=mu), placement)
    lar = lar_of_exact_shuffle(one_hot(rows, EXPERTS), range(len(rows)), starts, placement, RANKS) / TOP_K
    fanout = float(mean_fanout(rows, placement))
    deviation = float(load_deviation(popularity, placement, RANKS))
    assert found.objective == pytest.approx(expected_objective(goal, lar, fanout, deviation, theta, mu))
    assert found.lar == pytest.approx(lar)
    assert found.fanout == pytest.approx(fanout)
    assert found.load_deviation == pytest.approx(deviation)


@pytest.mark.parametrize("goal", [Goal.LAR, Goal.BLEND, Goal.FANOUT])
@some
@given(data=layers(), theta=weights, seed=st.integers(0, 2**32 - 1))
def test_with_a_token_table_rows_demand_what_their_id_did(goal, data, theta, seed):
    """lar is then the table's, fan-out and load stay the true routing's."""
    rows, starts, popularity, placement = data
    generator = np.random.default_rng(seed)
    token_id = generator.choice([3, 4, 8, 20, 21], len(rows))
    kinds, kind = np.unique(token_id, return_inverse=True)
    counts = (
        generator.choice([3, 4, 8, 20], 12),
        generator.integers(0, EXPERTS, 12),
        generator.integers(1, 9, 12),
    )
    demand = token_demand(kinds, counts, popularity, TOP_K, 1.0)
    found = score(
        build_problem(
            goal, RANKS, rows, starts, popularity, token_id=token_id, demand=demand, theta=theta
        ),
        placement,
    )  # fmt: skip
    in_units = np.rint(demand.T * UNIT) / UNIT
    lar = lar_of_exact_shuffle(in_units, kind, starts, placement, RANKS) / TOP_K
    fanout = float(mean_fanout(rows, placement))
    deviation = float(load_deviation(popularity, placement, RANKS))
    assert found.lar == pytest.approx(lar)
    assert found.fanout == pytest.approx(fanout)
    assert found.objective == pytest.approx(expected_objective(goal, lar, fanout, deviation, theta, 0.25))


@pytest.mark.parametrize("ranks", [2, 3])
@some
@given(rows=routings(EXPERTS, TOP_K, min_rows=6, max_rows=6), theta=weights, data=st.data())
def test_ilp_equals_the_best_assignment_of_all(ranks, rows, theta, data):
    placement = data.draw(placements(EXPERTS, ranks))
    found = score(layer(Goal.ILP, ranks, EXPERTS, rows, block=4, theta=theta), placement)
    by_hand = ilp_objective(one_hot(rows, EXPERTS), range(6), placement, ranks, theta, TOP_K)
    assert found.objective == pytest.approx(by_hand, abs=WHOLE_UNITS)


def test_ilp_trades_token_balance_for_local_activations():
    """Four rows that all want rank 0: a small theta lets them stay together, a large one parts them."""
    rows = np.array([[0, 1]] * 4, np.uint16)
    placement = np.array([0, 0, 1, 1])
    together = score(layer(Goal.ILP, 2, 4, rows, theta=0.1), placement).objective
    parted = score(layer(Goal.ILP, 2, 4, rows, theta=0.9), placement).objective
    assert together == pytest.approx(0.1 * 1.0, abs=WHOLE_UNITS)
    assert parted == pytest.approx(0.1 * 0.5, abs=WHOLE_UNITS)


@some
@given(rows=routings(EXPERTS, TOP_K), placement=placements(EXPERTS, RANKS), names=st.permutations(range(RANKS)))
def test_names_of_ranks_do_not_count(rows, placement, names):
    renamed = np.array(names, np.int32)[placement]
    for goal in Goal:
        problem = layer(goal, RANKS, EXPERTS, rows if goal is not Goal.ILP else np.repeat(rows, RANKS, axis=0))
        assert score(problem, renamed).objective == pytest.approx(score(problem, placement).objective, abs=1e-12)


@some
@given(rows=routings(EXPERTS, TOP_K), placement=placements(EXPERTS, RANKS))
def test_counts_by_rank_equal_loops(rows, placement):
    demand = np.ascontiguousarray((one_hot(rows, EXPERTS).T * UNIT).astype(np.int32))
    summed = rank_scores(demand, placement, RANKS)
    counts = set_rank_counts(rows.astype(np.int32), placement, RANKS)
    for t, row in enumerate(rows):
        for g in range(RANKS):
            n = sum(placement[e] == g for e in row)
            assert counts[t, g] == n
            assert summed[t, g] == n * UNIT


# The worked example of the paper's first version: 2 ranks, 6 experts, top-2, 8 tokens, quota 4.

EXAMPLE = np.array([[0, 1], [3, 4], [0, 1], [0, 5], [4, 5], [3, 4], [2, 3], [1, 5]], np.uint16)


def remote_activations(placement):
    problem = layer(Goal.LAR, 2, 6, EXAMPLE)
    assert problem.quota.tolist() == [4]
    return round((1 - score(problem, np.array(placement)).lar) * EXAMPLE.size)


def test_worked_example_has_5_remote_activations_without_a_shuffle():
    contiguous = [0, 0, 0, 1, 1, 1]
    assert sum(contiguous[e] != i // 4 for i, row in enumerate(EXAMPLE) for e in row) == 5


def test_worked_example_has_3_remote_activations_with_an_exact_shuffle():
    assert remote_activations([0, 0, 0, 1, 1, 1]) == 3


def test_worked_example_has_1_remote_activation_placed_and_shuffled():
    assert remote_activations([0, 0, 1, 1, 1, 0]) == 1


def test_no_placement_of_the_worked_example_does_better():
    remote = [remote_activations(placement) for placement in balanced(6, 2)]
    assert len(remote) == 10
    assert min(remote) == 1
