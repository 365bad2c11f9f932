"""Routing statistics of traces: what the solver optimises and the predictors are fitted from.

What each file holds: docs/formats/tables.md.

Axes: V vocabulary, E experts, K experts a token, M early-gate candidates, N sample rows, C entries. Every count is kept
apart for the fit and the validation part; choices are made on fit against validation, and what is served is refitted on
both. `smoe_profiles.table_writer` writes them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.errors import InputError, reason
from smoe_profiles.parquet import read_parquet
from smoe_profiles.tensors import Shape, check_arrays, encode_header, read_shard
from smoe_profiles.trace import PHASES, ExpertIds, TraceLayer, read_layers, schema, to_numpy

FIT_PARTS = ("fit", "validation")
NO_NEIGHBOUR = np.iinfo(np.uint32).max
SAFETENSORS_DTYPES = {
    "int64": "I64", "int32": "I32", "uint32": "U32", "uint16": "U16", "int16": "I16", "uint8": "U8",
    "float64": "F64", "float32": "F32", "float16": "F16",
}  # fmt: skip

Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
Early = tuple[ExpertIds, npt.NDArray[np.float16]]
MOST_COUNTED = 1 << 48
"""Counts below this: sums of them, times an expert's number, stay inside 64 bits."""


@dataclass(frozen=True)
class Counts:
    """Token-expert counts in coordinate form, sorted by (token_id, expert); all [C]."""

    token_id: UInt32Array
    expert: npt.NDArray[np.uint16]
    count: Int64Array


@dataclass(frozen=True)
class Samples:
    """Blocks of consecutive rows of one part, the same rows in every layer.

    token_id: [N], UNKNOWN_TOKEN where it is not known; experts: [N, K]; block_start: [B + 1], block b is rows
    block_start[b] .. block_start[b + 1]; phase: [N] index into PHASES, source: [B] the source of each block, both None
    in tables of before they were kept; early: ids and logits of the early gate, [N, M] both, zeros and NaN in rows
    where it was not asked; None where it never was.
    """

    token_id: UInt32Array
    experts: ExpertIds
    block_start: Int64Array
    phase: npt.NDArray[np.int16] | None = None
    early: Early | None = None
    source: tuple[str, ...] | None = None


