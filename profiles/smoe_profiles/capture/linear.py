"""What the `linear` predictor is fitted from: sums over the fit part, and a sample to judge it by.

Axes: n rows, P width of the router's input, Q of an embedding (both after projection), E experts, R recent tokens,
D = P + E + R * Q + 1 features. A layer's features are what is known of a token before the layer's attention: the
router's input made of the layer's input, the early logits, the embeddings of the token and of those before it, and 1.
Wide vectors pass a fixed random projection first, so that sums stay small at any hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smoe_profiles.capture.recorder import Captured
from smoe_profiles.split import PARTS, TokenIds
from smoe_profiles.tables import load_arrays, save_arrays
from smoe_profiles.trace import UNKNOWN_TOKEN, TraceLayer

INPUT_WIDTH, EMBEDDING_WIDTH = 512, 256
"""Vectors longer than this are projected to it."""

RECENT = 5
"""The token itself and the four before it: attention looks back mostly a few tokens."""

SAMPLE_ROWS = 16_384
"""Rows kept of the validation and of the held-out part, the first that come."""

SUMS = ("xx", "xy", "yy")
ROW_FACTS = ("recent", "sequence", "position")
FIT = PARTS.index("fit")
SAMPLED = tuple(code for code in range(len(PARTS)) if code != FIT)
EMBEDDING = "embedding.safetensors"
ROWS = "rows.safetensors"

Arrays = dict[str, npt.NDArray[Any]]


def recent_ids(ids: TokenIds, places: npt.NDArray[np.int64]) -> TokenIds:
    """The ids at the given places of one sequence and before, newest first, [m, R]; UNKNOWN_TOKEN before its start."""
    padded = np.concatenate([np.full(RECENT - 1, UNKNOWN_TOKEN, np.uint32), ids])
    return np.stack([padded[places + RECENT - 1 - back] for back in range(RECENT)], axis=1)


def projection(width: int, into: int, seed: int) -> npt.NDArray[np.float32] | None:
    """[width, into] Gaussian, columns of unit length on average; None where a vector is short enough as it is."""
    if width <= into:
        return None
    drawn = np.random.default_rng(seed).standard_normal((width, into), np.float32)
    return drawn / np.float32(np.sqrt(into))


def embedding_table(model: Any, vocab: int, block: int = 8192) -> Tensor:
    """The model's input embedding, projected: [V + 1, Q] float16; the last row, of an id not known, is zero."""
    embed = model.get_input_embeddings()
    device = next(embed.parameters()).device
    pieces, matrix = [], None
    for start in range(0, vocab, block):
        found = embed(torch.arange(start, min(start + block, vocab), device=device)).float()
        if start == 0:
            drawn = projection(found.shape[1], EMBEDDING_WIDTH, 1)
            matrix = None if drawn is None else torch.from_numpy(drawn).to(device)
        pieces.append((found if matrix is None else found @ matrix).half())
    return torch.cat([*pieces, torch.zeros_like(pieces[0][:1])])


