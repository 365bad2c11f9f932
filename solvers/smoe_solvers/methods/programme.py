"""A problem as a mixed-integer linear programme for HiGHS, term by term, and the check of what HiGHS returns.

x[e, g] says where an expert is; it alone is integer. Fan-out: y[s, g] >= x[e, g] for the experts of a set. Local
demand: f[m, g] is the share of an entry's rows on a rank, and of its demand for an expert at most f and at most x is
local there; with whole x the rest is a transport problem, so this is exact. Counts enter as shares: coefficients over
many orders of magnitude make feasible models infeasible. Ranks of equal size have no names: expert e stays on ranks
<= e. Axes: E experts, G ranks, S sets, M entries.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from smoe_solvers.assignment import HARD, Int32Array
from smoe_solvers.objectives import score
from smoe_solvers.problem import UNIT, Problem, check_placement

LARGEST = 250_000
"""Variables of the largest programme that is built."""

AGREEMENT = 2e-6
"""How far HiGHS's objective may be from ours: its own tolerances, and demand in whole UNITs."""

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]


class TooLargeError(ValueError):
    """A problem with too many variables for an exact programme."""


@dataclass(frozen=True)
class Proof:
    """What an exact method leaves behind, checked by us.

    placement: [E], or None where nothing usable came back; proved: no placement has a lower objective; bound: no
    placement has an objective below it (None: not known); by: what proved it; note: what came in the way, else empty.
    """

    placement: Int32Array | None
    proved: bool
    bound: float | None
    by: str = "HiGHS"
    note: str = ""


