"""All methods on the same layers at equal time, fitted and held-out (`smoe cocluster --compare`).

Every layer gives every method the processor time that the Cross-Entropy search takes there by its own counts. Methods
stand as they are: none falls back to contiguous. Axes: E experts, N rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.folder import TRACE
from smoe_cli.placing.solve_options import SolveOptions
from smoe_cli.placing.solving import LayerInput, layer_inputs, layer_problem
from smoe_profiles.choices import Level
from smoe_profiles.models import same_model
from smoe_profiles.tables import Tables
from smoe_profiles.trace import Trace, open_trace
from smoe_profiles.workers import Workers
from smoe_solvers.choices import Method
from smoe_solvers.equal_time import OPTIONAL, run_for, search_timed
from smoe_solvers.methods.programme import TooLargeError
from smoe_solvers.objectives import score
from smoe_solvers.problem import Problem, build_problem

BATCH = 1024
MOST_ROWS = 65_536
"""Held-out rows that are judged, from the first: as many as the tables' sample blocks may have."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What one method did on one layer. figures: by part (fit, validation, heldout); skipped: why there are none.

    searched: the goal on what was searched, token table rows where a table will be served; figures are of true routing.
    """

    seconds: float = 0.0
    starts: int = 0
    searched: float = 0.0
    figures: dict[str, Figures] | None = None
    skipped: str = ""


def held_out_trace(folder: Path, tables: Tables) -> Trace | None:
    """The trace beside the tables, if it is of the same model and has held-out rows with their experts."""
    if not (folder / TRACE).exists():
        return None
    trace = open_trace(folder / TRACE, needs=Level.COUNT)
    fits = trace.level is Level.TOKEN and same_model(trace.artefact.model, tables.artefact.model)
    return trace if fits and trace.rows("heldout") else None


def compare_methods(
    tables: Tables, trace: Trace | None, options: SolveOptions, workers: Workers, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Means over layers for every method, and the methods that could not run. progress(1) after each layer."""
    missing = {
        method: f"needs {package}; pip install smoe[bench]"
        for method, package in OPTIONAL.items()
        if find_spec(package) is None
    }
    methods = [method for method in Method if method not in missing]
    tasks = [
        (data, trace.experts(data.layer, "heldout")[:MOST_ROWS].copy() if trace else None, methods, options)
        for data in layer_inputs(tables)
    ]
    layers = workers.run(_compare_layer, tasks, lambda _: progress(1))
    skipped, shown = dict(missing), {}
    for method in methods:
        runs = [layer[method] for layer in layers]
        reasons = [run.skipped for run in runs if run.skipped]
        if reasons:
            skipped[method] = reasons[0]
        else:
            shown[method] = _mean(runs)
    return {
        "ep": options.ep,
        "goal": options.goal.value,
        "layers": len(layers),
        "batch": BATCH,
        "seconds_a_layer": shown[Method.CE]["seconds"],
        "methods": {method.value: figures for method, figures in shown.items()},
        "skipped": {method.value: reason for method, reason in skipped.items()},
    }


def _mean(runs: list[Run]) -> dict[str, Any]:
    """Seconds, starts and figures of a method, means over layers."""
    parts = runs[0].figures or {}
    return {
        "seconds": float(np.mean([run.seconds for run in runs])),
        "starts": float(np.mean([run.starts for run in runs])),
        "searched": float(np.mean([run.searched for run in runs])),
    } | {
        part: {name: float(np.mean([(run.figures or {})[part][name] for run in runs])) for name in figures}
        for part, figures in parts.items()
    }


def _compare_layer(
    data: LayerInput, held: npt.NDArray[np.uint16] | None, methods: list[Method], options: SolveOptions
) -> dict[Method, Run]:
    problem, unit = layer_problem(data, options)
    judges = {
        part: _judge(data, options, rows.experts, rows.block_start)
        for part, rows in (("fit", data.fit), ("validation", data.validation))
    }
    if held is not None:
        judges["heldout"] = _judge(data, options, held, np.array([*range(0, len(held), BATCH), len(held)], np.int64))
    seed = [options.seed, data.layer.id]
    small = problem.few_blocks(1)
    search_timed(small, options.goal, options.effort, np.random.default_rng(0))  # compiles
    search = search_timed(problem, options.goal, options.effort, np.random.default_rng(seed), data.layers)
    runs = {}
    for method in methods:
        try:
            if method not in (Method.CE, Method.EXACT):
                run_for(small, method, 0.0, [0])  # compiles
            found = search if method is Method.CE else run_for(problem, method, search.seconds, seed)
        except TooLargeError as error:
            runs[method] = Run(skipped=f"{error} (layer {data.layer.id})")
            continue
        if found is None:
            runs[method] = Run(skipped=f"no placement in {search.seconds:.1f} s (layer {data.layer.id})")
        else:
            placement = found.placement if unit is None else found.placement[unit]
            figures = {part: _measure(judge, placement) for part, judge in judges.items()}
            runs[method] = Run(found.seconds, found.starts, score(problem, found.placement).objective, figures)
    return runs


def _judge(
    data: LayerInput, options: SolveOptions, experts: npt.NDArray[np.uint16], block_start: npt.NDArray[np.int64]
) -> Problem:
    """Rows by true routing, and their own load: the judge must not be the table that was optimised."""
    load = np.bincount(experts.reshape(-1), minlength=data.layer.num_experts).astype(np.int64)
    return build_problem(options.goal, options.ep, experts, block_start, load, theta=options.theta, mu=options.mu)


def _measure(problem: Problem, placement: npt.NDArray[np.int32]) -> Figures:
    """The goal's objective and the figures that it trades, of one placement on one part."""
    scored = score(problem, placement)
    load = np.bincount(placement, problem.load, problem.num_ranks)
    return {
        "objective": scored.objective,
        "lar": scored.lar,
        "fanout": scored.fanout,
        "load_imbalance": float(load.max() / max(load.mean(), 1e-12)),
    }
