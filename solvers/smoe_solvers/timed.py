"""The goal `time`: the placement of least predicted layer time, for one way to run a layer.

Axes: N rows of B blocks, E experts, K experts a token, G ranks, U kinds of rows. What the other goals find is judged by
predicted time, and the best of it descends by swaps of two experts. Where a row lies when it is dispatched:

- `speculative`: where an exact shuffle puts it, by what its kind demands (the token table's rows, or true routing);
- every other mode: rank i // ceil(T/G) of the i-th row of a block. Under `dp-ep` such a run of consecutive rows stands
  for a request on its rank, in turn: its router knows requests, not layers, so no layer may count on it.

The search has fixed counts of blocks, starts and re-assignments, never a clock.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import HARD, Int32Array, Int64Array, transport
from smoe_solvers.choices import Effort, Goal, Mode
from smoe_solvers.cross_entropy import Candidate, Solution, Stage, cross_entropy
from smoe_solvers.layer_time import FloatArray, LayerCost, count_traffic
from smoe_solvers.objectives import rank_scores, score
from smoe_solvers.problem import UNIT, Problem, Weights, rank_capacity

MICROSECOND = 1e-6
"""The unit of the goal's objective."""

Tallies = tuple[
    Int64Array, Int64Array, Int64Array, Int32Array, npt.NDArray[np.int16], Int64Array, Int64Array, Int64Array
]
"""See _tallies."""

SEARCH_BLOCKS = 12
LEAST_GAIN = 1e-9
"""A swap must save this share of the time; less is rounding."""

MAX_PASSES = 20


@dataclass(frozen=True)
class Compromise:
    """Another goal to take candidates from, with its weights."""

    goal: Goal
    theta: float
    mu: float = 0.0


COMPROMISES = (
    Compromise(Goal.LAR, theta=0.1),
    Compromise(Goal.FANOUT, theta=0.0),
    Compromise(Goal.BLEND, theta=0.1, mu=0.25),
    Compromise(Goal.BLEND, theta=0.35, mu=0.5),
)
"""The goals at their defaults, and the blend that predicted time likes best on real routing at EP8."""


@dataclass(frozen=True)
class Settings:
    """starts: candidates that descend; reassignments: swaps a descent may try with new homes (`speculative`)."""

    starts: int
    reassignments: int


SETTINGS = {
    Effort.FAST: Settings(starts=1, reassignments=100),
    Effort.DEFAULT: Settings(starts=2, reassignments=300),
    Effort.THOROUGH: Settings(starts=5, reassignments=5000),
}


@dataclass(frozen=True)
class Rows:
    """Sample blocks row by row, as a layer runs them.

    experts: [N, K] int32 true routing; block_start: [B + 1]; kind: [N] int64; demand: [E, U] int32 expected activations
    of each kind, in UNITs, by which a shuffle gives homes.
    """

    experts: Int32Array
    block_start: Int64Array
    kind: Int64Array
    demand: Int32Array

    @classmethod
    def of_problem(
        cls,
        problem: Problem,
        experts: npt.NDArray[np.integer],
        block_start: Int64Array,
        token_id: npt.NDArray[np.integer] | None = None,
        unit: Int64Array | None = None,
    ) -> "Rows":
        """The rows a problem was built from, as `build_problem` took them: the same blocks, and the kinds it numbered.

        unit: [E] the group of every expert where whole groups are placed (`contract`).
        """
        placed = experts if unit is None else unit[experts]
        if token_id is None:
            kind = np.unique(np.sort(experts, axis=1), axis=0, return_inverse=True)[1]
        else:
            kind = np.unique(token_id, return_inverse=True)[1]
        return cls(placed.astype(np.int32), block_start, kind.reshape(-1).astype(np.int64), problem.demand)

    def few_blocks(self, count: int) -> "Rows":
        """`count` evenly spread blocks, for searching."""
        blocks = len(self.block_start) - 1
        if blocks <= count:
            return self
        chosen = np.linspace(0, blocks - 1, count).round().astype(np.int64)
        kept = np.concatenate([np.arange(self.block_start[b], self.block_start[b + 1]) for b in chosen])
        lengths = np.diff(self.block_start)[chosen]
        kinds, kind = np.unique(self.kind[kept], return_inverse=True)
        return Rows(
            self.experts[kept],
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            kind.astype(np.int64),
            np.ascontiguousarray(self.demand[:, kinds]),
        )


