"""METIS on the co-activation graph, the strongest published baseline when its seeds are real.

Recursive bisection, ufactor 1, and the node order permuted by each seed: METIS otherwise gives one answer whatever its
seed. Parts it leaves unequal are repaired by the cheapest moves.
"""

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.methods.partition import equal_parts, placed_in_parts, shrunk
from smoe_solvers.methods.starts import Stop, best_start, never
from smoe_solvers.objectives import coactivation
from smoe_solvers.problem import Problem, rank_capacity

SEEDS = 40
WIDEST_SEED = 2**30


def metis(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """The best of 40 seeds for the problem's goal. Raises ModuleNotFoundError if pymetis is not installed."""
    joint = coactivation(problem)

    def divide(experts: Int64Array, num_ranks: int) -> Int32Array:
        return _divide(joint[np.ix_(experts, experts)], num_ranks, int(generator.integers(WIDEST_SEED)))

    return best_start(problem, lambda: placed_in_parts(problem, divide), SEEDS, stop)


def metis_placements(joint: npt.NDArray[np.int64], num_ranks: int, seeds: int = SEEDS) -> list[Int32Array]:
    """One placement for each seed from 0, ranks with their share. joint: [E, E] co-activation, diagonal zero.

    Raises ModuleNotFoundError if pymetis is not installed.
    """
    return [_divide(joint, num_ranks, seed) for seed in range(seeds)]


def _divide(joint: npt.NDArray[np.int64], num_ranks: int, seed: int) -> Int32Array:
    import pymetis

    order = np.random.default_rng(seed).permutation(len(joint))
    graph = joint[np.ix_(order, order)]
    start = np.concatenate([[0], np.cumsum((graph > 0).sum(axis=1))])
    neighbours, weights = np.nonzero(graph)[1], graph[graph > 0]
    capacity = rank_capacity(len(joint), num_ranks)
    shares = (capacity / capacity.sum()).tolist() if capacity[0] > capacity[-1] else None
    _, part = pymetis.part_graph(
        num_ranks,
        pymetis.CSRAdjacency(start.tolist(), neighbours.tolist()),
        eweights=shrunk(weights).tolist(),
        tpwgts=shares,
        recursive=True,
        options=pymetis.Options(seed=seed, ufactor=1),
    )
    labels = np.empty(len(joint), np.int32)
    labels[order] = part
    return equal_parts(labels, joint, num_ranks)
