"""Signals between the ranks of a symmetric region: flags that only count up, and waits that end.

Axes: G ranks, S slots, one for each block that signals for itself and MEETING for a kernel as a whole.

flags: [S, G] int32 at the start of every rank's region; flags[s, r] is written by rank r alone.
epochs: [S] int32, this rank's own: how often slot s was signalled. It lives on the device, so a replayed CUDA graph
needs nothing from the host, and since flags are compared by difference it may wrap.
failures: [G] int32, this rank's own: what was waited for when rank g was given up (0: nothing).

On the GPU signal and wait are PTX: a release and an acquire at system scope by the first G threads, one peer each, with
no block barrier inside the spin. The interpreter has no PTX; there host atomics do the same (PROTOCOL).
"""

import triton
import triton.language as tl

from smoe_cli.runtime import launch

PTX, ATOMICS, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""PROTOCOL: on the GPU, in the interpreter, and no waiting at all (a test of the tests)."""

POLL = tl.constexpr(20_000)
"""ns that a poll takes in the interpreter, at least; there the time limit is a number of polls."""

MEETING, ARRIVED = tl.constexpr(launch.MAX_BLOCKS), tl.constexpr(launch.MAX_BLOCKS + 1)
"""Slots behind those of blocks: a kernel's own, and where its blocks are counted."""


@triton.jit
def signal(bases, slot, epoch, rank, G: tl.constexpr, PROTOCOL: tl.constexpr):
    """Tell every rank that all this block stored before is there. bases: [G] int64 addresses of the ranks' regions."""
    tl.debug_barrier()
    if PROTOCOL == PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            .reg .u32 peer;
            .reg .u64 flag;
            mov.u32 peer, %tid.x;
            setp.lt.u32 mine, peer, $4;
            mul.wide.u32 flag, peer, 8;
            add.u64 flag, flag, $1;
            @mine ld.global.u64 flag, [flag];
            add.u64 flag, flag, $2;
            @mine st.release.sys.global.u32 [flag], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,r",
            [bases.to(tl.int64), (rank + slot * G).to(tl.int64) * 4, epoch, G],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for peer in tl.static_range(G):
            flag = tl.load(bases + peer).to(tl.pointer_type(tl.int32)) + slot * G + rank
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def wait(flags, slot, epoch, failures, code, timeout, G: tl.constexpr, PROTOCOL: tl.constexpr):
    """Wait until every rank has signalled `epoch`; after `timeout` ns note `code` for those that have not and go on.

    A rank that was given up before is not waited for again.
    """
    if PROTOCOL == PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine, done, lost, early;
            .reg .u32 peer, seen, before;
            .reg .u64 flag, failure, start, now;
            mov.u32 peer, %tid.x;
            setp.ge.u32 done, peer, $6;
            @done bra LEAVE;
            mul.wide.u32 failure, peer, 4;
            add.u64 flag, failure, $1;
            add.u64 failure, failure, $3;
            ld.global.u32 before, [failure];
            mov.u64 start, %globaltimer;
            POLL:
            ld.acquire.sys.global.u32 seen, [flag];
            sub.s32 seen, seen, $2;
            setp.ge.s32 done, seen, 0;
            @done bra LEAVE;
            setp.ne.u32 lost, before, 0;
            @lost bra LEAVE;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.u64 early, now, $5;
            @early bra POLL;
            st.global.u32 [failure], $4;
            LEAVE:
            mov.u32 $0, 0;
            }""",
            "=r,l,r,l,r,l,r",
            [(flags + slot * G).to(tl.int64), epoch, failures.to(tl.int64), code, timeout.to(tl.int64), G],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif PROTOCOL == ATOMICS:
        for peer in tl.static_range(G):
            flag = flags + slot * G + peer
            polls = timeout // POLL
            if tl.load(failures + peer) != 0:
                polls = polls * 0
            while (tl.atomic_cas(flag, 0, 0, sem="acquire", scope="sys") - epoch < 0) & (polls > 0):
                polls -= 1
            if tl.atomic_cas(flag, 0, 0, sem="acquire", scope="sys") - epoch < 0:
                tl.store(failures + peer, code)
    tl.debug_barrier()


@triton.jit
def meet(bases, flags, epochs, failures, rank, code, timeout, G: tl.constexpr, PROTOCOL: tl.constexpr):
    """Return in the last block of a kernel when every rank's kernel is there: all that any of them stored is there."""
    tl.debug_barrier()
    arrived = tl.atomic_add(epochs + ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(epochs + ARRIVED, 0)
        epoch = tl.load(epochs + MEETING) + 1
        signal(bases, MEETING, epoch, rank, G, PROTOCOL)
        wait(flags, MEETING, epoch, failures, code, timeout, G, PROTOCOL)
        tl.store(epochs + MEETING, epoch)


@triton.jit(do_not_specialize=["rank", "code", "timeout"])
def fence_kernel(
    bases, flags, epochs, failures, rank, code, timeout, G: tl.constexpr, PROTOCOL: tl.constexpr
):  # fmt: skip
    """Return when every rank has come here: all they were given before is done."""
    meet(bases, flags, epochs, failures, rank, code, timeout, G, PROTOCOL)


@triton.jit(do_not_specialize=["at"])
def stamps_kernel(bases, found, at, G: tl.constexpr):
    """found[g] = the int32 at byte `at` of rank g's region, read through the table of addresses."""
    for peer in tl.static_range(G):
        word = (tl.load(bases + peer) + at).to(tl.pointer_type(tl.int32))
        tl.store(found + peer, tl.load(word))
