"""What recording costs: over the plain forward, in bytes a row, and in writing and reading. `make bench`.

`python tests/bench/test_capture.py cuda 128` runs the overhead alone, at DeepSeek-V2-Lite's full size over 128 batches.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import torch

from smoe_profiles.artefact import publish
from smoe_profiles.capture.profile import CaptureOptions, record, trace_layers
from smoe_profiles.choices import Level
from smoe_profiles.families.config import read_spec
from smoe_profiles.split import Assigned, Document
from smoe_profiles.trace import Rows, Trace, TraceLayer
from smoe_profiles.trace_writer import TraceWriter

REPEATS = 5
SEQUENCES, LENGTH = 8, 512
V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}


def overhead(device: str, layers: int, dtype: torch.dtype, batches: int, repeats: int = REPEATS) -> tuple[float, float]:
    """Median seconds of `batches` x 8 x 512 tokens, plain and recorded, run in turn on one model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = V2_LITE | {"num_hidden_layers": layers}
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    with torch.device(device):
        loaded = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **arguments), dtype=dtype).eval()
    model = SimpleNamespace(spec=read_spec(config, "the benchmark"))
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 102400, (batches, SEQUENCES, LENGTH)).astype(np.uint32)
    documents = [Assigned(Document(row, "random"), "fit") for row in ids.reshape(-1, LENGTH)]
    options = CaptureOptions(["random"], seq_len=LENGTH)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def plain() -> None:
        with torch.inference_mode():
            for batch in ids:
                loaded.base_model(input_ids=torch.from_numpy(batch.astype(np.int64)).to(device), use_cache=False)
        wait()

    def recorded() -> None:
        with tempfile.TemporaryDirectory() as folder:
            writer = TraceWriter(Path(folder), trace_layers(model), ["random"])
            record(model, loaded, documents, writer, options, lambda _: None)
            writer.close()
        wait()

    taken: dict[str, list[float]] = {"plain": [], "recorded": []}
    for work in [plain, recorded] * (repeats + 1):
        started = perf_counter()
        work()
        taken[work.__name__].append(perf_counter() - started)
    return median(taken["plain"][1:]), median(taken["recorded"][1:])


def test_recording_costs_little_over_the_plain_forward():
    plain, recorded = overhead("cpu", layers=4, dtype=torch.float32, batches=1)
    print(f"\nV2-Lite widths, 4 layers, fp32, 8 x 512: plain {plain:.2f} s, recorded {recorded:.2f} s, "
          f"ratio {recorded / plain:.3f}")  # fmt: skip
    assert recorded <= 1.05 * plain


LAYERS = [TraceLayer(layer, 64, 6) for layer in range(1, 27)]
ROWS = 131_072


def skewed_rows(count: int) -> Rows:
    """Rows of DeepSeek-V2-Lite's shape whose experts follow a skewed popularity, weights falling."""
    generator = np.random.default_rng(0)
    popularity = np.log(generator.dirichlet(np.full(64, 2.0), len(LAYERS)))
    noise = -np.log(generator.exponential(size=(len(LAYERS), count, 64)).astype(np.float32))
    scores = popularity[:, None, :].astype(np.float32) + noise
    experts = np.argsort(-scores, axis=2)[:, :, :6].astype(np.uint16)
    weights = np.sort(generator.random((len(LAYERS), count, 6)).astype(np.float16), axis=2)[:, :, ::-1]
    position = np.arange(count)
    return Rows(
        sequence=(position // 512).astype(np.uint32),
        position=(position % 512).astype(np.uint32),
        token_id=generator.zipf(1.3, count).clip(max=102399).astype(np.uint32),
        phase=np.zeros(count, np.int16),
        source=np.zeros(count, np.int16),
        split=np.zeros(count, np.int16),
        experts=list(experts),
        weights=list(weights),
    )


def pieces(rows: Rows, size: int) -> list[Rows]:
    def part(value: object, cut: slice) -> object:
        return [column[cut] for column in value] if isinstance(value, list) else value[cut]  # type: ignore[index]

    names = ("sequence", "position", "token_id", "phase", "source", "split", "experts", "weights")
    cuts = [slice(start, start + size) for start in range(0, len(rows.sequence), size)]
    return [replace(rows, **{name: part(getattr(rows, name), cut) for name in names}) for cut in cuts]


def entropy_bits(values: np.ndarray) -> float:
    """Bits a value of its empirical distribution."""
    _, count = np.unique(values, return_counts=True)
    share = count / count.sum()
    return float(-(share * np.log2(share)).sum())


def test_bytes_a_row_and_rates_against_plain_pyarrow(tmp_path):
    rows = skewed_rows(ROWS)
    batches = pieces(rows, 4096)

    def seconds(work):
        taken = []
        for _ in range(3):
            started = perf_counter()
            work()
            taken.append(perf_counter() - started)
        return median(taken)

    def ours(name="ours"):
        with publish(tmp_path / name, "trace", parameters={}, model={}, force=True) as draft:
            writer = TraceWriter(draft.path, LAYERS, ["random"])
            for batch in batches:
                writer.append(batch)
            writer.close()

    ours()
    part = tmp_path / "ours/part-00000.parquet"
    table = pq.read_table(part)
    plain = tmp_path / "plain.parquet"
    write = seconds(lambda: pq.write_table(table, plain, compression="zstd", row_group_size=65_536))
    mine = seconds(ours)
    columns = [layer.column for layer in LAYERS]
    artefact = SimpleNamespace(path=part.parent, manifest={"files": [part.name]})
    trace = Trace(artefact, tuple(LAYERS), 102400, Level.TOKEN)
    read = seconds(lambda: pq.read_table(plain, columns=[*columns, "split"]))
    back = seconds(lambda: trace.read(columns, "fit"))
    ideal = sum(entropy_bits(column[:, slot]) for column in [*rows.experts, *rows.weights] for slot in range(6)) / 8
    stored = part.stat().st_size / ROWS
    print(
        f"\n{ROWS:,} rows of 26 layers x 6: {stored:.0f} bytes a row, entropy of the layout's slots {ideal:.0f} "
        f"(ratio {stored / ideal:.2f})\nwrite (checked, journalled, hashed, fsynced) {ROWS / mine:,.0f} rows/s, plain "
        f"pyarrow {ROWS / write:,.0f} ({mine / write:.2f} x)\nread every experts column {ROWS / back:,.0f} rows/s, "
        f"plain pyarrow {ROWS / read:,.0f} ({back / read:.2f} x)"
    )
    assert stored <= 1.25 * ideal


if __name__ == "__main__":
    where = sys.argv[1]
    plain, recorded = overhead(where, layers=27, dtype=torch.bfloat16, batches=int(sys.argv[2]))
    print(f"{torch.cuda.get_device_name() if where == 'cuda' else where}: full V2-Lite, bf16: plain {plain:.3f} s, "
          f"recorded {recorded:.3f} s, ratio {recorded / plain:.3f}")  # fmt: skip
