"""Routing statistics of a trace: what the solver optimises and the predictors are fitted from (design 3).

Axes: V vocabulary, E experts, K experts a token, N sample rows. Every count is kept apart for the fit and the
validation part; choices are made on fit against validation, and what is served is refitted on both. Counts of shards
add up exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.sparse import csr_array

from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.errors import InputError
from smoe_profiles.models import Model, input_embedding
from smoe_profiles.tensors import as_float32, encode_header, read_shard
from smoe_profiles.trace import ExpertIds, Trace, TraceLayer, read_layers

FIT_PARTS = ("fit", "validation")
BLOCK_ROWS = 1024
MAX_BLOCKS = 64
VALIDATION_BLOCKS = 8
NO_NEIGHBOUR = np.iinfo(np.uint32).max
KEEP_SINGLES = 64
SAFETENSORS_DTYPES = {
    "int64": "I64", "int32": "I32", "uint32": "U32", "uint16": "U16", "int16": "I16", "uint8": "U8",
    "float64": "F64", "float32": "F32", "float16": "F16",
}  # fmt: skip

Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Counts:
    """Token-expert counts in coordinate form, sorted by (token_id, expert); all [C]."""

    token_id: UInt32Array
    expert: npt.NDArray[np.uint16]
    count: Int64Array


@dataclass(frozen=True)
class Samples:
    """Blocks of consecutive rows of one part, the same rows in every layer.

    token_id: [N]; experts: [N, K]; block_start: [B + 1], block b is rows block_start[b] .. block_start[b + 1].
    """

    token_id: UInt32Array
    experts: ExpertIds
    block_start: Int64Array


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
    """The counts of two disjoint parts or shards together."""
    width = int(max([*one.expert, *other.expert], default=0)) + 1
    keys = np.concatenate([part.token_id.astype(np.int64) * width + part.expert for part in (one, other)])
    unique, inverse = np.unique(keys, return_inverse=True)
    count = np.zeros(len(unique), np.int64)
    np.add.at(count, inverse, np.concatenate([one.count, other.count]))
    return Counts((unique // width).astype(np.uint32), (unique % width).astype(np.uint16), count)


def joint_counts(before: ExpertIds, after: ExpertIds, num_experts: tuple[int, int]) -> Int64Array:
    """Pairs of experts used by the same row, [E_before, E_after]. before: [N, K], after: [N, K']."""
    return np.asarray((_one_hot(before, num_experts[0]).T @ _one_hot(after, num_experts[1])).todense(), np.int64)


def _one_hot(experts: ExpertIds, num_experts: int) -> csr_array:
    rows, top_k = experts.shape
    pointer = np.arange(0, rows * top_k + 1, top_k)
    ones, flat = np.ones(rows * top_k, np.int64), experts.reshape(-1).astype(np.int64)
    return csr_array((ones, flat, pointer), (rows, num_experts))


def count_bigrams(context: Sequence[ExpertIds], experts: ExpertIds, num_experts: int) -> pa.Table:
    """The expert-level 2-gram: top experts of the two MoE layers before -> counts over this layer's experts.

    context: the top experts two layers and one layer before, [N] each; experts: [N, K]. Entries seen once are
    dropped where E > 64. Columns first, second, expert (u16) and count (u32).
    """
    first, second = context
    base = max(int(first.max(initial=0)), int(second.max(initial=0)), num_experts - 1) + 1
    keys = ((first.astype(np.int64) * base + second) * base)[:, None] + experts
    unique, count = np.unique(keys, return_counts=True)
    if num_experts > KEEP_SINGLES:
        unique, count = unique[count > 1], count[count > 1]
    columns = {"first": unique // base**2, "second": unique // base % base, "expert": unique % base}
    return pa.table(
        {name: pa.array(values.astype(np.uint16)) for name, values in columns.items()}
        | {"count": pa.array(count.astype(np.uint32))}
    )


def choose_blocks(source: npt.NDArray[Any], max_blocks: int, min_blocks: int, seed: int) -> Int64Array:
    """Where sample blocks lie in a part: start and stop rows, [B, 2].

    source: [N] the data set of each row. The part is cut into runs of 1,024 consecutive rows of one source; max_blocks
    of them are taken, evenly spaced from a seeded offset, so that a source gives as many as its share. A part of fewer
    than min_blocks full blocks gives min_blocks equal shorter ones.
    """
    rows = len(source)
    if rows < min_blocks * BLOCK_ROWS:
        edges = np.linspace(0, rows, min(min_blocks, rows) + 1).astype(np.int64)
        return np.stack([edges[:-1], edges[1:]], axis=1)
    borders = np.flatnonzero(source[1:] != source[:-1]) + 1
    starts, stops = np.concatenate([[0], borders]), np.concatenate([borders, [rows]])
    begin = np.concatenate([np.arange(start, stop, BLOCK_ROWS) for start, stop in zip(starts, stops, strict=True)])
    end = np.minimum(begin + BLOCK_ROWS, np.repeat(stops, -(-(stops - starts) // BLOCK_ROWS)))
    wanted = min(max_blocks, len(begin))
    offset = np.random.default_rng(seed).random()
    chosen = np.floor((np.arange(wanted) + offset) * len(begin) / wanted).astype(np.int64)
    return np.stack([begin[chosen], end[chosen]], axis=1).astype(np.int64)


def nearest_neighbours(
    embedding: npt.NDArray[np.float32], seen: npt.NDArray[np.bool_], block: int = 4096
) -> UInt32Array:
    """For every id the id itself if seen, else the seen id of highest cosine, ties to the lower. Returns [V] uint32.

    embedding: [V', H] with V' >= V = len(seen); seen: [V].
    """
    vocab = len(seen)
    neighbour = np.arange(vocab, dtype=np.uint32)
    known = np.flatnonzero(seen)
    if not len(known):
        return np.full(vocab, NO_NEIGHBOUR, np.uint32)
    unit = embedding[:vocab] / np.maximum(np.linalg.norm(embedding[:vocab], axis=1, keepdims=True), 1e-12)
    unknown = np.flatnonzero(~seen)
    for start in range(0, len(unknown), block):
        ids = unknown[start : start + block]
        neighbour[ids] = known[np.argmax(unit[ids] @ unit[known].T, axis=1)]
    return neighbour


def write_tables(
    folder: Path, trace: Trace, model: Model | None, seed: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Write every table of a trace into `folder`, one layer in memory at a time; progress(1) after each layer.

    Returns the parameters for the manifest. Raises InputError if the fit or validation part is empty.
    """
    facts = {part: trace.read(["token_id", "source"], part) for part in FIT_PARTS}
    rows = {part: len(facts[part]["token_id"]) for part in FIT_PARTS}
    if not rows["fit"] or not rows["validation"]:
        raise InputError(
            f"{trace.artefact.path} has {rows['fit']} fit and {rows['validation']} validation rows; tables need both. "
            "Record it with --split hash or --split fit."
        )
    budgets = {"fit": (MAX_BLOCKS - VALIDATION_BLOCKS * 2, 1), "validation": (VALIDATION_BLOCKS * 2, VALIDATION_BLOCKS)}
    blocks = {part: choose_blocks(facts[part]["source"], *budgets[part], seed) for part in FIT_PARTS}
    token_id = {part: facts[part]["token_id"].astype(np.uint32) for part in FIT_PARTS}
    largest = max(int(token_id[part].max()) for part in FIT_PARTS)
    if largest >= trace.vocab_size:
        raise InputError(
            f"{trace.artefact.path} holds token id {largest}; its vocabulary has {trace.vocab_size} entries."
        )
    _write_vocabulary(folder / "vocabulary.safetensors", token_id, trace.vocab_size, model)
    samples = {part: {"token_id": _take(token_id[part], blocks[part])} for part in FIT_PARTS}
    previous: list[dict[str, ExpertIds]] = []
    for index, layer in enumerate(trace.layers):
        experts = {part: trace.experts(layer, part) for part in FIT_PARTS}
        _write_counts(folder / f"counts_{layer.id:02d}.parquet", token_id, experts, layer)
        _write_statistics(folder / f"statistics_{layer.id:02d}.safetensors", experts, previous, trace.layers, index)
        if index >= 2:
            table = count_bigrams(
                [np.concatenate([past[part][:, 0] for part in FIT_PARTS]) for past in previous],
                np.concatenate([experts[part] for part in FIT_PARTS]),
                layer.num_experts,
            )
            pq.write_table(table, folder / f"bigram_{layer.id:02d}.parquet", compression="zstd")
        for part in FIT_PARTS:
            samples[part][layer.column] = _take(experts[part], blocks[part])
        previous = [*previous[-1:], experts]
        progress(1)
    _write_samples(folder / "samples.parquet", samples, blocks, trace.layers)
    return {
        "layers": [asdict(layer) for layer in trace.layers],
        "vocab_size": trace.vocab_size,
        "rows": rows,
        "sources": sorted({str(name) for part in FIT_PARTS for name in np.unique(facts[part]["source"])}),
        "block_rows": BLOCK_ROWS,
        "blocks": {part: len(blocks[part]) for part in FIT_PARTS},
        "neighbours": "embedding" if model else "popularity",
    }


def _take(values: npt.NDArray[Any], blocks: Int64Array) -> npt.NDArray[Any]:
    return np.concatenate([values[start:stop] for start, stop in blocks])


def _write_vocabulary(path: Path, token_id: dict[str, UInt32Array], vocab: int, model: Model | None) -> None:
    occurrences = np.stack([np.bincount(token_id[part], minlength=vocab) for part in FIT_PARTS]).astype(np.int64)
    seen = occurrences.sum(axis=0) > 0
    neighbour = np.where(seen, np.arange(vocab), NO_NEIGHBOUR).astype(np.uint32)
    if model is not None:
        shard, tensor = input_embedding(model)
        neighbour = nearest_neighbours(as_float32(tensor, shard.read(tensor)), seen)
    save_arrays(path, {"occurrences": occurrences, "neighbour": neighbour})


def _write_counts(
    path: Path, token_id: dict[str, UInt32Array], experts: dict[str, ExpertIds], layer: TraceLayer
) -> None:
    parts = [count_tokens(token_id[part], experts[part], layer.num_experts) for part in FIT_PARTS]
    split = np.repeat(np.arange(len(FIT_PARTS), dtype=np.int8), [len(part.count) for part in parts])
    table = pa.table(
        {
            "token_id": np.concatenate([part.token_id for part in parts]),
            "expert": np.concatenate([part.expert for part in parts]),
            "count": np.concatenate([part.count for part in parts]).astype(np.uint32),
            "split": pa.DictionaryArray.from_arrays(split, pa.array(FIT_PARTS)),
        }
    )
    pq.write_table(table, path, compression="zstd")


def _write_statistics(
    path: Path,
    experts: dict[str, ExpertIds],
    previous: list[dict[str, ExpertIds]],
    layers: Sequence[TraceLayer],
    index: int,
) -> None:
    size = layers[index].num_experts
    arrays = {
        "popularity": np.stack([np.bincount(experts[part].reshape(-1), minlength=size) for part in FIT_PARTS]),
        "coactivation": np.stack([joint_counts(experts[part], experts[part], (size, size)) for part in FIT_PARTS]),
    }
    if index:
        sizes = (layers[index - 1].num_experts, size)
        arrays["transitions"] = np.stack([joint_counts(previous[-1][part], experts[part], sizes) for part in FIT_PARTS])
    save_arrays(path, {name: array.astype(np.int64) for name, array in arrays.items()})


def _write_samples(
    path: Path,
    samples: dict[str, dict[str, npt.NDArray[Any]]],
    blocks: dict[str, Int64Array],
    layers: Sequence[TraceLayer],
) -> None:
    lengths = {part: blocks[part][:, 1] - blocks[part][:, 0] for part in FIT_PARTS}
    columns: dict[str, Any] = {
        "split": pa.DictionaryArray.from_arrays(
            np.repeat(np.arange(len(FIT_PARTS), dtype=np.int8), [lengths[part].sum() for part in FIT_PARTS]),
            pa.array(FIT_PARTS),
        ),
        "block": np.concatenate(
            [np.repeat(np.arange(len(lengths[part]), dtype=np.uint32), lengths[part]) for part in FIT_PARTS]
        ),
        "token_id": np.concatenate([samples[part]["token_id"] for part in FIT_PARTS]),
    }
    for layer in layers:
        flat = np.concatenate([samples[part][layer.column].reshape(-1) for part in FIT_PARTS])
        columns[layer.column] = pa.FixedSizeListArray.from_arrays(flat, layer.top_k)
    pq.write_table(pa.table(columns), path, compression="zstd")


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


@dataclass(frozen=True)
class Tables:
    """Published tables, read layer by layer."""

    artefact: Artefact
    layers: tuple[TraceLayer, ...]
    vocab_size: int

    def counts(self, layer: TraceLayer, parts: Sequence[str] = FIT_PARTS) -> Counts:
        """Token-expert counts of the given parts together."""
        table = pq.read_table(self.artefact.path / f"counts_{layer.id:02d}.parquet")
        split = table["split"].cast(pa.string()).to_numpy()
        total: Counts | None = None
        for part in parts:
            rows = table.filter(pa.array(split == part))
            found = Counts(
                rows["token_id"].to_numpy(), rows["expert"].to_numpy(), rows["count"].to_numpy().astype(np.int64)
            )
            total = found if total is None else add_counts(total, found)
        assert total is not None
        return total

    def statistics(self, layer: TraceLayer) -> dict[str, Int64Array]:
        """popularity [2, E], coactivation [2, E, E] and, after the first layer, transitions [2, E', E]; fit first."""
        return load_arrays(self.artefact.path / f"statistics_{layer.id:02d}.safetensors")

    def vocabulary(self) -> tuple[Int64Array, UInt32Array]:
        """occurrences [2, V] (fit, validation) and neighbour [V]."""
        arrays = load_arrays(self.artefact.path / "vocabulary.safetensors")
        return arrays["occurrences"], arrays["neighbour"]

    def samples(self, part: str) -> Iterator[Samples]:
        """The sample blocks of one part, layer by layer."""
        table = pq.read_table(self.artefact.path / "samples.parquet")
        table = table.filter(pa.array(table["split"].cast(pa.string()).to_numpy() == part))
        block = table["block"].to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(block[1:] != block[:-1]) + 1, [len(block)]]).astype(np.int64)
        for layer in self.layers:
            flat = table[layer.column].combine_chunks().flatten().to_numpy().astype(np.uint16)
            yield Samples(table["token_id"].to_numpy(), flat.reshape(-1, layer.top_k), starts)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Named arrays of a safetensors file; the header is checked first."""
    from safetensors.numpy import load

    read_shard(path)
    arrays: dict[str, npt.NDArray[Any]] = load(path.read_bytes())
    return arrays


def open_tables(path: Path, *, hashes: bool = False) -> Tables:
    artefact = open_artefact(path, "tables", hashes=hashes)
    return Tables(artefact, *read_layers(artefact))
