"""What smoe inspect says of a trace, or of two traces of the same text, as documents.

Axes: E experts, G ranks.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_cli.folder import TRACE
from smoe_cli.inspection.summaries import artefact_kind, describe, summarise
from smoe_profiles.artefact import open_artefact
from smoe_profiles.choices import Level
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.inspection.agreement import LayerAgreement, Matching, compare_traces, match_rows
from smoe_profiles.inspection.concentration import full_kurtosis
from smoe_profiles.inspection.counts import inspect_counts
from smoe_profiles.inspection.kinship import load_distance
from smoe_profiles.inspection.lint import label
from smoe_profiles.inspection.report import Inspection, LayerReport
from smoe_profiles.inspection.rows import inspect_rows
from smoe_profiles.models import same_model
from smoe_profiles.split import PARTS
from smoe_profiles.trace import TraceLayer, open_trace

Int64Array = npt.NDArray[np.int64]


def find_artefact(folder: Path, wanted: Path | None) -> Path:
    """The artefact meant: the working folder's trace, one of its artefacts by bare name, or any path."""
    if wanted is None:
        return folder / TRACE
    in_folder = wanted.name == str(wanted) and ((folder / wanted).exists() or not wanted.exists())
    return folder / wanted if in_folder else wanted


def inspect_artefact(path: Path, *, ep: int | None, hashes: bool, console: Console) -> dict[str, Any]:
    """Look at an artefact of any kind. Raises ImpossibleError for an EP that does not divide a layer's experts."""
    kind = artefact_kind(path)
    if kind != TRACE:
        if ep is not None:
            raise UsageError(f"--ep is for traces; {path} is a {kind} artefact.")
        return summarise(open_artefact(path, kind, hashes=hashes), hashes=hashes)
    trace = open_trace(path, hashes=hashes, needs=Level.COUNT)
    _check_ranks(trace.layers, ep)
    with console.progress("inspecting", len(trace.layers), "layers") as advance:
        look = inspect_rows if trace.level is Level.TOKEN else inspect_counts
        return trace_document(look(trace, advance), ep)


def _check_ranks(layers: Sequence[TraceLayer], ep: int | None) -> None:
    for layer in layers:
        if ep is not None and layer.num_experts % ep:
            valid = [ranks for ranks in range(2, layer.num_experts + 1) if layer.num_experts % ranks == 0]
            raise ImpossibleError(
                f"{layer.num_experts} experts (layer {layer.id}) cannot be shared equally by {ep} ranks. "
                f"Valid --ep: {', '.join(map(str, valid))}."
            )


def trace_document(inspection: Inspection, ep: int | None) -> dict[str, Any]:
    """The whole inspection as one JSON document."""
    trace = inspection.trace
    return {
        **describe(trace.artefact),
        "level": trace.level.value,
        "rows": inspection.rows | {"total": sum(inspection.rows.values())},
        "sources": _sources(inspection),
        "phases": _phases(inspection),
        "token_ids": {
            "seen": inspection.token_ids,
            "vocabulary": trace.vocab_size,
            "unknown_rows": inspection.census.unknown if inspection.census else None,
        },
        "ep": ep,
        "layers": {label(report.layer): _layer(report, ep) for report in inspection.layers},
        "missing": inspection.missing,
        "lint": [asdict(finding) for finding in inspection.findings],
        "verdict": inspection.verdict,
    }


def _sources(inspection: Inspection) -> dict[str, Any]:
    """Rows of each source, and how far its load and its routing of single ids are from the others'."""
    census = inspection.census
    if census is None:
        return {}
    by_part = census.rows.sum(axis=2)
    return {
        name: {
            **_rows(by_part[:, number]),
            "phases": dict(zip(census.phases, census.rows[:, number].sum(axis=0).tolist(), strict=True)),
            "load_distance": _distance([report.by_source[name] for report in inspection.layers], inspection),
            "agreement": inspection.agreement(name),
        }
        for number, name in enumerate(census.sources)
    }


def _phases(inspection: Inspection) -> dict[str, Any]:
    census = inspection.census
    if census is None:
        return {}
    by_part = census.rows.sum(axis=1)
    return {
        name: {
            **_rows(by_part[:, number]),
            "load_distance": _distance([report.by_phase[name] for report in inspection.layers], inspection),
        }
        for number, name in enumerate(census.phases)
    }


