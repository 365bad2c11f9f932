"""The placement problem of one MoE layer: what is known of its traffic, and what a placement is scored by.

Axes: E experts, G ranks, U kinds of rows, M entries of all blocks, S distinct expert sets, K experts a token.
A placement is `expert_to_rank`: [E] int32, E / G experts a rank, the first E mod G one more. Formulas: docs/terms.md.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import HARD, Int32Array, Int64Array
from smoe_solvers.choices import Goal

UNIT = 1024
"""Demand is fixed-point: one expected activation is UNIT."""

NO_UNIT = -1
"""Padding in `sets` where a row uses fewer than K things to place (several experts of one group)."""


ILP_ROWS = 12_288
"""Rows behind the ilp goal: it has no batches, so its one assignment grows faster than the rows."""


@dataclass(frozen=True)
class Weights:
    """Price of one unit of each term: local activations (per UNIT, rewarded), load deviation, fan-out."""

    local: float
    load: float
    fanout: float


@dataclass(frozen=True)
class Problem:
    """One layer's traffic and the objective.

    demand: [E, U] int32, expected activations of each kind of row, in UNITs.
    kind, multiplicity: [M] the entries of the blocks; block_start: [B + 1]; quota: [B] rows a rank takes.
    cap: charge for each row off the quota, in UNITs (HARD: the quota is a limit).
    sets: [S, K] int32 distinct expert sets (NO_UNIT pads) and set_weight: [S] how many rows have them.
    load: [E] int64 activations of the whole part. allowed: [E, G] where an expert may go, all or `group_mask`.
    activations: activations in the blocks, the denominator of lar.
    """

    num_ranks: int
    demand: Int32Array
    kind: Int64Array
    multiplicity: Int64Array
    block_start: Int64Array
    quota: Int64Array
    cap: np.int64
    sets: Int32Array
    set_weight: Int64Array
    load: Int64Array
    allowed: npt.NDArray[np.bool_]
    weights: Weights
    activations: int

    @property
    def num_experts(self) -> int:
        return len(self.load)

    @property
    def num_blocks(self) -> int:
        return len(self.quota)

    @property
    def capacity(self) -> Int64Array:
        """How many experts every rank holds, [G]."""
        return rank_capacity(self.num_experts, self.num_ranks)

    def contiguous(self) -> Int32Array:
        """The placement every engine starts from: experts in order, rank after rank."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), self.capacity)

    def few_blocks(self, count: int) -> "Problem":
        """The same problem on `count` evenly spread blocks and as large a share of the fan-out rows, for searching."""
        if self.num_blocks <= count:
            return self
        chosen = np.linspace(0, self.num_blocks - 1, count).round().astype(np.int64)
        entries = [np.arange(self.block_start[b], self.block_start[b + 1]) for b in chosen]
        flat = np.concatenate(entries)
        kinds, kind = np.unique(self.kind[flat], return_inverse=True)
        share = self.multiplicity[flat].sum() / self.multiplicity.sum()
        few = self._share_of_sets(count / self.num_blocks)
        return replace(
            few,
            demand=np.ascontiguousarray(self.demand[:, kinds]),
            kind=kind.astype(np.int64),
            multiplicity=self.multiplicity[flat],
            block_start=np.concatenate([[0], np.cumsum([len(part) for part in entries])]).astype(np.int64),
            quota=self.quota[chosen],
            weights=replace(few.weights, local=self.weights.local / share),
            activations=round(self.activations * share),
        )

    def few_sets(self, count: int) -> "Problem":
        """The same problem on at most about `count` distinct expert sets, evenly spread over the rows."""
        return self if len(self.sets) <= count else self._share_of_sets(count / len(self.sets))

    def thinned(self) -> "Problem":
        """The same problem without demand below UNIT / 16, that of rare ids for nearly every expert: for searching."""
        return replace(self, demand=np.where(self.demand < UNIT // 16, 0, self.demand))

    def _share_of_sets(self, share: float) -> "Problem":
        """Every 1 / share-th row of the fan-out, at the same total weight."""
        set_weight = np.diff(np.floor(np.cumsum(self.set_weight) * share), prepend=0).astype(np.int64)
        kept = set_weight > 0
        scale = self.set_weight.sum() / max(int(set_weight.sum()), 1)
        return replace(
            self,
            sets=self.sets[kept],
            set_weight=set_weight[kept],
            weights=replace(self.weights, fanout=self.weights.fanout * float(scale)),
        )


def rank_capacity(num_experts: int, num_ranks: int) -> Int64Array:
    """Experts on every rank, [G]: equal, the first E mod G ranks one more (every engine's linear rule)."""
    return num_experts // num_ranks + (np.arange(num_ranks) < num_experts % num_ranks).astype(np.int64)


def token_demand(
    kinds: npt.NDArray[np.int64],
    counts: tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], npt.NDArray[np.integer]],
    popularity: Int64Array,
    top_k: int,
    pseudo: float,
) -> npt.NDArray[np.float64]:
    """Expected activations of token ids by the token table, shrunk to popularity. Returns [E, U], columns sum to K.

    kinds: [U] token ids, sorted; counts: (token_id, expert, count), all [C]; popularity: [E] activations; pseudo: rows
    of popularity that each id starts with.
    """
    demand = np.zeros((len(popularity), len(kinds)))
    token_id, expert, count = counts
    place = np.searchsorted(kinds, token_id)
    known = (place < len(kinds)) & (kinds[np.minimum(place, len(kinds) - 1)] == token_id)
    np.add.at(demand, (expert[known], place[known]), count[known])
    occurrences = demand.sum(axis=0) / top_k
    prior = top_k * popularity / max(popularity.sum(), 1)
    shrunk: npt.NDArray[np.float64] = (demand + pseudo * prior[:, None]) / (occurrences + pseudo)
    return shrunk


