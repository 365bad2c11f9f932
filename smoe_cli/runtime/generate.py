"""Greedy generation by a model that G ranks share.

    torchrun --nproc-per-node 2 -m smoe_cli.runtime.generate --model smoe-out/checkpoint-ep2 --prompt "Once upon a time"

Axes: S positions of a prompt, G ranks. Under `dp-ep` prompts are routed to ranks, G at a time, and each rank generates
its own; otherwise all ranks work on one prompt after another.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.errors import report
from smoe_cli.runtime.adapter import ParallelModel, load_model
from smoe_cli.runtime.counters import gather_counters
from smoe_cli.runtime.layer import Mode
from smoe_cli.runtime.requests import RequestRouter
from smoe_cli.runtime.serving import BACKENDS, join_ranks, open_exchange
from smoe_cli.runtime.shuffle import PREDICTORS, SPECULATE_FROM, Shuffle
from smoe_cli.runtime.tables import RuntimeTables
from smoe_profiles.errors import InputError, SmoeError

RUNTIME = "runtime.safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def generate(
    model: ParallelModel, prompt: Tensor, max_new_tokens: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """The most likely continuation of a prompt [S], the same on every rank, which all have the prompt."""
    tokens: list[int] = []
    ids, cache = prompt[None], None
    while len(tokens) < max_new_tokens:
        logits, cache = model.forward(ids, cache)
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        dist.broadcast(ids, src=0)  # whatever a rank's device made of a tie, all go on alike
        tokens.append(int(ids))
        if tokens[-1] in stop:
            break
    return tokens


def generate_round(
    model: ParallelModel, prompt: Tensor | None, max_new_tokens: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """`dp-ep`: the continuation of this rank's own prompt [S], None if it has none. All ranks call it together."""
    tokens: list[int] = []
    device = model.model.get_input_embeddings().weight.device
    nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
    ids, cache = nothing if prompt is None else prompt[None], None
    while capacity := _most(ids.numel(), device):
        logits, cache = model.forward_own(ids, cache, capacity)
        if logits is None:
            continue
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(int(ids))
        if tokens[-1] in stop or len(tokens) == max_new_tokens:
            ids = nothing
    return tokens


