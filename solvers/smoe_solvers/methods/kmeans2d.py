"""Two-dimensional balanced k-means, rows and experts in turn, with soft centroids (`seeds.soft_kmeans`)."""

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.starts import Stop, best_start, never
from smoe_solvers.problem import Problem
from smoe_solvers.rebalance import lay_out
from smoe_solvers.seeds import soft_kmeans

STARTS = 20


def kmeans2d(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """The best of some random starts for the problem's goal."""
    rows = lay_out(problem)
    return best_start(problem, lambda: soft_kmeans(problem, generator, rows), STARTS, stop)
