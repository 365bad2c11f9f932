"""The plan of a batch in one launch: rows of a table gathered, tokens assigned, places counted; the same as plan.py.

Axes: T tokens, G ranks, P ranks padded to a power of two, M threads of a program, E consecutive tokens of each. One
program a chunk, and no program waits for another. Tiles are [P, M, E]: a thread holds all ranks of its tokens, and only
sums and counts of [P, M] cross threads. Measured on an H200 (docs/results.md); integers of 32 bits hold all values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime import plan as rule
from smoe_cli.runtime.exchange import Plan

COARSE_ROUNDS = tl.constexpr(rule.COARSE_ROUNDS)
WIDEST = tl.constexpr(1 << (rule.COARSE_ROUNDS - 1))
FINE_ROUNDS = tl.constexpr(rule.FINE_ROUNDS)
UNIT = tl.constexpr(rule.UNIT)
FIRST_STEP = tl.constexpr(rule.FIRST_STEP)
LAST_STEP = tl.constexpr(rule.LAST_STEP)
COSTS = tl.constexpr(rule.COSTS)
LEVELS = tl.constexpr(rule.LEVELS)
LOWEST = tl.constexpr(rule.LOWEST)
FIELDS = tl.constexpr(0x00FF00FF00FF00FF)


def plan_rows(table: Tensor, index: Tensor | None = None) -> Plan:
    """The plan of tokens whose scores are rows of a table. table: [V, G] uint8; index: [T] integers, None for each row
    once, in order. An index beyond the table takes its last row. Beyond eight ranks the plain form is asked.
    """
    if table.shape[1] > 8:
        return rule.plain_plan(rule.take_scores(table, index), table.shape[1])
    tokens, ranks = len(table if index is None else index), table.shape[1]
    quota = rule.rows_per_rank(tokens, ranks)
    token_of_place = torch.empty(ranks * quota, dtype=torch.int32, device=table.device)
    place_of_token = torch.empty(tokens, dtype=torch.int32, device=table.device)
    if tokens:
        chunks = rule.num_chunks(quota, ranks)
        block = max(32, triton.next_power_of_2(min(tokens, rule.chunk_rows(ranks) * ranks)))
        threads = 32 * num_warps(block)
        _plan_kernel[(chunks,)](
            table.contiguous(), None if index is None else index.contiguous(), place_of_token, token_of_place,
            tokens, quota, chunks, len(table),
            RANKS=ranks, PADDED=triton.next_power_of_2(ranks), EACH=block // threads, THREADS=threads,
            GATHER=index is not None, SPLIT=chunks > 1, num_warps=threads // 32,
        )  # fmt: skip
    return Plan(token_of_place, place_of_token, ranks)


def num_warps(block: int) -> int:
    """Measured on an H200: more threads meet more slowly."""
    return min(max(block // 256, 1), 8)


@triton.jit
def _mixed_bits(number):
    low = number & 0xFFFF
    low = low ^ (low >> 7)
    return ((low * 30011) & 0xFFFF) >> 8


@triton.jit
def _row_of_run(run, chunk, chunks, SPLIT: tl.constexpr):
    return run * chunks + (chunk + 256 * chunks - _mixed_bits(run * 40503)) % chunks if SPLIT else run


@triton.jit
def _last(key, PADDED: tl.constexpr):
    """P - 1 - rank of the highest key, [M, E]: a key's lowest bits, so that of equal values the lower rank wins."""
    return tl.max(key, axis=0) & (PADDED - 1)


@triton.jit
def _add(even, odd, more_even, more_odd):
    return even + more_even, odd + more_odd


@triton.jit
def _thread_counts(last, counted):
    """A thread's counted tokens by rank, four ranks in the 16-bit fields of each of two words, [M]. last: [M, E]."""
    words = tl.sum(counted.to(tl.int64) << (last * 8).to(tl.int64), axis=1)
    return words & FIELDS, (words >> 8) & FIELDS


