"""What smoe export does: one placement artefact into one engine's file, published whole or not at all."""

import shlex
from pathlib import Path
from typing import Any

from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_cli.engines.choices import Target
from smoe_cli.engines.engine_map import EngineMap, ModelLayers, fill_layers
from smoe_cli.engines.files import WRITERS
from smoe_cli.folder import CHECKPOINT, sibling, trace_model_name
from smoe_cli.options import DEFAULT_DIR
from smoe_cli.placement import Placement, read_placement
from smoe_profiles.artefact import Artefact, sync_to_disk
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import Model, describe_identity, find_model
from smoe_profiles.tensors import read_json

EXTRA_LAYER_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def model_layers(model: Model) -> ModelLayers:
    """The layers of a model, those of multi-token prediction from its config where that is here."""
    config = read_json(model.folder / "config.json") if model.folder else {}
    text = config.get("text_config")
    extra = next((int(part[key]) for part in (config, text or {}) for key in EXTRA_LAYER_KEYS if part.get(key)), 0)
    layers = model.spec.layers
    return ModelLayers(
        moe=tuple(layer.id for layer in layers),
        num_experts=layers[0].num_experts,
        hidden=model.spec.num_hidden_layers,
        extra=extra,
        family=model.spec.family.model_type,
    )


def described_model(chosen: Artefact, folder: Path, wanted: str | None) -> Model:
    """The model a placement is for; its weights need not be here. Raises InputError if its layers differ."""
    model = find_model(wanted or trace_model_name(folder), download=False)
    sizes = [(layer["id"], layer["num_experts"]) for layer in chosen.model["layers"]]
    if [(layer.id, layer.num_experts) for layer in model.spec.layers] != sizes:
        raise InputError(
            f"{chosen.path} is for {describe_identity(chosen.model)}; {model.name} has {len(model.spec.layers)} MoE "
            f"layers of {model.spec.layers[0].num_experts} experts."
        )
    return model


def export_placement(
    chosen: Artefact, model: Model, target: Target, out: Path | None, *, force: bool
) -> dict[str, Any]:
    """Write a placement in an engine's form (vLLM: say how to serve the regrouped checkpoint). Returns what was done.

    Raises ImpossibleError where the engine cannot take it, or the file is there already.
    """
    placement = read_placement(chosen)
    layers = model_layers(model)
    if target is Target.VLLM:
        notes = _vllm_recipe(chosen, model, placement)
        return {"path": None, "to": target.value, "notes": notes}
    slots = placement.physical_to_logical.shape[1]
    if not placement.equal_ranks:
        raise ImpossibleError(
            f"{chosen.path}: {slots} slots are not the same number on each of {placement.num_ranks} ranks; no engine's "
            "map can say that. Place with --redundant 1 instead of --uneven."
        )
    form, write, suffix = WRITERS[target]
    path = out or chosen.path.with_name(f"{chosen.path.name}.{target.value}{suffix}")
    if path.is_dir():
        raise ImpossibleError(f"{path} is a folder; give --out a file.")
    if path.exists() and not force:
        raise ImpossibleError(f"{path} is already there; --force replaces it.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it first.")
    placed = EngineMap(placement.physical_to_logical, placement.layer_ids, num_ranks=placement.num_ranks)
    found = fill_layers(placed, layers)
    staged = path.with_name(f".{path.name}.partial")
    try:
        write(staged, found, layers)
        sync_to_disk(staged)
        staged.replace(path)
        sync_to_disk(path.parent)
    finally:
        staged.unlink(missing_ok=True)
    notes = [note.replace("FILE", str(path)) for note in form.notes(found, layers)]
    if in_order := len(found.slots) - len(placed.slots):
        notes.insert(0, f"layers not in {chosen.path.name}, with their experts in order: {in_order}")
    if model.folder is None and not layers.extra:
        notes.append(f"the config of {model.name} is not here: layers of multi-token prediction, if any, are left out")
    return {"path": str(path), "to": target.value, "notes": notes, "layers": len(found.slots), "slots": slots}


def _vllm_recipe(chosen: Artefact, model: Model, placement: Placement) -> list[str]:
    """vLLM has no static map: its linear placement of a regrouped checkpoint is the placement.

    Of ranks of unlike size too: there as here the first E mod G ranks hold one expert more.
    """
    if placement.redundant:
        raise ImpossibleError(
            f"{chosen.path} holds copies of experts; vLLM takes neither a static map nor a checkpoint with copies."
        )
    placed, layers = len(placement.layer_ids), len(model.spec.layers)
    if placed < layers:
        raise ImpossibleError(
            f"{chosen.path} places {placed} of {layers} MoE layers of {model.name}, and no whole checkpoint can be "
            "written for vLLM's linear placement; record every layer, or serve with an engine that takes a map."
        )
    if blocking_layer(model.spec.layers, placement.physical_to_logical):
        raise ImpossibleError(
            f"{chosen.path} is map-only (the router is group-limited and the placement splits its groups), and vLLM "
            "takes no static map; place with smoe cocluster --groups whole, or serve with an engine that takes a map."
        )
    checkpoint, ranks = sibling(chosen.path, CHECKPOINT), placement.num_ranks
    folder = [] if chosen.path.parent == DEFAULT_DIR else ["-C", str(chosen.path.parent)]
    command = ["smoe", "regroup", "--placement", chosen.path.name, *folder]
    written = "" if checkpoint.exists() else f" (write it first: {shlex.join(command)})"
    return [
        f"vllm serve {checkpoint} --tensor-parallel-size {ranks} --enable-expert-parallel "
        f"--expert-placement-strategy linear{written}",
        f"data x context x tensor parallel size must be {ranks}: a placement is for that many ranks",
        "do not give --enable-eplb: its first rearrangement would undo the placement",
        *([] if placement.equal_ranks else ["do not give a DeepEP all-to-all backend: it needs ranks of equal size"]),
    ]
