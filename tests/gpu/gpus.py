"""A process for each GPU of this host, joined by NCCL and gloo: started once, for eight starts take their time."""

import os
import pickle
import tempfile
import time
from datetime import timedelta
from functools import cache
from multiprocessing import get_context

import torch

from tests.runtime.ranks import answer

COUNT = torch.cuda.device_count()
SECONDS, START = 120, 120
"""That a test may take, and the start of the processes."""


class Gpus:
    """`run` calls function(rank, *arguments) on every rank at once. Functions must be found by module and name."""

    def __init__(self, number=COUNT, device="cuda"):
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(number)]
        self.ends = [mine for mine, _ in pipes]
        self.folder = tempfile.TemporaryDirectory(prefix="smoe-gpus-")
        path = f"{self.folder.name}/meet"
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, number, path, device), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self.run(_nothing, seconds=START)

    def run(self, function, *arguments, seconds=SECONDS, dead=()):
        """dead: ranks that need not answer. Raises AssertionError with the first rank's trouble, in time."""
        for end in self.ends:
            end.send_bytes(pickle.dumps((_with_rank, (function, *arguments))))
        deadline, troubles = time.monotonic() + seconds, []
        for rank, end in enumerate(self.ends):
            if rank in dead:
                continue
            if end.poll(max(0, deadline - time.monotonic())):
                good, told = pickle.loads(end.recv_bytes())
                troubles += [] if good else [told]
            else:
                troubles.append(f"rank {rank} did not answer within {seconds} s")
        assert not troubles, "\n".join(troubles)

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


shared = cache(Gpus)


def run_on_gpus(function, *arguments, alone=False, seconds=SECONDS, dead=()):
    """On the processes that tests share. They end after a failure, and where the test changes or kills them (alone)."""
    keep = False
    try:
        shared().run(function, *arguments, seconds=seconds, dead=dead)
        keep = not alone
    finally:
        if not keep and shared.cache_info().currsize:
            shared().close()
            shared.cache_clear()


def _nothing(_rank):
    pass


def _with_rank(function, *arguments):
    import torch.distributed as dist

    function(dist.get_rank(), *arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _serve(end, rank, number, path, device):
    import torch.distributed as dist

    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=SECONDS),
    )
    answer(end, rank)
    os._exit(0)  # shared memory is not given back in an agreed order, so nothing may be torn down
