"""Which experts a token will use, foretold from its id, its context, or the layers before (the paper's claims).

Axes: N rows, K experts a token, E experts, U contexts (token ids, or ids with those before them). A prediction is a
set of experts, bool [E]; scores are by row ("traffic") or by token id ("types"), which differ widely: rare ids are
most types and little traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NO_TOKEN = -1
"""Stands before the first token of a sequence."""


@dataclass(frozen=True)
class SetScores:
    """Predicted sets against true ones; all [M], precision and f1 NaN where nothing is predicted."""

    precision: FloatArray
    recall: FloatArray
    f1: FloatArray

    def take(self, kept: Bools) -> "SetScores":
        return SetScores(self.precision[kept], self.recall[kept], self.f1[kept])

    def means(self) -> tuple[float, float, float]:
        """Mean precision, recall and F1 over the entries that predict something; NaN if none does."""
        some = ~np.isnan(self.precision)
        if not some.any():
            return np.nan, np.nan, np.nan
        return float(self.precision[some].mean()), float(self.recall[some].mean()), float(self.f1[some].mean())


def expert_counts(index: Ids, experts: Ids, contexts: int, num_experts: int) -> Int64Array:
    """How often each context used each expert, [U, E]. index: [N] in [0, U); experts: [N, K]."""
    keys = index.astype(np.int64)[:, None] * num_experts + experts
    return np.bincount(keys.reshape(-1), minlength=contexts * num_experts).reshape(contexts, num_experts)


def hottest_sets(counts: npt.NDArray[np.number], size: int) -> Bools:
    """The `size` experts with most counts of each context, ties to the lower; fewer where fewer were used. [U, E]."""
    order = np.argsort(-counts, axis=1, kind="stable")[:, :size]
    hot = np.zeros(counts.shape, np.bool_)
    np.put_along_axis(hot, order, True, axis=1)
    used: Bools = hot & (counts > 0)
    return used


def likely_sets(counts: Int64Array, top_k: int, least: float) -> Bools:
    """Experts that at least this share of a context's rows used, [U, E]. counts: [U, E]."""
    rows = counts.sum(axis=1, keepdims=True) / top_k
    sets: Bools = (counts >= least * rows) & (counts > 0)
    return sets


def cumulative_hotness(counts: Int64Array, size: int) -> FloatArray:
    """Share of each context's activations on its `size` hottest experts, [U]; NaN for contexts never seen."""
    total = counts.sum(axis=1)
    top = np.where(hottest_sets(counts, size), counts, 0).sum(axis=1)
    return np.where(total > 0, top / np.maximum(total, 1), np.nan)


def score_rows(predicted: Bools, index: Ids, experts: Ids) -> SetScores:
    """Traffic: each row's own K experts against its context's set. predicted: [U, E]; index: [N]; experts: [N, K]."""
    hits = predicted[index[:, None], experts].sum(axis=1)
    return _scores(hits, predicted.sum(axis=1)[index], np.full(len(index), experts.shape[1]))


def score_types(predicted: Bools, used: Bools) -> SetScores:
    """Types: each context's predicted set against a set of experts that it used elsewhere. Both [U, E]."""
    return _scores((predicted & used).sum(axis=1), predicted.sum(axis=1), used.sum(axis=1))


def _scores(hits: Int64Array, predicted: Int64Array, true: Int64Array) -> SetScores:
    """hits, predicted, true: [M] sizes of sets."""
    some = predicted > 0
    return SetScores(
        np.where(some, hits / np.maximum(predicted, 1), np.nan),
        hits / np.maximum(true, 1),
        np.where(some, 2 * hits / np.maximum(predicted + true, 1), np.nan),
    )


def mean_by_type(values: FloatArray, index: Ids, contexts: int) -> FloatArray:
    """Mean over each context's rows, [U]; NaN without rows. values, index: [N]."""
    rows = np.bincount(index, minlength=contexts)
    total = np.bincount(index, weights=values, minlength=contexts)
    return np.where(rows > 0, total / np.maximum(rows, 1), np.nan)


def top_k_hits(expected: npt.NDArray[np.number], experts: Ids) -> Int64Array:
    """How many of each row's K experts are among the K of highest expectation, ties to the lower. Returns [N]."""
    order = np.argsort(-expected, axis=1, kind="stable")[:, : experts.shape[1]]
    chosen = np.zeros(expected.shape, np.bool_)
    np.put_along_axis(chosen, order, True, axis=1)
    hits: Int64Array = np.take_along_axis(chosen, experts.astype(np.int64), axis=1).sum(axis=1)
    return hits


