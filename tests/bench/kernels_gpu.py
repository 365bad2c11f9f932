"""The kernels on the GPUs of one host: right first, then launches compared, then beside the copy engine and NCCL.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python3 tests/bench/kernels_gpu.py --out FOLDER --seconds 230

One process a GPU and phase, so that a failure ends a phase and not the run. Times are medians of graph replays of the
slowest rank, barrier included; GB/s are bytes a direction over the link. Writes FOLDER/kernels.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "bench"),
    str(ROOT),
    str(ROOT / "profiles"),
    str(ROOT / "solvers"),
    str(ROOT / "tests" / "runtime"),
]
MIB = 1 << 20
HIDDEN = 4096


class Rank:
    """One process: its exchange, its results, and how it times."""

    def __init__(self, arguments):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        store = f"tcp://127.0.0.1:{29600 + list(PHASES).index(arguments.phase)}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=self.rank, world_size=self.ranks)
        self.gloo = dist.new_group(backend="gloo")
        self.end = time.time() + arguments.seconds
        self.found = {}
        self.opened = []  # shared memory is never given back: peers would pair wrong blocks
        self.path = Path(arguments.out) / f"{arguments.phase}.json"

    def open(self, tokens, hidden, dtype=None, patience=5.0, top_k=8):
        from smoe_cli.runtime.region import Sizes
        from smoe_cli.runtime.symmetric import SymmetricExchange

        sizes = Sizes(tokens, hidden, top_k, dtype or self.torch.bfloat16)
        self.opened.append(SymmetricExchange(sizes, self.device, None, patience=patience))
        return self.opened[-1]

    def say(self, *words):
        if self.rank == 0:
            print(f"[{time.time() - self.end:7.1f}]", *words, flush=True)

    def keep(self, key, value):
        self.found[key] = value
        if self.rank == 0:
            self.path.write_text(json.dumps(self.found))

    def late(self):
        """Whether any rank's time is up; the same on all."""
        word = self.torch.tensor([time.time() > self.end], dtype=self.torch.int32)
        self.dist.all_reduce(word, group=self.gloo)
        return bool(word)

    def meet(self):
        self.torch.cuda.synchronize()
        self.dist.barrier(group=self.gloo)

    def microseconds(self, work, exchange=None, inner=10, repeats=7):
        """Of one call, in a captured graph of `inner` calls."""
        torch = self.torch
        for _ in range(2):
            work()
        self.meet()
        graph = torch.cuda.CUDAGraph()
        if exchange is not None:
            with exchange.capture(graph):
                for _ in range(inner):
                    work()
        else:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(inner):
                    work()
        return self.replayed(graph.replay, inner, repeats)

    def eagerly(self, work, inner=10, repeats=5):
        def several():
            for _ in range(inner):
                work()

        several()
        return self.replayed(several, inner, repeats)

    def replayed(self, replay, inner, repeats):
        torch = self.torch
        replay()
        taken = []
        for _ in range(repeats):
            self.meet()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / inner)
        slowest = torch.tensor([median(taken)], dtype=torch.float64)
        self.dist.all_reduce(slowest, op=self.dist.ReduceOp.MAX, group=self.gloo)
        return float(slowest)


