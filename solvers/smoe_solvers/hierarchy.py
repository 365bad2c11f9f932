"""Ranks that are not equally far from each other: nodes, or any measured cost from rank to rank.

Axes: E experts, G ranks, S distinct expert sets, K experts a token, P pairs of experts. cost: [G, G], what a row costs
from its home rank (first axis) to a rank that it needs; only ratios matter.

A row that needs the ranks R travels min over homes h in R of sum over g in R of cost[h, g]; where all costs are 1 that
is its fan-out less 1. The objective is the goal's own with fan-out replaced by travel (in units of the least cost): the
excess of travel over fan-out - 1 has the weight of the goal's fan-out term or, in a goal that has none, of one remote
activation a row and unit. Names of ranks, free to every goal, matter here.

Search: experts to nodes by fan-out over nodes, then to ranks inside each node by the goal; or the flat placement with
its ranks renamed; then swaps of two experts that lower the joint objective. Never worse on it than the flat placement.
"""

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linear_sum_assignment
from scipy.sparse.csgraph import connected_components

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.choices import Effort, Goal
from smoe_solvers.cross_entropy import Candidate, Solution, Stage, cross_entropy
from smoe_solvers.methods.exact import CHEAP, balanced_placements, count_placements
from smoe_solvers.objectives import score, search_view, set_rank_counts
from smoe_solvers.problem import UNIT, Problem, Weights

FloatArray = npt.NDArray[np.float64]

CROSS_NODE = 8.0
"""A row to another node against one inside: NVLink 4 moves 450 GB/s a direction, a 400 Gb/s card a GPU 50."""

FEW_RANKS = 6
"""Up to here all names of ranks are tried."""

SEARCH_BLOCKS = 6
LEAST_GAIN = 1e-12

TRIALS = {Effort.FAST: 50, Effort.DEFAULT: 200, Effort.THOROUGH: 2000}
"""Swaps judged on the whole objective, where local activations are in it."""


@dataclass(frozen=True)
class Links:
    """excess: [G, G] what a row costs beyond the least cost between two ranks, in units of it; zero diagonal."""

    excess: FloatArray

    @classmethod
    def of_cost(cls, cost: npt.NDArray[np.floating], num_ranks: int) -> "Links":
        """Raises ValueError unless cost is [G, G], finite, non-negative, with a zero diagonal."""
        if cost.shape != (num_ranks, num_ranks):
            raise ValueError(f"a cost matrix of shape {cost.shape} does not fit {num_ranks} ranks")
        if not np.isfinite(cost).all() or (cost < 0).any():
            raise ValueError("costs between ranks must be finite and not negative")
        if np.diagonal(cost).any():
            raise ValueError("a rank's cost to itself must be zero")
        apart = ~np.eye(num_ranks, dtype=np.bool_)
        least = cost[apart & (cost > 0)].min(initial=np.inf)
        return cls(np.where(apart, cost / least - 1, 0.0) if np.isfinite(least) else np.zeros_like(cost, np.float64))

    @classmethod
    def of_nodes(cls, num_ranks: int, nodes: int) -> "Links":
        """Consecutive ranks in equal nodes. Raises ValueError if nodes do not divide the ranks."""
        if nodes < 1 or num_ranks % nodes:
            raise ValueError(f"{num_ranks} ranks cannot be shared equally by {nodes} nodes")
        node = np.arange(num_ranks) // (num_ranks // nodes)
        cost = np.where(node[:, None] == node[None, :], 1.0, CROSS_NODE)
        np.fill_diagonal(cost, 0)
        return cls.of_cost(cost, num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.excess)

    def node_of_rank(self) -> Int64Array:
        """Ranks that are near each other, [G]: all one node where the costs fall into no equal parts."""
        one = np.zeros(self.num_ranks, np.int64)
        apart = ~np.eye(self.num_ranks, dtype=np.bool_)
        if self.num_ranks < 2 or self.excess[apart].max() <= self.excess[apart].min():
            return one
        between = np.sqrt((1 + self.excess[apart].max()) * (1 + max(self.excess[apart].min(), 0.0))) - 1
        count, label = connected_components((self.excess < between) & apart, directed=False)
        sizes = np.bincount(label)
        return label.astype(np.int64) if 1 < count < self.num_ranks and (sizes == sizes[0]).all() else one


