"""Timing collective work: in turns, medians of repeats, and of the ranks the slowest.

Every rank must time the same work in the same order: what is timed exchanges data. Works that are to be compared are
timed in turns, each turn in another order, so that what a machine does over seconds falls on all of them alike.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

WARM_UP = 3
Capture = Callable[[torch.cuda.CUDAGraph, Any], AbstractContextManager[None]]
"""Captures what is done inside into a graph, together with the other ranks, its memory from a pool."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Work:
    """Something to time: `run` does it `calls` times. once: what a graph's replay needs alive, its tensors' owner."""

    run: Callable[[], object]
    calls: int
    once: Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """How to time on this device. repeats: readings of each work, whose median counts. pool: memory that all its graphs
    share, for none is replayed while another runs and none reads what another left; without it each keeps its own."""

    device: torch.device
    repeats: int = 7
    pool: Any = None

    def pooled(self) -> "Clock":
        """This clock for works that are timed and dropped together."""
        return replace(self, pool=torch.cuda.graph_pool_handle()) if self.device.type == "cuda" else self

    def prepare(self, once: Callable[[], object], calls: int, capture: Capture | None = None) -> Work:
        """Work that does `once` several times; with `capture` from a CUDA graph, made after everything was compiled and
        run on every rank, so that it holds launches alone."""

        def several() -> None:
            for _ in range(calls):
                once()

        for _ in range(WARM_UP):
            once()
        self._meet()
        if capture is None:
            return Work(several, calls, once)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self.pool):
            several()
        return Work(graph.replay, calls, once)

    def seconds(self, works: Mapping[Name, Work]) -> dict[Name, float]:
        """Seconds of one call of each, timed in turns."""
        taken: dict[Name, list[float]] = {name: [] for name in works}
        order = list(works)
        for turn in range(self.repeats + 1):
            Random(turn).shuffle(order)  # alike on all ranks; heavy work slows down what comes after it
            for name in order:
                found = self._once(works[name])
                if turn:  # the first turn warms up
                    taken[name].append(found)
        medians = torch.tensor([median(each) for each in taken.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return dict(zip(works, medians.tolist(), strict=True))

    def _once(self, work: Work) -> float:
        self._meet()
        if self.device.type != "cuda":
            started = perf_counter()
            work.run()
            return (perf_counter() - started) / work.calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work.run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / work.calls

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
