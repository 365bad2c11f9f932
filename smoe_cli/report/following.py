"""What to do next: which engines take this placement, and the one command that moves the reader on.

Axes: E experts, G ranks.
"""

from typing import Any

from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_cli.folder import CHECKPOINT, sibling
from smoe_cli.report.gathering import Found, Placed
from smoe_cli.report.verdict import MORE_LOAD
from smoe_profiles.choices import Level
from smoe_profiles.families.config import MoeLayer

USUAL_RANKS = 8

EVEN_THETA = 0.5
"""A weight of load (.1 by default) at which a placement of DeepSeek-V2-Lite was as even as a load balancer's."""

ENGINES = {"SGLang": "sglang", "TensorRT-LLM": "trtllm", "vLLM-Ascend": "ascend"}
"""Engines that apply a map after routing, and what smoe export calls them; vLLM takes a renumbered checkpoint."""


def map_only(found: Found) -> str | None:
    """Why no renumbered checkpoint can be this placement, or None where one can."""
    if found.placed is None:
        return None
    placement, layers = found.placed.placement, moe_layers(found.placed)
    takers = ", ".join(ENGINES)
    if placement.redundant:
        return f"Experts have copies, which a checkpoint cannot hold: it is used as a map ({takers}); vLLM takes none."
    blocked = blocking_layer(layers, placement.physical_to_logical)
    if blocked is None:
        return None
    return (
        f"The router is group-limited ({blocked.num_groups} groups) and the placement splits its groups: a renumbered "
        f"checkpoint would be another model, so it is used as a map ({takers}); vLLM takes none."
    )


def moe_layers(placed: Placed) -> list[MoeLayer]:
    """The layers of the model that a placement is for; an unknown model counts as one without groups."""
    return [
        MoeLayer(row["id"], row["num_experts"], row["top_k"], row.get("num_groups", 1), row.get("rule", ""))
        for row in placed.artefact.model["layers"]
    ]


def equal_ranks(placed: Placed) -> bool:
    """Whether every rank has as many slots, as every engine's map needs."""
    return bool(placed.placement.physical_to_logical.shape[1] % placed.placement.num_ranks == 0)


def engines(found: Found) -> list[dict[str, Any]]:
    """What each engine takes of this placement, and the command that writes it."""
    if found.placed is None:
        return []
    equal = equal_ranks(found.placed)
    unequal = None if equal else "its ranks must hold equally many slots: place without --uneven"
    rows = [
        {
            "engine": engine,
            "takes": "map" if equal else "no",
            "command": found.command("export", "--to", target, chosen=True) if equal else None,
            "note": unequal,
        }
        for engine, target in ENGINES.items()
    ]
    blocked = map_only(found)
    takes = blocked is None and equal
    vllm = {
        "engine": "vLLM",
        "takes": "checkpoint" if takes else "no",
        "command": found.command("regroup", chosen=True) if takes else None,
        "note": None if takes else "it takes no static map, and no checkpoint can be this placement",
    }
    return [*rows, vllm]


def next_step(found: Found, judged: dict[str, Any]) -> dict[str, str]:
    """The command to run next, and why. judged: what `verdict` gives."""
    command, why, chosen = _step(found, judged)
    return {"command": found.command(*command.split(), chosen=chosen), "why": why}


def _step(found: Found, judged: dict[str, Any]) -> tuple[str, str, bool]:
    """Command, reason, and whether it needs the placement's name."""
    answer, figures = judged["answer"], judged["figures"]
    if answer == "unmeasured":
        return _towards_evaluation(found)
    if found.placed is None:
        return f"cocluster --ep {found.ranks}", "the placement that was measured is gone: makes it again.", False
    if answer == "worth-it" and equal_ranks(found.placed):
        return "export --to sglang", "writes the map that an engine reads; nothing is copied and the model stays.", True
    if answer == "worth-it":
        return "regroup", "writes it for our run time: no engine's map has ranks of unlike size.", True
    if answer == "needs-more":
        return _towards_run_time(found)
    busy = any(figure["load_imbalance"] > MORE_LOAD * figure["load_baseline"] for figure in figures)
    if busy and answer != "nothing" and found.placed.artefact.parameters.get("theta", 1.0) < EVEN_THETA:
        why = "places again with more weight on even load: the busiest rank is what this placement loses by."
        return f"cocluster --ep {found.ranks} --theta {EVEN_THETA} --name even", why, False
    return _otherwise(found)


def _otherwise(found: Found) -> tuple[str, str, bool]:
    """What else could change the answer: more ranks, or copies where the experts cannot be shared by more."""
    ranks = found.ranks or USUAL_RANKS
    if found.placed is None or found.placed.placement.num_experts % (2 * ranks):
        why = "leave the model as it is, or see whether copies of busy experts change the answer."
        return f"cocluster --ep {ranks} --redundant 1 --name copies", why, False
    why = "leave the model as it is, or see whether more ranks change the answer."
    return f"cocluster --ep {2 * ranks}", why, False


def _towards_evaluation(found: Found) -> tuple[str, str, bool]:
    """The first step between what is there and an evaluation."""
    if found.placed is None and found.tables is not None:
        experts = found.tables.layers[0].num_experts
        command = f"cocluster --ep {usual_ranks(experts)}"
        return command, "places the experts on ranks; --ep is how many you have.", False
    if found.tables is not None and found.placed is not None and found.placed.log is not None:
        return _measure(found)
    if found.placed is not None and found.placed.log is None:
        step = "inspect " + found.placed.artefact.path.name
        return step, "says what this imported placement is; smoe cocluster makes one that can be measured.", False
    if found.trace is not None and found.trace.level is not Level.TOKEN:
        return "inspect", "says what the counts tell; placing needs a trace of each token's experts.", False
    if found.trace is None:
        return "profile --model M", "records the held-out tokens to measure on; M is your model.", False
    return "build-tables", "counts which tokens use which experts.", False


def _measure(found: Found) -> tuple[str, str, bool]:
    if found.trace is not None and found.trace.level is Level.TOKEN and not found.trace.rows("heldout"):
        why = "the trace has no held-out rows: record some with smoe profile --split heldout -C T, and measure on them."
        return "evaluate --trace T/trace", why, True
    return "evaluate", "measures the placement on held-out tokens.", True


def _towards_run_time(found: Found) -> tuple[str, str, bool]:
    if found.placed is None or not found.placed.applied:
        why = "writes the checkpoint or map and the tables that a shuffling run time and a request router look up."
        return "regroup", why, True
    if sibling(found.placed.artefact.path, CHECKPOINT).exists():
        return "verify", "proves that the regrouped checkpoint is the same model.", True
    return "bench", "times a layer under this placement on your own GPUs.", True


def usual_ranks(experts: int) -> int:
    """A usual number of ranks that share the experts equally: 8, or the nearest below it that does."""
    return next((ranks for ranks in range(USUAL_RANKS, 1, -1) if experts % ranks == 0), experts)