@dataclass
class Programme:
    """Minimise cost @ v over 0 <= v <= upper with low <= A v <= high."""

    cost: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    low: list[Floats] = field(default_factory=list)
    high: list[Floats] = field(default_factory=list)
    constant: float = 0.0
    variables: int = 0
    rows: int = 0

    def variable(self, cost: Floats, upper: float | Floats = 1.0, whole: int = 0) -> Ints:
        """Add one variable for each cost. Returns their numbers, in the costs' shape."""
        numbers = self.variables + np.arange(cost.size).reshape(cost.shape)
        self.cost.append(cost.reshape(-1))
        self.upper.append(np.broadcast_to(upper, cost.shape).reshape(-1))
        self.whole += [whole] * cost.size
        self.variables += cost.size
        return numbers

    def row(self, terms: list[tuple[Ints, float | Floats]], low: float | Floats, high: float | Floats) -> None:
        """Add constraints low <= sum of terms <= high; of each (variables [R, ...], coefficients) row r takes [r]."""
        count = len(terms[0][0])
        for numbers, coefficient in terms:
            wide = np.broadcast_to(coefficient, numbers.shape).reshape(-1)
            rows = np.repeat(np.arange(count), numbers.size // max(count, 1)) + self.rows
            self.entries.append((rows, numbers.reshape(-1), wide))
        self.low.append(np.broadcast_to(low, count))
        self.high.append(np.broadcast_to(high, count))
        self.rows += count

    def solve(self, time_limit: float | None) -> OptimizeResult:
        row, column, value = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        matrix = coo_array((value, (row, column)), (self.rows, self.variables)).tocsc()
        return milp(
            np.concatenate(self.cost),
            integrality=np.array(self.whole),
            bounds=Bounds(0, np.concatenate(self.upper)),
            constraints=LinearConstraint(matrix, np.concatenate(self.low), np.concatenate(self.high)),
            options={"mip_rel_gap": 0.0} | ({} if time_limit is None else {"time_limit": time_limit}),
        )


def prove(problem: Problem, time_limit: float | None = None) -> Proof:
    """The best placement by HiGHS, or what it had when its seconds were over.

    Raises TooLargeError if the programme would be too large to build.
    """
    programme = build_programme(problem)
    return checked(problem, programme.solve(time_limit), programme.constant)


def build_programme(problem: Problem) -> Programme:
    """The problem's own terms as a programme; x comes first. Raises TooLargeError if it would be too large."""
    experts, ranks = problem.num_experts, problem.num_ranks
    weights = problem.weights
    demanded = np.count_nonzero(problem.demand, axis=0)[problem.kind] if weights.local else np.zeros(0, np.int64)
    size = ranks * (experts + (len(problem.sets) if weights.fanout else 0) + int((demanded + 1).sum()))
    if size > LARGEST:
        raise TooLargeError(f"the exact programme would have {size:,} variables, more than {LARGEST:,}")
    programme = Programme()
    upper = problem.allowed.astype(np.float64)
    if problem.allowed.all() and problem.capacity[0] == problem.capacity[-1]:
        upper[np.arange(ranks) > np.arange(experts)[:, None]] = 0
    x = programme.variable(np.zeros((experts, ranks)), upper, whole=1)
    programme.row([(x, 1.0)], 1.0, 1.0)
    programme.row([(x.T, 1.0)], problem.capacity.astype(np.float64), problem.capacity.astype(np.float64))
    if weights.fanout:
        _add_fanout(programme, problem, x)
    if weights.load:
        _add_load(programme, problem, x)
    if weights.local:
        _add_local(programme, problem, x)
    return programme


def _add_fanout(programme: Programme, problem: Problem, x: Ints) -> None:
    cost = problem.weights.fanout * problem.set_weight.astype(np.float64)
    y = programme.variable(np.repeat(cost[:, None], problem.num_ranks, axis=1))
    row, column = np.nonzero(problem.sets >= 0)
    pairs = [y[row].reshape(-1, 1), x[problem.sets[row, column]].reshape(-1, 1)]
    programme.row([(pairs[0], 1.0), (pairs[1], -1.0)], 0.0, np.inf)


def _add_load(programme: Programme, problem: Problem, x: Ints) -> None:
    total = max(int(problem.load.sum()), 1)
    above, below = (programme.variable(np.full((problem.num_ranks, 1), problem.weights.load * total)) for _ in range(2))
    mean = 1 / problem.num_ranks if problem.load.any() else 0.0
    programme.row([(x.T, problem.load / total), (above, -1.0), (below, 1.0)], mean, mean)


def _add_local(programme: Programme, problem: Problem, x: Ints) -> None:
    ranks, local = problem.num_ranks, problem.weights.local
    programme.constant += local * problem.activations * UNIT
    share = programme.variable(np.zeros((len(problem.kind), ranks)))
    programme.row([(share, 1.0)], 1.0, 1.0)
    wanted = problem.demand[:, problem.kind]
    entry, expert = np.nonzero(wanted.T)
    gain = local * problem.multiplicity[entry] * wanted[expert, entry]
    kept = programme.variable(np.repeat(-gain[:, None], ranks, axis=1)).reshape(-1, 1)
    programme.row([(kept, 1.0), (share[entry].reshape(-1, 1), -1.0)], -np.inf, 0.0)
    programme.row([(kept, 1.0), (x[expert].reshape(-1, 1), -1.0)], -np.inf, 0.0)
    for block, quota in enumerate(problem.quota):
        inside = slice(problem.block_start[block], problem.block_start[block + 1])
        rows = problem.multiplicity[inside].astype(np.float64)
        part, limit = rows / rows.sum(), quota / rows.sum()
        if problem.cap < HARD:
            price = local * float(problem.cap) * rows.sum()
            above, below = (programme.variable(np.full((ranks, 1), price), np.inf) for _ in range(2))
            programme.row([(share[inside].T, part), (above, -1.0), (below, 1.0)], limit, limit)
        else:
            programme.row([(share[inside].T, part)], -np.inf, limit)


def checked(problem: Problem, result: OptimizeResult, constant: float = 0.0) -> Proof:
    """What of HiGHS's answer stands: its placement is counted again here, whatever the status says.

    An incumbent at the time limit is used like any solution; a solution that does not keep the constraints, or whose
    objective is not what it claims, is dropped with a note.
    """
    bound = None if result.mip_dual_bound is None else float(result.mip_dual_bound) + constant
    bound = bound if bound is not None and np.isfinite(bound) else None
    if result.x is None:
        return Proof(None, False, bound, note=f"HiGHS returned no placement ({_first_line(result.message)})")
    x = np.asarray(result.x)[: problem.num_experts * problem.num_ranks].reshape(problem.num_experts, -1)
    placement = x.argmax(axis=1).astype(np.int32)
    try:
        check_placement(placement, problem.num_ranks, problem.allowed)
    except ValueError as error:
        return Proof(None, False, bound, note=f"HiGHS returned a placement that cannot be ({error})")
    claimed, counted = float(result.fun) + constant, score(problem, placement).objective
    if result.status != 0:
        return Proof(placement, False, bound, note=f"HiGHS stopped early ({_first_line(result.message)})")
    if abs(claimed - counted) > AGREEMENT * max(1.0, abs(counted)):
        note = f"HiGHS claimed an objective of {claimed:.6f} for a placement of {counted:.6f}"
        return Proof(placement, False, None, note=note)
    return Proof(placement, True, counted)


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "no message"
