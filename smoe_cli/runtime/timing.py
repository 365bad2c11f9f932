"""Timing collective work: medians of repeats, and of the ranks the slowest.

Every rank must time the same work in the same order: what is timed exchanges data.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

WARM_UP = 3
Capture = Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]
"""Captures what is done inside into a graph, together with the other ranks."""


@dataclass(frozen=True)
class Clock:
    """How to time on this device. inner: calls between two readings; repeats: readings, whose median counts."""

    device: torch.device
    inner: int = 20
    repeats: int = 7

    def seconds(self, work: Callable[[], object], capture: Capture | None = None) -> float:
        """Seconds of one call, median of the repeats, slowest rank. capture: replay a CUDA graph of `inner` calls."""
        run = (lambda: self._repeated(work)) if capture is None else self._captured(work, capture)
        for _ in range(WARM_UP):
            run()
        taken = [self._once(run) / self.inner for _ in range(self.repeats)]
        slowest = torch.tensor(median(taken), dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def _repeated(self, work: Callable[[], object]) -> None:
        for _ in range(self.inner):
            work()

    def _captured(self, work: Callable[[], object], capture: Capture) -> Callable[[], object]:
        """A graph of `inner` calls. Everything was compiled and run once before, on every rank, so that the capture
        holds launches alone."""
        for _ in range(WARM_UP):
            work()
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            self._repeated(work)
        return graph.replay

    def _once(self, run: Callable[[], object]) -> float:
        self._meet()
        if self.device.type != "cuda":
            started = perf_counter()
            run()
            return perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
