"""Launches of one kernel in turns, the shipped one among them: where `smoe_cli.runtime.launch.FORMS` comes from.

    torchrun --nproc-per-node 2 tests/bench/launches_gpu.py --operation combine --hidden 7168 --tokens 4096,16384

Environment as for `kernels_gpu.py`. Prints the best five of each size and how far behind them the shipped one is.
"""

import argparse
from itertools import product

import torch
import torch.distributed as dist
from kernels_gpu import SHARES, routed_rows, routed_works, summed, summing_works

from smoe_cli.runtime.launch import FORMS, MEDIUM, SMALL, Form, fitted, launch_for
from smoe_cli.runtime.region import Sizes
from smoe_cli.runtime.serving import join_ranks
from smoe_cli.runtime.symmetric import SymmetricExchange
from smoe_cli.runtime.timing import Clock

ROUTED = ("dispatch", "combine")
BLOCKS, WARPS, ELEMENTS, STEPS = (64, 128, 256, 512), (4, 8, 16), (4096, 8192, 16384), (1, 64 << 10)
MOST_WARPS = 132 * 32
"""Of all blocks that are tried: half of what an H200's multiprocessors hold."""


def forms(operation, total):
    """Launches worth comparing for so many bytes [T, H]."""
    if total <= SMALL:
        found = product((16, 32, 64), WARPS, (4096,), (True,), (1,), (False, True))
    else:
        found = product(BLOCKS, WARPS, ELEMENTS, (False,), STEPS, (False, True))
    in_steps = operation not in ("dispatch", "all_gather")
    return [
        Form(blocks, warps, elements, whole, step, split)
        for blocks, warps, elements, whole, step, split in found
        if blocks * warps * (1 + split) <= MOST_WARPS
        and (whole or blocks * warps >= 512)
        and elements <= warps * 1024
        and (in_steps or not split)
        and (in_steps or step == 1)
    ]


def compare(clock, exchange, operation, tokens, share):
    """Seconds by launch, and which is the shipped one. share: of rows that need the other ranks.

    Raises AssertionError where a launch gives other rows than the shipped one.
    """
    if operation in ROUTED:
        work = routed_works(exchange, *routed_rows(exchange, tokens, share))[operation]
    else:
        work = summing_works(exchange, summed(exchange, tokens))[operation]
    own, hidden = tokens // exchange.num_ranks, exchange.sizes.hidden
    total = tokens * hidden * 2
    shipped = launch_for(operation, own, exchange.num_ranks, hidden, 2)
    wanted, clock, prepared = rows_of(work()).clone(), clock.pooled(), {}
    try:
        for launch in dict.fromkeys([shipped, *(fitted(form, own, hidden, 2) for form in forms(operation, total))]):
            exchange._launch = lambda *_, launch=launch: launch
            if operation != "dispatch":  # places of rows that are not needed hold anything
                assert torch.equal(rows_of(work()), wanted), launch
            prepared[launch] = clock.prepare(work, 200 if total <= MEDIUM else 40, exchange.capture)
    finally:
        del exchange._launch
    seconds = clock.seconds(prepared)
    exchange.check()
    return seconds, shipped


def rows_of(found):
    """The rows that an operation gives: all of it, its first part, or what was received."""
    return getattr(found, "rows", found[0] if isinstance(found, tuple) else found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", choices=FORMS, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    clock = Clock(join_ranks("cuda"), arguments.repeats)
    sizes = [int(size) for size in arguments.tokens.split(",")]
    exchange = SymmetricExchange(Sizes(max(sizes), arguments.hidden, 8, torch.bfloat16), clock.device)
    for tokens, share in product(sizes, SHARES if arguments.operation in ROUTED else (1.0,)):
        seconds, shipped = compare(clock, exchange, arguments.operation, tokens, share)
        if dist.get_rank() == 0:
            print(f"{arguments.operation} H {arguments.hidden} T {tokens} q {share}, of {len(seconds)}", flush=True)
            for launch in sorted(seconds, key=seconds.get)[:5]:
                print(f"  {seconds[launch] * 1e6:8.1f} us {launch}", flush=True)
            print(f"  {seconds[shipped] * 1e6:8.1f} us as shipped: {shipped}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
