"""A trace of level token, looked at row group by row group.

Axes: N rows, E experts, K experts a token, U token ids seen (sorted), n rows of a row group. One layer is read at a
time; what is kept of it are counts, [U, E] sparse for each source, never rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from smoe_profiles.inspection.concentration import Prediction, concentration, hottest, median_of, set_f1, sparse_counts
from smoe_profiles.inspection.kinship import DISJOINT, MIXED_AGREEMENT, Kinship, kinship, load_distance
from smoe_profiles.inspection.lint import Finding, LayerLint, lint_load, lint_token_ids
from smoe_profiles.inspection.report import (
    NO_TOKEN_IDS,
    NOTHING_TO_PREDICT,
    Census,
    Inspection,
    LayerReport,
    source_agreement,
)
from smoe_profiles.inspection.scan import LayerGroup, Scan
from smoe_profiles.split import PARTS
from smoe_profiles.trace import UNKNOWN_TOKEN, Trace, TraceLayer

FIT, HELDOUT = PARTS.index("fit"), PARTS.index("heldout")

Int64Array = npt.NDArray[np.int64]


def inspect_rows(trace: Trace, progress: Callable[[int], None]) -> Inspection:
    """Numbers and lint of a trace of level token; progress(1) after each layer. Raises InputError if unreadable."""
    scan = Scan(trace)
    census = take_census(scan)
    rows = {part: int(count) for part, count in zip(PARTS, census.rows.sum(axis=(1, 2)), strict=True)}
    findings = [*_row_findings(trace, rows), *lint_token_ids(census.token_ids, trace.vocab_size)]
    layers = []
    for layer in trace.layers:
        report, found = inspect_layer(scan, census, layer)
        layers.append(report)
        findings += found
        progress(1)
    findings += mixed_models(census, layers)
    missing = [] if len(census.token_ids) else [NO_TOKEN_IDS]
    if not rows["heldout"] or not rows["fit"]:
        missing.append(NOTHING_TO_PREDICT)
    return Inspection(trace, rows, census, len(census.token_ids), layers, findings, missing)


def take_census(scan: Scan) -> Census:
    """Count rows by part, source and phase, and gather the token ids seen."""
    counts: Counter[tuple[int, int, int]] = Counter()
    token_ids, unknown = np.empty(0, np.uint32), 0
    for facts in scan.facts():
        known = facts.token_id[facts.token_id != UNKNOWN_TOKEN]
        unknown += len(facts.token_id) - len(known)
        token_ids = np.union1d(token_ids, known)
        cells, found = np.unique(facts.part << 40 | facts.source << 20 | facts.phase, return_counts=True)
        for cell, count in zip(cells.tolist(), found.tolist(), strict=True):
            counts[cell >> 40, cell >> 20 & 0xFFFFF, cell & 0xFFFFF] += count
    rows = np.zeros((len(PARTS), len(scan.sources), len(scan.phases)), np.int64)
    for place, count in counts.items():
        rows[place] = count
    return Census(list(scan.sources), list(scan.phases), rows, token_ids, unknown)


def _row_findings(trace: Trace, rows: dict[str, int]) -> Iterable[Finding]:
    if not sum(rows.values()):
        yield Finding("no-rows", None, 0, "the trace holds no row at all")
    recorded = trace.artefact.parameters.get("rows")
    if recorded != rows:
        odd = abs(sum(rows.values()) - sum(recorded.values())) if isinstance(recorded, dict) else 0
        yield Finding("row-count", None, odd, f"Parquet holds {rows}, the manifest says {recorded}")


class LayerCounts:
    """One layer's counters. load: [sources, phases, E + Z]; tables: (source, of the fit part) -> [U, E] sparse."""

    def __init__(self, layer: TraceLayer, census: Census) -> None:
        self.layer, self.token_ids = layer, census.token_ids
        self.shape = len(census.sources), len(census.phases), layer.num_experts + layer.num_zero
        self.load = np.zeros(self.shape, np.int64)
        self.tables: dict[tuple[int, bool], csr_array] = {}

    def add(self, group: LayerGroup) -> None:
        """Count a row group; ids outside the layer are left out."""
        facts, ids = group.facts, group.ids.astype(np.int64)
        valid = (ids >= 0) & (ids < self.shape[2])
        cell = (facts.source * self.shape[1] + facts.phase)[:, None] * self.shape[2] + ids
        self.load += np.bincount(cell[valid], minlength=self.load.size).reshape(self.shape)
        valid &= ids < self.layer.num_experts
        index = np.searchsorted(self.token_ids, facts.token_id)
        table = np.where(facts.token_id == UNKNOWN_TOKEN, -1, facts.source * 2 + (facts.part == FIT))
        for number in set(table.tolist()) - {-1}:
            mine = table == number
            inside = valid[mine].reshape(-1)
            token = np.repeat(index[mine], ids.shape[1])[inside]
            fresh = sparse_counts(token, ids[mine].reshape(-1)[inside], self._table_shape)
            key = number // 2, number % 2 == 1
            self.tables[key] = self.tables[key] + fresh if key in self.tables else fresh

    @property
    def _table_shape(self) -> tuple[int, int]:
        return len(self.token_ids), self.layer.num_experts

    def table(self, source: int | None = None, *, fit_only: bool = False) -> csr_array:
        """Counts of one source, or of all; of the fit part, or of all parts."""
        total = csr_array(self._table_shape, dtype=np.int64)
        for (number, fit), table in self.tables.items():
            if source in (None, number) and (fit or not fit_only):
                total = total + table
        return total


