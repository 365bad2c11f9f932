"""Which tensor of a checkpoint belongs to which expert or router, by the family's row alone.

Every tensor of a model is accounted for: renamed with its expert, permuted with the router, or copied. A tensor inside
an MoE block with E on an axis that no rule claims stops the run by its name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import MoeLayer
from smoe_profiles.families.table import Disk, Family
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import CheckpointFiles, TensorInfo

EXPERT = re.compile(r"experts\.(\d+)\.(.+)")
FUSED = "its experts are fused on disk"


class Role(StrEnum):
    """What happens to a tensor: copied as it is, renamed with its expert, or its rows permuted."""

    COPIED = "copied"
    RENAMED = "renamed"
    PERMUTED = "permuted"


@dataclass(frozen=True)
class Claim:
    """One tensor's role; layer: index into the model's MoE layers (-1 outside); expert: its number, or -1."""

    role: Role
    layer: int = -1
    expert: int = -1
    suffix: str = ""


def claim_tensors(model: Model, files: CheckpointFiles) -> dict[str, Claim]:
    """Every tensor's claim, by name.

    Raises ImpossibleError for an unclaimed tensor with an expert axis or a family whose experts cannot be renumbered,
    InputError for experts or routers that do not match the config.
    """
    family, layers = model.spec.family, model.spec.layers
    disk = disk_names(model, files.by_name())
    if family.unmovable or not disk.parts:
        raise _cannot_regroup(family, family.unmovable or FUSED)
    blocks = {disk.block.format(layer=layer.id): i for i, layer in enumerate(layers)}
    routers = {name: i for i, layer in enumerate(layers) for name in disk.router_names(layer.id)}
    pattern = re.compile("(" + "|".join(re.escape(name) for name in blocks) + r")\.(.+)")
    claims = {}
    for _, tensor in files:
        inside = pattern.fullmatch(tensor.name)
        if tensor.name in routers:
            claims[tensor.name] = _claim_router(tensor, routers[tensor.name], layers)
        elif inside:
            index = blocks[inside[1]]
            claims[tensor.name] = _claim(tensor, inside[2], index, layers[index], family, disk)
        else:
            claims[tensor.name] = Claim(Role.COPIED)
    _check_experts(model, disk, claims, files)
    return claims


def _cannot_regroup(family: Family, why: str) -> ImpossibleError:
    return ImpossibleError(
        f"smoe cannot regroup family {family.model_type} yet ({why}); profile, cocluster and a map work"
    )


def _claim_router(tensor: TensorInfo, index: int, layers: Sequence[MoeLayer]) -> Claim:
    """Router tensors have one row an expert, whatever axes of length 1 stand before."""
    experts = layers[index].num_experts
    if next((length for length in tensor.shape if length != 1), 1) != experts:
        raise InputError(f"{tensor.name} has shape {list(tensor.shape)}; {experts} rows were expected.")
    return Claim(Role.PERMUTED, index)


def _claim(tensor: TensorInfo, name: str, index: int, layer: MoeLayer, family: Family, disk: Disk) -> Claim:
    """What happens to a tensor of an MoE block that is not the router's; name: relative to the block."""
    expert = EXPERT.fullmatch(name)
    if expert:
        number = int(expert[1])
        if str(number) != expert[1]:
            raise InputError(f"{tensor.name}: {expert[1]!r} is no expert number.")
        if number >= layer.num_experts:
            raise InputError(f"{tensor.name}: expert {number}, but config.json says {layer.num_experts} experts.")
        return Claim(Role.RENAMED, index, number, expert[2])
    if layer.num_experts in tensor.shape and not name.startswith(disk.shared):
        if name.startswith("experts."):
            raise _cannot_regroup(family, f"{FUSED}, as {tensor.name}")
        raise ImpossibleError(
            f"{tensor.name} {list(tensor.shape)} has an axis of {layer.num_experts} experts, and no rule of family "
            f"{family.model_type} says how it moves; regrouping stops rather than guess."
        )
    return Claim(Role.COPIED, index)


def _check_experts(model: Model, disk: Disk, claims: dict[str, Claim], files: CheckpointFiles) -> None:
    """Each layer must hold every expert with the same tensors, and its router."""
    where = files.folder
    by_layer: list[dict[int, set[tuple[str, tuple[int, ...]]]]] = [{} for _ in model.spec.layers]
    routers = set()
    for _, tensor in files:
        claim = claims[tensor.name]
        if claim.role is Role.RENAMED:
            by_layer[claim.layer].setdefault(claim.expert, set()).add((claim.suffix, tensor.shape))
        elif claim.role is Role.PERMUTED:
            routers.add(claim.layer)
    for index, (layer, experts) in enumerate(zip(model.spec.layers, by_layer, strict=True)):
        missing = set(range(layer.num_experts)) - experts.keys()
        if missing:
            raise InputError(
                f"{where}: layer {layer.id} has no expert {min(missing)}; {layer.num_experts} were expected."
            )
        odd = [number for number, tensors in sorted(experts.items()) if tensors != experts[0]]
        if odd:
            raise InputError(
                f"{where}: layer {layer.id}: experts.{odd[0]} does not have the same tensors as experts.0."
            )
        if index not in routers:
            raise InputError(f"{where}: layer {layer.id} has no router {disk.router[0]}.")


def new_name(name: str, claim: Claim, logical_to_physical: npt.NDArray[np.int64]) -> str:
    """A tensor's name after regrouping. logical_to_physical: [L, E]."""
    if claim.role is not Role.RENAMED:
        return name
    head = name.removesuffix(f"{claim.expert}.{claim.suffix}")
    return f"{head}{logical_to_physical[claim.layer, claim.expert]}.{claim.suffix}"


def permute_rows(data: bytes, physical_to_logical: npt.NDArray[np.int64]) -> bytes:
    """A tensor's bytes with row p taken from row physical_to_logical[p]; dtype and inner shape do not matter."""
    rows = np.frombuffer(data, np.uint8).reshape(len(physical_to_logical), -1)
    return rows[physical_to_logical].tobytes()


def blocking_key(layers: Sequence[MoeLayer], physical_to_logical: npt.NDArray[np.int64]) -> MoeLayer | None:
    """The first layer whose group-limited router this map would change, or None (design 4.3).

    A map is harmless if whole groups become whole groups; the order inside a group is free.
    """
    for layer, slots in zip(layers, physical_to_logical, strict=True):
        if layer.num_groups > 1:
            group = (slots // (layer.num_experts // layer.num_groups)).reshape(layer.num_groups, -1)
            if (group != group[:, :1]).any():
                return layer
    return None
