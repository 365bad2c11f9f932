"""What to do next: which engines take this placement, and the one command that moves the reader on.

Axes: E experts, G ranks.
"""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_cli.folder import CHECKPOINT, TRACE, placement_path, sibling, step_after_trace
from smoe_cli.placing.solve_options import FILE, KEPT, MACHINE, as_asked, options_given
from smoe_cli.report.gathering import Found, Placed
from smoe_cli.report.states import BALANCER
from smoe_cli.report.verdict import MORE_LOAD, too_few_rows
from smoe_cli.report.wording import FEW_REQUESTS, PLACED
from smoe_profiles.choices import Level
from smoe_profiles.families.config import MoeLayer
from smoe_solvers.choices import Goal
from smoe_solvers.redundancy import MAX_RANKS

USUAL_RANKS = 8

EVEN_NAME, EVEN_THETA = "even", 0.5
"""A weight of load (.1 by default) at which a placement of DeepSeek-V2-Lite was as even as a load balancer's."""

AGAIN = tuple(name for name in KEPT if name != "method")
"""Options that stay where other ranks or copies are tried: whatever the method, that is searched."""

BESIDE_COPIES = tuple(name for name in AGAIN if name not in ("redundant", "nodes"))

M_IS = "M is your model."

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


def engines(found: Found) -> list[dict[str, Any]]:
    """What each engine takes of this placement, and the command that writes it."""
    if found.placed is None:
        return []
    equal = found.placed.placement.equal_ranks
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
    takes, deepep = blocked is None, None if equal else "not with a DeepEP back end, which needs ranks of equal size"
    vllm = {
        "engine": "vLLM",
        "takes": "checkpoint" if takes else "no",
        "command": found.command("regroup", chosen=True) if takes else None,
        "note": deepep if takes else "it takes no static map, and no checkpoint can be this placement",
    }
    return [*rows, vllm]


class Step(NamedTuple):
    """The words after `smoe`, as a shell reads them, and why. chosen: whether they need the placement's name.

    where: the folder they are for, None: the one reported on.
    """

    command: str
    why: str
    chosen: bool = False
    where: Path | None = None


def next_step(found: Found, judged: dict[str, Any]) -> dict[str, str] | None:
    """The command to run next, and why; None where nothing is to be advised. judged: what `verdict` gives."""
    if judged["answer"] in ("little", "nothing") and found.placed is not None and judged.get("fixed_cost"):
        return None
    step = _step(found, judged)
    if step is None:
        return None
    words, why = shlex.split(step.command), step.why
    if found.needs_model(words[0]):
        why = f"{why} MODEL is your model, a folder or a short name: the trace does not say."
    if FILE in words:
        why = f"{why} {FILE} is the hardware model it was made for."
    return {"command": found.command(*words, chosen=step.chosen, where=step.where), "why": why}


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
    made, ranks = _made(found), found.placed.placement.num_ranks
    weighed = made.get("goal", KEPT["goal"]) in WEIGHING_LOAD
    if made.get("goal") == Goal.TIME or (weighed and made.get("theta", 1.0) >= EVEN_THETA):
        return None
    made = made | {"theta": KEPT["theta"]}
    kept = options_given(made) if weighed else ["--goal", str(KEPT["goal"]), *options_given(made | {"goal": "blend"})]
    flags = [
        *(["--groups", "whole"] if made.get("whole_groups") else []),
        *(["--uneven"] if made.get("uneven") else []),
    ]
    return _place(found, ranks, EVEN_NAME, [*kept, *flags, "--theta", str(EVEN_THETA)])


def _made(found: Found) -> dict[str, Any]:
    """What the placement was made with, its hardware as --hardware takes it."""
    return as_asked(found.placed.artefact.parameters if found.placed else {})


def _place(found: Found, ranks: int, name: str | None, words: list[str]) -> list[str]:
    """The command that makes a placement, or shows the one of that name that is there."""
    path = placement_path(found.folder, ranks, name)
    if path.exists():
        return ["report", "--placement", path.name]
    return ["cocluster", "--ep", str(ranks), *words, *(["--name", name] if name else [])]


def _step(found: Found, judged: dict[str, Any]) -> Step | None:
    answer, figures = judged["answer"], judged["figures"]
    if answer == "unmeasured":
        return _towards_evaluation(found)
    if found.placed is None:
        return Step(f"cocluster --ep {found.ranks}", "the placement that was measured is gone: makes it again.")
    if too_few_rows(found):
        why = "records more text, in T, to place by: nothing could be confirmed on so few validation rows."
        known = found.model_name
        return Step(shlex.join(["profile", "--model", known or "M", "-C", "T"]), why if known else f"{why} {M_IS}")
    if answer == "worth-it" and found.placed.placement.equal_ranks:
        return Step("export --to sglang", "writes the map that an engine reads; nothing is copied.", chosen=True)
    if answer == "worth-it" and whole_model(found.placed):
        return Step(
            "regroup", "writes it for vLLM and smoe's run time: no engine's map has ranks of unlike size.", chosen=True
        )
    if answer in ("worth-it", "needs-more"):
        return _towards_run_time(found)
    if answer == "undecided" and all(figure["doubt"] in (None, FEW_REQUESTS) for figure in figures):
        why = "measures more requests: record or import them first, with --split heldout -C T, or give --requests."
        return Step(shlex.join(["evaluate", "--trace", "T/trace", *_machine(found)]), why, chosen=True)
    busy = any(figure["load_imbalance"] > MORE_LOAD * figure["load_baseline"] for figure in figures)
    even = _even(found)
    if busy and answer != "nothing" and even is not None:
        does = "places again with more weight on even load" if even[0] == "cocluster" else "shows the evener placement"
        return Step(shlex.join(even), f"{does}: the busiest rank is what this placement loses by.")
    return _otherwise(found, found.placed)


