"""A trace is read back equal by the readers people have."""

import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smoe_profiles.trace import UNKNOWN_TOKEN, TraceLayer
from tests.profiles.conftest import publish_trace, random_rows

LAYERS = [TraceLayer(1, 8, 2), TraceLayer(3, 300, 3)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """(path of one part, its columns as lists), with unknown token ids and a layer without weights."""
    rows = random_rows(np.random.default_rng(0), 500, LAYERS)
    rows.token_id[3] = UNKNOWN_TOKEN
    folder = tmp_path_factory.mktemp("readers") / "trace"
    publish_trace(folder, LAYERS, [replace(rows, weights=[rows.weights[0], None])])
    path = folder / "part-00000.parquet"
    return path, pq.read_table(path).to_pydict()


def plain(value):
    """Lists of Python numbers, whatever a reader wraps them in."""
    if isinstance(value, np.ndarray | tuple):
        value = list(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def test_duckdb_reads_the_trace_back_equal(trace):
    import duckdb

    path, expected = trace
    rows = duckdb.sql(f"select {', '.join(expected)} from '{path}'").fetchall()
    assert {name: plain([row[i] for row in rows]) for i, name in enumerate(expected)} == expected


def test_polars_reads_the_trace_back_equal(trace):
    import polars as pl

    path, expected = trace
    frame = pl.read_parquet(path)
    assert {name: plain(frame[name].to_list()) for name in expected} == expected


def test_pandas_reads_the_trace_back_equal(trace):
    import pandas as pd

    path, expected = trace
    frame = pd.read_parquet(path, dtype_backend="pyarrow")
    found = {name: plain(pa.array(frame[name]).to_pylist()) for name in expected}
    assert found == expected


def test_datasets_reads_the_trace_back_equal(trace, tmp_path):
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path, expected = trace
    with warnings.catch_warnings():
        found = Dataset.from_parquet(str(path), cache_dir=str(tmp_path))
    assert {name: plain(found[name][:]) for name in expected} == expected