@njit(cache=True)
def _set_excess(counts, s, excess):  # type: ignore[no-untyped-def]
    """Excess of a set's travel from its cheapest home."""
    ranks = counts.shape[1]
    cheapest = np.inf
    for h in range(ranks):
        if counts[s, h] > 0:
            total = 0.0
            for g in range(ranks):
                if counts[s, g] > 0:
                    total += excess[h, g]
            cheapest = min(cheapest, total)
    return cheapest


@njit(cache=True)
def _total_excess(counts, set_weight, excess):  # type: ignore[no-untyped-def]
    total = 0.0
    for s in range(len(set_weight)):
        total += set_weight[s] * _set_excess(counts, s, excess)
    return total


@njit(cache=True)
def _has(members, expert):  # type: ignore[no-untyped-def]
    for member in members:  # noqa: SIM110 (compiled: a generator would be slower)
        if member == expert:
            return True
    return False


@njit(cache=True)
def _swap_change(x, y, known):  # type: ignore[no-untyped-def]
    """Change of every term but local activations if x and y swap; counts end as they were. known: see _descend."""
    placement, sets, set_weight, counts, sets_of, start, excess, load, rank_load, weights = known
    p, q = placement[x], placement[y]
    change = 0.0
    for expert, other, here, there in ((x, y, p, q), (y, x, q, p)):
        for i in range(start[expert], start[expert + 1]):
            s = sets_of[i]
            if _has(sets[s], other) or (counts[s, here] > 1 and counts[s, there] > 0):
                continue
            before = _set_excess(counts, s, excess)
            counts[s, here] -= 1
            counts[s, there] += 1
            spread = np.int64(counts[s, there] == 1) - np.int64(counts[s, here] == 0)
            change += set_weight[s] * (weights[0] * (_set_excess(counts, s, excess) - before) + weights[1] * spread)
            counts[s, here] += 1
            counts[s, there] -= 1
    mean = rank_load.mean()
    moved = load[y] - load[x]
    change += weights[2] * (
        abs(rank_load[p] + moved - mean)
        + abs(rank_load[q] - moved - mean)
        - abs(rank_load[p] - mean)
        - abs(rank_load[q] - mean)
    )
    return change


@njit(cache=True)
def _swap_changes(pairs, allowed, known):  # type: ignore[no-untyped-def]
    """_swap_change of all pairs, [P]; infinite where a swap is none or not allowed."""
    placement = known[0]
    changes = np.full(len(pairs), np.inf)
    for i in range(len(pairs)):
        x, y = pairs[i]
        p, q = placement[x], placement[y]
        if p != q and allowed[x, q] and allowed[y, p]:
            changes[i] = _swap_change(x, y, known)
    return changes


def excess_weight(problem: Problem) -> float:
    """Price of one row's unit of excess."""
    return problem.weights.fanout or problem.weights.local * UNIT


def linked_objective(problem: Problem, expert_to_rank: npt.NDArray[np.integer], links: Links) -> float:
    """The goal's objective with fan-out replaced by travel."""
    counts = set_rank_counts(problem.sets, np.ascontiguousarray(expert_to_rank, np.int32), links.num_ranks)
    excess = _total_excess(counts, problem.set_weight, links.excess)
    return float(score(problem, expert_to_rank).objective + excess_weight(problem) * excess)


def mean_travel(problem: Problem, expert_to_rank: npt.NDArray[np.integer], links: Links) -> float:
    """Mean over rows of travel, in units of the least cost."""
    counts = set_rank_counts(problem.sets, np.ascontiguousarray(expert_to_rank, np.int32), links.num_ranks)
    rows = int(problem.set_weight.sum())
    return float(
        score(problem, expert_to_rank).fanout - 1 + _total_excess(counts, problem.set_weight, links.excess) / rows
    )


