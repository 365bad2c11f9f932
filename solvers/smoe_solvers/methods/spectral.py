"""Spectral clustering of the co-activation graph: an embedding, then k-means whose clusters are equal by assignment.

Axes: E experts, G ranks.
"""

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.starts import Stop, best_start, never
from smoe_solvers.objectives import coactivation
from smoe_solvers.problem import Problem
from smoe_solvers.seeds import place_experts, random_placement

STARTS = 10
ROUNDS = 30


def spectral(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """The best of some random starts for the problem's goal."""
    points = embedding(coactivation(problem), problem.num_ranks)
    return best_start(problem, lambda: _balanced_kmeans(points, problem, generator), STARTS, stop)


def embedding(joint: npt.NDArray[np.int64], dimensions: int) -> npt.NDArray[np.float64]:
    """Leading eigenvectors of the normalised graph, rows of length one. joint: [E, E]. Returns [E, dimensions]."""
    from scipy.linalg import eigh

    degree = np.maximum(joint.sum(axis=1), 1) ** -0.5
    experts = len(joint)
    _, vectors = eigh(degree[:, None] * joint * degree, subset_by_index=[experts - dimensions, experts - 1])
    points: npt.NDArray[np.float64] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return points


def _balanced_kmeans(points: npt.NDArray[np.float64], problem: Problem, generator: np.random.Generator) -> Int32Array:
    """Centroids and exact equal-size assignments in turn, from a random start to a fixed point."""
    placement = random_placement(problem, generator)
    for _ in range(ROUNDS):
        centroids = np.stack([points[placement == g].mean(axis=0) for g in range(problem.num_ranks)])
        distance = ((points[:, None, :] - centroids[None, :, :]) ** 2).sum(axis=2)
        moved = place_experts(-distance, problem)
        if (moved == placement).all():
            break
        placement = moved
    return placement
