"""The kernels as they are launched, on the GPUs of one host, in turns with the copy engine and NCCL.

    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_GRAPH_REGISTER=0 PYTHONPATH=.:profiles:solvers
    torchrun --nproc-per-node 2 tests/bench/kernels_gpu.py --out kernels.json

A minute. Medians of graph replays, of the ranks the slowest; our kernels include their barrier, the copy engine has
none; NCCL's dispatch alone runs eagerly, because the host must know how many rows go where.
"""

import argparse
import json
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from smoe_cli.runtime import reference
from smoe_cli.runtime.bench import machine
from smoe_cli.runtime.exchange import Norm, Plan, Routed
from smoe_cli.runtime.region import Sizes
from smoe_cli.runtime.serving import join_ranks
from smoe_cli.runtime.symmetric import SymmetricExchange
from smoe_cli.runtime.timing import Clock

MIB = 1 << 20
SUMS = ((0.5, 4096), (4, 4096), (32, 4096), (128, 4096), (256, 4096), (160, 5120))
"""MiB of [T, H], and H."""

OPENED = ((4096, 32768), (5120, 16384), (2048, 16384), (7168, 16384))
"""H, and most tokens."""

ROUTED = tuple((hidden, tokens) for hidden in (2048, 7168) for tokens in (1024, 4096, 16384))
SHARES = (1.0, 0.5, 0.2)
"""Of tokens that need the other ranks too."""

CALLS, NCCL_CALLS = 100, 20
"""In a graph. That one rank begins before the other falls on the first call, and only of what waits for peers; NCCL's
collectives take longer each where a graph has many."""


@contextmanager
def plainly(graph, pool):
    """A capture of what is not ours."""
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        yield


def summed(exchange, tokens):
    """Random rows of every rank, the same on all, and a random plan."""
    torch.manual_seed(tokens)
    device, ranks, hidden = exchange.device, exchange.num_ranks, exchange.sizes.hidden
    places = torch.randperm(tokens, device=device).to(torch.int32)
    token_of_place = torch.empty_like(places)
    token_of_place[places.long()] = torch.arange(tokens, dtype=torch.int32, device=device)
    partials = torch.randn(ranks, tokens, hidden, device=device, dtype=torch.bfloat16)
    homes = partials[0].reshape(ranks, -1, hidden)
    return SimpleNamespace(plan=Plan(token_of_place, places, ranks), partials=partials, homes=homes)


def summing_works(exchange, inputs):
    """SRS, alone and with residual and norm, and SAG."""
    rank, plan = exchange.rank, inputs.plan
    norm = Norm(torch.ones_like(inputs.homes[0, 0]), 1e-6)
    return {
        "reduce_scatter": lambda: exchange.reduce_scatter(inputs.partials[rank], plan),
        "reduce_scatter_norm": lambda: exchange.reduce_scatter(inputs.partials[rank], plan, inputs.homes[rank], norm),
        "all_gather": lambda: exchange.all_gather(inputs.homes[rank], plan),
    }


def check_sums(exchange, works, inputs):
    """Raises AssertionError unless SRS and SAG give the reference's rows to the bit; all kernels: tests/gpu."""
    wanted, _ = reference.reduce_scatter(inputs.partials, inputs.plan)
    assert torch.equal(works["reduce_scatter"]()[0], wanted[exchange.rank])
    assert torch.equal(works["all_gather"]()[0], reference.all_gather(inputs.homes, inputs.plan))
    exchange.check()


