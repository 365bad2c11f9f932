"""The figures of docs/terms.md for one layer, one placement and one way of giving tokens homes.

Axes: N rows in batches of T, E experts, G ranks, K experts a token.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array, Int64Array, assign_exact, assign_rule
from smoe_solvers.choices import Assignment
from smoe_solvers.redundancy import Copies


@dataclass(frozen=True)
class Figures:
    """Measured over one part, in the words of docs/terms.md; busiest: rows in or out of the busiest rank, times G / T.

    rank_accuracy: share of rows whose best-scored rank holds most of their experts, None without scores;
    oracle_share: lar over that of a shuffle by true routing, of the same placement and assignment; None: not compared.
    """

    lar: float
    fanout: float
    remote_fanout: float
    remote_fanout_busiest: float
    load_imbalance: float
    load_imbalance_batch: float
    token_imbalance: float
    rank_accuracy: float | None = None
    oracle_share: float | None = None


@dataclass(frozen=True)
class GroupFigures:
    """Figures of every group of rows, all [M]; NaN for a group without rows."""

    rows: Int64Array
    lar: npt.NDArray[np.float64]
    remote_fanout: npt.NDArray[np.float64]


def batches(rows: int, size: int) -> list[slice]:
    """Runs of `size` consecutive rows, the last one shorter."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def quota(rows: int, ranks: int) -> int:
    return -(-rows // ranks)


def home_without_shuffle(rows: int, ranks: int, batch: int) -> Int32Array:
    """Where the i-th row of a batch lies without a shuffle: rank i // ceil(T / G). Returns [N].

    >>> home_without_shuffle(rows=7, ranks=2, batch=4)  # a whole batch and one of three rows
    array([0, 0, 1, 1, 0, 0, 1], dtype=int32)
    """
    homes = [np.arange(part.stop - part.start) // quota(part.stop - part.start, ranks) for part in batches(rows, batch)]
    return np.concatenate(homes).astype(np.int32)


def home_by_scores(scores: npt.NDArray[np.integer], batch: int, assignment: Assignment) -> Int32Array:
    """Where a shuffle by these scores puts each row. scores: [N, G]; returns [N].

    The rule reads u8 scores, of which 255 are all of a row's experts; others are scaled, so that the largest is 255.

    >>> scores = np.array([[0, 255], [0, 255], [255, 0], [0, 200]], np.uint8)
    >>> home_by_scores(scores, batch=4, assignment=Assignment.RULE)
    array([1, 1, 0, 0], dtype=int32)
    """
    ranks = scores.shape[1]
    if assignment is Assignment.EXACT:
        parts = [assign_exact(scores[part], quota(len(scores[part]), ranks)) for part in batches(len(scores), batch)]
    else:
        scaled = scores if scores.dtype == np.uint8 else np.rint(scores * (255 / max(scores.max(), 1)))
        narrow = scaled.astype(np.uint8)
        parts = [assign_rule(narrow[part], quota(len(narrow[part]), ranks)) for part in batches(len(narrow), batch)]
    return np.concatenate(parts)


def measure(
    counts: npt.NDArray[np.int32],
    home: Int32Array,
    batch: int,
    wishes: npt.NDArray[np.integer] | None,
    copies: Copies | None = None,
) -> Figures:
    """All figures.

    counts: [N, G] n_g; home: [N]; wishes: [N, G] scores before any quota, or None without a shuffle; copies: the rows
    where experts have several copies, so that what a rank serves depends on the home.

    >>> counts = np.array([[2, 0], [1, 1], [0, 2], [1, 1]])
    >>> found = measure(counts, home_without_shuffle(4, 2, batch=4), batch=4, wishes=None)
    >>> found.lar, found.fanout, found.remote_fanout
    (0.75, 1.5, 0.5)
    """
    rows, ranks = counts.shape
    at_home = counts[np.arange(rows), home]
    served = copies.served(home) if copies else counts
    fanout = copies.fanout() if copies else (counts > 0).sum(axis=1)
    remote = served > 0
    remote[np.arange(rows), home] = False
    parts = batches(rows, batch)
    busiest = sum(_busiest_rank(remote[part], home[part]) for part in parts)
    loads = np.stack([served[part].sum(axis=0) for part in parts])
    wished = np.ones(ranks) if wishes is None else np.bincount(wishes.argmax(axis=1), minlength=ranks)
    return Figures(
        lar=float(at_home.sum() / served.sum()),
        fanout=float(fanout.mean()),
        remote_fanout=float(remote.sum(axis=1).mean()),
        remote_fanout_busiest=float(busiest * ranks / rows),
        load_imbalance=imbalance(served.sum(axis=0)),
        load_imbalance_batch=imbalance_by_batch(loads),
        token_imbalance=imbalance(wished),
        rank_accuracy=None if wishes is None else rank_accuracy(wishes, counts),
    )


def measure_groups(
    counts: npt.NDArray[np.int32],
    home: Int32Array,
    group: npt.NDArray[np.integer],
    groups: int,
    copies: Copies | None = None,
) -> GroupFigures:
    """lar and remote fan-out of groups of rows that were given homes together.

    counts: [N, G] n_g; home: [N]; group: [N] in [0, M); copies: as in `measure`. Returns figures [M].
    """
    rows = np.arange(len(counts))
    served = copies.served(home) if copies else counts
    needed = served > 0
    remote = needed.sum(axis=1) - needed[rows, home]

    def total(values: npt.NDArray[np.number]) -> npt.NDArray[np.float64]:
        return np.bincount(group, weights=values, minlength=groups).astype(np.float64)

    size = np.bincount(group, minlength=groups)
    with np.errstate(invalid="ignore"):
        lar, apart = total(counts[rows, home]) / total(served.sum(axis=1)), total(remote) / size
    return GroupFigures(size, lar, apart)


def rank_accuracy(wishes: npt.NDArray[np.number], counts: npt.NDArray[np.number]) -> float:
    """Share of rows whose highest score is on the rank that holds most of their experts; ties to the lower rank.

    wishes, counts: [N, G].
    """
    return float((wishes.argmax(axis=1) == counts.argmax(axis=1)).mean())


def imbalance(load: npt.NDArray[np.number]) -> float:
    """The largest over the mean. load: [G]."""
    return float(load.max() / load.mean())


def imbalance_by_batch(loads: npt.NDArray[np.integer]) -> float:
    """The most loaded rank of each batch over the mean, batches weighed by what they load. loads: [B, G]."""
    return float(loads.max(axis=1).sum() * loads.shape[1] / loads.sum())


def _busiest_rank(remote: npt.NDArray[np.bool_], home: Int32Array) -> int:
    """Rows through the busiest direction of the busiest rank in one dispatch."""
    received = remote.sum(axis=0)
    sent = np.bincount(home, weights=remote.sum(axis=1), minlength=remote.shape[1])
    return int(max(received.max(), sent.max()))


def wire_rows(remote_fanout: float, ranks: int) -> dict[str, float]:
    """Rows of H elements a token and layer, summed over ranks, for each way to run a layer.

    >>> {way: round(rows, 2) for way, rows in wire_rows(remote_fanout=2.5, ranks=8).items()}
    {'ar-ep': 26.0, 'sp-ep': 19.0, 'speculative': 19.0, 'dp-ep': 5.0, 'replicated': 28.0}
    """
    gather, exchange = ranks - 1, 2 * remote_fanout
    return {
        "ar-ep": 2 * gather + exchange + gather,
        "sp-ep": gather + exchange + gather,
        "speculative": gather + exchange + gather,
        "dp-ep": exchange,
        "replicated": 4.0 * gather,
    }


def mean_figures(figures: list[Figures]) -> Figures:
    """The mean over layers, figure by figure; None where a layer has none."""
    columns: dict[str, list[Any]] = {name: [getattr(one, name) for one in figures] for name in asdict(figures[0])}
    means: dict[str, Any] = {
        name: None if None in column else float(np.mean(column)) for name, column in columns.items()
    }
    return Figures(**means)
