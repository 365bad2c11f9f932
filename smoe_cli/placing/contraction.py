"""Tables contracted to ranks: what the run time will look up, and which predictor it should trust layer by layer.

Axes: V vocabulary, G ranks, N rows, K experts a token. Everything is chosen on validation rows with tables of the fit
part; what is served is then refitted on both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from smoe_cli.placement import Placement
from smoe_profiles.gates import GateRecord, GateRows, gate_record
from smoe_profiles.tables import FIT_PARTS, Tables
from smoe_profiles.trace import ExpertIds, TraceLayer
from smoe_solvers.assignment import assign_exact
from smoe_solvers.figures import quota
from smoe_solvers.linear import choose_ridge, fit_affine
from smoe_solvers.predictors import (
    FUSED,
    Context,
    LayerPredictors,
    TokenChoice,
    choose_temperature,
    early_logits,
    fit_fusion,
    linear_logits,
    local_counts,
    markov_tables,
    occurrences,
    popularity_by_rank,
    quantise,
    rank_counts,
    rank_labels,
    score,
    token_scores,
    token_table,
)

PSEUDO_CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0)
UNSEEN = "neighbour"
"""What an id never seen takes; better than popularity wherever it was measured (docs/results.md)."""

JUDGED_BLOCK = 1024

Labels = npt.NDArray[np.uint8]


def choose_smoothing(tables: Tables, placement: Placement) -> TokenChoice:
    """The token table's smoothing that keeps most validation activations local, fitted on the fit part alone.

    One choice for all layers; ties go to the first in order.
    """
    choices = [TokenChoice(pseudo, UNSEEN) for pseudo in PSEUDO_CHOICES]
    kept = np.zeros(len(choices))
    layers = zip(tables.layers, placement.hosts, tables.samples("validation"), strict=True)
    for layer, hosts, samples in layers:
        table_of = _token_table_of(tables, layer, ["fit"], hosts)
        local = local_counts(samples.experts, hosts)
        backed_off = markov_tables(None, None, local, layer.top_k)
        for number, choice in enumerate(choices):
            scores = token_scores(LayerPredictors(table_of(choice), backed_off), Context(samples.token_id))
            kept[number] += kept_local(scores, local, samples.block_start) / samples.experts.size
    return choices[int(kept.argmax())]


def kept_local(scores: npt.NDArray[np.uint8], local: npt.NDArray[np.int32], block_start: npt.NDArray[np.int64]) -> int:
    """Activations kept local by an exact assignment on the scores, block by block. scores, local: [N, G]."""
    total = 0
    for start, stop in pairwise(block_start):
        rank = assign_exact(scores[start:stop], quota(int(stop - start), local.shape[1]))
        total += int(local[np.arange(start, stop), rank].sum())
    return total


@dataclass(frozen=True)
class _Judged:
    """Validation rows of one layer: the early gate's sample where there is one, else the tables' sample blocks."""

    token_id: npt.NDArray[np.uint32]
    experts: ExpertIds
    block_start: npt.NDArray[np.int64]
    gate: GateRows | None


def _judged_rows(tables: Tables, record: GateRecord | None) -> Iterator[_Judged]:
    if record is None:
        for samples in tables.samples("validation"):
            yield _Judged(samples.token_id, samples.experts, samples.block_start, None)
        return
    token_id = record.token_id("validation")
    edges = np.append(np.arange(0, len(token_id), JUDGED_BLOCK), len(token_id)).astype(np.int64)
    for layer in tables.layers:
        rows = record.rows(layer, "validation")
        yield _Judged(token_id, rows.experts, edges, rows)


def contract_tables(tables: Tables, placement: Placement, choice: TokenChoice) -> Iterator[LayerPredictors]:
    """Each layer's predictors for a placement, in order, one layer in memory at a time."""
    record = gate_record(tables.artefact.path)
    samples = zip(tables.samples("fit"), tables.samples("validation"), _judged_rows(tables, record), strict=True)
    walks: tuple[list[Labels], list[Labels], list[Labels]] = ([], [], [])
    for layer, hosts, (fit, validation, judged) in zip(tables.layers, placement.hosts, samples, strict=True):
        groups = fit.experts, np.concatenate([fit.experts, validation.experts]), judged.experts
        fitted, served = (
            LayerPredictors(
                _token_table_of(tables, layer, parts, hosts)(choice),
                markov_tables(*_last_two(labels), local_counts(experts, hosts), layer.top_k),
            )
            for parts, labels, experts in ((FIT_PARTS[:1], walks[0], groups[0]), (FIT_PARTS, walks[1], groups[1]))
        )
        two, one = _last_two(walks[2])
        sums = record.sums(layer) if record else None
        tuned = _tune(fitted, judged, sums, Context(judged.token_id, two, one), hosts, layer.top_k)
        for labels, experts in zip(walks, groups, strict=True):
            labels.append(rank_labels(experts, hosts))
        yield replace(tuned, token=served.token, markov=served.markov)


def _last_two(labels: Sequence[Labels]) -> tuple[Labels | None, Labels | None]:
    return labels[-2] if len(labels) > 1 else None, labels[-1] if labels else None


def _token_table_of(
    tables: Tables, layer: TraceLayer, parts: Sequence[str], hosts: npt.NDArray[np.bool_]
) -> Callable[[TokenChoice], npt.NDArray[np.uint8]]:
    """From a smoothing to the token table [V, G] of some parts."""
    _, neighbour = tables.vocabulary()
    found = tables.counts(layer, parts)
    counts = found.token_id, found.expert, found.count
    activations = rank_counts(counts, len(neighbour), hosts)
    seen = occurrences(counts, len(neighbour), layer.top_k)
    share = popularity_by_rank(tables.statistics(layer)["popularity"][: len(parts)].sum(axis=0), hosts)

    def table_of(choice: TokenChoice) -> npt.NDArray[np.uint8]:
        return quantise(token_table(activations, seen, share, neighbour, layer.top_k, choice), layer.top_k)

    return table_of


def _tune(
    layer: LayerPredictors,
    judged: _Judged,
    sums: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None,
    context: Context,
    hosts: npt.NDArray[np.bool_],
    top_k: int,
) -> LayerPredictors:
    """Fit temperatures, the linear map and the mix on validation rows, and choose what keeps most activations local."""
    local = local_counts(judged.experts, hosts)
    if judged.gate is not None and sums is not None:
        context = replace(context, early=judged.gate.early, features=judged.gate.features)
        _, weights = choose_ridge(*sums, judged.gate.features, judged.gate.truth)
        affine = fit_affine(*sums, judged.gate.early_at)
        layer = replace(layer, early=affine.astype(np.float32), linear=weights.astype(np.float32))
        early, linear = (
            choose_temperature(logits, local, hosts, top_k)
            for logits in (early_logits(layer, context), linear_logits(layer, context))
        )
        layer = replace(layer, early_temperature=early, linear_temperature=linear)
    scores = {part: score(layer, part, context, hosts, top_k) for part in layer.available() if part in FUSED}
    layer = replace(layer, fusion=fit_fusion([scores.get(part) for part in FUSED], local, top_k))
    kept = {
        part: kept_local(score(layer, part, context, hosts, top_k), local, judged.block_start)
        for part in layer.available()
    }
    return replace(layer, chosen=max(kept, key=lambda part: kept[part]))
