"""The plan of a batch in one launch: rows of a table gathered, tokens assigned, places counted; the same as plan.py.

Axes: T tokens, G ranks, P ranks padded to a power of two, M threads of a program, E consecutive tokens of each. One
program a chunk, and no program waits for another. Tiles are [P, E, M]: a thread holds all ranks of its tokens, only
counts cross threads, and every thread keeps all ranks' books ([P, M], alike in all), since to share them would take
longer. Measured on an H200 (docs/results.md); integers of 32 bits hold all values.

Counts by rank lie side by side in words, in the order of P - 1 - rank: a key's lowest bits, so that of equal values the
lower rank wins. A thread's own are the P fields of 32 bits; the block's are the 16-bit fields of two words, one of even
and one of odd P - 1 - rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime import plan as rule
from smoe_cli.runtime.block_sums import block_sums, is_sound, runs_here, sums_code
from smoe_cli.runtime.exchange import Plan

COARSE_ROUNDS = tl.constexpr(rule.COARSE_ROUNDS)
WIDEST = tl.constexpr(1 << (rule.COARSE_ROUNDS - 1))
FINE_ROUNDS = tl.constexpr(rule.FINE_ROUNDS)
LOOK = tl.constexpr(4)
"""Fine rounds between two looks at whether enough is done."""
UNIT = tl.constexpr(rule.UNIT)
FIRST_STEP = tl.constexpr(rule.FIRST_STEP)
LAST_STEP = tl.constexpr(rule.LAST_STEP)
COSTS = tl.constexpr(rule.COSTS)
LEVELS = tl.constexpr(rule.LEVELS)
LOWEST = tl.constexpr(rule.LOWEST)
ROWS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What a row of scores is loaded as, by its bytes."""


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
        table, index = table.contiguous(), None if index is None else index.contiguous()
        chunks = rule.num_chunks(quota, ranks)
        block = max(32, triton.next_power_of_2(min(tokens, rule.chunk_rows(ranks) * ranks)))
        warps = num_warps(block)
        shape = {
            "RANKS": ranks,
            "PADDED": max(2, triton.next_power_of_2(ranks)),
            "EACH": block // (32 * warps),
            "THREADS": 32 * warps,
            "ROW": ROWS.get(ranks) if table.data_ptr() % ranks == 0 else None,
            "GATHER": index is not None,
            "SPLIT": chunks > 1,
            "num_warps": warps,
        }
        arguments = (table, index, place_of_token, token_of_place, tokens, quota, chunks, len(table))
        _plan_kernel[(chunks,)](*arguments, **shape, SUMS=_sums(arguments, shape, warps))
    return Plan(token_of_place, place_of_token, ranks)


