"""Traces and tables for tests, and what tables should hold, counted by loops."""

from collections import Counter
from unittest.mock import patch

import numpy as np

from smoe_profiles.artefact import publish
from smoe_profiles.split import PARTS
from smoe_profiles.table_rows import Share
from smoe_profiles.table_writer import SHARD, merge_shards, order_shards, write_shard, write_tables
from smoe_profiles.tables import FIT_PARTS, open_tables
from smoe_profiles.trace import EarlyRows, Trace, open_trace
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.conftest import IDENTITY, SOURCES, trace_parameters


def publish_rows(
    path, layers, batches, *, vocab_size=64, group=65_536, file=2**20, sources=SOURCES, early=False, **facts
):
    """A trace of the given batches in row groups and files of the given size, opened. facts: of its manifest."""
    with (
        patch("smoe_profiles.trace_writer.ROW_GROUP", group),
        patch("smoe_profiles.trace_writer.PART_ROWS", file),
        publish(path, "trace", parameters=facts, model=IDENTITY) as draft,
    ):
        writer = TraceWriter(draft.path, layers, sources, early=early)
        for rows in batches:
            writer.append(rows)
        writer.close()
        draft.parameters |= trace_parameters(layers, writer.rows, vocab_size)
    return open_trace(path)


def early_rows(generator, count, layers):
    """Early-gate candidates of every row."""
    return EarlyRows(
        [
            np.stack([generator.permutation(layer.num_experts)[: layer.num_early] for _ in range(count)]).astype(
                np.uint16
            )
            for layer in layers
        ],
        [generator.normal(size=(count, layer.num_early)).astype(np.float16) for layer in layers],
    )


def whole(path, traces, model=None, seed=0, **options):
    """tables/ of some traces, opened."""
    traces = [traces] if isinstance(traces, Trace) else traces
    parents = [trace.artefact for trace in traces]
    done = []
    with publish(path, "tables", parameters={}, model=IDENTITY, seed=seed, parents=parents, force=True) as draft:
        draft.parameters |= write_tables(draft.path, traces, model, seed, done.append, **options)
    assert sum(done) == len(traces[0].layers)
    return open_tables(path, hashes=True)


def shard(path, traces, number, of, seed=0, **options):
    """One shard of some traces' tables, opened."""
    from smoe_profiles.artefact import open_artefact

    parents = [trace.artefact for trace in traces]
    with publish(path, SHARD, parameters={}, model=IDENTITY, seed=seed, parents=parents) as draft:
        draft.parameters |= write_shard(draft.path, traces, Share(number, of), seed, lambda _: None, **options)
    return open_artefact(path, SHARD, hashes=True)


def merged(path, shards, traces, seed=0, **options):
    """The shards' tables, opened."""
    ordered = order_shards(shards)
    parents = [trace.artefact for trace in traces]
    with publish(path, "tables", parameters={}, model=IDENTITY, seed=seed, parents=parents) as draft:
        draft.parameters |= merge_shards(draft.path, ordered, None, lambda _: None, **options)
    return open_tables(path, hashes=True)


def contents(path):
    """Every file's bytes but run.json's."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "run.json"
    }


def of_part(rows, part):
    return rows.split == PARTS.index(part)


def in_tables(rows):
    return np.logical_or.reduce([of_part(rows, part) for part in FIT_PARTS])


def counted(tokens, experts):
    return dict(Counter((int(t), int(e)) for t, row in zip(tokens, experts, strict=True) for e in row))


def as_counter(counts):
    return {
        (int(token), int(expert)): int(count)
        for token, expert, count in zip(counts.token_id, counts.expert, counts.count, strict=True)
    }


def blocks_by_hand(source, block_rows, max_blocks, min_blocks, seed):
    """Start and stop rows of a part's sample blocks, [B, 2]. source: [N] the data set of each row."""
    rows = len(source)
    if rows < min_blocks * block_rows:
        edges = np.linspace(0, rows, min(min_blocks, rows) + 1).astype(np.int64)
        return np.stack([edges[:-1], edges[1:]], axis=1)
    starts = [0, *[row for row in range(1, rows) if source[row] != source[row - 1]]]
    blocks = []
    for start, stop in zip(starts, [*starts[1:], rows], strict=True):
        blocks += [(begin, min(begin + block_rows, stop)) for begin in range(start, stop, block_rows)]
    wanted = min(max_blocks, len(blocks))
    offset = np.random.default_rng(seed).random()
    return np.array([blocks[int((number + offset) * len(blocks) / wanted)] for number in range(wanted)])
