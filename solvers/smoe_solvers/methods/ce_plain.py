"""The first paper's two stages, plain: Cross-Entropy over experts, then tokens (arXiv 2503.04398).

Stage one draws every expert's rank on its own from a matrix P[E, G] that starts uniform, makes the ranks equal by the
least probable moves, and moves P to the mean of the elite. Stage two, the tokens, needs no sampling: with experts
fixed their best assignment is exact (`score`), which can only help. The paper gives no population, elite share,
smoothing or stop; these are the usual ones, with a population that its time allows. No seeds,
no relabelling, no polish: those are what `cross_entropy` adds.
"""

import numpy as np
from numba import njit

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem

POPULATION = 200
ELITE = 20
SMOOTHING = 0.7
ROUNDS = 60
STALE_ROUNDS = 10
SEARCH_BLOCKS = 2


@njit(cache=True)
def _draw_and_repair(probability, uniform, capacity):  # type: ignore[no-untyped-def]
    """Ranks drawn independently, [P, E] int32; then experts of overfull ranks move to short ones by highest ratio."""
    experts, ranks = probability.shape
    placements = np.zeros((len(uniform), experts), np.int32)
    for i in range(len(uniform)):
        placement = placements[i]
        surplus = -capacity
        for e in range(experts):
            left = uniform[i, e]
            chosen = -1
            for g in range(ranks):
                if probability[e, g] > 0 and (chosen < 0 or left > 0):
                    chosen = g
                left -= probability[e, g]
            placement[e] = chosen
            surplus[chosen] += 1
        while surplus.max() > 0:
            best, expert, rank = -1.0, -1, -1
            for e in range(experts):
                here = placement[e]
                if surplus[here] > 0:
                    for g in range(ranks):
                        ratio = probability[e, g] / probability[e, here]
                        if surplus[g] < 0 and ratio > best and probability[e, g] > 0:
                            best, expert, rank = ratio, e, g
            surplus[placement[expert]] -= 1
            surplus[rank] += 1
            placement[expert] = rank
    return placements


def ce_plain(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """The best draw met, scored on a few blocks where there are many; stops after some rounds without a better one."""
    search = search_view(problem).few_blocks(SEARCH_BLOCKS)
    probability = problem.allowed / problem.allowed.sum(axis=1, keepdims=True)
    best, lowest, stale = problem.contiguous(), np.inf, 0
    for _ in range(ROUNDS):
        drawn = _draw_and_repair(probability, generator.random((POPULATION, problem.num_experts)), problem.capacity)
        objective = np.array([score(search, placement).objective for placement in drawn])
        elite = drawn[np.argsort(objective, kind="stable")[:ELITE]]
        if objective.min() < lowest - 1e-12:
            best, lowest, stale = elite[0].copy(), objective.min(), 0
        elif (stale := stale + 1) >= STALE_ROUNDS:
            break
        if stop():
            break
        frequency = (elite[:, :, None] == np.arange(problem.num_ranks)).mean(axis=0)
        probability = (1 - SMOOTHING) * probability + SMOOTHING * frequency
    return best
