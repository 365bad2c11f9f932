"""Mt-KaHyPar on the hypergraph of expert sets: its km1 is the summed fan-out less one a row.

Deterministic preset, one thread, no imbalance; the node order is permuted by each seed, as for METIS.
"""

from functools import cache
from typing import Any

import numpy as np

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.methods.partition import equal_parts, placed_in_parts, shrunk
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.objectives import coactivation
from smoe_solvers.problem import Problem, rank_capacity

WIDEST_SEED = 2**30


@cache
def _library() -> Any:
    """The package, and its thread pool of one thread, started once a process."""
    import mtkahypar

    return mtkahypar, mtkahypar.initialize(1, False)


def mtkahypar(problem: Problem, generator: np.random.Generator, _stop: Stop = never) -> Int32Array:
    """One seed's partition. Raises ModuleNotFoundError if mtkahypar is not installed."""
    joint = coactivation(problem)

    def divide(experts: Int64Array, num_ranks: int) -> Int32Array:
        edges, weights = _hyperedges(problem, experts)
        labels = _divide(edges, weights, len(experts), num_ranks, int(generator.integers(WIDEST_SEED)))
        return equal_parts(labels, joint[np.ix_(experts, experts)], num_ranks)

    return placed_in_parts(problem, divide)


def _hyperedges(problem: Problem, experts: Int64Array) -> tuple[list[list[int]], Int64Array]:
    """The rows' sets inside `experts`, numbered within it: those of two experts or more, with their weights."""
    number = np.full(problem.num_experts, -1)
    number[experts] = np.arange(len(experts))
    inside = np.where(problem.sets >= 0, number[problem.sets], -1)
    kept = (inside >= 0).sum(axis=1) > 1
    return [row[row >= 0].tolist() for row in inside[kept]], shrunk(problem.set_weight[kept])


def _divide(edges: list[list[int]], weights: Int64Array, nodes: int, num_ranks: int, seed: int) -> Int32Array:
    package, library = _library()
    if num_ranks == 1 or not edges:
        return np.repeat(np.arange(num_ranks, dtype=np.int32), rank_capacity(nodes, num_ranks))
    place = np.random.default_rng(seed).permutation(nodes)
    context = library.context_from_preset(package.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(num_ranks, 0.0, package.Objective.KM1)
    context.set_individual_target_block_weights(rank_capacity(nodes, num_ranks).tolist())
    context.logging = False
    package.set_seed(seed)
    moved = [place[edge].tolist() for edge in edges]
    graph = library.create_hypergraph(context, nodes, len(moved), moved, [1] * nodes, weights.tolist())
    return np.array(graph.partition(context).get_partition(), np.int32)[place]
