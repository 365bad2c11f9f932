"""The plan of a batch in one launch: rows of a table gathered, tokens assigned, places counted; the same as plan.py.

Axes: T tokens, G ranks, P ranks padded to a power of two, M threads of a program, E consecutive tokens of each. One
program a chunk, and no program waits for another. Tiles are [P, E, M]: a thread holds all ranks of its tokens, only
counts cross threads, and every thread keeps all ranks' books ([P, M], alike in all), since to share them would take
longer. Measured on an H200 (docs/results.md); integers of 32 bits hold all values.

Numbers by rank lie side by side as fields of words: a thread's own are the P fields of one word of 32 bits, the last
rank's the lowest, the block's the 16-bit fields of two of 64. A key's lowest five bits say where its rank's field
begins, so that of equal values the lower rank wins.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoe_cli.runtime import plan as rule
from smoe_cli.runtime.block_sums import before_code, block_sums, is_sound, runs_here, sums_before, sums_code
from smoe_cli.runtime.exchange import Plan

ROUNDS = tl.constexpr(rule.ROUNDS)
FIRST_STEP = tl.constexpr(rule.FIRST_STEP)
SMALLER = tl.constexpr(rule.SMALLER)
CROWDED = tl.constexpr(rule.CROWDED)
NARROWEST = tl.constexpr(rule.NARROWEST)
UNIT = tl.constexpr(rule.UNIT)
LEVELS = tl.constexpr(rule.LEVELS)
COSTS = tl.constexpr(rule.COSTS)
LOWEST = tl.constexpr(rule.LOWEST)
KEY = tl.constexpr(32)
"""What a value is multiplied by to leave room for its rank's field."""
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
        _plan_kernel[(chunks,)](*arguments, **shape, **_assembly(arguments, shape, warps))
    return Plan(token_of_place, place_of_token, ranks)


