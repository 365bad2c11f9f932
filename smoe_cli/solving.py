"""From tables to a placement: one problem a layer, solved in parallel, rank labels aligned, gains confirmed.

Axes: E experts, G ranks, N sample rows.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.console import Console
from smoe_cli.contraction import choose_smoothing, contract_tables
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, contiguous_placement, write_placement, write_runtime
from smoe_profiles.artefact import publish
from smoe_profiles.errors import ImpossibleError, MachineError
from smoe_profiles.tables import Counts, Samples, Tables
from smoe_profiles.trace import UNKNOWN_TOKEN, TraceLayer
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import Solution, relabel
from smoe_solvers.predictors import rank_labels
from smoe_solvers.problem import Problem, build_problem, contract, group_mask, rank_capacity, token_demand
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import Confirmation, confirm, solve, validation_gains

PSEUDO = 4.0
"""Rows of popularity a token id starts with while solving; what is served is chosen on validation rows."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SolveOptions:
    """What to optimise and how. whole_groups: keep router groups whole, so that a checkpoint stays the same model."""

    ep: int
    goal: Goal
    method: Method
    effort: Effort
    theta: float
    mu: float
    seed: int
    whole_groups: bool
    metis_seeds: bool


@dataclass(frozen=True)
class LayerPlan:
    """One layer's answer. placement: [E] int32; gains: [B] over contiguous, by validation block."""

    layer: int
    placement: npt.NDArray[np.int32]
    solution: Solution
    gains: npt.NDArray[np.float64]

    def log(self) -> dict[str, Any]:
        """The layer's line of solver.jsonl."""
        confirmation = confirm(self.gains)
        return {
            "layer": self.layer,
            "origin": self.solution.origin,
            "objective": self.solution.objective,
            "stages": [asdict(stage) for stage in self.solution.stages],
            "stopped": self.solution.stopped,
            "validation_gain": confirmation.mean_gain,
            "validation_two_standard_errors": _finite(confirmation.two_standard_errors),
        }


@dataclass(frozen=True)
class LayerInput:
    """Everything one worker needs for one layer; fit first, then validation."""

    layer: TraceLayer
    num_groups: int
    fit: Samples
    validation: Samples
    counts: Counts
    popularity: npt.NDArray[np.int64]


def check_ep(layers: list[dict[str, Any]], ep: int, whole_groups: bool) -> None:
    """Refuse an EP that cannot be, with the ones that can. Raises ImpossibleError."""
    experts = layers[0]["num_experts"]
    valid = [g for g in range(2, experts + 1) if experts % g == 0]
    if ep not in valid:
        listed = ", ".join(map(str, valid))
        raise ImpossibleError(
            f"{experts} experts (layer {layers[0]['id']}) cannot be shared equally by {ep} ranks. Valid --ep: {listed}."
        )
    groups = layers[0].get("num_groups", 1)
    if not whole_groups:
        return
    if groups == 1:
        raise ImpossibleError("--groups whole changes nothing here: this router has no group limit; leave it out.")
    if ep == groups:
        raise ImpossibleError(
            f"--groups whole cannot change anything at --ep {ep}: the router has {groups} groups, one for each rank."
        )
    if groups % ep and ep % groups:
        raise ImpossibleError(f"--groups whole: {groups} router groups cannot be kept whole on {ep} ranks.")


def solve_layers(
    tables: Tables, options: SolveOptions, jobs: int, progress: Callable[[int], None]
) -> tuple[Placement, list[LayerPlan], Confirmation]:
    """Place every layer; the same answer for any number of jobs. progress(1) after each layer.

    A gain is judged for the placement as a whole, the mean over layers on each validation block; where it is not
    confirmed the placement is contiguous.
    """
    from joblib import Parallel, delayed

    if len({(layer.num_experts, layer.top_k) for layer in tables.layers}) > 1:
        raise ImpossibleError(f"{tables.artefact.path}: layers differ in E or K; they cannot share one placement yet.")
    inputs = _layer_inputs(tables)
    workers = Parallel(n_jobs=jobs or -1, return_as="generator")
    plans = []
    for plan in workers(delayed(_solve_layer)(layer_input, options) for layer_input in inputs):
        plans.append(plan)
        progress(1)
    layer_ids = tuple(plan.layer for plan in plans)
    confirmation = confirm(np.mean([plan.gains for plan in plans], axis=0))
    if confirmation.confirmed:
        samples = [layer_input.fit for layer_input in inputs]
        to_rank = _align_labels(plans, samples, options, [layer_input.num_groups for layer_input in inputs])
        placement = Placement.of_ranks(layer_ids, to_rank, options.ep)
    else:
        placement = contiguous_placement(layer_ids, tables.layers[0].num_experts, options.ep)
    return placement, plans, confirmation


def _layer_inputs(tables: Tables) -> list[LayerInput]:
    groups = {layer["id"]: layer.get("num_groups", 1) for layer in tables.artefact.model.get("layers", [])}
    return [
        LayerInput(
            layer=layer,
            num_groups=groups.get(layer.id, 1),
            fit=fit,
            validation=validation,
            counts=tables.counts(layer, ["fit"]),
            popularity=tables.statistics(layer)["popularity"],
        )
        for layer, fit, validation in zip(
            tables.layers, tables.samples("fit"), tables.samples("validation"), strict=True
        )
    ]


