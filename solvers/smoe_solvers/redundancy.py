"""Experts with copies on several ranks: which copy serves a token.

Axes: N tokens, K experts a token, E experts, G ranks. `hosts`: [E, G] whether a rank holds a copy of an expert. Sets of
ranks are bit masks with rank 0 as the highest bit: of two covers of one size the larger number is the one to take.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import Int32Array, Int64Array

MAX_RANKS = 64

BoolArray = npt.NDArray[np.bool_]

_ONE = np.uint64(1)
_NONE = np.uint64(0)


@dataclass(frozen=True)
class Copies:
    """Rows whose experts may be had from several ranks. experts: [N, K]; hosts: [E, G]."""

    experts: npt.NDArray[np.integer]
    hosts: BoolArray

    def served(self, home: Int32Array) -> Int32Array:
        """How many of each row's experts every rank serves, [N, G]. home: [N]."""
        rank = serve(self.experts, home, self.hosts)
        return np.stack([(rank == g).sum(axis=1) for g in range(self.hosts.shape[1])], axis=1).astype(np.int32)

    def fanout(self) -> Int64Array:
        """The least number of ranks that hold each row's experts, [N]."""
        return least_cover(self.experts, self.hosts)


def single_hosts(expert_to_rank: npt.NDArray[np.integer], num_ranks: int) -> BoolArray:
    """The hosts of experts that have one rank each, [E, G]. expert_to_rank: [E].

    >>> single_hosts(np.array([0, 1, 0]), num_ranks=2).astype(int)
    array([[1, 0],
           [0, 1],
           [1, 0]])
    """
    hosts: BoolArray = expert_to_rank[:, None] == np.arange(num_ranks)
    return hosts


def serve(experts: npt.NDArray[np.integer], home: npt.NDArray[np.integer], hosts: BoolArray) -> Int32Array:
    """The rank that serves each choice of each token, [N, K]. experts: [N, K]; home: [N]; hosts: [E, G].

    An expert with a copy on the token's home is served there. The token's other experts are served by the fewest ranks
    that hold them all; of several such sets of ranks, the one whose sorted ranks come first in lexicographic order;
    each expert by the lowest rank of that set that holds it. So the answer depends on nothing but the row.
    Raises ValueError if an expert has no copy, or there are more than MAX_RANKS ranks.

    >>> hosts = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 1]], bool)  # expert 1 has copies on ranks 1 and 2
    >>> serve(np.array([[0, 1], [1, 2]]), home=np.array([0, 1]), hosts=hosts)
    array([[0, 1],
           [1, 2]], dtype=int32)
    """
    masks = host_masks(hosts)
    rank_of_choice = np.empty(experts.shape, np.int32)
    _serve(np.ascontiguousarray(experts, np.int64), np.ascontiguousarray(home, np.int64), masks, rank_of_choice)
    return rank_of_choice


def least_cover(experts: npt.NDArray[np.integer], hosts: BoolArray) -> Int64Array:
    """The least number of ranks that hold each row's experts, [N]. experts: [N, K]; hosts: [E, G].

    Raises ValueError as `serve` does.
    """
    sizes: Int64Array = _cover_sizes(np.ascontiguousarray(experts, np.int64), host_masks(hosts))
    return sizes


def host_masks(hosts: BoolArray) -> npt.NDArray[np.uint64]:
    """The ranks of every expert as bits, rank 0 the highest, [E]. hosts: [E, G]. Raises ValueError as `serve` does."""
    ranks = hosts.shape[1]
    if ranks > MAX_RANKS:
        raise ValueError(f"experts with copies on {ranks} ranks; at most {MAX_RANKS} can be")
    if not hosts.any(axis=1).all():
        raise ValueError(f"expert {int(hosts.any(axis=1).argmin())} is on no rank")
    bits = _ONE << (MAX_RANKS - 1 - np.arange(ranks, dtype=np.uint64))
    masks: npt.NDArray[np.uint64] = np.where(hosts, bits, _NONE).sum(axis=1, dtype=np.uint64)
    return masks


