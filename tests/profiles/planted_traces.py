"""Traces planted for looking at: rows routed by their token id, and artefacts of whatever columns hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smoe_profiles.artefact import publish
from smoe_profiles.choices import Level
from smoe_profiles.inspection.counts import inspect_counts
from smoe_profiles.inspection.rows import inspect_rows
from smoe_profiles.levels import write_level
from smoe_profiles.split import PARTS
from smoe_profiles.trace import PHASES, Rows, TraceLayer, open_trace
from tests.profiles.conftest import IDENTITY, SOURCES, trace_parameters

FIXTURE = Path(__file__).parents[1] / "fixtures/routing/gptoss20b_layers.npz"
LAYERS = [TraceLayer(1, 16, 3), TraceLayer(4, 12, 2)]
VOCAB = 64
DECODE = PHASES.index("decode")


def quiet(_count):
    pass


def look(trace):
    return (inspect_rows if trace.level is Level.TOKEN else inspect_counts)(trace, quiet)


def routed_rows(seed=0, count=600, layers=LAYERS, vocab=VOCAB, first_sequence=0):
    """Rows whose experts depend on the token id as a router's do, with noise; sequences of 20 tokens, all parts."""
    model, text = np.random.default_rng(99), np.random.default_rng(seed)
    token_id = (vocab * text.random(count) ** 2).astype(np.uint32)
    experts = []
    for layer in layers:
        taste = model.normal(size=(vocab, layer.num_experts))
        scores = taste[token_id] + text.normal(0, 0.6, (count, layer.num_experts))
        experts.append(np.argsort(-scores, axis=1)[:, : layer.top_k].astype(np.uint16))
    sequence = first_sequence + np.arange(count) // 20
    return Rows(
        sequence=sequence.astype(np.uint32),
        position=(np.arange(count) % 20).astype(np.uint32),
        token_id=token_id,
        phase=np.zeros(count, np.int16),
        source=np.zeros(count, np.int16),
        split=np.array([(0, 2, 0, 1)[number % 4] for number in sequence], np.int16),
        experts=experts,
        weights=[None] * len(layers),
    )


def with_experts(rows, index, experts):
    return replace(rows, experts=[experts if i == index else old for i, old in enumerate(rows.experts)])


def plant(path, layers, batches, columns=None, rows=None):
    """A trace artefact of whatever columns hold, one part a batch: what TraceWriter refuses to write.

    columns: by batch, name -> Arrow array in place of the batch's own.
    """
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        total = dict.fromkeys(PARTS, 0)
        for number, batch in enumerate(batches):
            table = arrow_table(layers, batch)
            for name, column in (columns[number] if columns else {}).items():
                table = table.set_column(table.schema.get_field_index(name), name, column)
            pq.write_table(table, draft.path / f"part-{number:05d}.parquet", write_page_checksum=True)
            for code, part in enumerate(PARTS):
                total[part] += int((batch.split == code).sum())
        draft.parameters |= trace_parameters(layers, rows or total, VOCAB)
    return open_trace(path)


def arrow_table(layers, rows):
    names = {"phase": PHASES, "source": SOURCES, "split": PARTS}
    columns = {name: pa.array(getattr(rows, name), pa.uint32()) for name in ("sequence", "position", "token_id")}
    for name, words in names.items():
        columns[name] = pa.array([words[code] for code in getattr(rows, name)], pa.string()).dictionary_encode()
    for layer, experts in zip(layers, rows.experts, strict=True):
        columns[layer.column] = lists(experts, layer.id_type)
    return pa.table(columns)


def lists(ids, kind):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(ids).reshape(-1), kind), ids.shape[1])


def kinds(inspection):
    """What was found, layer by layer."""
    return sorted((finding.layer or "", finding.kind) for finding in inspection.findings)


def message(inspection, kind):
    return next(finding.message for finding in inspection.findings if finding.kind == kind)


def decoding(rows):
    """The second half of every sequence as decode rows."""
    return replace(rows, phase=np.where(rows.position >= 4, DECODE, 0).astype(np.int16))


def lower_trace(path, level, rows, layers=LAYERS):
    """The rows as counts of a lower level."""
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        for index, layer in enumerate(layers):
            parts = {}
            for code, part in enumerate(PARTS):
                here = rows.split == code
                ids, token = rows.experts[index][here].astype(np.int64), rows.token_id[here].astype(np.int64)
                columns = {
                    Level.TOKEN_COUNT: {"token_id": np.repeat(token, layer.top_k), "expert": ids.reshape(-1)},
                    Level.COUNT: {"expert": ids.reshape(-1)},
                    Level.PAIR: {
                        "expert": np.repeat(ids, layer.top_k, axis=1).reshape(-1),
                        "other": np.tile(ids, layer.top_k).reshape(-1),
                    },
                }[level]
                parts[part] = columns | {"count": np.ones(len(columns["expert"]), np.int64)}
            write_level(draft.path, layer, level, parts)
        counts = {part: int((rows.split == code).sum()) for code, part in enumerate(PARTS)}
        draft.parameters |= trace_parameters(layers, counts) | {"level": level.value, "ordered": False}
    return open_trace(path, needs=Level.COUNT)


def renumbered(rows, seed=5):
    """The same rows by a model whose experts are numbered otherwise in every layer."""
    generator = np.random.default_rng(seed)
    return replace(
        rows,
        experts=[generator.permutation(16 if k == 0 else 12)[e].astype(np.uint16) for k, e in enumerate(rows.experts)],
    )


def two_sources(one, other):
    return [replace(one, source=np.zeros(600, np.int16)), replace(other, source=np.ones(600, np.int16))]
