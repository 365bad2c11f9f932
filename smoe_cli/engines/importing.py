"""What smoe import --as placement and smoe inspect FILE do: an engine's placement, checked, and made an artefact."""

from pathlib import Path
from typing import Any

from smoe_cli.console import Console
from smoe_cli.engines.engine_map import EngineMap, ModelLayers, faults, select_layers
from smoe_cli.engines.exporting import model_layers
from smoe_cli.engines.files import read_engine_map
from smoe_cli.errors import UsageError
from smoe_cli.folder import PLACEMENT, TABLES, placement_path
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, write_map, write_placement
from smoe_cli.placing.solving import write_served
from smoe_profiles.artefact import check_target, publish
from smoe_profiles.errors import InputError
from smoe_profiles.models import UNKNOWN_FAMILY, Model, find_model
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
    found = _selected(path, layers)
    ranks = _ranks(path, found, ep)
    said = faults(found, layers.num_experts if layers else None, ranks)
    if said:
        raise InputError(f"{path}: {said[0]}.")
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
        "predictors": tables is not None,
    }


def _selected(path: Path, layers: ModelLayers | None) -> EngineMap:
    try:
        return select_layers(read_engine_map(path), layers)
    except ValueError as error:
        raise InputError(f"{path}: {error}; name the model with --model.") from error


def _ranks(path: Path, found: EngineMap, ep: int | None) -> int:
    ranks = ep or found.num_ranks
    if ranks is None:
        raise UsageError(f"{path} does not say for how many ranks it is; give --ep.")
    if found.num_ranks not in (None, ranks):
        raise InputError(f"{path} is for {found.num_ranks} ranks, not {ranks}; leave --ep out.")
    return ranks


def _table_layers(tables: Tables | None) -> ModelLayers | None:
    """Layers as tables know them: where the model is not named, its last MoE layer is taken for its last of all."""
    if tables is None:
        return None
    ids = tuple(layer.id for layer in tables.layers)
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
