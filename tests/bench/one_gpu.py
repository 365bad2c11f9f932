"""What one GPU can tell: the plan in a CUDA graph, what it adds to an attention, and the weighing of experts' products.

`PYTHONPATH=.:profiles:solvers python tests/bench/one_gpu.py` on a machine with a CUDA device; a minute. Scores are
synthetic: rows such as a token table holds, true counts, and few kinds of row as the Markov tables give. With a file
that real_scores.py wrote, its batches are planned as well. Plans are checked against the reference.
"""

import multiprocessing
import sys
import time
from functools import partial
from statistics import median

import numpy as np
import torch

from smoe_cli.runtime.aside import aside
from smoe_cli.runtime.bench import attention
from smoe_cli.runtime.experts import plain_sum
from smoe_cli.runtime.plan import rows_per_rank
from smoe_cli.runtime.plan_kernel import plan_rows
from smoe_cli.runtime.weighing import weighted_sum
from smoe_solvers.assignment import HARD, assign_rule, transport

VOCAB, TOP_K = 8192, 6
LAUNCHES, READINGS = 40, 15
TOKENS, RANKS = (64, 256, 1024, 4096, 16384), (2, 4, 8)
KINDS = ("token", "oracle", "markov")
HIDDEN = {"DeepSeek-V2-Lite": 2048, "DeepSeek-V2": 5120}
WEIGHED = ((1024, 6, 2048), (8192, 6, 2048), (8192, 6, 5120), (8192, 2, 4096))
"""Rows that a rank received, experts a row, hidden size; half of a row's experts are the rank's."""


def table_of(kind: str, ranks: int, generator: np.random.Generator) -> np.ndarray:
    """[V, G] u8: rows of a token table, of the Markov tables (as many as ranks), or of true counts."""
    share = generator.dirichlet(np.full(ranks, 8.0))
    rows = VOCAB if kind != "markov" else ranks
    mean = generator.dirichlet(share * ranks * 0.7, size=rows)
    if kind == "markov":
        mean = 0.5 * share + 0.5 * (0.6 * np.eye(ranks) + 0.4 * mean)
    if kind == "oracle":
        return np.rint(generator.multinomial(TOP_K, mean) * 255 / TOP_K).astype(np.uint8)
    return np.rint(mean * 255).astype(np.uint8)


