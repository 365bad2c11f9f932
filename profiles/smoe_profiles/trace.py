"""The trace: one row a token, with the experts every MoE layer chose, in Parquet (design 3).

Axes: N rows (tokens), K experts a token, L MoE layers. Column `experts_LL` is fixed_size_list[K] of u8 (or u16 where
E > 256), `weights_LL` f16 of the same shape, both sorted by falling weight, ties by expert id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.split import PARTS

ROW_GROUP = 65_536
PART_ROWS = 16 * ROW_GROUP
LEVEL = "token"

ExpertIds = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class TraceLayer:
    """One MoE layer of a trace; `stack` names a second MoE stack's prefix, empty for the main one."""

    id: int
    num_experts: int
    top_k: int
    stack: str = ""

    @property
    def column(self) -> str:
        return f"experts_{self.stack}{self.id:02d}"

    @property
    def weight_column(self) -> str:
        return f"weights_{self.stack}{self.id:02d}"


@dataclass(frozen=True)
class Rows:
    """A run of trace rows. experts: per layer [N, K] uint16; weights: per layer [N, K] float32; the rest [N]."""

    sequence: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]
    token_id: npt.NDArray[np.uint32]
    source: Sequence[str]
    split: Sequence[str]
    experts: list[ExpertIds]
    weights: list[npt.NDArray[np.float32]]


