"""One profiling run: documents through the model, routing into a trace."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smoe_profiles.capture.packing import Batch, batches, cut
from smoe_profiles.capture.recorder import Recorder, experts_modules
from smoe_profiles.choices import Pack
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import Model
from smoe_profiles.split import Assigned
from smoe_profiles.trace import Rows, TraceLayer
from smoe_profiles.trace_writer import TraceWriter, sort_by_weight


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model: dtype (`auto`: as stored), one device, or a device map for a model larger than one."""

    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | None = None


def load_tokenizer(model: Model) -> Callable[[str], list[int]]:
    """The model's own tokenizer as a function from text to ids, with the special tokens it adds by itself."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model.local_folder(), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{model.local_folder()} has no tokenizer transformers can load ({error}).") from error
    return lambda text: list(tokenizer(text, verbose=False)["input_ids"])


def load_model(model: Model, options: LoadOptions) -> torch.nn.Module:
    """The model in evaluation mode. Raises MachineError when memory or the device is short."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    placement = {"device_map": options.device_map} if options.device_map else {}
    try:
        loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            model.local_folder(), dtype=options.dtype, local_files_only=True, **placement
        )
        if not options.device_map:
            loaded = loaded.to(options.device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MachineError(
            f"model {model.name} does not fit in memory ({model.nbytes / 1e9:.1f} GB of weights)."
        ) from error
    except (RuntimeError, AssertionError) as error:
        raise MachineError(f"model {model.name} could not be put on {options.device} ({error}).") from error
    except (OSError, ValueError, ImportError) as error:
        raise ImpossibleError(f"transformers cannot load {model.local_folder()} ({error}).") from error
    return loaded.eval()


def trace_layers(model: Model) -> list[TraceLayer]:
    return [TraceLayer(layer.id, layer.num_experts, layer.top_k) for layer in model.spec.layers]


def record(
    model: Model,
    loaded: torch.nn.Module,
    documents: Iterable[Assigned],
    writer: TraceWriter,
    *,
    sources: Sequence[str],
    pack: Pack,
    seq_len: int,
    progress: Callable[[int], None],
) -> None:
    """Run documents through the model and append their routing to the trace; progress(tokens) after each batch."""
    layers = trace_layers(model)
    decoder: Any = loaded.base_model
    device = next(loaded.parameters()).device
    with Recorder(experts_modules(loaded, model.spec)) as recorder, torch.inference_mode():
        for batch in batches(cut(documents, pack, seq_len, sources)):
            input_ids = torch.from_numpy(batch.input_ids()).to(device)
            decoder(input_ids=input_ids, use_cache=False)
            rows = _rows(batch, *recorder.take(), layers)
            writer.append(rows)
            progress(len(rows.sequence))


def _rows(batch: Batch, ids: torch.Tensor, weights: torch.Tensor, layers: list[TraceLayer]) -> Rows:
    """Trace rows of a batch, padding dropped. ids, weights: [L, B * S, K]."""
    real = batch.real().reshape(-1)
    chunks = batch.chunks
    pairs = [sort_by_weight(ids[i].numpy()[real], weights[i].numpy()[real]) for i in range(len(layers))]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    return Rows(
        sequence=np.repeat(np.array([chunk.sequence for chunk in chunks], np.uint32), lengths),
        position=np.concatenate([np.arange(len(chunk.token_ids)) + chunk.first_position for chunk in chunks]).astype(
            np.uint32
        ),
        token_id=np.concatenate([chunk.token_ids for chunk in chunks]),
        phase=np.zeros(sum(lengths), np.int16),
        source=np.concatenate([chunk.source for chunk in chunks]),
        split=np.repeat(np.array([chunk.part for chunk in chunks], np.int16), lengths),
        experts=[experts for experts, _ in pairs],
        weights=[weights for _, weights in pairs],
    )
