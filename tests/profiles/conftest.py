"""Shared by the tests of smoe_profiles: tiny checkpoints, and traces published from arrays."""

import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from smoe_profiles.artefact import publish
from smoe_profiles.split import PARTS
from smoe_profiles.trace import Rows, Trace, TraceLayer, open_trace
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.tiny_models import cached_model

os.environ["HF_HUB_OFFLINE"] = "1"

SOURCES = ("prose", "code")
IDENTITY = {"family": "none", "vocab_size": 64, "layers": [], "router_sha256": "0" * 64, "map_sha256": None}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(name): the folder of a tiny checkpoint, built once."""
    base = tmp_path_factory.getbasetemp()
    return lambda name: cached_model(base, name)


def publish_trace(path: Path, layers: list[TraceLayer], batches: list[Rows], vocab_size: int = 64) -> Trace:
    """A trace artefact of the given rows, opened."""
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        writer = TraceWriter(draft.path, layers, SOURCES)
        for rows in batches:
            writer.append(rows)
        writer.close()
        draft.parameters |= trace_parameters(layers, writer.rows, vocab_size)
    return open_trace(path)


def trace_parameters(layers: list[TraceLayer], rows: dict[str, int], vocab_size: int = 64) -> dict[str, object]:
    return {
        "level": "token",
        "ordered": True,
        "layers": [asdict(layer) for layer in layers],
        "vocab_size": vocab_size,
        "rows": rows,
    }


def random_rows(
    generator: np.random.Generator, count: int, layers: list[TraceLayer], vocab_size: int = 64, first_sequence: int = 0
) -> Rows:
    """Rows of sequences of five tokens, parts and sources mixed."""
    sequence = first_sequence + np.arange(count) // 5
    experts = [
        np.stack([generator.permutation(layer.num_experts)[: layer.top_k] for _ in range(count)]).astype(np.uint16)
        for layer in layers
    ]
    return Rows(
        sequence=sequence.astype(np.uint32),
        position=(np.arange(count) % 5).astype(np.uint32),
        token_id=generator.integers(0, vocab_size, count).astype(np.uint32),
        phase=np.zeros(count, np.int16),
        source=(sequence // 3 % 2).astype(np.int16),
        split=np.array(
            [PARTS.index(("fit", "heldout", "fit", "validation")[number % 4]) for number in sequence], np.int16
        ),
        experts=experts,
        weights=[
            np.sort(generator.random((count, layer.top_k)).astype(np.float16), axis=1)[:, ::-1].astype(np.float32)
            for layer in layers
        ],
    )
