"""One layer's real routing, with what each plan would know of it: what a benchmark replays.

Axes: N rows, E experts, P slots, G ranks, K experts a token, H hidden size, I expert width.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CONTIGUOUS, PLACED = "contiguous", "placed"


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. hidden: H; width: I; shared: width of the shared experts together, 0 for none."""

    hidden: int
    width: int
    num_experts: int
    top_k: int
    shared: int = 0


@dataclass(frozen=True)
class Workload:
    """Routing to replay. experts: [N, K] int32 logical; weights: [N, K] float32; slots: placement -> [P] int32, the
    expert of each slot; scores: (placement, predictor) -> [N, G] uint8; own_rows: placement -> [G, N // G] int32, the
    rows that a request router keeps on each rank. origin: where the routing comes from, in words.
    """

    shape: Shape
    num_ranks: int
    experts: Tensor
    weights: Tensor
    slots: Mapping[str, Tensor]
    scores: Mapping[tuple[str, str], Tensor]
    own_rows: Mapping[str, Tensor]
    origin: str

    def save(self, path: Path) -> None:
        """One safetensors file."""
        from safetensors.torch import save_file

        tensors = {"experts": self.experts, "weights": self.weights}
        tensors |= {f"slots/{name}": tensor for name, tensor in self.slots.items()}
        tensors |= {f"scores/{placement}/{name}": tensor for (placement, name), tensor in self.scores.items()}
        tensors |= {f"own_rows/{name}": tensor for name, tensor in self.own_rows.items()}
        facts = {"shape": vars(self.shape), "num_ranks": self.num_ranks, "origin": self.origin}
        apart = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # two names may be one tensor
        save_file(apart, path, {"workload": json.dumps(facts)})


def load_workload(path: Path) -> Workload:
    """Read what `Workload.save` wrote. Raises ValueError for any other file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "workload" not in metadata:
            raise ValueError(f"{path} is no workload; smoe bench writes one")
        facts = json.loads(metadata["workload"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    parts = {name: tuple(name.split("/")[1:]) for name in tensors}
    return Workload(
        shape=Shape(**facts["shape"]),
        num_ranks=facts["num_ranks"],
        experts=tensors["experts"],
        weights=tensors["weights"],
        slots={parts[name][0]: tensors[name] for name in tensors if name.startswith("slots/")},
        scores={(parts[name][0], parts[name][1]): tensors[name] for name in tensors if name.startswith("scores/")},
        own_rows={parts[name][0]: tensors[name] for name in tensors if name.startswith("own_rows/")},
        origin=facts["origin"],
    )


def batch_rows(workload: Workload, tokens: int) -> Tensor:
    """The first T rows, starting over at the end: [T] int64."""
    return torch.arange(tokens) % len(workload.experts)


def expert_slots(slots: Tensor, num_experts: int) -> Tensor:
    """The slot of every expert, [E] int64, where each has one. slots: [P]."""
    place = torch.empty(num_experts, dtype=torch.int64)
    place[slots.long()] = torch.arange(len(slots))
    return place
