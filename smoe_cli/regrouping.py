"""What smoe regroup and smoe verify do: from a placement and a model to a checkpoint or map, and the proof."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.checkpoint.layouts import blocking_key
from smoe_cli.checkpoint.rewrite import Rewrite, expected_rewrite, plan_rewrite, write_checkpoint
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_cli.console import Console
from smoe_cli.folder import CHECKPOINT, MAP, TRACE, model_of, sibling, trace_model_name
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, read_placement
from smoe_profiles.artefact import Artefact, Draft, check_target, open_artefact, publish
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import Model, find_model, map_hash, recorded_map
from smoe_profiles.tensors import encode_header, open_checkpoint, read_shard

PROMPT_TOKENS = 128
PROMPTS = 8


def regroup_model(
    chosen: Artefact, folder: Path, model_name: str | None, layout: str, *, force: bool, dry_run: bool, console: Console
) -> dict[str, Any]:
    """Write checkpoint-epG/ or map-epG/ for a placement. Returns what was written and why.

    Raises ImpossibleError if the model is already regrouped by this placement, or a checkpoint was insisted on that
    would be another function.
    """
    placement = read_placement(chosen)
    found = find_model(model_name or trace_model_name(folder))
    record = recorded_map(found.local_folder(), len(found.spec.layers), found.spec.layers[0].num_experts)
    if record is not None and map_hash(record) == placement.map_sha256:
        raise ImpossibleError(
            f"{found.name} is already regrouped by {chosen.path.name}; applying it again would undo it."
        )
    model = model_of(chosen, folder, model_name)
    blocked = blocking_key(model.spec.layers, placement.physical_to_logical)
    reason = _why_map_only(model, blocked.num_groups) if blocked else ""
    if layout == CHECKPOINT and blocked:
        raise ImpossibleError(
            f"a checkpoint would be another model: {reason} Use --layout map, or cocluster --groups whole."
        )
    kind = MAP if layout == MAP or blocked else CHECKPOINT
    target = sibling(chosen.path, kind)
    check_target(target, force=force)
    rewrite = plan_rewrite(model, placement.physical_to_logical, target) if kind == CHECKPOINT else None
    size = model.nbytes if rewrite else 0
    document = {"path": str(target), "layout": kind, "reason": reason, "bytes": size, "dry_run": dry_run}
    if kind == MAP:
        document["message"] = f"{target}: map only. {reason or 'Asked for with --layout map.'}"
    else:
        moved = int((placement.physical_to_logical != np.arange(placement.physical_to_logical.shape[1])).sum())
        document["message"] = f"{target}: checkpoint, {moved} experts renumbered, {size / 1e6:,.1f} MB"
    if dry_run:
        document["message"] = f"would write {document['message']}"
        return document
    if rewrite and rewrite.left_out():
        console.note(f"left out, they hold the old numbering: {', '.join(rewrite.left_out())}")
    _publish(chosen, placement, rewrite, target, kind, force, console)
    return document


def _why_map_only(model: Model, groups: int) -> str:
    key = model.spec.family.group_keys[0]
    return (
        f"The router is group-limited ({key} = {groups}) and this placement splits its groups, so a renumbered "
        "checkpoint would choose other experts; apply the map after routing instead (our run time and engines "
        "that take an expert map do)."
    )


def _publish(
    chosen: Artefact,
    placement: Placement,
    rewrite: Rewrite | None,
    target: Path,
    kind: str,
    force: bool,
    console: Console,
) -> None:
    identity = chosen.model | ({"map_sha256": placement.map_sha256} if rewrite else {})
    parameters = {"layout": kind, "map_sha256": placement.map_sha256}
    with publish(
        target,
        kind,
        parameters=parameters,
        model=identity,
        parents=[chosen],
        force=force,
        record="smoe" if rewrite else ".",
    ) as draft:
        if rewrite:
            with console.progress("writing", rewrite.files.nbytes, "bytes") as advance:
                write_checkpoint(rewrite, draft.path, advance)
        (draft.record / PLACEMENT_FILE).write_bytes((chosen.record / PLACEMENT_FILE).read_bytes())
        _copy_runtime(chosen, draft, kind)


def _copy_runtime(chosen: Artefact, draft: Draft, layout: str) -> None:
    """The placement's runtime.safetensors, its metadata saying whether the router already yields physical numbers."""
    shard = read_shard(chosen.record / RUNTIME)
    entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in shard.tensors]
    with (draft.record / RUNTIME).open("xb") as file:
        file.write(encode_header(shard.metadata | {"layout": layout}, entries))
        for tensor in shard.tensors:
            file.write(shard.read(tensor))


