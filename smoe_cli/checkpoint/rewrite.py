"""What a regrouped checkpoint must hold, byte by byte: planned before anything is written, read in chunks.

No model class is involved. Experts stored one tensor each keep their place in the file and change their name; fused
experts and router rows are read in another order; tables of expert numbers are renumbered; everything else is copied.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_cli.checkpoint.layouts import Layout, Role, claim_tensors, new_name, renumber, row_order
from smoe_cli.checkpoint.settings import ExpertNames, named_experts, settings_files
from smoe_profiles.artefact import standing_folder
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import CheckpointFiles, Shard, TensorInfo

CHUNK = 8 << 20
"""Bytes read at once: a multiple of every integer's size."""
PROCESS_BYTES = 240_000_000
"""What the interpreter and its libraries hold without any tensor, measured."""
STALE_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
RECORD = "smoe"


@dataclass(frozen=True)
class Rewrite:
    """A checkpoint to rewrite and how. physical_to_logical: [L, E], slots of the copy to experts of the source.

    state: (size, time of change) of every shard when it was planned.
    """

    model: Model
    files: CheckpointFiles
    layout: Layout
    physical_to_logical: npt.NDArray[np.int64]
    logical_to_physical: npt.NDArray[np.int64]
    names: ExpertNames
    state: dict[str, tuple[int, int]] = field(default_factory=dict)

    def new_name(self, tensor: TensorInfo) -> str:
        return new_name(tensor.name, self.layout.claims[tensor.name], self.logical_to_physical)

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
            and path.parts[0] != RECORD
        ]

    def side_bytes(self, path: Path) -> bytes:
        """What the copy of a side file must hold: its own bytes, experts' names in settings renumbered."""
        data = (self.files.folder / path).read_bytes()
        if self.files.folder / path not in settings_files(self.files.folder):
            return data
        return self.names.renumber(data.decode("utf-8"), self.logical_to_physical).encode()

    def left_out(self) -> list[str]:
        """Other copies of the weights that lie beside the shards; copying them would leave stale experts behind."""
        shards = {shard.path.name for shard in self.files.shards}
        folder = self.files.folder
        return [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.suffix in STALE_WEIGHTS
            and path.relative_to(folder).as_posix() not in shards
            and path.relative_to(folder).parts[0] != RECORD
        ]

    def expected_bytes(self, shard: Shard, tensor: TensorInfo) -> Iterator[bytes]:
        """A source tensor's bytes as the copy must hold them, in chunks.

        Raises InputError if the file ends inside it, or a table holds a number that is no expert's.
        """
        claim = self.layout.claims[tensor.name]
        if claim.role is Role.PERMUTED:
            yield from _read_rows(shard, tensor, row_order(claim, self.physical_to_logical))
            return
        for chunk in read_chunks(shard, tensor, tensor.start, tensor.nbytes):
            if claim.role is Role.RENUMBERED:
                yield renumber(chunk, tensor, self.logical_to_physical[claim.layer])
            else:
                yield chunk

    def check_unchanged(self) -> None:
        """Raises InputError if a shard of the source changed since the plan was made."""
        for name, state in shard_states(self.files).items():
            if self.state[name] != state:
                raise InputError(f"{self.files.folder / name} changed while it was read; regroup again.")

    def peak_bytes(self, jobs: int) -> int:
        """About how much memory writing takes: chunks only, each in a few hands at once."""
        largest = max((tensor.nbytes for _, tensor in self.files), default=0)
        return PROCESS_BYTES + min(jobs, len(self.files.shards)) * 3 * min(largest, CHUNK)


def shard_states(files: CheckpointFiles) -> dict[str, tuple[int, int]]:
    """(size, time of change in ns) of every shard by name."""
    facts = {shard.path.name: shard.path.stat() for shard in files.shards}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in facts.items()}


def expected_rewrite(model: Model, physical_to_logical: npt.NDArray[np.int64]) -> Rewrite:
    """What a regrouped checkpoint must hold. physical_to_logical: [L, E].

    Raises InputError for a damaged checkpoint or a map that is no permutation of the model's experts, ImpossibleError
    for tensors no rule claims or settings whose experts cannot be told.
    """
    _check_map(model, physical_to_logical)
    files = model.files()
    disk = disk_names(model, files.by_name())
    blocks = tuple(disk.block.format(layer=layer.id) for layer in model.spec.layers)
    names = ExpertNames(blocks, model.spec.layers[0].num_experts)
    layout = claim_tensors(model, files, named_experts(files.folder, names))
    inverse = np.argsort(physical_to_logical, axis=1)
    return Rewrite(model, files, layout, physical_to_logical, inverse, names, shard_states(files))


def plan_rewrite(
    model: Model, physical_to_logical: npt.NDArray[np.int64], target: Path, staged_bytes: int = 0
) -> Rewrite:
    """Check everything that can be checked before the first byte is written.

    staged_bytes: what an interrupted run has written already.
    Raises what `expected_rewrite` does, ImpossibleError for a target that touches the source, MachineError for a disk
    too small.
    """
    files = model.files()
    end = target.resolve()
    for source in {path.resolve() for shard in files.shards for path in (files.folder, shard.path.resolve().parent)}:
        if source == end or source in end.parents or end in source.parents:
            raise ImpossibleError(
                f"{target} and the model's folder {files.folder} lie inside each other; use another -C."
            )
    rewrite = expected_rewrite(model, physical_to_logical)
    needed = rewrite.files.nbytes * 1.01 + 1e6 - staged_bytes
    free = shutil.disk_usage(standing_folder(target)).free
    if free < needed:
        raise MachineError(
            f"the disk of {target.parent} is too full: {needed:,.0f} bytes are needed, {free:,} are free."
        )
    return rewrite


def _check_map(model: Model, physical_to_logical: npt.NDArray[np.int64]) -> None:
    layers = model.spec.layers
    sizes = sorted({layer.num_experts for layer in layers})
    if len(sizes) > 1:
        raise ImpossibleError(f"{model.name} has MoE layers of {sizes} experts; one map has as many in every layer.")
    if physical_to_logical.shape != (len(layers), sizes[0]):
        raise InputError(
            f"the map has shape {list(physical_to_logical.shape)}; "
            f"the model has {len(layers)} MoE layers of {sizes[0]} experts."
        )
    if (np.sort(physical_to_logical, axis=1) != np.arange(sizes[0])).any():
        raise InputError("the map does not name every expert of a layer exactly once.")


def read_chunks(shard: Shard, tensor: TensorInfo, start: int, count: int) -> Iterator[bytes]:
    """Bytes of a tensor from a place in its file on, in chunks. Raises InputError if the file ends inside."""
    with shard.path.open("rb", buffering=0) as file:
        file.seek(start)
        while count:
            chunk = file.read(min(CHUNK, count))
            if not chunk:
                raise _cut_short(shard, tensor)
            count -= len(chunk)
            yield chunk


def _read_rows(shard: Shard, tensor: TensorInfo, order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    """A tensor's rows in another order; small ones through one read, so that a router is not a thousand."""
    width = tensor.nbytes // len(order)
    if tensor.nbytes <= CHUNK:
        rows = np.frombuffer(shard.read(tensor), np.uint8).reshape(len(order), width)
        yield rows[order].tobytes()
        return
    for row in order:
        yield from read_chunks(shard, tensor, tensor.start + int(row) * width, width)


def _cut_short(shard: Shard, tensor: TensorInfo) -> InputError:
    return InputError(f"{shard.path} ends inside tensor {tensor.name}; the file is cut short.")