def num_warps(block: int) -> int:
    """Measured on an H200: more threads meet more slowly."""
    return min(max(block // 128, 1), 4 if block <= 1024 else 8)


_sound: dict[tuple[object, ...], bool] = {}


def _sums(arguments: tuple[Any, ...], shape: dict[str, Any], warps: int) -> str:
    """`sums_code` where it is sound in the kernel compiled for these arguments, else nothing. Scores loaded one by one
    would spread a thread's words."""
    table, index = arguments[:2]
    if shape["ROW"] is None or not runs_here(table.device):
        return ""
    code = sums_code(warps)
    given = tuple(None if one is None else (one.dtype, one.data_ptr() % 16, one.device) for one in (table, index))
    known = (*shape.values(), *given)
    if known not in _sound:
        kernel = _plan_kernel.warmup(*arguments, **shape, SUMS=code, grid=(1,))
        _sound[known] = is_sound(kernel.asm["ttgir"], warps)
    return code if _sound[known] else ""


@triton.jit
def _mixed_bits(number):
    low = number & 0xFFFF
    low = low ^ (low >> 7)
    return ((low * 30011) & 0xFFFF) >> 8


@triton.jit
def _row_of_run(run, chunk, chunks, SPLIT: tl.constexpr):
    return run * chunks + (chunk + 256 * chunks - _mixed_bits(run * 40503)) % chunks if SPLIT else run


@triton.jit
def _own_counts(last, counted, PADDED: tl.constexpr):
    """A thread's counted tokens by rank, two words [1, M]. last: [E, M], P - 1 - rank of a token."""
    BITS: tl.constexpr = 32 // PADDED
    word = tl.sum(counted.to(tl.int32) << (last * BITS), axis=0, keep_dims=True)
    even = tl.zeros_like(word).to(tl.int64)
    odd = even
    for pair in tl.static_range(PADDED // 2):
        even |= ((word >> (2 * pair * BITS)) & ((1 << BITS) - 1)).to(tl.int64) << (16 * pair)
        odd |= ((word >> ((2 * pair + 1) * BITS)) & ((1 << BITS) - 1)).to(tl.int64) << (16 * pair)
    return even, odd


@triton.jit
def _field(even, odd, last):
    return ((tl.where((last & 1) > 0, odd, even) >> ((last >> 1) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def _loads(last, counted, turn, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """Counted tokens of every rank, [P, M]. last: [E, M]; turn: as of `block_sums`."""
    even, odd = _own_counts(last, counted, PADDED)
    even, odd = block_sums(even, odd, turn, SUMS)
    return _field(even, odd, (PADDED - 1 - tl.arange(0, PADDED))[:, None])


@triton.jit
def _of_rank(values, last, PADDED: tl.constexpr):
    """What its rank has of values, for every token, [E, M]. values: [P, M], 0 to 65,535."""
    place = (PADDED - 1 - tl.arange(0, PADDED))[:, None]
    fields = values.to(tl.int64) << ((place >> 1) * 16).to(tl.int64)
    even = tl.sum(tl.where((place & 1) > 0, 0, fields), axis=0, keep_dims=True)
    odd = tl.sum(tl.where((place & 1) > 0, fields, 0), axis=0, keep_dims=True)
    return _field(even, odd, last)


@triton.jit
def _add(even, odd, more_even, more_odd):
    return even + more_even, odd + more_odd


@triton.jit
def _count_until(last, counted, PADDED: tl.constexpr):
    """How many counted tokens lie on a token's rank up to and with it, in order of position, [E, M]."""
    even, odd = _own_counts(last, counted, PADDED)
    even_until, odd_until = tl.associative_scan((even, odd), 1, _add)
    before = _field(even_until - even, odd_until - odd, last)
    inside = tl.cumsum(counted.to(tl.int64) << (last * 8).to(tl.int64), axis=0) >> (last * 8).to(tl.int64)
    return before + (inside & 0xFF).to(tl.int32)


@triton.jit
def _balancing_prices(key, noise, valid, quota, RANKS: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """Prices [P, M] at which few tokens are beyond the quota. key, noise: [P, E, M]."""
    real = tl.arange(0, PADDED)[:, None] < RANKS
    price = tl.zeros([PADDED, key.shape[2]], tl.int32)
    inverse = (1 << 20) // quota
    r = tl.full((), 0, tl.int32)
    while r < COARSE_ROUNDS:
        width = WIDEST >> r
        last = tl.max(key + ((width - 1) * noise - price[:, None, :]) * PADDED, axis=0) & (PADDED - 1)
        load = _loads(last, valid, r, PADDED, SUMS)
        filled = (tl.minimum(load, 2 * quota) * inverse) >> 10
        change = ((width * (UNIT // 2) * filled) >> 10) - width * (UNIT // 2)
        price += tl.where(real & (tl.max(load, axis=0, keep_dims=True) > quota), change, 0)
        r += 1
    best = price
    enough = (quota * RANKS) >> 7
    fewest = tl.full([1, key.shape[2]], 1 << 30, tl.int32)
    step = tl.zeros_like(price) + FIRST_STEP
    before = tl.zeros_like(price)
    r = tl.full((), 0, tl.int32)
    while (r < FINE_ROUNDS) & (tl.max(fewest) > enough):
        for turn in range(LOOK):
            last = tl.max(key - (price * PADDED)[:, None, :], axis=0) & (PADDED - 1)
            over = tl.where(real, _loads(last, valid, turn, PADDED, SUMS) - quota, 0)
            beyond = tl.sum(tl.maximum(over, 0), axis=0, keep_dims=True)
            better = (beyond < fewest) & (fewest > enough)
            best = tl.where(better, price, best)
            fewest = tl.where(better, beyond, fewest)
            side = tl.minimum(tl.maximum(over, -1), 1)
            turned = side * before
            longer = tl.where(turned > 0, step + (step >> 2), step)
            step = tl.where(turned < 0, tl.maximum(step >> 1, LAST_STEP), longer)
            price += side * step
            before = side
        r += LOOK
    return best


@triton.jit
def _assign(key, valid, quota, RANKS: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """P - 1 - rank of every token, [E, M], and every rank's load, [P, M]: each token on its best rank, but ranks beyond
    the quota give up the tokens that lose least on the best open rank.
    """
    real = tl.arange(0, PADDED)[:, None] < RANKS
    held = tl.max(key, axis=0)
    load = _loads(held & (PADDED - 1), valid, 0, PADDED, SUMS)
    passes = tl.full((), 0, tl.int32)
    while (passes < RANKS) & (tl.max(load) > quota):
        passes += 1
        last = held & (PADDED - 1)
        closed = tl.where((load < quota) & real, 0, -LOWEST * PADDED)
        leaving = tl.maximum(load - quota, 0)
        target = tl.max(key - closed[:, None, :], axis=0)
        level = (held - last - target + (target & (PADDED - 1))) // PADDED
        if RANKS > 2:
            level = ((tl.minimum(level, COSTS - 1) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 254
        asking = valid & (_of_rank(leaving, last, PADDED) > 0)
        border = tl.zeros_like(load)
        bit = tl.full((), 16 if RANKS > 2 else LEVELS // 2, tl.int32)
        turn = tl.full((), 0, tl.int32)
        while bit > 0:
            below = asking & (level < _of_rank(border + bit, last, PADDED))
            border += tl.where(_loads(last, below, turn, PADDED, SUMS) <= leaving, bit, 0)
            bit = bit >> 1
            turn += 1
        own = _of_rank(border, last, PADDED)
        below = asking & (level < own)
        tied = asking & (level == own)
        among = leaving - _loads(last, below, 0, PADDED, SUMS)
        fits = _count_until(last, tied, PADDED) <= _of_rank(among, last, PADDED)
        held = tl.where(below | (tied & fits), target, held)
        load = _loads(held & (PADDED - 1), valid, 0, PADDED, SUMS)
    return held & (PADDED - 1), load


@triton.jit
def _scores(table, row, valid, RANKS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr):
    """Rows of the table, [P, N]. row, valid: [N]."""
    rank = tl.arange(0, PADDED)[:, None]
    if ROW is not None:
        whole = tl.load(table.to(tl.pointer_type(ROW)) + row, mask=valid, other=0)
        return ((whole[None, :] >> (rank * 8).to(ROW)) & 255).to(tl.int32)
    here = table + (row * RANKS)[None, :] + rank
    return tl.load(here, mask=valid[None, :] & (rank < RANKS), other=0).to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "quota", "chunks", "rows"])
def _plan_kernel(
    table, index, place_of_token, token_of_place, tokens, quota, chunks, rows,
    RANKS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr,
    ROW: tl.constexpr, GATHER: tl.constexpr, SPLIT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    number = tl.arange(0, EACH * THREADS)
    member = number % THREADS * EACH + number // THREADS
    token = _row_of_run(member // RANKS, chunk, chunks, SPLIT) * RANKS + member % RANKS
    there = token < tokens
    row = tl.minimum(tl.load(index + token, mask=there, other=0), rows - 1) if GATHER else token
    score = tl.reshape(_scores(table, row.to(tl.int64), there, RANKS, PADDED, ROW), [PADDED, EACH, THREADS])
    runs = quota // chunks
    share = runs + (_row_of_run(runs, chunk, chunks, SPLIT) < quota).to(tl.int32)

    rank = tl.arange(0, PADDED)[:, None, None]
    valid = tl.reshape(there, [EACH, THREADS])
    value = score
    if RANKS > 2:
        noise = _mixed_bits(tl.reshape(member, [EACH, THREADS])[None, :, :] * 40503 + rank * 24593)
        value = score * UNIT + noise
    key = tl.where(rank < RANKS, value, LOWEST // 2) * PADDED + (PADDED - 1 - rank)
    if RANKS > 2:
        key -= (_balancing_prices(key, noise, valid, share, RANKS, PADDED, SUMS) * PADDED)[:, None, :]
    last, load = _assign(key, valid, share, RANKS, PADDED, SUMS)

    before = _count_until(last, valid, PADDED) - 1
    place = (PADDED - 1 - last) * quota + _row_of_run(before, chunk, chunks, SPLIT)
    place = tl.reshape(place, [EACH * THREADS])
    tl.store(place_of_token + token, place, mask=there)
    tl.store(token_of_place + place, token, mask=there)
    behind = tl.arange(0, THREADS)[None, :]
    empty = share - 1 - behind
    home = tl.arange(0, PADDED)[:, None]
    place = home * quota + _row_of_run(empty, chunk, chunks, SPLIT)
    tl.store(token_of_place + place, -1, mask=(empty >= load) & (behind < RANKS) & (home < RANKS))
