"""Work beside the stream in use: begun as soon as its inputs are known, waited for where its result is needed.

On a GPU a second stream does it, forked and joined by events, so that a CUDA graph captures it as a branch. On the CPU
it is done at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

Made = TypeVar("Made")


@dataclass(frozen=True)
class Aside:
    """stream: of the work, None on the CPU.

    Memory needs no further care as long as what is begun is also waited for. What the work reads is held by whoever
    waits, and what it makes can only be written again by work that is begun later, which waits for all uses so far.
    """

    stream: torch.cuda.Stream | None = None

    def begin(self, work: Callable[[], Made]) -> Callable[[], Made]:
        """Start work on what was enqueued so far. Returns what makes the stream in use wait and gives the result."""
        if self.stream is None:
            at_once = work()
            return lambda: at_once
        device = self.stream.device
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            made = work()
            done = self.stream.record_event()

        def join() -> Made:
            torch.cuda.current_stream(device).wait_event(done)
            return made

        return join


@cache
def aside(device: torch.device) -> Aside:
    """The one of a device. Its few blocks go before those that are waiting for a multiprocessor."""
    if device.type != "cuda":
        return Aside()
    return Aside(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
