"""What to do next: which engines take this placement, and the one command that moves the reader on.

Axes: E experts, G ranks.
"""

from collections.abc import Iterable
from typing import Any

from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_cli.folder import CHECKPOINT, PLACEMENT, sibling
from smoe_cli.report.gathering import Found, Placed
from smoe_cli.report.states import BALANCER
from smoe_cli.report.verdict import MORE_LOAD
from smoe_cli.report.wording import FEW_REQUESTS, PLACED
from smoe_profiles.choices import Level
from smoe_profiles.families.config import MoeLayer
from smoe_solvers.choices import Goal

USUAL_RANKS = 8

EVEN_NAME, EVEN_THETA = "even", 0.5
"""A weight of load (.1 by default) at which a placement of DeepSeek-V2-Lite was as even as a load balancer's."""

KEPT = {"goal": "blend", "effort": "default", "method": "ce", "redundant": 0, "nodes": 1, "mode": "speculative"}
"""Options that a placement made anew keeps, and their defaults."""

WEIGHING_LOAD = (Goal.BLEND, Goal.LAR, Goal.ILP)
"""Goals in which --theta says how much even load weighs."""

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
    if not whole_model(found.placed):
        return (
            f"{_covered(found.placed)}: no whole checkpoint can be written, so it is used as a map ({takers}) in which "
            "the other layers stay contiguous; vLLM takes none."
        )
    blocked = blocking_layer(layers, placement.physical_to_logical)
    if blocked is None:
        return None
    return (
        f"The router is group-limited ({blocked.num_groups} groups) and the placement splits its groups: a renumbered "
        f"checkpoint would be another model, so it is used as a map ({takers}); vLLM takes none."
    )


def moe_layers(placed: Placed) -> list[MoeLayer]:
    """The layers that a placement places; an unknown model counts as one without groups."""
    rows = {row["id"]: row for row in placed.artefact.model["layers"]}
    return [
        MoeLayer(row["id"], row["num_experts"], row["top_k"], row.get("num_groups", 1), row.get("rule", ""))
        for row in (rows[layer] for layer in placed.placement.layer_ids)
    ]


def whole_model(placed: Placed) -> bool:
    """Whether every MoE layer of the model is placed, as a checkpoint and a run time need."""
    return len(placed.placement.layer_ids) == len(placed.artefact.model["layers"])


def _covered(placed: Placed) -> str:
    total = len(placed.artefact.model["layers"])
    return f"The placement has {len(placed.placement.layer_ids)} of the model's {total} MoE layers"


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


def next_step(found: Found, judged: dict[str, Any]) -> dict[str, str] | None:
    """The command to run next, and why; None where nothing is to be advised. judged: what `verdict` gives."""
    if judged["answer"] in ("little", "nothing") and found.placed is not None and judged.get("fixed_cost"):
        return None
    command, why, chosen = _step(found, judged)
    words = command.split()
    if found.needs_model(words[0]):
        why = f"{why} MODEL is your model, a folder or a short name: the trace does not say."
    return {"command": found.command(*words, chosen=chosen), "why": why}


def evener(found: Found, judged: dict[str, Any]) -> list[str]:
    """A sentence beside a good answer, where today's engines with tokens spread lose to their own load balancer."""
    spread = [one for one in judged["figures"] if (one["use"], one["way"], one["unit"]) == (PLACED, "sp-ep", "us")]
    command = _even(found)
    if judged["answer"] != "worth-it" or command is None:
        return []
    return [
        f"With tokens spread over ranks (sp-ep) it is slower than the engine's load balancer, {one['value']:.1f} us a "
        f"layer instead of {one[BALANCER]:.1f}: an evener placement may be better yet: {found.command(*command)}"
        for one in spread
        if one[BALANCER] is not None and one["value"] > one[BALANCER]
    ]


