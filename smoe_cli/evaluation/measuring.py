"""The six states, measured on held-out rows (docs/terms.md): what placing gives, what shuffling gives, and the ceiling.

Axes: N held-out rows, E experts, G ranks, K experts a token.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.console import Console
from smoe_cli.evaluation.breakdown import (
    CEILINGS,
    NONE,
    ORACLE,
    Grouping,
    Shuffle,
    expert_figures,
    group_document,
    group_layer,
    groupings,
    hottest_of_ids,
    mean_tree,
    row_facts,
    score_logits,
    share,
)
from smoe_cli.evaluation.detail import layer_detail
from smoe_cli.evaluation.pricing import Pricing, price
from smoe_cli.evaluation.requests import (
    WAY,
    RequestSums,
    arriving_requests,
    held_out_requests,
    request_document,
    requests_in_turn,
)
from smoe_cli.evaluation.travel import layer_travel
from smoe_cli.folder import EVALUATION, sibling
from smoe_cli.hardware import Hardware
from smoe_cli.placement import Placement, contiguous_placement, layer_predictors, read_placement, read_runtime
from smoe_cli.placing.contraction import contract_tables
from smoe_cli.placing.solve_options import links_of
from smoe_profiles.artefact import Artefact, publish, require_parent
from smoe_profiles.errors import ImpossibleError, InputError, SmoeError
from smoe_profiles.gates import GateRecord, GateRows, gate_record
from smoe_profiles.models import describe_identity, find_model, same_model
from smoe_profiles.tables import Tables
from smoe_profiles.trace import ExpertIds, Trace, TraceLayer
from smoe_solvers.choices import Assignment, Predictor
from smoe_solvers.expert_prediction import score_rows
from smoe_solvers.figures import Figures, home_by_scores, home_without_shuffle, measure
from smoe_solvers.hierarchy import Links
from smoe_solvers.methods.load import balance_load
from smoe_solvers.predictors import (
    Context,
    LayerPredictors,
    TokenChoice,
    linear_logits,
    local_counts,
    quantise,
    rank_labels,
    score,
)
from smoe_solvers.redundancy import Copies

STATES = tuple(CEILINGS)
SHUFFLED = {"contiguous": "shuffled", "placed": "placed+shuffled"}
BALANCED = "load-balanced"
"""Beside the six states: experts placed by load alone, as serving engines do."""

GATED = (Predictor.EARLY_GATE, Predictor.LINEAR)
"""Predictors that need what is known just before a layer's attention."""

FORETELLING = (Predictor.TOKEN, *GATED)
"""Predictors that name experts, not only ranks."""

Measured = dict[str, dict[str, dict[str, Figures]]]
"""state -> predictor -> assignment -> figures."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows, layer by layer. token_id: [N]; record: the early gate's, where the rows are its sample."""

    trace: Trace
    token_id: npt.NDArray[np.uint32]
    record: GateRecord | None

    def layer(self, layer: TraceLayer) -> tuple[ExpertIds, GateRows | None]:
        """The layer's experts [N, K], and what was known before attention."""
        if self.record is None:
            return self.trace.experts(layer, "heldout")[: len(self.token_id)], None
        rows = self.record.rows(layer, "heldout", len(self.token_id))
        return rows.experts, rows


def held_out(trace: Trace, predictors: Sequence[Predictor], layer: LayerPredictors, max_tokens: int | None) -> HeldOut:
    """The rows to measure on: the trace's, or its early-gate sample where a predictor needs one.

    layer: one of the placement's, whose mix and choice may rest on the early gate too.
    Raises InputError if a predictor needs the early gate and the trace has none.
    """
    resting = {Predictor.FUSED, Predictor.SELECTED} if layer.linear is not None else set()
    needing = [predictor for predictor in predictors if predictor in {*GATED, *resting}]
    if not needing:
        return HeldOut(trace, trace.read(["token_id"], "heldout")["token_id"][:max_tokens].astype(np.uint32), None)
    record = gate_record(trace.artefact.path)
    if record is None or not len(record.token_id("heldout")):
        raise InputError(
            f"--predictor {needing[0]} needs the early gate, which {trace.artefact.path} has not recorded for held-out "
            "rows; record it with smoe profile --early-gate all."
        )
    return HeldOut(trace, record.token_id("heldout")[:max_tokens], record)


