"""From tables to a placement: one problem a layer, solved in parallel, rank labels aligned, gains confirmed.

Axes: E experts, G ranks, N sample rows.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.console import Console
from smoe_cli.folder import choose_placement
from smoe_cli.placement import (
    PLACEMENT_FILE,
    RUNTIME,
    Placement,
    contiguous_placement,
    read_placement,
    write_placement,
    write_runtime,
)
from smoe_cli.placing.contraction import choose_smoothing, contract_tables
from smoe_cli.placing.mixing import Mix, Round, chosen_blocks, gains_by_source, robust_mix, weigh_blocks
from smoe_cli.placing.solve_options import SolveOptions
from smoe_cli.placing.validation import validation_facts
from smoe_profiles.artefact import publish
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.table_rows import BLOCK_ROWS
from smoe_profiles.tables import Counts, Samples, Tables
from smoe_profiles.trace import UNKNOWN_TOKEN, TraceLayer
from smoe_profiles.workers import Workers
from smoe_solvers.bounds import Certificate, Proved, certify
from smoe_solvers.choices import Effort, Goal
from smoe_solvers.copy_descent import slots_of
from smoe_solvers.copy_search import add_copies, relabel_hosts, score_hosts
from smoe_solvers.cross_entropy import relabel
from smoe_solvers.hierarchy import align_names
from smoe_solvers.layer_time import LayerCost
from smoe_solvers.methods.programme import TooLargeError
from smoe_solvers.objectives import score
from smoe_solvers.predictors import rank_labels
from smoe_solvers.problem import Problem, build_problem, contract, group_mask, rank_capacity, token_demand
from smoe_solvers.redundancy import single_hosts
from smoe_solvers.solve import Confirmation, Solved, confirm, solve, validation_gains
from smoe_solvers.stability import moved, settle
from smoe_solvers.timed import Rows, Timing

PSEUDO = 4.0
"""Rows of popularity a token id starts with while solving; what is served is chosen on validation rows."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LayerPlan:
    """One layer's answer. placement: [E] int32; gains: [B] over contiguous, by validation block.

    microseconds: predicted for the validation blocks, by placement; None without a layer's cost.
    hosts: [E, G] with copies, made from the placement, and copy_gains: [B] over it; None without copies.
    moved: experts on another rank than in the placement to stay near; None without one.
    """

    layer: int
    placement: npt.NDArray[np.int32]
    solution: Solved
    gains: npt.NDArray[np.float64]
    microseconds: dict[str, float] | None = None
    hosts: Mask | None = None
    copy_gains: npt.NDArray[np.float64] | None = None
    moved: int | None = None

    def log(self) -> dict[str, Any]:
        """The layer's line of solver.jsonl."""
        confirmation = confirm(self.gains)
        return {
            "layer": self.layer,
            "origin": self.solution.origin,
            "objective": self.solution.objective,
            "stages": [asdict(stage) for stage in self.solution.stages],
            "stopped": self.solution.stopped,
            "reasons": self.solution.reasons,
            "settings": self.solution.settings,
            "certificate": asdict(self.solution.certificate),
            "note": self.solution.note,
            "validation_gain": confirmation.mean_gain,
            "validation_two_standard_errors": _finite(confirmation.two_standard_errors),
            "moved": self.moved,
            "validation_gain_of_copies": None if self.copy_gains is None else confirm(self.copy_gains).mean_gain,
        }


@dataclass(frozen=True)
class LayerInput:
    """Everything one worker needs for one of `layers` layers; fit first, then validation.

    fit: weighed by the mix, if there is one; old: [E] the placement to stay near.
    """

    layer: TraceLayer
    num_groups: int
    fit: Samples
    validation: Samples
    counts: Counts
    popularity: npt.NDArray[np.int64]
    layers: int
    old: npt.NDArray[np.int32] | None = None


