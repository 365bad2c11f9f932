"""A model and its tokenizer as transformers loads them, from local files alone and without the code in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import Model

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Unless told, transformers asks on the terminal whether a folder's own code may run; it may not."""

Encode = Callable[[Any], list[int]]
"""From a text, or a list of chat messages, to token ids."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model: dtype (`auto`: as stored), and where its weights lie.

    device: one device; device_map: spread over this process' devices; tensor_parallel: each layer split over all
    processes.
    """

    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | None = None
    tensor_parallel: bool = False


def load_tokenizer(model: Model, *, chat: bool = False) -> Encode:
    """The model's own tokenizer: from text to ids, with the special tokens that it adds by itself.

    chat: put the text, or messages, into the model's chat template. Raises ImpossibleError if it has none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model.local_folder(), **LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{model.local_folder()} has no tokenizer transformers can load ({error}).") from error
    if chat:
        if not tokenizer.chat_template:
            raise ImpossibleError(f"the tokenizer of {model.name} has no chat template; leave --chat-template out.")
        return lambda content: _chat_ids(tokenizer, content)
    return lambda content: list(tokenizer(_text(content), verbose=False)["input_ids"])


def _chat_ids(tokenizer: Any, content: Any) -> list[int]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=messages[-1]["role"] == "user", tokenize=True, return_dict=True
        )
    except Exception as error:  # the template is a program of the model's own, and refuses in its own way
        raise InputError(f"the chat template does not take a conversation ({error}).") from error
    return list(encoded["input_ids"])


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise InputError("a data set holds chat messages; give --chat-template to profile them.")
    return content


def load_model(model: Model, options: LoadOptions) -> torch.nn.Module:
    """The model in evaluation mode. Raises MachineError when memory, a device or a package is short."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    placement: dict[str, Any] = {}
    if options.tensor_parallel:
        from transformers.distributed.configuration_utils import DistributedConfig

        placement["distributed_config"] = DistributedConfig(tp_plan="auto")
    elif options.device_map:
        placement["device_map"] = options.device_map
    try:
        loaded: torch.nn.Module = _auto_class(model).from_pretrained(
            model.local_folder(), dtype=options.dtype, **LOCAL, **placement
        )
        if not placement:
            loaded = loaded.to(options.device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MachineError(f"model {model.name} does not fit in memory ({model.size} of weights).") from error
    except ImportError as error:
        raise MachineError(f"model {model.name} needs a package that is not installed ({error}).") from error
    except (RuntimeError, AssertionError) as error:
        raise MachineError(f"model {model.name} could not be put on {options.device} ({error}).") from error
    except (OSError, ValueError) as error:
        if "accelerate" in str(error):
            raise MachineError("spreading a model over devices needs accelerate; pip install accelerate.") from error
        raise ImpossibleError(f"transformers cannot load {model.local_folder()} ({error}).") from error
    return loaded.eval()


def _auto_class(model: Model) -> Any:
    """The class that loads a model's text part: of text alone, or of images and text where there is no other.

    A model that neither knows is left to the first, whose error says so.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    config = type(AutoConfig.from_pretrained(model.local_folder(), **LOCAL))
    with_images = config not in MODEL_FOR_CAUSAL_LM_MAPPING and config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM
