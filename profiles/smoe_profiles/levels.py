"""Traces below level `token`: one Parquet file of counts a layer (docs/formats/trace.md).

Level `token-count` counts (token_id, expert), `pair` counts (expert, other), `count` counts (expert); each entry of
a part stands once, sorted by its keys, with the part in the `split` column.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.parquet import read_parquet
from smoe_profiles.split import PARTS
from smoe_profiles.tables import MOST_COUNTED
from smoe_profiles.trace import Trace, TraceLayer, to_numpy

KEYS: dict[Level, dict[str, pa.DataType]] = {
    Level.TOKEN_COUNT: {"token_id": pa.uint32(), "expert": pa.uint16()},
    Level.PAIR: {"expert": pa.uint16(), "other": pa.uint16()},
    Level.COUNT: {"expert": pa.uint16()},
}

GROUPS_AT_ONCE = 64
"""Row groups whose counts are kept apart before they are added up."""

Entries = dict[str, npt.NDArray[np.int64]]
"""Column name -> [C]: the level's keys and `count`."""


def level_file(layer: TraceLayer) -> str:
    return f"counts_{layer.label}.parquet"


def write_level(folder: Path, layer: TraceLayer, level: Level, parts: Mapping[str, Entries]) -> None:
    """One layer's counts. parts: by part name; entries may repeat and come in any order, counts add up.

    Raises InputError for a key that does not fit its column, or an expert outside the layer.
    """
    keys = KEYS[level]
    tables = []
    for part in PARTS:
        if part in parts:
            entries = _summed(parts[part], list(keys), layer)
            columns = {name: pa.array(entries[name], kind) for name, kind in keys.items()}
            columns["count"] = pa.array(entries["count"], pa.uint64())
            code = pa.array(np.full(len(entries["count"]), PARTS.index(part)), pa.int8())
            columns["split"] = pa.DictionaryArray.from_arrays(code, pa.array(PARTS))
            tables.append(pa.table(columns))
    pq.write_table(pa.concat_tables(tables), folder / level_file(layer), compression="zstd", write_page_checksum=True)


def _summed(entries: Entries, keys: list[str], layer: TraceLayer) -> Entries:
    """Entries with equal keys added up, sorted by key, zero counts left out."""
    for name in keys:
        values = entries[name]
        limit = 2**32 - 1 if name == "token_id" else layer.num_experts + layer.num_zero
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = values.min() if values.min() < 0 else values.max()
            raise InputError(f"layer {layer.id}: {name} {bad} is outside [0, {limit}).")
    if entries["count"].size and entries["count"].min() < 0:
        raise InputError(f"layer {layer.id} holds a negative count ({entries['count'].min()}).")
    order = np.lexsort([entries[name] for name in reversed(keys)])
    stacked = np.stack([entries[name][order] for name in keys])
    first = np.ones(len(order), np.bool_)
    first[1:] = (stacked[:, 1:] != stacked[:, :-1]).any(axis=0)
    total = np.add.reduceat(entries["count"][order], np.flatnonzero(first)) if len(order) else entries["count"]
    kept = total > 0
    return {name: column[first][kept] for name, column in zip(keys, stacked, strict=True)} | {"count": total[kept]}


def reduce_to_counts(folder: Path, layers: Sequence[TraceLayer]) -> None:
    """Replace the Parquet parts of a trace being written by its token-count level, from which no order can be read."""
    parts = sorted(folder.glob("*.parquet"))
    for layer in layers:
        found: dict[str, list[Entries]] = {}
        for path in parts:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=["token_id", "split", layer.column])
                for part, entries in _group_counts(table, layer).items():
                    found.setdefault(part, []).append(entries)
                    if len(found[part]) == GROUPS_AT_ONCE:
                        found[part] = [_joined(found[part], layer)]
        write_level(folder, layer, Level.TOKEN_COUNT, {part: _joined(lists, layer) for part, lists in found.items()})
    for path in parts:
        path.unlink()


def _group_counts(table: pa.Table, layer: TraceLayer) -> dict[str, Entries]:
    split = table["split"].cast(pa.string()).to_numpy()
    token_id, experts = to_numpy(table["token_id"]).astype(np.int64), to_numpy(table[layer.column]).astype(np.int64)
    found = {}
    for part in PARTS:
        mine = split == part
        if mine.any():
            keys = {"token_id": np.repeat(token_id[mine], layer.top_k), "expert": experts[mine].reshape(-1)}
            found[part] = _summed(keys | {"count": np.ones(mine.sum() * layer.top_k, np.int64)}, list(keys), layer)
    return found


def _joined(lists: Sequence[Entries], layer: TraceLayer) -> Entries:
    keys = list(KEYS[Level.TOKEN_COUNT])
    return _summed({name: np.concatenate([one[name] for one in lists]) for name in [*keys, "count"]}, keys, layer)


def read_level(trace: Trace, layer: TraceLayer, part: str) -> Entries:
    """One layer's counts of one part, as written. Raises InputError if the file is missing or another table."""
    path = trace.artefact.path / level_file(layer)
    names = pa.dictionary(pa.int8(), pa.string())
    columns = KEYS[trace.level] | {"count": pa.uint64(), "split": names}
    table = read_parquet(path, pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()]))
    rows = table.filter(pa.array(table["split"].cast(pa.string()).to_numpy() == part))
    entries = {name: rows[name].to_numpy() for name in [*KEYS[trace.level], "count"]}
    limits = {"token_id": trace.vocab_size, "count": MOST_COUNTED}
    for name, values in entries.items():
        limit = limits.get(name, layer.num_experts + layer.num_zero)
        if values.size and values.max() >= limit:
            raise InputError(f"{path} holds {name} {values.max()}; values below {limit} were expected.")
    return {name: values.astype(np.int64) for name, values in entries.items()}