def inspect_layer(scan: Scan, census: Census, layer: TraceLayer) -> tuple[LayerReport, list[Finding]]:
    """One layer's numbers and what is sick in it: a pass over its rows, and one over the held-out rows."""
    counts = LayerCounts(layer, census)
    lint = LayerLint(layer, census.phases.index("decode") if "decode" in census.phases else None)
    for group in scan.layer(layer):
        lint.add(group)
        if len(group.ids):
            counts.add(group)
    load = counts.load.sum(axis=(0, 1))
    findings = lint.findings()
    told = {finding.kind for finding in findings}
    findings += [found for found in lint_load(layer, load, lint.rows) if found.kind not in told]
    experts = layer.num_experts
    by_source, by_phase = counts.load.sum(axis=1)[:, :experts], counts.load.sum(axis=0)[:, :experts]
    report = LayerReport(
        layer=layer,
        rows=lint.rows,
        count=load[:experts],
        zero_count=int(load[experts:].sum()),
        by_source=dict(zip(census.sources, by_source, strict=True)),
        by_phase=dict(zip(census.phases, by_phase, strict=True)),
        concentration=concentration(counts.table(), layer.top_k) if len(census.token_ids) else None,
        prediction=_predict(scan, counts) if census.rows[FIT].sum() and census.rows[HELDOUT].sum() else None,
        kinship=_kinships(counts, census),
    )
    return report, findings


def _predict(scan: Scan, counts: LayerCounts) -> Prediction | None:
    if not len(counts.token_ids):
        return None
    hot = hottest(counts.table(fit_only=True), counts.layer.top_k)
    rows = 0
    scores: Counter[float] = Counter()
    for group in scan.layer(counts.layer):
        held = group.facts.part == HELDOUT
        rows += int(held.sum())
        token_id, ids = group.facts.token_id[held], group.ids[held]
        known = token_id != UNKNOWN_TOKEN
        index = np.searchsorted(counts.token_ids, token_id[known])
        f1 = set_f1(hot, index, ids[known].astype(np.int64))
        values, number = np.unique(f1[~np.isnan(f1)], return_counts=True)
        scores.update(dict(zip(values.tolist(), number.tolist(), strict=True)))
    covered = scores.total()
    mean = sum(value * number for value, number in scores.items()) / covered if covered else None
    return Prediction(rows, covered, median_of(scores), mean)


def _kinships(counts: LayerCounts, census: Census) -> dict[str, Kinship]:
    """Every source against the largest one."""
    if len(census.sources) < 2 or not len(census.token_ids):
        return {}
    largest = _largest(census)
    reference = counts.table(largest)
    return {
        name: kinship(reference, counts.table(number), counts.layer.top_k)
        for number, name in enumerate(census.sources)
        if number != largest
    }


def _largest(census: Census) -> int:
    return int(census.rows.sum(axis=(0, 2)).argmax())


def mixed_models(census: Census, layers: list[LayerReport]) -> Iterable[Finding]:
    """Sources that cannot be of the largest source's model: the same token ids choose unrelated experts.

    Where ids cannot tell, loads that are nearly disjoint in every layer.
    """
    if len(census.sources) < 2:
        return
    largest = census.sources[_largest(census)]
    for name, rows in zip(census.sources, census.rows.sum(axis=(0, 2)).tolist(), strict=True):
        alike = source_agreement(layers, name)
        apart = min(load_distance(report.by_source[name], report.by_source[largest]) for report in layers)
        if alike is not None and alike < MIXED_AGREEMENT:
            text = f"{name} and {largest} route the same token ids to unrelated experts (agreement {alike:.2f})"
            yield Finding("mixed-models", None, rows, text)
        elif alike is None and apart >= DISJOINT:
            text = f"{name} and {largest} use different experts in every layer (load distance {apart:.2f})"
            yield Finding("mixed-models", None, rows, text)
