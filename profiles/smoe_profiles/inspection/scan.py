"""Reading a trace without believing it: whatever its columns hold comes out, for inspection to judge.

Axes: n rows of a row group, W ids a row (K in a healthy trace). `Trace.groups` refuses what this lets through: ids
outside the layer, rows of another width, columns of another type.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smoe_profiles.errors import InputError
from smoe_profiles.parquet import open_parquet, readable
from smoe_profiles.split import PARTS
from smoe_profiles.trace import Trace, TraceLayer, to_numpy

FACTS = ("sequence", "token_id", "phase", "source", "split")


@dataclass(frozen=True)
class Facts:
    """What rows say besides their experts, all [n].

    row: its number in the trace; token_id: UNKNOWN_TOKEN where not known; phase, source: index into the scan's names;
    part: into PARTS.
    """

    row: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    token_id: npt.NDArray[np.uint32]
    phase: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]

    def take(self, kept: npt.NDArray[np.bool_]) -> "Facts":
        return Facts(*(getattr(self, field.name)[kept] for field in fields(self)))


@dataclass(frozen=True)
class LayerGroup:
    """One layer in one row group. ids: [n, W], of the rows of most common width; facts: of the same rows.

    widths: ids a row -> rows; empty: rows without ids; odd_type: the column's, if it is no list of whole numbers; file:
    the part's name.
    """

    facts: Facts
    ids: npt.NDArray[Any]
    widths: Counter[int]
    empty: int
    odd_type: str | None
    file: str


class Scan:
    """A trace of level `token`, read row group by row group. phases, sources: names in order of appearance."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.phases: list[str] = []
        self.sources: list[str] = []
        self._files = sorted(name for name in trace.artefact.manifest["files"] if name.endswith(".parquet"))
        if not self._files:
            raise InputError(f"{trace.artefact.path} holds no Parquet rows; the trace is incomplete.")

    def facts(self) -> Iterator[Facts]:
        for _, facts, _ in self._read(None):
            yield facts

    def layer(self, layer: TraceLayer) -> Iterator[LayerGroup]:
        for file, facts, column in self._read(layer.column):
            yield _layer_group(file, facts, column)

    def _read(self, column: str | None) -> Iterator[tuple[str, Facts, Any]]:
        columns = [*FACTS, column] if column else list(FACTS)
        first = 0
        for name in self._files:
            path = self.trace.artefact.path / name
            file = open_parquet(path, columns)
            for group in range(file.num_row_groups):
                with readable(path):
                    table = file.read_row_group(group, columns=columns)
                    facts = self._facts(table, first)
                yield name, facts, table[column] if column else None
                first += len(table)

    def _facts(self, table: pa.Table, first: int) -> Facts:
        parts = list(PARTS)
        part = _codes(table["split"], parts)
        if len(parts) > len(PARTS):
            raise ValueError(f"split {parts[-1]!r} is none of {', '.join(PARTS)}")
        return Facts(
            row=np.arange(first, first + len(table)),
            sequence=to_numpy(table["sequence"].cast(pa.int64())),
            token_id=to_numpy(table["token_id"].cast(pa.uint32())),
            phase=_codes(table["phase"], self.phases),
            source=_codes(table["source"], self.sources),
            part=part,
        )


def _codes(column: pa.ChunkedArray, names: list[str]) -> npt.NDArray[np.int64]:
    """Each row's place in `names`, [n], which grows by names not met before."""
    if column.null_count:
        raise ValueError(f"a name is empty in {column.null_count} rows")
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode() if pa.types.is_string(column.type) else column
    if not pa.types.is_dictionary(column.type) or not pa.types.is_string(column.type.value_type):
        raise ValueError(f"names are stored as {column.type}")
    found = [np.empty(0, np.int64)]
    for chunk in column.chunks:
        indices = chunk.indices.to_numpy()
        lookup = np.zeros(len(chunk.dictionary), np.int64)
        for index in np.unique(indices).tolist():  # a dictionary may list names that no row bears
            name = chunk.dictionary[index].as_py()
            if name not in names:
                names.append(name)
            lookup[index] = names.index(name)
        found.append(lookup[indices])
    return np.concatenate(found)


def _layer_group(file: str, facts: Facts, column: pa.ChunkedArray) -> LayerGroup:
    nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    nested |= pa.types.is_fixed_size_list(column.type)
    if not nested or not pa.types.is_integer(column.type.value_type):
        nothing = facts.take(np.zeros(len(facts.row), np.bool_))
        return LayerGroup(nothing, np.empty((0, 0), np.int64), Counter(), 0, str(column.type), file)
    rows = column.combine_chunks()
    rows = pa.concat_arrays(rows.chunks) if isinstance(rows, pa.ChunkedArray) else rows
    length = pc.fill_null(pc.list_value_length(rows), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = pc.list_flatten(rows)
    if flat.null_count:  # an id that is missing inside a row
        length[np.repeat(np.arange(len(length)), np.maximum(length, 0))[flat.is_null().to_numpy(False)]] = -1
    present, counts = np.unique(length[length >= 0], return_counts=True)
    widths = Counter({int(width): int(count) for width, count in zip(present, counts, strict=True)})
    width = widths.most_common(1)[0][0] if widths else 0
    kept = length == width
    if not kept.all():
        rows, facts = rows.filter(pa.array(kept)), facts.take(kept)
        flat = pc.list_flatten(rows)
    ids = flat.to_numpy(zero_copy_only=False).reshape(-1, width) if width else np.empty((0, 0), np.int64)
    facts = facts if width else facts.take(np.zeros(len(facts.row), np.bool_))
    return LayerGroup(facts, ids, widths, int((length < 0).sum()), None, file)
