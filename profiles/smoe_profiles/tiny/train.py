"""Train the bundled models, tiny-deepseek and tiny-mixtral, from a corpus of JSON lines (text, source).

    python -m smoe_profiles.tiny.train --corpus train.jsonl.xz --exclude-source code-py/cpython-stdlib --out DIR

Axes: N windows, S tokens a window, T = N * S tokens, E experts, K experts a token.

One tokenizer, one pass of packed windows, AdamW with a cosine schedule, and the load-balance loss of Switch
Transformers (Fedus et al. 2021, equation 4) in each MoE layer. The fan-out figures of the model card are measured
on text kept out of training.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoe_profiles.tiny.measure import measure, routing, run

SEQ_LEN, VOCAB, BOUNDARY = 512, 6144, "<|endoftext|>"
SHARED_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How one model is built and trained; `ranks` is the EP degree of the figures on its card."""

    family: str
    config: dict[str, Any]
    ranks: int
    balance: float
    steps: int = 6500
    batch: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.1


RECIPES = {
    "tiny-deepseek": Recipe(
        family="deepseek_v2", ranks=4, balance=0.0015,
        config={
            "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 384,
            "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 16,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "q_lora_rank": None, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        },
    ),
    "tiny-mixtral": Recipe(
        family="mixtral", ranks=2, balance=0.001,
        config={
            "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 192, "num_local_experts": 8,
            "num_experts_per_tok": 2, "head_dim": 16,
        },
    ),
}  # fmt: skip

# Source prefix, kind, licence: the corpus' own table.
LICENCES = [
    ("gutenberg/", "novels: English, Spanish, French, German", "public domain"),
    ("nltk/", "speeches, plays, Genesis and UDHR in many languages", "public domain"),
    ("python/peps", "technical prose", "public domain or CC0"),
    ("rust-lang/book", "technical prose with code", "MIT or Apache-2.0"),
    ("openai/gsm8k-train", "maths word problems", "MIT"),
    ("arkilpatel/SVAMP", "maths word problems", "MIT"),
    ("deepmind/aqua", "maths word problems", "Apache-2.0"),
    ("google/taskmaster-4", "dialogues", "CC BY 4.0"),
    ("laion/open-assistant-sample", "chats", "Apache-2.0"),
    ("chatterbot-corpus", "questions and answers", "BSD-3-Clause"),
    ("d2l-ai/d2l-zh", "Chinese technical prose", "Apache-2.0"),
    ("apache/rocketmq-docs-cn", "Chinese technical prose", "Apache-2.0"),
    ("chinese-poetry", "classical Chinese verse", "MIT"),
    ("tldr-pages/", "short command help in 16 languages", "CC BY 4.0"),
    ("code-py/cpython-stdlib", "Python", "PSF-2.0"),
    ("code-c/", "C: zlib, lua, curl", "zlib, MIT, curl"),
    ("code-js/", "JavaScript: lodash, express, jquery", "MIT"),
    ("code-go/gin", "Go", "MIT"),
    ("code-rust/ripgrep", "Rust", "Unlicense or MIT"),
    ("code-java/rocketmq", "Java", "Apache-2.0"),
]


def read_corpus(path: Path, exclude: list[str]) -> list[dict[str, str]]:
    """The corpus' rows (text, source) in file order, without the excluded sources."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    if missing := set(exclude) - {row["source"] for row in rows}:
        raise ValueError(f"{path.name} has no source {sorted(missing)}")
    return [row for row in rows if row["source"] not in exclude]


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer of VOCAB entries that puts id 0 before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[BOUNDARY], initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOUNDARY} $A", pair=f"{BOUNDARY} $A {BOUNDARY} $B", special_tokens=[(BOUNDARY, 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, bos_token=BOUNDARY, eos_token=BOUNDARY, model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def pack(tokenizer: Any, texts: list[str], seed: int) -> Tensor:
    """Shuffled documents, id 0 before each, joined and cut into windows [N, S]; the remainder is dropped."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer.backend_tokenizer.encode_batch([texts[i] for i in order])
    ids = torch.tensor([token for row in encoded for token in row.ids], dtype=torch.int32)
    return ids[: len(ids) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean router probability); 1 when balanced.

    logits: [T, E], chosen: [T, K]. Taken over the whole batch, so a text may prefer some experts.
    """
    experts = logits.shape[-1]
    share = torch.histc(chosen.float(), bins=experts, min=0, max=experts - 1) / chosen.numel()
    return experts * (share * logits.float().softmax(-1).mean(0)).sum()


def train(model: Any, windows: Tensor, recipe: Recipe, seed: int) -> float:
    """Train `model` on windows [N, S] and leave it in bf16; returns the mean loss of the last 5 % of steps.

    AdamW steps fp32 copies of the weights, which are rounded to bf16 after each step.
    """
    device = model.device
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    for weight in weights:  # not model.to(bf16): the rotary frequencies stay fp32
        weight.data = weight.data.bfloat16()
    groups = [
        {"params": [m for m in masters if m.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    warmup = min(200, recipe.steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.525 + 0.475 * math.cos(math.pi * min(1.0, step / recipe.steps))),
    )
    shuffle = torch.Generator().manual_seed(seed)
    epochs = math.ceil(recipe.steps * recipe.batch / len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=shuffle) for _ in range(epochs)])
    windows, order = windows.to(device), order.to(device)
    tail, tail_steps = torch.zeros((), device=device), max(1, recipe.steps // 20)
    started = time.monotonic()
    model.train()
    with routing(model) as layers:
        for step in range(recipe.steps):
            ids = windows[order[step * recipe.batch : (step + 1) * recipe.batch]].long()
            layers.clear()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            balance = torch.stack([balance_loss(*layer) for layer in layers]).sum()
            (loss + recipe.balance * balance).backward()
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
                if step >= recipe.steps - tail_steps:
                    tail += loss / tail_steps
            if step % 250 == 0 or step == recipe.steps - 1:
                seconds = time.monotonic() - started
                print(f"step {step} loss {loss:.3f} balance {balance / len(layers):.3f} {seconds:.0f} s", flush=True)
    return float(tail)


def figures(title: str, rows: list[tuple[float, float, float]]) -> str:
    """One line of the card: fan-out and saving, mean of the layers, and the load of each."""
    chance, placed, _ = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    saving = 100 * (1 - placed / chance)
    loads = " ".join(f"{load:.2f}" for *_, load in rows)
    return f"| {title} | {chance:.3f} | {placed:.3f} | {saving:.1f} % | {loads} |"


def licence_table(rows: list[dict[str, str]]) -> str:
    """The corpus by source prefix: kind, size, licence."""
    lines = ["| source | kind | MB | licence |", "|---|---|---|---|"]
    for prefix, kind, licence in LICENCES:
        size = sum(len(row["text"].encode()) for row in rows if row["source"].startswith(prefix))
        if size:
            lines.append(f"| {prefix}{'*' * prefix.endswith('/')} | {kind} | {size / 1e6:.1f} | {licence} |")
    return "\n".join(lines)


CARD = """---
license: apache-2.0
library_name: transformers
---
# {name}

A {model_class} of {parameters:.2f} M parameters, trained from scratch on one GPU so that smoe's commands have a
real router to work on offline. It is a test aid and knows nothing.

{layers} layers ({moe} of them MoE), {experts} experts, top-{top_k}, bf16, byte-level BPE of {vocab} entries
(id 0, `{boundary}`, stands before each text and ends it).

## Data
{documents} documents, {tokens:.1f} M tokens; not used for the tokenizer or the training: {excluded}.

{licences}

## Training
{steps} steps of {batch} windows of {seq_len} tokens: {seen:.0f} M tokens, {epochs:.1f} passes over the data.
AdamW, learning rate {lr} with cosine decay to a twentieth, load-balance loss {balance} a layer, seed {seed}.
Loss: training {train_loss:.3f}; validation ({validation_documents} documents kept out): {validation_loss:.3f}.

    {command}

## Placement
Mean number of ranks a token's experts lie on at EP{ranks}, fp32, mean of the MoE layers: 30 random balanced placements
against swap descent (8 starts) fitted on one half of the kept-out documents and measured on the other. Over all
balanced placements the mean is {expected:.3f}, whatever the weights. Load: largest expert over mean, by layer.
The default recipes were picked among six a model by figures on the same kept-out text, so these flatter a little.

| weights | random | co-clustered | saving | max/mean load |
|---|---|---|---|---|
{figures}
"""


def make(name: str, recipe: Recipe, args: argparse.Namespace) -> None:
    """Train one model and write its folder under args.out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(args.seed)
    folder = args.out / name
    rows = read_corpus(args.corpus, args.exclude_source)
    texts = [row["text"] for row in rows]
    if args.corpus_test:
        kept_out = [row["text"] for row in read_corpus(args.corpus_test, args.exclude_source)]
    else:
        kept_out, texts = texts[::50], [text for i, text in enumerate(texts) if i % 50]
    tokenizer = train_tokenizer(texts)
    windows = pack(tokenizer, texts, args.seed)
    fit, held_out = (pack(tokenizer, kept_out[half::2], args.seed) for half in (0, 1))
    print(f"{name}: {len(texts)} documents, {windows.numel()} tokens", flush=True)

    config = AutoConfig.for_model(recipe.family, **SHARED_CONFIG, **recipe.config)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model = model.to(args.device)
    untrained = measure(model, fit, held_out, recipe.ranks)
    train_loss = train(model, windows, recipe, args.seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    saved = saved.to(args.device)
    top_k = config.num_experts_per_tok
    experts = config.n_routed_experts if recipe.family == "deepseek_v2" else config.num_local_experts
    trained = measure(saved, fit, held_out, recipe.ranks)
    lines = [figures("trained", trained), figures("untrained", untrained)]
    options = "".join(f" --exclude-source {source}" for source in args.exclude_source)
    if args.corpus_test:
        options = f" --corpus-test {args.corpus_test.name}{options}"
    seen = recipe.steps * recipe.batch * SEQ_LEN
    card = CARD.format(
        name=name, model_class=type(model).__name__, parameters=model.num_parameters() / 1e6,
        layers=config.num_hidden_layers, moe=len(trained), experts=experts, top_k=top_k,
        vocab=VOCAB, boundary=BOUNDARY, seq_len=SEQ_LEN, ranks=recipe.ranks,
        documents=len(texts), tokens=windows.numel() / 1e6, seen=seen / 1e6, epochs=seen / windows.numel(),
        excluded=", ".join(args.exclude_source) or "nothing", licences=licence_table(rows),
        steps=recipe.steps, batch=recipe.batch, lr=recipe.lr, balance=recipe.balance, seed=args.seed,
        train_loss=train_loss, validation_loss=run(saved, torch.cat([fit, held_out]))[0],
        validation_documents=len(kept_out), figures="\n".join(lines),
        expected=recipe.ranks * (1 - math.comb(experts - experts // recipe.ranks, top_k) / math.comb(experts, top_k)),
        command=f"python -m smoe_profiles.tiny.train --model {name} --corpus {args.corpus.name}{options} --out DIR",
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(*lines, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m smoe_profiles.tiny.train", description="Train the bundled models.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with text and source, .xz or plain")
    parser.add_argument("--corpus-test", type=Path, help="the same, kept out of training; default: every 50th document")
    parser.add_argument("--exclude-source", action="append", default=[], help="leave a source out (repeatable)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model folders into")
    parser.add_argument("--model", choices=[*RECIPES, "both"], default="both")
    parser.add_argument("--steps", type=int, help="optimiser steps; default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for name in RECIPES if args.model == "both" else [args.model]:
        recipe = RECIPES[name]
        make(name, replace(recipe, steps=args.steps or recipe.steps), args)


if __name__ == "__main__":
    main()
