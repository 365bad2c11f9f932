"""The streaming rewrite: a checkpoint with its experts renumbered, bytes untouched except the routers' row order.

No model class is involved. Experts stored one tensor each keep their place in the file and change their name; router
rows are permuted; everything else is copied byte for byte. One chunk is in memory at a time.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.checkpoint.layouts import Claim, Role, claim_tensors, new_name, permute_rows
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import Model
from smoe_profiles.tensors import INDEX, CheckpointFiles, Shard, TensorInfo, encode_header, read_json

CHUNK = 16 << 20
SINGLE_EXPERT = re.compile(r"experts\\?\.[\d(\[]")
"""A name or pattern for some of the experts, as quantisation settings may hold."""
STALE_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Rewrite:
    """A checkpoint to rewrite and how. physical_to_logical: [L, E]."""

    model: Model
    files: CheckpointFiles
    claims: dict[str, Claim]
    physical_to_logical: npt.NDArray[np.int64]

    @property
    def logical_to_physical(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.physical_to_logical, axis=1)

    def side_files(self) -> list[Path]:
        """Every file that is not a weight, relative to the folder: config, tokenizer, licence, code."""
        folder = self.files.folder
        found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
        return [
            path
            for path in found
            if path.suffix not in STALE_WEIGHTS
            and not path.name.endswith(".index.json")
            and not path.parts[0].startswith(".")
            and path.parts[0] != "smoe"
        ]

    def left_out(self) -> list[str]:
        """Other copies of the weights that lie beside the shards; copying them would leave stale experts behind."""
        shards = {shard.path.name for shard in self.files.shards}
        folder = self.files.folder
        return [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.suffix in STALE_WEIGHTS
            and path.relative_to(folder).as_posix() not in shards
            and path.relative_to(folder).parts[0] != "smoe"
        ]


def expected_rewrite(model: Model, physical_to_logical: npt.NDArray[np.int64]) -> Rewrite:
    """What a regrouped checkpoint must hold. physical_to_logical: [L, E].

    Raises InputError for a damaged checkpoint or a map that is no permutation of the model's experts, ImpossibleError
    for tensors no rule claims.
    """
    _check_map(model, physical_to_logical)
    files = model.files()
    return Rewrite(model, files, claim_tensors(model, files), physical_to_logical)


def plan_rewrite(model: Model, physical_to_logical: npt.NDArray[np.int64], target: Path) -> Rewrite:
    """Check everything that can be checked before the first byte is written.

    Raises InputError for a damaged checkpoint, ImpossibleError for tensors no rule claims or settings that name single
    experts, MachineError for a disk too small.
    """
    files = model.files()
    source, end = files.folder.resolve(), target.resolve()
    if source == end or source in end.parents or end in source.parents:
        raise ImpossibleError(f"{target} and the model's folder {files.folder} lie inside each other; use another -C.")
    if any(SINGLE_EXPERT.search(text) for text in _strings(read_json(files.folder / "config.json"))):
        raise ImpossibleError(
            f"{files.folder / 'config.json'} names single experts; renumbering them is not supported."
        )
    rewrite = expected_rewrite(model, physical_to_logical)
    free = shutil.disk_usage(target.parent).free
    if free < files.nbytes * 1.01 + 1e6:
        raise MachineError(
            f"the disk of {target.parent} is too full: {files.nbytes:,} bytes are needed, {free:,} are free."
        )
    return rewrite


def _check_map(model: Model, physical_to_logical: npt.NDArray[np.int64]) -> None:
    experts = model.spec.layers[0].num_experts
    if physical_to_logical.shape != (len(model.spec.layers), experts):
        raise InputError(
            f"the map has shape {list(physical_to_logical.shape)}; "
            f"the model has {len(model.spec.layers)} MoE layers of {experts} experts."
        )
    if (np.sort(physical_to_logical, axis=1) != np.arange(experts)).any():
        raise InputError("the map does not name every expert of a layer exactly once.")


def _strings(content: Any) -> Iterator[str]:
    """Every key and text of a JSON document."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _strings(value)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value)


def write_checkpoint(rewrite: Rewrite, folder: Path, progress: Callable[[int], None]) -> None:
    """Write shards, side files and last the index, rebuilt from the written headers; progress(bytes)."""
    weight_map = {}
    for shard in rewrite.files.shards:
        for name in _write_shard(rewrite, shard, folder / shard.path.name, progress):
            weight_map[name] = shard.path.name
    for path in rewrite.side_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(rewrite.files.folder / path, folder / path)
    if rewrite.files.has_index:
        index = read_json(rewrite.files.folder / INDEX)
        index["weight_map"] = dict(sorted(weight_map.items()))
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(rewrite: Rewrite, shard: Shard, path: Path, progress: Callable[[int], None]) -> list[str]:
    names = [
        new_name(tensor.name, rewrite.claims[tensor.name], rewrite.logical_to_physical) for tensor in shard.tensors
    ]
    entries = [
        (name, tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in zip(names, shard.tensors, strict=True)
    ]
    with path.open("xb") as file:
        file.write(encode_header({"format": "pt"} | shard.metadata, entries))
        for tensor in shard.tensors:
            for chunk in expected_bytes(rewrite, shard, tensor):
                file.write(chunk)
                progress(len(chunk))
    return names


def expected_bytes(rewrite: Rewrite, shard: Shard, tensor: TensorInfo) -> Iterator[bytes]:
    """A source tensor's bytes as the regrouped checkpoint must hold them, in chunks."""
    claim = rewrite.claims[tensor.name]
    if claim.role is Role.PERMUTED:
        yield permute_rows(shard.read(tensor), rewrite.physical_to_logical[claim.layer])
    else:
        yield from read_chunks(shard, tensor)


def read_chunks(shard: Shard, tensor: TensorInfo) -> Iterator[bytes]:
    """A tensor's bytes in chunks. Raises InputError if the file ends inside it."""
    left = tensor.nbytes
    with shard.path.open("rb") as file:
        file.seek(tensor.start)
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise InputError(f"{shard.path} ends inside tensor {tensor.name}; the file is cut short.")
            left -= len(chunk)
            yield chunk
