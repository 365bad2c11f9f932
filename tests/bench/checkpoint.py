"""Regrouping a checkpoint of DeepSeek-V2-Lite's names and counts, against copying and hashing it in one pass.

`python -m tests.bench.checkpoint 0.5 2 8` (sizes in GB; three times that much disk). Hidden sizes are cut to fit.
Each way runs in a process of its own, in turn, three times (large sizes once); printed are medians, the ratio, and the
peak of memory.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from smoe_profiles.tensors import encode_header

REPEATS = 3
LARGE = 4.0
"""GB from which one run must do."""
LAYERS, EXPERTS, VOCABULARY, SHARDS = 27, 64, 102_400, 4
FULL_GB, FULL_HIDDEN, FULL_WIDTH = 31.4, 2048, 1408

PEAK = """
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(json.dumps([seconds, int(peak) * 1024]))
"""
OURS = (
    """
import json, sys
from pathlib import Path
from time import perf_counter
import numpy as np
import smoe_cli.regrouping  # what the command itself holds in memory
from smoe_cli.checkpoint.rewrite import plan_rewrite
from smoe_cli.checkpoint.writer import write_checkpoint
from smoe_profiles.artefact import publish
from smoe_profiles.models import find_model
source, target, jobs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
started = perf_counter()
model = find_model(source)
order = np.stack([np.random.default_rng(layer.id).permutation(layer.num_experts) for layer in model.spec.layers])
rewrite = plan_rewrite(model, order, target)
with publish(target, "checkpoint", parameters={}, model={}, record="smoe", resume={"bench": 1}) as draft:
    draft.hashes |= write_checkpoint(rewrite, draft.path, lambda _: None, jobs)
seconds = perf_counter() - started
"""
    + PEAK
)
PLAIN = (
    """
import hashlib, json, os, sys
from pathlib import Path
from time import perf_counter
source, target = Path(sys.argv[1]), Path(sys.argv[2])
started = perf_counter()
target.mkdir()
for path in sorted(source.iterdir()):
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as reading, (target / path.name).open("xb", buffering=0) as writing:
        while chunk := reading.read(8 << 20):
            digest.update(chunk)
            writing.write(chunk)
        os.fsync(writing.fileno())
seconds = perf_counter() - started
"""
    + PEAK
)


def entries(gigabytes: float) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Names, dtypes, shapes and sizes: all of the model's tensors, hidden sizes cut."""
    share = (gigabytes / FULL_GB) ** 0.5
    hidden, width = (max(64, round(size * share / 32) * 32) for size in (FULL_HIDDEN, FULL_WIDTH))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (576, hidden),
            f"{prefix}.self_attn.kv_a_layernorm.weight": (512,),
            f"{prefix}.self_attn.kv_b_proj.weight": (2 * hidden, 512),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if layer:
            shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, hidden)
        blocks = [f"experts.{expert}." for expert in range(EXPERTS)] + ["shared_experts."] if layer else [""]
        for block in blocks:
            wide = width if block.startswith("experts") else (2 * width if layer else 8 * width)
            for part, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
                shapes[f"{prefix}.mlp.{block}{part}_proj.weight"] = shape
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    return [(name, "BF16", shape, 2 * int(np.prod(shape))) for name, shape in shapes.items()]


def write_model(folder: Path, gigabytes: float) -> tuple[int, int]:
    """The synthetic checkpoint. Returns its size and its largest tensor's, in bytes."""
    folder.mkdir()
    found = entries(gigabytes)
    total, block = sum(nbytes for *_, nbytes in found), np.random.default_rng(0).bytes(64 << 20)
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[] for _ in range(SHARDS)]
    done = 0
    for entry in found:
        shards[done * SHARDS // total].append(entry)
        done += entry[3]
    weight_map = {}
    for number, part in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        weight_map |= dict.fromkeys((entry[0] for entry in part), name)
        with (folder / name).open("wb") as file:
            file.write(encode_header({"format": "pt"}, part))
            for *_, nbytes in part:
                for start in range(0, nbytes, len(block)):
                    file.write(block[: min(len(block), nbytes - start)])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "deepseek_v2", "n_routed_experts": EXPERTS, "num_experts_per_tok": 6, "hidden_size": 64}
    config |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "first_k_dense_replace": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return total, max(nbytes for *_, nbytes in found)


def run(code: str, *arguments: object, target: Path) -> tuple[float, int]:
    """Seconds and peak memory of one process; its output is removed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(target)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def measure(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        total, largest = write_model(source, gigabytes)
        ways = {"copy and hash": (PLAIN,), "regroup, 1 job": (OURS, 1), "regroup, 2 jobs": (OURS, 2)}
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(REPEATS if gigabytes < LARGE else 1):
            for name, (code, *more) in ways.items():
                found[name].append(run(code, source, target, *more, target=target))
        plain = median(seconds for seconds, _ in found["copy and hash"])
        allowed = 300e6 + 2 * largest
        print(f"\n{total / 1e9:.2f} GB, {len(entries(gigabytes)):,} tensors, the largest {largest / 1e6:.0f} MB")
        for name, runs in found.items():
            seconds, peak = median(seconds for seconds, _ in runs), max(peak for _, peak in runs)
            print(
                f"{name:<16} {seconds:6.2f} s  {total / seconds / 1e6:6.0f} MB/s  {seconds / plain:.2f} x  "
                f"peak {peak / 1e6:.0f} MB of {allowed / 1e6:.0f} allowed",
                flush=True,
            )


if __name__ == "__main__":
    for size in sys.argv[1:] or ["0.5", "2"]:
        measure(float(size))
