"""Ranks on the CPU that run the kernels: the interpreter, and files that all ranks map in place of GPU memory."""

import atexit
import os
import tempfile
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tests.runtime.ranks import Ranks, _serve


class Emulated(Ranks):
    """Processes with the interpreter on, which must be so before triton is imported."""

    def __init__(self, number, folder):
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(number)]
        self.ends = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, number, str(folder / "meet")), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            for process in self.processes:
                process.start()
        finally:
            del os.environ["TRITON_INTERPRET"]


@cache
def emulated(number):
    """The emulated ranks of this test process, the same for every test."""
    folder = tempfile.TemporaryDirectory(prefix="smoe-emulated-")
    found = Emulated(number, Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(found.close)
    return found


def allocator(folder, fail_on=None):
    """What stands for an allocation that all ranks map. fail_on: a rank whose allocation fails."""
    import torch
    import torch.distributed as dist

    def allocate(size):
        rank = dist.get_rank()
        if fail_on is not None:
            if rank == fail_on:
                raise RuntimeError("no such link")
            return torch.zeros(size, dtype=torch.uint8), torch.zeros(0), None
        names = [str(folder / f"memory{peer}") for peer in range(dist.get_world_size())]
        torch.from_file(names[rank], shared=True, size=size, dtype=torch.uint8)
        dist.barrier()
        maps = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
        return maps[rank], torch.tensor([memory.data_ptr() for memory in maps]), maps

    return allocate


def open_emulated(folder, tokens, hidden=96, top_k=3, dtype=None, patience=30.0, **options):
    """A SymmetricExchange of this rank. folder: one for each exchange."""
    import torch

    from smoe_cli.runtime.region import Sizes
    from smoe_cli.runtime.symmetric import SymmetricExchange

    sizes = Sizes(tokens, hidden, top_k, dtype or torch.bfloat16)
    return SymmetricExchange(sizes, torch.device("cpu"), patience=patience, allocate=allocator(folder, **options))
