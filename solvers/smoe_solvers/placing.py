"""The short way: from an array of expert ids to a placement, and what that placement is worth.

Axes: N rows (tokens), K experts a row, E experts, G ranks. One MoE layer at a time.
"""

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.figures import Figures, batches, home_without_shuffle, measure
from smoe_solvers.predictors import local_counts
from smoe_solvers.problem import build_problem
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import solve


def place(
    experts: npt.NDArray[np.integer],
    num_ranks: int,
    *,
    num_experts: int | None = None,
    goal: str = Goal.BLEND,
    method: str = Method.CE,
    effort: str = Effort.DEFAULT,
    batch: int = 1024,
    seed: int = 0,
) -> Int32Array:
    """Put one layer's experts on ranks so that tokens find theirs together. Returns expert_to_rank: [E] int32.

    experts: [N, K] distinct ids of each row, consecutive rows as they would be served; num_experts: E, default one more
    than the largest id. Every rank gets E / G experts, the first E mod G ranks one more. batch: rows of one layer pass,
    under whose quota a shuffle is judged. goal: any but `time`, which needs a machine. The answer is never worse on
    these rows than experts in order; whether it holds on other rows is for `placement_figures` to say. The same rows
    and seed give the same placement.
    Raises ValueError for rows that are not distinct ids in [0, E), more ranks than experts, or an unknown name.

    >>> import numpy as np
    >>> experts = np.tile([[0, 4], [1, 5], [2, 6], [3, 7]], (64, 1))  # e and e + 4 always go together
    >>> place(experts, num_ranks=4, goal="fanout").reshape(2, 4)
    array([[0, 1, 2, 3],
           [0, 1, 2, 3]], dtype=int32)
    """
    rows, size = _checked(experts, num_experts)
    starts = np.array([part.start for part in batches(len(rows), batch)] + [len(rows)], np.int64)
    popularity = np.bincount(rows.reshape(-1), minlength=size)
    problem = build_problem(Goal(goal), num_ranks, rows, starts, popularity)
    generator = np.random.default_rng(seed)
    return solve(problem, Goal(goal), Method(method), Effort(effort), generator).placement


def placement_figures(
    experts: npt.NDArray[np.integer],
    expert_to_rank: npt.NDArray[np.integer],
    *,
    home: npt.NDArray[np.integer] | None = None,
    batch: int = 1024,
) -> Figures:
    """What a placement does to rows of one layer: lar, fan-out, remote fan-out and imbalance.

    experts: [N, K], rows that the placement was not made from, if the figures are to mean anything.
    expert_to_rank: [E]; home: [N] the rank on which each row lies, default as without a shuffle: the i-th row of a
    batch of T on rank i // ceil(T / G).
    Raises ValueError for rows that are not distinct ids in [0, E).

    >>> import numpy as np
    >>> experts = np.tile([[0, 4], [1, 5], [2, 6], [3, 7]], (64, 1))
    >>> contiguous = np.repeat(np.arange(4), 2)
    >>> placement_figures(experts, contiguous).fanout
    2.0
    >>> placement_figures(experts, np.array([0, 1, 2, 3, 0, 1, 2, 3])).fanout
    1.0
    """
    rows, _ = _checked(experts, len(expert_to_rank))
    ranks = int(expert_to_rank.max()) + 1
    lies_on = home_without_shuffle(len(rows), ranks, batch) if home is None else np.asarray(home, np.int32)
    return measure(local_counts(rows, single_hosts(expert_to_rank, ranks)), lies_on, batch, None)


def _checked(experts: npt.NDArray[np.integer], num_experts: int | None) -> tuple[npt.NDArray[np.uint16], int]:
    """The rows as the solvers take them, and E."""
    if experts.ndim != 2 or not experts.size or not np.issubdtype(experts.dtype, np.integer):
        raise ValueError(f"experts are {experts.dtype} {list(experts.shape)}; integers [tokens, K] were expected")
    size = int(experts.max()) + 1 if num_experts is None else num_experts
    if experts.min() < 0 or experts.max() >= size:
        worst = int(experts.min() if experts.min() < 0 else experts.max())
        raise ValueError(f"expert id {worst} is outside [0, {size})")
    ordered = np.sort(experts, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if len(twice):
        raise ValueError(f"row {twice[0]} names an expert twice: {experts[twice[0]].tolist()}")
    return experts.astype(np.uint16), size
