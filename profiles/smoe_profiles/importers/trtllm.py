"""TensorRT-LLM's expert statistics (main of 2026): a folder of meta_info.json and one safetensors file a rank.

Keys "<iteration>_<layer>", true layer numbers. rank<r>.safetensors: counts [E]; rank<r>_raw.safetensors: chosen ids
[token, slot], no token ids; cooccurrence_rank<r>.safetensors: [E, E]. The richest kind in a folder is read; counts and
raw files are never mixed. With the load balancer on, num_experts is the number of slots.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.importers.files import Array, counts, load_json, whole_numbers
from smoe_profiles.importers.records import (
    CountRecords,
    Facts,
    LayerAxis,
    Piece,
    ReadOptions,
    Records,
    count_entries,
    join,
)
from smoe_profiles.tables import load_arrays
from smoe_profiles.tensors import read_shard

META = "meta_info.json"
KINDS = {
    "raw": re.compile(r"rank(\d{1,6})_raw\.safetensors"),
    "pair": re.compile(r"cooccurrence_rank(\d{1,6})\.safetensors"),
    "count": re.compile(r"rank(\d{1,6})\.safetensors"),
}
WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
REPEATS = "ranks are added up; without attention data parallelism they repeat the same tokens, so only shares count"

Table = dict[tuple[int, int], Array]
"""(iteration, layer) -> array."""


@dataclass(frozen=True)
class _Dump:
    """One folder's files of one kind in the order of ranks, each with its number among the files given.

    unread: files of the kind that lie beside those given.
    """

    folder: Path
    ranks: dict[Path, int]
    unread: tuple[str, ...]
    kind: str
    num_experts: int
    top_k: int


def read(paths: Sequence[Path], _options: ReadOptions) -> Records:
    """Folders, or the rank files of one; counts of several folders add up."""
    dumps = _dumps(paths)
    first = dumps[0]
    for dump in dumps:
        if (dump.kind, dump.num_experts, dump.top_k) != (first.kind, first.num_experts, first.top_k):
            raise InputError(f"{dump.folder} is of another kind or model than {first.folder}; import them apart.")
    return _raw(dumps) if first.kind == "raw" else _counted(dumps)


def _dumps(paths: Sequence[Path]) -> list[_Dump]:
    given: dict[Path, dict[Path, int]] = {}
    for source, path in enumerate(paths):
        folder, files = (path, sorted(path.iterdir())) if path.is_dir() else (path.parent, [path])
        given.setdefault(folder, {}).update(dict.fromkeys(files, source))
    return [_dump(folder, files) for folder, files in given.items()]


def _ranks(files: Iterable[Path], kind: str) -> dict[int, Path]:
    return {int(match[1]): path for path in files if (match := KINDS[kind].fullmatch(path.name))}


def _dump(folder: Path, files: dict[Path, int]) -> _Dump:
    kind = next((kind for kind in KINDS if _ranks(files, kind)), None)
    if kind is None:
        raise InputError(
            f"{folder} holds no rank0.safetensors, rank0_raw or cooccurrence_rank0; is it the right folder?"
        )
    given, there = _ranks(files, kind), _ranks(folder.iterdir(), kind)
    missing = sorted(set(range(max(there) + 1)) - set(there))
    if missing:
        raise InputError(f"{folder} has no file of rank {missing[0]}; ranks 0 to {max(there)} are needed.")
    unread = tuple(there[rank].name for rank in sorted(set(there) - set(given)))
    content = load_json(folder / META)
    table = content[0] if len(content) == 1 and isinstance(content[0], dict) else {}
    experts, top_k = (table.get(key) for key in ("num_experts", "num_experts_per_token"))
    if type(experts) is not int or type(top_k) is not int or not 0 < top_k <= experts < 2**16:
        raise InputError(
            f"{folder / META} has num_experts, num_experts_per_token = {experts}, {top_k}; two numbers were expected."
        )
    ranks = {given[rank]: files[given[rank]] for rank in sorted(given)}
    return _Dump(folder, ranks, unread, kind, experts, top_k)


def _table(path: Path) -> Table:
    """One rank's arrays. Raises InputError for other keys, gaps in the iterations, or layers that come and go."""
    for entry in read_shard(path).tensors:
        if entry.dtype not in WHOLE or not re.fullmatch(r"\d{1,9}_\d{1,6}", entry.name):
            raise InputError(
                f"{path} holds {entry.name} ({entry.dtype}); whole numbers under ITERATION_LAYER were expected."
            )
    arrays = load_arrays(path)
    table = {
        (int(key.partition("_")[0]), int(key.partition("_")[2])): whole_numbers(array, f"{path}, {key}")
        for key, array in arrays.items()
    }
    iterations, layers = sorted({key[0] for key in table}), {key[1] for key in table}
    if not table or iterations != list(range(iterations[0], iterations[-1] + 1)):
        raise InputError(f"{path} holds iterations {iterations[:1]} to {iterations[-1:]} with gaps; it is incomplete.")
    absent = next(
        ((step, layer) for step in iterations for layer in sorted(layers) if (step, layer) not in table), None
    )
    if absent:
        raise InputError(f"{path} has no layer {absent[1]} in iteration {absent[0]}, but has it in others.")
    return table


