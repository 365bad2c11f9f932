"""Timing a placement where it is served: every stage of a layer, every way of running it, on this machine's ranks.

    torchrun --nproc-per-node 2 -m smoe_cli.runtime.bench --workload FILE --tokens 1024,16384 --out bench.json

Axes: T tokens, G ranks, H hidden size. Rows are counted in the busiest direction of the busiest rank; seconds are
medians, of the ranks the slowest. One process a rank; on GPUs by our kernels where ranks reach each other's memory.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from smoe_cli.runtime.aside import aside
from smoe_cli.runtime.collectives import CollectiveExchange, library_all_gather, library_reduce_scatter
from smoe_cli.runtime.exchange import Exchange, Norm, Plan
from smoe_cli.runtime.experts import LocalExperts
from smoe_cli.runtime.layer import ExpertLayer, Mode
from smoe_cli.runtime.plan import make_plan
from smoe_cli.runtime.replay import ATTENTION_DP, SHUFFLING, Batch, Case, default_cases, make_batch
from smoe_cli.runtime.serving import join_ranks, open_exchange
from smoe_cli.runtime.slots import Slots, slot_bounds
from smoe_cli.runtime.timing import Clock, Work
from smoe_cli.runtime.workload import CONTIGUOUS, Workload, load_workload

TOKENS = (64, 256, 1024, 4096, 16384)
ELEMENT_BYTES = 2
LAYER_CALLS = 2
"""Whole layers between two readings at most; they are long enough."""

SWITCHES = ("NCCL_", "TORCH_SYMM_MEM_")
"""How names of environment variables begin that change how ranks reach each other."""

HEAD = 128
"""Elements of a head of the attention that stands before a layer to see what a plan costs beside it."""

Stages = dict[str, Callable[[], object]]


def stages(case: Case, batch: Batch, exchange: Exchange) -> Stages:
    """The exchanges of a layer in order, each as work to be timed."""
    plan, routed = batch.plan, batch.routed
    moved: Stages = {
        "dispatch": lambda: exchange.dispatch(routed),
        "combine": lambda: exchange.combine(batch.parts, routed),
    }
    match case.mode:
        case "dp-ep":
            return moved
        case "replicated":
            both = ("all-reduce", "all-reduce experts")
            return {name: lambda: exchange.all_reduce(batch.partial) for name in both}
    gather: Stages = {"all-gather": lambda: exchange.all_gather(routed.rows, plan)}
    if case.mode == "ar-ep":
        return {"all-reduce": lambda: exchange.all_reduce(batch.partial), **moved, **gather}
    return {"reduce-scatter": lambda: exchange.reduce_scatter(batch.partial, plan), **moved, **gather}


def library_stages(case: Case, batch: Batch, exchange: Exchange) -> Stages:
    """The same with the communication library's own sums and gathers; dispatch and combine are its all-to-all."""
    own = {
        "all-reduce": lambda: average(batch.partial),
        "reduce-scatter": lambda: library_reduce_scatter(batch.partial, batch.plan),
        "all-gather": lambda: library_all_gather(batch.routed.rows, batch.plan),
    }
    return {name: own.get(name, work) for name, work in stages(case, batch, exchange).items()}


def average(values: Tensor) -> Tensor:
    """The library's all-reduce, in place; a mean where it has one, so that values stay finite over many rounds."""
    dist.all_reduce(values, op=dist.ReduceOp.AVG if values.is_cuda else dist.ReduceOp.MAX)
    return values


ATTENDED = "attended/"


