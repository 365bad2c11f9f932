"""Which tensor of a checkpoint belongs to which expert or router, by the family's row alone.

Every tensor of a model is accounted for: renamed with its expert, permuted along its expert axis, its values
renumbered, or copied. A tensor with E on an axis inside an MoE block that no rule claims stops the run by its name, and
so does one that looks like an expert's anywhere else. Layers that predict further tokens keep their own numbering.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import ModelSpec, MoeLayer
from smoe_profiles.families.schema import Disk
from smoe_profiles.models import Model, disk_names
from smoe_profiles.tensors import CheckpointFiles, TensorInfo

EXPERT = re.compile(r"experts\.(\d+)\.(.+)")
LIKE_AN_EXPERT = re.compile(r"(^|\.)experts\.")
PREDICTS_FURTHER = re.compile(r"(^|\.)mtp[._]")
"""Stacks that predict further tokens, under names of their own; as further layers they go by number."""
SIZED_BY_CONTENT = ("quant_state.",)
"""Suffixes, after the projection's own name, of tensors that hold a text: its length may differ between experts."""
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U32": "<u4", "U16": "<u2", "U8": "u1"}


class Role(StrEnum):
    """What happens to a tensor: copied, renamed with its expert, its rows permuted, or its values renumbered."""

    COPIED = "copied"
    RENAMED = "renamed"
    PERMUTED = "permuted"
    RENUMBERED = "renumbered"


@dataclass(frozen=True)
class Claim:
    """One tensor's role; layer: index into the model's MoE layers (-1 outside); expert: its number, or -1.

    rows: equal parts along the expert axis, the experts' first; those behind stay in place.
    """

    role: Role
    layer: int = -1
    expert: int = -1
    suffix: str = ""
    rows: int = 0


@dataclass(frozen=True)
class Layout:
    """A model's tensors by claim. further: tensors of layers that predict further tokens, kept as they are."""

    claims: dict[str, Claim]
    further: tuple[str, ...]

    def count(self, role: Role) -> int:
        return sum(claim.role is role for claim in self.claims.values())


def claim_tensors(model: Model, files: CheckpointFiles, uneven: Collection[tuple[int, int]] = ()) -> Layout:
    """Every tensor's claim.

    uneven: (layer index, expert) of experts that may hold other tensors than the rest, as their config says.
    Raises ImpossibleError for a tensor with an expert axis that no rule claims, InputError for experts or routers that
    do not match the config.
    """
    spec = model.spec
    disk = disk_names(model, files.by_name())
    blocks = {disk.block.format(layer=layer.id): i for i, layer in enumerate(spec.layers)}
    routers = {name: i for i, layer in enumerate(spec.layers) for name in disk.router_names(layer.id)}
    pattern = re.compile("(" + "|".join(re.escape(name) for name in blocks) + r")\.(.+)")
    claims, further = {}, []
    for _, tensor in files:
        inside = pattern.fullmatch(tensor.name)
        if tensor.name in routers:
            claims[tensor.name] = _claim_router(tensor, routers[tensor.name], spec)
        elif inside:
            claims[tensor.name] = _claim(tensor, inside[2], blocks[inside[1]], spec, disk)
        else:
            claims[tensor.name] = Claim(Role.COPIED)
            if _predicts_further(tensor.name, disk, spec):
                further.append(tensor.name)
            elif LIKE_AN_EXPERT.search(tensor.name) and not any(name in tensor.name for name in disk.apart):
                raise InputError(
                    f"{tensor.name} is an expert's by its name, but lies outside the {len(blocks)} MoE layers that "
                    f"{files.folder / 'config.json'} names; regrouping stops rather than guess."
                )
    _check_experts(model, disk, claims, files, uneven)
    return Layout(claims, tuple(further))


def _predicts_further(name: str, disk: Disk, spec: ModelSpec) -> bool:
    """Whether a tensor lies in a layer behind the decoder's last, or under a name that only such layers have."""
    number = re.match(re.escape(disk.block.partition("{layer}")[0]) + r"(\d+)\.", name)
    return bool(PREDICTS_FURTHER.search(name)) or (number is not None and int(number[1]) >= spec.num_hidden_layers)


def _claim_router(tensor: TensorInfo, index: int, spec: ModelSpec) -> Claim:
    """Router tensors have one row an expert, whatever axes of length 1 stand before; then rows that are no expert's."""
    layer = spec.layers[index]
    rows = next((length for length in tensor.shape if length != 1), 1)
    if rows not in (layer.num_experts, spec.router_shape(layer)[0]):
        expected = " or ".join(map(str, sorted({layer.num_experts, spec.router_shape(layer)[0]})))
        raise InputError(f"{tensor.name} has shape {list(tensor.shape)}; {expected} rows were expected.")
    return Claim(Role.PERMUTED, index, rows=rows)


