"""What the exchange computes, in plain torch over all ranks at once: slow, obvious, for comparison.

Axes: G ranks, T tokens, C = ceil(T / G) home rows of a rank, H hidden size. Each function takes what every rank has, on
the first axis, and gives what every rank gets. `wide` is the type of sums: float32 gives the bits of every `Exchange`,
float64 says how far those are from the truth.
"""

import torch
from torch import Tensor

from smoe_cli.runtime.exchange import Norm, Plan


def home_rows(rows: Tensor, plan: Plan) -> Tensor:
    """rows: [T, H]. Returns [G, C, H], zero where no token lies."""
    found = torch.zeros(len(plan.token_of_place), rows.shape[1], dtype=rows.dtype, device=rows.device)
    taken = plan.token_of_place >= 0
    found[taken] = rows[plan.token_of_place[taken].long()]
    return found.view(plan.num_ranks, plan.rows_per_rank, rows.shape[1])


def reduce_scatter(
    partials: Tensor,
    plan: Plan,
    residuals: Tensor | None = None,
    norm: Norm | None = None,
    wide: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """partials: [G, T, H]; residuals: [G, C, H]. Returns (summed, normed), each [G, C, H], unrounded in float64."""
    total = torch.zeros(*home_rows(partials[0], plan).shape, dtype=wide, device=partials.device)
    for partial in partials:
        total = total + home_rows(partial, plan).to(wide)
    if residuals is not None:
        total = total + residuals.to(wide)
    kept = partials.dtype if wide is torch.float32 else wide
    summed = total.to(kept)
    if norm is None:
        return summed, summed
    again = summed.to(wide)
    scaled = again / (again.square().mean(dim=-1, keepdim=True) + norm.epsilon).sqrt()
    return summed, (scaled.to(kept) * norm.weight.to(kept)).to(kept)


def all_gather(rows: Tensor, plan: Plan) -> Tensor:
    """rows: [G, C, ...]. Returns [T, ...], alike on every rank."""
    return rows.flatten(0, 1)[plan.place_of_token.long()]


def received(needs: Tensor, rank: int) -> Tensor:
    """The places whose rows a rank receives, ascending. needs: [G, C] bit masks."""
    return torch.nonzero((needs.flatten() >> rank) & 1)[:, 0]


def combine(parts: Tensor, needs: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """parts: [G, G * C, H], each rank's sums by place; needs: [G, C]. Returns [G, C, H]."""
    total = torch.zeros(parts.shape[1:], dtype=wide, device=parts.device)
    for rank, part in enumerate(parts):
        places = received(needs, rank)
        total[places] = total[places] + part[places].to(wide)
    return total.to(parts.dtype if wide is torch.float32 else wide).view(*needs.shape, parts.shape[2])
