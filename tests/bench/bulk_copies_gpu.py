"""Whether copies in bulk, which sm_90 has (`cp.async.bulk`), bring rows to a peer faster than stores: SAG both ways.

    torchrun --nproc-per-node 2 tests/bench/bulk_copies_gpu.py

Environment as for `kernels_gpu.py`, two GPUs, half a minute. Prints microseconds by bytes, beside the copy engine's,
and the rate of each between the smallest and the largest: what a row more costs, without what a call costs.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from kernels_gpu import CALLS, MIB, library_works, plainly, summed

from smoe_cli.runtime import reference
from smoe_cli.runtime.barrier import meet
from smoe_cli.runtime.region import CODES, Sizes
from smoe_cli.runtime.serving import join_ranks
from smoe_cli.runtime.symmetric import SymmetricExchange
from smoe_cli.runtime.timing import Clock

HIDDEN, CHUNK = 4096, 1024
THREADS = tl.constexpr(32)
TOKENS, BLOCKS = (4096, 16384, 32768), (264, 528, 792)

COPY = f"""{{
.reg .pred live, done;
.reg .b32 thread, stage, arrived;
.reg .b64 state;
.shared .align 128 .b8 stages[{32 * CHUNK}];
.shared .align 8 .b64 arrivals[32];
setp.ne.u32 live, $2, 0;
@!live bra SKIP;
mov.u32 thread, %tid.x;
mov.u32 stage, stages;
mad.lo.u32 stage, thread, {CHUNK}, stage;
mov.u32 arrived, arrivals;
mad.lo.u32 arrived, thread, 8, arrived;
cp.async.bulk.wait_group.read 0;
mbarrier.init.shared::cta.b64 [arrived], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 state, [arrived], $2;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [stage], [$1], $2, [arrived];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 done, [arrived], 0;
@!done bra WAIT;
mbarrier.inval.shared::cta.b64 [arrived];
cp.async.bulk.global.shared::cta.bulk_group [$3], [stage], $2;
cp.async.bulk.global.shared::cta.bulk_group [$4], [stage], $2;
cp.async.bulk.commit_group;
SKIP:
mov.u32 $0, 0;
}}"""
"""A thread copies $2 bytes, none or at most CHUNK, from $1 to $3 and $4, by way of its own part of shared memory."""


@triton.jit(do_not_specialize=["gathered_at", "rank", "cap", "code", "timeout"])
def bulk_sag_kernel(
    rows, token_of_place, bases, flags, epochs, failures, gathered_at, rank, cap, code, timeout,
    H: tl.constexpr, C: tl.constexpr, COPY: tl.constexpr, PROTOCOL: tl.constexpr,
):  # fmt: skip
    """`sag_kernel` of two ranks, chunk by chunk: rows: [cap, H] of two bytes each; C: bytes of a chunk."""
    there = tl.load(bases + 1 - rank).to(tl.int64) + gathered_at
    here = tl.load(bases + rank).to(tl.int64) + gathered_at
    chunks: tl.constexpr = H * 2 // C
    for first in range(tl.program_id(0) * THREADS, cap * chunks, tl.num_programs(0) * THREADS):
        chunk = first + tl.arange(0, THREADS)
        place, offset = (chunk // chunks).to(tl.int64), (chunk % chunks) * C
        token = tl.load(token_of_place + rank * cap + place, mask=place < cap, other=-1).to(tl.int64)
        tl.inline_asm_elementwise(
            COPY,
            "=r,l,r,l,l",
            [
                rows.to(tl.int64) + place * H * 2 + offset,
                tl.where(token >= 0, C, 0),
                there + token * H * 2 + offset,
                here + token * H * 2 + offset,
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;",
        "=r,r",
        [rank],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    meet(bases, flags, epochs, failures, rank, code, timeout, 2, PROTOCOL)


def bulk_all_gather(exchange, rows, plan, blocks):
    """As `SymmetricExchange.all_gather`."""
    region, slot = exchange.region, exchange._gather_slot()
    bulk_sag_kernel[(blocks,)](
        rows, plan.token_of_place, region.bases, region.flags, region.epochs, region.failures,
        region.offsets[f"gathered{slot}"], region.rank, len(rows), CODES["all_gather"], region.timeout,
        H=HIDDEN, C=CHUNK, COPY=COPY, PROTOCOL=region.protocol, num_warps=1,
    )  # fmt: skip
    return region.view(f"gathered{slot}", rows.dtype, len(plan.place_of_token), HIDDEN)


def measured(exchange, clock, tokens):
    """Seconds of each way at one size. Raises AssertionError where a copy in bulk brings other rows."""
    inputs, clock = summed(exchange, tokens), clock.pooled()
    rows, wanted = inputs.homes[exchange.rank], reference.all_gather(inputs.homes, inputs.plan)
    works = {"stores": lambda: exchange.all_gather(rows, inputs.plan)[0]}
    for blocks in BLOCKS:
        works[f"bulk, {blocks} blocks"] = lambda blocks=blocks: bulk_all_gather(exchange, rows, inputs.plan, blocks)
    for work in works.values():
        assert torch.equal(work(), wanted)
    prepared = {name: clock.prepare(work, CALLS, exchange.capture) for name, work in works.items()}
    push = "copy engine push"
    prepared[push] = clock.prepare(library_works(exchange, inputs)[push], CALLS, plainly)
    seconds = clock.seconds(prepared)
    exchange.check()
    return seconds


def main():
    clock = Clock(join_ranks("cuda"), repeats=11)
    exchange = SymmetricExchange(Sizes(max(TOKENS), HIDDEN, 8, torch.bfloat16), clock.device)
    sent = {tokens: tokens * HIDDEN for tokens in TOKENS}  # half of the rows of two bytes
    found = {tokens: measured(exchange, clock, tokens) for tokens in TOKENS}
    if dist.get_rank() == 0:
        small, large = TOKENS[0], TOKENS[-1]
        for name in found[small]:
            times = ", ".join(
                f"{found[tokens][name] * 1e6:.1f} us of {sent[tokens] / MIB:.0f} MiB" for tokens in TOKENS
            )
            rate = (sent[large] - sent[small]) / (found[large][name] - found[small][name])
            print(f"{name}: {times}; {rate / 1e9:.0f} GB/s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
