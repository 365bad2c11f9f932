"""Traces below level `token`: one Parquet file of counts a layer (design 3).

Level `token-count` counts (token_id, expert), `pair` counts (expert, other), `count` counts (expert); each entry of
a part stands once, sorted by its keys, with the part in the `split` column.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.split import PARTS
from smoe_profiles.trace import Trace, TraceLayer

KEYS: dict[Level, dict[str, pa.DataType]] = {
    Level.TOKEN_COUNT: {"token_id": pa.uint32(), "expert": pa.uint16()},
    Level.PAIR: {"expert": pa.uint16(), "other": pa.uint16()},
    Level.COUNT: {"expert": pa.uint16()},
}

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


def read_level(trace: Trace, layer: TraceLayer, part: str) -> Entries:
    """One layer's counts of one part, as written. Raises InputError if the file is missing or another table."""
    path = trace.artefact.path / level_file(layer)
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        rows = table.filter(pa.array(table["split"].cast(pa.string()).to_numpy() == part))
        return {name: rows[name].to_numpy().astype(np.int64) for name in [*KEYS[trace.level], "count"]}
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path} cannot be read as counts of level {trace.level} ({error}).") from error