def _most(value: int, device: torch.device) -> int:
    """The largest over ranks."""
    most = torch.tensor(value, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def generate_routed(
    model: ParallelModel,
    router: RequestRouter,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    stop: frozenset[int] = frozenset(),
) -> tuple[list[list[int]], list[int]]:
    """`dp-ep`: continuations of prompts, and each one's rank, the same on every rank. G prompts make a round."""
    ranks, own = model.exchange.num_ranks, model.exchange.rank
    homes = [router.rank(number, prompt) for number, prompt in enumerate(prompts)]
    found: list[list[int]] = []
    for start in range(0, len(prompts), ranks):
        round_homes = homes[start : start + ranks]
        mine = prompts[start + round_homes.index(own)] if own in round_homes else None
        tokens: list[Any] = [None] * ranks
        dist.all_gather_object(tokens, generate_round(model, mine, max_new_tokens, stop))
        found += [tokens[home] for home in round_homes]
    return found, homes


def find_tables(folder: Path, map_folder: Path | None, device: torch.device) -> RuntimeTables | None:
    """The run-time tables beside a regrouped checkpoint or in a map's folder; None for a plain model.

    Raises InputError if there is no model, or a map is to be applied to what is already renumbered.
    """
    if not (folder / "config.json").exists():
        raise InputError(f"--model {folder} is no folder of a model (it holds no config.json).")
    inside = folder / "smoe" / RUNTIME
    if map_folder is None:
        return RuntimeTables.open(inside, device) if inside.exists() else None
    if inside.exists():
        raise InputError(f"{folder} is already regrouped; --map would renumber its experts twice. Leave --map away.")
    if not (map_folder / RUNTIME).exists():
        raise InputError(f"--map {map_folder} holds no {RUNTIME}; give a map folder that smoe regroup wrote.")
    tables = RuntimeTables.open(map_folder / RUNTIME, device)
    if tables.layout != "map":
        raise InputError(
            f"{map_folder} is no map but of a regrouped checkpoint; write one with smoe regroup --layout map."
        )
    return tables


def run(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Load, generate, count: one document, the same on every rank."""
    from transformers import AutoTokenizer

    mode = Mode(given.mode)
    tables = find_tables(given.model, given.map, device)
    if tables is None and mode in (Mode.SPECULATIVE, Mode.DP_EP):
        raise InputError(
            f"--mode {mode} needs a placement: {given.model} is not regrouped and no --map was given. Other modes run "
            "plain models."
        )
    tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    prompts = [torch.tensor(tokenizer(text)["input_ids"], device=device) for text in given.prompt]
    if given.max_new_tokens < 1 or not all(map(len, prompts)):
        raise InputError("a prompt needs a token at least, and --max-new-tokens is at least 1.")
    config = json.loads((given.model / "config.json").read_text(encoding="utf-8"))
    dtype = DTYPES[given.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    ranks = dist.get_world_size()
    most_tokens = max(map(len, prompts)) * (ranks if mode is Mode.DP_EP else 1)
    exchange = open_exchange(given.backend, most_tokens, config["hidden_size"], device, dtype=dtype)
    below = SPECULATE_FROM if device.type == "cuda" else 0
    shuffle = Shuffle(exchange, tables, given.predictor, below, debug=given.debug_plan)
    model = load_model(given.model, mode, shuffle, dtype=dtype, device=device, counted=given.json)
    stop = stop_tokens(model.model.config.eos_token_id)
    if mode is Mode.DP_EP:
        assert tables is not None
        router = RequestRouter.of_tables(tables.token)
        found, homes = generate_routed(model, router, prompts, given.max_new_tokens, stop)
    else:
        found, homes = [generate(model, prompt, given.max_new_tokens, stop) for prompt in prompts], None
    check = getattr(exchange, "check", None)  # the kernels report a rank that was missing here
    if check is not None:
        check()
    document: dict[str, Any] = {
        "mode": mode.value,
        "exchange": type(exchange).__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": ranks,
        "bytes_read": _listed(model.bytes_read),
        "results": [
            {"prompt": text, "tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)}
            | ({"rank": homes[number]} if homes else {})
            for number, (text, tokens) in enumerate(zip(given.prompt, found, strict=True))
        ],
    }
    if given.json:
        document["counters"] = gather_counters({number: layer.counters for number, layer in model.layers.items()})
    return document


def stop_tokens(end: int | list[int] | None) -> frozenset[int]:
    """What a config names as the end of a text."""
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def _listed(value: int) -> list[int]:
    """Each rank's value."""
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="smoe_cli.runtime.generate", description="Generate text on several ranks.")
    parser.add_argument("--model", type=Path, required=True, help="Regrouped checkpoint, or a model's folder.")
    parser.add_argument("--map", type=Path, help="Map folder that smoe regroup wrote, for a model as it was.")
    parser.add_argument("--prompt", action="append", required=True, help="Text to go on from; may be repeated.")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default=Mode.SPECULATIVE.value)
    parser.add_argument("--predictor", choices=PREDICTORS, default="selected", help="Whose plan shuffles.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=list(DTYPES), help="float32 on the CPU, bfloat16 on GPUs by default.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="GPUs by default where there are any.")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="What exchanges rows.")
    parser.add_argument("--debug-plan", action="store_true", help="Compare every plan over the ranks.")
    parser.add_argument("--json", action="store_true", help="Everything as one document, with counters.")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        device = join_ranks(given.device)
        document = run(given, device)
        if dist.get_rank() == 0:
            texts = [result["prompt"] + result["text"] for result in document["results"]]
            print(json.dumps(document) if given.json else "\n".join(texts))
        dist.barrier()  # a process that leaves while another still sends takes it down
    except SmoeError as error:
        return report(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