def _otherwise(found: Found, placed: Placed) -> Step | None:
    """What else could change the answer: more ranks, or copies where the experts cannot be shared by more."""
    made, ranks = _made(found), placed.placement.num_ranks
    if placed.placement.num_experts % (2 * ranks) == 0:
        return _try(found, 2 * ranks, None, options_given(made, AGAIN), "more ranks change")
    if placed.placement.redundant or made.get("nodes", 1) > 1 or made.get("rank_cost") or ranks > MAX_RANKS:
        return None  # there are copies, or they cannot be placed by where ranks are, or on so many
    if made.get("goal") in (Goal.TIME, Goal.ILP):  # searched without copies
        made = made | {name: KEPT[name] for name in ("goal", "theta")}
    words = ["--redundant", "1", *options_given(made, BESIDE_COPIES)]
    return _try(found, ranks, "copies", words, "copies of busy experts change")


def _try(found: Found, ranks: int, name: str | None, words: list[str], what: str) -> Step:
    """Another placement beside this one."""
    return Step(
        shlex.join(_place(found, ranks, name, words)), f"leave the model as it is, or see whether {what} the answer."
    )


def _machine(found: Found) -> list[str]:
    """What evaluate is to be told, for times as they were predicted before."""
    made = _made(found)
    hardware = found.measured.context.get("hardware") if found.measured else None
    if hardware:
        made = as_asked(made | {"hardware": hardware})
    return options_given(made, MACHINE)


AFTER_TRACE = {
    "inspect": "says what the counts tell; placing needs a trace of each token's experts.",
    "build-tables": "counts which tokens use which experts.",
    "evaluate": "measures a placement on this trace, whose rows are all held out: none are there to place by.",
}
"""Why the step that a trace asks for is taken."""


def _towards_evaluation(found: Found) -> Step:
    """The first step between what is there and an evaluation."""
    if found.placed is None and found.tables is not None:
        experts = found.tables.layers[0].num_experts
        return Step(f"cocluster --ep {usual_ranks(experts)}", "places the experts on ranks; --ep is how many you have.")
    if found.tables is not None and found.placed is not None and found.placed.log is not None:
        return _measure(found)
    if found.placed is not None and found.placed.log is None:
        step = shlex.join(["inspect", found.placed.artefact.path.name])
        return Step(step, "says what this imported placement is; smoe cocluster makes one that can be measured.")
    if found.trace is None:
        return Step("profile --model M", f"records the held-out tokens to measure on. {M_IS}")
    level, fit_rows = found.trace.level, found.trace.rows("fit")
    if found.placed is not None and level is Level.TOKEN and not fit_rows:
        return Step("profile --model M -C T", f"records, in T, what to place by, as this trace cannot. {M_IS}")
    words, where = step_after_trace(found.folder / TRACE, level, fit_rows)
    why = AFTER_TRACE[words[0]] + (" FOLDER is where one is." if where == Path("FOLDER") else "")
    return Step(shlex.join(words), why, where=where)


def _measure(found: Found) -> Step:
    evaluate = ["evaluate", *_machine(found)]
    if found.trace is not None and found.trace.level is Level.TOKEN and not found.trace.rows("heldout"):
        why = "the trace has no held-out rows: record some with smoe profile --split heldout -C T, and measure on them."
        return Step(shlex.join([*evaluate, "--trace", "T/trace"]), why, chosen=True)
    return Step(shlex.join(evaluate), "measures the placement on held-out tokens.", chosen=True)


def _towards_run_time(found: Found) -> Step:
    if found.placed is not None and not whole_model(found.placed):
        why = f"records every MoE layer in T. {M_IS} {_covered(found.placed)}, and a run time needs them all."
        return Step("profile --model M -C T", why)
    if found.placed is None or not found.placed.applied:
        why = "writes the checkpoint or map and the tables that a shuffling run time and a request router look up."
        return Step("regroup", why, chosen=True)
    if sibling(found.placed.artefact.path, CHECKPOINT).exists():
        return Step("verify", "proves that the regrouped checkpoint is the same model.", chosen=True)
    return Step("bench", "times a layer under this placement on your own GPUs.", chosen=True)


def usual_ranks(experts: int) -> int:
    """A usual number of ranks that share the experts equally: 8, or the nearest below it that does."""
    return next((ranks for ranks in range(USUAL_RANKS, 1, -1) if experts % ranks == 0), experts)