def _rows(by_part: Int64Array) -> dict[str, int]:
    return dict(zip(PARTS, by_part.tolist(), strict=True)) | {"rows": int(by_part.sum())}


def _distance(loads: Sequence[Int64Array], inspection: Inspection) -> dict[str, Any]:
    """Total variation of a share of the rows from the whole trace, by layer."""
    pairs = zip(loads, inspection.layers, strict=True)
    found = {label(report.layer): load_distance(load, report.count) for load, report in pairs}
    return {"mean": sum(found.values()) / len(found), "layers": found}


def _layer(report: LayerReport, ep: int | None) -> dict[str, Any]:
    layer = report.layer
    concentration, prediction = report.concentration, report.prediction
    return {
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "num_zero": layer.num_zero,
        "rows": report.rows,
        "load": load_figures(report.count),
        "zero_activations": report.zero_count,
        "unused": np.flatnonzero(report.count == 0).tolist(),
        "ranks": load_figures(report.count.reshape(ep, -1).sum(axis=1)) if ep else None,
        "concentration": asdict(concentration) | {"full_kurtosis": full_kurtosis(layer)} if concentration else None,
        "prediction": asdict(prediction) if prediction else None,
    }


def load_figures(count: Int64Array) -> dict[str, Any]:
    """Shares of a load, [E] or [G]; imbalance: greatest over mean. All zero where nothing was counted."""
    share = count / max(int(count.sum()), 1)
    mean = float(share.mean())
    return {
        "share": share.tolist(),
        "min": float(share.min()),
        "mean": mean,
        "max": float(share.max()),
        "imbalance": float(share.max()) / mean if mean else None,
    }


def compare(path: Path, against: Path, *, hashes: bool, console: Console) -> dict[str, Any]:
    """Agreement of two traces of the same text. Raises ImpossibleError if one is below level token."""
    one, other = (open_trace(which, hashes=hashes) for which in (path, against))
    matching = match_rows(one, other)
    with console.progress("comparing", len(one.layers), "layers") as advance:
        layers = compare_traces(one, other, matching, advance)
    names = [{label(layer) for layer in trace.layers} for trace in (one, other)]
    document = {
        **describe(one.artefact),
        "against": describe(other.artefact),
        "same_model": same_model(one.artefact.model, other.artefact.model),
        "rows": {
            "matched": len(matching.other) - matching.alone,
            "only_here": matching.alone,
            "only_there": matching.other_alone,
        },
        "layers": {label(found.layer): _agreement(found) for found in layers},
        "layers_only_here": sorted(names[0] - names[1]),
        "layers_only_there": sorted(names[1] - names[0]),
    }
    return document | {"total": _total(layers), "verdict": _agreement_verdict(layers, matching)}


def _agreement(found: LayerAgreement) -> dict[str, Any]:
    facts = asdict(found)
    del facts["layer"]
    rows = max(found.rows, 1)
    return facts | {"equal_share": found.equal / rows, "tie_share": found.ties / rows}


def _total(layers: Sequence[LayerAgreement]) -> dict[str, Any]:
    """Means over layers; how many row-layers really differ."""
    count = max(len(layers), 1)
    return {
        "equal_share": sum(found.equal / max(found.rows, 1) for found in layers) / count,
        "jaccard": sum(found.jaccard for found in layers) / count,
        "ties": sum(found.ties for found in layers),
        "differing": sum(found.differing for found in layers),
        "unweighed": sum(found.unweighed for found in layers),
    }


def _agreement_verdict(layers: Sequence[LayerAgreement], matching: Matching) -> str:
    rows = len(matching.other) - matching.alone
    if not layers:
        return "the traces have no layer in common"
    worst = max(layers, key=lambda found: found.differing)
    ties = sum(found.ties for found in layers)
    if not worst.differing:
        return f"same: {rows:,} rows name equal experts in all {len(layers)} layers{f', {ties:,} ties' if ties else ''}"
    differing = sum(found.differing for found in layers) / len(layers)
    return (
        f"different: {differing / rows:.2%} of {rows:,} rows differ by more than near ties (mean over layers); "
        f"most in layer {label(worst.layer)}, {worst.differing / rows:.2%}"
    )
