"""The six states, measured on held-out rows (design 1): what placing gives, what shuffling gives, and the ceiling.

Axes: N held-out rows, E experts, G ranks, K experts a token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.console import Console
from smoe_cli.contraction import contract_tables
from smoe_cli.folder import EVALUATION, sibling
from smoe_cli.placement import Placement, layer_predictors, read_placement, read_runtime
from smoe_profiles.artefact import Artefact, publish, require_parent
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.gates import GateRecord, GateRows, gate_record
from smoe_profiles.models import describe_identity, same_model
from smoe_profiles.tables import Tables
from smoe_profiles.trace import ExpertIds, Trace, TraceLayer
from smoe_solvers.choices import Assignment, Predictor
from smoe_solvers.figures import (
    Figures,
    home_by_scores,
    home_without_shuffle,
    mean_figures,
    measure,
    wire_rows,
)
from smoe_solvers.predictors import (
    Context,
    LayerPredictors,
    TokenChoice,
    local_counts,
    quantise,
    rank_labels,
    score,
)

STATES = ("contiguous", "placed", "shuffled", "placed+shuffled", "contiguous+oracle", "oracle")
NONE, ORACLE = "none", "oracle"
GATED = (Predictor.EARLY_GATE, Predictor.LINEAR)
"""Predictors that need what is known just before a layer's attention."""

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

    def scores(
        self, index: int, predictor: Predictor, token_id: npt.NDArray[np.uint32], gate: GateRows | None, top_k: int
    ) -> npt.NDArray[np.uint8]:
        """[N, G] u8 scores of a predictor at a layer, from what is known before its router runs."""
        context = Context(
            token_id,
            two=self.labels[-2] if len(self.labels) > 1 else None,
            one=self.labels[-1] if self.labels else None,
            early=gate.early if gate else None,
            features=gate.features if gate else None,
        )
        return score(self.layers[index], predictor, context, self.placement.expert_to_rank[index], top_k)


def evaluate_placement(
    rows: HeldOut,
    tables: Tables,
    placement: Placement,
    served: Sequence[LayerPredictors],
    choice: TokenChoice,
    *,
    predictors: Sequence[Predictor],
    batch: int,
    progress: Callable[[int], None],
) -> list[Measured]:
    """Figures of every layer. served: the placement's own predictors; the contiguous ones are contracted here."""
    experts_per_rank = placement.expert_to_rank.shape[1] // placement.num_ranks
    flat = (np.arange(placement.expert_to_rank.shape[1]) // experts_per_rank).astype(np.int32)
    contiguous = Placement(placement.layer_ids, np.tile(flat, (len(placement.layer_ids), 1)), placement.num_ranks)
    sides = {
        "contiguous": _Side(contiguous, list(contract_tables(tables, contiguous, choice)), []),
        "placed": _Side(placement, served, []),
    }
    home = home_without_shuffle(len(rows.token_id), placement.num_ranks, batch)
    measured = []
    for index, layer in enumerate(rows.trace.layers):
        experts, gate = rows.layer(layer)
        found: Measured = {}
        for name, side in sides.items():
            counts = local_counts(experts, side.placement.expert_to_rank[index], placement.num_ranks)
            plain = measure(counts, home, batch, None)
            found[name] = {NONE: {assignment.value: plain for assignment in Assignment}}
            shuffled = "shuffled" if name == "contiguous" else "placed+shuffled"
            found[shuffled] = {
                predictor.value: _shuffled(
                    counts, side.scores(index, predictor, rows.token_id, gate, layer.top_k), batch
                )
                for predictor in predictors
            }
            ceiling = "contiguous+oracle" if name == "contiguous" else "oracle"
            found[ceiling] = {ORACLE: _shuffled(counts, quantise(counts, layer.top_k), batch)}
            side.labels.append(rank_labels(experts, side.placement.expert_to_rank[index], placement.num_ranks))
        measured.append({state: found[state] for state in STATES})
        progress(1)
    return measured


def _shuffled(counts: npt.NDArray[np.int32], scores: npt.NDArray[np.uint8], batch: int) -> dict[str, Figures]:
    return {
        assignment.value: measure(counts, home_by_scores(scores, batch, assignment), batch, scores)
        for assignment in Assignment
    }


def _check_predictors(predictors: Sequence[Predictor], served: Sequence[LayerPredictors], chosen: Artefact) -> None:
    """Raises ImpossibleError for a predictor that the placement does not carry."""
    carried = {Predictor.SELECTED, *served[0].available()}
    for predictor in predictors:
        if predictor not in carried:
            raise ImpossibleError(
                f"{chosen.path} carries no {predictor} predictor; record its fit trace with smoe profile --early-gate."
            )


def mean_over_layers(measured: list[Measured]) -> Measured:
    return {
        state: {
            predictor: {
                assignment: mean_figures([layer[state][predictor][assignment] for layer in measured])
                for assignment in measured[0][state][predictor]
            }
            for predictor in measured[0][state]
        }
        for state in STATES
    }


def as_document(measured: Measured, ranks: int) -> dict[str, Any]:
    """Figures as plain dictionaries, wire rows of every way to run a layer beside them."""
    return {
        state: {
            predictor: {
                assignment: asdict(figures) | {"wire_rows": wire_rows(figures.remote_fanout, ranks)}
                for assignment, figures in by_assignment.items()
            }
            for predictor, by_assignment in by_predictor.items()
        }
        for state, by_predictor in measured.items()
    }


def measure_placement(
    chosen: Artefact,
    tables: Tables,
    trace: Trace,
    *,
    predictors: Sequence[Predictor],
    batch: int,
    max_tokens: int | None,
    console: Console,
) -> dict[str, Any]:
    """Measure and publish evaluation-epG/ (an earlier one is replaced). Returns {total, layers, context}.

    Raises InputError if the trace is of another model or has no held-out rows, or the tables are not the placement's.
    """
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
    placement = read_placement(chosen)
    arrays, metadata = read_runtime(chosen)
    served = [layer_predictors(arrays, metadata, index) for index in range(len(placement.layer_ids))]
    _check_predictors(predictors, served, chosen)
    rows = held_out(trace, predictors, served[0], max_tokens)
    choice = TokenChoice(**json.loads(metadata["token_table"]))
    context = {
        "trace": trace.artefact.id,
        "part": "heldout",
        "rows": len(rows.token_id),
        "batch": batch,
        "quota": "ceil(T/G)",
        "ranks": placement.num_ranks,
        "predictors": [predictor.value for predictor in predictors],
    }
    with publish(
        sibling(chosen.path, EVALUATION),
        EVALUATION,
        parameters=context,
        model=chosen.model,
        parents=[chosen, trace.artefact],
        force=True,
    ) as draft:
        with console.progress("measuring", len(trace.layers), "layers") as advance:
            measured = evaluate_placement(
                rows,
                tables,
                placement,
                served,
                choice,
                predictors=predictors,
                batch=batch,
                progress=advance,
            )
        document = {
            "total": as_document(mean_over_layers(measured), placement.num_ranks),
            "layers": {
                str(layer): as_document(figures, placement.num_ranks)
                for layer, figures in zip(placement.layer_ids, measured, strict=True)
            },
            "context": context,
        }
        (draft.path / "evaluation.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return document
