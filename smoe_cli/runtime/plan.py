"""The plan of a batch: from u8 scores to the place of every token, by the rule of smoe_solvers, in plain torch.

Axes: T tokens, G ranks, C = ceil(T / G) places of a rank, N tokens of a chunk. Integers alone and no host value, so
that every rank and every device finds the same plan; equal to `smoe_solvers.assignment.assign_rule`, where the rule is
stated. plan_kernel.py finds the same in one launch; on a GPU it is asked.
"""

from typing import TypeVar

import torch
from torch import Tensor

from smoe_cli.runtime.exchange import Plan

ROUNDS = 18
FIRST_STEP = 40
SMALLER = 13
CROWDED = 4
NARROWEST = 4
UNIT = 256
LEVELS = 8
COSTS = 256
"""The constants of the rule; a test holds them against smoe_solvers."""

LOWEST = -(1 << 24)
"""Below every score less its price."""

Integers = TypeVar("Integers", int, Tensor)


def make_plan(table: Tensor, num_ranks: int, index: Tensor | None = None) -> Plan:
    """The plan by which every token lies on the rank that `assign_rule` gives it. Scores are the rows [T, G] uint8 of
    the table, or, with an index [T] of integers, those rows of it, beyond it its last.

    Inside a rank tokens keep their order; of a batch in several chunks, the chunks' tokens take turns.
    """
    if table.is_cuda:
        from smoe_cli.runtime.plan_kernel import plan_rows

        return plan_rows(table, index)
    return plain_plan(take_scores(table, index), num_ranks)


def take_scores(table: Tensor, index: Tensor | None) -> Tensor:
    """Every token's scores, [T, G]; arguments as of `make_plan`."""
    return table if index is None else table[index.long().clamp(max=len(table) - 1)]


def plain_plan(scores: Tensor, num_ranks: int) -> Plan:
    """`make_plan` step by step, on any device: the reference of the kernel."""
    tokens, quota = len(scores), rows_per_rank(len(scores), num_ranks)
    place_of_token = torch.zeros(tokens, dtype=torch.int32, device=scores.device)
    chunks = num_chunks(quota, num_ranks)
    for chunk in range(chunks):
        rows = row_of_run(torch.arange(chunk_quota(chunk, chunks, quota), device=scores.device), chunk, chunks)
        here = (rows[:, None] * num_ranks + torch.arange(num_ranks, device=scores.device)).reshape(-1)
        if int(row_of_run(chunk_quota(chunk, chunks, quota) - 1, chunk, chunks)) == quota - 1:
            here = here[: len(here) - (quota * num_ranks - tokens)]  # the batch ends inside its last row
        home = _assign_chunk(scores[here].to(torch.int32), len(rows))
        place_of_token[here] = (home * quota + rows[_count_before(home, num_ranks)]).to(torch.int32)
    return plan_of_places(place_of_token, num_ranks)


def identity_plan(tokens: int, num_ranks: int, device: torch.device | str) -> Plan:
    """No shuffle: token i lies at place i."""
    return plan_of_places(torch.arange(tokens, dtype=torch.int32, device=device), num_ranks)


def plan_of_places(place_of_token: Tensor, num_ranks: int) -> Plan:
    """A plan from the place of every token, [T] int32."""
    tokens, device = len(place_of_token), place_of_token.device
    token_of_place = torch.full((num_ranks * rows_per_rank(tokens, num_ranks),), -1, dtype=torch.int32, device=device)
    token_of_place[place_of_token.long()] = torch.arange(tokens, dtype=torch.int32, device=device)
    return Plan(token_of_place, place_of_token, num_ranks)


def plan_hash(plan: Plan) -> Tensor:
    """A number to compare over ranks, [] int64 on the plan's device: equal for equal plans, else almost never."""
    place = plan.place_of_token.long()
    position = torch.arange(len(place), device=place.device)
    mixed = (place + 1) * 0x1E3779B97F4A7C15 ^ (position + plan.num_ranks) * 0x3F58476D1CE4E5B9
    return ((mixed ^ mixed >> 29) * 0x14D049BB133111EB).sum()