def verify_model(
    chosen: Artefact,
    folder: Path,
    model_name: str | None,
    dataset: str | None,
    *,
    tensors_only: bool,
    hashes: bool,
    console: Console,
) -> dict[str, Any]:
    """Check what regroup wrote for a placement. Returns {passed, failures, ...}; InputError if nothing was written."""
    checkpoint, mapped = sibling(chosen.path, CHECKPOINT), sibling(chosen.path, MAP)
    if not checkpoint.exists() and not mapped.exists():
        raise InputError(f"neither {checkpoint} nor {mapped} exists; write one with smoe regroup.")
    if not checkpoint.exists():
        return _verify_map(open_artefact(mapped, MAP, hashes=hashes), chosen, folder, model_name)
    written = open_artefact(checkpoint, CHECKPOINT, hashes=hashes)
    model = model_of(chosen, folder, model_name)
    placement = read_placement(written)
    rewrite = expected_rewrite(model, placement.physical_to_logical)
    with console.progress("comparing tensors", model.nbytes, "bytes") as advance:
        failures = compare_tensors(rewrite, open_checkpoint(checkpoint), advance)
    failures += _record_failures(written, chosen, placement)
    document: dict[str, Any] = {
        "path": str(checkpoint),
        "layout": CHECKPOINT,
        "tensors": sum(1 for _ in rewrite.files),
        "bytes": model.nbytes,
        "failures": failures,
        "routing": None,
    }
    if not tensors_only and not failures:
        document["routing"] = _verify_routing(model, checkpoint, placement, dataset, folder, console)
        document["failures"] = document["routing"].pop("failures")
    document["passed"] = not document["failures"]
    return document


def _record_failures(written: Artefact, chosen: Artefact, placement: Placement) -> list[str]:
    """Whether a folder's own record is the placement it claims."""
    failures = []
    if written.parent_id("placement") != chosen.id:
        failures.append(f"it was made from another version of {chosen.path.name}; run smoe regroup --force")
    record = (
        recorded_map(written.path, *placement.physical_to_logical.shape) if written.record != written.path else None
    )
    if record is not None and map_hash(record) != placement.map_sha256:
        failures.append(f"{RUNTIME} and {PLACEMENT_FILE} record different maps")
    return failures


def _verify_map(written: Artefact, chosen: Artefact, folder: Path, model_name: str | None) -> dict[str, Any]:
    """A map rewrites nothing: check that it is a permutation, the placement's own, and for this model."""
    placement = read_placement(written)
    failures = _record_failures(written, chosen, placement)
    model_of(written, folder, model_name)
    if placement.map_sha256 != read_placement(chosen).map_sha256:
        failures.append(f"{written.path} holds another map than {chosen.path}")
    return {"path": str(written.path), "layout": MAP, "failures": failures, "routing": None, "passed": not failures}


def _verify_routing(
    model: Model, checkpoint: Path, placement: Placement, dataset: str | None, folder: Path, console: Console
) -> dict[str, Any]:
    from smoe_cli.checkpoint.layerwise import compare_routing

    prompts, source = _prompts(model, dataset, folder)
    with console.progress("comparing layers", model.spec.num_hidden_layers, "layers") as advance:
        report = compare_routing(model, find_model(str(checkpoint)), placement.physical_to_logical, prompts, advance)
    failures = [
        f"layer {layer.layer}: {layer.mismatches} tokens choose other experts, outputs differ by {layer.max_error:.1e}"
        for layer in report.layers
        if not layer.passed
    ]
    if not failures and not report.passed:
        failures.append(f"logits differ by {report.logit_max_error:.1e} of their scale")
    return {
        "prompts": source,
        "tokens": report.logit_tokens,
        "ties": sum(layer.ties for layer in report.layers),
        "layers": [asdict(layer) for layer in report.layers],
        "logit_max_error": report.logit_max_error,
        "logits_excused": report.logits_excused,
        "failures": failures,
    }


def _prompts(model: Model, dataset: str | None, folder: Path) -> tuple[npt.NDArray[np.int64], str]:
    """Prompts [B, S] of equal length: from the data set given, else the trace's held-out rows, else builtin text."""
    rows = [] if dataset else _heldout_rows(folder)
    source = "held-out rows of the trace"
    if not rows:
        from smoe_profiles.capture.loading import load_tokenizer
        from smoe_profiles.datasets import BUILTIN, read_documents

        source = dataset or BUILTIN
        documents = read_documents(source, source, load_tokenizer(model), model.spec.vocab_size)
        rows = [document.token_ids for _, document in zip(range(PROMPTS), documents, strict=False)]
        if len(rows) == 1:
            rows = [rows[0][i : i + PROMPT_TOKENS] for i in range(0, len(rows[0]), PROMPT_TOKENS)][:PROMPTS]
    if not rows:
        raise InputError(f"dataset {source} is empty; verify needs at least one prompt.")
    length = min(PROMPT_TOKENS, max(len(row) for row in rows))
    padded = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row[:length]
    return padded, source


def _heldout_rows(folder: Path) -> list[npt.NDArray[np.uint32]]:
    """The first held-out sequences of the folder's trace, if it has any."""
    from smoe_profiles.trace import open_trace

    if not (folder / TRACE).exists():
        return []
    trace = open_trace(folder / TRACE)
    if not trace.rows("heldout"):
        return []
    facts = trace.read(["sequence", "token_id"], "heldout")
    sequences = np.unique(facts["sequence"])[:PROMPTS]
    return [facts["token_id"][facts["sequence"] == sequence] for sequence in sequences]
