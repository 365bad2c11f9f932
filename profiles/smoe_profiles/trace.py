"""The trace: one row a token, with the experts every MoE layer chose, in Parquet (docs/formats/trace.md).

Axes: N rows (tokens), K experts a token, M early-gate candidates, L MoE layers. Column `experts_LL` is
fixed_size_list[K] of u8 (or u16 where ids pass 255), `weights_LL` f16 of the same shape, both sorted by falling weight,
ties by expert id. Lower levels hold one file of counts a layer (`smoe_profiles.levels`).
"""

from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.choices import Level
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.parquet import open_parquet, read_group
from smoe_profiles.split import PARTS

PHASES = ("prefill", "decode")
UNKNOWN_TOKEN = np.iinfo(np.uint32).max
"""Stands in arrays for a token id that is not known; null in Parquet."""

EARLY_FACTOR = 4
"""The early gate keeps this many times K candidates."""

ExpertIds = npt.NDArray[np.uint16]
_HOLDS = {
    Level.TOKEN: frozenset(Level),
    Level.TOKEN_COUNT: frozenset({Level.TOKEN_COUNT, Level.COUNT}),
    Level.PAIR: frozenset({Level.PAIR, Level.COUNT}),
    Level.COUNT: frozenset({Level.COUNT}),
}


@dataclass(frozen=True)
class TraceLayer:
    """One MoE layer of a trace: ids lie in [0, num_experts + num_zero); zero experts compute nothing.

    `stack` names a second MoE stack's prefix, empty for the main one.
    """

    id: int
    num_experts: int
    top_k: int
    stack: str = ""
    num_zero: int = 0

    @property
    def label(self) -> str:
        return f"{self.stack}{self.id:02d}"

    @property
    def column(self) -> str:
        return f"experts_{self.label}"

    @property
    def weight_column(self) -> str:
        return f"weights_{self.label}"

    @property
    def early_columns(self) -> tuple[str, str]:
        return f"early_{self.label}", f"early_logits_{self.label}"

    @property
    def id_type(self) -> pa.DataType:
        return pa.uint8() if self.num_experts + self.num_zero <= 256 else pa.uint16()

    @property
    def num_early(self) -> int:
        return min(self.num_experts, EARLY_FACTOR * self.top_k)


@dataclass(frozen=True)
class EarlyRows:
    """What each layer's router says of the layer's input. ids: per layer [N, M]; logits: per layer [N, M] f16."""

    ids: list[ExpertIds]
    logits: list[npt.NDArray[np.float16]]


@dataclass(frozen=True)
class Rows:
    """A run of trace rows; all [N] but experts, per layer [N, K], and weights, per layer [N, K] or None (not known).

    token_id: UNKNOWN_TOKEN where it is not known; phase: index into PHASES; source: into the writer's sources;
    split: into PARTS. early: None where the early gate was not recorded.
    """

    sequence: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]
    token_id: npt.NDArray[np.uint32]
    phase: npt.NDArray[np.int16]
    source: npt.NDArray[np.int16]
    split: npt.NDArray[np.int16]
    experts: list[ExpertIds]
    weights: Sequence[npt.NDArray[np.floating[Any]] | None]
    early: EarlyRows | None = None