def _even(found: Found) -> list[str] | None:
    """The command that places again with more weight on even load; None where that was done, or cannot be.

    What the placement was made with is kept, but for a goal that weighs no load.
    """
    if found.placed is None or found.placed.log is None:
        return None
    made, ranks = found.placed.artefact.parameters, found.placed.placement.num_ranks
    weighed = made.get("goal", KEPT["goal"]) in WEIGHING_LOAD
    if made.get("goal") == Goal.TIME or (weighed and made.get("theta", 1.0) >= EVEN_THETA):
        return None
    name = f"{PLACEMENT}-ep{ranks}-{EVEN_NAME}"
    if (found.folder / name).exists():
        return ["report", "--placement", name]
    kept = _kept(made) if weighed else ["--goal", str(KEPT["goal"]), *_kept(made | {"goal": KEPT["goal"]})]
    flags = [
        *(["--groups", "whole"] if made.get("whole_groups") else []),
        *(["--uneven"] if made.get("uneven") else []),
    ]
    return ["cocluster", "--ep", str(ranks), *kept, *flags, "--theta", str(EVEN_THETA), "--name", EVEN_NAME]


def _kept(made: dict[str, Any], names: Iterable[str] = KEPT) -> list[str]:
    """Options that a placement was made with, where they are not the defaults. made: its parameters."""
    options = {name: made.get(name, KEPT[name]) for name in names}
    return [word for name, value in options.items() if value != KEPT[name] for word in (f"--{name}", str(value))]


def _step(found: Found, judged: dict[str, Any]) -> tuple[str, str, bool]:
    """Command, reason, and whether it needs the placement's name."""
    answer, figures = judged["answer"], judged["figures"]
    if answer == "unmeasured":
        return _towards_evaluation(found)
    if found.placed is None:
        return f"cocluster --ep {found.ranks}", "the placement that was measured is gone: makes it again.", False
    if answer == "worth-it" and equal_ranks(found.placed):
        return "export --to sglang", "writes the map that an engine reads; nothing is copied and the model stays.", True
    if answer == "worth-it" and whole_model(found.placed):
        return "regroup", "writes it for our run time: no engine's map has ranks of unlike size.", True
    if answer in ("worth-it", "needs-more"):
        return _towards_run_time(found)
    if answer == "undecided" and all(figure["doubt"] in (None, FEW_REQUESTS) for figure in figures):
        why = "measures more requests: record or import them first, with --split heldout -C T, or give --requests."
        return "evaluate --trace T/trace", why, True
    busy = any(figure["load_imbalance"] > MORE_LOAD * figure["load_baseline"] for figure in figures)
    even = _even(found)
    if busy and answer != "nothing" and even is not None:
        does = "places again with more weight on even load" if even[0] == "cocluster" else "shows the evener placement"
        return " ".join(even), f"{does}: the busiest rank is what this placement loses by.", False
    return _otherwise(found)


def _otherwise(found: Found) -> tuple[str, str, bool]:
    """What else could change the answer: more ranks, or copies where the experts cannot be shared by more."""
    ranks = found.ranks or USUAL_RANKS
    made = found.placed.artefact.parameters if found.placed else {}
    if found.placed is None or found.placed.placement.num_experts % (2 * ranks):
        why = "leave the model as it is, or see whether copies of busy experts change the answer."
        words = ["--redundant", "1", "--name", "copies", *_kept(made, ["effort"])]
        return " ".join(["cocluster", "--ep", str(ranks), *words]), why, False
    why = "leave the model as it is, or see whether more ranks change the answer."
    return " ".join(["cocluster", "--ep", str(2 * ranks), *_kept(made, ["goal", "effort", "mode"])]), why, False


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
    if found.placed is not None and not whole_model(found.placed):
        why = f"records every MoE layer in T; M is your model. {_covered(found.placed)}, and a run time needs them all."
        return "profile --model M -C T", why, False
    if found.placed is None or not found.placed.applied:
        why = "writes the checkpoint or map and the tables that a shuffling run time and a request router look up."
        return "regroup", why, True
    if sibling(found.placed.artefact.path, CHECKPOINT).exists():
        return "verify", "proves that the regrouped checkpoint is the same model.", True
    return "bench", "times a layer under this placement on your own GPUs.", True


def usual_ranks(experts: int) -> int:
    """A usual number of ranks that share the experts equally: 8, or the nearest below it that does."""
    return next((ranks for ranks in range(USUAL_RANKS, 1, -1) if experts % ranks == 0), experts)
