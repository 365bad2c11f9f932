"""Small sound files of every kind that smoe reads, made by smoe itself and by the writers of tests/engine_writers.py.

Everything is held in memory, path below the folder -> bytes, so that a case costs a few small writes.
"""

import gzip
import json
import lzma
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save

from smoe_profiles.artefact import publish
from smoe_profiles.choices import Level
from smoe_profiles.levels import write_level
from smoe_profiles.tables import save_arrays
from smoe_profiles.trace import TraceLayer
from tests.engine_writers import FORMATS, exflow_trace, model_folder, npz_trace, routing
from tests.profiles.conftest import IDENTITY, random_rows, trace_parameters
from tests.profiles.tables_by_hand import early_rows, publish_rows, shard, whole

Files = dict[str, bytes]
LENGTHS = (30, 25, 40, 20, 30, 20, 30, 20, 25, 20, 31, 17)
VOCAB = 50
ROWS = 75
LAYERS = [TraceLayer(layer, 8, 2) for layer in (1, 2, 3)]


def held(folder: Path) -> Files:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def smoe(*arguments: object) -> None:
    """One command, which must succeed."""
    from smoe_cli.app import run

    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = run([str(argument) for argument in arguments])
    assert code == 0, f"{arguments}: {out.getvalue()}"


def working_folder(folder: Path) -> Files:
    """A trace of an imported routing, its tables, a placement with everything in it, and an evaluation."""
    made = folder / "made"
    smoe("import", *npz_trace(folder, routing(lengths=LENGTHS)), "-C", made, "-q")
    smoe("build-tables", "-C", made, "-q")
    smoe("cocluster", "--ep", 4, "--effort", "fast", "--jobs", 1, "-C", made, "-q")
    smoe("evaluate", "-C", made, "-q", "--batch", 32)
    return held(made)


def traces(folder: Path) -> Files:
    """One trace a level; the one of level `token` has the early gate's columns and its record, in two files."""
    generator = np.random.default_rng(0)
    rows = random_rows(generator, ROWS, LAYERS, VOCAB)
    rows = replace(rows, early=early_rows(generator, ROWS, LAYERS))
    publish_rows(folder / "token", LAYERS, [rows], vocab_size=VOCAB, group=25, file=50, early=True)
    for level, keys in (
        (Level.TOKEN_COUNT, ("token_id", "expert")),
        (Level.PAIR, ("expert", "other")),
        (Level.COUNT, ("expert",)),
    ):
        with publish(folder / level.value, "trace", parameters={}, model=IDENTITY) as draft:
            for layer in LAYERS:
                entries = {key: generator.integers(0, 8, 30) for key in keys} | {"count": generator.integers(1, 9, 30)}
                write_level(draft.path, layer, level, {"fit": entries, "heldout": entries})
            rows_of = {"fit": 70, "validation": 0, "heldout": 70}
            draft.parameters |= trace_parameters(LAYERS, rows_of, VOCAB) | {"level": level.value}
    return _of_unknown_model(held(folder))


def _of_unknown_model(files: Files) -> Files:
    """Manifests that do not say whose routers were recorded, so that nobody looks for the model."""
    manifests = {name: json.loads(content) for name, content in files.items() if name.endswith("manifest.json")}
    for manifest in manifests.values():
        manifest["model"] |= {"router_sha256": None}
    return files | {name: json.dumps(manifest).encode() for name, manifest in manifests.items()}


def gate_folder(folder: Path) -> None:
    """`linear/` as smoe profile --early-gate writes it, of random numbers."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    rows, recent, width, experts, inputs = 24, 2, 4, 8, 6
    features = inputs + experts + recent * width + 1
    parts = ("validation", "heldout")
    ids = {f"{part}.recent": generator.integers(0, VOCAB, (rows, recent)).astype(np.uint32) for part in parts}
    save_arrays(folder / "rows.safetensors", ids)
    save_arrays(
        folder / "embedding.safetensors", {"embedding": generator.normal(size=(VOCAB + 1, width)).astype(np.float16)}
    )
    for layer in LAYERS:
        x, y = generator.normal(size=(60, features)), generator.normal(size=(60, experts))
        arrays = {"xx": x.T @ x, "xy": x.T @ y, "yy": (y * y).sum(axis=0)}
        for part in parts:
            arrays[f"{part}.inputs"] = generator.normal(size=(rows, inputs)).astype(np.float16)
            for name in ("early", "logits"):
                arrays[f"{part}.{name}"] = generator.normal(size=(rows, experts)).astype(np.float16)
            chosen = generator.random((rows, experts)).argsort(axis=1)[:, :2]
            arrays[f"{part}.experts"] = chosen.astype(np.uint16)
        save_arrays(folder / f"layer_{layer.label}.safetensors", arrays)


def gated_tables(folder: Path) -> Files:
    """Tables of a trace with the early gate's record, and the two shards of the same trace without."""
    generator = np.random.default_rng(2)
    trace = publish_rows(folder / "trace", LAYERS, [random_rows(generator, ROWS, LAYERS, VOCAB)], vocab_size=VOCAB)
    for number in (1, 2):
        shard(folder / f"tables-{number}-of-2", [trace], number, 2)
    gate_folder(trace.artefact.path / "linear")
    whole(folder / "tables", trace)
    shutil.rmtree(folder / "trace")
    return _of_unknown_model(held(folder))


