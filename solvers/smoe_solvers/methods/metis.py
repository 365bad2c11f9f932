"""METIS on the co-activation graph, the strongest published baseline when its seeds are real.

Recursive bisection, ufactor 1, and the node order permuted by each seed: METIS otherwise gives one answer whatever its
seed (solver_study.md section 0). Parts it leaves unequal are repaired by the cheapest moves.
"""

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array

SEEDS = 40


def metis_placements(joint: npt.NDArray[np.int64], num_ranks: int, seeds: int = SEEDS) -> list[Int32Array]:
    """One balanced placement for each seed. joint: [E, E] co-activation, diagonal zero.

    Raises ModuleNotFoundError if pymetis is not installed.
    """
    import pymetis

    placements = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(joint))
        graph = joint[np.ix_(order, order)]
        start = np.concatenate([[0], np.cumsum((graph > 0).sum(axis=1))])
        neighbours, weights = np.nonzero(graph)[1], graph[graph > 0]
        _, part = pymetis.part_graph(
            num_ranks,
            pymetis.CSRAdjacency(start.tolist(), neighbours.tolist()),
            eweights=np.maximum(_shrunk(weights), 1).tolist(),
            recursive=True,
            options=pymetis.Options(seed=seed, ufactor=1),
        )
        placement = np.empty(len(joint), np.int32)
        placement[order] = part
        placements.append(_equal_parts(placement, joint, num_ranks))
    return placements


def _shrunk(weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Weights scaled so that METIS's 32-bit sums cannot overflow."""
    total = float(weights.sum())
    return weights if total < 2**30 else (weights * (2**30 / total)).astype(np.int64)


def _equal_parts(placement: Int32Array, joint: npt.NDArray[np.int64], num_ranks: int) -> Int32Array:
    """Move experts from full to short ranks, each time the move that loses least co-activation."""
    size = len(placement) // num_ranks
    while (counts := np.bincount(placement, minlength=num_ranks)).max() > size:
        inside = np.stack([joint[:, placement == g].sum(axis=1) for g in range(num_ranks)], axis=1)
        movable = np.flatnonzero(counts[placement] > size)
        short = np.flatnonzero(counts < size)
        loss = inside[movable, placement[movable]][:, None] - inside[np.ix_(movable, short)]
        expert, rank = np.unravel_index(loss.argmin(), loss.shape)
        placement[movable[expert]] = short[rank]
    return placement