def solve_layers(
    tables: Tables,
    options: SolveOptions,
    workers: Workers,
    progress: Callable[[int], None],
    cost: LayerCost | None = None,
    old: Placement | None = None,
) -> tuple[Placement, list[LayerPlan], Confirmation]:
    """Place every layer; the same answer whoever works. progress(1) after each layer.

    cost: what a layer's times are predicted by; goal time needs it. old: a placement to stay near. A gain is judged for
    the placement as a whole, the mean over layers on each validation block, weighed by the mix; where it is not
    confirmed the placement is contiguous.
    """
    if len({(layer.num_experts, layer.top_k) for layer in tables.layers}) > 1:
        raise ImpossibleError(f"{tables.artefact.path}: layers differ in E or K; they cannot share one placement yet.")
    mix = dict(options.mix) if options.mix else None
    inputs = layer_inputs(tables, mix, old)
    plans = _solve_all(inputs, options, workers, progress, cost)
    layer_ids = tuple(plan.layer for plan in plans)
    gains = np.mean([plan.gains for plan in plans], axis=0)
    source = inputs[0].validation.source
    confirmation = confirm(gains[chosen_blocks(source, mix)] if mix and source else gains)
    samples = [layer_input.fit for layer_input in inputs]
    if confirmation.confirmed and options.redundant:
        slots = [slots_of(hosts) for hosts in _align_hosts(plans, samples)]
        placement = Placement(layer_ids, np.stack(slots), options.ep)
    elif confirmation.confirmed and old is not None:
        placement = Placement.of_ranks(layer_ids, np.stack([plan.placement for plan in plans]), options.ep)
    elif confirmation.confirmed:
        to_rank = _align_labels(plans, samples, options, [layer_input.num_groups for layer_input in inputs])
        placement = Placement.of_ranks(layer_ids, to_rank, options.ep)
    else:
        placement = contiguous_placement(layer_ids, tables.layers[0].num_experts, options.ep, options.redundant)
    return placement, plans, confirmation


def _solve_all(
    inputs: list[LayerInput],
    options: SolveOptions,
    workers: Workers,
    progress: Callable[[int], None],
    cost: LayerCost | None = None,
) -> list[LayerPlan]:
    return workers.run(_solve_layer, [(data, options, cost) for data in inputs], lambda _: progress(1))


def choose_robust_mix(
    tables: Tables, sources: list[str], options: SolveOptions, workers: Workers, console: Console
) -> list[Round]:
    """Mixes tried, each with what every source gains on its validation blocks from a quick placement solved for it."""

    def judge(mix: Mix) -> dict[str, float]:
        inputs = layer_inputs(tables, mix)
        with console.progress("trying a mix", len(inputs), "layers") as advance:
            plans = _solve_all(inputs, replace(options, effort=Effort.FAST), workers, advance)
        source = inputs[0].validation.source
        assert source is not None
        return gains_by_source(np.stack([plan.gains for plan in plans]), source)

    return robust_mix(sources, judge)


def layer_inputs(tables: Tables, mix: Mix | None = None, old: Placement | None = None) -> list[LayerInput]:
    """What every layer is solved from. mix: parts of the sources; old: a placement to stay near."""
    groups = {layer["id"]: layer.get("num_groups", 1) for layer in tables.artefact.model.get("layers", [])}
    inputs = []
    pairs = zip(tables.samples("fit"), tables.samples("validation"), strict=True)
    for index, (layer, (fit, validation)) in enumerate(zip(tables.layers, pairs, strict=True)):
        popularity = tables.statistics(layer)["popularity"]
        if mix is not None:
            fit = weigh_blocks(fit, mix)
            counted = np.bincount(fit.experts.reshape(-1), minlength=popularity.shape[1])
            popularity = np.stack([counted, popularity[1]])
        inputs.append(
            LayerInput(
                layer=layer,
                num_groups=groups.get(layer.id, 1),
                fit=replace(fit, early=None),
                validation=replace(validation, early=None),
                counts=_counts_of(tables.counts(layer, ["fit"]), fit.token_id),
                popularity=popularity,
                layers=len(tables.layers),
                old=None if old is None else old.expert_to_rank[index],
            )
        )
    return inputs


def _counts_of(counts: Counts, token_id: npt.NDArray[np.uint32]) -> Counts:
    """The counts of some ids: nothing is asked of the others, and a layer is sent to its worker whole."""
    kept = np.isin(counts.token_id, token_id)
    return Counts(counts.token_id[kept], counts.expert[kept], counts.count[kept])


