"""What to solve for, as the command line asks it, and every combination that cannot be.

Axes: E experts, G ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smoe_cli.errors import UsageError
from smoe_cli.hardware import SHIPPED
from smoe_profiles.errors import ImpossibleError
from smoe_solvers.choices import Effort, Goal, Method, Mode
from smoe_solvers.hierarchy import Links
from smoe_solvers.redundancy import MAX_RANKS


@dataclass(frozen=True)
class SolveOptions:
    """What to optimise and how. whole_groups: keep router groups whole, so that a checkpoint stays the same model.

    mode, hardware: what times are predicted for; nodes, rank_cost: ranks that are not equally far apart, [G, G];
    redundant: extra slots of every rank, for copies; uneven: the first E mod G ranks may hold one more expert.
    mix: each source's part of the traffic, None as it was traced; start: id of a placement to stay near.
    """

    ep: int
    goal: Goal
    method: Method
    effort: Effort
    theta: float
    mu: float
    seed: int
    whole_groups: bool
    metis_seeds: bool
    time_limit: float | None = None
    mode: Mode = Mode.SPECULATIVE
    hardware: str = "nvlink-h200"
    nodes: int = 1
    rank_cost: tuple[tuple[float, ...], ...] | None = None
    redundant: int = 0
    uneven: bool = False
    mix: tuple[tuple[str, float], ...] | None = None
    start: str | None = None

    def slots(self, num_experts: int) -> int:
        """Slots of every rank where there are extra ones."""
        return num_experts // self.ep + self.redundant

    @property
    def links(self) -> Links | None:
        return links_of(vars(self))


KEPT: dict[str, Any] = {
    "goal": "blend",
    "effort": "default",
    "method": "ce",
    "redundant": 0,
    "nodes": 1,
    "mode": "speculative",
    "hardware": "nvlink-h200",
    "theta": 0.1,
    "mu": 0.25,
    "mix": None,
}
"""Options that a placement made anew keeps, and their defaults."""

MACHINE = ("mode", "hardware")
"""Those that smoe evaluate takes too: what layer times are predicted for."""

FILE = "FILE"
"""Stands for a hardware model that is not shipped: a placement knows its name, not its file."""


def as_asked(made: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in a placement's manifest, their hardware as --hardware takes it."""
    known = made.get("hardware", KEPT["hardware"]) in SHIPPED
    return dict(made) if known else {**made, "hardware": FILE}


def options_given(made: Mapping[str, Any], names: Iterable[str] = KEPT) -> list[str]:
    """Options that are not the defaults, as a command line says them.

    made: the parameters in a placement's manifest, or SolveOptions as a dict; an option that is missing is the default.
    """
    words = []
    for name in names:
        value = made.get(name, KEPT[name])
        if value != KEPT[name]:
            values = [f"{source}={share}" for source, share in value] if name == "mix" else [str(value)]
            words += [word for one in values for word in (f"--{name}", one)]
    return words


def links_of(made: Mapping[str, Any]) -> Links | None:
    """How far ranks are apart, None where all are equally. made: as of `options_given`."""
    if made.get("rank_cost") is not None:
        return Links.of_cost(np.array(made["rank_cost"], np.float64), made["ep"])
    return Links.of_nodes(made["ep"], made["nodes"]) if made.get("nodes", 1) > 1 else None


def check_options(options: SolveOptions, *, compare: bool) -> None:
    """Refuse what does not go together. Raises UsageError."""
    if options.rank_cost is not None and options.nodes > 1:
        raise UsageError(f"--nodes {options.nodes} and --rank-cost both say how far ranks are apart; give one.")
    asked = {
        "--goal time": options.goal is Goal.TIME,
        "--goal ilp": options.goal is Goal.ILP,
        "--method": options.method is not Method.CE,
        "--compare": compare,
        "--groups whole": options.whole_groups,
        "--nodes": options.nodes > 1,
        "--rank-cost": options.rank_cost is not None,
        "--uneven": options.uneven,
        "--from": options.start is not None,
        "--redundant": options.redundant > 0,
    }
    for one, others, why in APART:
        for other in others:
            if asked[one] and asked[other]:
                raise UsageError(f"{one} and {other} do not go together: {why}; leave one out.")


APART = (
    ("--goal time", ("--method", "--compare"), "time is searched by ce alone"),
    ("--goal time", ("--nodes", "--rank-cost"), "predicted time takes all ranks to be equally far apart"),
    ("--compare", ("--nodes", "--rank-cost", "--from"), "methods start from nothing, on ranks equally far apart"),
    ("--redundant", ("--goal time", "--goal ilp", "--groups whole", "--nodes", "--rank-cost", "--compare", "--from"),
     "it is searched without copies of experts"),
    ("--redundant", ("--uneven",), "extra slots make ranks equal"),
    ("--from", ("--goal time", "--groups whole", "--nodes", "--rank-cost"), "what a move costs is not weighed there"),
    ("--uneven", ("--groups whole",), "whole groups need equal ranks"),
)  # fmt: skip
"""An option, others it cannot stand beside, and the reason."""


def check_ep(
    layers: list[dict[str, Any]], ep: int, whole_groups: bool, redundant: int = 0, *, uneven: bool = False
) -> None:
    """Refuse an EP that cannot be, with the ones that can. Raises ImpossibleError."""
    experts = layers[0]["num_experts"]
    valid = [g for g in range(2, experts + 1) if experts % g == 0]
    if redundant:
        _check_slots(layers[0], ep, redundant)
    elif uneven and 2 <= ep <= experts:
        pass
    elif ep not in valid:
        listed = ", ".join(map(str, valid))
        slots = ep * (experts // ep + 1)
        more = f"; or --redundant 1 for {slots} slots, or --uneven" if 1 < ep < experts else ""
        wrong = "one rank leaves nothing to place" if ep == 1 else f"cannot be shared equally by {ep} ranks"
        raise ImpossibleError(
            f"{experts} experts (layer {layers[0]['id']}){':' if ep == 1 else ''} {wrong}. Valid --ep: {listed}{more}."
        )
    groups = layers[0].get("num_groups", 1)
    if not whole_groups:
        return
    if groups == 1:
        raise ImpossibleError("--groups whole changes nothing here: this router has no group limit; leave it out.")
    if ep == groups:
        raise ImpossibleError(
            f"--groups whole cannot change anything at --ep {ep}: the router has {groups} groups, one for each rank."
        )
    if groups % ep and ep % groups:
        raise ImpossibleError(f"--groups whole: {groups} router groups cannot be kept whole on {ep} ranks.")


def _check_slots(layer: dict[str, Any], ep: int, redundant: int) -> None:
    """Refuse copies that a rank has no use for, or more ranks than copies can be counted on."""
    experts = layer["num_experts"]
    if not 2 <= ep <= min(experts, MAX_RANKS):
        raise ImpossibleError(
            f"--redundant needs 2 to {min(experts, MAX_RANKS)} ranks for the {experts} experts of layer {layer['id']}; "
            f"--ep is {ep}."
        )
    if experts // ep + redundant > experts:
        raise ImpossibleError(
            f"--redundant {redundant}: with {experts} experts (layer {layer['id']}) on {ep} ranks, at most "
            f"{experts - experts // ep} extra slots a rank are of use."
        )


def check_nodes(ep: int, nodes: int) -> None:
    """Refuse nodes that do not divide the ranks. Raises ImpossibleError."""
    if ep % nodes:
        valid = ", ".join(str(n) for n in range(1, ep + 1) if ep % n == 0)
        raise ImpossibleError(f"{ep} ranks cannot be shared equally by {nodes} nodes. Valid --nodes: {valid}.")
