"""Placement and prediction on arrays: numpy, scipy and numba; no files, no torch, no model names.

    from smoe_solvers import placement_figures, place

    expert_to_rank = place(experts, num_ranks=8)  # experts: [tokens, K]

The names in `__all__` are the public ones; docs/library.md tells of them. Each is imported when it is first used, so
that `import smoe_solvers` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoe_solvers.assignment import assign_exact, assign_rule
    from smoe_solvers.choices import Assignment, Effort, Goal, Method
    from smoe_solvers.figures import Figures, home_by_scores, home_without_shuffle, measure, wire_rows
    from smoe_solvers.objectives import Score, score
    from smoe_solvers.placing import place, placement_figures
    from smoe_solvers.predictors import local_counts
    from smoe_solvers.problem import Problem, build_problem
    from smoe_solvers.redundancy import serve, single_hosts

__all__ = [
    "Assignment",
    "Effort",
    "Figures",
    "Goal",
    "Method",
    "Problem",
    "Score",
    "assign_exact",
    "assign_rule",
    "build_problem",
    "home_by_scores",
    "home_without_shuffle",
    "local_counts",
    "measure",
    "place",
    "placement_figures",
    "score",
    "serve",
    "single_hosts",
    "wire_rows",
]

_MODULES = {
    "assignment": ("assign_exact", "assign_rule"),
    "choices": ("Assignment", "Effort", "Goal", "Method"),
    "figures": ("Figures", "home_by_scores", "home_without_shuffle", "measure", "wire_rows"),
    "objectives": ("Score", "score"),
    "placing": ("placement_figures", "place"),
    "predictors": ("local_counts",),
    "problem": ("Problem", "build_problem"),
    "redundancy": ("serve", "single_hosts"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'smoe_solvers' has no attribute {name!r}")
    return getattr(import_module(f"smoe_solvers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