def tokens_before(token_id: Ids, sequence: Ids, back: int) -> Int64Array:
    """The id `back` rows before each row in its sequence, NO_TOKEN across a border. All [N], rows in order."""
    before = np.full(len(token_id), NO_TOKEN, np.int64)
    if 0 < back < len(token_id):
        same = sequence[back:] == sequence[:-back]
        before[back:][same] = token_id[:-back][same]
    return before


def context_numbers(columns: Sequence[Int64Array]) -> tuple[Int64Array, int]:
    """One number for each distinct combination of columns, dense from 0. columns: [N] each. Returns [N] and U."""
    numbers, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        found, numbers = np.unique(numbers * len(values) + place, return_inverse=True)
        size = len(found)
    return numbers.astype(np.int64), size


def expected_activations(
    contexts: Sequence[Int64Array], experts: Ids, fit: Bools, num_experts: int, pseudo: Sequence[float]
) -> FloatArray:
    """Expected activations of every row that is not fitted on, [N - fit, E]; rows sum to K.

    contexts: coarse to fine, [N] numbers each (token, then previous token and token, ...), a finer one naming its
    coarser. A context starts with `pseudo` rows of the coarser one's expectation; the coarsest with popularity's.
    experts: [N, K]; fit: [N].
    """
    top_k = experts.shape[1]
    popularity = np.bincount(experts[fit].reshape(-1), minlength=num_experts)
    expected = np.tile(popularity * (top_k / popularity.sum()), (int((~fit).sum()), 1))
    for numbers, start in zip(contexts, pseudo, strict=True):
        asked, place = np.unique(numbers[~fit], return_inverse=True)
        known = fit & np.isin(numbers, asked)
        counts = expert_counts(np.searchsorted(asked, numbers[known]), experts[known], len(asked), num_experts)
        rows = counts.sum(axis=1, keepdims=True) / top_k
        expected = (counts[place] + start * expected) / (rows[place] + start)
    return expected


@dataclass(frozen=True)
class Guess:
    """A label foretold for each row; all [N]. confidence: its share in the context on the fitted rows.

    order: how many labels of history the context that was used has.
    """

    label: Int64Array
    confidence: FloatArray
    order: Int64Array


def ngram_guess(history: Int64Array, label: Int64Array, fit: Bools, least: int) -> Guess:
    """The commonest label after the longest known history, for every row that is not fitted on.

    history: [N, n] labels of the layers before, nearest last; label: [N]; fit: [N]. A history counts as known if the
    fitted rows have it at least `least` times; else the oldest label is left out, down to none. Ties to the lower.
    Raises ValueError if no row is fitted on.
    """
    if not fit.any():
        raise ValueError("no row to fit on")
    asked = int((~fit).sum())
    guess = Guess(np.zeros(asked, np.int64), np.zeros(asked), np.zeros(asked, np.int64))
    for order in range(history.shape[1] + 1):
        columns = [history[:, column] for column in range(history.shape[1] - order, history.shape[1])]
        numbers, size = context_numbers(columns or [np.zeros(len(label), np.int64)])
        best, seen, total = _commonest(numbers[fit], label[fit], size)
        mine = numbers[~fit]
        known = total[mine] >= (1 if order == 0 else least)
        guess.label[known] = best[mine[known]]
        guess.confidence[known] = seen[mine[known]] / total[mine[known]]
        guess.order[known] = order
    return guess


def _commonest(numbers: Int64Array, label: Int64Array, contexts: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of each context its commonest label, how often it stands there, and the context's rows. All [U]."""
    width = int(label.max()) + 1
    pairs, count = np.unique(numbers * width + label, return_counts=True)
    context = pairs // width
    order = np.lexsort((-count, context))
    first = np.ones(len(order), np.bool_)
    first[1:] = context[order][1:] != context[order][:-1]
    top = order[first]
    best, seen = np.zeros(contexts, np.int64), np.zeros(contexts, np.int64)
    best[context[top]], seen[context[top]] = pairs[top] % width, count[top]
    return best, seen, np.bincount(numbers, minlength=contexts)
