"""Memory that every rank of a group can store into: allocated once, checked once, addressed by one table.

Axes: G ranks, T tokens at most, H hidden size, K experts a token, C = ceil(T / G).

A region holds two slots for rows pushed to their homes or to their experts and two for gathered rows; operations use
them in turn. Why no more is needed: operation n stores into one slot of every peer. This rank has then finished
operation n - 1 on the other slot, in which it heard from every peer; and a peer that speaks in operation n - 1 has
come, in its own stream, behind everything that read what operation n - 2 left in the first slot. So what an operation
returns in a slot holds for all work enqueued before the next operation on slots of that kind. A CUDA graph breaks the
turns, because it remembers its slots: captures begin and end with a fence (`SymmetricExchange.capture`).
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.runtime.launch import MAX_BLOCKS
from smoe_profiles.errors import MachineError

SLOTS = MAX_BLOCKS + 2
"""Flags and epochs: of the blocks, and two for a kernel as a whole (see `barrier`)."""

ALIGNMENT = 256

OPERATIONS = ("fence", "reduce_scatter", "all_gather", "dispatch", "combine")
CODES = {name: 1 + index for index, name in enumerate(OPERATIONS)}
"""What a kernel notes of itself when it gives a rank up; 0 is nothing."""


@dataclass(frozen=True)
class Sizes:
    """What a region is made for. max_tokens: T; hidden: H; top_k: K."""

    max_tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise MachineError(f"The kernels cannot exchange rows of {self.dtype}; use float16, bfloat16 or float32.")
        if self.hidden % 8 or self.hidden < 8:
            raise MachineError(
                f"Hidden size {self.hidden} is not a multiple of 8, so rows cannot be moved 16 bytes at a time; "
                "use the collectives backend."
            )


Allocation = tuple[Tensor, Tensor, object]
"""This rank's memory [bytes] uint8, the addresses of all ranks' [G] int64, and what must live as long as they do."""


@dataclass(frozen=True)
class Region:
    """One rank's view. memory: [bytes] uint8; bases: [G] int64 addresses of all ranks' memories; offsets: name -> byte;
    epochs, failures: see `barrier`. timeout: ns a kernel waits for a rank; protocol: how it waits (`barrier`);
    processors: multiprocessors of the device.
    """

    rank: int
    num_ranks: int
    memory: Tensor
    bases: Tensor
    offsets: dict[str, int]
    epochs: Tensor
    failures: Tensor
    timeout: int
    protocol: int
    processors: int
    keep: object = None

    @property
    def flags(self) -> Tensor:
        """[S, G] int32."""
        return self.view("flags", torch.int32, SLOTS, self.num_ranks)

    def view(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """This rank's part of that name."""
        start = self.offsets[name]
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[start : start + size].view(dtype).view(shape)


def layout(sizes: Sizes, num_ranks: int) -> tuple[dict[str, int], int]:
    """Where the parts of a region begin, flags first and a stamp last, and the bytes in all."""
    places = -(-sizes.max_tokens // num_ranks) * num_ranks
    row = sizes.hidden * sizes.dtype.itemsize
    parts = [("flags", SLOTS * num_ranks * 4)]
    for slot in (0, 1):
        parts += [
            (f"pushed{slot}", places * row),
            (f"needs{slot}", places * 4),
            (f"experts{slot}", places * sizes.top_k * 4),
            (f"weights{slot}", places * sizes.top_k * 4),
            (f"gathered{slot}", places * row),
            (f"labels{slot}", places),
        ]
    parts.append(("stamp", ALIGNMENT))
    offsets, end = {}, 0
    for name, size in parts:
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def allocate_on_gpus(size: int, device: torch.device, group: dist.ProcessGroup | None) -> Allocation:
    """One allocation that all ranks map. Multicast stays off: its broken states outlive the process (and the host)."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    handle = symmetric_memory.rendezvous(memory, whole)
    return memory, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device), handle


def open_region(
    sizes: Sizes,
    device: torch.device,
    group: dist.ProcessGroup | None,
    seconds: float,
    allocate: Callable[[int], Allocation] | None = None,
) -> Region:
    """Allocate on every rank, zero, and see through the table that each rank reads every other's memory.

    Collective. Raises MachineError on all ranks if it fails on any.
    """
    from smoe_cli.runtime import barrier

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MachineError(
            "Memory that ranks share cannot be allocated while a CUDA graph is captured: its address would not last. "
            "Open the exchange before the capture."
        )
    num_ranks = dist.get_world_size(group)
    offsets, size = layout(sizes, num_ranks)
    trouble, allocation = None, None
    try:
        allocation = allocate(size) if allocate else allocate_on_gpus(size, device, group)
    except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks must hear of it)
        trouble = f"allocating {size} bytes that all ranks map failed: {error}"
    raise_together(trouble, group)
    assert allocation is not None
    memory, bases, keep = allocation
    memory.zero_()
    region = Region(
        rank=dist.get_rank(group),
        num_ranks=num_ranks,
        memory=memory,
        bases=bases,
        offsets=offsets,
        epochs=torch.zeros(SLOTS, dtype=torch.int32, device=device),
        failures=torch.zeros(num_ranks, dtype=torch.int32, device=device),
        timeout=int(seconds * 1e9),
        processors=count_processors(device),
        protocol=(barrier.PTX if device.type == "cuda" else barrier.ATOMICS).value,
        keep=keep,
    )
    region.view("stamp", torch.int32, 1).fill_(region.rank + 1)
    meet(group, device)
    raise_together(_wrong_stamp(region), group)
    return region


def count_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; of the one where launches were measured, if this is none."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _wrong_stamp(region: Region) -> str | None:
    """Read the last word of every rank's memory through the table."""
    from smoe_cli.runtime.barrier import stamps_kernel

    found = torch.zeros(region.num_ranks, dtype=torch.int32, device=region.memory.device)
    stamps_kernel[(1,)](region.bases, found, region.offsets["stamp"], G=region.num_ranks)
    seen = found.tolist()
    if seen == list(range(1, region.num_ranks + 1)):
        return None
    return f"rank {region.rank} reads the stamps {seen} where 1 to {region.num_ranks} were written"


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Return when every rank has done, on its device too, all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raise_together(trouble: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise MachineError on every rank if one has trouble, so that all go the same way."""
    told = agreed(trouble, group)
    if told is not None:
        raise MachineError(told)


def agreed(trouble: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The trouble of the lowest rank that has any, the same on every rank."""
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, trouble, group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None), None)


def why_not(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Why the kernels cannot be used by this group, in words, the same on every rank; None if they can.

    Collective. Asks before any shared memory is touched: a rendezvous without peer access can kill the process.
    """
    seats: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(seats, (socket.gethostname(), device.index or 0), group)
    return agreed(_obstacle(device) or _unlinked(seats), group)


def _obstacle(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the kernels need CUDA devices, this is {device.type}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: pip install 'smoe[runtime]'"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


def _unlinked(seats: list[tuple[str, int]]) -> str | None:
    """seats: host and device index of each rank."""
    hosts, devices = {host for host, _ in seats}, [index for _, index in seats]
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(devices)) < len(devices) or max(devices) >= torch.cuda.device_count():
        return f"every rank needs a GPU of its own and must see those of the others; device numbers are {devices}"
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"GPU {one} has no peer access to GPU {other}"
    return None
