"""Sample blocks of tables: runs of consecutive rows, the same in every layer.

Axes: N sample rows, fit before validation; K experts a row, M early-gate candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smoe_profiles.errors import InputError
from smoe_profiles.parquet import read_parquet
from smoe_profiles.table_rows import Sampled, Survey
from smoe_profiles.tables import FIT_PARTS, SAMPLES, Int64Array, phase_codes, sample_schemas
from smoe_profiles.trace import PHASES, TraceLayer, schema, to_numpy

FACTS = ("token_id", "phase", "source")
NAMES = {"split": FIT_PARTS, "phase": PHASES}


@dataclass(frozen=True)
class SampleRows:
    """Which rows are samples: their numbers among all rows, their part and block; all [N], fit before validation."""

    row: Int64Array
    part: npt.NDArray[np.int8]
    block: npt.NDArray[np.uint32]


def share_samples(survey: Survey) -> SampleRows:
    """The blocks that begin in the survey's share, each whole."""
    kept = {part: _begins_in(sampled, survey.first, survey.stop) for part, sampled in survey.samples.items()}
    return SampleRows(
        np.concatenate([survey.samples[part].row[kept[part]] for part in FIT_PARTS]),
        np.repeat(np.arange(len(FIT_PARTS), dtype=np.int8), [kept[part].sum() for part in FIT_PARTS]),
        np.concatenate([survey.samples[part].block[kept[part]] for part in FIT_PARTS]).astype(np.uint32),
    )


def _begins_in(sampled: Sampled, first: int, stop: int) -> npt.NDArray[np.bool_]:
    _, start, length = np.unique(sampled.block, return_index=True, return_counts=True)
    begin = sampled.row[start]
    return np.repeat((begin >= first) & (begin < stop), length)


def write_samples(path: Path, survey: Survey, samples: SampleRows, experts: Sequence[npt.NDArray[Any]]) -> None:
    """samples.parquet. experts: per layer [N, K], of the sample rows."""
    facts = _read_facts(survey, samples.row)
    columns = {"split": samples.part, "block": samples.block, **{name: facts[name] for name in FACTS}}
    for layer, rows in zip(survey.traces[0].layers, experts, strict=True):
        columns[layer.column] = pa.FixedSizeListArray.from_arrays(rows.reshape(-1).astype(np.uint16), layer.top_k)
    columns |= {name: facts[name] for name in facts.column_names if name not in FACTS}
    _write(path, pa.table(columns))


def merge_samples(path: Path, shards: Sequence[Path], layers: Sequence[TraceLayer]) -> None:
    """The blocks of all shards, given in order, as one samples.parquet."""
    tables = [read_parquet(shard / SAMPLES, *sample_schemas(layers)) for shard in shards]
    if any(table.column_names != tables[0].column_names for table in tables):
        raise InputError(f"{shards[0]} and another shard hold samples of different columns; make them again.")
    runs = [_coded(table.filter(pc.equal(table["split"], part))) for part in FIT_PARTS for table in tables]
    _write(path, pa.concat_tables(runs))


def _coded(table: pa.Table) -> pa.Table:
    """Names as the codes they are written from."""
    for name, names in NAMES.items():
        codes = pc.index_in(table[name].cast(pa.string()), pa.array(names)).cast(pa.int8())
        table = table.set_column(table.column_names.index(name), name, codes)
    return table


def _write(path: Path, table: pa.Table) -> None:
    """Write coded columns; lists get one type, as what Parquet gave back names its elements otherwise."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        if pa.types.is_fixed_size_list(column.type):
            columns[name] = column.cast(pa.list_(column.type.value_type, column.type.list_size))
    for name, names in NAMES.items():
        columns[name] = pa.DictionaryArray.from_arrays(columns[name], pa.array(names))
    pq.write_table(pa.table(columns), path, compression="zstd")


def _read_facts(survey: Survey, row: Int64Array) -> pa.Table:
    """What samples.parquet says of each row but its experts, [N]; early columns are null where a trace has none."""
    layers = survey.traces[0].layers
    early = [name for layer in layers for name in layer.early_columns if survey.has_early]
    whole = schema(layers, early=True)
    known = {"token_id": pa.uint32(), "phase": pa.int8(), "source": pa.string()}
    fields = [*map(pa.field, known, known.values()), *(whole.field(name) for name in early)]
    pieces, places = [pa.schema(fields).empty_table()], [np.empty(0, np.int64)]
    for start, table in survey.groups(FACTS, early, samples=row):
        place = np.flatnonzero((row >= start) & (row < start + len(table)))
        table = table.take(pa.array(row[place] - start))
        columns = {name: table[name] for name in early if name in table.column_names}
        columns["token_id"] = pa.array(to_numpy(table["token_id"]).astype(np.uint32))
        columns["phase"] = pa.array(phase_codes(table["phase"]).astype(np.int8))
        columns["source"] = table["source"].cast(pa.string())
        missing = {field.name: pa.nulls(len(table), field.type) for field in fields if field.name not in columns}
        pieces.append(pa.table([(columns | missing)[field.name] for field in fields], schema=pa.schema(fields)))
        places.append(place)
    return pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places))))