def model(folder: Path) -> Files:
    """A checkpoint in two shards that holds what smoe reads of one before it moves weights: routers and embedding."""
    path = model_folder(folder / "model", routing())
    generator = np.random.default_rng(3)
    tensors = {
        f"model.layers.{layer}.mlp.gate.weight": generator.normal(size=(8, 32)).astype(np.float32)
        for layer in (1, 2, 3)
    }
    tensors["model.embed_tokens.weight"] = generator.normal(size=(VOCAB, 32)).astype(np.float16)
    shards = {"model-1.safetensors": sorted(tensors)[:2], "model-2.safetensors": sorted(tensors)[2:]}
    for name, keys in shards.items():
        (path / name).write_bytes(save({key: tensors[key] for key in keys}, {"format": "pt"}))
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return held(path)


def dumps(folder: Path) -> Files:
    """What each engine writes, below a folder of the format's name."""
    for name, form in FORMATS.items():
        (folder / name).mkdir()
        form.write(folder / name, routing())
    (folder / "exflow").mkdir()
    exflow_trace(folder / "exflow", routing(top_k=1))
    logger = {"ids": routing().experts, "batch_size": np.array([20, 10, 25]), "prompt_len": np.array([20, 5, 20])}
    (folder / "npz logger").mkdir()
    (folder / "npz logger" / "logger.npz").write_bytes(_archive(logger))
    return held(folder)


def _archive(members: dict[str, np.ndarray]) -> bytes:
    buffer = BytesIO()
    np.savez(buffer, **members)
    return buffer.getvalue()


def engine_placements(folder: Path, made: Files) -> Files:
    """The placement of a working folder, exported to every engine, and as a NumPy archive."""
    from smoe_cli.engines.choices import Target
    from smoe_cli.engines.engine_map import EngineMap, ModelLayers
    from smoe_cli.engines.files import WRITERS

    table = pq.read_table(BytesIO(made["placement-ep4/placement.parquet"]))
    slots = table["logical"].to_numpy().astype(np.int64).reshape(3, 8)
    layers = ModelLayers((1, 2, 3), 8, 4, 0, "deepseek_v2")
    for target, (_, write, suffix) in WRITERS.items():
        write(folder / f"{Target(target).value}{suffix}", EngineMap(slots, (1, 2, 3), num_ranks=4), layers)
    to_rank = np.tile(np.arange(8) // 2, (3, 1))
    np.savez(folder / "archive.npz", expert_to_rank=to_rank, layer_ids=np.array([1, 2, 3]))
    return held(folder)


def prompts() -> Files:
    """Data sets of two documents, and requests."""
    texts, ids = ["one two", "three [four]"], [[1, 2, 3], [4, 5]]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    chat = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]
    rows = pa.table({"input_ids": ids, "attention_mask": [[1, 1, 0], [1, 1]]})
    parquet = BytesIO()
    pq.write_table(rows, parquet)
    return {
        "texts.jsonl": lines,
        "texts.jsonl.gz": gzip.compress(lines),
        "chats.jsonl": (json.dumps({"conversations": chat}) + "\n" + json.dumps({"conversations": chat})).encode(),
        "ids.jsonl": "".join(json.dumps({"input_ids": row}) + "\n" for row in ids).encode(),
        "plain.txt": "\n".join(texts).encode(),
        "rows.parquet": parquet.getvalue(),
        "ids.npz": _archive({"input_ids": np.array([[1, 2, 3], [4, 5, 6]]), "other": np.arange(5)}),
    }


def requests() -> Files:
    lines = [json.dumps({"timestamp_ms": 100 * n, "input_length": 5 + n, "output_length": n}) for n in range(6)]
    seconds = [json.dumps({"t_s": 0.5 * n, "input_length": 5, "output_length": 2}) for n in range(6)]
    text = "\n".join(lines).encode()
    return {
        "requests.jsonl": text,
        "seconds.jsonl": "\n".join(seconds).encode(),
        "requests.jsonl.gz": gzip.compress(text),
        "requests.jsonl.xz": lzma.compress(text),
    }


def settings() -> Files:
    """Hardware models, costs between ranks, configs."""
    cost = 1.0 - np.eye(4)
    matrix = BytesIO()
    np.save(matrix, cost)
    shipped = Path(__file__).parents[2] / "smoe_cli" / "hardware" / "pcie.json"
    toml = """dir = "out"
quiet = true
[cocluster]
ep = 4
effort = "fast"
mix = ["a=1", "b=2"]
theta = 0.1
[models]
json = true
"""
    return {
        "hardware.json": shipped.read_bytes(),
        "bench.json": json.dumps({"workloads": [], "hardware": json.loads(shipped.read_bytes())}).encode(),
        "cost.json": json.dumps(cost.tolist()).encode(),
        "cost.npy": matrix.getvalue(),
        "config.toml": toml.encode(),
    }


def torch_threads() -> None:
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