def solve_linked(
    problem: Problem,
    goal: Goal,
    links: Links,
    flat: Int32Array,
    effort: Effort,
    generator: np.random.Generator,
    layers: int = 1,
) -> Solution:
    """The best placement met on the joint objective; flat: [E] what the goal alone chose; layers: as in solve.

    All balanced placements with all names are tried where they are few.
    """
    few = count_placements(problem.num_experts, problem.num_ranks) <= CHEAP and links.num_ranks <= FEW_RANKS
    starts = {"contiguous": problem.contiguous(), "flat": flat}
    if few and problem.allowed.all():
        found = {"enumeration": _enumerate(problem, links)}
    else:
        starts["flat, renamed"] = rename_ranks(problem, flat, links)
        two_level = _two_levels(problem, goal, links, effort, generator, layers)
        if two_level is not None:
            starts["two levels"] = rename_ranks(problem, two_level, links)
        nearest, search = _rank(problem, starts, links)[:2], problem.few_blocks(SEARCH_BLOCKS)
        found = {f"{c.origin} + joint swaps": _descend(search, c.placement, links, TRIALS[effort]) for c in nearest}
    best = _rank(problem, starts | found, links)[0]
    log = [_stage(problem, name, placement, links) for name, placement in starts.items()]
    log.append(_stage(problem, "joint", best.placement, links))
    return Solution(best.placement, best.objective, best.origin, log, {"starts": len(starts)})


def rename_ranks(problem: Problem, expert_to_rank: Int32Array, links: Links) -> Int32Array:
    """The same clusters with the rank names of least travel: all names of few ranks, otherwise swaps of two names."""
    ranks = links.num_ranks
    if not problem.allowed.all() or len(set(problem.capacity.tolist())) > 1:
        return expert_to_rank
    needed = set_rank_counts(problem.sets, expert_to_rank, ranks) > 0
    masks, index = np.unique(needed, axis=0, return_inverse=True)
    weight = np.zeros(len(masks), np.int64)
    np.add.at(weight, index.reshape(-1), problem.set_weight)
    masks = masks.astype(np.int16)

    def travel(name: Int64Array) -> float:
        return float(_total_excess(masks, weight, np.ascontiguousarray(links.excess[np.ix_(name, name)])))

    name = np.arange(ranks)
    if ranks <= FEW_RANKS:
        name = min((np.array(order) for order in permutations(range(ranks))), key=travel)
        return name.astype(np.int32)[expert_to_rank]
    lowest, improved = travel(name), True
    while improved:
        improved = False
        for a in range(ranks):
            for b in range(a + 1, ranks):
                name[[a, b]] = name[[b, a]]
                if (now := travel(name)) < lowest - LEAST_GAIN:
                    lowest, improved = now, True
                else:
                    name[[a, b]] = name[[b, a]]
    return name.astype(np.int32)[expert_to_rank]


def align_names(
    placement: Int32Array, towards: npt.NDArray[np.floating], links: Links, capacity: Int64Array
) -> Int32Array:
    """The same clusters with names that agree most with `towards` [E, G] among those that change no cost.

    Whole nodes are matched, and ranks inside them; the names stay where the costs do not allow it.
    """
    ranks, node = links.num_ranks, links.node_of_rank()
    if len(set(capacity.tolist())) > 1:
        return placement
    overlap = np.stack([towards[placement == g].sum(axis=0) for g in range(ranks)])
    members = [np.flatnonzero(node == n) for n in range(node.max() + 1)]
    inner = {
        (a, b): linear_sum_assignment(overlap[np.ix_(members[a], members[b])], maximize=True)[1]
        for a in range(len(members))
        for b in range(len(members))
    }
    gain = np.array(
        [[overlap[members[a], members[b][inner[a, b]]].sum() for b in range(len(members))] for a in range(len(members))]
    )
    name = np.empty(ranks, np.int32)
    for a, b in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
        name[members[a]] = members[b][inner[a, b]]
    same = np.allclose(links.excess[np.ix_(name, name)], links.excess)
    return name[placement] if same else placement


def _enumerate(problem: Problem, links: Links) -> Int32Array:
    """The best of all placements with all names, ties to the first."""
    view = search_view(problem)
    best, lowest = problem.contiguous(), np.inf
    for placement in balanced_placements(problem.num_experts, problem.num_ranks):
        renamed = rename_ranks(problem, placement, links)
        counts = set_rank_counts(problem.sets, renamed, links.num_ranks)
        excess = _total_excess(counts, problem.set_weight, links.excess)
        objective = score(view, renamed).objective + excess_weight(problem) * excess
        if objective < lowest - LEAST_GAIN:
            best, lowest = renamed, objective
    return best