def schema(layers: Sequence[TraceLayer]) -> pa.Schema:
    names = pa.dictionary(pa.int16(), pa.string())
    fields = [
        pa.field("sequence", pa.uint32(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("token_id", pa.uint32()),
        *(pa.field(name, names, nullable=False) for name in ("phase", "source", "split")),
    ]
    for layer in layers:
        expert = pa.uint8() if layer.num_experts <= 256 else pa.uint16()
        fields.append(pa.field(layer.column, pa.list_(expert, layer.top_k), nullable=False))
        fields.append(pa.field(layer.weight_column, pa.list_(pa.float16(), layer.top_k)))
    return pa.schema(fields)


def sort_by_weight(
    experts: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]
) -> tuple[ExpertIds, npt.NDArray[np.float32]]:
    """Each row by falling weight, ties by expert id, so that bytes do not depend on a kernel's order. [N, K] both."""
    order = np.lexsort((experts, -weights), axis=-1)
    return (
        np.take_along_axis(experts, order, -1).astype(np.uint16),
        np.take_along_axis(weights, order, -1),
    )


class TraceWriter:
    """Writes rows to part files under a folder, checking each layer's ids on the way."""

    def __init__(self, folder: Path, layers: Sequence[TraceLayer]) -> None:
        self.folder, self.layers, self.schema = folder, layers, schema(layers)
        self.rows = dict.fromkeys(PARTS, 0)
        self._writer: pq.ParquetWriter | None = None
        self._written = self._part = self._pending_rows = 0
        self._pending: list[pa.Table] = []

    def append(self, rows: Rows) -> None:
        """Add rows. Raises InputError for an id outside [0, E) or an expert twice in a row."""
        columns: dict[str, pa.Array] = {
            "sequence": pa.array(rows.sequence, pa.uint32()),
            "position": pa.array(rows.position, pa.uint32()),
            "token_id": pa.array(rows.token_id, pa.uint32()),
            "phase": _names(["prefill"] * len(rows.sequence)),
            "source": _names(rows.source),
            "split": _names(rows.split),
        }
        for layer, experts, weights in zip(self.layers, rows.experts, rows.weights, strict=True):
            check_experts(experts, layer)
            columns[layer.column] = _lists(experts, self.schema.field(layer.column).type)
            columns[layer.weight_column] = _lists(weights, self.schema.field(layer.weight_column).type)
        self._pending.append(pa.table(columns, schema=self.schema))
        self._pending_rows += len(rows.sequence)
        for part in PARTS:
            self.rows[part] += sum(name == part for name in rows.split)
        if self._pending_rows >= ROW_GROUP:
            self._flush(self._pending_rows // ROW_GROUP * ROW_GROUP)

    def _flush(self, count: int) -> None:
        table = pa.concat_tables(self._pending).unify_dictionaries()
        for start in range(0, count, ROW_GROUP):
            if self._writer is None:
                path = self.folder / f"part-{self._part:05d}.parquet"
                self._writer = pq.ParquetWriter(path, self.schema, compression="zstd", write_page_checksum=True)
            group = table.slice(start, min(ROW_GROUP, count - start))
            self._writer.write_table(group, row_group_size=ROW_GROUP)
            self._written += len(group)
            if self._written >= PART_ROWS:
                self.close_part()
        self._pending = [table.slice(count)]
        self._pending_rows -= count

    def close_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._written = None, 0
            self._part += 1

    def close(self) -> None:
        """Write what is pending and finish the last part file."""
        if self._pending_rows:
            self._flush(self._pending_rows)
        self.close_part()


def check_experts(experts: npt.NDArray[Any], layer: TraceLayer) -> None:
    """Every row must name K distinct ids in [0, E). experts: [N, K]."""
    if experts.shape[1] != layer.top_k:
        raise InputError(f"layer {layer.id} gave {experts.shape[1]} experts a token; its config says {layer.top_k}.")
    if experts.size and (experts.min() < 0 or experts.max() >= layer.num_experts):
        worst = experts.max() if experts.min() >= 0 else experts.min()
        raise InputError(f"layer {layer.id} holds expert id {worst}; it has {layer.num_experts} experts.")
    ordered = np.sort(experts, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if len(twice):
        raise InputError(f"layer {layer.id}, row {twice[0]}: experts {experts[twice[0]].tolist()} repeat an id.")


def _names(values: Sequence[str]) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode().cast(pa.dictionary(pa.int16(), pa.string()))


def _lists(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    flat = np.ascontiguousarray(values.reshape(-1), kind.value_type.to_pandas_dtype())
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind)


@dataclass(frozen=True)
class Trace:
    """A published trace, read column by column and part by part."""

    artefact: Artefact
    layers: tuple[TraceLayer, ...]
    vocab_size: int

    def _groups(self, columns: list[str]) -> Iterator[pa.Table]:
        for name in sorted(self.artefact.manifest["files"]):
            if name.endswith(".parquet"):
                yield from _read_groups(self.artefact.path / name, [*columns, "split"], schema(self.layers))

    def read(self, columns: Sequence[str], part: str) -> dict[str, npt.NDArray[Any]]:
        """Columns of one part's rows, in order: [N] or, for experts and weights, [N, K]; names as str objects."""
        found: dict[str, list[npt.NDArray[Any]]] = {column: [] for column in columns}
        for table in self._groups(list(columns)):
            kept = table.filter(pc.equal(table["split"], part))
            for column in columns:
                found[column].append(_to_numpy(kept[column]))
        if not all(found.values()):
            raise InputError(f"{self.artefact.path} holds no Parquet rows; the trace is incomplete.")
        return {column: np.concatenate(pieces) for column, pieces in found.items()}

    def experts(self, layer: TraceLayer, part: str) -> ExpertIds:
        """The expert ids of one layer, [N, K] uint16, checked."""
        experts = self.read([layer.column], part)[layer.column].astype(np.uint16)
        check_experts(experts, layer)
        return experts

    def rows(self, part: str) -> int:
        rows = self.artefact.parameters.get("rows")
        if not isinstance(rows, dict) or type(rows.get(part)) is not int:
            raise InputError(f"{self.artefact.record / 'manifest.json'} does not say how many rows {part} has.")
        return int(rows[part])


def _read_groups(path: Path, columns: list[str], expected: pa.Schema) -> Iterator[pa.Table]:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise InputError(f"{path} has no column {min(missing)}; the trace is incomplete.")
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns)
            for column in columns:
                _check_column(path, table[column], expected.field(column))
            yield table
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({error}).") from error


def _check_column(path: Path, column: pa.ChunkedArray, expected: pa.Field) -> None:
    """A column must have the schema's very type: a narrowing or a null would shift or wrap ids unnoticed."""
    same = column.type == expected.type
    if pa.types.is_dictionary(expected.type) and pa.types.is_dictionary(column.type):
        same = column.type.value_type == expected.type.value_type
    if not same:
        raise InputError(f"{path}: column {expected.name} is {column.type}; {expected.type} was expected.")
    if column.null_count and not expected.nullable:
        raise InputError(f"{path}: column {expected.name} has {column.null_count} empty rows.")


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
        pieces = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        flat = np.concatenate(pieces) if pieces else np.empty(0, column.type.value_type.to_pandas_dtype())
        return flat.reshape(-1, width)
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def open_trace(path: Path, *, hashes: bool = False) -> Trace:
    """Open trace/ and check that it is of level `token`."""
    artefact = open_artefact(path, "trace", hashes=hashes)
    level = artefact.parameters.get("level")
    if level != LEVEL:
        raise ImpossibleError(f"{path} is of level {level}; level {LEVEL} is needed here. Record it with smoe profile.")
    return Trace(artefact, *read_layers(artefact))


def read_layers(artefact: Artefact) -> tuple[tuple[TraceLayer, ...], int]:
    """The layers and vocabulary size an artefact's manifest records. Raises InputError if they are not as written."""
    try:
        layers = tuple(TraceLayer(**layer) for layer in artefact.parameters["layers"])
        numbers = [artefact.parameters["vocab_size"], *(n for x in layers for n in (x.id, x.num_experts, x.top_k))]
        stacks = [layer.stack for layer in layers]
    except (KeyError, TypeError) as error:
        raise InputError(f"{artefact.record / 'manifest.json'} does not describe its layers ({error!r}).") from error
    if not layers or not all(type(n) is int and n >= 0 for n in numbers) or not all(type(s) is str for s in stacks):
        raise InputError(f"{artefact.record / 'manifest.json'} describes impossible layers or vocabulary.")
    return layers, numbers[0]
