"""One layer's tables: counted from a trace, row group by row group, written, and read back to be added up.

Axes: n rows of one row group, N sample rows, K experts a token, E experts of the layer, E' and E'' of the one and two
before it, S token ids that are counted. What is in memory is one layer's counters and one row group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smoe_profiles.counting import (
    NOT_COUNTED,
    add_bigrams,
    add_entries,
    add_pairs,
    add_token_counts,
    add_transitions,
    find_entries,
)
from smoe_profiles.errors import InputError
from smoe_profiles.parquet import open_parquet, read_group
from smoe_profiles.table_rows import Survey
from smoe_profiles.tables import (
    FIT_PARTS,
    Int64Array,
    UInt32Array,
    bigram_path,
    check_entries,
    counts_path,
    entry_schema,
    load_arrays,
    onegram_path,
    save_arrays,
    statistics_path,
)
from smoe_profiles.trace import TraceLayer, check_experts, to_numpy

KEEP_SINGLES = 64
"""Entries of the 2-gram that were seen once are dropped where there are more experts than this."""

ENTRY_GROUP = 1 << 20
"""Entries in a Parquet row group."""

CELLS = 1 << 16
"""Counters that are looked through for entries at a time."""

Experts = npt.NDArray[np.unsignedinteger[Any]]
Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Counters:
    """Many counters, [R, E], each low + 256 high; see `smoe_profiles.counting`."""

    low: npt.NDArray[np.uint8]
    high: npt.NDArray[np.uint32]

    @classmethod
    def zeros(cls, rows: int, experts: int) -> "Counters":
        """Memory is taken as counters are touched: a byte each at first, four more where one passes 255."""
        return cls(np.zeros((rows, experts), np.uint8), np.zeros((rows, experts), np.uint32))


@dataclass(frozen=True)
class LayerCounts:
    """Everything counted at one layer, fit first.

    token_id: [S] counted ids, rising; tokens: [2 S, E]; popularity: [2, E]; coactivation: [2, E, E]; transitions,
    onegram: [2, E', E], by all experts and by the top expert of the layer before; bigrams: [E'' E', E], by the top
    experts of the two layers before, both parts together. None where there is no such layer. sizes: E'', E' and E, as
    far as there are such layers; rows: how many are counted in all, each at most once in any counter.
    """

    token_id: UInt32Array
    tokens: Counters
    popularity: Int64Array
    coactivation: Int64Array
    transitions: Int64Array | None
    onegram: Int64Array | None
    bigrams: Counters | None
    sizes: tuple[int, ...]
    rows: int


def empty_counts(layers: Sequence[TraceLayer], index: int, token_id: UInt32Array, rows: int) -> LayerCounts:
    """Counters at zero."""
    sizes = tuple(layer.num_experts for layer in layers[max(index - 2, 0) : index + 1])
    pairs = [np.zeros((len(FIT_PARTS), *sizes[-2:]), np.int64) if index else None for _ in range(2)]
    return LayerCounts(
        token_id=token_id,
        tokens=Counters.zeros(len(FIT_PARTS) * len(token_id), sizes[-1]),
        popularity=np.zeros((len(FIT_PARTS), sizes[-1]), np.int64),
        coactivation=np.zeros((len(FIT_PARTS), sizes[-1], sizes[-1]), np.int64),
        transitions=pairs[0],
        onegram=pairs[1],
        bigrams=Counters.zeros(sizes[0] * sizes[1], sizes[2]) if len(sizes) == 3 else None,
        sizes=sizes,
        rows=rows,
    )


@dataclass(frozen=True)
class _Column:
    """A layer's experts of the share's rows, plain on disk: cheaper to read again than Parquet."""

    path: Path
    layer: TraceLayer

    def append(self, experts: Experts) -> None:
        with self.path.open("ab") as file:
            file.write(experts.tobytes())

    def read(self, start: int, stop: int) -> Experts:
        kind = np.dtype(self.layer.id_type.to_pandas_dtype())
        width = self.layer.top_k
        flat = np.fromfile(self.path, kind, (stop - start) * width, offset=start * width * kind.itemsize)
        return flat.reshape(-1, width)


def count_layers(
    survey: Survey,
    numbers: range,
    token_id: UInt32Array,
    samples: Int64Array,
    scratch: Path,
    write: Callable[[TraceLayer, LayerCounts], None],
) -> Iterator[Experts]:
    """Count consecutive layers of the survey's share and `write` each, in order; yields its sample rows' experts.

    The survey's facts must be arranged for token_id. samples: [N] row numbers; what is yielded: [N, K]. Counters go
    before the next layer's come, so nobody may keep them. The two layers before the first are read too; nothing else
    is read a second time.
    Raises InputError for an id outside its layer or twice in a row.
    """
    layers = survey.traces[0].layers
    rows = min(survey.stop - survey.first, sum(survey.rows.values()))
    past: list[_Column] = []
    for index in range(max(numbers.start - 2, 0), numbers.stop):
        column = _Column(scratch / layers[index].label, layers[index])
        counts = empty_counts(layers, index, token_id, rows) if index in numbers else None
        sampled = np.empty((len(samples), column.layer.top_k), column.layer.id_type.to_pandas_dtype())
        for row, experts in _read_layer(survey, column.layer, samples if counts else samples[:0]):
            here = (samples >= row) & (samples < row + len(experts))
            sampled[here] = experts[samples[here] - row]
            bounds = np.clip([row, row + len(experts)], survey.first, survey.stop)
            mine = experts[bounds[0] - row : bounds[1] - row] if bounds[0] < bounds[1] else experts[:0]
            column.append(mine)
            if counts and len(mine):
                _add_rows(counts, survey, past, int(bounds[0]), mine)
                if np.diagonal(counts.coactivation, axis1=1, axis2=2).any():  # pairs of two slots: an id twice
                    check_experts(mine, column.layer)
        if counts:
            _make_symmetric(counts)
            write(column.layer, counts)
            del counts
            yield sampled
        if len(past) == 2:
            past[0].path.unlink()
        past = [*past[-1:], column]


def _read_layer(survey: Survey, layer: TraceLayer, samples: Int64Array) -> Iterator[tuple[int, Experts]]:
    """A layer's experts in the share and where samples lie, group by group and checked: (first row, [n, K])."""
    for row, table in survey.groups([layer.column], samples=samples, share=True):
        experts = to_numpy(table[layer.column])
        if experts.size and experts.max() >= layer.num_experts:
            check_experts(experts, layer)
        yield row, experts