@dataclass
class _Side:
    """One placement being walked layer by layer: its predictors, and the labels of the two layers before."""

    placement: Placement
    layers: Sequence[LayerPredictors]
    labels: list[npt.NDArray[np.uint8]]

    def context(self, token_id: npt.NDArray[np.uint32], gate: GateRows | None) -> Context:
        """What is known of N rows before a layer's router runs."""
        return Context(
            token_id,
            two=self.labels[-2] if len(self.labels) > 1 else None,
            one=self.labels[-1] if self.labels else None,
            early=gate.early if gate else None,
            features=gate.features if gate else None,
        )


@dataclass(frozen=True)
class LayerRun:
    """One layer walked under both placements.

    shuffles: its states, in order of STATES and predictors; balanced: experts placed by load alone in as many slots;
    token_scores: [N, G] of the token table by placement; predictors: the placed side's.
    """

    layer: TraceLayer
    experts: ExpertIds
    gate: GateRows | None
    shuffles: list[Shuffle]
    balanced: Shuffle
    token_scores: dict[str, npt.NDArray[np.uint8]]
    predictors: LayerPredictors

    def plain(self, placement: str) -> Shuffle:
        """The state of a placement without a shuffle."""
        return next(shuffle for shuffle in self.shuffles if shuffle.state == placement)


def walk_layers(
    rows: HeldOut,
    tables: Tables,
    placement: Placement,
    served: Sequence[LayerPredictors],
    choice: TokenChoice,
    *,
    predictors: Sequence[Predictor],
    batch: int,
) -> Iterator[LayerRun]:
    """Every layer in turn. served: the placement's own predictors; the contiguous ones are contracted here."""
    contiguous = contiguous_placement(placement.layer_ids, placement.num_experts, placement.num_ranks)
    sides = {
        "contiguous": _Side(contiguous, list(contract_tables(tables, contiguous, choice)), []),
        "placed": _Side(placement, served, []),
    }
    still = home_without_shuffle(len(rows.token_id), placement.num_ranks, batch)
    for index, layer in enumerate(rows.trace.layers):
        experts, gate = rows.layer(layer)
        shuffles, token_scores = [], {}
        for name, side in sides.items():
            hosts, context = side.placement.hosts[index], side.context(rows.token_id, gate)
            plain = _plain(name, experts, hosts, still, side.placement.redundant)
            shuffles.append(plain)
            for predictor in predictors:
                scores = score(side.layers[index], predictor, context, hosts, layer.top_k)
                shuffles.append(_shuffle(plain, SHUFFLED[name], predictor.value, scores, batch))
            shuffles.append(_shuffle(plain, CEILINGS[name], ORACLE, quantise(plain.counts, layer.top_k), batch))
            token_scores[name] = score(side.layers[index], Predictor.TOKEN, context, hosts, layer.top_k)
            side.labels.append(rank_labels(experts, hosts))
        shuffles.sort(key=lambda shuffle: STATES.index(shuffle.state))
        hosts = _balanced_hosts(tables, layer, placement)
        balanced = _plain(BALANCED, experts, hosts, still, placement.redundant)
        yield LayerRun(layer, experts, gate, shuffles, balanced, token_scores, served[index])


def _plain(
    state: str, experts: ExpertIds, hosts: npt.NDArray[np.bool_], still: npt.NDArray[np.int32], redundant: bool
) -> Shuffle:
    """Rows that stay where they are. experts: [N, K]; hosts: [E, G]; still: [N]."""
    homes = {how.value: still for how in Assignment}
    copies = Copies(experts, hosts) if redundant else None
    return Shuffle(state, NONE, local_counts(experts, hosts), None, homes, copies)


def _balanced_hosts(tables: Tables, layer: TraceLayer, placement: Placement) -> npt.NDArray[np.bool_]:
    """Where an engine's load balancer would put this layer's experts, [E, G], by the load that the tables counted."""
    load = tables.statistics(layer)["popularity"].sum(axis=0)
    slots = balance_load(load, placement.num_ranks, placement.physical_to_logical.shape[1])
    hosts: npt.NDArray[np.bool_] = Placement((layer.id,), slots[None], placement.num_ranks).hosts[0]
    return hosts


def _shuffle(plain: Shuffle, state: str, predictor: str, scores: npt.NDArray[np.uint8], batch: int) -> Shuffle:
    """The same rows and placement with homes by these scores."""
    homes = {how.value: home_by_scores(scores, batch, how) for how in Assignment}
    return replace(plain, state=state, predictor=predictor, scores=scores, homes=homes)


