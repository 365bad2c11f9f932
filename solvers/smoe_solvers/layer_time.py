"""Predicted time of one MoE layer on measured hardware, for each way to run it (docs/terms.md).

Axes: B batches, N rows, G ranks, P measured points. Only what a placement can change, and the row moves around it, is
counted: attention, the shared experts and reading the experts' weights cost the same wherever experts lie.

What is assumed beyond the two GPUs that were measured: every rank has a full-duplex link of the measured speed that all
others share (true of NVSwitch; kind to host memory and to one network card a host); a reduce-scatter or all-gather of
S bytes moves S (G-1)/G through each direction of it, an all-reduce twice that; fixed costs do not grow with G. Experts
compute at one rate: a small batch is bound by reading weights instead, so there a price on load is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int64Array
from smoe_solvers.choices import Mode

FloatArray = npt.NDArray[np.float64]


class Stage(StrEnum):
    """A step of a layer that moves rows between ranks, each with a measured curve."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    DISPATCH = "dispatch"
    COMBINE = "combine"


ROW_MOVES: dict[Mode, tuple[Stage, ...]] = {
    Mode.AR_EP: (Stage.ALL_REDUCE, Stage.ALL_GATHER),
    Mode.SP_EP: (Stage.REDUCE_SCATTER, Stage.ALL_GATHER),
    Mode.SPECULATIVE: (Stage.REDUCE_SCATTER, Stage.ALL_GATHER),
    Mode.DP_EP: (),
    Mode.REPLICATED: (Stage.ALL_REDUCE, Stage.ALL_REDUCE),
}
"""What moves every row of a batch, before and after the experts."""

EXCHANGE = (Stage.DISPATCH, Stage.COMBINE)
"""What moves the rows that need other ranks; the combine takes the dispatch's way back."""


@dataclass(frozen=True)
class Curve:
    """Seconds a stage takes, by bytes through the busiest direction of the busiest rank. bytes, seconds: [P], rising.

    Between points linear; below the first, its time (the fixed cost); above the last, at the last two points' slope.
    """

    bytes: FloatArray
    seconds: FloatArray

    @classmethod
    def of_points(cls, points: list[tuple[float, float]]) -> "Curve":
        """From measured (bytes, seconds); fewer bytes never take longer than more: noise is cut down to that."""
        bytes_, seconds = np.array(sorted(points), np.float64).T
        return cls(bytes_, np.minimum.accumulate(seconds[::-1])[::-1])

    def __call__(self, wire_bytes: npt.ArrayLike) -> FloatArray:
        """Seconds for each number of bytes."""
        wanted = np.asarray(wire_bytes, np.float64)
        seconds = np.interp(wanted, self.bytes, self.seconds)
        if len(self.bytes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.bytes[-1] - self.bytes[-2])
            seconds += np.maximum(wanted - self.bytes[-1], 0) * slope
        return np.asarray(seconds, np.float64)


@dataclass(frozen=True)
class Traffic:
    """What batches make of a placement, all [B].

    rows: T; busiest_rows: the most rows in or out of one rank in the dispatch; busiest_load: the most activations of
    one rank.
    """

    rows: npt.NDArray[np.number]
    busiest_rows: npt.NDArray[np.number]
    busiest_load: npt.NDArray[np.number]

    def scaled(self, rows: int) -> "Traffic":
        """The same batches as if each had so many rows, all in proportion: a short one is priced without what a launch
        costs whatever it moves, and with the unevenness of few rows.
        """
        share = rows / self.rows
        return Traffic(self.rows * share, self.busiest_rows * share, self.busiest_load * share)


@dataclass(frozen=True)
class LayerCost:
    """One way to run a layer on one kind of hardware.

    row_bytes: H times the bytes of an element; activation_flops: FLOP of one expert for one row; flop_rate: of a rank.
    """

    mode: Mode
    num_ranks: int
    row_bytes: int
    activation_flops: float
    flop_rate: float
    curves: Mapping[Stage, Curve]

    def row_moves(self, rows: npt.ArrayLike) -> FloatArray:
        """Seconds of what moves every row, for batches of that many rows."""
        wire = np.asarray(rows, np.float64) * self.row_bytes * (self.num_ranks - 1) / self.num_ranks
        seconds = np.zeros_like(wire)
        for stage in ROW_MOVES[self.mode]:
            seconds += self.curves[stage](2 * wire if stage is Stage.ALL_REDUCE else wire)
        return seconds

    def exchange(self, busiest_rows: npt.ArrayLike) -> FloatArray:
        """Seconds of dispatch and combine; none where every rank keeps all rows."""
        wire = np.asarray(busiest_rows, np.float64) * self.row_bytes
        if self.mode is Mode.REPLICATED:
            return np.zeros_like(wire)
        return np.asarray(sum(self.curves[stage](wire) for stage in EXCHANGE), np.float64)

    def experts(self, busiest_load: npt.ArrayLike) -> FloatArray:
        """Seconds until the busiest rank has computed its activations."""
        return np.asarray(busiest_load, np.float64) * (self.activation_flops / self.flop_rate)

    def seconds(self, traffic: Traffic) -> FloatArray:
        """Predicted layer time of each batch, [B]."""
        return self.row_moves(traffic.rows) + self.exchange(traffic.busiest_rows) + self.experts(traffic.busiest_load)


def count_traffic(counts: npt.NDArray[np.integer], home: npt.NDArray[np.integer], block_start: Int64Array) -> Traffic:
    """Traffic of batches. counts: [N, G] n_g; home: [N] rank each row lies on; block_start: [B + 1]."""
    everyone = np.arange(len(counts))
    remote = counts > 0
    remote[everyone, home] = False
    starts = block_start[:-1]
    received = np.add.reduceat(remote, starts, axis=0, dtype=np.int64)
    sent = np.zeros_like(received)
    batch = np.repeat(np.arange(len(starts)), np.diff(block_start))
    np.add.at(sent, (batch, home), remote.sum(axis=1))
    load = np.add.reduceat(counts, starts, axis=0, dtype=np.int64)
    return Traffic(np.diff(block_start), np.maximum(received, sent).max(axis=1), load.max(axis=1))
