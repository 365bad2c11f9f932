"""Rows that repeat each other although their tokens change, told from what chance makes of them.

Axes: n rows of a row group, W ids a row, S sequences. Thresholds leave room for real routing: the longest run of equal
rows over changing tokens in public traces is 14 (gpt-oss-20b, 34k decode rows).
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.inspection.scan import LayerGroup
from smoe_profiles.trace import UNKNOWN_TOKEN

MIN_RUN = 32
MIN_DECODE = 16
UNLIKELY = 1e-3
"""A run that chance explains must be expected fewer times than this in the whole layer to be called sick."""

MIN_STAY = 0.5
"""Routing is bursty: the chance that a row repeats the one before is taken as at least this."""

_HASH = np.random.default_rng(0).integers(0, 2**64, 65_536, np.uint64)

Keys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


def set_keys(ids: npt.NDArray[Any]) -> Keys:
    """A number for each row's set of experts, [n], whatever their order. ids: [n, W]."""
    key = np.zeros(len(ids), np.uint64)
    for column in ids.T:  # a sum over so short an axis is slower
        key += _HASH[column.astype(np.int64) & 0xFFFF]
    return key


@dataclass
class EqualRuns:
    """Stretches of consecutive rows that name the same experts while tokens change.

    A run counts its token changes plus one; a token that is not known counts as a change. pairs, equal: consecutive
    rows with changing tokens, and those of them with equal experts; runs: length -> how many, from MIN_RUN on.
    """

    pairs: int = 0
    equal: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    longest: tuple[int, int] = (0, 0)
    _key: Keys = field(default_factory=lambda: np.empty(0, np.uint64))
    _token: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    _open: tuple[int, int] = (0, 0)  # changes and first row of the run that goes on

    def add(self, key: Keys, group: LayerGroup, skipped: Bools) -> None:
        """Go on with a row group. key: [n] of `set_keys`; skipped: [n] rows that belong to no run."""
        carried, row = len(self._key), group.facts.row
        key = np.concatenate([self._key, key])
        token = np.concatenate([self._token, group.facts.token_id])
        same = (key[1:] == key[:-1]) & ~np.concatenate([np.zeros(carried, np.bool_), skipped])[1:]
        change = (token[1:] != token[:-1]) | (token[1:] == UNKNOWN_TOKEN)
        self.pairs += int(change.sum())
        self.equal += int((same & change).sum())
        starts = np.concatenate([[0], np.flatnonzero(~same) + 1])
        done = np.concatenate([[0], np.cumsum(same & change)])
        changes = done[np.concatenate([starts[1:] - 1, [len(key) - 1]])] - done[starts]
        first = row[np.maximum(starts - carried, 0)]
        if carried:
            changes[0] += self._open[0]
            first[0] = self._open[1]
        long = np.flatnonzero(changes[:-1] + 1 >= MIN_RUN)
        for run in long:
            self._close(int(changes[run]), int(first[run]))
        self._open = int(changes[-1]), int(first[-1])
        self._key, self._token = key[-1:], token[-1:]

    def finish(self) -> None:
        if self._open[0] + 1 >= MIN_RUN:
            self._close(*self._open)
        self._open = (0, 0)

    def _close(self, changes: int, first: int) -> None:
        self.runs[changes + 1] += 1
        self.longest = max(self.longest, (changes + 1, first), key=lambda run: run[0])

    @property
    def stay(self) -> float:
        """The chance that a row repeats the one before although the token changed, outside the long runs."""
        inside = sum((length - 1) * count for length, count in self.runs.items())
        outside = self.pairs - inside
        return max(MIN_STAY, (self.equal - inside) / outside if outside else 0.0)

    def sick(self) -> dict[int, int]:
        """Runs longer than chance explains: length -> how many."""
        limit = longest_by_chance(self.pairs, self.stay)
        return {length: count for length, count in self.runs.items() if length > limit}


def longest_by_chance(trials: int, stay: float) -> float:
    """The longest run that chance may well make in so many rows, if a row repeats the one before with chance `stay`."""
    return inf if stay >= 1 else 1 + log(max(trials, 1) / UNLIKELY) / -log(stay)


@dataclass
class DecodeRows:
    """Decode rows by sequence: how many, and the least and greatest key and token of each. All [S], sequence sorted."""

    state: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty((6, 0), np.uint64))

    def add(self, key: Keys, token_id: npt.NDArray[np.uint32], sequence: npt.NDArray[np.int64]) -> None:
        token = token_id.astype(np.uint64)
        rows = np.stack([sequence.astype(np.uint64), np.ones(len(key), np.uint64), key, key, token, token])
        both = np.concatenate([self.state, rows], axis=1)
        both = both[:, np.argsort(both[0], kind="stable")]
        starts = np.flatnonzero(np.concatenate([[True], both[0, 1:] != both[0, :-1]]))
        merge = (np.minimum, np.add, np.minimum, np.maximum, np.minimum, np.maximum)
        self.state = np.stack([how.reduceat(line, starts) for how, line in zip(merge, both, strict=True)])

    def constant(self, stay: float) -> tuple[npt.NDArray[np.int64], int]:
        """Sequences whose decode rows never change although their tokens do, and the rows in them."""
        sequence, rows, key_low, key_high, token_low, token_high = self.state
        limit = max(MIN_DECODE - 1, longest_by_chance(len(sequence), stay))
        tokens_change = (token_low != token_high) | (token_high == UNKNOWN_TOKEN)
        found = (key_low == key_high) & tokens_change & (rows > limit)
        return sequence[found].astype(np.int64), int(rows[found].sum())