def layer_figures(run: LayerRun, batch: int) -> Measured:
    """Figures of a layer's states, each with its share of the oracle's lar under the same assignment."""
    found: Measured = {}
    for shuffle in run.shuffles:
        found.setdefault(shuffle.state, {})[shuffle.predictor] = {
            assignment: measure(shuffle.counts, home, batch, shuffle.scores, shuffle.copies)
            for assignment, home in shuffle.homes.items()
        }
    ceilings = {state: found[ceiling][ORACLE] for state, ceiling in CEILINGS.items()}
    return {
        state: {
            predictor: {
                assignment: replace(figures, oracle_share=share(figures.lar, ceilings[state][assignment].lar))
                for assignment, figures in by_assignment.items()
            }
            for predictor, by_assignment in by_predictor.items()
        }
        for state, by_predictor in found.items()
    }


def _check_predictors(predictors: Sequence[Predictor], served: Sequence[LayerPredictors], chosen: Artefact) -> None:
    """Raises ImpossibleError for a predictor that the placement does not carry."""
    carried = {Predictor.SELECTED, *served[0].available()}
    for predictor in predictors:
        if predictor not in carried:
            raise ImpossibleError(
                f"{chosen.path} carries no {predictor} predictor; record its fit trace with smoe profile --early-gate."
            )


def layer_document(run: LayerRun, pricing: Pricing) -> dict[str, Any]:
    """A layer's figures as plain dictionaries: state -> predictor -> assignment -> figures."""
    measured = layer_figures(run, pricing.batch)
    document: dict[str, dict[str, Any]] = {}
    for shuffle in run.shuffles:
        figures = measured[shuffle.state][shuffle.predictor]
        document.setdefault(shuffle.state, {})[shuffle.predictor] = pricing.shuffle(shuffle, figures)
    return document


def balanced_document(run: LayerRun, pricing: Pricing) -> dict[str, object]:
    """Figures of experts placed by load alone; tokens stay, so both assignments are one."""
    balanced, rule = run.balanced, Assignment.RULE.value
    figures = measure(balanced.counts, balanced.homes[rule], pricing.batch, None, balanced.copies)
    return pricing.shuffle(balanced, {rule: figures})[rule]


def foretold_experts(
    run: LayerRun, tables: Tables, token_id: npt.NDArray[np.uint32], predictors: Sequence[Predictor]
) -> dict[str, dict[str, dict[str, float]]]:
    """Of each predictor that names experts, how many of the true ones are among the K it names."""
    ids, index = np.unique(token_id, return_inverse=True)
    found = {}
    for predictor in (each for each in predictors if each in FORETELLING):
        if predictor is Predictor.TOKEN:
            num_ids = run.layer.num_experts + run.layer.num_zero
            hot = hottest_of_ids(tables.counts(run.layer), ids, num_ids, run.layer.top_k)
            scores = score_rows(hot, index, run.experts)
        else:
            assert run.gate is not None
            context = Context(token_id, early=run.gate.early, features=run.gate.features)
            logits = run.gate.early if predictor is Predictor.EARLY_GATE else linear_logits(run.predictors, context)
            scores = score_logits(logits, run.experts)
        found[predictor.value] = expert_figures(scores, index, len(ids))
    return found


def _check_inputs(chosen: Artefact, tables: Tables, trace: Trace) -> None:
    """Raises InputError if the trace is of another model or has no held-out rows, or the tables are not the parent."""
    require_parent(chosen, tables.artefact)
    if not same_model(trace.artefact.model, chosen.model):
        raise InputError(
            f"{trace.artefact.path} is of {describe_identity(trace.artefact.model)}; "
            f"{chosen.path} is for {describe_identity(chosen.model)}."
        )
    if not trace.rows("heldout"):
        raise InputError(
            f"{trace.artefact.path} has no held-out rows; record some with smoe profile --split heldout -C T."
        )


def _hidden_size(trace: Trace) -> int | None:
    """The hidden size of the model a trace was recorded from, or None where its config is not at hand."""
    name = trace.artefact.run().get("model")
    try:
        return find_model(str(name), download=False).spec.hidden_size if name else None
    except SmoeError:
        return None