@dataclass(frozen=True)
class Timing:
    """What goal time is judged by: rows, and the cost of running them. batch: rows that each block is priced as, None:
    its own."""

    rows: Rows
    cost: LayerCost
    batch: int | None = None

    def microseconds(self, expert_to_rank: npt.NDArray[np.integer]) -> FloatArray:
        """Predicted time of each block under a placement, [B]."""
        return predicted_times(self.rows, expert_to_rank, self.cost, self.batch) / MICROSECOND

    def gains(self, expert_to_rank: npt.NDArray[np.integer]) -> FloatArray:
        """What a placement saves over contiguous on each block, [B], in microseconds."""
        ranks = self.cost.num_ranks
        contiguous = np.repeat(np.arange(ranks, dtype=np.int32), rank_capacity(len(expert_to_rank), ranks))
        return self.microseconds(contiguous) - self.microseconds(expert_to_rank)


@njit(cache=True)
def _shuffle(scores, kind, block_start, home):  # type: ignore[no-untyped-def]
    """Homes of every block's rows by an exact assignment, from zero prices. home: [N], out."""
    ranks = scores.shape[1]
    for b in range(len(block_start) - 1):
        start, stop = block_start[b], block_start[b + 1]
        rows = stop - start
        quota = (rows + ranks - 1) // ranks
        flow = np.zeros((rows, ranks), np.int32)
        price = np.zeros(ranks, np.int64)
        transport(scores, kind[start:stop], np.ones(rows, np.int64), quota, HARD, price, flow)
        for i in range(rows):
            for g in range(ranks):
                if flow[i, g] > 0:
                    home[start + i] = g


def homes(rows: Rows, expert_to_rank: npt.NDArray[np.integer], mode: Mode, num_ranks: int) -> Int32Array:
    """The rank each row lies on when it is dispatched, [N]."""
    home = np.empty(len(rows.kind), np.int32)
    if mode is Mode.SPECULATIVE:
        scores = rank_scores(rows.demand, np.ascontiguousarray(expert_to_rank, np.int32), num_ranks)
        _shuffle(scores, rows.kind, rows.block_start, home)
        return home
    for start, stop in zip(rows.block_start[:-1], rows.block_start[1:], strict=True):
        home[start:stop] = np.arange(stop - start) // -(-(stop - start) // num_ranks)
    return home


def rank_counts(rows: Rows, expert_to_rank: npt.NDArray[np.integer], num_ranks: int) -> npt.NDArray[np.int16]:
    """n_g of every row, [N, G]."""
    counts = np.zeros((len(rows.kind), num_ranks), np.int16)
    where = np.asarray(expert_to_rank)[rows.experts]
    np.add.at(counts, (np.arange(len(where))[:, None], where), 1)
    return counts


def predicted_times(
    rows: Rows, expert_to_rank: npt.NDArray[np.integer], cost: LayerCost, batch: int | None = None
) -> FloatArray:
    """Seconds a layer takes for each block under a placement, [B]. batch: rows to price each as, None: its own."""
    counts = rank_counts(rows, expert_to_rank, cost.num_ranks)
    home = homes(rows, expert_to_rank, cost.mode, cost.num_ranks)
    traffic = count_traffic(counts, home, rows.block_start)
    return cost.seconds(traffic if batch is None else traffic.scaled(batch))


def time_objective(rows: Rows, expert_to_rank: npt.NDArray[np.integer], cost: LayerCost) -> float:
    """Mean predicted time over blocks, in microseconds."""
    return float(predicted_times(rows, expert_to_rank, cost).mean()) / MICROSECOND