@dataclass
class LinearSums:
    """Sums X'X [D, D], X'Y [D, E] and Y'Y's diagonal [E] of each layer's fit rows, float64, and the sample.

    embedding: [V + 1, Q] as `embedding_table` gives it.
    batches: how many batches went in, kept with the sums so that a killed run adds none twice.
    """

    layers: Sequence[TraceLayer]
    embedding: Tensor
    batches: int = 0
    _sums: list[dict[str, Tensor]] = field(default_factory=list)
    _sample: list[list[Arrays]] = field(default_factory=list)
    _facts: list[Arrays] = field(default_factory=list)
    _sampled: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SAMPLED, 0))

    def add(
        self, captured: Captured, kept: npt.NDArray[np.bool_], facts: dict[str, npt.NDArray[Any]], recent: TokenIds
    ) -> None:
        """Take in one forward. kept: [T]; facts: sequence, position and split of the kept rows; recent: [N, R]."""
        view = captured.early
        assert view is not None
        split = facts["split"]
        sampled = np.sort(np.concatenate([np.flatnonzero(split == code)[: self._left(code)] for code in SAMPLED]))
        known = np.where(recent == UNKNOWN_TOKEN, len(self.embedding) - 1, recent).astype(np.int64)
        looked_up = self.embedding[torch.from_numpy(known).to(self.embedding.device)].flatten(1).float()
        while len(self._sums) < len(view.layers):
            self._sums.append({})
            self._sample.append([])
        experts = captured.by_layer(captured.to_numpy(kept)[0]) if len(sampled) else []
        for number, layer in enumerate(view.layers):
            rows = torch.from_numpy(kept).to(layer.logits.device)
            inputs = _project(layer.inputs[rows])
            features = [inputs, layer.logits[rows], looked_up.to(inputs.device), torch.ones_like(inputs[:, :1])]
            self._add_sums(number, torch.cat(features, dim=1), layer.truth[rows], split == FIT)
            if len(sampled):
                chosen = torch.from_numpy(sampled).to(inputs.device)
                columns = {"inputs": inputs, "early": layer.logits[rows], "logits": layer.truth[rows]}
                halves = {name: column[chosen].half().cpu().numpy() for name, column in columns.items()}
                self._sample[number].append(halves | {"experts": experts[number][sampled]})
        if len(sampled):
            all_facts = facts | {"recent": recent}
            self._facts.append({name: all_facts[name][sampled] for name in (*ROW_FACTS, "split")})
            for code in SAMPLED:
                self._sampled[code] += int((split[sampled] == code).sum())

    def _left(self, code: int) -> int:
        return SAMPLE_ROWS - self._sampled[code]

    def _add_sums(self, number: int, x: Tensor, y: Tensor, fit: npt.NDArray[np.bool_]) -> None:
        mine = torch.from_numpy(fit).to(x.device)
        x, y = x[mine], y[mine]
        for name, value in {"xx": x.T @ x, "xy": x.T @ y, "yy": (y * y).sum(dim=0)}.items():
            total = self._sums[number].get(name)
            self._sums[number][name] = value.double() if total is None else total.to(value.device) + value

    def save(self, path: Path) -> None:
        """Everything so far as one file, in one step."""
        arrays: Arrays = {"batches": np.array([self.batches], np.int64), "embedding": self.embedding.cpu().numpy()}
        arrays |= {f"facts.{name}": value for name, value in _joined(self._facts).items()}
        for number, sums in enumerate(self._sums):
            arrays |= {f"{number}.{name}": value.cpu().numpy() for name, value in sums.items()}
            arrays |= {f"{number}.{name}": value for name, value in _joined(self._sample[number]).items()}
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
            found = _named(arrays, f"{number}.")
            self._sums.append({name: torch.from_numpy(found.pop(name)) for name in SUMS})
            self._sample.append([found] if found else [])
        facts = _named(arrays, "facts.")
        self._facts = [facts] if facts else []
        self._sampled = {code: int((facts["split"] == code).sum()) if facts else 0 for code in SAMPLED}


def _project(inputs: Tensor) -> Tensor:
    drawn = projection(inputs.shape[1], INPUT_WIDTH, 0)
    return inputs if drawn is None else inputs @ torch.from_numpy(drawn).to(inputs.device)


def write_linear(folder: Path, layers: Sequence[TraceLayer], saved: Sequence[Path]) -> None:
    """linear/: a file a layer with the sums of all processes added in order and the sample; rows; the embedding.

    saved: what each process' `LinearSums.save` wrote.
    """
    folder.mkdir(exist_ok=True)
    parts = [part for path in saved if "0.xx" in (part := load_arrays(path))]
    if not parts:
        return
    facts = [_named(part, "facts.") for part in parts]
    split = np.concatenate([fact["split"] for fact in facts if fact])
    places = {PARTS[code]: np.flatnonzero(split == code)[:SAMPLE_ROWS] for code in SAMPLED}
    save_arrays(folder / EMBEDDING, {"embedding": parts[0]["embedding"]})
    joined = _joined([fact for fact in facts if fact])
    save_arrays(folder / ROWS, _by_part({name: joined[name] for name in ROW_FACTS}, places))
    for number, layer in enumerate(layers):
        arrays = {name: np.sum([part[f"{number}.{name}"] for part in parts], axis=0) for name in SUMS}
        pieces = [{name: a for name, a in _named(part, f"{number}.").items() if name not in SUMS} for part in parts]
        arrays |= _by_part(_joined([piece for piece in pieces if piece]), places)
        save_arrays(folder / f"layer_{layer.label}.safetensors", arrays)


def _by_part(arrays: Arrays, places: dict[str, npt.NDArray[np.int64]]) -> Arrays:
    return {f"{part}.{name}": value[rows] for part, rows in places.items() for name, value in arrays.items()}


def _named(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _joined(pieces: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}
