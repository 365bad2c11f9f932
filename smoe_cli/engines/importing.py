"""What smoe import --as placement and smoe inspect FILE do: an engine's placement, checked, and made an artefact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.console import Console
from smoe_cli.engines.engine_map import EngineMap, ModelLayers, faults, identity_row, select_layers
from smoe_cli.engines.exporting import model_layers
from smoe_cli.engines.files import read_engine_map
from smoe_cli.errors import UsageError
from smoe_cli.folder import PLACEMENT, TABLES, placement_path
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, write_map, write_placement
from smoe_cli.placing.solving import write_served
from smoe_profiles.artefact import check_target, publish
from smoe_profiles.errors import InputError
from smoe_profiles.models import UNKNOWN_FAMILY, Model, describe_identity, find_model
from smoe_profiles.tables import Tables, open_tables


def inspect_engine_map(path: Path, *, model_name: str | None, ep: int | None) -> dict[str, Any]:
    """What an engine's placement file holds and what is wrong with it, `lint`."""
    model = find_model(model_name, download=False) if model_name else None
    found = _selected(path, model_layers(model) if model else None)
    ranks = _ranks(path, found, ep)
    lint = faults(found, model.spec.layers[0].num_experts if model else None, ranks)
    experts = model.spec.layers[0].num_experts if model else int(found.slots.max()) + 1
    return {
        "path": str(path),
        "kind": PLACEMENT,
        "model_name": model.name if model else "not named",
        "ranks": ranks,
        "layers": len(found.slots),
        "layer_ids": list(found.layer_ids or ()),
        "num_experts": experts,
        "slots": found.slots.shape[1],
        "redundant": found.slots.shape[1] - experts,
        "lint": lint,
        "verdict": lint[0] if lint else "every layer holds every expert, and no rank one twice",
    }


def import_placement(
    path: Path, folder: Path, *, model_name: str | None, ep: int | None, name: str | None, force: bool, console: Console
) -> dict[str, Any]:
    """Publish an engine's placement as placement-epG/. Returns what was written.

    With tables in the folder it gets predictors, as if smoe cocluster had found it; without, it is a map alone.
    Raises InputError if the file is broken or is for other layers than the model or the tables.
    """
    model = find_model(model_name, download=False) if model_name else None
    tables = open_tables(folder / TABLES) if (folder / TABLES).exists() else None
    layers = model_layers(model) if model else _table_layers(tables)
    found = _selected(path, layers, every_row=model is None)
    ranks = _ranks(path, found, ep)
    listed = len(found.slots)
    said = faults(found, layers.num_experts if layers else None, ranks)
    if said:
        raise InputError(f"{path}: {said[0]}.")
    if tables:
        found = _counted(path, found, tables)
    assert found.layer_ids is not None
    placement = Placement(found.layer_ids, found.slots, ranks)
    target = placement_path(folder, ranks, name)
    check_target(target, force=force)
    parameters = {"ep": ranks, "imported": path.name, "map_sha256": placement.map_sha256}
    with publish(
        target,
        PLACEMENT,
        parameters=parameters,
        model=tables.artefact.model if tables else _identity(model, placement),
        parents=[tables.artefact] if tables else [],
        force=force,
    ) as draft:
        write_placement(draft.path / PLACEMENT_FILE, placement)
        if tables:
            draft.parameters |= write_served(draft.path / RUNTIME, tables, placement, console)["parameters"]
        else:
            write_map(draft.path / RUNTIME, placement)
    return {
        "path": str(target),
        "ranks": ranks,
        "layers": len(found.layer_ids),
        "slots": found.slots.shape[1],
        "redundant": placement.redundant,
        "in_order": listed - len(found.slots),
        "predictors": tables is not None,
    }


def _selected(path: Path, layers: ModelLayers | None, *, every_row: bool = False) -> EngineMap:
    """The rows of the MoE layers. every_row: where a file names its layers, all of them, whatever `layers` says; where
    its rows are all decoder layers, all those of a model that is not known: any may have experts.
    """
    found = read_engine_map(path)
    if every_row and found.layer_ids is not None:
        layers = None
    elif every_row and layers is not None and layers.family == UNKNOWN_FAMILY and found.every_layer:
        layers = replace(layers, moe=tuple(range(layers.hidden)))
    try:
        return select_layers(found, layers)
    except ValueError as error:
        raise InputError(f"{path}: {error}; name the model with --model.") from error


def _counted(path: Path, found: EngineMap, tables: Tables) -> EngineMap:
    """The rows of the layers that tables count; the others must keep their experts in order, as nothing foretells them.

    Raises InputError if one does not, or if the tables count a layer that the map does not have.
    """
    assert found.layer_ids is not None
    counted, row_of = [layer.id for layer in tables.layers], dict(zip(found.layer_ids, found.slots, strict=True))
    there, experts = tables.artefact.path, tables.layers[0].num_experts
    missing = [layer for layer in counted if layer not in row_of]
    if missing:
        raise InputError(
            f"{path} does not have layer {missing[0]}, which {there} has counts of; is it of another model?"
        )
    if int(found.slots.max()) + 1 != experts:
        raise InputError(f"{path} is for another model than {there}, {describe_identity(tables.artefact.model)}.")
    plain = identity_row(found.slots.shape[1], experts)
    moved = [layer for layer, row in row_of.items() if layer not in counted and row.tolist() != plain]
    if moved:
        raise InputError(
            f"{path} moves experts of layer {moved[0]}, and {there} has no counts of that layer; record every layer, "
            "or import it as a map alone, with a -C that holds no tables."
        )
    return EngineMap(np.stack([row_of[layer] for layer in counted]), tuple(counted), False, found.num_ranks)


def _ranks(path: Path, found: EngineMap, ep: int | None) -> int:
    ranks = ep or found.num_ranks
    if ranks is None:
        raise UsageError(f"{path} does not say for how many ranks it is; give --ep.")
    if found.num_ranks not in (None, ranks):
        raise InputError(f"{path} is for {found.num_ranks} ranks, not {ranks}; leave --ep out.")
    return ranks


def _table_layers(tables: Tables | None) -> ModelLayers | None:
    """Layers of the tables' model; where that is not named, its last MoE layer is taken for its last of all."""
    if tables is None:
        return None
    ids = tuple(layer["id"] for layer in tables.artefact.model["layers"])
    return ModelLayers(ids, tables.layers[0].num_experts, max(ids) + 1, 0, str(tables.artefact.model.get("family")))


def _identity(model: Model | None, placement: Placement) -> dict[str, Any]:
    """A model's identity as far as its config, or a placement alone, tells it."""
    layers = [{"id": layer, "num_experts": placement.num_experts} for layer in placement.layer_ids]
    return {
        "family": model.spec.family.model_type if model else UNKNOWN_FAMILY,
        "vocab_size": model.spec.vocab_size if model else None,
        "layers": model.spec.layer_table() if model else layers,
        "router_sha256": None,
        "map_sha256": None,
        "tokenizer_sha256": None,
    }
