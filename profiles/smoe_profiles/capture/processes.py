"""One profiling run on many processes, as torchrun starts them: who am I, wait for all, collect on the first."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """This process' number among `count`, and its number on this machine; alone by default."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Self:
        """What torchrun put into the environment."""
        return cls(*(int(os.environ.get(name, alone)) for name, alone in _VARIABLES))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """`cuda` without a number means this process' own GPU."""
        return f"cuda:{self.local_rank}" if wanted == "cuda" and self.count > 1 else wanted

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """All processes in one group while inside: NCCL between GPUs, gloo otherwise."""
        if self.count == 1:
            yield
            return
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        backend = "cuda:nccl,cpu:gloo" if device.startswith("cuda") else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(days=1))  # one may finish long before the others
        try:
            yield
        finally:
            distributed.destroy_process_group()

    def wait(self) -> None:
        """Until every process is here. A process that fails never comes; torchrun then ends the others."""
        if self.count > 1:
            self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value by rank, on every process."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
ALONE = Processes()
