"""The early gate's record, `linear/` of a trace or of tables: sums to fit from, and rows to judge and measure by.

Axes: N sampled rows of a part, R recent tokens, Q embedding width, E experts, D features, K experts a token. Written by
`smoe_profiles.capture.linear`, which says what the features are.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError
from smoe_profiles.tables import load_arrays
from smoe_profiles.tensors import Shape, read_shard
from smoe_profiles.trace import UNKNOWN_TOKEN, ExpertIds, TraceLayer

FOLDER = "linear"
JUDGED = ("validation", "heldout")
"""The parts of which rows are kept: what is fitted from the fit part are sums."""


@dataclass(frozen=True)
class GateRows:
    """One layer's sampled rows of one part. experts: [N, K]; early: [N, E] logits; features: [N, D]; truth: [N, E].

    early_at: where the early logits begin among the features.
    """

    experts: ExpertIds
    early: npt.NDArray[np.float32]
    features: npt.NDArray[np.float32]
    truth: npt.NDArray[np.float32]
    early_at: int


@dataclass(frozen=True)
class GateRecord:
    """A `linear/` folder, read layer by layer."""

    folder: Path

    @cached_property
    def _rows(self) -> dict[str, npt.NDArray[Any]]:
        shapes: dict[str, Shape] = {f"{part}.recent": ("U32", None, None) for part in JUDGED}
        rows = load_arrays(self.folder / "rows.safetensors", shapes)
        if not all(rows[name].shape[1] for name in shapes):
            raise InputError(f"{self.folder / 'rows.safetensors'} does not say which tokens its rows are of.")
        return rows

    @cached_property
    def _embedding(self) -> npt.NDArray[np.float32]:
        path = self.folder / "embedding.safetensors"
        return load_arrays(path, {"embedding": ("F16", None, None)})["embedding"].astype(np.float32)

    @property
    def embedding_width(self) -> int:
        """Q."""
        return int(self._embedding.shape[1])

    def token_id(self, part: str) -> npt.NDArray[np.uint32]:
        """[N]: the ids of a part's sampled rows, in order."""
        recent: npt.NDArray[np.uint32] = self._rows[f"{part}.recent"]
        return recent[:, 0]

    def sums(self, layer: TraceLayer) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Sums over fit rows: x x' [D, D] and x y' [D, E]."""
        arrays = self._layer(layer)
        return arrays["xx"], arrays["xy"]

    def rows(self, layer: TraceLayer, part: str, limit: int | None = None) -> GateRows:
        """The first `limit` sampled rows of a part."""
        arrays = {
            name: self._layer(layer)[f"{part}.{name}"][:limit] for name in ("inputs", "early", "logits", "experts")
        }
        if arrays["experts"].max(initial=0) >= layer.num_experts + layer.num_zero:
            raise InputError(
                f"{self.folder}: layer {layer.id} names expert {arrays['experts'].max()}, which it has not."
            )
        recent = self._rows[f"{part}.recent"][:limit]
        ids = np.where(recent == UNKNOWN_TOKEN, len(self._embedding) - 1, recent)
        if ids.size and ids.max() >= len(self._embedding):
            raise InputError(f"{self.folder} names token id {ids.max()}; it has {len(self._embedding)} embeddings.")
        early = arrays["early"].astype(np.float32)
        ones = np.ones((len(ids), 1), np.float32)
        embedded = self._embedding[ids].reshape(len(ids), -1)
        features = np.concatenate([arrays["inputs"].astype(np.float32), early, embedded, ones], axis=1)
        truth = arrays["logits"].astype(np.float32)
        return GateRows(arrays["experts"].astype(np.uint16), early, features, truth, arrays["inputs"].shape[1])

    def _layer(self, layer: TraceLayer) -> dict[str, npt.NDArray[Any]]:
        path = self.folder / f"layer_{layer.label}.safetensors"
        inputs = next((one.shape[1] for one in read_shard(path).tensors if one.name.endswith(".inputs")), 0)
        experts, embedded = layer.num_experts + layer.num_zero, self.embedding_width
        shapes: dict[str, Shape] = {}
        for part in JUDGED:
            rows, recent = self._rows[f"{part}.recent"].shape
            shapes |= {f"{part}.inputs": ("F16", rows, inputs), f"{part}.experts": ("U16", rows, layer.top_k)}
            shapes |= {f"{part}.{name}": ("F16", rows, experts) for name in ("early", "logits")}
        features = inputs + experts + recent * embedded + 1
        shapes |= {"xx": ("F64", features, features), "xy": ("F64", features, experts)}
        return load_arrays(path, shapes)


def gate_record(artefact: Path) -> GateRecord | None:
    """The early gate's record of a trace or of tables, or None if it was not recorded."""
    folder = artefact / FOLDER
    return GateRecord(folder) if (folder / "rows.safetensors").exists() else None
