"""What a model's router does on given text: who takes which expert, and what a placement saves.

Axes: N windows, S tokens a window, T = N * S tokens, E experts, K experts a token, G ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def routing(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect (router logits [T, E], chosen experts [T, K]) of each MoE layer in turn while `model` runs."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: seen.append((output[0], output[2])))
        for name, module in model.named_modules()
        if name.endswith(".gate")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run(model: Any, windows: Tensor) -> tuple[float, list[Tensor]]:
    """Mean loss over windows [N, S], and per MoE layer which experts each token takes, bool [T, E]."""
    model.eval()
    losses, parts = [], []
    for ids in torch.split(windows, 32):
        ids = ids.long().to(model.device)
        with routing(model) as layers:
            losses.append(float(model(input_ids=ids, labels=ids, use_cache=False).loss) * len(ids))
        parts.append([torch.zeros_like(logits, dtype=torch.bool).scatter_(1, to, True) for logits, to in layers])
    return sum(losses) / len(windows), [torch.cat(layer) for layer in zip(*parts, strict=True)]


def fan_out(takes: Tensor, expert_to_rank: Tensor) -> float:
    """Mean number of distinct ranks that a token's experts lie on. takes: bool [T, E], expert_to_rank: [E]."""
    return float(((takes.float() @ one_hot(expert_to_rank)) > 0).float().sum(1).mean())


def one_hot(expert_to_rank: Tensor) -> Tensor:
    """expert_to_rank [E] as float [E, G]."""
    return torch.nn.functional.one_hot(expert_to_rank).float()


def random_placements(experts: int, ranks: int, count: int, seed: int) -> list[Tensor]:
    """Random balanced placements: `count` times expert_to_rank [E]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(experts, generator=generator) % ranks for _ in range(count)]


def descend(takes: Tensor, expert_to_rank: Tensor) -> Tensor:
    """Swap the two experts that lower fan-out most, until no swap does. takes: bool [T, E]. Returns [E]."""
    x, rank = takes.float(), expert_to_rank.clone()
    while True:
        home = one_hot(rank)
        on_rank = x @ home
        alone = x * ((on_rank == 1).float() @ home.T)  # the token's only expert on that rank
        move = (x.T @ (on_rank == 0).float() - alone.sum(0)[:, None])[:, rank]  # [a, b]: a moves to b's rank
        both = alone.T @ x  # a token that takes a and b keeps its ranks
        change = move + move.T + both + both.T
        change[rank[:, None] == rank] = 0
        best = int(change.argmin())
        if change.flatten()[best] >= 0:
            return rank
        a, b = divmod(best, len(rank))
        rank[[a, b]] = rank[[b, a]]


def measure(model: Any, fit: Tensor, held_out: Tensor, ranks: int) -> list[tuple[float, float, float]]:
    """Per MoE layer: fan-out of 30 random balanced placements, fan-out co-clustered, max/mean expert load.

    fit, held_out: windows [N, S] not used in training; placements are fitted on the one and measured on the other.
    """
    rows = []
    for fit_takes, takes in zip(run(model, fit)[1], run(model, held_out)[1], strict=True):
        experts, device = takes.shape[1], takes.device
        starts = [descend(fit_takes, start.to(device)) for start in random_placements(experts, ranks, 8, seed=0)]
        placed = min(starts, key=lambda placement: fan_out(fit_takes, placement))
        chance = [fan_out(takes, placement.to(device)) for placement in random_placements(experts, ranks, 30, seed=1)]
        load = takes.float().sum(0)
        rows.append((sum(chance) / len(chance), fan_out(takes, placed), float(load.max() / load.mean())))
    return rows