def library_works(exchange, inputs):
    """The copy engine's, over the same memory, and NCCL's."""
    partial = inputs.partials[exchange.rank].clone()
    own = partial[: len(partial) // exchange.num_ranks].clone()
    index = inputs.plan.token_of_place.long()
    other = (exchange.rank + 1) % exchange.num_ranks
    offset = exchange.region.offsets["pushed0"] // partial.element_size()
    peer = exchange.region.keep.get_buffer(other, list(own.shape), partial.dtype, offset)
    permuted = torch.empty_like(partial)

    def permuted_reduce_scatter():
        torch.index_select(partial, 0, index, out=permuted)
        dist.reduce_scatter_tensor(own, permuted)

    return {
        "copy engine pull": lambda: own.copy_(peer),
        "copy engine push": lambda: peer.copy_(own),
        "nccl reduce-scatter": lambda: dist.reduce_scatter_tensor(own, partial),
        "nccl permute + reduce-scatter": permuted_reduce_scatter,
        "nccl all-gather": lambda: dist.all_gather_into_tensor(permuted, own),
        "nccl all-reduce": lambda: dist.all_reduce(permuted),
    }


def time_sums(clock, exchange, mib):
    """Of one size; seconds by what was done."""
    hidden = exchange.sizes.hidden
    tokens = int(mib * MIB) // (hidden * 2)
    inputs, clock = summed(exchange, tokens), clock.pooled()
    ours = summing_works(exchange, inputs)
    check_sums(exchange, ours, inputs)
    calls = CALLS if mib > 4 else 2 * CALLS
    works = {name: clock.prepare(once, calls, exchange.capture) for name, once in ours.items()}
    for name, once in library_works(exchange, inputs).items():
        works[name] = clock.prepare(once, NCCL_CALLS if name.startswith("nccl") else calls, plainly)
    seconds = clock.seconds(works)
    exchange.check()
    wire = mib * MIB * (exchange.num_ranks - 1) / exchange.num_ranks
    return {"hidden": hidden, "tokens": tokens, "bytes": wire, "seconds": seconds}


def routed_rows(exchange, tokens, share):
    """A rank's rows, of which a share needs every rank and the others none; and what experts made of all places."""
    torch.manual_seed(tokens + exchange.rank)
    device, ranks, hidden, own = (
        exchange.device,
        exchange.num_ranks,
        exchange.sizes.hidden,
        tokens // exchange.num_ranks,
    )
    far = torch.arange(own, device=device).lt(round(share * own))[torch.randperm(own, device=device)]
    needs = torch.where(far, (1 << ranks) - 1, 1 << exchange.rank).to(torch.int32)
    rows = torch.randn(own, hidden, device=device, dtype=torch.bfloat16)
    chosen = torch.randint(0, 64, (own, 8), device=device, dtype=torch.int32)
    parts = torch.randn(ranks * own, hidden, device=device, dtype=torch.bfloat16)
    return Routed(rows, chosen, torch.rand(own, 8, device=device), needs), parts


def routed_works(exchange, routed, parts):
    exchange.dispatch(routed)  # combine answers the last one
    return {"dispatch": lambda: exchange.dispatch(routed), "combine": lambda: exchange.combine(parts, routed)}


def nccl_dispatch(exchange, routed):
    """The same rows once to each rank, without their experts."""
    far = torch.nonzero(routed.needs != 1 << exchange.rank)[:, 0]
    counts = [0 if rank == exchange.rank else len(far) for rank in range(exchange.num_ranks)]
    landing = routed.rows.new_empty(sum(counts), routed.rows.shape[1])

    def send():
        picked = routed.rows[far].repeat(exchange.num_ranks - 1, 1)
        dist.all_to_all_single(landing, picked, counts, counts)

    return send


def time_routed(clock, exchange, tokens, share):
    """Dispatch and combine of one size; seconds by what was done."""
    routed, parts = routed_rows(exchange, tokens, share)
    clock = clock.pooled()
    works = {
        name: clock.prepare(once, CALLS, exchange.capture)
        for name, once in routed_works(exchange, routed, parts).items()
    }
    works["nccl dispatch"] = clock.prepare(nccl_dispatch(exchange, routed), 10)
    seconds = clock.seconds(works)
    exchange.check()
    rows = round(share * len(routed.rows)) * (exchange.num_ranks - 1)
    return {
        "hidden": exchange.sizes.hidden,
        "tokens": tokens,
        "share": share,
        "bytes": rows * exchange.sizes.hidden * 2,
        "seconds": seconds,
    }


def line(one):
    """A size in words."""
    share = f" q {one['share']}" if "share" in one else ""
    found = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in one["seconds"].items())
    return f"H {one['hidden']} T {one['tokens']}{share}, {one['bytes'] / MIB:.2f} MiB: {found} us"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    clock = Clock(join_ranks("cuda"), arguments.repeats)
    document = {"machine": machine(clock.device), "sums": [], "routed": []}

    def keep(part, one):
        document[part].append(one)
        if dist.get_rank() == 0:
            print(line(one), flush=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    exchanges = {
        hidden: SymmetricExchange(Sizes(tokens, hidden, 8, torch.bfloat16), clock.device) for hidden, tokens in OPENED
    }  # all the time: memory given back on one rank alone would be paired with another's
    for mib, hidden in SUMS:
        keep("sums", time_sums(clock, exchanges[hidden], mib))
    for (hidden, tokens), share in product(ROUTED, SHARES):
        keep("routed", time_routed(clock, exchanges[hidden], tokens, share))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