def correct(rank):
    """Every operation against fp64 and to the bit; graphs in random order; rows never torn."""
    import random

    from exchange_checks import Inputs, check_all, sleepy

    torch = rank.torch
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in (96, 2048, 2880, 7168) if dtype is torch.bfloat16 else (96,):
            if rank.late():
                return
            exchange = rank.open(1001, hidden, dtype)
            for tokens in (1, rank.ranks - 1, 64, 333, 1001):
                inputs = Inputs(rank.ranks, tokens, hidden, 6, dtype, rank.device, tokens + hidden)
                check_all(exchange, inputs, pause=sleepy(rank.rank, 0.002))
                exchange.check()
            rank.say("right:", dtype, hidden)
    rank.keep("right", True)
    exchange = rank.open(4096, 2048)
    graphs = []
    for tokens in (64, 333, 1001, 4096):
        inputs = Inputs(rank.ranks, tokens, 2048, 6, torch.bfloat16, rank.device, tokens)
        check_all(exchange, inputs)
        held = {}

        def work(inputs=inputs, held=held):
            held["srs"], _ = exchange.reduce_scatter(inputs.partials[rank.rank], inputs.plan)
            held["sag"] = exchange.all_gather(inputs.rows[rank.rank], inputs.plan)[0].clone()
            got = exchange.dispatch(inputs.routed(rank.rank))
            held["rows"] = got.rows.clone()
            held["mixed"] = exchange.combine(inputs.parts[rank.rank], inputs.routed(rank.rank))

        work()
        rank.meet()
        graph = torch.cuda.CUDAGraph()
        with exchange.capture(graph):
            work()
        graphs.append((graph, inputs, held))
    from smoe_cli.runtime import reference

    chance = random.Random(7)
    wrong = 0
    for turn in range(400):
        graph, inputs, held = chance.choice(graphs)
        graph.replay()
        if turn % 10 == 0:
            places = reference.received(inputs.needs, rank.rank)
            wrong += int((held["srs"] != reference.reduce_scatter(inputs.partials, inputs.plan)[0][rank.rank]).sum())
            wrong += int((held["sag"] != reference.all_gather(inputs.rows, inputs.plan)).sum())
            wrong += int((held["rows"][places] != inputs.rows.flatten(0, 1)[places]).sum())
            wrong += int((held["mixed"] != reference.combine(inputs.parts, inputs.needs)[rank.rank]).sum())
            for value in held.values():
                value.fill_(float("nan"))
    exchange.check()
    assert wrong == 0, f"{wrong} wrong elements in replays"
    rank.say("graphs in random order: right")
    rank.keep("graphs in random order", True)
    for tokens in (64, 4096):
        torn(rank, exchange, tokens, 1000 if tokens == 64 else 200)


def torn(rank, exchange, tokens, replays):
    """Rows filled with the iteration's number, whole rows compared on the device; ranks sleep at random."""
    import random

    torch = rank.torch
    from exchange_checks import Inputs

    inputs = Inputs(rank.ranks, tokens, 2048, 6, torch.bfloat16, rank.device, 5)
    counter = torch.zeros(1, device=rank.device)
    bad = torch.zeros(4, dtype=torch.int64, device=rank.device)
    ones = torch.ones(tokens, 2048, device=rank.device)
    own = inputs.plan.rows_per_rank
    home = torch.ones(own, 2048, device=rank.device)
    needs = torch.full((own,), (1 << rank.ranks) - 1, dtype=torch.int32, device=rank.device)
    live = (inputs.plan.token_of_place.view(rank.ranks, own)[rank.rank] >= 0)[:, None]
    from smoe_cli.runtime.exchange import Routed

    inner = 50

    def iteration():
        counter.add_(1).remainder_(97)
        partial = (ones * (counter + rank.rank)).to(torch.bfloat16)
        summed, _ = exchange.reduce_scatter(partial, inputs.plan)
        expected = rank.ranks * counter + rank.ranks * (rank.ranks - 1) // 2
        bad[0] += ((summed != expected) & live).sum()
        rows = (home * counter).to(torch.bfloat16)
        bad[1] += (exchange.all_gather(rows, inputs.plan)[0] != counter).sum()
        routed = Routed(rows, inputs.experts[rank.rank], inputs.weights[rank.rank], needs)
        got = exchange.dispatch(routed).rows
        bad[2] += (got != counter).sum()
        bad[3] += (exchange.combine(got, routed) != counter * rank.ranks).sum()

    iteration()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with exchange.capture(graph):
        for _ in range(inner):
            iteration()
    chance = random.Random(rank.rank)
    done = 0
    for _ in range(replays):
        if rank.late():
            break
        torch.cuda._sleep(chance.randrange(200_000))
        graph.replay()
        done += inner
    torch.cuda.synchronize()
    exchange.check()
    rank.say(f"torn rows, T {tokens}: {done} iterations, bad elements {bad.tolist()}")
    rank.keep(f"torn T {tokens}", [done, bad.tolist()])
    assert not bad.any(), "torn or stale rows"


def forms(operation, size):
    """Launches worth comparing at a size."""
    from smoe_cli.runtime.launch import Form

    splits = (False,) if operation == "all_gather" else (False, True)
    if size <= MIB:
        return [Form(b, w, 4096, True, 1, split) for b in (16, 32) for w in (8, 16, 4) for split in splits]
    if size <= 8 * MIB:
        shapes, blocks, steps = ((8, 8192), (8, 4096), (16, 8192)), (64, 128), (1,)
    elif operation == "all_gather":
        shapes, blocks, steps = ((8, 8192), (16, 8192), (8, 4096)), (128, 132, 256), (1,)
    else:
        shapes, blocks, steps = ((8, 8192), (16, 8192), (8, 4096)), (64, 128, 256, 264, 512), (1, 64 << 10)
    return [
        Form(number, warps, elements, False, step, split)
        for warps, elements in shapes
        for number in blocks
        for step in steps
        for split in splits
        if number * warps * (1 + split) <= 4224 and (size <= 8 * MIB or number * warps >= 1024)
    ]


