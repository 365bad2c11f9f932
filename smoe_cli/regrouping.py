"""What smoe regroup does: from a placement and a model to a renumbered checkpoint or a map, and back."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.checkpoint.layouts import Role, blocking_layer
from smoe_cli.checkpoint.rewrite import RECORD, Rewrite, plan_rewrite
from smoe_cli.checkpoint.writer import write_checkpoint
from smoe_cli.console import Console
from smoe_cli.folder import CHECKPOINT, MAP, model_of, sibling, trace_model_name
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, read_placement, write_placement
from smoe_profiles.artefact import Artefact, Draft, check_target, publish, staging_path, standing_folder
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import Model, find_model, is_unknown, map_hash, model_identity, recorded_map
from smoe_profiles.tensors import encode_header, read_shard

INVERSE = "inverse"
TAKE_A_MAP = (
    "SGLang, TensorRT-LLM, vLLM-Ascend and smoe's run time apply it after routing (smoe export); vLLM takes none."
)

IntArray = npt.NDArray[np.int64]


def regroup_model(
    chosen: Artefact,
    folder: Path,
    model_name: str | None,
    layout: str,
    *,
    jobs: int,
    force: bool,
    dry_run: bool,
    console: Console,
) -> dict[str, Any]:
    """Write checkpoint-epG/ or map-epG/ for a placement. Returns what was written and why.

    Raises ImpossibleError if the model has another numbering than the placement's, or a checkpoint was insisted on
    that would be another function.
    """
    placement = read_placement(chosen)
    found = find_model(model_name or trace_model_name(folder))
    _check_numbering(chosen, placement, found, console)
    model = model_of(chosen, folder, model_name)
    _check_shape(chosen, placement, model)
    reason = _why_map_only(model, placement)
    if layout == CHECKPOINT and reason:
        raise ImpossibleError(f"a checkpoint would be another model: {reason} Use --layout map.")
    if layout == MAP or reason:
        return _write_map(chosen, placement, reason or "Asked for with --layout map.", force, dry_run)
    target = sibling(chosen.path, CHECKPOINT)
    rewrite = _plan(model, placement.physical_to_logical, target, force=force)
    document = _describe(rewrite, target, jobs) | {"dry_run": dry_run}
    if not dry_run:
        _write_checkpoint(chosen, placement, rewrite, target, jobs=jobs, force=force, console=console)
    return document


def _check_numbering(chosen: Artefact, placement: Placement, model: Model, console: Console) -> None:
    """A placement numbers the experts of one checkpoint: refuse the same model under other numbers."""
    identity = model_identity(model)
    applied, known = identity["map_sha256"], not is_unknown(chosen.model)
    if known and (applied == chosen.model["map_sha256"] or identity["router_sha256"] != chosen.model["router_sha256"]):
        return
    if applied == placement.map_sha256:
        raise ImpossibleError(
            f"{model.name} is already regrouped by {chosen.path.name}; applying it again would undo it."
        )
    numbering = {"the placement": chosen.model.get("map_sha256"), model.name: applied}
    if not known and applied:
        console.note(f"the placement's trace does not say its numbering; it is taken as that of {model.name}.")
    elif known:
        said = ", ".join(f"{name}: {f'map {sha[:12]}' if sha else 'source'}" for name, sha in numbering.items())
        raise ImpossibleError(
            f"{chosen.path.name} and the model number their experts differently ({said}). Regroup the model that was "
            "profiled (--model), or profile this one and place it anew."
        )


def _check_shape(chosen: Artefact, placement: Placement, model: Model) -> None:
    """A placement must name the model's layers and experts, all of them."""
    wanted = [(layer.id, layer.num_experts) for layer in model.spec.layers]
    if [(layer, placement.num_experts) for layer in placement.layer_ids] != wanted:
        raise InputError(
            f"{chosen.path} places {placement.num_experts} experts in layers {list(placement.layer_ids)}; "
            f"{model.name} has (layer, experts) {wanted}."
        )


def _why_map_only(model: Model, placement: Placement) -> str:
    """Why a checkpoint would not be the same model, or the empty string."""
    if placement.redundant:
        return "This placement holds experts in several slots, and a checkpoint holds every expert once."
    blocked = blocking_layer(model.spec.layers, placement.physical_to_logical)
    if blocked is None:
        return ""
    key = model.spec.family.group_keys[0]
    return (
        f"The router is group-limited ({key} = {blocked.num_groups}, layer {blocked.id}) and this placement splits its "
        "groups, so a renumbered checkpoint would choose other experts (cocluster --groups whole keeps them)."
    )


def _write_map(chosen: Artefact, placement: Placement, reason: str, force: bool, dry_run: bool) -> dict[str, Any]:
    target = sibling(chosen.path, MAP)
    check_target(target, force=force)
    document = {"path": str(target), "layout": MAP, "reason": reason, "bytes": 0, "dry_run": dry_run}
    document["message"] = f"{target}: map only. {reason} {TAKE_A_MAP}"
    if not dry_run:
        parameters = {"layout": MAP, "map_sha256": placement.map_sha256}
        with publish(target, MAP, parameters=parameters, model=chosen.model, parents=[chosen], force=force) as draft:
            _write_record(chosen, placement, draft.record, MAP, chosen.model)
    return document


def _plan(model: Model, physical_to_logical: IntArray, target: Path, *, force: bool) -> Rewrite:
    check_target(target, force=force)
    staged = sum(path.stat().st_size for path in staging_path(target).glob("*.safetensors"))
    return plan_rewrite(model, physical_to_logical, target, staged)


