"""Which rows of some traces go into which table: parts, sources, sample blocks, a shard's share.

Axes: N rows of all traces, numbered trace after trace; n rows of one row group; V vocabulary; B blocks of a part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smoe_profiles.counting import NOT_COUNTED, number_blocks
from smoe_profiles.errors import InputError
from smoe_profiles.parquet import open_parquet
from smoe_profiles.split import PARTS
from smoe_profiles.tables import FIT_PARTS, Int64Array, UInt32Array
from smoe_profiles.trace import UNKNOWN_TOKEN, Trace, to_numpy

BLOCK_ROWS = 1024
MAX_BLOCKS = {"fit": 48, "validation": 16}
MIN_BLOCKS = {"fit": 1, "validation": 8}


@dataclass(frozen=True)
class Share:
    """Shard `number` (from 1) of `of`: an equal run of a trace's rows, wherever its files and row groups end."""

    number: int = 1
    of: int = 1

    def bounds(self, rows: int) -> tuple[int, int]:
        return rows * (self.number - 1) // self.of, rows * self.number // self.of


@dataclass(frozen=True)
class Sampled:
    """Sample rows of one part: their numbers among all rows, rising, and the block of each; [rows of B blocks] both."""

    row: Int64Array
    block: Int64Array


@dataclass(frozen=True)
class RowFacts:
    """What of a row is needed at every layer, on disk. Rows are those of the share, from 0."""

    folder: Path

    def append(self, part: npt.NDArray[np.uint8], token_id: UInt32Array) -> None:
        self._write("part", part)
        self._write("token_id", token_id)

    def part(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.fromfile(self.folder / "part", np.uint8, stop - start, offset=start)

    def token_id(self, start: int, stop: int) -> UInt32Array:
        return np.fromfile(self.folder / "token_id", np.uint32, stop - start, offset=4 * start)

    def arrange(self, bounds: Sequence[tuple[int, int]], counted: UInt32Array, vocab: int) -> None:
        """Put the rows of each run in the order in which token counts take them, once for all layers.

        counted: [S] ids; the place of a counted row is that of its id, validation rows after all of fit.
        """
        slot = np.full(vocab + 1, NOT_COUNTED, np.int32)
        slot[counted] = np.arange(len(counted))
        for start, stop in bounds:
            part, token_id = self.part(start, stop), self.token_id(start, stop)
            place = slot[np.minimum(token_id, vocab)]
            taken = (place != NOT_COUNTED) & (part < len(FIT_PARTS))
            key = np.where(taken, place + part.astype(np.int32) * len(counted), np.iinfo(np.int32).max)
            order = np.argsort(key).astype(np.uint32)
            self._write("order", order)
            self._write("place", np.where(taken, key, NOT_COUNTED)[order].astype(np.int32))

    def arranged(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], UInt32Array]:
        """Places and order of a run that was arranged, [n] both."""
        place = np.fromfile(self.folder / "place", np.int32, stop - start, offset=4 * start)
        return place, np.fromfile(self.folder / "order", np.uint32, stop - start, offset=4 * start)

    def _write(self, name: str, column: npt.NDArray[Any]) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(column.tobytes())


@dataclass(frozen=True)
class Survey:
    """Everything known of the rows before their experts are read.

    trace_groups: how many row groups each trace has; group_start: [groups + 1] the first row of each; rows: by part,
    of all traces; sources: of fit and validation rows; occurrences: [2, V] of the share's rows, known ids only;
    samples: by part, of all traces; first, stop: the share's rows.
    """

    traces: tuple[Trace, ...]
    trace_groups: tuple[int, ...]
    group_start: Int64Array
    rows: dict[str, int]
    sources: list[str]
    occurrences: Int64Array
    samples: dict[str, Sampled]
    first: int
    stop: int
    facts: RowFacts

    def groups(
        self, columns: Sequence[str], optional: Sequence[str] = (), *, samples: Int64Array, share: bool = False
    ) -> Iterator[tuple[int, pa.Table]]:
        """Row groups that hold any of the sample rows or, if `share`, any row of the share: (first row, columns).

        optional: columns that are left out where a trace has none of them.
        """
        wanted = set(np.unique(self._group_of(samples)).tolist())
        if share and self.first < self.stop:
            bounds = self._group_of(np.array([self.first, self.stop - 1]))
            wanted |= set(range(int(bounds[0]), int(bounds[1]) + 1))
        number = 0
        for trace, count in zip(self.traces, self.trace_groups, strict=True):
            mine = sorted(group - number for group in wanted if number <= group < number + count)
            names = [*columns, *(optional if has_early(trace) else ())]
            for group, table in zip(mine, trace.groups(names, only=frozenset(mine)), strict=True):
                yield int(self.group_start[number + group]), table
            number += count

    def runs(self) -> list[tuple[int, int]]:
        """The share's rows of each row group that has any, counted from the share's first."""
        edges = np.unique(np.clip(self.group_start, self.first, self.stop)) - self.first
        return list(pairwise(edges.tolist()))

    def _group_of(self, rows: Int64Array) -> Int64Array:
        return np.searchsorted(self.group_start, rows, side="right") - 1

    @property
    def has_early(self) -> bool:
        return any(has_early(trace) for trace in self.traces)


