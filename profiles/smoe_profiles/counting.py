"""Compiled loops that count routing. Every function adds to arrays it is given.

Axes: n rows, K experts a row, E experts of the layer, E' and E'' of the one and two before it, S token ids that are
counted, C entries. part: [n] 0 for fit, 1 for validation, larger for rows that are in no table. Expert ids must lie
inside their layer: that is not looked at here.

What random increments cost is the memory they touch. So large tables are counted in two arrays, low u8 and high u32, a
counter being low + 256 high: most increments end in the small one. Others are counted in u32, a row group at a time.
Indices are unsigned and flat, as numba would test signed ones for being negative.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

FIT_PARTS = 2
NOT_COUNTED = -1

Ids = npt.NDArray[np.unsignedinteger[Any]]
Low = npt.NDArray[np.uint8]
High = npt.NDArray[np.uint32]


@njit(cache=True)
def add_token_counts(
    low: Low, high: High, place: npt.NDArray[np.int32], order: npt.NDArray[np.uint32], experts: Ids
) -> None:
    """low, high: [R, E], R places of ids and parts. order: [n] rows by place, so that what is touched lies together;
    place: [n] that of order's rows, NOT_COUNTED for rows that are not, which come last. experts: [n, K].
    """
    low_flat, high_flat = low.reshape(-1), high.reshape(-1)
    for number in range(len(order)):
        if place[number] == NOT_COUNTED:
            break
        row = order[number]
        base = np.uint64(place[number]) * np.uint64(low.shape[1])
        for k in range(experts.shape[1]):
            cell = base + np.uint64(experts[row, k])
            value = low_flat[cell] + 1
            low_flat[cell] = value
            if value == 256:
                high_flat[cell] += np.uint32(1)


@njit(cache=True)
def add_pairs(popularity: High, pairs: High, part: npt.NDArray[np.uint8], experts: Ids) -> None:
    """popularity: [2, E]; pairs: [2, E, E], each two slots of a row once, the earlier slot's expert first."""
    popularity_flat, flat, size = popularity.reshape(-1), pairs.reshape(-1), np.uint64(pairs.shape[2])
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            base = np.uint64(part[row]) * size
            for i in range(experts.shape[1]):
                one = base + np.uint64(experts[row, i])
                popularity_flat[one] += np.uint32(1)
                for j in range(i + 1, experts.shape[1]):
                    flat[one * size + np.uint64(experts[row, j])] += np.uint32(1)


@njit(cache=True)
def add_transitions(transitions: High, part: npt.NDArray[np.uint8], before: Ids, experts: Ids) -> None:
    """transitions: [2, E', E]; before: [n, K'] the same rows' experts at the layer before."""
    flat, size = transitions.reshape(-1), np.uint64(transitions.shape[2])
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            base = np.uint64(part[row]) * np.uint64(transitions.shape[1])
            for i in range(before.shape[1]):
                line = (base + np.uint64(before[row, i])) * size
                for j in range(experts.shape[1]):
                    flat[line + np.uint64(experts[row, j])] += np.uint32(1)


@njit(cache=True)
def add_bigrams(
    low: Low, high: High, part: npt.NDArray[np.uint8], before: npt.NDArray[np.uint32], experts: Ids
) -> None:
    """low, high: [E'' E', E], both parts; before: [n] first E' + second, the top experts of the two layers before."""
    low_flat, high_flat = low.reshape(-1), high.reshape(-1)
    for row in range(len(part)):
        if part[row] < FIT_PARTS:
            base = np.uint64(before[row]) * np.uint64(low.shape[1])
            for k in range(experts.shape[1]):
                cell = base + np.uint64(experts[row, k])
                value = low_flat[cell] + 1
                low_flat[cell] = value
                if value == 256:
                    high_flat[cell] += np.uint32(1)


@njit(cache=True)
def add_entries(
    low: Low, high: High, place: npt.NDArray[np.int64], expert: npt.NDArray[np.uint16], count: npt.NDArray[np.uint64]
) -> None:
    """low, high: [R, E]; place, expert, count: [C]."""
    for entry in range(len(place)):
        value = np.uint64(low[place[entry], expert[entry]]) + count[entry]
        low[place[entry], expert[entry]] = value & np.uint64(255)
        high[place[entry], expert[entry]] += value >> np.uint64(8)


@njit(cache=True)
def find_entries(
    low: Low,
    high: High,
    least: int,
    row: npt.NDArray[np.int64],
    column: npt.NDArray[np.uint16],
    count: npt.NDArray[np.uint64],
) -> int:
    """Counters [R, E] of at least `least`, row by row, into row, column and count, [R * E] each. Returns how many.

    Every counter is written, and the next one over it if it is too small: a branch would be guessed wrong too often.
    """
    filled = 0
    for r in range(low.shape[0]):
        for c in range(low.shape[1]):
            value = np.uint64(low[r, c]) + (np.uint64(high[r, c]) << np.uint64(8))
            row[filled] = r
            column[filled] = c
            count[filled] = value
            filled += int(value >= np.uint64(least))
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
