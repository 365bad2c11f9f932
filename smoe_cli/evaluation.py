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
from smoe_cli.placement import LayerRuntime, Placement, layer_runtime, read_placement, read_runtime
from smoe_profiles.artefact import Artefact, publish, require_parent
from smoe_profiles.errors import InputError
from smoe_profiles.models import describe_identity, same_model
from smoe_profiles.tables import Tables
from smoe_profiles.trace import Trace
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
    TokenChoice,
    local_counts,
    markov_scores,
    paper_scores,
    quantise,
    rank_labels,
)

STATES = ("contiguous", "placed", "shuffled", "placed+shuffled", "contiguous+oracle", "oracle")
NONE, ORACLE = "none", "oracle"

Measured = dict[str, dict[str, dict[str, Figures]]]
"""state -> predictor -> assignment -> figures."""


@dataclass
class _Side:
    """One placement being walked layer by layer: its tables, and the labels of the two layers before."""

    placement: Placement
    layers: Sequence[LayerRuntime]
    labels: list[npt.NDArray[np.uint8]]

    def scores(self, index: int, predictor: Predictor, token_id: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """[N, G] u8 scores of a predictor at a layer, from what is known before its router runs."""
        layer = self.layers[index]
        two = self.labels[-2] if len(self.labels) > 1 else None
        one = self.labels[-1] if self.labels else None
        token = layer.token[token_id]
        if predictor is Predictor.TOKEN:
            return token
        markov = markov_scores(layer.markov, two, one, len(token_id))
        return markov if predictor is Predictor.MARKOV else paper_scores(token, markov)


def evaluate_placement(
    trace: Trace,
    tables: Tables,
    placement: Placement,
    served: Sequence[LayerRuntime],
    choice: TokenChoice,
    *,
    predictors: Sequence[Predictor],
    batch: int,
    max_tokens: int | None,
    progress: Callable[[int], None],
) -> list[Measured]:
    """Figures of every layer. served: the placement's run-time tables; the contiguous ones are contracted here."""
    token_id = trace.read(["token_id"], "heldout")["token_id"][:max_tokens].astype(np.uint32)
    experts_per_rank = placement.expert_to_rank.shape[1] // placement.num_ranks
    flat = (np.arange(placement.expert_to_rank.shape[1]) // experts_per_rank).astype(np.int32)
    contiguous = Placement(placement.layer_ids, np.tile(flat, (len(placement.layer_ids), 1)), placement.num_ranks)
    sides = {
        "contiguous": _Side(contiguous, list(contract_tables(tables, contiguous, choice)), []),
        "placed": _Side(placement, served, []),
    }
    home = home_without_shuffle(len(token_id), placement.num_ranks, batch)
    measured = []
    for index, layer in enumerate(trace.layers):
        experts = trace.experts(layer, "heldout")[:max_tokens]
        found: Measured = {}
        for name, side in sides.items():
            counts = local_counts(experts, side.placement.expert_to_rank[index], placement.num_ranks)
            plain = measure(counts, home, batch, None)
            found[name] = {NONE: {assignment.value: plain for assignment in Assignment}}
            shuffled = "shuffled" if name == "contiguous" else "placed+shuffled"
            found[shuffled] = {
                predictor.value: _shuffled(counts, side.scores(index, predictor, token_id), batch)
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
    choice = TokenChoice(**json.loads(metadata["token_table"]))
    context = {
        "trace": trace.artefact.id,
        "part": "heldout",
        "rows": min(trace.rows("heldout"), max_tokens or trace.rows("heldout")),
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
                trace,
                tables,
                placement,
                [layer_runtime(arrays, index) for index in range(len(placement.layer_ids))],
                choice,
                predictors=predictors,
                batch=batch,
                max_tokens=max_tokens,
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