def has_early(trace: Trace) -> bool:
    """Whether a trace has the early gate's columns."""
    files = [file for file in sorted(trace.artefact.manifest["files"]) if file.endswith(".parquet")]
    if not files:
        return False
    return trace.layers[0].early_columns[0] in open_parquet(trace.artefact.path / files[0]).schema_arrow.names


def choose_blocks(blocks: int, wanted: int, seed: int) -> Int64Array:
    """Which of a part's blocks are kept: evenly spaced from a seeded offset. Returns [min(wanted, blocks)], rising."""
    wanted = min(wanted, blocks)
    offset = np.random.default_rng(seed).random()
    return np.floor((np.arange(wanted) + offset) * blocks / max(wanted, 1)).astype(np.int64)


@dataclass
class _Blocks:
    """A part's rows cut into runs of one source, at most BLOCK_ROWS long, as they stream by."""

    state: Int64Array = field(default_factory=lambda: np.zeros(3, np.int64))
    rows: int = 0

    def number(self, source: npt.NDArray[np.int32]) -> Int64Array:
        block = np.empty(len(source), np.int64)
        number_blocks(source, BLOCK_ROWS, self.state, block)
        self.rows += len(source)
        return block

    @property
    def count(self) -> int:
        return int(self.state[0])


@dataclass
class _Names:
    """Sources by number; the same name in another trace is another number, as rows of two traces are no run."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)

    def codes(self, column: pa.ChunkedArray, trace: int) -> npt.NDArray[np.int32]:
        keys = [(trace, str(name)) for name in _dictionary(column)]
        local = np.array([self.numbers.setdefault(key, len(self.numbers)) for key in keys], np.int32)
        return local[_indices(column)]


def survey_rows(traces: Sequence[Trace], folder: Path, share: Share, vocab: int, seed: int) -> Survey:
    """Read token ids, parts and sources of all rows, and parts and sources again; facts of the share go to `folder`.

    Raises InputError for a token id outside the vocabulary, a part without rows, or rows that the manifest does not
    know of. Memory: one row group.
    """
    first, stop = share.bounds(sum(trace.total_rows for trace in traces))
    facts, names = RowFacts(folder), _Names()
    blocks = {part: _Blocks() for part in FIT_PARTS}
    occurrences = np.zeros((len(FIT_PARTS), vocab), np.int64)
    starts, groups, used = [0], [0] * len(traces), np.zeros(0, np.int64)
    for number, trace in enumerate(traces):
        for table in trace.groups(["token_id", "split", "source"]):
            part, source = _part_codes(table["split"], trace), names.codes(table["source"], number)
            token_id = to_numpy(table["token_id"]).astype(np.uint32)
            _check_ids(trace, token_id[part < len(FIT_PARTS)], vocab)
            for code, name in enumerate(FIT_PARTS):
                blocks[name].number(source[part == code])
            used = np.union1d(used, source[part < len(FIT_PARTS)])
            mine = slice(max(first - starts[-1], 0), max(stop - starts[-1], 0))
            facts.append(part[mine], token_id[mine])
            occurrences += _occurrences(part[mine], token_id[mine], vocab)
            starts.append(starts[-1] + len(part))
            groups[number] += 1
        if starts[-1] != sum(other.total_rows for other in traces[: number + 1]):
            raise InputError(f"{trace.artefact.path} holds other rows than its manifest says; record it again.")
    rows = {part: blocks[part].rows for part in FIT_PARTS}
    _check_parts(traces, rows)
    return Survey(
        traces=tuple(traces),
        trace_groups=tuple(groups),
        group_start=np.array(starts, np.int64),
        rows=rows,
        sources=sorted({name for (_, name), code in names.numbers.items() if code in set(used.tolist())}),
        occurrences=occurrences,
        samples=_sample_rows(traces, names, {part: blocks[part].count for part in FIT_PARTS}, rows, seed),
        first=first,
        stop=stop,
        facts=facts,
    )


def _check_ids(trace: Trace, token_id: UInt32Array, vocab: int) -> None:
    known = token_id[token_id != UNKNOWN_TOKEN]
    if known.size and known.max() >= vocab:
        raise InputError(f"{trace.artefact.path} holds token id {known.max()}; its vocabulary has {vocab} entries.")


def _check_parts(traces: Sequence[Trace], rows: dict[str, int]) -> None:
    if not all(rows.values()):
        where = " and ".join(str(trace.artefact.path) for trace in traces)
        raise InputError(
            f"{where}: {rows['fit']} fit and {rows['validation']} validation rows; tables need both. "
            "Record with --split hash or --split fit."
        )


def _occurrences(part: npt.NDArray[np.uint8], token_id: UInt32Array, vocab: int) -> Int64Array:
    counts = [
        np.bincount(token_id[(part == code) & (token_id != UNKNOWN_TOKEN)], minlength=vocab)
        for code in range(len(FIT_PARTS))
    ]
    return np.stack(counts).astype(np.int64)


def _sample_rows(
    traces: Sequence[Trace], names: _Names, count: dict[str, int], rows: dict[str, int], seed: int
) -> dict[str, Sampled]:
    """A second walk over parts and sources that finds the rows of the chosen blocks."""
    few = {part: rows[part] < MIN_BLOCKS[part] * BLOCK_ROWS for part in FIT_PARTS}
    chosen = {part: choose_blocks(count[part], count[part] if few[part] else MAX_BLOCKS[part], seed) for part in rows}
    blocks = {part: _Blocks() for part in FIT_PARTS}
    found: dict[str, list[tuple[Int64Array, Int64Array]]] = {part: [] for part in FIT_PARTS}
    start = 0
    for number, trace in enumerate(traces):
        for table in trace.groups(["split", "source"]):
            codes, source = _part_codes(table["split"], trace), names.codes(table["source"], number)
            for code, part in enumerate(FIT_PARTS):
                mine = np.flatnonzero(codes == code)
                block = blocks[part].number(source[mine])
                place = np.searchsorted(chosen[part], block)
                kept = np.append(chosen[part], -1)[place] == block
                found[part].append((start + mine[kept], place[kept]))
            start += len(codes)
    joined = {part: [np.concatenate(column) for column in zip(*found[part], strict=True)] for part in FIT_PARTS}
    return {
        part: Sampled(row, _equal_blocks(rows[part], MIN_BLOCKS[part]) if few[part] else block)
        for part, (row, block) in joined.items()
    }


def _equal_blocks(rows: int, blocks: int) -> Int64Array:
    """The block of every row of a part too short for whole ones."""
    edges = np.linspace(0, rows, min(blocks, rows) + 1).astype(np.int64)
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def _part_codes(column: pa.ChunkedArray, trace: Trace) -> npt.NDArray[np.uint8]:
    """A split column as indices into PARTS, [n]."""
    names = _dictionary(column)
    unknown = set(names) - set(PARTS)
    if unknown:
        raise InputError(f"{trace.artefact.path} names a part {min(unknown)!r}; {', '.join(PARTS)} are known.")
    return np.array([PARTS.index(name) for name in names], np.uint8)[_indices(column)]


def _dictionary(column: pa.ChunkedArray) -> list[str]:
    chunk = column.unify_dictionaries().chunk(0) if column.num_chunks else None
    return [] if chunk is None else [str(name) for name in chunk.dictionary.to_pylist()]


def _indices(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    chunks = column.unify_dictionaries().chunks
    return np.concatenate([np.empty(0, np.int64), *(chunk.indices.to_numpy().astype(np.int64) for chunk in chunks)])
