"""A trace below level token, looked at through its counts.

Axes: E experts, K experts a token, U token ids seen (sorted).
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from smoe_profiles.choices import Level
from smoe_profiles.inspection.concentration import Prediction, concentration, hottest
from smoe_profiles.inspection.lint import Finding, label, lint_load, lint_token_ids
from smoe_profiles.inspection.report import NO_TOKEN_IDS, NOTHING_TO_PREDICT, Inspection, LayerReport
from smoe_profiles.levels import Entries, read_level
from smoe_profiles.split import PARTS
from smoe_profiles.trace import Trace, TraceLayer

Int64Array = npt.NDArray[np.int64]


def inspect_counts(trace: Trace, progress: Callable[[int], None]) -> Inspection:
    """Numbers and lint of a trace below level token; progress(1) after each layer. Raises InputError if unreadable."""
    rows = {part: trace.rows(part) for part in PARTS}
    findings = [] if sum(rows.values()) else [Finding("no-rows", None, 0, "the trace holds no row at all")]
    layers, token_ids = [], np.empty(0, np.int64)
    for layer in trace.layers:
        parts = {part: read_level(trace, layer, part) for part in PARTS}
        parts, found = _inside(parts, layer)
        seen = _token_ids(parts)
        report = _report(trace.level, layer, parts, seen)
        layers.append(report)
        findings += [*found, *lint_load(layer, _load(trace.level, layer, parts), report.rows)]
        if trace.level is Level.TOKEN_COUNT:
            findings += _lint_multiples(parts, layer, seen)
        token_ids = np.union1d(token_ids, seen)
        progress(1)
    findings += lint_token_ids(token_ids, trace.vocab_size)
    by_token = trace.level is Level.TOKEN_COUNT
    missing = ["no rows: sources, phases and weights are not known, and patterns of rows were not looked for"]
    if not by_token:
        missing.append(NO_TOKEN_IDS)
    elif not rows["fit"] or not rows["heldout"]:
        missing.append(NOTHING_TO_PREDICT)
    else:
        missing.append("held-out rows are not told apart: the mean F1 is known, its median is not")
    return Inspection(trace, rows, None, len(token_ids) if by_token else None, layers, findings, missing)


def _inside(parts: Mapping[str, Entries], layer: TraceLayer) -> tuple[dict[str, Entries], list[Finding]]:
    """The entries whose experts and counts can be, and a finding if others were there."""
    limit = layer.num_experts + layer.num_zero
    kept, beyond = {}, 0
    for part, entries in parts.items():
        inside = entries["count"] >= 0
        for name in entries.keys() & {"expert", "other"}:
            inside &= (entries[name] >= 0) & (entries[name] < limit)
        beyond += int((~inside).sum())
        kept[part] = {name: column[inside] for name, column in entries.items()}
    text = f"{beyond:,} entries name experts outside [0, {limit})"
    return kept, [Finding("out-of-range", label(layer), beyond, text)] if beyond else []


def _token_ids(parts: Mapping[str, Entries]) -> Int64Array:
    columns = [entries["token_id"] for entries in parts.values() if "token_id" in entries]
    return np.unique(np.concatenate([np.empty(0, np.int64), *columns]))


def _lint_multiples(parts: Mapping[str, Entries], layer: TraceLayer, seen: Int64Array) -> list[Finding]:
    """Every row counts K experts, so that a token id's counts are a multiple of K."""
    total = np.zeros(len(seen), np.int64)
    for entries in parts.values():
        np.add.at(total, np.searchsorted(seen, entries["token_id"]), entries["count"])
    odd = int((total % max(layer.top_k, 1) != 0).sum())
    text = f"{odd:,} of {len(seen):,} token ids have counts that K = {layer.top_k} does not divide"
    return [Finding("wrong-width", label(layer), odd, text)] if odd else []


def _report(level: Level, layer: TraceLayer, parts: Mapping[str, Entries], seen: Int64Array) -> LayerReport:
    load = _load(level, layer, parts)
    tables = {}
    if level is Level.TOKEN_COUNT:
        tables = {part: _table(entries, seen, layer) for part, entries in parts.items()}
    return LayerReport(
        layer=layer,
        rows=-(-int(load.sum()) // max(layer.top_k, 1)),
        count=load[: layer.num_experts],
        zero_count=int(load[layer.num_experts :].sum()),
        by_source={},
        by_phase={},
        concentration=concentration(sum(tables.values()), layer.top_k) if tables else None,
        prediction=_predict(tables, layer) if tables and tables["fit"].nnz and tables["heldout"].nnz else None,
        kinship={},
    )


def _table(entries: Entries, seen: Int64Array, layer: TraceLayer) -> csr_array:
    ours = entries["expert"] < layer.num_experts
    index = np.searchsorted(seen, entries["token_id"][ours])
    shape = len(seen), layer.num_experts
    return csr_array((entries["count"][ours], (index, entries["expert"][ours])), shape=shape, dtype=np.int64)


def _predict(tables: Mapping[str, csr_array], layer: TraceLayer) -> Prediction:
    """Hottest-K F1 from counts: with K ids on both sides it is the share of activations on predicted experts."""
    hot = hottest(tables["fit"], layer.top_k)
    held = tables["heldout"]
    hits, known = int(held.multiply(hot).sum()), int(held[hot.any(axis=1)].sum())
    return Prediction(int(held.sum()) // layer.top_k, known // layer.top_k, None, hits / known if known else None)


def _load(level: Level, layer: TraceLayer, parts: Mapping[str, Entries]) -> Int64Array:
    """Activations by expert, [E + Z], of all parts."""
    limit = layer.num_experts + layer.num_zero
    load = np.zeros(limit, np.int64)
    for entries in parts.values():
        paired = level is Level.PAIR
        load += _pair_load(entries, layer) if paired else _sum_by(entries["expert"], entries["count"], limit)
    return load


def _sum_by(keys: Int64Array, count: Int64Array, size: int) -> Int64Array:
    """Counts added up by key, [size], in whole numbers whatever their size."""
    total = np.zeros(size, np.int64)
    np.add.at(total, keys, count)
    return total


def _pair_load(entries: Entries, layer: TraceLayer) -> Int64Array:
    """Activations by expert, [E + Z], of a co-activation table: its diagonal, else what pairs in both orders imply."""
    limit = layer.num_experts + layer.num_zero
    own = entries["expert"] == entries["other"]
    if own.any():
        return _sum_by(entries["expert"][own], entries["count"][own], limit)
    both = _sum_by(entries["expert"], entries["count"], limit) + _sum_by(entries["other"], entries["count"], limit)
    return both // max(2 * (layer.top_k - 1), 1)
