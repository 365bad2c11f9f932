"""A process for each GPU of this host, joined by NCCL and gloo: started once, for eight starts take their time.

With SMOE_RANKS there are as many processes on the GPUs that there are, joined by gloo. They take turns on a GPU, at
some ms a turn, so they time nothing and cross no link; but the compiled kernels run, with that many ranks.
"""

import os
import pickle
import tempfile
import time
from datetime import timedelta
from functools import cache
from multiprocessing import get_context

import torch

from tests.runtime.ranks import answer

DEVICES = torch.cuda.device_count()
COUNT = int(os.environ.get("SMOE_RANKS", DEVICES))
SHARED = 0 < DEVICES < COUNT
SECONDS, START = 120, 120
"""That a test may take, and the start of the processes."""


def device_of(rank):
    return torch.device("cuda", rank % DEVICES)


def map_everywhere(memory):
    """Memory of ranks that share a GPU as the others see it, through handles of CUDA. As `region.allocate_on_gpus`."""
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    handles = [None] * dist.get_world_size()
    dist.all_gather_object(handles, reduce_tensor(memory))
    handles[dist.get_rank()] = (lambda: memory, ())
    mapped = [open_handle(*arguments) for open_handle, arguments in handles]
    return memory, torch.tensor([one.data_ptr() for one in mapped], dtype=torch.int64, device=memory.device), mapped


def shared_allocation(device):
    """How an exchange of this test comes by its memory: None for the library's own way."""
    if not SHARED:
        return None
    return lambda size: map_everywhere(torch.empty(size, dtype=torch.uint8, device=device))


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
        torch.cuda.set_device(device_of(rank))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" and not SHARED else "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=SECONDS),
    )
    answer(end, rank)
    os._exit(0)  # shared memory is not given back in an agreed order, so nothing may be torn down