def _claim(tensor: TensorInfo, name: str, index: int, spec: ModelSpec, disk: Disk) -> Claim:
    """What happens to a tensor of an MoE block that is not the router's; name: relative to the block."""
    layer = spec.layers[index]
    experts = layer.num_experts
    expert = EXPERT.fullmatch(name)
    if expert:
        number = _expert_number(tensor.name, expert[1], layer)
        return Claim(Role.RENAMED, index, number, expert[2]) if number < experts else Claim(Role.COPIED, index)
    if name in disk.tables:
        if tensor.dtype not in INTEGERS:
            raise InputError(f"{tensor.name} has dtype {tensor.dtype}; a table of expert numbers holds integers.")
        return Claim(Role.RENUMBERED, index)
    if name.startswith(disk.shared):
        return Claim(Role.COPIED, index)
    if name.startswith(disk.fused):
        first = tensor.shape[0] if tensor.shape else 1
        if first == experts or (disk.row_blocks and len(tensor.shape) == 2 and first % experts == 0):
            return Claim(Role.PERMUTED, index, rows=experts)
        if int(np.prod(tensor.shape)) != 1:
            raise ImpossibleError(
                f"{tensor.name} {list(tensor.shape)} lies among the experts, but its first axis is not that of "
                f"{experts} experts; regrouping stops rather than guess."
            )
    if {experts, spec.router_shape(layer)[0]} & set(tensor.shape):
        raise ImpossibleError(
            f"{tensor.name} {list(tensor.shape)} has an axis of {experts} experts, and no rule of family "
            f"{spec.family.model_type} says how it moves; regrouping stops rather than guess."
        )
    return Claim(Role.COPIED, index)


def _expert_number(name: str, digits: str, layer: MoeLayer) -> int:
    if str(int(digits)) != digits:
        raise InputError(f"{name}: {digits!r} is no expert number.")
    if int(digits) >= layer.num_experts + layer.num_zero_experts:  # transformers saves weights of zero experts too
        raise InputError(f"{name}: expert {digits}, but config.json says {layer.num_experts} experts.")
    return int(digits)


def _check_experts(
    model: Model,
    disk: Disk,
    claims: dict[str, Claim],
    files: CheckpointFiles,
    uneven: Collection[tuple[int, int]],
) -> None:
    """Each layer must hold its router and its experts: in one tensor, or each with the same tensors as the others."""
    routers = {name for layer in model.spec.layers for name in disk.router_names(layer.id)}
    by_layer: list[dict[int, set[object]]] = [{} for _ in model.spec.layers]
    fused: dict[int, str] = {}
    for _, tensor in files:
        claim = claims[tensor.name]
        if claim.role is Role.RENAMED:
            sized = not any(part in claim.suffix for part in SIZED_BY_CONTENT)
            kind = (claim.suffix, tensor.dtype, tensor.shape if sized else None)
            by_layer[claim.layer].setdefault(claim.expert, set()).add(kind)
        elif claim.role is Role.PERMUTED and tensor.name not in routers:
            fused[claim.layer] = tensor.name
    for index, (layer, experts) in enumerate(zip(model.spec.layers, by_layer, strict=True)):
        where = f"{files.folder}: layer {layer.id}"
        if disk.router_names(layer.id)[0] not in claims:
            raise InputError(f"{where} has no router {disk.router[0]}.")
        missing = set(range(layer.num_experts)) - experts.keys()
        if missing and (experts or index not in fused):
            raise InputError(f"{where} has no expert {min(missing)}; {layer.num_experts} were expected.")
        if experts and index in fused:
            raise InputError(
                f"{where} holds experts one by one and, as {fused[index]}, fused; which count is not known."
            )
        alike = [number for number in sorted(experts) if (index, number) not in uneven]
        odd = [number for number in alike if experts[number] != experts[alike[0]]]
        if odd:
            raise InputError(f"{where}: experts.{odd[0]} does not have the same tensors as experts.{alike[0]}.")


def new_name(name: str, claim: Claim, logical_to_physical: npt.NDArray[np.int64]) -> str:
    """A tensor's name after regrouping. logical_to_physical: [L, E]."""
    if claim.role is not Role.RENAMED:
        return name
    head = name.removesuffix(f"{claim.expert}.{claim.suffix}")
    return f"{head}{logical_to_physical[claim.layer, claim.expert]}.{claim.suffix}"


def row_order(claim: Claim, physical_to_logical: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which source row stands in each row of a permuted tensor, [rows]. physical_to_logical: [L, E]."""
    experts = physical_to_logical[claim.layer]
    return np.concatenate([experts, np.arange(len(experts), claim.rows)])


def renumber(data: bytes, tensor: TensorInfo, logical_to_physical: npt.NDArray[np.int64]) -> bytes:
    """Expert numbers of a table, renumbered in their own integer type. logical_to_physical: [E].

    Raises InputError for a value that is no expert.
    """
    values = np.frombuffer(data, INTEGERS[tensor.dtype])
    wrong = values[(values < 0) | (values >= len(logical_to_physical))]
    if len(wrong):
        raise InputError(f"{tensor.name} holds {wrong[0]}, which is none of {len(logical_to_physical)} experts.")
    renumbered: bytes = logical_to_physical.astype(values.dtype)[values].tobytes()
    return renumbered


def blocking_layer(layers: Sequence[MoeLayer], physical_to_logical: npt.NDArray[np.int64]) -> MoeLayer | None:
    """The first layer whose group-limited router this map would change, or None.

    A map is harmless if whole groups become whole groups; the order inside a group is free. Every other rule of the
    table chooses the same experts whatever their numbers, exact ties aside.
    """
    for layer, slots in zip(layers, physical_to_logical, strict=True):
        if layer.num_groups > 1:
            group = (slots // (layer.num_experts // layer.num_groups)).reshape(layer.num_groups, -1)
            if (group != group[:, :1]).any():
                return layer
    return None
