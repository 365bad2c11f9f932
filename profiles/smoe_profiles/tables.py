"""Routing statistics of traces: what the solver optimises and the predictors are fitted from (design 3).

Axes: V vocabulary, E experts, K experts a token, M early-gate candidates, N sample rows, C entries. Every count is kept
apart for the fit and the validation part; choices are made on fit against validation, and what is served is refitted on
both. `smoe_profiles.table_writer` writes them.
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
from smoe_profiles.errors import InputError
from smoe_profiles.tensors import encode_header, read_shard
from smoe_profiles.trace import PHASES, ExpertIds, TraceLayer, read_layers, to_numpy

FIT_PARTS = ("fit", "validation")
NO_NEIGHBOUR = np.iinfo(np.uint32).max
SAFETENSORS_DTYPES = {
    "int64": "I64", "int32": "I32", "uint32": "U32", "uint16": "U16", "int16": "I16", "uint8": "U8",
    "float64": "F64", "float32": "F32", "float16": "F16",
}  # fmt: skip

Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
Early = tuple[ExpertIds, npt.NDArray[np.float16]]


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
    """How often each token id used each expert. token_id: [N]; experts: [N, K]. Cost: a sort of N * K keys."""
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


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Named arrays of a safetensors file; the header is checked first."""
    from safetensors.numpy import load

    read_shard(path)
    arrays: dict[str, npt.NDArray[Any]] = load(path.read_bytes())
    return arrays


@dataclass(frozen=True)
class Tables:
    """Published tables, read layer by layer."""

    artefact: Artefact
    layers: tuple[TraceLayer, ...]
    vocab_size: int

    def counts(self, layer: TraceLayer, parts: Sequence[str] = FIT_PARTS) -> Counts:
        """Token-expert counts of the given parts together."""
        table = read_table(counts_path(self.artefact.path, layer))
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
        return load_arrays(statistics_path(self.artefact.path, layer))

    def onegram(self, layer: TraceLayer) -> Int64Array | None:
        """[2, E', E] counts by the top expert one MoE layer before; what the 2-gram backs off to. None: first layer."""
        path = onegram_path(self.artefact.path, layer)
        return load_arrays(path)["onegram"] if path.exists() else None

    def bigram(self, layer: TraceLayer) -> dict[str, Int64Array] | None:
        """The 2-gram's entries, [C] each: first, second, expert, count; both parts. None: first or second layer."""
        path = bigram_path(self.artefact.path, layer)
        if not path.exists():
            return None
        table = read_table(path)
        return {name: table[name].to_numpy().astype(np.int64) for name in ("first", "second", "expert", "count")}

    def vocabulary(self) -> tuple[Int64Array, UInt32Array]:
        """occurrences [2, V] (fit, validation) and neighbour [V]."""
        arrays = load_arrays(self.artefact.path / VOCABULARY)
        return arrays["occurrences"], arrays["neighbour"]

    def samples(self, part: str) -> Iterator[Samples]:
        """The sample blocks of one part, layer by layer."""
        table = read_table(self.artefact.path / SAMPLES)
        table = table.filter(pc.equal(table["split"], part))
        block = table["block"].to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(block[1:] != block[:-1]) + 1, [len(block)]]).astype(np.int64)
        phase = phase_codes(table["phase"]) if "phase" in table.column_names else None
        source = tuple(table["source"].take(starts[:-1]).to_pylist()) if "source" in table.column_names else None
        for layer in self.layers:
            experts = to_numpy(table[layer.column]).astype(np.uint16)
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


def read_table(path: Path) -> pa.Table:
    """A Parquet file of tables/. Raises InputError if it is damaged."""
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({error}).") from error


def open_tables(path: Path, *, hashes: bool = False) -> Tables:
    artefact = open_artefact(path, "tables", hashes=hashes)
    return Tables(artefact, *read_layers(artefact))
