"""Whole requests given to ranks, as under attention-DP: each rank holds its own requests' rows.

Axes: R requests in order of arrival, N rows of S sequences, G ranks. A request is known by its sums over rows, so that
it may be a sequence cut short or run through many times over.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.figures import Figures, batches, imbalance, imbalance_by_batch, rank_accuracy


def cyclic_sums(
    values: npt.NDArray[np.integer], start: Int64Array, sequence: Int64Array, length: Int64Array
) -> Int64Array:
    """Sums over the first `length` rows of each request's sequence, which starts over at its end.

    values: [N, G]; start: [S + 1], sequence s is rows start[s] .. start[s + 1]; sequence, length: [R].
    Returns [R, G].
    """
    before = np.concatenate([np.zeros((1, values.shape[1]), np.int64), np.cumsum(values, axis=0, dtype=np.int64)])
    first, last = start[sequence], start[sequence + 1]
    times, rest = np.divmod(length, last - first)
    sums: Int64Array = times[:, None] * (before[last] - before[first]) + before[first + rest] - before[first]
    return sums


def route(scores: Int64Array) -> Int32Array:
    """Each request to its best rank that took none in this round, ties to the lower; G requests make a round.

    scores: [R, G] in order of arrival. Returns request_to_rank: [R].
    """
    requests, ranks = scores.shape
    request_to_rank = np.empty(requests, np.int32)
    for one_round in batches(requests, ranks):
        left = scores[one_round].astype(np.float64)
        for place, row in enumerate(left):
            rank = int(row.argmax())
            request_to_rank[one_round.start + place] = rank
            left[:, rank] = -np.inf
    return request_to_rank


def route_exact(scores: Int64Array) -> Int32Array:
    """The requests of each round to ranks at once, at the highest total score; a round waits for G of them.

    scores: [R, G] in order of arrival. Returns request_to_rank: [R].
    """
    rounds = batches(*scores.shape)
    parts = [linear_sum_assignment(scores[part], maximize=True)[1] for part in rounds]
    return np.concatenate(parts).astype(np.int32)


def route_in_turn(requests: int, ranks: int) -> Int32Array:
    """Round robin: the i-th request on rank i mod G. Returns [R]."""
    return (np.arange(requests) % ranks).astype(np.int32)


@dataclass(frozen=True)
class RequestLoad:
    """One layer's sums over each request's rows, at the homes that requests have.

    held, served: [R, G] activations whose expert each rank holds, and those that it serves; needed: [R, G] rows that
    the rank serves anything of; fanout: [R]. Without copies of experts, served is held and fanout the sum of needed.
    """

    held: Int64Array
    served: Int64Array
    needed: Int64Array
    fanout: Int64Array


def measure_requests(load: RequestLoad, rows: Int64Array, home: Int32Array, wishes: Int64Array | None) -> Figures:
    """All figures of one layer, each row counting alike; a batch is one round of G requests.

    rows, home: [R]; wishes: [R, G] scores before any rank was taken, or None without a router.
    """
    requests, ranks = load.held.shape
    each = np.arange(requests)
    remote = load.needed.copy()
    remote[each, home] = 0
    rounds = batches(requests, ranks)
    busiest = sum(_busiest_rank(remote[part], home[part]) for part in rounds)
    wished = np.ones(ranks) if wishes is None else rows_by_rank(rows, wishes.argmax(axis=1), ranks)
    return Figures(
        lar=float(load.held[each, home].sum() / load.served.sum()),
        fanout=float(load.fanout.sum() / rows.sum()),
        remote_fanout=float(remote.sum() / rows.sum()),
        remote_fanout_busiest=float(busiest * ranks / rows.sum()),
        load_imbalance=imbalance(load.served.sum(axis=0)),
        load_imbalance_batch=imbalance_by_batch(np.stack([load.served[part].sum(axis=0) for part in rounds])),
        token_imbalance=imbalance(wished),
        rank_accuracy=None if wishes is None else rank_accuracy(wishes, load.held),
    )


def rows_by_rank(rows: Int64Array, rank: npt.NDArray[np.integer], ranks: int) -> npt.NDArray[np.float64]:
    """Rows that lie on each rank, [G]. rows, rank: [R]."""
    return np.bincount(rank, weights=rows, minlength=ranks).astype(np.float64)


def _busiest_rank(remote: Int64Array, home: Int32Array) -> float:
    """Rows through the busiest direction of the busiest rank in one round."""
    sent = rows_by_rank(remote.sum(axis=1), home, remote.shape[1])
    return float(max(remote.sum(axis=0).max(), sent.max()))