def layer_problem(data: LayerInput, options: SolveOptions) -> tuple[Problem, npt.NDArray[np.int64] | None]:
    """What is searched for a layer, and the unit of every expert where whole groups are placed instead of experts."""
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
    return (problem, None) if unit is None else (contract(problem, unit), unit)


def _solve_layer(data: LayerInput, options: SolveOptions, cost: LayerCost | None) -> LayerPlan:
    searched, unit = layer_problem(data, options)
    timing = None
    if cost and options.goal is Goal.TIME:
        token_id = _table_rows(data).get("token_id")
        timing = Timing(Rows.of_problem(searched, data.fit.experts, data.fit.block_start, token_id, unit), cost)
    generator = np.random.default_rng([options.seed, data.layer.id])
    try:
        solution = solve(
            searched,
            options.goal,
            options.method,
            options.effort,
            generator,
            metis_seeds=options.metis_seeds,
            layers=data.layers,
            time_limit=options.time_limit,
            timing=timing,
            links=options.links,
        )
    except ModuleNotFoundError as error:
        raise MachineError(f"{error.name} is not installed; pip install smoe[bench].") from error
    except TooLargeError as error:
        raise ImpossibleError(
            f"--method exact: layer {data.layer.id}: {error}; use --goal fanout or another method."
        ) from error
    bounded = options.goal is not Goal.TIME and options.links is None and not options.redundant
    if solution.certificate.kind is Proved.UNKNOWN and bounded:
        solution = replace(solution, certificate=certify(searched, solution.placement, options.effort))
    placement = solution.placement if unit is None else solution.placement[unit]
    if data.old is not None:
        placement = settle(searched, data.old, placement)
    judged = _validation_timing(data, options, cost) if cost else None
    if judged and options.goal is Goal.TIME:
        gains = judged.gains(placement)
    else:
        gains = validation_gains(_validation_blocks(data, options), placement, options.links)
    times = _microseconds(judged, placement) if judged else None
    apart = None if data.old is None else moved(data.old, placement)
    plan = LayerPlan(data.layer.id, placement, solution, gains, times, moved=apart)
    return _with_copies(plan, searched, data, options, generator) if options.redundant else plan


def _with_copies(
    plan: LayerPlan, problem: Problem, data: LayerInput, options: SolveOptions, generator: np.random.Generator
) -> LayerPlan:
    """The plan with the extra slots filled. What was proved or predicted of it without copies holds no more."""
    slots = options.slots(problem.num_experts)
    hosts, stages = add_copies(problem, plan.placement, slots, options.effort, generator)
    blocks = _validation_blocks(data, options)
    gains = np.array([score(block, plan.placement).objective - score_hosts(block, hosts).objective for block in blocks])
    solution = replace(
        plan.solution,
        objective=stages[-1].objective,
        stages=[*plan.solution.stages, *stages],
        certificate=Certificate(),
    )
    return replace(plan, solution=solution, gains=plan.gains + gains, microseconds=None, hosts=hosts, copy_gains=gains)


def _validation_timing(data: LayerInput, options: SolveOptions, cost: LayerCost) -> Timing:
    """The validation rows as they run, a shuffle following true routing; short blocks are priced as whole ones."""
    rows = data.validation
    problem = build_problem(options.goal, options.ep, rows.experts, rows.block_start, data.popularity[1])
    return Timing(Rows.of_problem(problem, rows.experts, rows.block_start), cost, BLOCK_ROWS)