def build_problem(
    goal: Goal,
    num_ranks: int,
    experts: npt.NDArray[np.uint16],
    block_start: Int64Array,
    popularity: Int64Array,
    *,
    token_id: npt.NDArray[np.integer] | None = None,
    demand: npt.NDArray[np.float64] | None = None,
    theta: float = 0.1,
    mu: float = 0.25,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Problem:
    """A layer's problem from sample blocks.

    experts: [N, K] true routing; block_start: [B + 1]; popularity: [E] activations of the whole part.
    token_id: [N] and demand: [E, U] expected activations of the sorted distinct ids, where a token table will be
    served; without them rows demand what they truly used.
    theta weighs expert load in lar and blend, token balance in ilp; mu weighs fan-out in blend.
    Raises ValueError if there are more ranks than experts.

    >>> experts = np.array([[0, 2], [0, 2], [1, 3], [1, 3]], np.uint16)
    >>> problem = build_problem(Goal.FANOUT, 2, experts, np.array([0, 4]), np.bincount(experts.reshape(-1)))
    >>> problem.num_experts, problem.capacity.tolist(), problem.contiguous().tolist()
    (4, [2, 2], [0, 0, 1, 1])
    """
    num_experts, top_k = len(popularity), experts.shape[1]
    if num_ranks > num_experts:
        raise ValueError(f"{num_experts} experts cannot be shared by {num_ranks} ranks")
    sets, set_of, set_weight = np.unique(np.sort(experts, axis=1), axis=0, return_inverse=True, return_counts=True)
    if token_id is None or demand is None:
        units = np.zeros((num_experts, len(sets)), np.int32)
        units[sets.T, np.arange(len(sets))] = UNIT
        row_kind = set_of.reshape(-1).astype(np.int64)
    else:
        row_kind = np.unique(token_id, return_inverse=True)[1].astype(np.int64)
        units = np.rint(demand * UNIT).astype(np.int32)
    cap = HARD
    if goal is Goal.ILP:
        row_kind = _spread_rows(row_kind, block_start, ILP_ROWS)
        block_start = np.array([0, len(row_kind)], np.int64)
        cap = np.int64(round(theta / (1 - theta) * top_k * UNIT)) if theta < 1 else HARD - 1
    kind, multiplicity, starts = _merge_rows(row_kind, block_start)
    lengths = np.diff(block_start)
    if goal is Goal.ILP:  # every row counts G times, so that F / G rows a rank is a whole number
        multiplicity, lengths = multiplicity * num_ranks, lengths * num_ranks
    activations = int(lengths.sum()) * top_k
    local = (0.0 if goal is Goal.FANOUT else 1 - theta) / (activations * UNIT)
    return Problem(
        num_ranks=num_ranks,
        demand=np.ascontiguousarray(units),
        kind=kind,
        multiplicity=multiplicity,
        block_start=starts,
        quota=-(-lengths // num_ranks),
        cap=cap,
        sets=sets.astype(np.int32),
        set_weight=set_weight.astype(np.int64),
        load=popularity.astype(np.int64),
        allowed=np.ones((num_experts, num_ranks), np.bool_) if allowed is None else allowed,
        weights=Weights(
            local=local,
            load=theta / max(int(popularity.sum()), 1) if goal in (Goal.LAR, Goal.BLEND) else 0.0,
            fanout={Goal.FANOUT: 1 / len(experts), Goal.BLEND: mu / experts.size}.get(goal, 0.0),
        ),
        activations=activations,
    )


def _spread_rows(row_kind: Int64Array, block_start: Int64Array, most: int) -> Int64Array:
    """Whole blocks, evenly spread, of at most about `most` rows."""
    lengths = np.diff(block_start)
    count = max(1, min(len(lengths), int(most // max(lengths.max(), 1))))
    chosen = np.linspace(0, len(lengths) - 1, count).round().astype(np.int64)
    return np.concatenate([row_kind[block_start[b] : block_start[b + 1]] for b in chosen])


def _merge_rows(row_kind: Int64Array, block_start: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Equal rows of a block become one entry with a multiplicity."""
    kinds: list[Int64Array] = []
    counts: list[Int64Array] = []
    for start, stop in pairwise(block_start):
        kind, count = np.unique(row_kind[start:stop], return_counts=True)
        kinds.append(kind)
        counts.append(count)
    starts = np.concatenate([[0], np.cumsum([len(kind) for kind in kinds])])
    return np.concatenate(kinds), np.concatenate(counts).astype(np.int64), starts.astype(np.int64)


def check_placement(expert_to_rank: npt.NDArray[np.integer], num_ranks: int, allowed: npt.NDArray[np.bool_]) -> None:
    """Every rank holds its share of the experts, each where it may be. Raises ValueError otherwise."""
    sizes = np.bincount(expert_to_rank, minlength=num_ranks)
    expected = rank_capacity(len(expert_to_rank), num_ranks)
    if len(sizes) != num_ranks or (sizes != expected).any():
        raise ValueError(f"ranks hold {sizes.tolist()} experts; {expected.tolist()} were expected")
    if not allowed[np.arange(len(expert_to_rank)), expert_to_rank].all():
        raise ValueError("an expert is on a rank its router group does not allow")


def group_mask(num_experts: int, num_ranks: int, num_groups: int) -> npt.NDArray[np.bool_]:
    """Where experts may go when each router group spans G / num_groups ranks: [E, G]."""
    group_of_expert = np.arange(num_experts) // (num_experts // num_groups)
    group_of_rank = np.arange(num_ranks) // (num_ranks // num_groups)
    mask: npt.NDArray[np.bool_] = group_of_expert[:, None] == group_of_rank[None, :]
    return mask


def contract(problem: Problem, unit_of_expert: Int64Array) -> Problem:
    """The same problem with whole router groups as the things to place. unit_of_expert: [E], units 0 .. E' - 1."""
    units = int(unit_of_expert.max()) + 1
    demand = np.zeros((units, problem.demand.shape[1]), np.int32)
    np.add.at(demand, unit_of_expert, problem.demand)
    load = np.zeros(units, np.int64)
    np.add.at(load, unit_of_expert, problem.load)
    rows = np.sort(unit_of_expert[problem.sets], axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = NO_UNIT
    sets, index = np.unique(np.sort(rows, axis=1), axis=0, return_inverse=True)
    weight = np.zeros(len(sets), np.int64)
    np.add.at(weight, index.reshape(-1), problem.set_weight)
    return replace(
        problem,
        demand=demand,
        load=load,
        sets=sets.astype(np.int32),
        set_weight=weight,
        allowed=np.ones((units, problem.num_ranks), np.bool_),
    )
