"""The goal `time`: what is judged equals a count by hand, swaps reach a local optimum, nothing met is better."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.choices import Effort, Goal, Method, Mode
from smoe_solvers.layer_time import Curve, LayerCost, Stage, count_traffic
from smoe_solvers.problem import build_problem, contract
from smoe_solvers.solve import solve
from smoe_solvers.timed import (
    COMPROMISES,
    Rows,
    Timing,
    descend_time,
    homes,
    other_goals,
    predicted_times,
    rank_counts,
    reweighted,
    solve_time,
    time_objective,
)
from tests.solvers.reference import (
    clustered_rows,
    hungarian,
    layer,
    one_hot,
    placements,
    popularity_of,
    routings,
    swaps,
)

EXPERTS, RANKS = 8, 4
MODES = [Mode.SPECULATIVE, Mode.SP_EP, Mode.DP_EP]


def cost(mode: Mode, ranks: int = RANKS, load: float = 1.0) -> LayerCost:
    """A microsecond for each row through the busiest direction, `load` for each activation of the busiest rank."""
    curves = {stage: Curve.of_points([(1.0, 3e-6), (2.0, 3e-6), (3.0, 3.5e-6)]) for stage in Stage}
    return LayerCost(mode, ranks, 1, activation_flops=load, flop_rate=1e6, curves=curves)


def rows_of(experts: np.ndarray, ranks: int = RANKS, block: int = 16, count: int = EXPERTS):
    starts = np.array([*range(0, len(experts), block), len(experts)], np.int64)
    problem = build_problem(Goal.TIME, ranks, experts, starts, popularity_of(experts, count))
    return problem, Rows.of_problem(problem, experts, starts)


def time_by_hand(experts, block_start, placement, home, charges: LayerCost) -> list[float]:
    times = []
    for start, stop in pairwise(block_start):
        received, sent, load = ([0] * charges.num_ranks for _ in range(3))
        for row in range(start, stop):
            needed = [int(placement[e]) for e in experts[row]]
            for g in needed:
                load[g] += 1
            for g in set(needed) - {int(home[row])}:
                received[g] += 1
                sent[home[row]] += 1
        exchange = float(charges.exchange(max(received + sent)))
        times.append(float(charges.row_moves(stop - start)) + exchange + float(charges.experts(max(load))))
    return times


@pytest.mark.parametrize("mode", MODES)
@given(experts=routings(EXPERTS, 2, min_rows=2, max_rows=40), placement=placements(EXPERTS, RANKS))
@settings(max_examples=25, deadline=None)
def test_predicted_time_equals_a_count_by_hand(mode, experts, placement):
    _, rows = rows_of(experts)
    home = homes(rows, placement, mode, RANKS)
    found = predicted_times(rows, placement, cost(mode))
    np.testing.assert_allclose(found, time_by_hand(experts, rows.block_start, placement, home, cost(mode)))


@given(experts=routings(EXPERTS, 2, min_rows=2, max_rows=40), placement=placements(EXPERTS, RANKS))
@settings(max_examples=25, deadline=None)
def test_speculative_rows_lie_where_an_exact_shuffle_puts_them(experts, placement):
    _, rows = rows_of(experts)
    home = homes(rows, placement, Mode.SPECULATIVE, RANKS)
    local = one_hot(experts, EXPERTS) @ np.eye(RANKS)[placement]
    for start, stop in pairwise(rows.block_start):
        quota = -(-(stop - start) // RANKS)
        assert np.bincount(home[start:stop], minlength=RANKS).max() <= quota
        kept = sum(local[row, home[row]] for row in range(start, stop))
        assert kept == hungarian(local[start:stop].astype(np.int64), quota)


def test_without_a_shuffle_rows_lie_in_order():
    _, rows = rows_of(clustered_rows(np.random.default_rng(0), 21, EXPERTS, 2, RANKS))
    home = homes(rows, np.arange(EXPERTS) // 2, Mode.SP_EP, RANKS)
    assert home.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [0, 0, 1, 1, 2]  # blocks of 16 and 5 rows


def test_a_shuffle_by_token_ids_follows_the_table_and_not_the_truth():
    experts = np.array([[0], [1], [2], [3]] * 4, np.uint16)
    token_id = np.repeat([7, 9, 11, 13], 4)
    demand = np.zeros((4, 4))
    demand[[3, 2, 1, 0], [0, 1, 2, 3]] = 1  # the table says 7 uses expert 3, ...
    starts = np.array([0, 16])
    problem = build_problem(Goal.TIME, 4, experts, starts, popularity_of(experts, 4), token_id=token_id, demand=demand)
    rows = Rows.of_problem(problem, experts, starts, token_id)
    assert homes(rows, np.arange(4), Mode.SPECULATIVE, 4).tolist() == [3] * 4 + [2] * 4 + [1] * 4 + [0] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_the_descent_never_loses_and_leaves_its_input(mode, seed):
    generator = np.random.default_rng(seed)
    problem, rows = rows_of(clustered_rows(generator, 64, EXPERTS, 3, RANKS))
    start = problem.contiguous()
    kept = start.copy(), rows.experts.copy(), rows.demand.copy()
    end = descend_time(rows, start, cost(mode), problem.allowed, generator, 100)
    assert time_objective(rows, end, cost(mode)) <= time_objective(rows, start, cost(mode))
    assert (np.bincount(end, minlength=RANKS) == EXPERTS // RANKS).all()
    for before, after in zip(kept, (start, rows.experts, rows.demand), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("seed", range(5))
def test_no_single_swap_improves_where_homes_are_fixed(seed):
    generator = np.random.default_rng(seed)
    problem, rows = rows_of(clustered_rows(generator, 48, EXPERTS, 2, RANKS))
    end = descend_time(rows, problem.contiguous(), cost(Mode.DP_EP), problem.allowed, generator, 0)
    reached = time_objective(rows, end, cost(Mode.DP_EP))
    assert min(time_objective(rows, other, cost(Mode.DP_EP)) for other in swaps(end)) >= reached - 1e-9


def test_experts_stay_where_they_may_go():
    generator = np.random.default_rng(0)
    problem, rows = rows_of(clustered_rows(generator, 64, EXPERTS, 2, RANKS))
    allowed = (np.arange(EXPERTS)[:, None] // 4) == (np.arange(RANKS)[None, :] // 2)
    end = descend_time(rows, problem.contiguous(), cost(Mode.SP_EP), allowed, generator, 10)
    assert allowed[np.arange(EXPERTS), end].all()
    assert (end != problem.contiguous()).any()


@pytest.mark.parametrize("mode", MODES)
def test_no_other_goal_is_faster_on_the_fitted_rows(mode):
    generator = np.random.default_rng(3)
    problem, rows = rows_of(clustered_rows(generator, 256, 16, 3, RANKS), block=64, count=16)
    others = other_goals(problem, Effort.FAST, np.random.default_rng(0))
    found = solve_time(problem, Timing(rows, cost(mode)), Effort.FAST, np.random.default_rng(0))
    assert set(others) == {"contiguous"} | {name for name in others if "theta" in name}
    assert len(others) == 1 + len(COMPROMISES)
    assert found.objective <= min(time_objective(rows, placement, cost(mode)) for placement in others.values())
    assert found.objective == pytest.approx(time_objective(rows, found.placement, cost(mode)))
    assert [stage.name for stage in found.stages] == ["contiguous", "other goals", "descent by time"]
    objectives = [stage.objective for stage in found.stages]
    assert objectives == sorted(objectives, reverse=True)


def test_one_seed_gives_one_placement():
    problem, rows = rows_of(clustered_rows(np.random.default_rng(5), 200, 16, 3, RANKS), block=64, count=16)
    one, other = (
        solve_time(problem, Timing(rows, cost(Mode.SPECULATIVE)), Effort.FAST, np.random.default_rng(2))
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.placement, other.placement)


def test_dear_experts_make_time_balance_load_and_free_ones_make_it_save_rows():
    problem, rows = rows_of(clustered_rows(np.random.default_rng(1), 512, 16, 3, RANKS), block=128, count=16)

    def found(load):
        charges = cost(Mode.DP_EP, load=load)
        placement = solve_time(problem, Timing(rows, charges), Effort.FAST, np.random.default_rng(0)).placement
        return np.array([time_objective(rows, placement, cost(Mode.DP_EP, load=judge)) for judge in (0.0, 100.0)])

    free, dear = found(0.0), found(100.0)
    assert free[0] < dear[0]
    assert dear[1] < free[1]


@pytest.mark.parametrize("compromise", COMPROMISES, ids=lambda c: f"{c.goal}-{c.theta}-{c.mu}")
def test_reweighted_traffic_is_that_goals_problem(compromise):
    experts = clustered_rows(np.random.default_rng(0), 100, 16, 3, RANKS)
    own = layer(compromise.goal, RANKS, 16, experts, theta=compromise.theta, mu=compromise.mu)
    weights = reweighted(layer(Goal.TIME, RANKS, 16, experts), compromise).weights
    assert (weights.local, weights.load, weights.fanout) == pytest.approx(
        (own.weights.local, own.weights.load, own.weights.fanout)
    )


def test_fewer_blocks_are_whole_blocks_of_the_same_rows():
    _, rows = rows_of(clustered_rows(np.random.default_rng(0), 90, EXPERTS, 2, RANKS))
    few = rows.few_blocks(2)
    np.testing.assert_array_equal(few.experts, np.concatenate([rows.experts[:16], rows.experts[80:]]))
    np.testing.assert_array_equal(few.block_start, [0, 16, 26])
    np.testing.assert_array_equal(few.demand[:, few.kind], rows.demand[:, np.r_[rows.kind[:16], rows.kind[80:]]])


def test_whole_groups_are_timed_by_all_their_experts():
    """A row that uses two experts of one group counts both as load, and the group's rank once."""
    experts = np.array([[0, 1], [0, 2], [2, 3], [4, 5]] * 4, np.uint16)
    starts = np.array([0, 16])
    unit = np.arange(EXPERTS) // 2
    problem = build_problem(Goal.TIME, 2, experts, starts, popularity_of(experts, EXPERTS))
    rows = Rows.of_problem(contract(problem, unit), experts, starts, unit=unit)
    placement = np.array([1, 0, 0, 1], np.int32)
    whole = predicted_times(Rows.of_problem(problem, experts, starts), placement[unit], cost(Mode.SP_EP, 2))
    np.testing.assert_allclose(predicted_times(rows, placement, cost(Mode.SP_EP, 2)), whole)
    end = descend_time(rows, placement, cost(Mode.SP_EP, 2), np.ones((4, 2), np.bool_), np.random.default_rng(0), 0)
    moved = predicted_times(Rows.of_problem(problem, experts, starts), end[unit], cost(Mode.SP_EP, 2))
    np.testing.assert_allclose(predicted_times(rows, end, cost(Mode.SP_EP, 2)), moved)


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_edges_one_row_one_rank_one_expert_a_rank_work(data):
    ranks = data.draw(st.sampled_from([1, EXPERTS]))
    experts = data.draw(routings(EXPERTS, data.draw(st.sampled_from([1, 2])), min_rows=1, max_rows=5))
    problem, rows = rows_of(experts, ranks)
    for mode in MODES:
        found = solve_time(problem, Timing(rows, cost(mode, ranks)), Effort.FAST, np.random.default_rng(0))
        assert sorted(np.bincount(found.placement, minlength=ranks).tolist()) == [EXPERTS // ranks] * ranks


def test_short_blocks_are_priced_as_batches_in_proportion():
    _, rows = rows_of(clustered_rows(np.random.default_rng(0), 40, EXPERTS, 2, RANKS))
    placement = np.array([3, 0, 1, 2, 3, 0, 1, 2], np.int32)
    home, counts = homes(rows, placement, Mode.DP_EP, RANKS), rank_counts(rows, placement, RANKS)
    traffic = count_traffic(counts, home, rows.block_start)
    whole = [
        float(cost(Mode.DP_EP).exchange(sent * 1024 / n) + cost(Mode.DP_EP).experts(load * 1024 / n)) * 1e6
        for n, sent, load in zip(traffic.rows, traffic.busiest_rows, traffic.busiest_load, strict=True)
    ]
    np.testing.assert_allclose(Timing(rows, cost(Mode.DP_EP), 1024).microseconds(placement), whole)


def test_gains_are_what_is_saved_over_contiguous_in_microseconds():
    problem, rows = rows_of(clustered_rows(np.random.default_rng(0), 40, EXPERTS, 2, RANKS))
    placement = np.array([3, 0, 1, 2, 3, 0, 1, 2], np.int32)
    gains = Timing(rows, cost(Mode.DP_EP)).gains(placement)
    assert len(gains) == 3
    saved = time_objective(rows, problem.contiguous(), cost(Mode.DP_EP)) - time_objective(
        rows, placement, cost(Mode.DP_EP)
    )
    assert gains.mean() == pytest.approx(saved)


def test_goal_time_is_searched_by_ce_on_a_layers_cost():
    problem, rows = rows_of(clustered_rows(np.random.default_rng(0), 40, EXPERTS, 2, RANKS))
    timing, generator = Timing(rows, cost(Mode.SP_EP)), np.random.default_rng(0)
    found = solve(problem, Goal.TIME, Method.CE, Effort.FAST, generator, timing=timing)
    assert found.objective == pytest.approx(time_objective(rows, found.placement, timing.cost))
    with pytest.raises(ValueError, match="ce alone"):
        solve(problem, Goal.TIME, Method.METIS, Effort.FAST, generator, timing=timing)
    with pytest.raises(ValueError, match="cost"):
        solve(problem, Goal.TIME, Method.CE, Effort.FAST, generator)