@njit(cache=True)
def _move(expert, old, new, tallies):  # type: ignore[no-untyped-def]
    """Take an expert from one rank to another in all tallies; doing it the other way round undoes it."""
    occurrence, start, block, home, counts, received, sent, load = tallies
    for i in range(start[expert], start[expert + 1]):
        row = occurrence[i]
        b, h = block[row], home[row]
        counts[row, old] -= 1
        if counts[row, old] == 0 and old != h:
            received[b, old] -= 1
            sent[b, h] -= 1
        if counts[row, new] == 0 and new != h:
            received[b, new] += 1
            sent[b, h] += 1
        counts[row, new] += 1
        load[b, old] -= 1
        load[b, new] += 1


@njit(cache=True)
def _tally(counts, block, home, received, sent):  # type: ignore[no-untyped-def]
    """Rows each rank receives and sends in each block's dispatch, [B, G], counted anew."""
    received[:] = 0
    sent[:] = 0
    for row in range(counts.shape[0]):
        for g in range(counts.shape[1]):
            if counts[row, g] > 0 and g != home[row]:
                received[block[row], g] += 1
                sent[block[row], home[row]] += 1


@njit(cache=True)
def _time(received, sent, load, exchange, compute):  # type: ignore[no-untyped-def]
    """Summed time of all blocks, row moves left out."""
    total = 0.0
    for b in range(received.shape[0]):
        rows = max(received[b].max(), sent[b].max())
        total += exchange[rows] + compute * load[b].max()
    return total


@njit(cache=True)
def _next_gain(first, last, now, placement, pairs, allowed, exchange, compute, tallies):  # type: ignore[no-untyped-def]
    """The first step below `last` whose swap gains with the homes as they are, and the time it leads to.

    The swap stays made in the tallies. Step -1: there is none.
    """
    _, _, _, _, _, received, sent, load = tallies
    for step in range(first, last):
        x, y = pairs[step % len(pairs)]
        p, q = placement[x], placement[y]
        if p == q or not allowed[x, q] or not allowed[y, p]:
            continue
        _move(x, p, q, tallies)
        _move(y, q, p, tallies)
        after = _time(received, sent, load, exchange, compute)
        if after < now * (1 - LEAST_GAIN):
            return step, after
        _move(x, q, p, tallies)
        _move(y, p, q, tallies)
    return -1, now


def descend_time(
    rows: Rows,
    expert_to_rank: Int32Array,
    cost: LayerCost,
    allowed: npt.NDArray[np.bool_],
    generator: np.random.Generator,
    reassignments: int,
) -> Int32Array:
    """A placement of less predicted time on these rows, from the one given, which is left as it is; never a worse one.

    Swaps are tried in one random order until none gains with the homes as they are. Where homes follow the placement
    such a swap is judged again with new ones, `reassignments` times at most. allowed: [E, G].
    """
    placement = np.array(expert_to_rank, np.int32)
    pairs = generator.permutation(np.stack(np.triu_indices(len(placement), 1), axis=1))
    tallies = _tallies(rows, placement, cost)
    _, _, block, home, counts, received, sent, load = tallies
    exchange = cost.exchange(np.arange(int(np.diff(rows.block_start).max()) * cost.num_ranks + 1))
    compute = float(cost.experts(1))
    now = _time(received, sent, load, exchange, compute)
    step, unchanged = -1, 0
    while True:
        last = min(unchanged + len(pairs), MAX_PASSES * len(pairs))
        step, after = _next_gain(step + 1, last, now, placement, pairs, allowed, exchange, compute, tallies)
        if step < 0:
            return placement
        x, y = pairs[step % len(pairs)]
        p, q = placement[x], placement[y]
        placement[x], placement[y] = q, p
        if cost.mode is Mode.SPECULATIVE:
            if reassignments == 0:
                placement[x], placement[y] = p, q
                return placement
            reassignments -= 1
            moved = homes(rows, placement, cost.mode, cost.num_ranks)
            _tally(counts, block, moved, received, sent)
            after = _time(received, sent, load, exchange, compute)
            if after >= now * (1 - LEAST_GAIN):
                placement[x], placement[y] = p, q
                _tally(counts, block, home, received, sent)
                _move(x, q, p, tallies)
                _move(y, p, q, tallies)
                continue
            home[:] = moved
        now, unchanged = after, step + 1


