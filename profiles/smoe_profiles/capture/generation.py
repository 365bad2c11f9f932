"""Greedy generation with a cache, every forward pass recorded.

transformers does the generating: position ids, caches of hybrid models and stopping are its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smoe_profiles.capture.packing import Batch
from smoe_profiles.capture.recorder import Captured, Recorder


@dataclass(frozen=True)
class Generated:
    """A batch's forwards: `prefill` over [B, S] left-padded positions, then one of [B] tokens a step.

    token_id: [steps, B], what each decode step was fed; alive: [steps, B], False from a sequence's end on.
    """

    prefill: Captured
    steps: list[Captured]
    token_id: npt.NDArray[np.uint32]
    alive: npt.NDArray[np.bool_]


def generate(model: Any, batch: Batch, recorder: Recorder, decode: int) -> Generated:
    """Run a batch of prompts and feed up to `decode` generated tokens of each back in.

    The last token sampled is fed to nothing, so it has no row.
    """
    from transformers import GenerationConfig

    forwards: list[Captured] = []
    ends = _end_ids(model)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=decode + 1, do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    input_ids = torch.from_numpy(batch.input_ids(left=True)).to(model.device)
    mask = torch.from_numpy(batch.real(left=True)).to(model.device, torch.int64)
    handle = model.register_forward_hook(lambda *_: forwards.append(recorder.take()))
    try:
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=settings)
    finally:
        handle.remove()
    steps = len(forwards) - 1
    fed = output[:, input_ids.shape[1] :][:, :steps].T.cpu().numpy()
    ended = np.isin(fed, ends).cumsum(axis=0) > 0
    return Generated(forwards[0], forwards[1:], fed.astype(np.uint32), ~ended)


def _end_ids(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = getattr(model.config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
