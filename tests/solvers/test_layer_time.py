"""Predicted layer time against sums done by hand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_solvers.choices import Mode
from smoe_solvers.layer_time import Curve, LayerCost, Stage, Traffic, count_traffic

MICRO = 1e-6
FIXED = {
    Stage.REDUCE_SCATTER: 1.0,
    Stage.ALL_GATHER: 2.0,
    Stage.ALL_REDUCE: 4.0,
    Stage.DISPATCH: 8.0,
    Stage.COMBINE: 16.0,
}
"""Microseconds that each stage takes besides a nanosecond a byte, all different."""


def line(fixed: float) -> Curve:
    return Curve.of_points([(size, fixed * MICRO + size * 1e-9) for size in (1.0, 1e6)])


def cost(mode: Mode, ranks: int = 4) -> LayerCost:
    curves = {stage: line(fixed) for stage, fixed in FIXED.items()}
    return LayerCost(mode, ranks, row_bytes=100, activation_flops=50.0, flop_rate=1e9, curves=curves)


def test_a_curve_is_what_was_measured_and_straight_between():
    curve = Curve.of_points([(100.0, 2.0), (300.0, 4.0), (400.0, 7.0)])
    np.testing.assert_allclose(curve([100, 200, 300, 350, 400]), [2, 3, 4, 5.5, 7])


def test_a_curve_goes_on_at_the_last_bandwidth_and_starts_at_the_fixed_cost():
    curve = Curve.of_points([(400.0, 7.0), (100.0, 2.0), (300.0, 4.0)])
    np.testing.assert_allclose(curve([0, 50, 500, 1400]), [2, 2, 10, 37])


def test_noise_never_makes_more_bytes_cheaper():
    curve = Curve.of_points([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0), (4.0, 5.5)])
    np.testing.assert_allclose(curve([1, 2, 3, 4]), [4, 4, 5.5, 5.5])


def test_one_measured_point_is_a_constant():
    np.testing.assert_allclose(Curve.of_points([(10.0, 3.0)])([0, 10, 99]), 3.0)


@pytest.mark.parametrize(
    ("mode", "moved", "tensors", "exchanges"),
    [
        (Mode.AR_EP, 4 + 2, 3, True),
        (Mode.SP_EP, 1 + 2, 2, True),
        (Mode.SPECULATIVE, 1 + 2, 2, True),
        (Mode.DP_EP, 0, 0, True),
        (Mode.REPLICATED, 4 + 4, 4, False),
    ],
)
def test_layer_time_is_row_moves_and_dispatch_and_combine_and_experts(mode, moved, tensors, exchanges):
    rows, busiest, load = 1000, 300, 700
    wire = rows * 100 * 3 / 4  # S (G - 1) / G; an all-reduce moves it twice
    by_hand = moved * MICRO + tensors * wire * 1e-9 + load * 50 / 1e9
    by_hand += (8 + 16) * MICRO + 2 * busiest * 100 * 1e-9 if exchanges else 0
    one = np.array([rows]), np.array([busiest]), np.array([load])
    assert cost(mode).seconds(Traffic(*one))[0] == pytest.approx(by_hand)


def test_more_ranks_move_more_of_a_tensor():
    few, many = cost(Mode.SPECULATIVE, 2).row_moves(10_000), cost(Mode.SPECULATIVE, 8).row_moves(10_000)
    assert many - few == pytest.approx(2 * 10_000 * 100 * (7 / 8 - 1 / 2) * 1e-9)


@given(st.data())
def test_traffic_equals_a_count_by_hand(data):
    ranks, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    one_row = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    counts = np.array(data.draw(st.lists(one_row, min_size=rows, max_size=rows)))
    home = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=rows, max_size=rows)))
    bounds = sorted({0, data.draw(st.integers(1, rows)), rows})
    found = count_traffic(counts, home, np.array(bounds))
    for b, (start, stop) in enumerate(pairwise(bounds)):
        received, sent, load = [0] * ranks, [0] * ranks, [0] * ranks
        for row in range(start, stop):
            for g in range(ranks):
                load[g] += counts[row, g]
                if counts[row, g] and g != home[row]:
                    received[g] += 1
                    sent[home[row]] += 1
        assert found.rows[b] == stop - start
        assert found.busiest_rows[b] == max(received + sent)
        assert found.busiest_load[b] == max(load)