def _microseconds(timing: Timing, placement: npt.NDArray[np.int32]) -> dict[str, float]:
    """Mean predicted time of contiguous experts and of the placement."""
    contiguous = contiguous_placement((0,), len(placement), timing.cost.num_ranks).expert_to_rank[0]
    found = {"contiguous": contiguous, "placed": placement}
    return {name: float(timing.microseconds(where).mean()) for name, where in found.items()}


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

    With whole groups spread over several ranks a rank keeps to its group, so names stay; where ranks are not equally
    far apart, only names of equal cost change.
    """
    links = options.links
    aligned: list[npt.NDArray[np.int32]] = []
    for index, (plan, rows) in enumerate(zip(plans, samples, strict=True)):
        placement = plan.placement
        fixed = options.whole_groups and num_groups[index] < options.ep
        if aligned and not fixed:
            before = rank_labels(samples[index - 1].experts, single_hosts(aligned[-1], options.ep))
            towards = np.zeros((len(placement), options.ep))
            np.add.at(towards, (rows.experts, before[:, None]), 1)
            capacity = rank_capacity(len(placement), options.ep)
            if links is None:
                placement = relabel(placement, towards, capacity)
            else:
                placement = align_names(placement, towards, links, capacity)
        aligned.append(placement)
    return np.stack(aligned)


def _align_hosts(plans: list[LayerPlan], samples: list[Samples]) -> list[Mask]:
    """The same for placements with copies, all of whose ranks have as many slots: [E, G] for each layer."""
    aligned: list[Mask] = []
    for index, (plan, rows) in enumerate(zip(plans, samples, strict=True)):
        assert plan.hosts is not None
        hosts = plan.hosts
        if aligned:
            before = rank_labels(samples[index - 1].experts, aligned[-1])
            towards = np.zeros(hosts.shape)
            np.add.at(towards, (rows.experts, before[:, None]), 1)
            hosts = relabel_hosts(hosts, towards)
        aligned.append(hosts)
    return aligned


@dataclass(frozen=True)
class Near:
    """A placement to stay near. id: of its artefact."""

    path: Path
    id: str
    placement: Placement


def placement_to_stay_near(folder: Path, name: str, tables: Tables, ep: int) -> Near:
    """The placement named. Raises InputError if it is for other layers, ranks or has copies of experts."""
    chosen = choose_placement(folder, name)
    placement = read_placement(chosen)
    wanted = tuple(layer.id for layer in tables.layers), tables.layers[0].num_experts, ep
    found = placement.layer_ids, placement.num_experts, placement.num_ranks
    if found != wanted or placement.redundant:
        raise InputError(
            f"{chosen.path} places {found[1]} experts of {len(found[0])} layers on {found[2]} ranks"
            f"{', with copies' if placement.redundant else ''}; --from needs {wanted[1]} of {len(wanted[0])} on {ep}."
        )
    return Near(chosen.path, chosen.id, placement)


def _by_source(tables: Tables, plans: list[LayerPlan]) -> dict[str, float] | None:
    """What each source gains on its validation blocks, mean over layers; None where sources were not kept."""
    source = next(tables.samples("validation")).source
    return gains_by_source(np.stack([plan.gains for plan in plans]), source) if source else None


def _finite(value: float) -> float | None:
    """A number JSON can hold: one block alone has no standard error."""
    return value if math.isfinite(value) else None


def _mean_microseconds(plans: list[LayerPlan], confirmed: bool) -> dict[str, float] | None:
    """Predicted layer time, mean over layers, of contiguous experts and of what is returned; None without a cost."""
    found = [plan.microseconds for plan in plans if plan.microseconds]
    if not found:
        return None
    kept = {"contiguous": "contiguous", "placed": "placed" if confirmed else "contiguous"}
    return {name: float(np.mean([times[source] for times in found])) for name, source in kept.items()}


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
    tables: Tables,
    target: Path,
    options: SolveOptions,
    *,
    workers: Workers,
    force: bool,
    console: Console,
    cost: LayerCost | None = None,
    old: Placement | None = None,
) -> dict[str, Any]:
    """Solve, contract and publish placement-epG/. Returns what was found, by layer. cost, old: see solve_layers."""
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
            placement, plans, confirmation = solve_layers(tables, options, workers, advance, cost, old)
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
        document["gains_by_source"] = _by_source(tables, plans)
        document["validation_microseconds"] = _mean_microseconds(plans, confirmation.confirmed)
        document |= validation_facts(tables, placement)
        document["extra_slots"] = placement.physical_to_logical.shape[1] / placement.num_experts - 1
        document["validation_gain"] = confirmation.mean_gain
        document["validation_two_standard_errors"] = _finite(confirmation.two_standard_errors)
    return document
