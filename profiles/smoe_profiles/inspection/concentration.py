"""How far a token id alone tells its experts (kurtosis, hotness, hottest-K F1, as in arXiv 2503.04398).

Axes: U token ids, E experts, K experts a token, n rows. Tables are counts of (token id, expert), [U, E] sparse.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from smoe_profiles.trace import TraceLayer

Int64Array = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Concentration:
    """How few experts a token id uses; medians over ids seen in at least two rows, None if there are none.

    kurtosis: excess kurtosis over E of an id's activation counts; hottest: share of them on its K most used experts.
    """

    token_ids: int
    kurtosis: float | None
    hottest: float | None


@dataclass(frozen=True)
class Prediction:
    """How well the K experts that an id used most on the fit part foretell held-out rows (the paper's hottest-K).

    rows: held-out; covered: those whose id the fit part has; the F1 are over these. median_f1: None below level token.
    """

    rows: int
    covered: int
    median_f1: float | None
    mean_f1: float | None


def sparse_counts(rows: Int64Array, columns: Int64Array, shape: tuple[int, int]) -> csr_array:
    """How often each (row, column) stands in two lists of equal length, sparse [shape]."""
    counts = csr_array((np.ones(len(rows), np.int64), (rows, columns)), shape=shape)
    counts.sum_duplicates()
    return counts


def _order_in_row(table: csr_array) -> tuple[Int64Array, Int64Array]:
    """Entries by row, the largest first, ties to the lower expert: their order, and each one's place in its row."""
    table.sort_indices()
    row = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    most = int(table.data.max(initial=0))
    order = np.argsort(row * (most + 1) + (most - table.data), kind="stable")
    return order, np.arange(len(row)) - table.indptr[row]


def hottest(table: csr_array, top_k: int) -> Bools:
    """The K experts that each token id used most, ties to the lower; fewer where it used fewer. Returns [U, E]."""
    order, place = _order_in_row(table)
    row = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    hot = np.zeros(table.shape, np.bool_)
    chosen = order[place < top_k]
    hot[row[chosen], table.indices[chosen]] = True
    return hot


def concentration(table: csr_array, top_k: int) -> Concentration:
    """How few experts a token id uses. table: [U, E]; ids of one row are left out: they cannot but be."""
    table = table[table.sum(axis=1) >= 2 * top_k]
    if not table.shape[0]:
        return Concentration(0, None, None)
    order, place = _order_in_row(table)
    row = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    top = order[place < top_k]
    share = np.bincount(row[top], table.data[top], table.shape[0]) / table.sum(axis=1)
    kurtosis = excess_kurtosis(table)
    kurtosis = kurtosis[~np.isnan(kurtosis)]
    return Concentration(table.shape[0], float(np.median(kurtosis)) if len(kurtosis) else None, float(np.median(share)))


def excess_kurtosis(table: csr_array) -> npt.NDArray[np.float64]:
    """Fisher's excess kurtosis of every row, zeros included, [U]; NaN for a row of equal values."""
    rows, experts = table.shape
    stored = np.diff(table.indptr)
    mean = np.asarray(table.sum(axis=1), np.float64) / experts
    row = np.repeat(np.arange(rows), stored)
    off = table.data - mean[row]
    second, fourth = (
        (np.bincount(row, off**power, rows) + (experts - stored) * mean**power) / experts for power in (2, 4)
    )
    flat = second <= 1e-12 * mean**2
    return np.where(flat, np.nan, fourth / np.where(flat, 1, second) ** 2 - 3)


def full_kurtosis(layer: TraceLayer) -> float | None:
    """The excess kurtosis of an id that always chooses the same K of E experts; None where K is 0 or E."""
    share = layer.top_k / layer.num_experts if layer.num_experts else 0
    spread = share * (1 - share)
    return (1 - 6 * spread) / spread if spread > 0 else None


def set_f1(hot: Bools, index: Int64Array, ids: Int64Array) -> npt.NDArray[np.float64]:
    """F1 of a predicted set of experts against each row's own, [n]; NaN where nothing is predicted.

    hot: [U, E] the experts predicted for each token id; index: [n] which of them; ids: [n, K].
    """
    valid = (ids >= 0) & (ids < hot.shape[1])
    found = hot[index[:, None], np.where(valid, ids, 0)] & valid
    common = np.sum([column.astype(np.int64) for column in found.T], axis=0)
    size = hot.sum(axis=1)[index]
    return np.where(size, 2 * common / np.maximum(size + ids.shape[1], 1), np.nan)


def median_of(scores: Counter[float]) -> float | None:
    values = sorted(scores)
    if not values:
        return None
    upto = np.cumsum([scores[value] for value in values])
    middle = np.searchsorted(upto, [(upto[-1] - 1) // 2, upto[-1] // 2], side="right")
    return float(values[middle[0]] + values[middle[1]]) / 2