def index_of(rows: int, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Token ids by a power law, as texts have them."""
    weight = 1 / np.arange(1, rows + 1)
    return generator.choice(rows, tokens, p=weight / weight.sum() if rows == VOCAB else None)


def exact_value(scores: np.ndarray, quota: int) -> int:
    kinds, times = np.unique(scores, axis=0, return_counts=True)
    flow = np.zeros(kinds.shape, np.int32)
    price = np.zeros(scores.shape[1], np.int64)
    return int(
        transport(
            kinds.astype(np.int32), np.arange(len(kinds)), times.astype(np.int64), np.int64(quota), HARD, price, flow
        )
    )


def replay_of(work, launches=LAUNCHES):
    """A CUDA graph of many launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    return graph


def microseconds(works: dict, launches=LAUNCHES) -> dict:
    """Of one launch inside a graph, medians of replays in turns."""
    graphs = {name: replay_of(work, launches) for name, work in works.items()}
    taken = {name: [] for name in graphs}
    for turn in range(READINGS + 2):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if turn > 1:
                taken[name].append(start.elapsed_time(stop) * 1000 / launches)
    return {name: median(readings) for name, readings in taken.items()}


def time_plans(batches) -> None:
    print("T, G, kind: us of a plan in a graph | of the exact assignment's value | equal to assign_rule")
    for (tokens, ranks, kind), (table, index, best, home) in batches.items():
        on_device, ids = torch.from_numpy(table).cuda(), torch.from_numpy(index).cuda()
        plan = plan_rows(on_device, ids)
        same = bool((plan.place_of_token.cpu().numpy() // rows_per_rank(tokens, ranks) == home).all())
        value = table[index][np.arange(tokens), home].sum(dtype=np.int64) / best
        taken = microseconds({"plan": partial(plan_rows, on_device, ids)})["plan"]
        print(f"{tokens:6} {ranks} {kind:7} {taken:7.2f} {value:.4f} {same}", flush=True)


def time_real(batches) -> None:
    """batches: [B, T, G] u8."""
    taken = []
    for scores in batches:
        tokens, ranks = scores.shape
        on_device = torch.from_numpy(scores).cuda()
        homes = plan_rows(on_device).place_of_token.cpu().numpy() // rows_per_rank(tokens, ranks)
        assert (homes == assign_rule(scores, rows_per_rank(tokens, ranks))).all()
        taken.append(microseconds({"plan": partial(plan_rows, on_device)})["plan"])
    least, middle, most = np.quantile(taken, [0, 0.5, 1])
    print(f"{len(taken)} real batches of {tokens} tokens, {ranks} ranks: {least:.2f} us, {middle:.2f}, {most:.2f}")


def time_beside(batches) -> None:
    """A rank's attention alone, with the plan on a second stream beside it, and with the plan before it."""
    print("model, T, G: us of an attention | and a plan beside it | and the plan first (token scores)")
    for name, hidden in HIDDEN.items():
        for tokens in TOKENS:
            for ranks in RANKS:
                table, index, _, _ = batches[tokens, ranks, "token"]
                plan = partial(plan_rows, torch.from_numpy(table).cuda(), torch.from_numpy(index).cuda())
                rows = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
                attend = attention(rows, ranks)
                taken = microseconds({"alone": attend, **with_plan(plan, attend, rows.device)}, launches=10)
                told = " ".join(f"{taken[way]:8.2f}" for way in ("alone", "beside", "first"))
                beside, first = taken["beside"] - taken["alone"], taken["first"] - taken["alone"]
                print(f"{name:16} {tokens:6} {ranks} {told} adds {beside:6.2f}, {first:6.2f}", flush=True)


def with_plan(plan, attend, device) -> dict:
    other = aside(device)

    def beside():
        planned = other.begin(plan)
        attend()
        planned()

    def first():
        plan()
        attend()

    return {"beside": beside, "first": first}


def time_weighing() -> None:
    print(
        "rows, K, H: us of the weighing kernel | of plain torch | bytes read and written over the kernel's time, GB/s"
    )
    for places, top_k, hidden in WEIGHED:
        drawn = {"generator": torch.Generator("cuda").manual_seed(places), "device": "cuda"}
        here = torch.rand(places, top_k, **drawn) < 0.5
        found = torch.cumsum(here.flatten(), 0).view(places, top_k) - 1
        products = torch.randn(int(here.sum()), hidden, **drawn).to(torch.bfloat16)
        position = found.clamp(min=0)
        weights = torch.rand(places, top_k, **drawn)
        given = (products, position, here, weights)
        assert torch.equal(weighted_sum(*given), plain_sum(*given))
        taken = microseconds(
            {"kernel": partial(weighted_sum, *given), "plain": partial(plain_sum, *given)}, launches=10
        )
        moved = products.nbytes + places * hidden * products.element_size()
        rate = moved / taken["kernel"] / 1e3
        print(f"{places:6} {top_k} {hidden:5} {taken['kernel']:8.2f} {taken['plain']:8.2f} {rate:7.0f}", flush=True)


def compile_one(job: tuple) -> None:
    """Fill Triton's cache, so that the timing process does not wait."""
    tokens, ranks = job
    table = torch.zeros((64, ranks), dtype=torch.uint8, device="cuda")
    plan_rows(table, torch.zeros(tokens, dtype=torch.int64, device="cuda"))
    torch.cuda.synchronize()


def main() -> None:
    import triton

    started = time.perf_counter()
    pool = multiprocessing.get_context("spawn").Pool(12)
    compiled = pool.map_async(compile_one, [(tokens, ranks) for tokens in TOKENS for ranks in RANKS], chunksize=1)
    generator = np.random.default_rng(0)
    batches = {}
    for tokens in TOKENS:
        for ranks in RANKS:
            for kind in KINDS:
                table = table_of(kind, ranks, generator)
                index = index_of(len(table), tokens, generator)
                quota = rows_per_rank(tokens, ranks)
                best, home = exact_value(table[index], quota), assign_rule(table[index], quota)
                batches[tokens, ranks, kind] = table, index, best, home
    compiled.get(300)
    pool.terminate()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    empty = torch.zeros(1, device="cuda")
    print(f"an empty launch in a graph: {microseconds({'empty': lambda: empty.add_(0)})['empty']:.2f} us")
    time_plans(batches)
    if len(sys.argv) > 1:
        time_real(np.load(sys.argv[1]))
    time_beside(batches)
    time_weighing()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
