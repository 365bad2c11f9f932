"""The plan on a GPU: microseconds inside a CUDA graph, and what it is worth of the exact assignment.

`PYTHONPATH=.:profiles:solvers python tests/bench/plan_gpu.py` on a machine with a CUDA device; a minute. Scores are
synthetic: rows such as a token table holds, true counts, and few kinds of row as the Markov tables give.
"""

import importlib.util
import multiprocessing
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from smoe_cli.runtime import plan_kernel
from smoe_cli.runtime.plan import plain_plan, rows_per_rank
from smoe_solvers.assignment import HARD, assign_rule, transport

VOCAB, TOP_K = 8192, 6
LAUNCHES = 50


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


def graph_microseconds(work) -> float:
    """One launch inside a graph of many, median of replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    taken = []
    for _ in range(12):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop) * 1000 / LAUNCHES)
    return median(taken[2:])


def eager_microseconds(work) -> float:
    work()
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e6)
    return median(taken)


WARPS = "return min(max(block // 256, 1), 8)"
SAFE = (
    "tl.store(token_of_place + place, token, mask=valid)",
    "tl.store(token_of_place + place, token, mask=before > 65535)",
)
STAGES = {
    "no moves": [SAFE, ("while tl.max(load, axis=0) > quota", "while tl.max(load, axis=0) > 1000000")],
    "no prices, no moves": [
        SAFE,
        ("while (r < FINE_ROUNDS)", "while (r < 0)"),
        ("for r in range(COARSE_ROUNDS)", "for r in range(0)"),
        ("while tl.max(load, axis=0) > quota", "while tl.max(load, axis=0) > 1000000"),
    ],
}
TABLE = [(tokens, ranks, None, None) for tokens in (64, 256, 1024, 4096, 16384) for ranks in (2, 4, 8)]
EXTRA = [(64, 8, 2, None), (1024, 8, 2, None), (1024, 8, 8, None), (1024, 4, 2, None), (16384, 8, 4, None)]
EXTRA += [(16384, 8, 16, None), (16384, 4, 16, None), (16384, 2, 16, None), (1024, 8, 4, "no moves")]
EXTRA += [(1024, 8, 4, "no prices, no moves")]


def variant(warps: int | None, stage: str | None):
    """plan_kernel with other warps, or without some of its stages."""
    if warps is None:
        return plan_kernel
    source = Path(plan_kernel.__file__).read_text()
    for old, new in [(WARPS, f"return {warps}"), *STAGES.get(stage, [])]:
        assert old in source, old
        source = source.replace(old, new)
    path = Path(tempfile.gettempdir()) / f"plan_kernel_{warps}_{str(stage).replace(' ', '_').replace(',', '')}.py"
    if not path.exists():
        path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_one(job: tuple) -> None:
    """Fill Triton's cache, so that the timing process does not wait."""
    tokens, ranks, warps, stage = job
    table = torch.zeros((64, ranks), dtype=torch.uint8, device="cuda")
    variant(warps, stage).plan_rows(table, torch.zeros(tokens, dtype=torch.int64, device="cuda"))
    torch.cuda.synchronize()


def main() -> None:
    import triton

    started = time.perf_counter()
    for warps, stage in {job[2:] for job in EXTRA}:
        variant(warps, stage)
    pool = multiprocessing.get_context("spawn").Pool(12)
    compiled = pool.map_async(compile_one, TABLE + EXTRA, chunksize=1)
    generator = np.random.default_rng(0)
    batches = {}
    for tokens, ranks, _, _ in TABLE:
        for kind in ("token", "oracle", "markov"):
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
    print(f"an empty launch in a graph: {graph_microseconds(lambda: empty.add_(0)):.2f} us")
    print("T, G, kind: us in a graph | of exact | equal to assign_rule")
    for (tokens, ranks, kind), (table, index, best, home) in batches.items():
        on_device, ids = torch.from_numpy(table).cuda(), torch.from_numpy(index).cuda()
        plan = plan_kernel.plan_rows(on_device, ids)
        same = bool((plan.place_of_token.cpu().numpy() // rows_per_rank(tokens, ranks) == home).all())
        value = table[index][np.arange(tokens), home].sum(dtype=np.int64) / best
        taken = graph_microseconds(partial(plan_kernel.plan_rows, on_device, ids))
        print(f"{tokens:6} {ranks} {kind:7} {taken:7.2f} {value:.4f} {same}", flush=True)
    for tokens, ranks, warps, stage in EXTRA:
        line = []
        for kind in ("token", "oracle", "markov"):
            table, index, _, _ = batches[tokens, ranks, kind]
            work = partial(
                variant(warps, stage).plan_rows, torch.from_numpy(table).cuda(), torch.from_numpy(index).cuda()
            )
            line.append(f"{graph_microseconds(work):7.2f}")
        print(f"{tokens:6} {ranks} warps {warps} {stage or '':20}", *line, flush=True)
    tokens, ranks = 1024, 8
    table, index, _, _ = batches[tokens, ranks, "token"]
    scores = torch.from_numpy(table[index]).cuda()
    print(f"plain torch, T 1024, G 8: {eager_microseconds(partial(plain_plan, scores, ranks)):.0f} us")
    same = torch.equal(plain_plan(scores, ranks).place_of_token, plan_kernel.plan_rows(scores).place_of_token)
    print(f"equal to the kernel: {same}; {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
