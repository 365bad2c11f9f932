"""The report's answer: what each table of figures leads to, whichever figures they are."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.placement import Placement
from smoe_cli.report.following import EVEN_NAME, engines, evener, map_only, next_step, usual_ranks
from smoe_cli.report.gathering import Found, Measured, Placed
from smoe_cli.report.verdict import ANSWERS, MORE_LOAD, THRESHOLDS, USES, verdict
from smoe_profiles.artefact import Artefact

RANKS = 4


def row(state, way, value, *, timed, load=1.0):
    total = {
        "remote_fanout": value,
        "load_imbalance": load,
        "wire_rows": {"sp-ep": 2 * value},
        "microseconds": {way: value} if timed else None,
    }
    return {"state": state, "predictor": "token", "total": total}


def states(placed, shuffled, dp_placed, dp_routed, *, timed=True, balanced=None, loads=(1.0, 1.0)):
    """Figures where contiguous experts take 100 both ways. balanced: what the load balancer takes; loads: contiguous
    and placed.
    """
    before, after = loads
    tokens = [row("contiguous", "sp-ep", 100.0, timed=timed, load=before)]
    requests = [row("contiguous", "dp-ep", 100.0, timed=timed, load=before)]
    if balanced is not None:
        tokens.append(row("load_balancer", "sp-ep", balanced, timed=timed, load=before))
        requests.append(row("load_balancer", "dp-ep", balanced, timed=timed, load=before))
    tokens += [
        row("placed", "sp-ep", placed, timed=timed, load=after),
        row("shuffled", "speculative", 99.0, timed=timed, load=before),
        row("placed+shuffled", "speculative", shuffled, timed=timed, load=after),
    ]
    requests += [
        row("placed", "dp-ep", dp_placed, timed=timed, load=after),
        row("placed+shuffled", "dp-ep", dp_routed, timed=timed, load=after),
    ]
    return {"tokens": tokens, "requests": requests}


def artefact(tmp_path, name, parameters=None, layers=None):
    model = {"family": "unknown", "layers": layers or [{"id": 0, "num_experts": 8, "top_k": 2}]}
    path = tmp_path / name
    manifest = {"kind": name.partition("-")[0], "parameters": parameters or {}, "model": model, "parents": []}
    return Artefact(path, path, manifest, "0" * 64)


CONTEXT = {
    "part": "heldout",
    "rows": 1000,
    "batch": 64,
    "quota": "ceil(T/G)",
    "unseen_tokens": 0.25,
    "hardware": "nvlink-h200",
    "predictors": ["token"],
    "ranks": RANKS,
    "requests": {"count": 10, "rows": 1000, "from": "held-out sequences"},
}


@pytest.fixture
def found(tmp_path):
    """A measured placement of 8 experts in pairs that a contiguous one does not have."""
    return placed_folder(tmp_path)


def placed_folder(folder, *, slots=(0, 4, 1, 5, 2, 6, 3, 7), confirmed=True, theta=0.1, layers=None, ranks=RANKS):
    placement = Placement((0,), np.array([slots]), ranks)
    chosen = artefact(folder, "placement-ep4", {"confirmed": confirmed, "theta": theta}, layers)
    measured = Measured(artefact(folder, "evaluation-ep4"), {"context": CONTEXT})
    return Found(folder, chosen.path.name, placed=Placed(chosen, placement, [], [], False), measured=measured)


CASES = {
    "today, tokens": (states(90, 90, 99, 99), "worth-it", "sp-ep"),
    "today, attention-DP": (states(99, 99, 90, 99), "worth-it", "dp-ep"),
    "the load balancer is better": (states(90, 99, 99, 99, balanced=88.0), "little", ""),
    "the load balancer is as good": (states(90, 85, 99, 99, balanced=90.0), "needs-more", "a shuffling run time"),
    "a shuffle": (states(98, 94, 99, 99), "needs-more", "a shuffling run time"),
    "a router": (states(98, 99, 99, 80), "needs-more", "a request router"),
    "nothing reaches": (states(98, 96, 98, 96), "little", ""),
    "slower": (states(120, 120, 120, 120), "little", ""),
    "fewer rows": (states(85, 85, 99, 99, timed=False), "worth-it", "rows"),
    "too few fewer rows": (states(95, 95, 95, 95, timed=False), "little", ""),
    "rows that only a shuffle saves": (states(95, 80, 95, 95, timed=False), "needs-more", "a shuffling run time"),
    "rows for load": (states(60, 50, 60, 50, timed=False, loads=(1.0, 2.0)), "undecided", "no layer time"),
    "load that time weighs": (states(60, 50, 60, 50, loads=(1.0, 2.0)), "worth-it", "sp-ep"),
}


@pytest.mark.parametrize(("measured", "answer", "words"), CASES.values(), ids=CASES)
def test_figures_lead_to_their_answer(found, measured, answer, words):
    judged = verdict(found, measured)
    assert judged["answer"] == answer
    assert words in judged["headline"]
    assert len(judged["figures"]) == len(USES)


def test_no_evaluation_is_not_measured_yet(found):
    found.measured = None
    judged = verdict(found, None)
    assert (judged["answer"], judged["basis"], judged["figures"], judged["conditions"]) == (
        "unmeasured",
        None,
        [],
        None,
    )


@pytest.mark.parametrize("measured", [states(80, 80, 80, 80), None])
def test_an_unconfirmed_gain_stays_nothing_to_gain(tmp_path, measured):
    assert verdict(placed_folder(tmp_path, confirmed=False), measured)["answer"] == "nothing"


SCARCE = {"few rows": ({"rows": 255}, "Only 255 held-out"), "few requests": ({"requests": 31}, "rests on 31 requests")}


@pytest.mark.parametrize(("context", "words"), SCARCE.values(), ids=SCARCE)
def test_measuring_too_little_is_said(found, context, words):
    changed = {"rows": 256} | ({"requests": CONTEXT["requests"] | {"count": 32}}) | context
    if "requests" in context:
        changed["requests"] = CONTEXT["requests"] | {"count": context["requests"]}
    found.measured.document["context"] = CONTEXT | changed
    (scarce, *_) = verdict(found, states(90, 90, 90, 90))["cautions"]
    assert words in scarce


times = st.floats(1.0, 1000.0)


@settings(max_examples=200)
@given(
    values=st.tuples(times, times, times, times),
    timed=st.booleans(),
    balanced=st.none() | times,
    loads=st.tuples(st.floats(1.0, 4.0), st.floats(1.0, 4.0)),
)
def test_an_answer_is_never_better_than_its_figures(tmp_path_factory, values, timed, balanced, loads):
    folder = tmp_path_factory.getbasetemp()
    judged = verdict(placed_folder(folder), states(*values, timed=timed, balanced=balanced, loads=loads))
    baseline = 100.0 if balanced is None else min(100.0, balanced)
    today, more = (1.03, 1.05) if timed else (1.10, 1.15)
    affordable = timed or loads[1] <= MORE_LOAD * loads[0]
    faster = [baseline / value for value in values]
    placed, shuffled = max(faster[0], faster[2]) >= today, max(faster[1], faster[3]) >= more
    if placed or shuffled:
        wanted = ("worth-it" if placed else "needs-more") if affordable else "undecided"
    else:
        wanted = "little"
    assert judged["answer"] == wanted
    json.dumps(judged, allow_nan=False)


def test_no_rows_at_all_are_still_a_number(found):
    judged = verdict(found, states(0.0, 0.0, 0.0, 0.0, timed=False))
    assert judged["answer"] == "worth-it"
    json.dumps(judged, allow_nan=False)


def test_every_answer_and_threshold_is_told(found):
    judged = verdict(found, states(90, 90, 90, 90))
    assert {one["answer"] for one in judged["answers"]} == set(ANSWERS)
    for figure in judged["figures"]:
        (threshold,) = [one for one in THRESHOLDS if (one.basis, one.use) == ("microseconds", figure["use"])]
        assert figure["threshold"] == threshold.at_least
    assert "1,000 held-out tokens" in judged["conditions_text"]
    assert "nvlink-h200" in judged["conditions_text"]
    assert "25.0%" in judged["conditions_text"]


def test_group_limited_routers_are_told_which_engines_take_a_map(tmp_path):
    layers = [{"id": 0, "num_experts": 8, "top_k": 2, "num_groups": 4, "rule": "softmax"}]
    split, whole = (
        placed_folder(tmp_path, slots=slots, layers=layers) for slots in ((0, 4, 1, 5, 2, 6, 3, 7), range(8))
    )
    assert "group-limited (4 groups)" in map_only(split)
    assert {one["engine"]: one["takes"] for one in engines(split)} == {
        "SGLang": "map",
        "TensorRT-LLM": "map",
        "vLLM-Ascend": "map",
        "vLLM": "no",
    }
    assert map_only(whole) is None
    assert engines(whole)[-1]["takes"] == "checkpoint"


def test_copies_are_a_map_only(tmp_path):
    copies = placed_folder(tmp_path, slots=(0, 4, 1, 1, 5, 2, 2, 6, 3, 3, 7, 0))
    assert "copies" in map_only(copies)


def test_ranks_of_unlike_size_fit_no_engines_map_but_vllms_checkpoint(tmp_path):
    unequal = placed_folder(tmp_path, slots=range(8), ranks=3)
    takes = {one["engine"]: one["takes"] for one in engines(unequal)}
    assert takes.pop("vLLM") == "checkpoint"
    assert set(takes.values()) == {"no"}
    assert next_step(unequal, {"answer": "worth-it", "figures": []})["command"].startswith("smoe regroup ")


BUSY = states(60, 60, 60, 60, timed=False, loads=(1.0, 1.2))
NEXT = {
    "worth-it": "smoe export --to sglang --model MODEL",
    "needs-more": "smoe regroup --model MODEL",
    "little": "smoe cocluster --ep 8",
    "nothing": "smoe cocluster --ep 8",
    "unmeasured": "smoe profile --model M",
}


@pytest.mark.parametrize("answer", NEXT)
def test_every_answer_names_a_command(found, answer):
    step = next_step(found, {"answer": answer, "figures": []})
    assert step["command"] == f"{NEXT[answer]} -C {found.folder}"
    assert step["why"].endswith(".")
    assert ("MODEL is your model" in step["why"]) == ("MODEL" in step["command"])


@pytest.mark.parametrize("timed", [True, False])
def test_a_placement_that_loses_by_its_busiest_rank_is_made_again_with_more_weight_on_load(found, timed):
    judged = verdict(found, states(99, 99, 99, 99, timed=timed, loads=(1.0, 1.2)) if timed else BUSY)
    assert judged["answer"] == ("little" if timed else "undecided")
    assert "cocluster --ep 4 --theta 0.5 --name even" in next_step(found, judged)["command"]


def test_more_weight_on_load_is_not_tried_twice(tmp_path):
    even = placed_folder(tmp_path, theta=0.5)
    assert f"--name {EVEN_NAME}" not in next_step(even, verdict(even, BUSY))["command"]


def made_with(found, **parameters):
    found.placed.artefact.parameters.update(parameters)
    return found


AGAIN = {
    "effort": ({"effort": "fast"}, "--ep 4 --effort fast --theta 0.5 --name even"),
    "goal": ({"goal": "lar"}, "--ep 4 --goal lar --theta 0.5 --name even"),
    "nodes and groups": ({"nodes": 2, "whole_groups": True}, "--ep 4 --nodes 2 --groups whole --theta 0.5 --name even"),
    "a goal that weighs no load": (
        {"goal": "fanout", "effort": "fast"},
        "--ep 4 --goal blend --effort fast --theta 0.5 --name even",
    ),
    "a goal that weighs load itself": ({"goal": "time", "mode": "dp-ep"}, "--ep 8 --goal time --mode dp-ep"),
}


@pytest.mark.parametrize(("made", "words"), AGAIN.values(), ids=AGAIN)
def test_placing_again_dropped_the_goal_and_effort(found, made, words):
    judged = verdict(made_with(found, **made), BUSY)
    assert next_step(found, judged)["command"] == f"smoe cocluster {words} -C {found.folder}"


GIVEN = {
    "effort": "fast",
    "mode": "dp-ep",
    "hardware": "pcie",
    "theta": 0.2,
    "mu": 0.5,
    "mix": [["law", 0.75], ["two words", 0.25]],
}
WORDS = "--effort fast --mode dp-ep --hardware pcie {}--mu 0.5 --mix law=0.75 --mix 'two words=0.25'"


def test_steps_forgot_the_machine_and_the_weights_that_were_given(found):
    made_with(found, **GIVEN)
    more, copies, even = (
        next_step(found, {"answer": "little", "figures": []}),
        next_step(eight_ranks(found, **GIVEN), {"answer": "little", "figures": []}),
        next_step(found, verdict(found, BUSY)),
    )
    kept = WORDS.format("--theta 0.2 ")
    assert more["command"] == f"smoe cocluster --ep 8 {kept} -C {found.folder}"
    assert copies["command"] == f"smoe cocluster --ep 8 --redundant 1 {kept} --name copies -C {found.folder}"
    assert even["command"].startswith(f"smoe cocluster --ep 4 {WORDS.format('')} --theta 0.5 --name even ")


def eight_ranks(found, **parameters):
    """Eight experts on as many ranks, which cannot be doubled."""
    return made_with(placed_folder(found.folder, slots=range(8), ranks=8), **parameters)


def test_measuring_was_advised_on_another_machine_than_placing(found):
    made_with(found, mode="dp-ep", hardware="my cluster")
    found.placed, found.tables, found.measured = replace(found.placed, log=[]), SimpleNamespace(), None
    step = next_step(found, verdict(found, None))
    assert step["command"] == f"smoe evaluate --mode dp-ep --hardware FILE -C {found.folder}"
    assert step["why"].endswith("FILE is the hardware model it was made for.")


@pytest.mark.parametrize("name", ["placement-ep8-copies", "placement-ep8"])
def test_a_step_named_a_placement_that_was_there(found, name):
    (found.folder / name).mkdir()
    asked = eight_ranks(found) if name.endswith("copies") else found
    step = next_step(asked, {"answer": "little", "figures": []})
    assert step["command"] == f"smoe report --placement {name} -C {found.folder}"


def test_copies_were_advised_where_there_are_some_or_none_can_be(found):
    copies = placed_folder(found.folder, slots=[*range(8), *range(8)], ranks=8)
    for asked in (made_with(copies, redundant=1), eight_ranks(found, nodes=2)):
        assert next_step(asked, {"answer": "little", "figures": []}) is None
    time = next_step(eight_ranks(found, goal="time"), {"answer": "little", "figures": []})
    assert "--goal" not in time["command"]


def blocks_of(found, blocks, rows):
    """Tables with validation blocks of so many rows, and no more of tables."""
    start = np.arange(blocks + 1) * rows
    found.tables = SimpleNamespace(samples=lambda _part: iter([SimpleNamespace(block_start=start)]))
    return found


@pytest.mark.parametrize("measured", [states(60, 60, 60, 60), None])
def test_seven_blocks_could_confirm_that_there_is_nothing_to_gain(tmp_path, measured):
    few = blocks_of(placed_folder(tmp_path, confirmed=False), 7, 1)
    judged = verdict(few, measured)
    assert (judged["answer"], "too few validation rows" in judged["headline"]) == ("undecided", True)
    assert next_step(few, judged)["command"] == "smoe profile --model M -C T"


def test_worth_it_on_few_requests_was_said_like_any_other(found):
    today, router, tokens = states(99, 99, 80, 99), states(99, 99, 99, 80), states(90, 99, 80, 99)
    for count, words in ((8 * RANKS - 1, ", on few requests: "), (8 * RANKS, ": ")):
        few_requests(found, count)
        assert f"attention-DP (dp-ep){words}" in verdict(found, today)["headline"]
        assert f"a request router{words}" in verdict(found, router)["headline"]
        assert "few requests" not in verdict(found, tokens)["headline"]


def test_an_evener_placement_that_is_there_was_made_again(found):
    (found.folder / "placement-ep4-even").mkdir()
    step = next_step(found, verdict(found, BUSY))
    assert step["command"] == f"smoe report --placement placement-ep4-even -C {found.folder}"


def test_a_placement_slower_than_the_load_balancer_was_praised_without_a_word(found):
    judged = verdict(made_with(found, effort="fast"), states(96, 99, 80, 99, balanced=90.0))
    assert judged["answer"] == "worth-it"
    (said,) = evener(found, judged)
    assert "96.0 us a layer instead of 90.0" in said
    assert said.endswith(f"smoe cocluster --ep 4 --effort fast --theta 0.5 --name even -C {found.folder}")
    for measured in (
        states(89, 99, 80, 99, balanced=90.0),
        states(96, 99, 80, 99),
        states(96, 99, 99, 99, balanced=90.0),
    ):
        assert evener(found, verdict(found, measured)) == []
    assert evener(made_with(found, theta=0.5), judged) == []


def few_requests(found, count):
    found.measured.document["context"] = CONTEXT | {"requests": CONTEXT["requests"] | {"count": count}}
    return found


def test_worth_it_rested_on_three_requests_over_four_ranks(found):
    judged = verdict(few_requests(found, RANKS - 1), states(99, 99, 80, 80))
    assert judged["answer"] == "undecided"
    assert "fewer requests than ranks" in judged["headline"]
    assert [figure["doubt"] for figure in judged["figures"]] == [None, "requests", None, "requests"]
    assert "too few to count." in judged["reasons"][1]
    assert next_step(found, judged)["command"] == f"smoe evaluate --trace T/trace -C {found.folder}"


def test_few_requests_put_only_attention_dp_in_doubt(found):
    few_requests(found, RANKS - 1)
    assert verdict(found, states(80, 99, 80, 99))["answer"] == "worth-it"
    assert verdict(found, states(99, 80, 99, 80))["answer"] == "needs-more"
    assert verdict(few_requests(found, RANKS), states(99, 99, 80, 80))["answer"] == "worth-it"


@pytest.mark.parametrize(
    ("balanced", "words"), [(100.0, "under the load balancer"), (None, "with contiguous experts")], ids=["both", "one"]
)
def test_the_busiest_rank_computes_more_than_something(found, balanced, words):
    measured = states(60, 60, 60, 60, timed=False, balanced=balanced, loads=(1.4, 1.5))
    if balanced:
        for table in ("tokens", "requests"):
            measured[table][1]["total"]["load_imbalance"] = 1.0
    else:
        measured = BUSY
    judged = verdict(found, measured)
    assert judged["headline"].startswith("Undecided: ")
    assert f"computes more than {words}" in judged["headline"]
    assert words in judged["reasons"][0]


def test_fixed_cost_was_told_as_a_placement_that_loses(found):
    measured = states(99, 99, 99, 99, loads=(1.0, 1.2))
    for one in (*measured["tokens"], *measured["requests"]):
        one["total"]["microseconds"] = dict.fromkeys(one["total"]["microseconds"], 37.53)
    measured["requests"][0]["total"]["microseconds"]["dp-ep"] = 37.55
    judged = verdict(found, measured)
    assert judged["fixed_cost"]
    assert "fixed cost" in judged["headline"]
    assert any("Nearly all predicted time is fixed cost" in caution for caution in judged["cautions"])
    assert next_step(found, judged) is None
    measured["requests"][0]["total"]["microseconds"]["dp-ep"] = 38.0
    assert not verdict(found, measured)["fixed_cost"]


def test_ranks_that_cannot_be_doubled_are_given_copies_instead(tmp_path):
    wide = placed_folder(tmp_path, slots=range(8), ranks=8)
    assert (
        "cocluster --ep 8 --redundant 1 --name copies"
        in next_step(wide, {"answer": "little", "figures": []})["command"]
    )


@given(experts=st.integers(2, 512))
def test_usual_ranks_share_the_experts_equally(experts):
    assert experts % usual_ranks(experts) == 0