def num_warps(block: int) -> int:
    """Measured on an H200: more threads meet more slowly. A thread has no more tokens than a field can count."""
    return min(max(block // 128, 1), 4 if block <= 1024 else 8)


_sound: dict[tuple[object, ...], bool] = {}


def _assembly(arguments: tuple[Any, ...], shape: dict[str, Any], warps: int) -> dict[str, str]:
    """The assembly of sums where it is sound in the kernel compiled for these arguments, else none. Scores loaded one
    by one would spread a thread's words."""
    table, index = arguments[:2]
    none = {"SUMS": "", "BEFORE": ""}
    if shape["ROW"] is None or not runs_here(table.device):
        return none
    codes = {"SUMS": sums_code(warps), "BEFORE": before_code(warps)}
    given = tuple(None if one is None else (one.dtype, one.data_ptr() % 16, one.device) for one in (table, index))
    known = (*shape.values(), *given)
    if known not in _sound:
        kernel = _plan_kernel.warmup(*arguments, **shape, **codes, grid=(1,))
        _sound[known] = is_sound(kernel.asm["ttgir"], warps)
    return codes if _sound[known] else none


@triton.jit
def _mixed_bits(number):
    low = number & 0xFFFF
    low = low ^ (low >> 7)
    return ((low * 30011) & 0xFFFF) >> 8


@triton.jit
def _row_of_run(run, chunk, chunks, SPLIT: tl.constexpr):
    return run * chunks + (chunk + 256 * chunks - _mixed_bits(run * 40503)) % chunks if SPLIT else run


@triton.jit
def _noise(member, rank):
    bits = (2 * member + rank // 4 + 1).to(tl.uint32) * 0x1E3779B1
    bits = (bits ^ (bits >> 16)) * 0x05EBCA6B
    return (((bits ^ (bits >> 16)) >> (8 * (rank % 4)).to(tl.uint32)) & 255).to(tl.int32)


@triton.jit
def _fields(PADDED: tl.constexpr):
    """Where every rank's field begins, [P, 1]."""
    return (PADDED - 1 - tl.arange(0, PADDED))[:, None] * (32 // PADDED)


@triton.jit
def _packed(values, PADDED: tl.constexpr):
    """Values by rank as the fields of one word, [1, M]. values: [P, M], none larger than its field."""
    return tl.sum(values << _fields(PADDED), axis=0, keep_dims=True)


@triton.jit
def _own(word, field, PADDED: tl.constexpr):
    """What a token's rank has of a packed word, [E, M]."""
    return (word >> field) & ((1 << (32 // PADDED)) - 1)


@triton.jit
def _wide(word, PADDED: tl.constexpr):
    """The fields of one word [1, M] as 16-bit fields of two."""
    if PADDED == 2:
        one = word.to(tl.int64)
        other = tl.zeros_like(one)
    elif PADDED == 4:
        one = (word & 0xFF00FF).to(tl.int64) | (((word >> 8) & 0xFF00FF).to(tl.int64) << 32)
        other = tl.zeros_like(one)
    else:
        one = (word & 0xF000F).to(tl.int64) | (((word >> 4) & 0xF000F).to(tl.int64) << 32)
        other = ((word >> 8) & 0xF000F).to(tl.int64) | (((word >> 12) & 0xF000F).to(tl.int64) << 32)
    return one, other


@triton.jit
def _of_wide(one, other, field, PADDED: tl.constexpr):
    """A 16-bit field of two words. field: where it begins in the packed word."""
    HALF: tl.constexpr = 16 // (32 // PADDED)
    number = field // (32 // PADDED)
    part = number % HALF
    word = tl.where(part > 1, other, one)
    return ((word >> ((part % 2) * 32 + number // HALF * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def _loads(field, counted, turn, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """Counted tokens of every rank, [P, M]. field: [E, M] of a token's rank; turn: as of `block_sums`."""
    one, other = _wide(tl.sum(counted.to(tl.int32) << field, axis=0, keep_dims=True), PADDED)
    one, other = block_sums(one, other, turn, SUMS)
    return _of_wide(one, other, _fields(PADDED), PADDED)


@triton.jit
def _count_until(field, counted, PADDED: tl.constexpr, BEFORE: tl.constexpr):
    """Counted tokens of every rank in the threads before, two words [1, M]; and of a token's rank in its own thread, up
    to and with it, [E, M]."""
    many = counted.to(tl.int32) << field
    one, other = _wide(tl.sum(many, axis=0, keep_dims=True), PADDED)
    one, other = sums_before(one, other, BEFORE)
    return one, other, _own(tl.cumsum(many, axis=0), field, PADDED)


@triton.jit
def _balanced(key, noise, valid, quota, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """Keys with noise, less prices at which few tokens are beyond the quota. key, noise: [P, E, M]."""
    discount = tl.zeros([PADDED, key.shape[2]], tl.int32)
    inverse = (UNIT << 8) // quota
    step = tl.full((), FIRST_STEP * 16, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while turn < ROUNDS:
        width = tl.maximum(step >> 4, NARROWEST)
        best = tl.max(key + noise * (width * KEY) + discount[:, None, :], axis=0)
        load = _loads(best & (KEY - 1), valid, turn, PADDED, SUMS)
        rate = tl.where(tl.max(load, axis=0, keep_dims=True) > quota, step * inverse, 0)
        discount -= ((tl.minimum(load - quota, quota * CROWDED) * rate) >> 12) * KEY
        step = (step * SMALLER) >> 4
        turn += 1
    return key + noise * (NARROWEST * KEY) + discount[:, None, :]


@triton.jit
def _border(level, asking, field, leaving, LEVELS: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """The highest level of every rank below which no more tokens ask than are leaving, packed, and how many ask there,
    [P, M]. level, asking, field: [E, M]; leaving: [P, M].
    """
    EVERY: tl.constexpr = 0xFFFFFFFF // ((1 << (32 // PADDED)) - 1)
    border = tl.zeros([1, level.shape[1]], tl.int32)
    inside = tl.zeros_like(leaving)
    bit = tl.full((), LEVELS // 2, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while bit > 0:
        count = _loads(field, asking & (level < _own(border + bit * EVERY, field, PADDED)), turn, PADDED, SUMS)
        border += _packed(tl.where(count <= leaving, bit, 0), PADDED)
        inside = tl.where(count <= leaving, count, inside)
        bit = bit >> 1
        turn += 1
    return border, inside


@triton.jit
def _assign(key, valid, quota, RANKS: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr, BEFORE: tl.constexpr):
    """The field of every token's rank, [E, M], and every rank's load, [P, M]: each token on its best rank, but ranks
    beyond the quota give up the tokens that lose least on the best open rank.
    """
    real = tl.arange(0, PADDED)[:, None] < RANKS
    held = tl.max(key, axis=0)
    load = _loads(held & (KEY - 1), valid, 0, PADDED, SUMS)
    passes = tl.full((), 0, tl.int32)
    while (passes < RANKS) & (tl.max(load) > quota):
        passes += 1
        field = held & (KEY - 1)
        closed = tl.where((load < quota) & real, 0, -LOWEST * KEY)
        leaving = tl.maximum(load - quota, 0)
        target = tl.max(key - closed[:, None, :], axis=0)
        cost = ((held | (KEY - 1)) - target).to(tl.uint32) // KEY
        if RANKS > 2:  # the binary logarithm: the exponent of a float
            level = ((cost // UNIT + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            level = tl.minimum(level, LEVELS - 1)
        else:
            level = cost.to(tl.int32)
        asking = valid & (_own(_packed((leaving > 0).to(tl.int32), PADDED), field, PADDED) > 0)
        border, inside = _border(level, asking, field, leaving, LEVELS if RANKS > 2 else COSTS, PADDED, SUMS)
        own = _own(border, field, PADDED)
        tied = asking & (level == own)
        one, other, until = _count_until(field, tied, PADDED, BEFORE)
        room = leaving - inside - _of_wide(one, other, _fields(PADDED), PADDED)
        room = _packed(tl.minimum(tl.maximum(room, 0), key.shape[1]), PADDED)
        goes = (asking & (level < own)) | (tied & (until <= _own(room, field, PADDED)))
        held = tl.where(goes, target, held)
        load = _loads(held & (KEY - 1), valid, 0, PADDED, SUMS)
    return held & (KEY - 1), load


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
    ROW: tl.constexpr, GATHER: tl.constexpr, SPLIT: tl.constexpr, SUMS: tl.constexpr, BEFORE: tl.constexpr,
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
    value = score * (UNIT if RANKS > 2 else 1)
    key = tl.where(rank < RANKS, value, LOWEST // 2) * KEY + _fields(PADDED)[:, :, None]
    if RANKS > 2:
        noise = _noise(tl.reshape(member, [EACH, THREADS])[None, :, :], rank)
        key = _balanced(key, noise, valid, share, PADDED, SUMS)
    field, load = _assign(key, valid, share, RANKS, PADDED, SUMS, BEFORE)

    one, other, until = _count_until(field, valid, PADDED, BEFORE)
    before = _of_wide(one, other, field, PADDED) + until - 1
    place = (PADDED - 1 - field // (32 // PADDED)) * quota + _row_of_run(before, chunk, chunks, SPLIT)
    place = tl.reshape(place, [EACH * THREADS])
    tl.store(place_of_token + token, place, mask=there)
    tl.store(token_of_place + place, token, mask=there)
    behind = tl.arange(0, THREADS)[None, :]
    empty = share - 1 - behind
    home = tl.arange(0, PADDED)[:, None]
    place = home * quota + _row_of_run(empty, chunk, chunks, SPLIT)
    tl.store(token_of_place + place, -1, mask=(empty >= load) & (behind < RANKS) & (home < RANKS))