def _solve_layer(data: LayerInput, options: SolveOptions) -> LayerPlan:
    allowed, unit = _group_constraint(data, options)
    popularity = data.popularity[0]
    problem = build_problem(
        options.goal,
        options.ep,
        data.fit.experts,
        data.fit.block_start,
        popularity,
        **_table_rows(data),
        theta=options.theta,
        mu=options.mu,
        allowed=allowed,
    )
    searched = problem if unit is None else contract(problem, unit)
    generator = np.random.default_rng([options.seed, data.layer.id])
    try:
        solution = solve(
            searched, options.goal, options.method, options.effort, generator, metis_seeds=options.metis_seeds
        )
    except ModuleNotFoundError as error:
        raise MachineError(f"{error.name} is not installed; pip install smoe[bench].") from error
    placement = solution.placement if unit is None else solution.placement[unit]
    return LayerPlan(data.layer.id, placement, solution, validation_gains(_validation_blocks(data, options), placement))


def _table_rows(data: LayerInput) -> dict[str, npt.NDArray[Any]]:
    """The token table's rows of the fit rows, as `build_problem` takes them; none where most ids are not known."""
    token_id = data.fit.token_id
    if (token_id == UNKNOWN_TOKEN).mean() > 0.5:
        return {}
    kinds = np.unique(token_id).astype(np.int64)
    counts = (data.counts.token_id, data.counts.expert, data.counts.count)
    demand = token_demand(kinds, counts, data.popularity[0], data.layer.top_k, PSEUDO)
    return {"token_id": token_id, "demand": demand}


def _group_constraint(data: LayerInput, options: SolveOptions) -> tuple[Mask | None, npt.NDArray[np.int64] | None]:
    """Where experts may go, or which whole group each belongs to, when router groups are kept whole."""
    experts, groups = data.layer.num_experts, data.num_groups
    if not options.whole_groups:
        return None, None
    if groups > options.ep:
        return None, np.arange(experts) // (experts // groups)
    return group_mask(experts, options.ep, groups), None


def _validation_blocks(data: LayerInput, options: SolveOptions) -> list[Problem]:
    """One problem a validation block, by true routing: the judge must not be the table that was optimised."""
    return [
        build_problem(
            options.goal,
            options.ep,
            data.validation.experts[start:stop],
            np.array([0, stop - start], np.int64),
            data.popularity[1],
            theta=options.theta,
            mu=options.mu,
        )
        for start, stop in pairwise(data.validation.block_start)
    ]


def _align_labels(
    plans: list[LayerPlan], samples: list[Samples], options: SolveOptions, num_groups: list[int]
) -> npt.NDArray[np.int32]:
    """Name each layer's ranks so that tokens stay where the layer before had them. Returns [L, E].

    With whole groups spread over several ranks a rank keeps to its group, so names stay.
    """
    aligned: list[npt.NDArray[np.int32]] = []
    for index, (plan, rows) in enumerate(zip(plans, samples, strict=True)):
        placement = plan.placement
        fixed = options.whole_groups and num_groups[index] < options.ep
        if aligned and not fixed:
            before = rank_labels(samples[index - 1].experts, single_hosts(aligned[-1], options.ep))
            towards = np.zeros((len(placement), options.ep))
            np.add.at(towards, (rows.experts, before[:, None]), 1)
            placement = relabel(placement, towards, rank_capacity(len(placement), options.ep))
        aligned.append(placement)
    return np.stack(aligned)


def _finite(value: float) -> float | None:
    """A number JSON can hold: one block alone has no standard error."""
    return value if math.isfinite(value) else None


def write_served(path: Path, tables: Tables, placement: Placement, console: Console) -> dict[str, Any]:
    """Contract the tables to a placement's ranks and write runtime.safetensors.

    Returns the predictor preferred in each layer, each tensor's bytes, and parameters for the manifest.
    """
    choice = choose_smoothing(tables, placement)
    with console.progress("fitting predictors", len(tables.layers), "layers") as advance:
        predictors = []
        for layer in contract_tables(tables, placement, choice):
            predictors.append(layer)
            advance(1)
    sizes = write_runtime(
        path,
        placement,
        predictors,
        top_k=tables.layers[0].top_k,
        choice=choice,
        model=tables.artefact.model,
        layout="map",
    )
    chosen = [layer.chosen.value for layer in predictors]
    return {"predictors": chosen, "runtime_bytes": sizes, "parameters": {"token_table": asdict(choice)}}


def publish_placement(
    tables: Tables, target: Path, options: SolveOptions, *, jobs: int, force: bool, console: Console
) -> dict[str, Any]:
    """Solve, contract and publish placement-epG/. Returns what was found, layer by layer."""
    parameters = asdict(options) | {"map_sha256": None}
    with publish(
        target,
        "placement",
        parameters=parameters,
        model=tables.artefact.model,
        seed=options.seed,
        parents=[tables.artefact],
        force=force,
    ) as draft:
        with console.progress("placing", len(tables.layers), "layers") as advance:
            placement, plans, confirmation = solve_layers(tables, options, jobs, advance)
        write_placement(draft.path / PLACEMENT_FILE, placement)
        served = write_served(draft.path / RUNTIME, tables, placement, console)
        log = [plan.log() for plan in plans]
        for line in log:
            stages = ", ".join(f"{stage['name']} {stage['objective']:.4f}" for stage in line["stages"])
            console.detail(f"layer {line['layer']}: {stages}")
        (draft.path / "solver.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in log))
        draft.parameters |= {"map_sha256": placement.map_sha256, "confirmed": confirmation.confirmed}
        draft.parameters |= served["parameters"]
        document = {"path": str(target), **draft.parameters, "layers": log}
        document |= {key: served[key] for key in ("predictors", "runtime_bytes")}
        document["validation_gain"] = confirmation.mean_gain
        document["validation_two_standard_errors"] = _finite(confirmation.two_standard_errors)
    return document
