"""Safetensors folders as bytes: headers, single tensors, and the index that ties shards together.

Nothing here loads a model: a tensor is a name, a dtype string, a shape and a byte range of a file, so that
every dtype (fp8, packed integers) can be moved without being understood. Headers are checked before use:
a claimed size, an offset or an index entry is never trusted (format: safetensors README).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, reason

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
Shape = tuple[str | int | None, ...]
"""The type and the length of each axis of a tensor; None: any length."""

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of one shard; `start` and `stop` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """One safetensors file: tensors in the order of their bytes, and the header's metadata."""

    path: Path
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]
    data_start: int

    def read(self, tensor: TensorInfo) -> bytes:
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(tensor.nbytes)
        if len(data) != tensor.nbytes:
            raise InputError(f"{self.path} ends inside tensor {tensor.name}; the file is cut short.")
        return data


def read_shard(path: Path) -> Shard:
    """Parse and check one file's header.

    Raises InputError for a header that is too large, not JSON, or whose offsets leave holes, overlap or do not
    match shape and dtype.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise InputError(f"{path} is not a safetensors file: its header claims {length} of {size} bytes.")
            raw = file.read(length)
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} has an unreadable safetensors header ({reason(error)}).") from error
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(header, dict):
        raise InputError(f"{path} has a safetensors header that is no table of tensors.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path} has __metadata__ that is no table of texts.")
    entries = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors = sorted(entries, key=lambda tensor: (tensor.start, tensor.stop, tensor.name))
    position = 8 + length
    for tensor in tensors:
        if tensor.start != position:
            raise InputError(f"{path}: tensor {tensor.name} starts at byte {tensor.start}, expected {position}.")
        position = tensor.stop
    if position != size:
        raise InputError(f"{path} holds {size} bytes, but its header accounts for {position}.")
    return Shard(path, metadata, tuple(tensors), 8 + length)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, stop)
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path}: the header entry of tensor {name} is malformed ({error!r}).") from error
    if not isinstance(dtype, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InputError(f"{path}: tensor {name!r} has dtype {dtype!r}; names and dtypes are plain text.")
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers) or stop < start:
        raise InputError(f"{path}: tensor {name} has impossible shape {shape} or offsets {start}..{stop}.")
    expected = ITEM_BYTES.get(dtype)
    items = 1
    for length in shape:
        items *= length
    if expected is not None and items * expected != stop - start:
        raise InputError(f"{path}: tensor {name} ({dtype} {list(shape)}) should have {items * expected} bytes.")
    return TensorInfo(name, dtype, shape, data_start + start, data_start + stop)


def check_arrays(shard: Shard, expected: Mapping[str, Shape]) -> None:
    """Raises InputError unless a file's header has the expected arrays, each of its type and shape."""
    found = {tensor.name: tensor for tensor in shard.tensors}
    for name, (dtype, *shape) in expected.items():
        tensor = found.get(name)
        fits = tensor is not None and tensor.dtype == dtype and len(tensor.shape) == len(shape)
        if tensor is None or not fits or any(n not in (m, None) for n, m in zip(shape, tensor.shape, strict=True)):
            said = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "missing"
            wanted = ", ".join("any" if length is None else str(length) for length in shape)
            raise InputError(f"{shard.path}: {name} is {said}; {dtype} [{wanted}] was expected.")


@dataclass(frozen=True)
class CheckpointFiles:
    """All shards of a model folder, with every tensor's shard by name."""

    folder: Path
    shards: tuple[Shard, ...]
    has_index: bool

    def __iter__(self) -> Iterator[tuple[Shard, TensorInfo]]:
        return ((shard, tensor) for shard in self.shards for tensor in shard.tensors)

    def by_name(self) -> dict[str, tuple[Shard, TensorInfo]]:
        return {tensor.name: (shard, tensor) for shard, tensor in self}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self)


def open_checkpoint(folder: Path) -> CheckpointFiles:
    """Read every header of a model folder and check the index against them.

    Raises InputError when there are no safetensors files, when the index names a file outside the folder or a
    missing one, when a tensor stands in two shards, or in another shard than the index says.
    """
    index_path = folder / INDEX
    if index_path.exists():
        index = read_json(index_path)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index_path} has no weight_map from tensor names to file names.")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or name in ("", "..") or not name.isprintable():
                raise InputError(f"{index_path} names {name!r}, which is not a file of this folder.")
        checkpoint = CheckpointFiles(folder, tuple(read_shard(folder / name) for name in names), has_index=True)
        _check_index(index_path, weight_map, checkpoint)
        return checkpoint
    if not (folder / SINGLE).exists():
        raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}; smoe reads safetensors checkpoints only.")
    return CheckpointFiles(folder, (read_shard(folder / SINGLE),), has_index=False)


def _check_index(path: Path, weight_map: dict[str, str], checkpoint: CheckpointFiles) -> None:
    found: dict[str, str] = {}
    for shard, tensor in checkpoint:
        if tensor.name in found:
            raise InputError(
                f"{path.parent}: tensor {tensor.name} stands in {found[tensor.name]} and {shard.path.name}."
            )
        found[tensor.name] = shard.path.name
    for name in weight_map.keys() | found.keys():
        if weight_map.get(name) != found.get(name):
            raise InputError(f"{path}: {name} is said to be in {weight_map.get(name)}, but is in {found.get(name)}.")


def encode_header(metadata: dict[str, str], tensors: list[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The head of a safetensors file: length, then JSON padded to 8 bytes.

    tensors: (name, dtype, shape, bytes) in the order their data will follow. The same input gives the same bytes,
    metadata order included.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def read_json(path: Path, *, own: bool = False) -> Any:
    """JSON from a file, refusing duplicate keys; InputError names the file.

    own: smoe wrote it, so that a number that is none (NaN, 1e999), which others write too, is refused.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"), path, own)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise InputError(f"{path} is not valid JSON ({reason(error)}).") from error


def unreadable(path: Path, error: OSError) -> Exception:
    """What to raise for a path that is no file, as a folder or a loop of links; permission is the machine's matter."""
    if isinstance(error, PermissionError):
        return error
    return InputError(f"{path} cannot be read: {error.strerror or error}.")


def as_float32(tensor: TensorInfo, data: bytes) -> npt.NDArray[np.float32]:
    """A tensor's values as float32, in its own shape; bf16 is widened exactly.

    Raises InputError for dtypes that are not plain floats (a router or embedding should be one).
    """
    if tensor.dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    if tensor.dtype not in NUMPY_DTYPES:
        raise InputError(f"tensor {tensor.name} has dtype {tensor.dtype}; a float tensor was expected.")
    return np.frombuffer(data, NUMPY_DTYPES[tensor.dtype]).astype(np.float32).reshape(tensor.shape)


def read_json_lines(path: Path) -> list[Any]:
    """The lines of a file that smoe wrote, each as `read_json` takes it."""
    try:
        return [_parsed(line, path, own=True) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON, one value a line ({reason(error)}).") from error


def _parsed(text: str, path: Path, own: bool) -> Any:
    number = _finite if own else float
    return json.loads(
        text, object_pairs_hook=lambda pairs: _unique(path, pairs), parse_float=number, parse_constant=number
    )


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no number")
    return float(text)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON pairs as a table; InputError if a key comes twice, since readers disagree on which one counts."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise InputError(f"{path} repeats the key {next(key for key in keys if keys.count(key) > 1)!r}.")
    return dict(pairs)