def sums(rank):
    """SRS and SAG: every launch at every size, beside the copy engine and NCCL."""
    from smoe_cli.runtime import reference
    from smoe_cli.runtime.launch import fitted, launch_for

    exchange = rank.open(32768, HIDDEN)
    sizes = (0.5, 128, 32, 256, 4)
    for size in sizes:
        tokens = int(size * MIB) // (HIDDEN * 2)
        inputs = shuffled(rank, tokens, HIDDEN)
        wire = size * MIB * (rank.ranks - 1) / rank.ranks
        inner = 200 if size <= 4 else 24
        library(rank, exchange, inputs, size, wire)
        wanted = reference.reduce_scatter(inputs.partials, inputs.plan)[0][rank.rank]
        gathered = reference.all_gather(inputs.homes, inputs.plan)
        for operation in ("all_gather", "reduce_scatter"):
            seen = set()
            own = inputs.plan.rows_per_rank
            chosen = launch_for(operation, own, rank.ranks, HIDDEN, 2)
            for launch in [chosen, *(fitted(form, own, HIDDEN, 2) for form in forms(operation, size * MIB))]:
                if launch in seen:
                    continue
                seen.add(launch)
                if rank.late():
                    return
                exchange._launch = lambda *_, launch=launch: launch
                if operation == "all_gather":
                    work = lambda i=inputs: exchange.all_gather(i.homes[rank.rank], i.plan)[0]  # noqa: E731
                    right = gathered
                else:
                    work = lambda i=inputs: exchange.reduce_scatter(i.partials[rank.rank], i.plan)[0]  # noqa: E731
                    right = wanted
                equal = bool((work() == right).all())
                us = rank.microseconds(work, exchange, inner, 5)
                exchange.check()
                rank.keep(f"{operation} {size} {launch}", [us, wire / us / 1e3, equal])
                if launch == chosen:
                    rank.keep(f"{operation}-as-launched {size} {launch}", [us, wire / us / 1e3, equal])
        if size >= 32:
            places = rank.torch.arange(tokens, dtype=rank.torch.int32, device=rank.device)
            plain = type(inputs.plan)(places, places, rank.ranks)
            exchange._launch = type(exchange)._launch.__get__(exchange)
            us = rank.microseconds(lambda: exchange.all_gather(inputs.homes[rank.rank], plain), exchange, inner, 5)  # noqa: B023
            rank.keep(f"all_gather-unshuffled {size}", [us, wire / us / 1e3, True])
        for operation in ("reduce_scatter", "all_gather"):
            best = sorted((v[0], k, v[2]) for k, v in rank.found.items() if k.startswith(f"{operation} {size} "))
            for us, key, equal in best[:4]:
                rank.say(f"{us:8.1f} us {wire / us / 1e3:6.1f} GB/s", key, equal)


def shuffled(rank, tokens, hidden):
    """Random rows of every rank, drawn on the GPU from one seed."""
    from types import SimpleNamespace

    from smoe_cli.runtime.exchange import Plan

    torch = rank.torch
    generator = torch.Generator(rank.device).manual_seed(tokens)
    places = torch.randperm(tokens, generator=generator, device=rank.device).to(torch.int32)
    token_of_place = torch.empty_like(places)
    token_of_place[places.long()] = torch.arange(tokens, dtype=torch.int32, device=rank.device)
    partials = torch.randn(rank.ranks, tokens, hidden, generator=generator, device=rank.device, dtype=torch.bfloat16)
    return SimpleNamespace(
        plan=Plan(token_of_place, places, rank.ranks),
        partials=partials,
        homes=partials[0].view(rank.ranks, -1, hidden),
    )