@dataclass(frozen=True)
class Prepared:
    """A case at one size, ready to be timed. works: by stage, `total` of all one after another, `plan` and `layer`, and
    `attended/` layers with their attention (`attended_layers`).
    """

    facts: dict[str, Any]
    works: dict[str, Work]

    def document(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """facts and figures; seconds: of each work."""
        beside = {name: seconds[name] for name in ("total", "plan", "layer") if name in seconds}
        share = {"communication_share": seconds["total"] / seconds["layer"]} if "layer" in seconds else {}
        attended = {name.removeprefix(ATTENDED): seconds[name] for name in seconds if name.startswith(ATTENDED)}
        stages = {name: seconds[name] for name in seconds if name not in beside and not name.startswith(ATTENDED)}
        return self.facts | beside | share | ({"attended": attended} if attended else {}) | {"seconds": stages}


def prepare_case(
    workload: Workload,
    case: Case,
    tokens: int,
    exchanges: dict[str, Exchange],
    experts: LocalExperts | None,
    clock: Clock,
    calls: int,
) -> Prepared:
    """One case at one size. experts: this rank's, where the whole layer is timed too (on a GPU)."""
    fast = "symmetric" in exchanges and not case.library
    exchange = exchanges["symmetric" if fast else "collectives"]
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    batch = make_batch(workload, case, tokens, exchange.rank, clock.device, dtype)
    ordered = library_stages(case, batch, exchange) if case.library else stages(case, batch, exchange)
    capture = getattr(exchange, "capture", None)
    works = {name: clock.prepare(once, calls, capture) for name, once in ordered.items()}
    works["total"] = clock.prepare(lambda: [once() for once in ordered.values()], calls, capture)
    if batch.scores is not None:
        works["plan"] = clock.prepare(planning(batch.scores, exchange.num_ranks), calls, capture)
    if experts is not None and not case.library:
        few = min(calls, LAYER_CALLS)
        works["layer"] = clock.prepare(whole_layer(case, batch, exchange, experts), few, capture)
        if case.mode == SHUFFLING:
            attended = attended_layers(batch, exchange, experts)
            works |= {ATTENDED + name: clock.prepare(once, few, capture) for name, once in attended.items()}
    facts = {
        "case": case.name,
        **asdict(case),
        "tokens": tokens,
        "exchange": "symmetric" if fast else "library" if case.library else "collectives",
        "local_share": batch.local_share,
        "busiest_load": batch.busiest_load,
        "rows": batch.rows,
        "total_rows": sum(batch.rows.values()),
    }
    return Prepared(facts, works)


def measure_size(
    workload: Workload,
    tokens: int,
    exchanges: dict[str, Exchange],
    experts: LocalExperts | None,
    clock: Clock,
    calls: int,
) -> list[dict[str, Any]]:
    """All cases of one size, timed in turns."""
    clock = clock.pooled()
    prepared = [
        prepare_case(workload, case, tokens, exchanges, experts, clock, calls) for case in default_cases(workload)
    ]
    seconds = clock.seconds({(i, name): work for i, one in enumerate(prepared) for name, work in one.works.items()})
    return [one.document({name: seconds[i, name] for name in one.works}) for i, one in enumerate(prepared)]


def planning(scores: Tensor, num_ranks: int) -> Callable[[], Plan]:
    """Making the plan, on a GPU by its kernel. scores: [T, G] uint8."""
    if not scores.is_cuda:
        return lambda: make_plan(scores, num_ranks)
    from smoe_cli.runtime.plan_kernel import plan_rows

    index = torch.arange(len(scores), dtype=torch.int32, device=scores.device)
    return lambda: plan_rows(scores, index)


def whole_layer(case: Case, batch: Batch, exchange: Exchange, experts: LocalExperts) -> Callable[[], object]:
    """A layer from the attention's shares to the residual stream, its experts' products and all."""
    layer = replayed_layer(case.mode, batch, exchange, experts)
    if case.mode == ATTENTION_DP:
        return lambda: layer.run_own(batch.routed.rows, len(batch.routed.rows))
    return lambda: layer.run(Mode(case.mode), batch.partial, batch.partial, batch.plan)


def replayed_layer(mode: str, batch: Batch, exchange: Exchange, experts: LocalExperts) -> ExpertLayer:
    """A layer whose router's choice is the replayed one, so that every case computes the same."""
    slots = Slots.identity(batch.num_slots, exchange.num_ranks, batch.partial.device)
    norm = Norm(torch.ones_like(batch.partial[0]), 1e-6)
    chosen = (batch.routed.experts, batch.routed.weights) if mode != "replicated" else batch.everywhere
    return ExpertLayer(exchange, norm, lambda _rows: chosen, slots, experts)


def attended_layers(batch: Batch, exchange: Exchange, experts: LocalExperts) -> dict[str, Callable[[], Tensor]]:
    """A shuffled layer with its attention, by how it comes by its plan: `free` has it; `beside` makes it on
    another stream during the attention, as the run time does; `first` makes it before.
    """
    assert batch.scores is not None
    layer, attend = replayed_layer(SHUFFLING, batch, exchange, experts), attention(batch.partial, exchange.num_ranks)
    plan, other = planning(batch.scores, exchange.num_ranks), aside(batch.partial.device)

    def run(partial: Tensor, made: Plan) -> Tensor:
        return layer.run(Mode.SPECULATIVE, partial, batch.partial, made)[0]

    def beside() -> Tensor:
        planned = other.begin(plan)
        partial = attend()
        return run(partial, planned())

    def first() -> Tensor:
        made = plan()
        return run(attend(), made)

    return {"free": lambda: run(attend(), batch.plan), "beside": beside, "first": first}


def attention(rows: Tensor, num_ranks: int) -> Callable[[], Tensor]:
    """Attention of one sequence by a rank's heads, of random weights: its share of the output. rows: [T, H]."""
    heads = max(1, rows.shape[1] // HEAD // num_ranks)
    generator = torch.Generator(rows.device).manual_seed(0)

    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=rows.device, dtype=rows.dtype) * 0.02

    inwards, outwards = weights(3 * heads * HEAD, rows.shape[1]), weights(rows.shape[1], heads * HEAD)

    def attend() -> Tensor:
        query, key, value = functional.linear(rows, inwards).view(len(rows), 3, heads, HEAD).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return functional.linear(mixed.transpose(0, 1).flatten(1), outwards)

    return attend


def random_experts(workload: Workload, rank: int, device: torch.device) -> LocalExperts:
    """Weights of a rank's experts; only their sizes matter."""
    shape, bounds = workload.shape, slot_bounds(len(workload.slots[CONTIGUOUS]), workload.num_ranks)
    slots, dtype = bounds[rank + 1] - bounds[rank], torch.bfloat16
    generator = torch.Generator(device).manual_seed(rank)

    def weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype) * 0.02

    up = weights(slots, 2 * shape.width, shape.hidden)
    return LocalExperts(up, weights(slots, shape.hidden, shape.width), bounds[rank])


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every shuffled case, time and rows of `sp-ep` over its own, placed and contiguous, at the same size.

    bound: the share of the row ratio that the time ratio reaches.
    """
    plain = {(one["tokens"], one["placement"]): one for one in results if one["mode"] == "sp-ep" and not one["library"]}
    found = []
    for one in results:
        if one["mode"] != SHUFFLING:
            continue
        for against in dict.fromkeys((one["placement"], "contiguous")):
            other = plain[one["tokens"], against]
            time, rows = other["total"] / one["total"], other["total_rows"] / one["total_rows"]
            found.append(
                {
                    "tokens": one["tokens"],
                    "case": one["case"],
                    "against": other["case"],
                    "time_ratio": time,
                    "row_ratio": rows,
                    "bound": time / rows,
                }
            )
    return found


def hardware_model(workload: Workload, results: Sequence[dict[str, Any]], where: dict[str, Any]) -> dict[str, Any]:
    """What `--hardware` takes: seconds of every stage by bytes through the busiest direction of the busiest rank, from
    the cases without a shuffle; and the experts' FLOP/s, from the largest whole layer less its exchanges.
    """
    row_bytes = workload.shape.hidden * ELEMENT_BYTES
    plain = [one for one in results if one["placement"] == CONTIGUOUS and not one["library"] and "layer" in one]
    curves: dict[str, list[list[float]]] = {}
    for one in plain:
        if one["mode"] in ("sp-ep", "replicated"):
            for stage, seconds in one["seconds"].items():
                if stage != "all-reduce experts":
                    curves.setdefault(stage, []).append([one["rows"][stage] * row_bytes, seconds])
    largest = max((one for one in plain if one["mode"] == "sp-ep"), key=lambda one: int(one["tokens"]))
    work = largest["busiest_load"] * 6 * workload.shape.hidden * workload.shape.width
    return {
        "format": "smoe-hardware",
        "format_version": 1,
        "name": f"{where['ranks']} x {where['device']}, {where['date']}",
        "stages": curves,
        "expert_flops": work / (largest["layer"] - largest["total"]),
        "provenance": where,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on: date, devices, versions, and the link as the environment has it."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_SYMM_MEM_"))
        },
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def open_exchanges(backend: str, most_tokens: int, hidden: int, device: torch.device) -> dict[str, Exchange]:
    """The exchanges to time with, by name: always `collectives`; `symmetric` where all ranks reach each other."""
    found: dict[str, Exchange] = {"collectives": CollectiveExchange()}
    if backend != "collectives" and device.type == "cuda":
        chosen = open_exchange(backend, most_tokens, hidden, device)
        if not isinstance(chosen, CollectiveExchange):
            found["symmetric"] = chosen
    return found


def run(workloads: Sequence[Path], tokens: Sequence[int], backend: str, calls: int, clock: Clock) -> dict[str, Any]:
    """Everything, as one document; the same on every rank."""
    document: dict[str, Any] = {"machine": machine(clock.device), "workloads": {}}
    for path in workloads:
        workload = load_workload(path)
        if workload.num_ranks != dist.get_world_size():
            raise ValueError(f"{path} is for {workload.num_ranks} ranks; {dist.get_world_size()} run")
        exchanges = open_exchanges(backend, max(tokens), workload.shape.hidden, clock.device)
        experts = random_experts(workload, dist.get_rank(), clock.device) if clock.device.type == "cuda" else None
        results = []
        for size in tokens:
            found = measure_size(workload, size, exchanges, experts, clock, calls)
            results += found
            for one in found:
                _say(f"{path.stem} {_line(one)}")
        document["workloads"][path.stem] = {
            "origin": workload.origin,
            "shape": vars(workload.shape),
            "results": results,
            "ratios": compare(results),
        }
        if experts is not None:
            document["hardware"] = hardware_model(workload, results, document["machine"])
    return document


def _line(one: dict[str, Any]) -> str:
    parts = " ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in one["seconds"].items())
    plan = f" (plan {one['plan'] * 1e6:.1f})" if "plan" in one else ""
    plan += f" layer {one['layer'] * 1e6:.1f}" if "layer" in one else ""
    plan += "".join(f" {name} {seconds * 1e6:.1f}" for name, seconds in one.get("attended", {}).items())
    return (
        f"T {one['tokens']:6d} {one['case']:34s} {one['exchange']:11s} rows {one['total_rows']:7d} "
        f"total {one['total'] * 1e6:8.1f} us: {parts}{plan}"
    )


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def _show_ratios(document: dict[str, Any]) -> None:
    for name, found in document["workloads"].items():
        for one in found["ratios"]:
            _say(
                f"{name} T {one['tokens']:6d} {one['against']:22s} over {one['case']:34s} "
                f"time {one['time_ratio']:.3f} rows {one['row_ratio']:.3f} reached {one['bound']:.3f}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="smoe_cli.runtime.bench", description="Time a placement where it is served.")
    parser.add_argument("--workload", type=Path, action="append", required=True, help="What smoe bench wrote.")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="Batch sizes.")
    parser.add_argument("--backend", choices=("auto", "symmetric", "collectives"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--calls", type=int, default=20, help="Calls between two readings.")
    parser.add_argument("--repeats", type=int, default=7, help="Readings, whose median counts.")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write.")
    given = parser.parse_args(arguments)
    clock = Clock(join_ranks(given.device), given.repeats)
    try:
        document = run(
            given.workload, [int(size) for size in given.tokens.split(",")], given.backend, given.calls, clock
        )
        _show_ratios(document)
        if given.out and dist.get_rank() == 0:
            given.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        dist.barrier()  # a process that leaves while another still sends takes it down
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