@njit(cache=True)
def count_bits(mask):  # type: ignore[no-untyped-def]
    bits = 0
    while mask != _NONE:
        mask &= mask - _ONE
        bits += 1
    return bits


@njit(cache=True)
def highest_bit(mask):  # type: ignore[no-untyped-def]
    """The lowest rank of a mask that is not empty, as a mask."""
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    return mask ^ (mask >> _ONE)


@njit(cache=True)
def cover(wanted, count, work):  # type: ignore[no-untyped-def]
    """The ranks that meet every one of wanted[:count], masks of hosts: the fewest, then the largest number.

    work: [2 ** K] uint64. Experts of one host fix their rank, and one is met with any other whose hosts are all its
    own. The subsets of what these leave are solved in turn, each by a rank of its first expert and the cover of the
    rest.
    """
    fixed = _NONE
    for i in range(count):
        if wanted[i] & (wanted[i] - _ONE) == _NONE:
            fixed |= wanted[i]
    left = 0
    for i in range(count):
        if wanted[i] & fixed == _NONE and not _met(wanted, left, i, count):
            wanted[left] = wanted[i]
            left += 1
    if left == 0:
        return fixed
    if left == 1:
        return fixed | highest_bit(wanted[0])
    if left == 2:
        common = wanted[0] & wanted[1]
        if common != _NONE:
            return fixed | highest_bit(common)
        return fixed | highest_bit(wanted[0]) | highest_bit(wanted[1])
    work[0] = _NONE
    for subset in range(1, 1 << left):
        work[subset] = _best_cover(subset, wanted, left, work)
    return fixed | work[(1 << left) - 1]


@njit(cache=True)
def _met(wanted, left, i, count):  # type: ignore[no-untyped-def]
    """Whether one of wanted[:left] or wanted[i + 1:count] has no host that wanted[i] has not."""
    for j in range(left):
        if wanted[j] & ~wanted[i] == _NONE:
            return True
    for j in range(i + 1, count):  # noqa: SIM110 (compiled: a generator would be slower)
        if wanted[j] & ~wanted[i] == _NONE:
            return True
    return False


@njit(cache=True)
def _best_cover(subset, wanted, left, work):  # type: ignore[no-untyped-def]
    """The cover of a subset of wanted[:left], by those of smaller ones."""
    first = 0
    while not subset >> first & 1:
        first += 1
    best, fewest = _NONE, MAX_RANKS + 1
    ranks = wanted[first]
    while ranks != _NONE:
        rank = highest_bit(ranks)
        ranks ^= rank
        rest = subset
        for i in range(first, left):
            if wanted[i] & rank != _NONE:
                rest &= ~(1 << i)
        found = work[rest] | rank
        size = count_bits(found)
        if size < fewest or (size == fewest and found > best):
            best, fewest = found, size
    return best


@njit(cache=True)
def _serve(experts, home, masks, rank_of_choice):  # type: ignore[no-untyped-def]
    tokens, choices = experts.shape
    wanted = np.empty(choices, np.uint64)
    work = np.empty(1 << choices, np.uint64)
    for t in range(tokens):
        here = _ONE << np.uint64(MAX_RANKS - 1 - home[t])
        count = 0
        for k in range(choices):
            mask = masks[experts[t, k]]
            if mask & here == _NONE:
                wanted[count] = mask
                count += 1
        chosen = cover(wanted, count, work)
        for k in range(choices):
            mask = masks[experts[t, k]]
            serving = here if mask & here != _NONE else highest_bit(mask & chosen)
            rank_of_choice[t, k] = MAX_RANKS - 1 - count_bits(serving - _ONE)


@njit(cache=True)
def _cover_sizes(experts, masks):  # type: ignore[no-untyped-def]
    rows, choices = experts.shape
    wanted = np.empty(choices, np.uint64)
    work = np.empty(1 << choices, np.uint64)
    sizes = np.empty(rows, np.int64)
    for t in range(rows):
        for k in range(choices):
            wanted[k] = masks[experts[t, k]]
        sizes[t] = count_bits(cover(wanted, choices, work))
    return sizes