@dataclass(frozen=True)
class _Gathering:
    """What is gathered layer by layer, and the document it makes. links: None where all ranks are equally far apart."""

    partitions: dict[str, Grouping]
    pricing: Pricing
    shown: Predictor
    sums: dict[str, RequestSums]
    links: Links | None
    layers: dict[str, Any] = field(default_factory=dict)
    balanced: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    travel: dict[str, Any] = field(default_factory=dict)

    def add(self, run: LayerRun, experts: dict[str, Any]) -> None:
        name, layer = str(run.layer.id), run.layer
        self.layers[name] = layer_document(run, self.pricing)
        self.balanced[name] = balanced_document(run, self.pricing)
        self.detail[name] = layer_detail(run.experts, layer.num_experts, layer.top_k, run.shuffles, self.shown)
        self.experts[name] = experts
        if self.links is not None:
            self.travel[name] = layer_travel([*run.shuffles, run.balanced], self.links)
        for key, partition in self.partitions.items():
            self.groups.setdefault(key, {})[name] = group_layer(partition, run.shuffles)
        for placement, sums in self.sums.items():
            plain = run.balanced if placement == BALANCED else run.plain(placement)
            sums.add(plain.counts, run.token_scores.get(placement), plain.copies)

    def document(self) -> dict[str, Any]:
        by_group = {key: group_document(self.partitions[key], layers) for key, layers in self.groups.items()}
        names = list(self.layers)
        sums = {name: sums for name, sums in self.sums.items() if name != BALANCED}
        balanced = requests_in_turn(self.sums[BALANCED], names, self.pricing)
        if self.travel:
            by_group["travel"] = {"total": mean_tree(list(self.travel.values())), "layers": self.travel}
        return by_group | {
            "total": mean_tree(list(self.layers.values())),
            "layers": self.layers,
            "experts": {"total": mean_tree(list(self.experts.values())), "layers": self.experts},
            WAY: request_document(sums, names, self.pricing),
            "load_balancer": {
                "method": "eplb",
                "total": mean_tree(list(self.balanced.values())),
                "layers": self.balanced,
                WAY: balanced,
            },
            "detail": {"layers": self.detail},
        }


def measure_placement(
    chosen: Artefact,
    tables: Tables,
    trace: Trace,
    *,
    predictors: Sequence[Predictor],
    batch: int,
    max_tokens: int | None,
    arrivals: Path | None,
    hardware: Hardware,
    console: Console,
) -> dict[str, Any]:
    """Measure and publish evaluation-epG/ (an earlier one is replaced). Returns what evaluation.json holds.

    arrivals: a file of requests; None: every held-out sequence is one.
    Raises InputError if the trace is of another model or has no held-out rows, the tables are not the placement's, or
    the requests cannot be read.
    """
    _check_inputs(chosen, tables, trace)
    placement = read_placement(chosen)
    arrays, metadata = read_runtime(chosen)
    served = [layer_predictors(arrays, metadata, index) for index in range(len(placement.layer_ids))]
    _check_predictors(predictors, served, chosen)
    rows = held_out(trace, predictors, served[0], max_tokens)
    facts = row_facts(trace, rows.record, len(rows.token_id))
    requests = arriving_requests(arrivals, facts) if arrivals else held_out_requests(facts)
    occurrences, _ = tables.vocabulary()
    pricing = price(tables, hardware, placement.num_ranks, _hidden_size(trace), batch)
    gathering = _Gathering(
        groupings(facts, rows.token_id, occurrences.sum(axis=0)),
        pricing,
        predictors[0],
        {name: RequestSums(requests) for name in (*SHUFFLED, BALANCED)},
        links_of(chosen.parameters),
    )
    context = {
        "trace": trace.artefact.id,
        "tables": tables.artefact.id,
        "fitted_on": tables.artefact.parameters.get("sources"),
        "part": "heldout",
        "rows": len(rows.token_id),
        "unseen_tokens": gathering.partitions["by_frequency"].share("unseen"),
        "batch": batch,
        "quota": "ceil(T/G)",
        "ranks": placement.num_ranks,
        "predictors": [predictor.value for predictor in predictors],
        "hidden_size": pricing.hidden_size,
        "hardware": hardware.name if pricing.costs else None,
        "requests": requests.facts,
    }
    choice = TokenChoice(**json.loads(metadata["token_table"]))
    with publish(
        sibling(chosen.path, EVALUATION),
        EVALUATION,
        parameters=context,
        model=chosen.model,
        parents=[chosen, trace.artefact],
        force=True,
    ) as draft:
        with console.progress("measuring", len(trace.layers), "layers") as advance:
            for run in walk_layers(rows, tables, placement, served, choice, predictors=predictors, batch=batch):
                gathering.add(run, foretold_experts(run, tables, rows.token_id, predictors))
                advance(1)
        document = gathering.document() | {"context": context}
        (draft.path / "evaluation.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return document
