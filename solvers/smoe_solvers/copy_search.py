"""Which experts the extra slots of the ranks hold: filled where a copy saves most, then improved.

Axes: E experts, G ranks. `hosts`: [E, G] whether a rank holds a copy of an expert.
"""

from dataclasses import astuple
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linear_sum_assignment

from smoe_solvers.assignment import HARD, Int32Array
from smoe_solvers.choices import Effort
from smoe_solvers.copy_descent import Rows, bit, cover_size, descend, deviation, flip, lay_out, objective, settle
from smoe_solvers.cross_entropy import Stage
from smoe_solvers.objectives import Score, search_view
from smoe_solvers.problem import UNIT, Problem
from smoe_solvers.redundancy import BoolArray, single_hosts

STEPS = 10_000
"""Steps of a sweep up to which the following numbers hold; where there are more, they shrink in proportion."""

SEARCH_BLOCKS, POLISH_BLOCKS = 12, 64
ROUNDS = {Effort.FAST: 0, Effort.DEFAULT: 8, Effort.THOROUGH: 40}
"""How often the best is kicked and descended again."""

KICKS = 4


def add_copies(
    problem: Problem, expert_to_rank: Int32Array, slots: int, effort: Effort, generator: np.random.Generator
) -> tuple[BoolArray, list[Stage]]:
    """Hosts with `slots` different experts on every rank, every expert on some rank, from a placement without copies.

    Searched on some blocks: filled, descended, kicked and descended again; the best gets one sweep on more blocks.
    expert_to_rank: [E]. Returns hosts [E, G], and what the filled and the final ones score.
    Raises ValueError if the slots cannot hold the experts.
    """
    experts, ranks = problem.num_experts, problem.num_ranks
    if not experts <= slots * ranks or not slots <= experts:
        raise ValueError(f"{slots} slots on each of {ranks} ranks cannot hold {experts} experts, each once a rank")
    scale = min(1.0, STEPS / (slots * ranks * (slots * ranks / 2 + experts)))
    searched, polished = (problem.few_blocks(max(2, round(n * scale))) for n in (SEARCH_BLOCKS, POLISH_BLOCKS))
    few = lay_out(search_view(searched))
    filled = fill(few, single_hosts(expert_to_rank, ranks), slots)
    best = descend(few, filled, generator)
    for _ in range(round(ROUNDS[effort] * scale)):
        found = descend(few, kick(best.hosts, problem.allowed, generator), generator)
        best = min(best, found, key=lambda state: objective(few, state))
    candidates = {"filled": filled, "copies": best.hosts}
    if searched is not polished:
        more = lay_out(search_view(polished))
        candidates["copies"] = descend(more, best.hosts, generator, max_sweeps=1).hosts
    scores = {name: score_hosts(problem, hosts) for name, hosts in candidates.items()}
    chosen = min(scores, key=lambda name: (scores[name].objective, name))
    order = [name for name in scores if name != chosen] + [chosen]
    return candidates[chosen], [Stage(name, *astuple(scores[name])[:3]) for name in order]


def fill(rows: Rows, hosts: BoolArray, slots: int) -> BoolArray:
    """Fill the free slots of every rank, one a round, with the copy that saves most there. slots: of each rank."""
    hosts = hosts.copy()
    while (free := np.flatnonzero(hosts.sum(axis=0) < slots)).size:
        gains = np.where(rows.allowed & ~hosts, _copy_gains(rows, settle(rows, hosts)), -np.inf)
        hosts[gains[:, free].argmax(axis=0), free] = True
    return hosts


@njit(cache=True)
def _copy_gains(rows, state):  # type: ignore[no-untyped-def]
    """What a copy of each expert on each rank would take off the objective if nothing else moved, [E, G]."""
    experts, ranks = state.hosts.shape
    gains = np.zeros((experts, ranks))
    for m in range(len(rows.kind)):
        for g in range(ranks):
            if state.flow[m, g] > 0:
                for e in range(experts):
                    gains[e, g] += rows.local * state.flow[m, g] * rows.demand[e, rows.kind[m]]
    for e in range(experts):
        for g in range(ranks):
            if state.hosts[e, g]:
                gains[e, g] = -np.inf
                continue
            if rows.fanout > 0:
                state.masks[e] ^= bit(g)
                for i in range(rows.sets_start[e], rows.sets_start[e + 1]):
                    s = rows.sets_of[i]
                    if state.held[s, g] > 0:
                        gains[e, g] += rows.fanout * rows.set_weight[s] * (state.size[s] - cover_size(s, rows, state))
                state.masks[e] ^= bit(g)
            if rows.deviation > 0:
                before = deviation(state.rank_load)
                flip(e, g, rows, state)
                gains[e, g] += rows.deviation * (before - deviation(state.rank_load))
                flip(e, g, rows, state)
    return gains


def kick(hosts: BoolArray, allowed: BoolArray, generator: np.random.Generator) -> BoolArray:
    """The same with KICKS copies replaced by others at random."""
    hosts = hosts.copy()
    for _ in range(KICKS):
        leaving = np.argwhere(hosts & (hosts.sum(axis=1) > 1)[:, None])
        if not len(leaving):
            break
        expert, rank = leaving[generator.integers(len(leaving))]
        entering = np.flatnonzero(allowed[:, rank] & ~hosts[:, rank])
        if len(entering):
            hosts[expert, rank], hosts[generator.choice(entering), rank] = False, True
    return hosts


def score_hosts(problem: Problem, hosts: BoolArray) -> Score:
    """Everything the objective knows about a placement with copies; without any, what `score` says. hosts: [E, G]."""
    rows = lay_out(problem)
    state = settle(rows, hosts)
    value, charges = int(state.value.sum()), 0
    if problem.cap < HARD:
        parts = [state.flow[start:stop].sum(axis=0) for start, stop in pairwise(problem.block_start)]
        charges = int(problem.cap) * int(np.abs(np.array(parts) - problem.quota[:, None]).sum())
    activations, spread = problem.activations * UNIT, int(problem.set_weight @ state.size)
    uneven = float(deviation(state.rank_load))
    return Score(
        objective=rows.local * (activations - value) + rows.fanout * spread + rows.deviation * uneven,
        lar=(value + charges) / activations,
        fanout=spread / max(int(problem.set_weight.sum()), 1),
        load_deviation=uneven / max(int(problem.load.sum()), 1),
    )


def relabel_hosts(hosts: BoolArray, towards: npt.NDArray[np.floating]) -> BoolArray:
    """The same ranks' contents under the names that agree most with `towards` [E, G]."""
    old, new = linear_sum_assignment(hosts.T @ towards, maximize=True)
    renamed = np.zeros_like(hosts)
    renamed[:, new] = hosts[:, old]
    return renamed