@triton.jit
def _field(even, odd, last):
    return ((tl.where((last & 1) > 0, odd, even) >> ((last >> 1) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def _loads(last, counted, PADDED: tl.constexpr):
    """Counted tokens of every rank, [P]. last: [M, E], P - 1 - rank of a token.

    All ranks' counts cross the threads in two words, and come back as scalars: one meeting of the threads, no more.
    """
    even, odd = _thread_counts(last, counted)
    even, odd = tl.reduce((even, odd), 0, _add)
    return _field(even, odd, PADDED - 1 - tl.arange(0, PADDED))


@triton.jit
def _count_until(last, counted):
    """How many counted tokens lie on a token's rank up to and with it, in order of position, [M, E]."""
    even, odd = _thread_counts(last, counted)
    even_until, odd_until = tl.associative_scan((even, odd), 0, _add)
    before = _field((even_until - even)[:, None], (odd_until - odd)[:, None], last)
    inside = tl.cumsum(counted.to(tl.int64) << (last * 8).to(tl.int64), axis=1) >> (last * 8).to(tl.int64)
    return before + (inside & 0xFF).to(tl.int32)


@triton.jit
def _balancing_prices(key, noise, valid, quota, RANKS: tl.constexpr, PADDED: tl.constexpr):
    """Prices [P] at which few tokens are beyond the quota. key, noise: [P, M, E]."""
    rank = tl.arange(0, PADDED)
    price = tl.zeros_like(rank)
    inverse = (1 << 20) // quota
    for r in range(COARSE_ROUNDS):
        width = WIDEST >> r
        load = _loads(_last(key + ((width - 1) * noise - price[:, None, None]) * PADDED, PADDED), valid, PADDED)
        filled = (tl.minimum(load, 2 * quota) * inverse) >> 10
        change = ((width * (UNIT // 2) * filled) >> 10) - width * (UNIT // 2)
        price += tl.where((rank < RANKS) & (tl.max(load, axis=0) > quota), change, 0)
    best = price
    fewest = tl.full((), 1 << 30, tl.int32)
    step = tl.zeros_like(rank) + FIRST_STEP
    before = tl.zeros_like(rank)
    r = tl.full((), 0, tl.int32)
    while (r < FINE_ROUNDS) & (fewest > ((quota * RANKS) >> 7)):
        load = _loads(_last(key - (price * PADDED)[:, None, None], PADDED), valid, PADDED)
        over = tl.where(rank < RANKS, load - quota, 0)
        beyond = tl.sum(tl.maximum(over, 0), axis=0)
        best = tl.where(beyond < fewest, price, best)
        fewest = tl.minimum(beyond, fewest)
        side = tl.minimum(tl.maximum(over, -1), 1)
        turned = side * before
        longer = tl.where(turned > 0, step + (step >> 2), step)
        step = tl.where(turned < 0, tl.maximum(step >> 1, LAST_STEP), longer)
        price += side * step
        before = side
        r += 1
    return best


@triton.jit
def _move_beyond(key, last, valid, load, quota, RANKS: tl.constexpr, PADDED: tl.constexpr):
    """Ranks beyond the quota give up the tokens that lose least on the best open rank. Returns last, [M, E]."""
    rank = tl.arange(0, PADDED)
    order = (PADDED - 1 - rank)[:, None, None]
    while tl.max(load, axis=0) > quota:
        is_open = (load < quota) & (rank < RANKS)
        leaving = tl.maximum(load - quota, 0)
        on = last[None, :, :] == order
        here = tl.max(tl.where(on, key, LOWEST * PADDED), axis=0)
        target = tl.max(tl.where(is_open[:, None, None], key, LOWEST * PADDED), axis=0)
        level = here // PADDED - target // PADDED
        if RANKS > 2:
            level = (((tl.minimum(level, COSTS - 1) + 1).to(tl.float32).to(tl.int32, bitcast=True)) >> 22) - 254
        asking = valid & (tl.sum(tl.where(on, leaving[:, None, None], 0), axis=0) > 0)
        border = tl.zeros_like(load)
        bit = tl.full((), 16 if RANKS > 2 else LEVELS // 2, tl.int32)
        while bit > 0:
            own = tl.sum(tl.where(on, (border + bit)[:, None, None], 0), axis=0)
            border += tl.where(_loads(last, asking & (level < own), PADDED) <= leaving, bit, 0)
            bit = bit >> 1
        own = tl.sum(tl.where(on, border[:, None, None], 0), axis=0)
        below = asking & (level < own)
        tied = asking & (level == own)
        among = leaving - _loads(last, below, PADDED)
        fits = _count_until(last, tied) <= tl.sum(tl.where(on, among[:, None, None], 0), axis=0)
        last = tl.where(below | (tied & fits), target & (PADDED - 1), last)
        load = _loads(last, valid, PADDED)
    return last


@triton.jit(do_not_specialize=["tokens", "quota", "chunks", "rows"])
def _plan_kernel(
    table, index, place_of_token, token_of_place, tokens, quota, chunks, rows,
    RANKS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr,
    GATHER: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    rank = tl.arange(0, PADDED)
    real = rank < RANKS
    member = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    token = _row_of_run(member // RANKS, chunk, chunks, SPLIT) * RANKS + member % RANKS
    valid = token < tokens
    row = (
        tl.minimum(tl.load(index + token, mask=valid, other=0), rows - 1).to(tl.int64) if GATHER else token.to(tl.int64)
    )
    here = table + (row.to(tl.int64) * RANKS)[None, :, :] + rank[:, None, None]
    score = tl.load(here, mask=valid[None, :, :] & real[:, None, None], other=0).to(tl.int32)
    runs = quota // chunks
    share = runs + (_row_of_run(runs, chunk, chunks, SPLIT) < quota).to(tl.int32)

    if RANKS > 2:
        noise = _mixed_bits(member[None, :, :] * 40503 + rank[:, None, None] * 24593)
        value = score * UNIT + noise
    else:
        value = score
    value = tl.where(real[:, None, None], value, LOWEST // 2)
    key = value * PADDED + (PADDED - 1 - rank)[:, None, None]
    if RANKS > 2:
        key -= (_balancing_prices(key, noise, valid, share, RANKS, PADDED) * PADDED)[:, None, None]
    last = _last(key, PADDED)
    last = _move_beyond(key, last, valid, _loads(last, valid, PADDED), share, RANKS, PADDED)

    before = _count_until(last, valid) - 1
    place = (PADDED - 1 - last) * quota + _row_of_run(before, chunk, chunks, SPLIT)
    tl.store(place_of_token + token, place, mask=valid)
    tl.store(token_of_place + place, token, mask=valid)
    empty = share - 1 - tl.arange(0, PADDED)[None, :]
    is_empty = (empty >= _loads(last, valid, PADDED)[:, None]) & real[:, None]
    tl.store(token_of_place + rank[:, None] * quota + _row_of_run(empty, chunk, chunks, SPLIT), -1, mask=is_empty)
