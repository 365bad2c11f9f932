"""What rows travel between nodes, or by a matrix of costs, counted again row by row."""

import json

import numpy as np
import pytest

from smoe_cli.placement import contiguous_placement, read_placement
from smoe_profiles.artefact import open_artefact
from smoe_profiles.trace import open_trace
from tests.conftest import smoe
from tests.report.test_document import routed

COST = [[0, 1, 3, 9], [2, 0, 5, 4], [6, 1, 0, 2], [3, 7, 1, 0]]
"""Unlike in both directions: rows come from the first axis."""

NODES = [[0, 1, 8, 8], [1, 0, 8, 8], [8, 8, 0, 1], [8, 8, 1, 0]]


def travel_by_hand(trace, placement, cost, batch):
    """Mean over layers and rows of the cost from where a row lies to the ranks that it needs."""
    layers = []
    for index, layer in enumerate(trace.layers):
        experts = trace.experts(layer, "heldout")
        total = 0
        for start in range(0, len(experts), batch):
            rows = experts[start : start + batch]
            quota = -(-len(rows) // 4)
            for place, row in enumerate(rows):
                needed = {int(placement.expert_to_rank[index][expert]) for expert in row}
                total += sum(cost[place // quota][rank] for rank in needed)
        layers.append(total / len(experts))
    return np.mean(layers)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A working folder with tables of rows that use pairs of experts."""
    path = tmp_path_factory.mktemp("travel")
    smoe("import", routed(path, "pairs", 5), cwd=path)
    smoe("build-tables", cwd=path)
    return path


def evaluated(work, *options):
    """What `smoe evaluate` found of a placement made anew, and the placement."""
    smoe("cocluster", "--ep", "4", "--effort", "fast", "--jobs", "1", *options, "--force", cwd=work)
    document = smoe("evaluate", "--batch", "256", "--json", cwd=work).json()
    return document, read_placement(open_artefact(work / "smoe-out/placement-ep4", "placement"))


def test_rows_between_nodes_are_those_counted_by_hand(work):
    document, placement = evaluated(work, "--nodes", "2")
    trace = open_trace(work / "smoe-out/trace")
    experts = contiguous_placement(placement.layer_ids, placement.num_experts, 4)
    total = document["travel"]["total"]
    crossing = [[cost == 8 for cost in row] for row in NODES]
    for state, where in (("placed", placement), ("contiguous", experts)):
        figures = total[state]["none"]
        assert figures["travel"] == pytest.approx(travel_by_hand(trace, where, NODES, 256))
        assert figures["crossing"] == pytest.approx(travel_by_hand(trace, where, crossing, 256))
    assert total["placed"]["none"]["crossing"] < total["contiguous"]["none"]["crossing"]
    balanced = {"load-balanced": {"none": {"rule": document["load_balancer"]["total"]}}}
    for state, by_predictor in (document["total"] | balanced).items():
        for predictor, figures in by_predictor.items():  # a row inside a node costs 1, a row to another 8
            found = total[state][predictor]
            assert found["travel"] - 7 * found["crossing"] == pytest.approx(figures["rule"]["remote_fanout"])
    shown = smoe("evaluate", "--batch", "256", cwd=work).out
    assert f"rows to other nodes, a token: {total['contiguous']['none']['crossing']:.3f} contiguous, " in shown
    assert f", {total['placed+shuffled']['token']['crossing']:.3f} placed+shuffled (token)\n" in shown
    unshuffled = smoe("evaluate", "--batch", "256", "--mode", "sp-ep", cwd=work).out
    assert f" load-balanced, {total['placed']['none']['crossing']:.3f} placed\n" in unshuffled


def test_a_matrix_of_costs_is_told_in_units_of_the_least(work):
    (work / "cost.json").write_text(json.dumps((np.array(COST) * 2.5).tolist()))
    document, placement = evaluated(work, "--rank-cost", work / "cost.json")
    figures = document["travel"]["total"]["placed"]["none"]
    assert list(figures) == ["travel"]
    assert figures["travel"] == pytest.approx(travel_by_hand(open_trace(work / "smoe-out/trace"), placement, COST, 256))
    shown = smoe("evaluate", "--batch", "256", cwd=work).out
    assert "cost of rows to other ranks, in units of the least, a token: " in shown


def test_ranks_equally_far_apart_have_no_travel_of_their_own(work):
    assert "travel" not in evaluated(work)[0]


def test_the_report_tells_what_travels_in_the_evaluations_words(work):
    document, _ = evaluated(work, "--nodes", "2")
    rows = smoe("report", "--json", cwd=work).json()["sections"]["traffic"]["travel"]
    assert {(row["state"], row["predictor"]) for row in rows} >= {
        ("load-balanced", "none"),
        ("placed+shuffled", "token"),
    }
    for row in rows:
        found = document["travel"]["total"][row["state"]][row["predictor"]]
        assert (row["travel"], row["crossing"]) == (found["travel"], found["crossing"])
    smoe("report", "--out", work / "report.html", cwd=work)
    page = (work / "report.html").read_text()
    table = page[page.index("What rows travel, a token and layer") :]
    assert '<th scope="col">rows to other nodes</th>' in table[: table.index("</table>")]
    (work / "cost.json").write_text(json.dumps(COST))
    evaluated(work, "--rank-cost", work / "cost.json")
    assert {row["crossing"] for row in smoe("report", "--json", cwd=work).json()["sections"]["traffic"]["travel"]} == {
        None
    }
    evaluated(work)
    assert smoe("report", "--json", cwd=work).json()["sections"]["traffic"]["travel"] is None
