"""Writing a trace: checked rows into Parquet parts, and a journal from which a killed run goes on.

The journal holds every row since the last finished part file, one Arrow record batch a call of `append`. A run that
starts again over it writes the same parts, byte for byte, as one that was never killed.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from smoe_profiles.artefact import SCRATCH
from smoe_profiles.split import PARTS
from smoe_profiles.trace import PHASES, UNKNOWN_TOKEN, ExpertIds, Rows, TraceLayer, check_layers, schema

ROW_GROUP = 65_536
PART_ROWS = 16 * ROW_GROUP


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
    """Writes rows to `NAME-*.parquet` under a folder, checking each layer's ids on the way.

    appended: calls of `append` so far, those of a killed run that the journal kept included; a caller that goes on
    leaves so many out. rows: rows so far by part.
    """

    def __init__(
        self,
        folder: Path,
        layers: Sequence[TraceLayer],
        sources: Sequence[str],
        *,
        name: str = "part",
        early: bool = False,
    ) -> None:
        self.folder, self.layers, self.name = folder, layers, name
        self._early, self.schema = early, schema(layers, early=early)
        # Halves hardly repeat, so a dictionary only costs. Split into bytes they would shrink; DuckDB reads no such.
        self._coded = [_leaf(field) for field in self.schema if not _holds_halves(field)]
        self._names = {"phase": pa.array(PHASES), "source": pa.array(sources), "split": pa.array(PARTS)}
        self._journal_path = folder / f"{SCRATCH}{name}.journal"
        self.rows = dict.fromkeys(PARTS, 0)
        self.appended = self._part = self._pending_rows = self._written = 0
        self._pending: list[pa.RecordBatch] = []
        self._writer: pq.ParquetWriter | None = None
        self._compressor = ThreadPoolExecutor(max_workers=1)
        self._compressing: Future[None] = self._compressor.submit(lambda: None)
        self._journal: pa.RecordBatchStreamWriter = self._restore()

    def append(self, rows: Rows) -> None:
        """Add rows. Raises InputError for an id outside [0, E + Z) or an expert twice in a row."""
        batch = self._record_batch(rows)
        self._journal.write_batch(batch)
        self._take(batch)

    def close(self) -> None:
        """Write what is pending and finish the last part file. The journal goes when the artefact is published."""
        if self._pending_rows:
            self._flush(self._pending_rows)
        self._finish_part()
        self._compressor.shutdown()
        self._journal.close()

    def _record_batch(self, rows: Rows) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {
            "sequence": pa.array(rows.sequence, pa.uint32()),
            "position": pa.array(rows.position, pa.uint32()),
            "token_id": pa.array(rows.token_id, pa.uint32(), mask=rows.token_id == UNKNOWN_TOKEN),
        }
        for name, dictionary in self._names.items():
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(getattr(rows, name), pa.int16()), dictionary)
        check_layers(rows.experts, self.layers)
        for layer, experts, weights in zip(self.layers, rows.experts, rows.weights, strict=True):
            columns[layer.column] = self._lists(layer.column, experts, len(rows.sequence))
            columns[layer.weight_column] = self._lists(layer.weight_column, weights, len(rows.sequence))
        for index, layer in enumerate(self.layers if self._early else []):
            ids, logits = layer.early_columns
            columns[ids] = self._lists(ids, rows.early.ids[index] if rows.early else None, len(rows.sequence))
            columns[logits] = self._lists(logits, rows.early.logits[index] if rows.early else None, len(rows.sequence))
        return pa.RecordBatch.from_pydict(columns, schema=self.schema)

    def _lists(self, name: str, values: npt.NDArray[Any] | None, count: int) -> pa.Array:
        kind = self.schema.field(name).type
        if values is None:
            return pa.nulls(count, kind)
        flat = np.ascontiguousarray(values.reshape(-1), kind.value_type.to_pandas_dtype())
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind)

    def _take(self, batch: pa.RecordBatch) -> None:
        self.appended += 1
        for part, count in zip(PARTS, np.bincount(batch["split"].indices, minlength=len(PARTS)), strict=True):
            self.rows[part] += int(count)
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self._pending_rows >= ROW_GROUP:
            self._flush(self._pending_rows // ROW_GROUP * ROW_GROUP)

    def _flush(self, count: int) -> None:
        """Write the first `count` pending rows, each row group as one chunk, so that pages do not depend on batches."""
        table = pa.Table.from_batches(self._pending, self.schema).combine_chunks()
        self._pending, self._pending_rows = table.slice(count).to_batches(), self._pending_rows - count
        for start in range(0, count, ROW_GROUP):
            group = table.slice(start, min(ROW_GROUP, count - start))
            self._compress(group)
            if self._written >= PART_ROWS:
                self._finish_part()
                self._journal.close()
                self._journal = self._open_journal(table.slice(start + len(group)).to_batches())

    def _compress(self, group: pa.Table) -> None:
        """Compress a row group while the caller goes on; the one before is finished first."""
        self._compressing.result()
        if self._writer is None:
            path = self.folder / f"{self.name}-{self._part:05d}.parquet"
            self._writer = pq.ParquetWriter(
                path, self.schema, compression="zstd", use_dictionary=self._coded, write_page_checksum=True
            )
        self._compressing = self._compressor.submit(self._writer.write_table, group, row_group_size=ROW_GROUP)
        self._written += len(group)

    def _finish_part(self) -> None:
        self._compressing.result()
        if self._writer is not None:
            self._writer.close()
            self._writer, self._written, self._part = None, 0, self._part + 1

    def _open_journal(
        self, carried: list[pa.RecordBatch], following: Iterable[pa.RecordBatch] = ()
    ) -> pa.RecordBatchStreamWriter:
        """A fresh journal, which takes the old one's name once it holds all rows that are in no finished part.

        carried: what its state counts already; following: what was appended since.
        """
        state = {"part": self._part, "appended": self.appended, "rows": self.rows, "carried": len(carried)}
        fresh = self._journal_path.with_suffix(".journal-new")
        writer = pa.ipc.new_stream(
            pa.OSFile(str(fresh), "wb"),
            self.schema.with_metadata({"state": json.dumps(state)}),
            options=pa.ipc.IpcWriteOptions(compression="lz4"),
        )
        for batch in chain(carried, following):
            writer.write_batch(batch)
        fresh.replace(self._journal_path)
        return writer

    def _restore(self) -> pa.RecordBatchStreamWriter:
        """Take over what a killed run's journal holds; part files that it had not finished are written again."""
        state, batches = _read_journal(self._journal_path)
        carried = list(islice(batches, state["carried"])) if state else []
        if state is None or len(carried) < state["carried"]:
            return self._open_journal([])
        self._part, self.appended, self.rows = state["part"], state["appended"], state["rows"]
        self._journal = self._open_journal(carried, batches)
        self._pending, self._pending_rows = carried, sum(batch.num_rows for batch in carried)
        _, batches = _read_journal(self._journal_path)
        for batch in islice(batches, len(carried), None):
            self._take(batch)
        return self._journal


def _holds_halves(field: pa.Field) -> bool:
    return pa.types.is_fixed_size_list(field.type) and bool(field.type.value_type == pa.float16())


def _leaf(field: pa.Field) -> str:
    """A column's path in the Parquet schema."""
    return f"{field.name}.list.element" if pa.types.is_fixed_size_list(field.type) else str(field.name)


def _read_journal(path: Path) -> tuple[dict[str, Any] | None, Iterator[pa.RecordBatch]]:
    """The journal's state and its whole record batches; a batch cut short by the kill ends them. None: no journal."""
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        return json.loads(reader.schema.metadata[b"state"]), _whole_batches(reader)
    except (OSError, pa.ArrowInvalid):
        return None, iter(())


def _whole_batches(reader: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_next_batch()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return
