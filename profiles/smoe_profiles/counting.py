"""Compiled loops that count routing (design 3). Every function adds to arrays it is given.

Axes: n rows, K experts a row, E experts of the layer, E' and E'' of the one and two before it, V vocabulary, S token
ids that are counted, C entries. part: [n] 0 for fit, 1 for validation, larger for rows that are in no table. Expert ids
must lie inside their layer and counters must be wide enough: neither is looked at here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

FIT_PARTS = 2
NOT_COUNTED = -1


@njit(cache=True)
def add_token_counts(
    counts: npt.NDArray[np.unsignedinteger[Any]],
    slot: npt.NDArray[np.int32],
    part: npt.NDArray[np.uint8],
    token_id: npt.NDArray[np.uint32],
    experts: npt.NDArray[np.unsignedinteger[Any]],
) -> None:
    """counts: [2, S, E]; slot: [V] the place of each id among S, or NOT_COUNTED; an id of V or more is not counted."""
    for row in range(len(part)):
        if part[row] < FIT_PARTS and token_id[row] < len(slot):
            place = slot[token_id[row]]
            if place != NOT_COUNTED:
                for k in range(experts.shape[1]):
                    counts[part[row], place, experts[row, k]] += 1


@njit(cache=True)
def add_pairs(
    popularity: npt.NDArray[np.int64],
    pairs: npt.NDArray[np.int64],
    part: npt.NDArray[np.uint8],
    experts: npt.NDArray[np.unsignedinteger[Any]],
) -> None:
    """popularity: [2, E]; pairs: [2, E, E], each two slots of a row once, the earlier slot's expert first."""
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            for i in range(experts.shape[1]):
                one = experts[row, i]
                popularity[part[row], one] += 1
                for j in range(i + 1, experts.shape[1]):
                    pairs[part[row], one, experts[row, j]] += 1


@njit(cache=True)
def add_transitions(
    transitions: npt.NDArray[np.int64],
    part: npt.NDArray[np.uint8],
    before: npt.NDArray[np.unsignedinteger[Any]],
    experts: npt.NDArray[np.unsignedinteger[Any]],
) -> None:
    """transitions: [2, E', E]; before: [n, K'] the same rows' experts at the layer before."""
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            for i in range(before.shape[1]):
                for j in range(experts.shape[1]):
                    transitions[part[row], before[row, i], experts[row, j]] += 1


@njit(cache=True)
def add_bigrams(
    bigrams: npt.NDArray[np.unsignedinteger[Any]],
    part: npt.NDArray[np.uint8],
    first: npt.NDArray[np.unsignedinteger[Any]],
    second: npt.NDArray[np.unsignedinteger[Any]],
    experts: npt.NDArray[np.unsignedinteger[Any]],
) -> None:
    """bigrams: [E'', E', E], both parts together; first, second: [n] top experts two layers and one layer before."""
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            for k in range(experts.shape[1]):
                bigrams[first[row], second[row], experts[row, k]] += 1


@njit(cache=True)
def find_entries(
    counters: npt.NDArray[np.unsignedinteger[Any]],
    least: int,
    row: npt.NDArray[np.int64],
    column: npt.NDArray[np.uint16],
    count: npt.NDArray[np.unsignedinteger[Any]],
) -> int:
    """Counters [R, E] of at least `least`, row by row, into row, column and count, [R * E] each. Returns how many.

    Every counter is written, and the next one over it if it is too small: a branch would be guessed wrong too often.
    """
    filled = 0
    for r in range(counters.shape[0]):
        for c in range(counters.shape[1]):
            row[filled] = r
            column[filled] = c
            count[filled] = counters[r, c]
            filled += counters[r, c] >= least
    return filled


@njit(cache=True)
def number_blocks(
    source: npt.NDArray[np.int32], length: int, state: npt.NDArray[np.int64], block: npt.NDArray[np.int64]
) -> None:
    """Cut rows of one part into runs of one source, at most `length` rows each, and number them.

    source: [n]; block: [n], filled in. state: blocks so far, rows of the last one, its source; begins as zeros.
    """
    for row in range(len(source)):
        if state[0] == 0 or state[1] == length or state[2] != source[row]:
            state[0] += 1
            state[1] = 0
            state[2] = source[row]
        state[1] += 1
        block[row] = state[0] - 1


@njit(cache=True)
def add_sorted(
    keys: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    one: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    other: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> int:
    """Merge two lists of (keys, counts), keys rising in each, counts of equal keys added. Returns how many are left.

    keys, counts: [C + C'], filled in.
    """
    i = j = filled = 0
    while i < len(one[0]) or j < len(other[0]):
        left = j == len(other[0]) or (i < len(one[0]) and one[0][i] <= other[0][j])
        right = i == len(one[0]) or (j < len(other[0]) and other[0][j] <= one[0][i])
        keys[filled] = one[0][i] if left else other[0][j]
        counts[filled] = 0
        if left:
            counts[filled] += one[1][i]
            i += 1
        if right:
            counts[filled] += other[1][j]
            j += 1
        filled += 1
    return filled
