"""What the `linear` predictor is fitted from: sums over the fit part, and a sample to judge it by (design 3).

Axes: n rows, H width of the router's input, P projected width, E experts, D = P + E + P' + 1 features.
A layer's features are the router's input made of the layer's input, the early logits, the token's embedding, and 1;
wide vectors pass a fixed random projection first, so that sums stay small at any H.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smoe_profiles.capture.early import EarlyView
from smoe_profiles.split import PARTS
from smoe_profiles.tables import load_arrays, save_arrays
from smoe_profiles.trace import TraceLayer

WIDTH = 512
"""Vectors longer than this are projected to it."""

SAMPLE_ROWS = 4096
"""Rows kept of the validation and of the held-out part, the first that come."""

PROJECTION = "projection."
SUMS = ("xx", "xy", "yy")
FIT = PARTS.index("fit")
SAMPLED = tuple(code for code in range(len(PARTS)) if code != FIT)

Arrays = dict[str, npt.NDArray[Any]]


def projection(width: int, seed: int) -> npt.NDArray[np.float32] | None:
    """[width, WIDTH] Gaussian, columns of unit length on average; None where a vector is short enough as it is."""
    if width <= WIDTH:
        return None
    drawn = np.random.default_rng(seed).standard_normal((width, WIDTH), np.float32)
    return drawn / np.float32(np.sqrt(WIDTH))


@dataclass
class LinearSums:
    """Sums X'X [D, D], X'Y [D, E] and Y'Y's diagonal [E] of each layer's fit rows, float64, and the sample.

    batches: how many batches went in, kept with the sums so that a killed run adds none twice.
    """

    layers: Sequence[TraceLayer]
    batches: int = 0
    _sums: list[dict[str, Tensor]] = field(default_factory=list)
    _sample: list[dict[int, list[Arrays]]] = field(default_factory=list)
    _sampled: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SAMPLED, 0))
    _projections: dict[str, Tensor | None] = field(default_factory=dict)

    def add(self, view: EarlyView, kept: npt.NDArray[np.bool_], facts: dict[str, npt.NDArray[Any]]) -> None:
        """Take in one forward. kept: [T]; facts: sequence, position and split of the kept rows."""
        embedding = self._projected("embedding", view.embedding.float(), 1)[torch.from_numpy(kept)]
        for number, layer_view in enumerate(view.layers):
            rows = torch.from_numpy(kept).to(layer_view.logits.device)
            inputs = self._projected("input", layer_view.inputs.float(), 0)
            ones = torch.ones(len(embedding), 1, device=inputs.device)
            x = torch.cat([inputs[rows], layer_view.logits[rows], embedding.to(inputs.device), ones], dim=1)
            self._add_layer(number, x, layer_view.truth[rows], facts)
        for code in SAMPLED:
            self._sampled[code] += int((facts["split"] == code).sum())

    def _projected(self, name: str, vectors: Tensor, seed: int) -> Tensor:
        if name not in self._projections:
            made = projection(vectors.shape[1], seed)
            self._projections[name] = None if made is None else torch.from_numpy(made)
        matrix = self._projections[name]
        return vectors if matrix is None else vectors @ matrix.to(vectors.device)

    def _add_layer(self, number: int, x: Tensor, y: Tensor, facts: dict[str, npt.NDArray[Any]]) -> None:
        while len(self._sums) <= number:
            self._sums.append({})
            self._sample.append({code: [] for code in SAMPLED})
        fit = torch.from_numpy(facts["split"] == FIT).to(x.device)
        x_fit, y_fit = x[fit], y[fit]
        found = {"xx": x_fit.T @ x_fit, "xy": x_fit.T @ y_fit, "yy": (y_fit * y_fit).sum(dim=0)}
        for name, value in found.items():
            total = self._sums[number].get(name)
            self._sums[number][name] = value.double() if total is None else total.to(value.device) + value
        for code in SAMPLED:
            left = SAMPLE_ROWS - self._sampled[code]
            if left > 0:
                mine = np.flatnonzero(facts["split"] == code)[:left]
                chosen = torch.from_numpy(mine).to(x.device)
                columns = {"features": x[chosen].half(), "logits": y[chosen].half()}
                arrays = {name: tensor.cpu().numpy() for name, tensor in columns.items()}
                arrays |= {name: facts[name][mine] for name in ("sequence", "position")}
                self._sample[number][code].append(arrays)

    def save(self, path: Path) -> None:
        """Everything so far as one file, in one step."""
        arrays: Arrays = {"batches": np.array([self.batches], np.int64)}
        for number, sums in enumerate(self._sums):
            arrays |= {f"{number}.{name}": value.cpu().numpy() for name, value in sums.items()}
            for code, pieces in self._sample[number].items():
                arrays |= {f"{number}.{code}.{name}": value for name, value in _joined(pieces).items()}
        arrays |= {f"{PROJECTION}{name}": m.numpy() for name, m in self._projections.items() if m is not None}
        fresh = path.with_suffix(".linear-new")
        save_arrays(fresh, arrays)
        fresh.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a saved file, if there is one."""
        if not path.exists():
            return
        arrays = load_arrays(path)
        self.batches = int(arrays["batches"][0])
        for number in range(len(self.layers) if "0.xx" in arrays else 0):
            self._sums.append({name: torch.from_numpy(arrays[f"{number}.{name}"]) for name in SUMS})
            pieces = {code: _named(arrays, f"{number}.{code}.") for code in SAMPLED}
            self._sample.append({code: [found] if found else [] for code, found in pieces.items()})
            self._sampled = {code: len(found["position"]) if found else 0 for code, found in pieces.items()}


def write_linear(folder: Path, layers: Sequence[TraceLayer], saved: Sequence[Path]) -> None:
    """linear/: one file a layer, the sums of all processes added in order, and the projections.

    saved: what each process' `LinearSums.save` wrote.
    """
    folder.mkdir(exist_ok=True)
    parts = [part for path in saved if "0.xx" in (part := load_arrays(path))]
    for number, layer in enumerate(layers):
        arrays = {name: np.sum([part[f"{number}.{name}"] for part in parts], axis=0) for name in SUMS}
        for code in SAMPLED:
            pieces = [_named(part, f"{number}.{code}.") for part in parts]
            arrays |= {f"{PARTS[code]}.{name}": value for name, value in _joined([p for p in pieces if p]).items()}
        save_arrays(folder / f"layer_{layer.label}.safetensors", arrays)
    matrices = {name: matrix for part in parts[:1] for name, matrix in _named(part, PROJECTION).items()}
    if matrices:
        save_arrays(folder / "projection.safetensors", matrices)


def _named(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _joined(pieces: Sequence[Arrays]) -> Arrays:
    if not pieces:
        return {}
    return {name: np.concatenate([piece[name] for piece in pieces])[:SAMPLE_ROWS] for name in pieces[0]}
