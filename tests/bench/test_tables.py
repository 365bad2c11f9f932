"""How fast tables are counted, what reading costs, and how much memory it takes; `make bench`.

The traces are drawn: ids by Zipf's law, each with 32 favourite experts. Figures belong in docs/results.md.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from time import process_time

import numpy as np
import pytest

from smoe_profiles.counting import add_token_counts
from smoe_profiles.trace import Rows, TraceLayer, to_numpy
from tests.profiles.tables_by_hand import publish_rows

VOCAB, BATCH = 129_280, 65_536
GIB = 1024**3


@dataclass(frozen=True)
class Shape:
    """A router and how many rows and layers of it are drawn."""

    experts: int
    top_k: int
    layers: int
    rows: int

    def trace_layers(self):
        return [TraceLayer(number, self.experts, self.top_k) for number in range(self.layers)]


def draw_rows(generator, shape, first):
    """A batch of rows; distinct experts of a row are a walk over the id's favourites."""
    token_id = np.minimum(VOCAB ** generator.random(BATCH), VOCAB - 1).astype(np.int64) * 7919 % VOCAB
    favourites = min(32, shape.experts)
    experts = []
    for number in range(shape.layers):
        steps = generator.integers(1, favourites // shape.top_k + 1, (BATCH, shape.top_k)).cumsum(axis=1)
        start = generator.integers(0, favourites, (BATCH, 1))
        place = (start + steps) % favourites
        experts.append(((token_id[:, None] * 31 + number * 17 + place * 37) % shape.experts).astype(np.uint16))
    sequence = (first + np.arange(BATCH)) // 512
    return Rows(
        sequence=sequence.astype(np.uint32),
        position=(np.arange(BATCH) % 512).astype(np.uint32),
        token_id=token_id.astype(np.uint32),
        phase=np.zeros(BATCH, np.int16),
        source=(sequence // 3 % 2).astype(np.int16),
        split=np.array([0, 0, 0, 2, 0, 0, 0, 1, 0, 2], np.int16)[sequence % 10],
        experts=experts,
        weights=[None] * shape.layers,
    )


def draw_trace(path, shape):
    generator = np.random.default_rng(0)
    batches = (draw_rows(generator, shape, first) for first in range(0, shape.rows, BATCH))
    return publish_rows(path, shape.trace_layers(), batches, vocab_size=VOCAB)


COUNT = """
import json, resource, sys, tempfile
from pathlib import Path
from time import perf_counter, process_time
import numpy as np
from smoe_profiles.table_layers import Counters
from smoe_profiles.table_writer import write_tables
from smoe_profiles.trace import open_trace
if sys.argv[3] == "touched":
    Counters.zeros = lambda *shape: Counters(np.full(shape, 1, np.uint8), np.full(shape, 1, np.uint32))
trace = open_trace(Path(sys.argv[1]))
for _ in range(2):
    with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
        wall, started = perf_counter(), process_time()
        write_tables(Path(folder), [trace], None, 0, lambda _: None)
        found = {"wall": perf_counter() - wall, "cpu": process_time() - started}
found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(found))
"""


def count_in_a_process(trace, folder, counters="new"):
    """Seconds of the second run of two, so that nothing is compiled in it, and the process' peak memory.

    counters: `touched` begins with all of them used, as rows without end would leave them.
    """
    arguments = [sys.executable, "-c", COUNT, str(trace.artefact.path), str(folder), counters]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, env=environment).stdout)


@pytest.mark.parametrize(
    "shape",
    [Shape(256, 8, 4, 192 * BATCH), Shape(160, 6, 4, 192 * BATCH), Shape(64, 6, 4, 192 * BATCH)],
    ids=lambda shape: f"E{shape.experts}-K{shape.top_k}",
)
def test_tables_end_to_end_on_one_core(shape, tmp_path):
    """Everything: Parquet read and checked, all tables counted and written. Time is the process' own, on all cores."""
    trace = draw_trace(tmp_path / "trace", shape)
    found = count_in_a_process(trace, tmp_path)
    activations = shape.rows * shape.layers * shape.top_k
    started = process_time()
    for layer in trace.layers:
        for table in trace.groups([layer.column]):
            to_numpy(table[layer.column])
    read = process_time() - started
    print(
        f"\nE {shape.experts}, K {shape.top_k}, V {VOCAB}: {activations / found['cpu'] / 1e6:.1f} M activations/s of "
        f"processor time ({activations / found['wall'] / 1e6:.1f} by the clock), reading Parquet once "
        f"{read / found['cpu']:.0%} of it; peak {found['peak'] / GIB:.2f} GiB"
    )
    assert activations / found["cpu"] >= 20e6
    assert found["peak"] <= 1e9


def test_memory_stays_below_a_gigabyte_however_many_rows(tmp_path):
    """Counters take memory as they are touched; with all of them touched, rows can take no more."""
    trace = draw_trace(tmp_path / "trace", Shape(256, 8, 3, 16 * BATCH))
    peak, touched = (count_in_a_process(trace, tmp_path, counters)["peak"] for counters in ("new", "touched"))
    print(f"\nE 256, V {VOCAB}: peak {peak / 1e6:.0f} MB of 1 M rows, {touched / 1e6:.0f} MB of any number")
    assert touched <= 1e9


@pytest.mark.parametrize("shape", [Shape(256, 8, 1, 32 * BATCH), Shape(64, 6, 1, 32 * BATCH)], ids=lambda s: s.experts)
def test_token_counts_against_bincount_of_the_same_keys(shape):
    generator = np.random.default_rng(0)
    batches = [draw_rows(generator, shape, first) for first in range(0, shape.rows, BATCH)]
    order = [np.argsort(rows.token_id).astype(np.uint32) for rows in batches]  # found once for all layers of a trace
    place = [rows.token_id[by_place].astype(np.int32) for rows, by_place in zip(batches, order, strict=True)]
    experts = [rows.experts[0].astype(np.uint8) for rows in batches]
    keys = np.concatenate(
        [(rows.token_id.astype(np.int64)[:, None] * shape.experts + rows.experts[0]).reshape(-1) for rows in batches]
    )
    low, high = (np.zeros((VOCAB, shape.experts), kind) for kind in (np.uint8, np.uint32))

    def ours():
        for rows in zip(place, order, experts, strict=True):
            add_token_counts(low, high, *rows)

    def theirs():
        return np.bincount(keys, minlength=VOCAB * shape.experts)

    ours()
    assert np.array_equal((low + 256 * high.astype(np.int64)).reshape(-1), theirs())
    times = [(timed(ours), timed(theirs)) for _ in range(5)]
    taken, dense = (sorted(column)[2] for column in zip(*times, strict=True))
    rate, ratio = len(keys) / 1e6, dense / taken
    print(f"\nE {shape.experts}: token counts {rate / taken:.0f} M/s, bincount {rate / dense:.0f} M/s: {ratio:.1f}x")
    assert dense >= 2 * taken


def timed(work):
    started = process_time()
    work()
    return process_time() - started