def count_tokens(token_id: UInt32Array, experts: ExpertIds, num_experts: int) -> Counts:
    """How often each token id used each expert. token_id: [N]; experts: [N, K]. Cost: a sort of N * K keys.

    >>> counts = count_tokens(np.array([5, 5, 9], np.uint32), np.array([[0, 2], [2, 3], [0, 1]], np.uint16), 4)
    >>> [counts.token_id.tolist(), counts.expert.tolist(), counts.count.tolist()]
    [[5, 5, 5, 9, 9], [0, 2, 3, 0, 1], [1, 2, 1, 1, 1]]
    """
    keys = token_id.astype(np.int64)[:, None] * num_experts + experts
    unique, count = np.unique(keys, return_counts=True)
    return Counts(
        (unique // num_experts).astype(np.uint32),
        (unique % num_experts).astype(np.uint16),
        count.astype(np.int64),
    )


def add_counts(one: Counts, other: Counts) -> Counts:
    """The counts of two disjoint parts or shards together. Cost: one walk over both."""
    from smoe_profiles.counting import add_sorted

    width = 1 + int(max(one.expert.max(initial=0), other.expert.max(initial=0)))
    lists = [(part.token_id.astype(np.int64) * width + part.expert, part.count) for part in (one, other)]
    keys, count = (np.empty(len(one.count) + len(other.count), np.int64) for _ in range(2))
    filled = add_sorted(keys, count, *lists)
    keys, count = keys[:filled], count[:filled]
    return Counts((keys // width).astype(np.uint32), (keys % width).astype(np.uint16), count)


def save_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]], metadata: dict[str, str] | None = None) -> None:
    """Named arrays as one safetensors file; the same arrays and metadata give the same bytes.

    Wider items come first, so that every array is aligned.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    entries = [(name, SAFETENSORS_DTYPES[array.dtype.name], array.shape, array.nbytes) for name, array in ordered]
    with path.open("wb") as file:
        file.write(encode_header(metadata or {}, entries))
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).tobytes())


def load_arrays(path: Path, expected: Mapping[str, Shape] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Named arrays of a safetensors file; the header is checked first. expected: what must be there, and of what shape.

    Raises InputError for a damaged file, or an array that is missing or of another type or shape.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    check_arrays(read_shard(path), expected or {})
    try:
        arrays: dict[str, npt.NDArray[Any]] = load(path.read_bytes())
    except (SafetensorError, KeyError, TypeError, ValueError) as error:  # a type that NumPy does not have
        raise InputError(f"{path} cannot be read as arrays ({reason(error)}).") from error
    return arrays


@dataclass(frozen=True)
class Tables:
    """Published tables, read layer by layer."""

    artefact: Artefact
    layers: tuple[TraceLayer, ...]
    vocab_size: int

    def counts(self, layer: TraceLayer, parts: Sequence[str] = FIT_PARTS) -> Counts:
        """Token-expert counts of the given parts together."""
        table = read_entries(counts_path(self.artefact.path, layer), self._limits(layer, "token_id", "expert"))
        total: Counts | None = None
        for part in parts:
            rows = table.filter(pc.equal(table["split"], part))
            found = Counts(
                rows["token_id"].to_numpy(), rows["expert"].to_numpy(), rows["count"].to_numpy().astype(np.int64)
            )
            total = found if total is None else add_counts(total, found)
        assert total is not None
        return total

    def statistics(self, layer: TraceLayer) -> dict[str, Int64Array]:
        """popularity [2, E], coactivation [2, E, E] and, after the first layer, transitions [2, E', E]; fit first."""
        experts, before = layer.num_experts, self._before(layer)
        shapes: dict[str, Shape] = {"popularity": ("I64", 2, experts), "coactivation": ("I64", 2, experts, experts)}
        if before is not None:
            shapes["transitions"] = ("I64", 2, before, experts)
        return _not_negative(statistics_path(self.artefact.path, layer), shapes)

    def onegram(self, layer: TraceLayer) -> Int64Array | None:
        """[2, E', E] counts by the top expert one MoE layer before; what the 2-gram backs off to. None: first layer."""
        path, shape = onegram_path(self.artefact.path, layer), ("I64", 2, self._before(layer), layer.num_experts)
        return _not_negative(path, {"onegram": shape})["onegram"] if path.exists() else None

    def bigram(self, layer: TraceLayer) -> dict[str, Int64Array] | None:
        """The 2-gram's entries, [C] each: first, second, expert, count; both parts. None: first or second layer."""
        path = bigram_path(self.artefact.path, layer)
        if not path.exists():
            return None
        table = read_entries(path, self._limits(layer, "first", "second", "expert"))
        return {name: table[name].to_numpy().astype(np.int64) for name in ("first", "second", "expert", "count")}

    def _before(self, layer: TraceLayer, steps: int = 1) -> int | None:
        """E of the MoE layer so many before; None where there is none."""
        place = self.layers.index(layer) - steps
        return self.layers[place].num_experts if place >= 0 else None

    def _limits(self, layer: TraceLayer, *names: str) -> dict[str, int | None]:
        limits = {
            "token_id": self.vocab_size,
            "expert": layer.num_experts,
            "second": self._before(layer),
            "first": self._before(layer, 2),
        }
        return {name: limits[name] for name in names}

    def vocabulary(self) -> tuple[Int64Array, UInt32Array]:
        """occurrences [2, V] (fit, validation) and neighbour [V]."""
        path, size = self.artefact.path / VOCABULARY, self.vocab_size
        arrays = _not_negative(path, {"occurrences": ("I64", 2, size), "neighbour": ("U32", size)})
        neighbour = arrays["neighbour"]
        if (neighbour[neighbour != NO_NEIGHBOUR] >= size).any():
            raise InputError(f"{path} names a neighbour outside the vocabulary of {size} ids.")
        return arrays["occurrences"], neighbour

    def samples(self, part: str) -> Iterator[Samples]:
        """The sample blocks of one part, layer by layer."""
        path = self.artefact.path / SAMPLES
        table = read_parquet(path, *sample_schemas(self.layers))
        table = table.filter(pc.equal(table["split"], part))
        if not len(table):
            raise InputError(f"{path} holds no sample of the part {part}; make the tables again.")
        block = table["block"].to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(block[1:] != block[:-1]) + 1, [len(block)]]).astype(np.int64)
        phase = phase_codes(table["phase"]) if "phase" in table.column_names else None
        source = tuple(table["source"].take(starts[:-1]).to_pylist()) if "source" in table.column_names else None
        for layer in self.layers:
            experts = to_numpy(table[layer.column]).astype(np.uint16)
            if experts.size and experts.max() >= layer.num_experts:
                raise InputError(f"{path}: layer {layer.id} names expert {experts.max()} of {layer.num_experts}.")
            early: Early | None = None
            if layer.early_columns[0] in table.column_names:
                ids, logits = (to_numpy(table[name]) for name in layer.early_columns)
                early = ids.astype(np.uint16), logits
            yield Samples(table["token_id"].to_numpy(), experts, starts, phase, early, source)