def _same_layers(layers: list[int], table: Table, path: Path) -> list[int]:
    found = sorted({layer for _, layer in table})
    if layers and found != layers:
        raise InputError(f"{path} has layers {found}; other ranks have {layers}.")
    return found


def _counted(dumps: Sequence[_Dump]) -> Records:
    """Levels count and pair: every iteration, rank and folder added up."""
    shape = (dumps[0].num_experts,) * (2 if dumps[0].kind == "pair" else 1)
    total: dict[int, Array] = {}
    for dump in dumps:
        for path in dump.ranks:
            table = _table(path)
            _same_layers(sorted(total), table, path)
            for (step, layer), array in table.items():
                if array.shape != shape:
                    raise InputError(
                        f"{path}, {step}_{layer} has shape {list(array.shape)}; {META} says {list(shape)}."
                    )
                total[layer] = total.get(layer, 0) + counts(array, f"{path}, {step}_{layer}")
    level = Level.PAIR if dumps[0].kind == "pair" else Level.COUNT
    return CountRecords(_facts(dumps, sorted(total)), level, [count_entries(total[layer]) for layer in sorted(total)])


def _facts(dumps: Sequence[_Dump], layers: list[int], notes: tuple[str, ...] = ()) -> Facts:
    if dumps[0].kind != "raw" and any(len(dump.ranks) > 1 for dump in dumps):
        notes = (REPEATS, *notes)
    notes += tuple(f"{', '.join(dump.unread)} of {dump.folder} are not read" for dump in dumps if dump.unread)
    return Facts(LayerAxis.NUMBERED, tuple(layers), dumps[0].num_experts, dumps[0].top_k, notes=notes)


def _raw(dumps: Sequence[_Dump]) -> Records:
    """Level token without token ids: each iteration of a rank is one stretch of rows."""
    pieces: list[Piece] = []
    layers: list[int] = []
    copies: list[str] = []
    for dump in dumps:
        seen: set[str] = set()
        for path, source in dump.ranks.items():
            table = _table(path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest in seen:
                copies.append(path.name)
                continue
            seen.add(digest)
            layers = _same_layers(layers, table, path)
            pieces += [_piece(table, step, layers, path, source) for step in sorted({key[0] for key in table})]
    notes = (f"{', '.join(copies)} repeat another rank's tokens and are left out",) if copies else ()
    return join(pieces, _facts(dumps, layers, notes))


def _piece(table: Table, step: int, layers: list[int], path: Path, source: int) -> Piece:
    arrays = [table[step, layer] for layer in layers]
    if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 2:
        raise InputError(
            f"{path}: iteration {step} has arrays {sorted({array.shape for array in arrays})}; one shape "
            "[token, slot] was expected in every layer."
        )
    return Piece(np.stack(arrays), f"{path}, iteration {step}", source)
