"""One rank of tests/gpu/test_generate.py, started by torchrun: a model shared by GPUs against the model on one of them.

    torchrun --nproc-per-node 2 tests/gpu/generate_ranks.py MODEL MAP [BACKEND]

Teacher-forced over 256 tokens in bf16 against the library's model in one process: logits may differ at most twice as
much as those of the same ranks with their sums in another order do, and the likeliest token must be the same at 99 % of
the tokens whose two best logits differ by more than one step of bf16. (Of all tokens it is the same at 97-100 % between
two ways in which the library itself computes this small model in bf16; that share is printed beside it.)
In fp32 64 greedy tokens must be the library's, or leave them where its two best logits are within 1e-4. Every mode must
give the same bits on every rank; those that sum the attention's shares in one step are held to the first bound, the
others round once more.

Where ranks share a GPU (`gpus.SHARED`), the 64 tokens alone are compared: over gloo nothing else is exchanged there.
"""

import gzip
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.runtime.adapter import ParallelModel, load_model
from smoe_cli.runtime.collectives import CollectiveExchange, rms_norm, take_rows
from smoe_cli.runtime.exchange import Exchange, Norm, Plan
from smoe_cli.runtime.generate import generate
from smoe_cli.runtime.layer import Mode
from smoe_cli.runtime.region import Sizes
from smoe_cli.runtime.serving import MOST_EXPERTS, join_ranks, open_exchange
from smoe_cli.runtime.shuffle import Shuffle
from smoe_cli.runtime.symmetric import SymmetricExchange
from smoe_cli.runtime.tables import RuntimeTables
from tests.gpu.gpus import SHARED, device_of, shared_allocation

TEXTS = Path(__file__).parents[1] / "fixtures/texts/heldout.jsonl.gz"
LENGTH, NEW_TOKENS = 256, 64
MODES = (Mode.SPECULATIVE, Mode.SP_EP, Mode.AR_EP, Mode.REPLICATED)


class Reordered(CollectiveExchange):
    """Sums begin with the residual and the last rank, and are rounded after every addition, as in a ring."""

    def reduce_scatter(
        self, partial: Tensor, plan: Plan, residual: Tensor | None = None, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        parts = self._to_each(take_rows(partial, plan.token_of_place)).view(self.num_ranks, -1, partial.shape[1])
        total = torch.zeros_like(parts[0], dtype=torch.float32) if residual is None else residual.float()
        for part in parts.flip(0):
            total = (total + part.float()).to(partial.dtype).float()
        summed = total.to(partial.dtype)
        return summed, summed if norm is None else rms_norm(summed, norm)


def load(folder: Path, tables: RuntimeTables, exchange: Exchange, mode: Mode, dtype: torch.dtype) -> ParallelModel:
    device = tables.token.device
    return load_model(folder, mode, Shuffle(exchange, tables, debug=True), dtype=dtype, device=device)


def reference_logits(folder: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, V] float32 of the library's model on this GPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(ids.device).eval()
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


def text_ids(folder: Path) -> Tensor:
    """The first 256 tokens of the fixture's first text."""
    from transformers import AutoTokenizer

    with gzip.open(TEXTS, "rt", encoding="utf-8") as file:
        text = json.loads(next(file))["text"]
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:LENGTH])


def same_everywhere(values: Tensor) -> bool:
    """Whether every rank has these bits."""
    first = values.clone()
    dist.broadcast(first, src=0)
    same = torch.tensor(int(torch.equal(first, values)), device=values.device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def compare_bf16(folder: Path, tables: RuntimeTables, exchange: Exchange, ids: Tensor) -> dict[str, float]:
    """Logit differences from the library's model, and agreement of the likeliest token."""
    plain = reference_logits(folder, ids, torch.bfloat16)
    best = plain.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > torch.exp2(best[:, 0].abs().log2().floor() - 7)
    found: dict[str, float] = {"decided": int(decided.sum())}
    for name, mode in {**{mode.value: mode for mode in MODES}, "reordered": Mode.SP_EP}.items():
        model = load(folder, tables, Reordered() if name == "reordered" else exchange, mode, torch.bfloat16)
        logits = model.forward(ids[None], last=False)[0][0].float()
        assert same_everywhere(logits), name
        same = (logits.argmax(-1) == plain.argmax(-1)).float()
        found[f"{name}.max_difference"] = float((logits - plain).abs().max())
        found[f"{name}.mean_difference"] = float((logits - plain).abs().mean())
        found[f"{name}.top1"] = float(same.mean())
        found[f"{name}.top1_decided"] = float(same[decided].mean())
    return found


def check_bf16(found: dict[str, float]) -> None:
    for mode in MODES:
        assert found[f"{mode}.top1_decided"] >= 0.99, mode
    for mode in (Mode.SPECULATIVE, Mode.SP_EP):
        assert found[f"{mode}.max_difference"] <= 2 * found["reordered.max_difference"], mode


def compare_greedy(folder: Path, tables: RuntimeTables, exchange: Exchange, prompt: Tensor) -> dict[str, float]:
    """64 tokens in fp32: where they leave the library's, and how near its two best logits are there."""
    tokens = generate(load(folder, tables, exchange, Mode.SPECULATIVE, torch.float32), prompt, NEW_TOKENS)
    whole = torch.cat([prompt, torch.tensor(tokens, device=prompt.device)])
    logits = reference_logits(folder, whole, torch.float32)[len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    leaves = (best.indices[:, 0] != whole[len(prompt) :]).nonzero()[:, 0].tolist()
    gap = float(best.values[leaves[0], 0] - best.values[leaves[0], 1]) if leaves else 0.0
    return {"equal_tokens": leaves[0] if leaves else len(tokens), "gap": gap}


def join() -> torch.device:
    """The process group, and this rank's device."""
    if not SHARED:
        return join_ranks()
    device = device_of(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    return device


def open_between(backend: str, hidden: int, device: torch.device, dtype: torch.dtype) -> Exchange:
    if not SHARED:
        return open_exchange(backend, LENGTH, hidden, device, dtype=dtype)
    return SymmetricExchange(Sizes(LENGTH, hidden, MOST_EXPERTS, dtype), device, allocate=shared_allocation(device))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(folder: Path, map_folder: Path, backend: str = "symmetric") -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device = join()
    tables = RuntimeTables.open(map_folder / "runtime.safetensors", device)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = text_ids(folder).to(device)
    exchanges = {
        dtype: open_between(backend, config["hidden_size"], device, dtype) for dtype in (torch.bfloat16, torch.float32)
    }
    found = compare_greedy(folder, tables, exchanges[torch.float32], ids[:32])
    if not SHARED:
        found |= compare_bf16(folder, tables, exchanges[torch.bfloat16], ids)
    if dist.get_rank() == 0:
        where = {"ranks": dist.get_world_size(), "device": device_name(device), "torch": torch.__version__}
        print(json.dumps(where | {"exchange": backend} | found, indent=1), flush=True)
    assert found["equal_tokens"] == NEW_TOKENS or found["gap"] < 1e-4
    if not SHARED:
        check_bf16(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