def _tallies(rows: Rows, placement: Int32Array, cost: LayerCost) -> Tallies:
    """What a swap changes, counted once.

    Rows of each expert (where expert e's begin: [E + 1]), the block and home of every row, n_g [N, G], and by block
    and rank rows received and sent, and activations, [B, G].
    """
    ranks, lengths = cost.num_ranks, np.diff(rows.block_start)
    members = rows.experts.reshape(-1)
    order = np.argsort(members, kind="stable")
    start = np.searchsorted(members[order], np.arange(len(placement) + 1)).astype(np.int64)
    block, home = np.repeat(np.arange(len(lengths)), lengths), homes(rows, placement, cost.mode, ranks)
    counts = rank_counts(rows, placement, ranks)
    received, sent = np.zeros((len(lengths), ranks), np.int64), np.zeros((len(lengths), ranks), np.int64)
    _tally(counts, block, home, received, sent)
    load = np.add.reduceat(counts, rows.block_start[:-1], axis=0, dtype=np.int64)
    return order // rows.experts.shape[1], start, block, home, counts, received, sent, load


def reweighted(problem: Problem, compromise: Compromise) -> Problem:
    """The same traffic with another goal's weights (see build_problem)."""
    goal, theta = compromise.goal, compromise.theta
    rows = int(problem.set_weight.sum())
    kept = {Goal.LAR: 1 - theta, Goal.BLEND: 1 - theta}.get(goal, 0.0)
    weights = Weights(
        local=kept / (problem.activations * UNIT),
        load=theta / max(int(problem.load.sum()), 1),
        fanout=1 / rows if goal is Goal.FANOUT else compromise.mu / problem.activations,
    )
    return replace(problem, weights=weights)


def other_goals(
    problem: Problem, effort: Effort, generator: np.random.Generator, layers: int = 1
) -> dict[str, Int32Array]:
    """Contiguous and what the other goals find, by name: the candidates that time judges. layers: as in solve."""
    found = {"contiguous": problem.contiguous()}
    for compromise in COMPROMISES:
        name = f"{compromise.goal.value}, theta {compromise.theta:g}, mu {compromise.mu:g}"
        asked = reweighted(problem, compromise)
        solution = cross_entropy(asked, compromise.goal, effort, generator, layers=layers)
        found[name] = solution.placement
    return found


def solve_time(
    problem: Problem,
    timing: Timing,
    effort: Effort,
    generator: np.random.Generator,
    candidates: dict[str, Int32Array] | None = None,
    layers: int = 1,
) -> Solution:
    """The placement of least predicted time that was met, never worse than any candidate.

    problem: the traffic of the timing's rows, under any goal; candidates: by name, those of `other_goals` by default;
    layers: as in solve. The objective is in microseconds.
    """
    rows, cost = timing.rows, timing.cost
    if candidates is None:
        candidates = other_goals(problem, effort, generator, layers)
    settings, search = SETTINGS[effort], rows.few_blocks(SEARCH_BLOCKS)
    starts = _rank(search, candidates, cost)[: settings.starts]
    ends = {
        f"{start.origin} + descent by time": descend_time(
            search, start.placement, cost, problem.allowed, generator, settings.reassignments
        )
        for start in starts
    }
    judged = _rank(rows, candidates, cost)
    best = _rank(rows, candidates | ends, cost)[0]
    contiguous = _rank(rows, {"contiguous": problem.contiguous()}, cost)[0]
    log = [
        _stage(problem, name, candidate)
        for name, candidate in (("contiguous", contiguous), ("other goals", judged[0]), ("descent by time", best))
    ]
    return Solution(best.placement, best.objective, best.origin, log, {"candidates": len(candidates)})


def _rank(rows: Rows, placements: dict[str, Int32Array], cost: LayerCost) -> list[Candidate]:
    """Placements with their predicted time, best first; ties keep their order."""
    timed = [Candidate(where, time_objective(rows, where, cost), name) for name, where in placements.items()]
    return sorted(timed, key=lambda candidate: candidate.objective)


def _stage(problem: Problem, name: str, candidate: Candidate) -> Stage:
    result = score(problem, candidate.placement)
    return Stage(name, candidate.objective, result.lar, result.fanout)
