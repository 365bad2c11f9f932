"""Ranks on the CPU that run the kernels: the interpreter, and files that all ranks map in place of GPU memory."""

import atexit
import os
import tempfile
import time
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tests.runtime.ranks import Ranks, _serve

POLL = 2e-4
"""Seconds that a rank sleeps between two looks at a flag: ranks are more than cores, and a spin would take one."""


class Emulated(Ranks):
    """Processes with the interpreter on, which must be so before triton is imported: by one, which then forks."""

    def __init__(self, number, folder):
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(number)]
        self.ends = [mine for mine, _ in pipes]
        theirs = [end for _, end in pipes]
        self.processes = [context.Process(target=_fork_ranks, args=(theirs, str(folder / "meet")), daemon=True)]
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            self.processes[0].start()
        finally:
            del os.environ["TRITON_INTERPRET"]
        for end in theirs:
            end.close()


def _fork_ranks(ends, path):
    from triton.runtime.interpreter import InterpreterBuilder

    import smoe_cli.runtime.plan_kernel
    import smoe_cli.runtime.srs
    import smoe_cli.runtime.symmetric  # noqa: F401

    look = InterpreterBuilder.create_atomic_cas

    def look_and_wait(*arguments):
        time.sleep(POLL)
        return look(*arguments)

    InterpreterBuilder.create_atomic_cas = look_and_wait
    children = []
    for rank, end in enumerate(ends):
        child = os.fork()
        if child == 0:
            for other in ends[:rank] + ends[rank + 1 :]:
                other.close()
            _serve(end, rank, len(ends), path)
            os._exit(0)
        children.append(child)
    for end in ends:
        end.close()
    for child in children:
        os.waitpid(child, 0)


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
