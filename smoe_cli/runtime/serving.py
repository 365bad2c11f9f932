"""How ranks come together: the process group that torchrun describes, and what they exchange rows through."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group: its functions keep the group of their import, which then is never closed

from smoe_cli.runtime.collectives import CollectiveExchange
from smoe_cli.runtime.exchange import Exchange
from smoe_profiles.errors import InputError, MachineError

BACKENDS = ("auto", "symmetric", "collectives")
MOST_EXPERTS = 32
"""Room for this many experts a row."""


def join_ranks(device: str | None = None) -> torch.device:
    """Join the group that torchrun describes; a GPU a rank where there are any. device: `cpu`, `cuda` or None for both.

    Raises InputError outside torchrun.
    """
    if "RANK" not in os.environ:
        raise InputError("this runs one process a rank: torchrun --nproc-per-node G -m smoe_cli.runtime.generate ...")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(found)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=found if on_gpu else None)
    return found


def open_exchange(
    backend: str,
    most_tokens: int,
    hidden: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
) -> Exchange:
    """What all ranks of a group exchange rows of H elements through, up to `most_tokens` tokens at once. Collective.

    auto: our kernels where every rank reaches every other's memory, else torch.distributed; symmetric: the kernels, or
    MachineError.
    """
    if backend == "collectives" or (backend == "auto" and device.type != "cuda"):
        return CollectiveExchange(group)
    from smoe_cli.runtime import symmetric
    from smoe_cli.runtime.region import Sizes, why_not

    sizes = Sizes(most_tokens, hidden, MOST_EXPERTS, dtype)
    if backend == "auto":
        return symmetric.open_exchange(sizes, device, group)
    reason = why_not(device, group)
    if reason is not None:
        raise MachineError(f"the kernels cannot run here ({reason}); use --backend collectives.")
    return symmetric.SymmetricExchange(sizes, device, group)