def _add_rows(counts: LayerCounts, survey: Survey, past: Sequence[_Column], start: int, experts: Experts) -> None:
    bounds = start - survey.first, start - survey.first + len(experts)
    part = survey.facts.part(*bounds)
    add_token_counts(counts.tokens.low, counts.tokens.high, *survey.facts.arranged(*bounds), experts)
    _add(add_pairs, [counts.popularity, counts.coactivation], part, experts)
    before = [column.read(*bounds) for column in past]
    tops = [np.ascontiguousarray(rows[:, :1]) for rows in before]
    if counts.transitions is not None and counts.onegram is not None:
        _add(add_transitions, [counts.transitions], part, before[-1], experts)
        _add(add_transitions, [counts.onegram], part, tops[-1], experts)
    if counts.bigrams is not None:
        context = tops[0][:, 0].astype(np.uint32) * np.uint32(counts.sizes[1]) + tops[1][:, 0]
        add_bigrams(counts.bigrams.low, counts.bigrams.high, part, context, experts)


def _add(loop: Callable[..., None], totals: Sequence[Int64Array], *rows: npt.NDArray[Any]) -> None:
    """Count rows into narrow counters, which are half the memory to touch, and add those up."""
    narrow = [np.zeros(total.shape, np.uint32) for total in totals]
    loop(*narrow, *rows)
    for total, found in zip(totals, narrow, strict=True):
        total += found


def _make_symmetric(counts: LayerCounts) -> None:
    """From two slots of a row counted once to co-activation: both orders, and each expert with itself."""
    for popularity, pairs in zip(counts.popularity, counts.coactivation, strict=True):
        pairs += pairs.T.copy() + np.diag(popularity)


def write_layer(folder: Path, layer: TraceLayer, counts: LayerCounts, *, whole: bool) -> None:
    """One layer's files. whole: these are all rows, so that rare entries of the 2-gram are dropped; else a shard's."""
    kind = pa.uint32() if counts.rows < 2**32 else pa.uint64()
    tokens = {"token_id": pa.uint32(), "expert": pa.uint16(), "count": kind, "split": _SPLIT}
    _write_entries(counts_path(folder, layer), pa.schema(tokens), _token_entries(counts))
    arrays = {"popularity": counts.popularity, "coactivation": counts.coactivation}
    if counts.transitions is not None and counts.onegram is not None:
        arrays["transitions"] = counts.transitions
        save_arrays(onegram_path(folder, layer), {"onegram": counts.onegram})
    save_arrays(statistics_path(folder, layer), arrays)
    if counts.bigrams is not None:
        names = dict.fromkeys(("first", "second", "expert"), pa.uint16()) | {"count": kind}
        least = 2 if whole and layer.num_experts > KEEP_SINGLES else 1
        _write_entries(bigram_path(folder, layer), pa.schema(names), _bigram_entries(counts, least))


_SPLIT = pa.dictionary(pa.int8(), pa.string())


def _token_entries(counts: LayerCounts) -> Iterator[Columns]:
    for place, expert, found in _entries(counts.tokens, 1):
        split, slot = np.divmod(place, max(len(counts.token_id), 1))
        yield {"token_id": counts.token_id[slot], "expert": expert, "count": found, "split": split.astype(np.int8)}