VOCABULARY = "vocabulary.safetensors"
SAMPLES = "samples.parquet"


def counts_path(folder: Path, layer: TraceLayer) -> Path:
    return folder / f"counts_{layer.label}.parquet"


def bigram_path(folder: Path, layer: TraceLayer) -> Path:
    return folder / f"bigram_{layer.label}.parquet"


def statistics_path(folder: Path, layer: TraceLayer) -> Path:
    return folder / f"statistics_{layer.label}.safetensors"


def onegram_path(folder: Path, layer: TraceLayer) -> Path:
    return folder / f"onegram_{layer.label}.safetensors"


def phase_codes(column: pa.ChunkedArray) -> npt.NDArray[np.int16]:
    """A column of phases as indices into PHASES, [N]."""
    codes: npt.NDArray[np.int16] = pc.index_in(column.cast(pa.string()), pa.array(PHASES)).to_numpy().astype(np.int16)
    return codes


def _not_negative(path: Path, expected: Mapping[str, Shape]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of counts."""
    arrays = load_arrays(path, expected)
    for name in expected:
        if arrays[name].min(initial=0) < 0:
            raise InputError(f"{path}: {name} holds {arrays[name].min()}; counts were expected.")
    return arrays


def read_entries(path: Path, limits: Mapping[str, int | None]) -> pa.Table:
    """Counts of tables/ with their keys, and the part where token ids are keys. limits: a key -> what it lies below.

    Raises InputError for a damaged file, or a key that is out of bounds.
    """
    most_rows = len(FIT_PARTS) * prod(limit or 1 for limit in limits.values())
    table = read_parquet(path, entry_schema(limits), most_rows=most_rows)
    check_entries(path, {name: table[name].to_numpy() for name in (*limits, "count")}, limits)
    return table


def entry_schema(keys: Iterable[str]) -> pa.Schema:
    """The columns of counts with these keys."""
    columns = {name: pa.uint32() if name == "token_id" else pa.uint16() for name in keys} | {"count": pa.uint64()}
    if "token_id" in columns:
        columns["split"] = pa.dictionary(pa.int8(), pa.string())
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def check_entries(path: Path, entries: Mapping[str, npt.NDArray[Any]], limits: Mapping[str, int | None]) -> None:
    """Raises InputError for a key or count that is out of bounds."""
    for name, limit in {**limits, "count": MOST_COUNTED}.items():
        values = entries[name]
        if limit is not None and values.size and values.max() >= limit:
            raise InputError(f"{path} holds {name} {values.max()}; values below {limit} were expected.")


def sample_schemas(layers: Sequence[TraceLayer]) -> tuple[pa.Schema, pa.Schema]:
    """What samples.parquet always has, and what it has since it was kept or where the early gate was asked."""
    names, whole = pa.dictionary(pa.int8(), pa.string()), schema(layers, early=True)
    always = [("split", names), ("block", pa.uint32()), ("token_id", pa.uint32())]
    always += [(layer.column, pa.list_(pa.uint16(), layer.top_k)) for layer in layers]
    later = [pa.field("phase", names, nullable=False), pa.field("source", pa.string(), nullable=False)]
    later += [whole.field(name) for layer in layers for name in layer.early_columns]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in always]), pa.schema(later)


def open_tables(path: Path, *, hashes: bool = False) -> Tables:
    """Open tables/. Raises InputError if it is missing, damaged or of another kind.

    >>> tables = open_tables(folder / "tables")  # folder: a working folder, -C
    >>> layer = tables.layers[0]
    >>> tables.statistics(layer)["popularity"].shape
    (2, 32)
    >>> int(tables.counts(layer).count.sum()) == layer.top_k * sum(tables.artefact.parameters["rows"].values())
    True
    """
    artefact = open_artefact(path, "tables", hashes=hashes)
    return Tables(artefact, *read_layers(artefact))