def _describe(rewrite: Rewrite, target: Path, jobs: int) -> dict[str, Any]:
    """The plan of a checkpoint, for the user."""
    counts = {role.value: rewrite.layout.count(role) for role in Role}
    moved = int((rewrite.physical_to_logical != np.arange(rewrite.physical_to_logical.shape[1])).sum())
    size, free = rewrite.files.nbytes, shutil.disk_usage(standing_folder(target)).free
    peak = rewrite.peak_bytes(_workers(jobs))
    said = ", ".join(f"{count:,} {role}" for role, count in counts.items() if count)
    kept, shards = len(rewrite.layout.further), len(rewrite.files.shards)
    further = f" {kept:,} tensors of layers that predict further tokens keep their numbering." if kept else ""
    return {
        "path": str(target),
        "layout": CHECKPOINT,
        "reason": "",
        "bytes": size,
        "shards": shards,
        "tensors": counts,
        "tensors_of_further_layers": kept,
        "experts_renumbered": moved,
        "free_bytes": free,
        "peak_memory_bytes": peak,
        "message": f"{target}: checkpoint, {moved} experts renumbered, {size / 1e6:,.1f} MB in "
        f"{shards} shard{'s' * (shards > 1)} ({said}).{further}",
        "cost": f"{free / 1e9:,.1f} GB are free, about {peak / 1e6:,.0f} MB of memory are needed.",
    }


def _write_checkpoint(
    chosen: Artefact,
    placement: Placement,
    rewrite: Rewrite,
    target: Path,
    *,
    jobs: int,
    force: bool,
    console: Console,
) -> None:
    """The checkpoint and its record: slots of the copy to experts of the first source, whatever came between."""
    before = _record_of(rewrite.model)
    composed = rewrite.physical_to_logical
    if before is not None:
        composed = np.take_along_axis(before, composed, axis=1)
    whole = Placement(placement.layer_ids, composed, placement.num_ranks)
    identity = model_identity(rewrite.model) | {"map_sha256": whole.map_sha256}
    parameters = {"layout": CHECKPOINT, "map_sha256": whole.map_sha256}
    _note_left_out(rewrite, console)
    with publish(
        target,
        CHECKPOINT,
        parameters=parameters,
        model=identity,
        parents=[chosen],
        force=force,
        record=RECORD,
        resume=parameters | {"placement": chosen.id} | _source_state(rewrite),
    ) as draft:
        _write_files(rewrite, draft, jobs, console)
        _write_record(chosen, whole, draft.record, CHECKPOINT, identity)


def _write_files(rewrite: Rewrite, draft: Draft, jobs: int, console: Console) -> None:
    with console.progress("writing", rewrite.files.nbytes, "bytes") as advance:
        draft.hashes |= write_checkpoint(rewrite, draft.path, advance, _workers(jobs))


def _source_state(rewrite: Rewrite) -> dict[str, Any]:
    """What a run that goes on must find unchanged."""
    return {"source": str(rewrite.files.folder.resolve()), "shards": rewrite.state}


def _note_left_out(rewrite: Rewrite, console: Console) -> None:
    if rewrite.left_out():
        console.note(f"left out, they hold the old numbering: {', '.join(rewrite.left_out())}")


def _workers(jobs: int) -> int:
    return jobs or os.cpu_count() or 1


def _record_of(model: Model) -> IntArray | None:
    return recorded_map(model.local_folder(), len(model.spec.layers), model.spec.layers[0].num_experts)


def _write_record(chosen: Artefact, placement: Placement, record: Path, layout: str, identity: dict[str, Any]) -> None:
    """The placement and its run-time tables, which say whether the router already yields physical numbers."""
    write_placement(record / PLACEMENT_FILE, placement)
    shard = read_shard(chosen.record / RUNTIME)
    metadata = shard.metadata | {"layout": layout, "model": json.dumps(identity, sort_keys=True)}
    entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in shard.tensors]
    slots = placement.physical_to_logical.astype("<u2").tobytes()
    with (record / RUNTIME).open("wb") as file:
        file.write(encode_header(metadata, entries))
        for tensor in shard.tensors:
            file.write(slots if tensor.name == "physical_to_logical" else shard.read(tensor))


def restore_model(
    source: Model, folder: Path, *, jobs: int, force: bool, dry_run: bool, console: Console
) -> dict[str, Any]:
    """Write a regrouped checkpoint back under its first source's numbers: inverse-epG/.

    Raises ImpossibleError for a model that no map was applied to.
    """
    record = _record_of(source)
    if record is None:
        raise ImpossibleError(f"{source.name} holds no map in {RECORD}/{RUNTIME}; it is not a regrouped checkpoint.")
    name = source.local_folder().name.removeprefix(f"{CHECKPOINT}-")
    target = folder / f"{INVERSE}-{name}"
    rewrite = _plan(source, np.argsort(record, axis=1), target, force=force)
    document = _describe(rewrite, target, jobs) | {"dry_run": dry_run}
    if dry_run:
        return document
    _note_left_out(rewrite, console)
    identity = model_identity(source) | {"map_sha256": None}
    parameters = {"inverse_of": map_hash(record)}
    with publish(
        target,
        INVERSE,
        parameters=parameters,
        model=identity,
        force=force,
        record=RECORD,
        resume=parameters | _source_state(rewrite),
    ) as draft:
        _write_files(rewrite, draft, jobs, console)
    return document