def _two_levels(
    problem: Problem, goal: Goal, links: Links, effort: Effort, generator: np.random.Generator, layers: int
) -> Int32Array | None:
    """Experts to nodes by fan-out over nodes, then to ranks inside nodes by the goal; None without equal nodes."""
    node = links.node_of_rank()
    nodes = int(node.max()) + 1
    if nodes == 1 or not problem.allowed.all() or problem.num_experts % problem.num_ranks:
        return None
    rows = max(int(problem.set_weight.sum()), 1)
    upper = replace(
        problem,
        num_ranks=nodes,
        allowed=np.ones((problem.num_experts, nodes), np.bool_),
        weights=Weights(local=0.0, load=problem.weights.load, fanout=1 / rows),
    )
    node_of_expert = cross_entropy(search_view(upper), Goal.FANOUT, effort, generator, layers=layers).placement
    experts, ranks = np.argsort(node_of_expert, kind="stable"), np.argsort(node, kind="stable")
    inside = _reordered(problem, experts)
    allowed = node_of_expert[experts][:, None] == node[ranks][None, :]
    lower = cross_entropy(replace(inside, allowed=allowed), goal, effort, generator, layers=layers).placement
    placement = np.empty(problem.num_experts, np.int32)
    placement[experts] = ranks[lower]
    return placement


def _reordered(problem: Problem, experts: Int64Array) -> Problem:
    """The same problem with expert i being experts[i]."""
    number = np.empty(len(experts), np.int32)
    number[experts] = np.arange(len(experts))
    return replace(
        problem,
        demand=np.ascontiguousarray(problem.demand[experts]),
        sets=np.where(problem.sets < 0, problem.sets, number[problem.sets]).astype(np.int32),
        load=problem.load[experts],
    )


def _descend(problem: Problem, start: Int32Array, links: Links, trials: int) -> Int32Array:
    """Swaps, most promising first, while the joint objective falls."""
    placement, view = start.copy(), search_view(problem)
    members = problem.sets.reshape(-1)
    order = np.argsort(members, kind="stable")
    bounds = np.searchsorted(members[order], np.arange(problem.num_experts + 1)).astype(np.int64)
    weights = np.array([excess_weight(problem), problem.weights.fanout, problem.weights.load])
    counts = set_rank_counts(problem.sets, placement, links.num_ranks)
    load = problem.load.astype(np.float64)
    rank_load = np.bincount(placement, weights=load, minlength=links.num_ranks)
    sets_of = order // max(problem.sets.shape[1], 1)
    known = (
        placement,
        problem.sets,
        problem.set_weight,
        counts,
        sets_of,
        bounds,
        links.excess,
        load,
        rank_load,
        weights,
    )
    pairs = np.stack(np.triu_indices(problem.num_experts, 1), axis=1)
    by_local = problem.weights.local > 0
    now = score(view, placement).objective
    improved = True
    while improved:
        improved = False
        changes = _swap_changes(pairs, problem.allowed, known)
        for i in np.argsort(changes, kind="stable")[: np.count_nonzero(changes < -LEAST_GAIN)]:
            x, y = pairs[i]
            p, q = placement[x], placement[y]
            change = _swap_change(x, y, known) if p != q and problem.allowed[x, q] and problem.allowed[y, p] else 0.0
            if change >= -LEAST_GAIN:
                continue
            if by_local:
                if trials == 0:
                    return placement
                trials -= 1
                before = _excess_of(problem, counts, links)
            placement[x], placement[y] = q, p
            moved = set_rank_counts(problem.sets, placement, links.num_ranks)
            if by_local:
                after = score(view, placement).objective
                saved = after - now + excess_weight(problem) * (_excess_of(problem, moved, links) - before)
                if saved >= -LEAST_GAIN:
                    placement[x], placement[y] = p, q
                    continue
                now = after
            counts[:] = moved
            rank_load[p] += load[y] - load[x]
            rank_load[q] += load[x] - load[y]
            improved = True
    return placement


def _excess_of(problem: Problem, counts: npt.NDArray[np.int16], links: Links) -> float:
    return float(_total_excess(counts, problem.set_weight, links.excess))


def _rank(problem: Problem, placements: dict[str, Int32Array], links: Links) -> list[Candidate]:
    """Placements with their joint objective, best first; ties keep their order."""
    found = [Candidate(where, linked_objective(problem, where, links), name) for name, where in placements.items()]
    return sorted(found, key=lambda candidate: candidate.objective)


def _stage(problem: Problem, name: str, placement: Int32Array, links: Links) -> Stage:
    result = score(problem, placement)
    return Stage(name, linked_objective(problem, placement, links), result.lar, result.fanout)