def schema(layers: Sequence[TraceLayer], *, early: bool = False) -> pa.Schema:
    names = pa.dictionary(pa.int16(), pa.string())
    fields = [
        pa.field("sequence", pa.uint32(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("token_id", pa.uint32()),
        *(pa.field(name, names, nullable=False) for name in ("phase", "source", "split")),
    ]
    for layer in layers:
        fields.append(pa.field(layer.column, pa.list_(layer.id_type, layer.top_k), nullable=False))
        fields.append(pa.field(layer.weight_column, pa.list_(pa.float16(), layer.top_k)))
    if early:
        for layer in layers:
            ids, logits = layer.early_columns
            fields.append(pa.field(ids, pa.list_(layer.id_type, layer.num_early)))
            fields.append(pa.field(logits, pa.list_(pa.float16(), layer.num_early)))
    return pa.schema(fields)


def check_experts(experts: npt.NDArray[Any], layer: TraceLayer) -> None:
    """Every row must name K distinct ids in [0, E + Z). experts: [N, K]. Raises InputError naming one that does not."""
    if experts.shape[1] != layer.top_k:
        raise InputError(f"layer {layer.id} gave {experts.shape[1]} experts a token; its config says {layer.top_k}.")
    if experts.size and (experts.min() < 0 or experts.max() >= layer.num_experts + layer.num_zero):
        worst = experts.max() if experts.min() >= 0 else experts.min()
        raise InputError(f"layer {layer.id} holds expert id {worst}; it has {layer.num_experts} experts.")
    twice = np.flatnonzero(repeats(experts))
    if len(twice):
        raise InputError(f"layer {layer.id}, row {twice[0]}: experts {experts[twice[0]].tolist()} repeat an id.")


def repeats(experts: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows name an id twice, [...]. experts: [..., K]; pairs of columns beat sorting each short row."""
    found = np.zeros(experts.shape[:-1], np.bool_)
    columns = np.ascontiguousarray(np.moveaxis(experts, -1, 0))
    for slot in range(1, len(columns)):
        found |= (columns[:slot] == columns[slot]).any(axis=0)
    return found


def check_layers(experts: Sequence[npt.NDArray[Any]], layers: Sequence[TraceLayer]) -> None:
    """`check_experts` of every layer, [N, K] each; layers of one shape are looked at together."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        shapes.setdefault((experts[number].shape[1], layer.num_experts + layer.num_zero), []).append(number)
    for (_, limit), numbers in shapes.items():
        stacked = np.stack([experts[number] for number in numbers])
        sound = not stacked.size or (0 <= stacked.min() <= stacked.max() < limit and not repeats(stacked).any())
        if not sound or any(experts[number].shape[1] != layers[number].top_k for number in numbers):
            for number in numbers:
                check_experts(experts[number], layers[number])


@dataclass(frozen=True)
class Trace:
    """A published trace, read column by column and part by part."""

    artefact: Artefact
    layers: tuple[TraceLayer, ...]
    vocab_size: int
    level: Level = Level.TOKEN

    @property
    def has_token_ids(self) -> bool:
        """Whether any row has a token id; dumps of expert ids alone have none."""
        imported = self.artefact.parameters.get("imported")
        return not isinstance(imported, dict) or bool(imported.get("has_token_ids", True))

    def groups(self, columns: Sequence[str], only: Container[int] | None = None) -> Iterator[pa.Table]:
        """The named columns of every row, one row group after another, in order. Needs level `token`.

        only: numbers of the row groups to read, counted over all files; default: all.
        """
        expected, first = schema(self.layers, early=True), 0
        for name in sorted(self.artefact.manifest["files"]):
            if name.endswith(".parquet"):
                first = yield from _read_groups(self.artefact.path / name, list(columns), expected, first, only)

    def read(self, columns: Sequence[str], part: str) -> dict[str, npt.NDArray[Any]]:
        """Columns of one part's rows, in order: [N] or, for experts and weights, [N, K]; names as str objects.

        An unknown token id reads as UNKNOWN_TOKEN, unknown weights as NaN.
        """
        found: dict[str, list[npt.NDArray[Any]]] = {column: [] for column in columns}
        for table in self.groups([*columns, "split"]):
            kept = table.filter(pc.equal(table["split"], part))
            for column in columns:
                found[column].append(to_numpy(kept[column]))
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

    @property
    def total_rows(self) -> int:
        return sum(self.rows(part) for part in PARTS)


def _read_groups(
    path: Path, columns: list[str], expected: pa.Schema, first: int, only: Container[int] | None
) -> Generator[pa.Table, None, int]:
    """One file's row groups; `first` is the number of its first. Returns the number of the next file's first."""
    file, wanted = open_parquet(path, columns), pa.schema([expected.field(column) for column in columns])
    for group in range(file.num_row_groups):
        if only is None or first + group in only:
            yield read_group(file, path, group, wanted)
    return first + int(file.num_row_groups)


def to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A trace column as an array, [N] or [N, K]; nulls become UNKNOWN_TOKEN, NaN or, of expert ids, zeros."""
    if pa.types.is_fixed_size_list(column.type):
        pieces = [_list_rows(chunk) for chunk in column.chunks]
        empty = np.empty((0, column.type.list_size), column.type.value_type.to_pandas_dtype())
        return np.concatenate([empty, *pieces])
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    elif column.null_count:
        column = column.fill_null(UNKNOWN_TOKEN)
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _list_rows(chunk: pa.FixedSizeListArray) -> npt.NDArray[Any]:
    values = chunk.flatten()  # of null rows there are none
    flat: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(-1, chunk.type.list_size)
    if not chunk.null_count:
        return flat
    filler = np.nan if np.issubdtype(flat.dtype, np.floating) else 0
    rows = np.full((len(chunk), chunk.type.list_size), filler, flat.dtype)
    rows[chunk.is_valid().to_numpy(zero_copy_only=False)] = flat
    return rows


def open_trace(path: Path, *, hashes: bool = False, needs: Level = Level.TOKEN) -> Trace:
    """Open trace/ and check that its level holds what the caller needs.

    >>> trace = open_trace(folder / "trace")  # folder: a working folder, -C
    >>> trace.level.value, [layer.id for layer in trace.layers], trace.vocab_size
    ('token', [11, 12, 13], 686)
    >>> trace.experts(trace.layers[0], "heldout").shape == (trace.rows("heldout"), 4)
    True
    """
    artefact = open_artefact(path, "trace", hashes=hashes)
    level = artefact.parameters.get("level")
    if level not in list(Level):
        raise InputError(f"{artefact.record / 'manifest.json'} names a level {level!r} that this smoe does not know.")
    if needs not in _HOLDS[Level(level)]:
        raise ImpossibleError(
            f"{path} is of level {level}; level {needs} is needed here. Record it with smoe profile, or import a dump "
            "that holds each token's experts."
        )
    return Trace(artefact, *read_layers(artefact), level=Level(level))


def read_layers(artefact: Artefact) -> tuple[tuple[TraceLayer, ...], int]:
    """The layers and vocabulary size an artefact's manifest records. Raises InputError if they are not as written."""
    try:
        layers = tuple(TraceLayer(**layer) for layer in artefact.parameters["layers"])
        numbers = [artefact.parameters["vocab_size"]]
        numbers += [n for layer in layers for n in (layer.id, layer.num_experts, layer.top_k, layer.num_zero)]
        stacks = [layer.stack for layer in layers]
    except (KeyError, TypeError) as error:
        raise InputError(f"{artefact.record / 'manifest.json'} does not describe its layers ({error!r}).") from error
    if not layers or not all(type(n) is int and n >= 0 for n in numbers) or not all(type(s) is str for s in stacks):
        raise InputError(f"{artefact.record / 'manifest.json'} describes impossible layers or vocabulary.")
    return layers, numbers[0]
