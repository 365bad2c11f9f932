"""Working folders for the tests of regroup and verify: from random token ids to a placement, in seconds."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, read_placement, write_placement
from smoe_profiles.artefact import open_artefact, publish
from smoe_profiles.tables import load_arrays, save_arrays
from smoe_profiles.tensors import open_checkpoint, read_shard
from tests.conftest import smoe
from tests.profiles.tiny_models import VOCAB

INDEX = "model.safetensors.index.json"


def make_path(folder: Path, model: Path, order: np.ndarray, *, ep: int = 4, seed: int = 0) -> Path:
    """trace, tables and placement-epG of a model on random prompts, in folder/smoe-out; the placement is `order`.

    order: [L, E] physical_to_logical. Random routing has nothing to gain, so no method would move an expert.
    """
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "prompts.npz", ids=np.random.default_rng(seed).integers(0, VOCAB, (40, 32)))
    smoe("profile", "--model", model, "--dataset", "prompts.npz#ids", "-q", cwd=folder)
    smoe("build-tables", "-q", cwd=folder)
    smoe("cocluster", "--ep", str(ep), "--method", "contiguous", "--jobs", "1", "-q", cwd=folder)
    set_map(folder / "smoe-out" / f"placement-ep{ep}", order)
    return folder / "smoe-out"


def set_map(path: Path, order: np.ndarray) -> None:
    """Publish a placement again under another map."""
    old = open_artefact(path, "placement")
    placement = replace(read_placement(old), physical_to_logical=order.astype(np.int64))
    arrays, metadata = load_arrays(path / RUNTIME), read_shard(path / RUNTIME).metadata
    arrays["physical_to_logical"] = order.astype(np.uint16)
    tables = open_artefact(path.with_name("tables"), "tables")
    about = {"parameters": old.parameters, "model": old.model, "parents": [tables]}
    with publish(path, "placement", force=True, **about) as draft:
        write_placement(draft.path / PLACEMENT_FILE, placement)
        save_arrays(draft.path / RUNTIME, arrays, metadata)
        shutil.copy(path / "solver.jsonl", draft.path)


def split_shards(folder: Path, target: Path, shards: int) -> Path:
    """A one-file checkpoint in several shards, experts of one layer in more than one."""
    shutil.copytree(folder, target)
    tensors = sorted(load_file(target / "model.safetensors").items())
    (target / "model.safetensors").unlink()
    weight_map = {}
    for number in range(shards):
        piece = dict(tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards])
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(piece, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(piece, name)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return target


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    return {tensor.name: shard.read(tensor) for shard, tensor in open_checkpoint(folder)}


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but run.json."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json"
    }
