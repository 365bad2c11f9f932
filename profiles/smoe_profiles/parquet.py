"""Parquet files of artefacts, opened without believing them: whatever is wrong is an InputError that names the file.

Types are held against the schema that smoe writes, since a narrowing or a null would shift or wrap ids unnoticed. Sizes
are held against bounds before anything is read: a run of equal values takes no room in a file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from smoe_profiles.errors import InputError, reason
from smoe_profiles.unpacking import check_expansion

MOST_ROWS = 1 << 24
"""Rows of a row group at most; smoe writes groups of 64k rows, and of 1M entries."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What pyarrow says of a damaged file, as an InputError."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({reason(error)}).") from error


def open_parquet(path: Path, columns: Sequence[str] = ()) -> pq.ParquetFile:
    """A file whose pages are checked as they are read. Raises InputError if it lacks a column, or has one twice."""
    with readable(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        # A look at one column's metadata would end the process where its size statistics are damaged (pyarrow 26).
        check_expansion(str(path), path.stat().st_size, sum(group.total_byte_size for group in groups))
    largest = max((group.num_rows for group in groups), default=0)
    for name in columns:
        if names.count(name) != 1:
            raise InputError(f"{path} has {names.count(name) or 'no'} column {name}; one was expected.")
    if largest > MOST_ROWS:
        raise InputError(f"{path} has a row group of {largest} rows; {MOST_ROWS} can be read, write smaller ones.")
    return file


def read_group(file: pq.ParquetFile, path: Path, group: int, schema: pa.Schema) -> pa.Table:
    """The columns of a schema in one row group, each of the schema's very type."""
    with readable(path):
        table = file.read_row_group(group, columns=schema.names)
    return checked(table, path, schema)


def read_parquet(
    path: Path, schema: pa.Schema, optional: pa.Schema | None = None, *, most_rows: int = MOST_ROWS
) -> pa.Table:
    """The columns of a schema in a whole file, and those of `optional` that it has, in the file's order."""
    file = open_parquet(path, schema.names)
    if file.metadata.num_rows > most_rows:
        raise InputError(f"{path} has {file.metadata.num_rows} rows; {most_rows} are possible.")
    names = file.schema_arrow.names
    fields = [*schema, *(field for field in optional or () if names.count(field.name) == 1)]
    fields.sort(key=lambda field: names.index(field.name))
    with readable(path):
        table = file.read(columns=[field.name for field in fields])
    return checked(table, path, pa.schema(fields))


def checked(table: pa.Table, path: Path, schema: pa.Schema) -> pa.Table:
    """The same table. Raises InputError for a column of another type, or with empty rows where none may be."""
    for field in schema:
        column = table[field.name]
        if not _same(column.type, field.type):
            raise InputError(f"{path}: column {field.name} is {column.type}; {field.type} was expected.")
        if column.null_count and not field.nullable:
            raise InputError(f"{path}: column {field.name} has {column.null_count} empty rows.")
        if pa.types.is_dictionary(column.type):
            _check_names(column, path, field.name)
    return table


def _same(found: pa.DataType, expected: pa.DataType) -> bool:
    """Equal but for the width of codes of a dictionary, and of counts."""
    if pa.types.is_dictionary(expected) and pa.types.is_dictionary(found):
        return bool(found.value_type == expected.value_type)
    return bool(found == expected or (expected == pa.uint64() and found == pa.uint32()))


def _check_names(column: pa.ChunkedArray, path: Path, name: str) -> None:
    """Codes without a name count as empty, though Arrow counts them as there."""
    if any(chunk.dictionary.null_count for chunk in column.chunks):
        raise InputError(f"{path}: column {name} has an empty name.")
