"""Settings beside the weights that name single experts: quantisation lists in config.json and its like.

A name in full, `model.layers.3.mlp.experts.5.gate_proj`, is renumbered with its expert; the text around it keeps every
byte. A pattern or a shortened name may mean several experts, and is refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import ImpossibleError
from smoe_profiles.tensors import read_json

SINGLE_EXPERT = re.compile(r"experts\\?\.(?=[\d(\[])")
"""Somewhere in a text: a name or pattern for some of the experts."""
JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
VOCABULARY = ("tokenizer", "vocab", "added_tokens", "special_tokens")
"""JSON files of words, not of settings; and large."""


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint writes the experts of each MoE layer. blocks: each block's name, in order of the layers."""

    blocks: tuple[str, ...]
    num_experts: int

    def find(self, text: str) -> tuple[int, int, str, str] | None:
        """(layer index, expert, what stands before its number, what behind), if a text is one expert's name in full.

        A name that ends in the number also begins the names of experts ten and up, where there are as many.
        """
        found = re.fullmatch(r"(.+)\.experts\.(\d+)((?:\.[A-Za-z0-9_]+)*)", text)
        if not found or found[1] not in self.blocks or int(found[2]) >= self.num_experts:
            return None
        if not found[3] and self.num_experts > 10:
            return None
        return self.blocks.index(found[1]), int(found[2]), f"{found[1]}.experts.", found[3]

    def renumber(self, text: str, logical_to_physical: npt.NDArray[np.int64]) -> str:
        """The JSON text of a settings file with every expert's name renumbered. logical_to_physical: [L, E]."""

        def renamed(quoted: re.Match[str]) -> str:
            found = self.find(json.loads(quoted[0]))
            if not found:
                return quoted[0]
            layer, expert, before, behind = found
            return json.dumps(f"{before}{logical_to_physical[layer, expert]}{behind}")

        return JSON_TEXT.sub(renamed, text)


def named_experts(folder: Path, names: ExpertNames) -> set[tuple[int, int]]:
    """(layer index, expert) of every expert that a settings file of the folder names.

    Raises ImpossibleError for a pattern or name whose experts cannot be told, and for an adapter.
    """
    named = set()
    for path in settings_files(folder):
        if path.name == "adapter_config.json":
            raise ImpossibleError(f"{path} belongs to an adapter over numbered experts; merge it into the model first.")
        for text in _texts(read_json(path)):
            if not SINGLE_EXPERT.search(text):
                continue
            found = names.find(text)
            if found is None:
                raise ImpossibleError(
                    f"{path} names single experts as {text!r}; which ones cannot be told, so they cannot be renumbered."
                )
            named.add(found[:2])
    return named


def settings_files(folder: Path) -> list[Path]:
    """The JSON files directly in a model's folder that may hold settings."""
    return [
        path
        for path in sorted(folder.glob("*.json"))
        if not path.name.startswith(VOCABULARY) and not path.name.endswith(".index.json")
    ]


def _texts(content: object) -> Iterator[str]:
    """Every key and text of a JSON document."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)