def library(rank, exchange, inputs, size, wire):
    """What the copy engine and NCCL need."""
    torch, dist = rank.torch, rank.dist
    hidden = inputs.partials.shape[2]
    partial = inputs.partials[rank.rank].clone()
    own = partial[: len(partial) // rank.ranks].clone()
    index = inputs.plan.token_of_place.long()
    other = (rank.rank + 1) % rank.ranks
    offset = exchange.region.offsets["pushed0"] // 2
    peer = exchange.region.keep.get_buffer(other, list(own.shape), torch.bfloat16, offset)
    permuted = torch.empty_like(partial)

    def reduce_scatter():
        torch.index_select(partial, 0, index, out=permuted)
        dist.reduce_scatter_tensor(own, permuted)

    works = {
        "copy engine pull": lambda: own.copy_(peer),
        "copy engine push": lambda: peer.copy_(own),
        "index_select": lambda: torch.index_select(partial, 0, index, out=permuted),
        "nccl reduce-scatter": lambda: dist.reduce_scatter_tensor(own, partial),
        "nccl permute + reduce-scatter": reduce_scatter,
        "nccl all-gather": lambda: dist.all_gather_into_tensor(permuted, own),
        "nccl all-reduce": lambda: dist.all_reduce(permuted),
        "nccl all-to-all": lambda: dist.all_to_all_single(permuted, partial),
    }
    for name, work in works.items():
        try:
            us = rank.microseconds(work, None, 20 if size <= 4 else 5, 5)
        except Exception as error:  # noqa: BLE001
            rank.say(name, "in a graph:", str(error)[:200])
            us = rank.eagerly(work)
        rank.keep(f"{name.replace(' ', '_')} {size} H{hidden}", [us, wire / us / 1e3])
        rank.say(f"{name:30s} {size:6} MiB {us:8.1f} us {wire / us / 1e3:6.1f} GB/s")


def wide(rank):
    """SRS at T 16,384, H 5,120 beside permute + NCCL reduce-scatter and all-reduce; with residual and norm."""
    from smoe_cli.runtime.exchange import Norm
    from smoe_cli.runtime.launch import fitted

    torch = rank.torch
    exchange = rank.open(16384, 5120)
    inputs = shuffled(rank, 16384, 5120)
    size = 16384 * 5120 * 2 / MIB
    wire = size * MIB * (rank.ranks - 1) / rank.ranks
    library(rank, exchange, inputs, size, wire)
    norm = Norm(torch.ones(5120, dtype=torch.bfloat16, device=rank.device), 1e-6)
    for form in forms("reduce_scatter", size * MIB):
        if rank.late():
            return
        launch = fitted(form, 8192, 5120, 2)
        exchange._launch = lambda *_, launch=launch: launch
        us = rank.microseconds(lambda: exchange.reduce_scatter(inputs.partials[rank.rank], inputs.plan), exchange, 5, 5)
        fused = rank.microseconds(
            lambda: exchange.reduce_scatter(inputs.partials[rank.rank], inputs.plan, inputs.homes[rank.rank], norm),
            exchange, 5, 5,
        )  # fmt: skip
        exchange.check()
        rank.keep(f"reduce_scatter {size} {launch}", [us, wire / us / 1e3, fused])
    best = sorted((v[0], k, v[2]) for k, v in rank.found.items() if k.startswith("reduce_scatter"))
    for us, key, fused in best[:4]:
        rank.say(f"{us:8.1f} us {wire / us / 1e3:6.1f} GB/s fused {fused:8.1f} us", key)


def expert_forms(tokens):
    """Launches worth comparing for dispatch and combine."""
    from smoe_cli.runtime.launch import Form

    blocks = (64, 128) if tokens <= 1024 else (128, 256, 512)
    return [
        Form(number, warps, 8192, False, step, split)
        for number in blocks
        for warps in (8, 16)
        for step in (1, 64 << 10)
        for split in (False, True)
        if number * warps * (1 + split) <= 4224
    ]


def experts(rank):
    """Dispatch and combine, by share of rows that also need the other ranks."""
    from smoe_cli.runtime.exchange import Routed
    from smoe_cli.runtime.launch import fitted

    torch, dist = rank.torch, rank.dist
    for hidden in (2048, 7168):
        exchange = rank.open(16384, hidden)
        for tokens in (16384, 1024, 4096):
            own = tokens // rank.ranks
            rows = torch.randn(own, hidden, device=rank.device, dtype=torch.bfloat16)
            parts = torch.randn(tokens, hidden, device=rank.device, dtype=torch.bfloat16)
            chosen = torch.randint(0, 64, (own, 8), device=rank.device, dtype=torch.int32)
            weights = torch.rand(own, 8, device=rank.device)
            for share in (1.0, 0.5, 0.2):
                other = torch.rand(own, device=rank.device) < share
                bits = torch.where(other, (1 << rank.ranks) - 1, 1 << rank.rank).to(torch.int32)
                routed = Routed(rows, chosen, weights, bits)
                wire = int(other.sum()) * hidden * 2
                picked = torch.nonzero(other)[:, 0]
                counts = [torch.zeros(1, dtype=torch.int64) for _ in range(rank.ranks)]
                dist.all_gather(counts, torch.tensor([len(picked)]), group=rank.gloo)
                sent = [0 if r == rank.rank else len(picked) for r in range(rank.ranks)]
                came = [0 if r == rank.rank else int(counts[r]) for r in range(rank.ranks)]
                landing = torch.empty(sum(came), hidden, device=rank.device, dtype=torch.bfloat16)
                if rank.ranks == 2:
                    us = rank.eagerly(lambda: dist.all_to_all_single(landing, rows[picked], came, sent))  # noqa: B023
                    rank.keep(f"nccl-dispatch H{hidden} T{tokens} q{share}", [us, wire / us / 1e3])
                for form in expert_forms(tokens):
                    if rank.late():
                        return
                    launch = fitted(form, own, hidden, 2)
                    exchange._launch = lambda *_, launch=launch: launch
                    if not form.split and form.step == 1:
                        us = rank.microseconds(lambda: exchange.dispatch(routed), exchange, 20, 5)  # noqa: B023
                        rank.keep(f"dispatch H{hidden} T{tokens} q{share} {launch}", [us, wire / us / 1e3])
                    us = rank.microseconds(lambda: exchange.combine(parts, routed), exchange, 20, 5)  # noqa: B023
                    rank.keep(f"combine H{hidden} T{tokens} q{share} {launch}", [us, wire / us / 1e3])
                exchange.check()
                for name in ("nccl-dispatch", "dispatch", "combine"):
                    rank.say(
                        min(
                            (v[0], k)
                            for k, v in rank.found.items()
                            if k.startswith(f"{name} H{hidden} T{tokens} q{share}")
                        )
                    )


PHASES = {
    "sums": (sums, 60, {}),
    "wide": (wide, 25, {}),
    "experts": (experts, 45, {}),
    "correct": (correct, 45, {}),
}
"""Phase -> (what each rank does, seconds it may take, its environment)."""


def run_phase(name, arguments, seconds):
    """One process a GPU. Returns whether all ended well."""
    import torch

    ranks = torch.cuda.device_count()
    environment = os.environ | PHASES[name][2] | {
        "WORLD_SIZE": str(ranks), "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_GRAPH_REGISTER": "0", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    command = [sys.executable, __file__, "--out", arguments.out, "--phase", name, "--seconds", str(seconds)]
    processes = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(ranks)]
    deadline = time.time() + seconds + 25
    while time.time() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(3)
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    return all(process.returncode == 0 for process in processes)


def table(out):
    """The best launch of each operation and size, beside what else was timed there."""
    everything = {}
    for path in sorted(Path(out).glob("*.json")):
        if path.stem != "kernels":
            everything[path.stem] = json.loads(path.read_text())
            path.unlink()
    (Path(out) / "kernels.json").write_text(json.dumps(everything, indent=1))
    print("\nphase | what | us | GB/s | launch", flush=True)
    for phase, found in everything.items():
        best = {}
        for key, value in found.items():
            if not isinstance(value, list) or not isinstance(value[0], float):
                print(f"{phase} | {key} | {value}")
                continue
            what = key.split(" Launch")[0]
            if what not in best or value[0] < best[what][0][0]:
                best[what] = (value, key[len(what) :])
        for what, (value, launch) in best.items():
            numbers = " | ".join(f"{number:.1f}" if isinstance(number, float) else str(number) for number in value)
            print(f"{phase} | {what} | {numbers} |{launch}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--phase")
    parser.add_argument("--phases", nargs="+", default=list(PHASES))
    arguments = parser.parse_args()
    if arguments.phase:
        PHASES[arguments.phase][0](Rank(arguments))
        return
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    end = time.time() + arguments.seconds
    for name in arguments.phases:
        seconds = min(PHASES[name][1], end - time.time() - 8)
        if seconds < 10:
            print(name, "left out: no time", flush=True)
            continue
        begun = time.time()
        well = run_phase(name, arguments, seconds)
        print(f"== {name}: {'done' if well else 'FAILED'} in {time.time() - begun:.0f} s", flush=True)
    table(arguments.out)


if __name__ == "__main__":
    main()
