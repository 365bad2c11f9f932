"""Hardware: measured curves that `--goal time` and predicted times rest on (files in `hardware/`), and costs of links.

A model is one JSON object; what `smoe bench --out FILE` writes on GPUs holds one under `hardware`, and can stand in for
a shipped one:

    format, format_version   "smoe-hardware", 1
    name                     free text, shown beside every predicted time
    stages                   reduce-scatter, all-gather, all-reduce, dispatch, combine: each a list of [bytes, seconds],
                             bytes through one direction of the busiest rank (of S bytes on G ranks S (G-1)/G for
                             reduce-scatter and all-gather, twice that for all-reduce), in any order
    expert_flops             FLOP/s of one rank in its experts
    provenance               what was measured, on what, when: kept, not interpreted
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.folder import TRACE, trace_model_name
from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.errors import InputError, SmoeError, reason
from smoe_profiles.importers.files import load_npy
from smoe_profiles.models import find_model, same_model
from smoe_solvers.choices import Mode
from smoe_solvers.hierarchy import Links
from smoe_solvers.layer_time import Curve, LayerCost, Stage

FORMAT, FORMAT_VERSION = "smoe-hardware", 1
SHIPPED = ("nvlink-h200", "pcie", "ethernet")
ELEMENT_BYTES = 2
"""Rows travel as bf16."""

MATRICES = 3
"""An expert of the usual gated form: gate, up, down; each costs 2 H x width FLOP a row."""


@dataclass(frozen=True)
class LayerShape:
    """H, and the inner width of one expert."""

    hidden_size: int
    expert_width: int


@dataclass(frozen=True)
class Hardware:
    """A measured machine: seconds by bytes for every stage, and the FLOP/s of a rank's experts."""

    name: str
    curves: dict[Stage, Curve]
    expert_flops: float

    def layer_cost(self, mode: Mode, num_ranks: int, shape: LayerShape) -> LayerCost:
        """What a layer of that shape costs here."""
        return LayerCost(
            mode=mode,
            num_ranks=num_ranks,
            row_bytes=shape.hidden_size * ELEMENT_BYTES,
            activation_flops=2.0 * MATRICES * shape.hidden_size * shape.expert_width,
            flop_rate=self.expert_flops,
            curves=self.curves,
        )


def load_hardware(name: str) -> Hardware:
    """A shipped model by name, or one in a file. Raises InputError naming what the file lacks."""
    if name in SHIPPED:
        where, text = name, files("smoe_cli").joinpath(f"hardware/{name}.json").read_text(encoding="utf-8")
    else:
        where = name
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            shipped = ", ".join(SHIPPED)
            raise InputError(f"hardware model {name!r} is neither one of {shipped} nor a readable file.") from error
    try:
        return _parse(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({reason(error)}).") from error


def _parse(document: Any, where: str) -> Hardware:
    if isinstance(document, dict) and "workloads" in document:  # of smoe bench
        document = document.get("hardware")
        if document is None:
            raise InputError(f"{where} is of smoe bench --cpu, which measures no hardware; run it on GPUs.")
    found = document.get("format") if isinstance(document, dict) else None
    version = document.get("format_version") if found == FORMAT else None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where} has format {found!r}, version {version!r}; {FORMAT!r}, version {FORMAT_VERSION} was expected."
        )
    stages = document.get("stages")
    if not isinstance(stages, dict):
        raise InputError(f"{where} has stages = {stages!r}; an object of measured points was expected.")
    rate = document.get("expert_flops")
    if not _positive(rate):
        raise InputError(f"{where} has expert_flops = {rate!r}; FLOP/s above zero were expected.")
    curves = {stage: Curve.of_points(_points(stages.get(stage.value), stage, where)) for stage in Stage}
    return Hardware(str(document.get("name", where)), curves, float(rate))


def _points(points: Any, stage: Stage, where: str) -> list[tuple[float, float]]:
    good = isinstance(points, list) and points and all(isinstance(one, list) and len(one) == 2 for one in points)
    if not good or not all(_positive(value) for one in points for value in one):
        raise InputError(
            f"{where} has stages.{stage.value} = {_short(points)}; a list of [bytes, seconds], all above zero, "
            "was expected."
        )
    if len({size for size, _ in points}) < len(points):
        raise InputError(f"{where}: stages.{stage.value} names one number of bytes twice.")
    return [(float(size), float(seconds)) for size, seconds in points]


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def layer_shape(tables: Artefact, folder: Path) -> LayerShape | None:
    """The shape of the layers that tables were made of, by the model their trace names; None where it is not at hand.

    folder: where the trace lies.
    """
    try:
        if not same_model(open_artefact(folder / TRACE, TRACE).model, tables.model):
            return None
        spec = find_model(trace_model_name(folder), download=False).spec
    except SmoeError:
        return None
    return LayerShape(spec.hidden_size, spec.expert_width) if spec.expert_width else None


def find_cost(
    tables: Artefact, folder: Path, hardware: Hardware, mode: Mode, num_ranks: int, *, needed: bool = False
) -> LayerCost | None:
    """What a layer of the tables' model costs; None where its shape is not known.

    Raises InputError if it is needed and not known.
    """
    shape = layer_shape(tables, folder)
    if needed and shape is None:
        raise InputError(
            f"{tables.path}: a layer's time needs the model's hidden size and the width of an expert, and its "
            "config is not at hand; name the model to smoe profile or smoe import (--model: a short name or a folder)."
        )
    return hardware.layer_cost(mode, num_ranks, shape) if shape else None


def read_rank_cost(path: Path, num_ranks: int) -> tuple[tuple[float, ...], ...]:
    """A measured cost from rank to rank, [G, G], from a .npy file or a JSON list of lists.

    Raises InputError unless it is a finite, non-negative G x G matrix with a zero diagonal.
    """
    try:
        if path.suffix == ".npy":
            cost = load_npy(path).astype(np.float64)
        else:
            cost = np.array(json.loads(path.read_text(encoding="utf-8")), np.float64)
    except (OSError, ValueError, TypeError, EOFError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a matrix of costs between ranks ({reason(error)}).") from error
    try:
        Links.of_cost(cost, num_ranks)
    except ValueError as error:
        raise InputError(f"{path}: {error}; give --ep {num_ranks} ranks a {num_ranks} x {num_ranks} matrix.") from error
    return tuple(tuple(map(float, row)) for row in cost)