def _bigram_entries(counts: LayerCounts, least: int) -> Iterator[Columns]:
    assert counts.bigrams is not None
    for context, expert, found in _entries(counts.bigrams, least):
        first, second = np.divmod(context, counts.sizes[1])
        yield {"first": first, "second": second, "expert": expert, "count": found}


def _entries(
    counters: Counters, least: int
) -> Iterator[tuple[Int64Array, npt.NDArray[np.uint16], npt.NDArray[np.uint64]]]:
    """Counters of at least `least` as (row, expert, count), a bounded run of rows at a time."""
    lines, size = counters.low.shape
    run = max(CELLS // size, 1)
    line, expert, found = (np.empty(run * size, kind) for kind in (np.int64, np.uint16, np.uint64))
    for start in range(0, lines, run):
        rows = slice(start, start + run)
        filled = find_entries(counters.low[rows], counters.high[rows], least, line, expert, found)
        yield line[:filled] + start, expert[:filled].copy(), found[:filled].copy()


def _write_entries(path: Path, schema: pa.Schema, pieces: Iterator[Columns]) -> None:
    """One table as Parquet in full row groups, however the pieces come."""
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        pending, written = [schema.empty_table()], False
        for piece in pieces:
            pending.append(_entry_table(piece, schema))
            if sum(map(len, pending)) >= ENTRY_GROUP:
                table = pa.concat_tables(pending).combine_chunks()
                writer.write_table(table.slice(0, ENTRY_GROUP), ENTRY_GROUP)
                pending, written = [table.slice(ENTRY_GROUP)], True
        rest = pa.concat_tables(pending).combine_chunks()
        if len(rest) or not written:
            writer.write_table(rest, ENTRY_GROUP)


def _entry_table(columns: Columns, schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        if field.type == _SPLIT:
            arrays.append(pa.DictionaryArray.from_arrays(columns[field.name], pa.array(FIT_PARTS)))
        else:
            arrays.append(pa.array(columns[field.name].astype(field.type.to_pandas_dtype(), copy=False), field.type))
    return pa.table(arrays, schema=schema)


def token_slots(token_id: UInt32Array, vocab: int) -> npt.NDArray[np.int32]:
    """[V]: the place of each counted id, NOT_COUNTED for the others."""
    slot = np.full(vocab, NOT_COUNTED, np.int32)
    slot[token_id] = np.arange(len(token_id))
    return slot


def add_written(counts: LayerCounts, folder: Path, layer: TraceLayer, slot: npt.NDArray[np.int32]) -> None:
    """Add what `write_layer` wrote for a shard. slot: [V] as `token_slots` gives it.

    Raises InputError for a file that does not hold these counters.
    """
    path, experts = counts_path(folder, layer), counts.sizes[-1]
    for piece in _read_entries(path, {"token_id": len(slot), "expert": experts}):
        place = slot[piece["token_id"]].astype(np.int64)
        kept = place != NOT_COUNTED
        place += piece["part"] * len(counts.token_id)
        _add_entries(counts.tokens, place[kept], piece["expert"][kept], piece["count"][kept])
    totals = {"popularity": counts.popularity, "coactivation": counts.coactivation}
    if counts.transitions is not None and counts.onegram is not None:
        _add_arrays(onegram_path(folder, layer), {"onegram": counts.onegram})
        totals["transitions"] = counts.transitions
    _add_arrays(statistics_path(folder, layer), totals)
    if counts.bigrams is not None:
        limits = dict(zip(("first", "second", "expert"), counts.sizes, strict=True))
        for piece in _read_entries(bigram_path(folder, layer), limits):
            context = piece["first"].astype(np.int64) * counts.sizes[1] + piece["second"]
            _add_entries(counts.bigrams, context, piece["expert"], piece["count"])


def _add_arrays(path: Path, totals: Mapping[str, Int64Array]) -> None:
    arrays = load_arrays(path, {name: ("I64", *total.shape) for name, total in totals.items()})
    for name, total in totals.items():
        total += arrays[name]


def _add_entries(counters: Counters, place: Int64Array, expert: npt.NDArray[Any], count: npt.NDArray[Any]) -> None:
    add_entries(counters.low, counters.high, place, expert.astype(np.uint16), count.astype(np.uint64))


def _read_entries(path: Path, limits: Mapping[str, int]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Entries of a file, one row group at a time, the part of token counts as a code. limits: a key -> its bound."""
    wanted = entry_schema(limits)
    file = open_parquet(path, wanted.names)
    for number in range(file.num_row_groups):
        table = read_group(file, path, number, wanted)
        piece = {name: table[name].to_numpy() for name in (*limits, "count")}
        check_entries(path, piece, limits)
        if "split" in wanted.names:
            part = pc.index_in(table["split"].cast(pa.string()), pa.array(FIT_PARTS))
            if part.null_count:
                raise InputError(f"{path} counts rows of other parts than {' and '.join(FIT_PARTS)}.")
            piece["part"] = part.to_numpy().astype(np.int64)
        yield piece
