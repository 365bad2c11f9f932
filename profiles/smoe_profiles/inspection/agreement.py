"""Whether two traces of the same text chose the same experts, near ties told apart from real differences.

Axes: N rows of the first trace, n of a row group, K experts a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError
from smoe_profiles.trace import Trace, TraceLayer, to_numpy

KEYS = ("sequence", "position", "token_id")
TIE_UNITS = 2

Int64Array = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Matching:
    """Which rows of two traces are the same token in the same place. other: [N] row of the other trace, -1: none.

    alone, other_alone: rows that only one trace has.
    """

    other: Int64Array
    alone: int
    other_alone: int


@dataclass(frozen=True)
class LayerAgreement:
    """One layer of matched rows: how many name equal sets, differ by near ties only, or really differ.

    jaccard: mean over rows of common experts / all experts named; unweighed: differing rows that hold no weights, so
    that ties cannot be told.
    """

    layer: TraceLayer
    rows: int
    equal: int
    ties: int
    differing: int
    unweighed: int
    jaccard: float


def match_rows(one: Trace, other: Trace) -> Matching:
    """Match rows by (sequence, position, token_id); of rows that repeat a place the first counts.

    Raises InputError if no row matches.
    """
    ours, theirs = (_keys(trace) for trace in (one, other))
    place = [keys[0].astype(np.uint64) << 32 | keys[1] for keys in (ours, theirs)]
    order = np.argsort(place[1], kind="stable")
    found = np.searchsorted(place[1][order], place[0])
    found = order[np.minimum(found, len(order) - 1)] if len(order) else np.zeros(len(place[0]), np.int64)
    same = np.zeros(len(found), np.bool_)
    if len(order):
        same = (place[1][found] == place[0]) & (theirs[2][found] == ours[2])
    if not same.any():
        raise InputError(
            f"{one.artefact.path} and {other.artefact.path} have no row in common (sequence, position and token id); "
            "they are not of the same text."
        )
    matched = np.where(same, found, -1)
    return Matching(matched, int((~same).sum()), len(place[1]) - len(np.unique(found[same])))


def _keys(trace: Trace) -> list[npt.NDArray[np.uint32]]:
    pieces = [[to_numpy(table[key]) for key in KEYS] for table in trace.groups(KEYS)]
    return [np.concatenate([np.empty(0, np.uint32), *column]) for column in zip(*pieces, strict=True)] or [
        np.empty(0, np.uint32) for _ in KEYS
    ]


def compare_traces(
    one: Trace, other: Trace, matching: Matching, progress: Callable[[int], None]
) -> list[LayerAgreement]:
    """Agreement in every layer that both hold; the other trace's column of one layer is in memory at a time.

    Raises InputError if a layer has another number of experts in the other trace.
    """
    theirs = {(layer.stack, layer.id): layer for layer in other.layers}
    found = []
    for layer in one.layers:
        twin = theirs.get((layer.stack, layer.id))
        if twin is not None:
            if twin.num_experts != layer.num_experts:
                raise InputError(
                    f"layer {layer.id} has {layer.num_experts} experts in {one.artefact.path} and {twin.num_experts} "
                    f"in {other.artefact.path}; they are of two models."
                )
            found.append(_compare_layer(one, other, layer, matching))
        progress(1)
    return found


def _compare_layer(one: Trace, other: Trace, layer: TraceLayer, matching: Matching) -> LayerAgreement:
    columns = [layer.column, layer.weight_column]
    theirs = [np.concatenate(pieces) for pieces in zip(*_columns(other, columns), strict=True)]
    start = equal = ties = unweighed = rows = 0
    jaccard = 0.0
    for ids, weights in _columns(one, columns):
        index = matching.other[start : start + len(ids)]
        start += len(ids)
        here = index >= 0
        ids, weights, index = ids[here], weights[here], index[here]
        differ, overlap = _differences(ids, theirs[0][index])
        rows += len(ids)
        equal += int((~differ).sum())
        jaccard += float(overlap.sum())
        index = index[differ]
        tied, known = near_ties(ids[differ], weights[differ], theirs[0][index], theirs[1][index])
        ties += int(tied.sum())
        unweighed += int((~known).sum())
    return LayerAgreement(layer, rows, equal, ties, rows - equal - ties, unweighed, jaccard / max(rows, 1))


def _columns(trace: Trace, names: list[str]) -> Iterator[list[npt.NDArray[np.generic]]]:
    for table in trace.groups(names):
        yield [to_numpy(table[name]) for name in names]


def _differences(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> tuple[Bools, npt.NDArray[np.float64]]:
    """Which rows name different sets, [n], and the Jaccard index of each, [n]. one: [n, K]; other: [n, K']."""
    common = (one[:, :, None] == other[:, None, :]).any(axis=2).sum(axis=1)
    every = one.shape[1] + other.shape[1] - common
    return common < every, common / every


def near_ties(
    one: npt.NDArray[np.generic],
    one_weights: npt.NDArray[np.generic],
    other: npt.NDArray[np.generic],
    other_weights: npt.NDArray[np.generic],
) -> tuple[Bools, Bools]:
    """Which rows differ by near ties only, and which hold weights on both sides, [n] both.

    A near tie: the weights of all experts that only one side names, and both sides' K-th weights, lie within two units
    of f16 rounding of each other, so that rounding may have chosen between them. ids and weights: [n, K].
    """
    known: Bools = np.ones(len(one), np.bool_)
    weights = []
    for values in (one_weights.astype(np.float32), other_weights.astype(np.float32)):
        known &= ~np.isnan(values).any(axis=1)
        weights.append(np.nan_to_num(values))
    last = [values.min(axis=1, initial=np.inf) for values in weights]
    unit = np.spacing(np.maximum(*last).astype(np.float16)).astype(np.float32)
    low, high = np.minimum(*last), np.maximum(*last)
    same = one[:, :, None] == other[:, None, :]
    for values, shared in ((weights[0], same.any(axis=2)), (weights[1], same.any(axis=1))):
        low = np.minimum(low, np.where(shared, np.inf, values).min(axis=1, initial=np.inf))
        high = np.maximum(high, np.where(shared, -np.inf, values).max(axis=1, initial=-np.inf))
    tied: Bools = known & (high - low <= TIE_UNITS * unit)
    return tied & np.full(len(tied), one.shape[1] == other.shape[1]), known