def rows_per_rank(tokens: int, num_ranks: int) -> int:
    """C."""
    return -(-tokens // num_ranks)


def chunk_rows(num_ranks: int) -> int:
    """Rows of G consecutive tokens that are assigned together."""
    return max(2040, (1 << 14) >> (num_ranks - 1).bit_length()) // num_ranks


def num_chunks(quota: int, num_ranks: int) -> int:
    return -(-quota // chunk_rows(num_ranks))


def mixed_bits(number: Integers) -> Integers:
    """Eight bits that look random, from the lower sixteen of a number."""
    low = number & 0xFFFF
    low = low ^ (low >> 7)
    return ((low * 30011) & 0xFFFF) >> 8


def noise_of(position: Tensor, rank: Tensor) -> Tensor:
    """A token's noise on a rank, int32; arguments int64, to be broadcast."""
    bits = ((2 * position + rank // 4 % 2 + 1 + (rank // 8 << 16)) * 0x1E3779B1) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 16) * 0x05EBCA6B) & 0xFFFFFFFF
    return (((bits ^ bits >> 16) >> (8 * (rank % 4))) & 255).int()


def row_of_run(run: Integers, chunk: int, chunks: int) -> Integers:
    """The row that a chunk has of the run-th run of `chunks` rows: each chunk one, in an order that changes."""
    return run * chunks + (chunk - mixed_bits(run * 40503)) % chunks


def chunk_quota(chunk: int, chunks: int, quota: int) -> int:
    """Rows of a chunk: one of each whole run, and perhaps one of the run that the batch breaks off."""
    return quota // chunks + (row_of_run(quota // chunks, chunk, chunks) < quota)


def _assign_chunk(scores: Tensor, quota: int) -> Tensor:
    """The rank of every token, [N] int64. scores: [N, G] int32."""
    ranks = scores.shape[1]
    value = _balanced(scores, quota) if ranks > 2 else scores
    home = value.argmax(dim=1)
    for _ in range(ranks if ranks > 1 else 0):
        home = _move_beyond(value, home, quota)
    return home


def _balanced(scores: Tensor, quota: int) -> Tensor:
    """Scores less prices at which few tokens are beyond the quota, [N, G] int32. scores: [N, G] int32."""
    tokens, ranks = scores.shape
    position = torch.arange(tokens, device=scores.device)[:, None]
    noise = noise_of(position, torch.arange(ranks, device=scores.device))
    price = torch.zeros(ranks, dtype=torch.int32, device=scores.device)
    inverse, step = (UNIT << 8) // quota, FIRST_STEP << 4
    for _ in range(ROUNDS):
        width = max(step >> 4, NARROWEST)
        load = _loads((scores * UNIT + width * noise - price).argmax(dim=1), ranks).long()
        change = (load - quota).clamp(max=CROWDED * quota) * (step * inverse) >> 12
        price = price + torch.where(load.max() > quota, change, 0).int()
        step = step * SMALLER >> 4
    return scores * UNIT + NARROWEST * noise - price


def _move_beyond(value: Tensor, home: Tensor, quota: int) -> Tensor:
    """Ranks beyond the quota give up the tokens that lose least on the best open rank, first positions first."""
    ranks = value.shape[1]
    load = _loads(home, ranks)
    target = value.masked_fill(load >= quota, LOWEST).argmax(dim=1)
    cost = (value.gather(1, home[:, None]) - value.gather(1, target[:, None]))[:, 0]
    if ranks > 2:  # the binary logarithm: the exponent of a float
        cost = (((cost // UNIT + 1).float().view(torch.int32) >> 23) - 127).clamp(max=LEVELS - 1)
    asking = (home[:, None] == torch.arange(ranks, device=home.device)) & (load > quota)
    leaving = (load - quota).clamp(min=0)
    border = torch.zeros_like(load)
    bit = (LEVELS if ranks > 2 else COSTS) // 2
    while bit:
        fits = (asking & (cost[:, None] < border + bit)).sum(dim=0) <= leaving
        border = border + torch.where(fits, bit, 0).to(torch.int32)
        bit //= 2
    below = asking & (cost[:, None] < border)
    tied = asking & (cost[:, None] == border)
    goes = below | (tied & (tied.cumsum(dim=0) <= leaving - below.sum(dim=0)))
    return torch.where(goes.any(dim=1), target, home)


def _loads(home: Tensor, num_ranks: int) -> Tensor:
    """Tokens of every rank, [G] int32. home: [N]."""
    return (home[:, None] == torch.arange(num_ranks, device=home.device)).sum(dim=0, dtype=torch.int32)


def _count_before(home: Tensor, num_ranks: int) -> Tensor:
    """How many tokens before each lie on its rank, [N] int64."""
    on = home[:, None] == torch.arange(num_ranks, device=home.device)
    return on.cumsum(dim=0).gather(1, home[:, None])[:, 0] - 1
