"""Hardware models: those that ship say what was measured, files are checked."""

import json
import re
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from smoe_cli.evaluation.pricing import Pricing
from smoe_cli.hardware import SHIPPED, LayerShape, layer_shape, load_hardware
from smoe_cli.placement import read_placement
from smoe_profiles.artefact import open_artefact
from smoe_profiles.errors import InputError
from smoe_profiles.models import find_model
from smoe_profiles.tables import open_tables
from smoe_profiles.trace import open_trace
from smoe_solvers.choices import Mode
from smoe_solvers.figures import Figures
from smoe_solvers.hierarchy import CROSS_NODE
from smoe_solvers.layer_time import Stage
from tests.conftest import smoe

MIB = 1 << 20
V2_LITE = LayerShape(2048, 1408)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("nvlink-h200", 300e9, 360e9), ("pcie", 23e9, 25e9), ("ethernet", 2e9, 4e9)]
)
def test_shipped_models_move_a_large_tensor_at_the_measured_rate(name, least, most):
    """Wire bytes a direction of a 128 MiB tensor on two GPUs, by seconds."""
    curves = load_hardware(name).curves
    wire = 128 * MIB / 2
    for stage in (Stage.REDUCE_SCATTER, Stage.ALL_GATHER):
        assert least < wire / curves[stage](wire) < most


@pytest.mark.parametrize("name", SHIPPED)
def test_more_bytes_never_take_less_time(name):
    sizes = np.geomspace(1, 1e9, 200)
    for curve in load_hardware(name).curves.values():
        assert (np.diff(curve(sizes)) >= 0).all()
        assert curve(0) > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_name_what_was_measured(name, shipped):
    provenance = shipped(name)["provenance"]
    assert set(provenance["measured"]) == {*(stage.value for stage in Stage), "expert_flops"}
    assert {"date", "devices", "link", "versions"} < set(provenance)


def test_a_slower_link_makes_a_slower_layer():
    times = [float(load_hardware(name).layer_cost(Mode.SPECULATIVE, 8, V2_LITE).exchange(300)) for name in SHIPPED]
    assert times == sorted(times)


def test_an_expert_costs_three_products_of_hidden_size_and_width():
    cost = load_hardware("nvlink-h200").layer_cost(Mode.DP_EP, 8, V2_LITE)
    assert cost.activation_flops == 3 * 2 * 2048 * 1408
    assert cost.row_bytes == 4096


@pytest.fixture
def shipped():
    from importlib.resources import files

    return lambda name: json.loads(files("smoe_cli").joinpath(f"hardware/{name}.json").read_text())


@pytest.fixture
def model_file(tmp_path, shipped):
    """Writes a shipped model with changes to a file."""

    def write(**changes):
        path = tmp_path / "own.json"
        path.write_text(json.dumps(shipped("pcie") | {"name": "own"} | changes))
        return path

    return write


def test_a_file_stands_in_for_a_shipped_model(model_file, shipped):
    points = [[1000, 1e-6], [2000, 3e-6]]
    path = model_file(stages=shipped("pcie")["stages"] | {"dispatch": points}, expert_flops=1e12)
    own = load_hardware(str(path))
    assert (own.name, own.expert_flops) == ("own", 1e12)
    assert own.curves[Stage.DISPATCH](1500) == pytest.approx(2e-6)
    assert own.curves[Stage.COMBINE](1e6) == load_hardware("pcie").curves[Stage.COMBINE](1e6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"format_version": 2}, "version 2"),
        ({"stages": []}, "stages = \\[\\]"),
        ({"expert_flops": 0}, "expert_flops = 0"),
        ({"expert_flops": "fast"}, "expert_flops = 'fast'"),
        ({"expert_flops": float("nan")}, "expert_flops = nan"),
    ],
)
def test_a_file_that_lacks_something_is_refused_by_name(model_file, changes, says):
    path = model_file(**changes)
    with pytest.raises(InputError, match=says) as error:
        load_hardware(str(path))
    assert str(path) in str(error.value)


def test_a_bench_on_the_cpu_is_told_to_have_measured_nothing(tmp_path):
    (tmp_path / "bench.json").write_text('{"workloads": {}}')
    with pytest.raises(InputError, match="measures no hardware; run it on GPUs"):
        load_hardware(str(tmp_path / "bench.json"))


@pytest.mark.parametrize(
    "points",
    [None, [], [[1, 2, 3]], [[1, "2"]], [[1, -1e-6]], [[0, 1e-6]], [[True, 1.0]], {"1": 2}, [[1, float("inf")]]],
)
def test_points_that_are_none_are_refused(model_file, shipped, points):
    path = model_file(stages=shipped("pcie")["stages"] | {"combine": points})
    with pytest.raises(InputError, match=r"stages\.combine = .* was expected"):
        load_hardware(str(path))


def test_one_size_measured_twice_is_refused(model_file, shipped):
    path = model_file(stages=shipped("pcie")["stages"] | {"combine": [[5, 1e-6], [5, 2e-6]]})
    with pytest.raises(InputError, match="twice"):
        load_hardware(str(path))


def test_neither_a_name_nor_a_file_lists_the_names(tmp_path):
    with pytest.raises(InputError, match="nvlink-h200, pcie, ethernet"):
        load_hardware("infiniband")
    with pytest.raises(InputError, match="nor a readable file"):
        load_hardware(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "[" * 100_000])
def test_a_file_that_is_no_model_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        load_hardware(str(path))


@pytest.fixture(scope="module")
def tabled(tmp_path_factory, run_smoe):
    """A folder of tiny-mixtral with tables."""
    folder = tmp_path_factory.mktemp("hardware")
    run_smoe("profile", "--model", "tiny-mixtral", "--max-tokens", "8000", "--quiet", cwd=folder)
    run_smoe("build-tables", "--quiet", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def place(tabled, run_smoe):
    """Runs cocluster at EP4; returns its document and the placement, [L, E]."""

    def run(name, *options):
        command = ("cocluster", "--ep", "4", "--effort", "fast", "--jobs", "1", "--json", "--name", name, *options)
        document = run_smoe(*command, cwd=tabled).json()
        artefact = open_artefact(tabled / f"smoe-out/placement-ep4-{name}", "placement")
        return document, read_placement(artefact).expert_to_rank

    return run


@pytest.fixture
def bytes_alone(model_file):
    """A link so slow that a tiny model's rows matter, and experts that cost nothing."""
    points = [[1, 1e-3], [1_000_000, 1.0]]
    return model_file(stages={stage.value: points for stage in Stage}, expert_flops=1e30)


def test_goal_time_predicts_microseconds_and_is_not_slower_than_other_goals_on_the_fit_rows(place, bytes_alone):
    options = ("--mode", "dp-ep", "--hardware", bytes_alone)
    (blend, _), (time, _) = place("blend", *options), place("time", "--goal", "time", *options)
    for document in (blend, time):
        times = document["validation_microseconds"]
        assert (document["mode"], document["hardware"], document["confirmed"]) == ("dp-ep", "own", True)
        assert times["placed"] < times["contiguous"]
    assert times["contiguous"] == blend["validation_microseconds"]["contiguous"]
    assert time["validation_gain"] == pytest.approx(times["contiguous"] - times["placed"])
    for layer in time["layers"]:
        reached = {stage["name"]: stage["objective"] for stage in layer["stages"]}
        assert reached["descent by time"] <= reached["other goals"] < reached["contiguous"]
        assert reached["descent by time"] == layer["objective"]


def test_validation_blocks_of_few_rows_are_priced_as_batches_of_1024(place, bytes_alone, tabled):
    """Goal time found nothing to gain on a short trace, whose blocks' time was all fixed cost."""
    document, _ = place("priced", "--mode", "dp-ep", "--hardware", bytes_alone)
    row_bytes, times = 2 * find_model("tiny-mixtral", download=False).spec.hidden_size, []
    for sample in open_tables(tabled / "smoe-out/tables").samples("validation"):
        for start, stop in pairwise(sample.block_start):
            rows, sent, received = stop - start, [0] * 4, [0] * 4
            for place_in_block, experts in enumerate(sample.experts[start:stop]):
                home = place_in_block // -(-rows // 4)
                for rank in {int(expert) // 2 for expert in experts} - {home}:
                    sent[home] += 1
                    received[rank] += 1
            wire = max(sent + received) * row_bytes * 1024 / rows
            times.append(2 * (1e-3 + (wire - 1) * (1.0 - 1e-3) / (1_000_000 - 1)) * 1e6)
            assert rows < 1024
    assert document["validation_microseconds"]["contiguous"] == pytest.approx(np.mean(times))


def test_attention_dp_is_priced_by_each_rounds_busiest_rank_not_by_all_requests_together():
    cost = load_hardware("nvlink-h200").layer_cost(Mode.DP_EP, 4, V2_LITE)
    names = [field.name for field in fields(Figures)]
    figures = replace(Figures(**dict.fromkeys(names, 1.0)), load_imbalance=1.1, load_imbalance_batch=1.5)
    found = Pricing({Mode.DP_EP: cost}, 2048, 6, 1024).requests(figures)
    busiest = cost.exchange(1024 / 4) + 1.5 * 6 * 1024 / 4 * (6 * 2048 * 1408 / cost.flop_rate)
    assert found["microseconds"]["dp-ep"] == pytest.approx(float(busiest) * 1e6)


def test_rows_travel_less_in_a_placement_that_knows_nodes(place, tabled):
    _, flat = place("flat", "--goal", "fanout")
    document, linked = place("nodes", "--goal", "fanout", "--nodes", "2")
    assert document["nodes"] == 2
    cost = np.kron(np.eye(2), np.ones((2, 2))) * (1 - CROSS_NODE) + CROSS_NODE - np.eye(4)
    trace = open_trace(tabled / "smoe-out/trace")

    def travel(placement):
        total = 0.0
        for where, layer in zip(placement, trace.layers, strict=True):
            for row in where[trace.experts(layer, "heldout")]:
                needed = sorted(set(row))
                total += min(cost[home, needed].sum() for home in needed)
        return total

    assert travel(linked) < travel(flat)


def test_nodes_are_a_special_case_of_a_cost_matrix(place, tmp_path):
    cost = np.kron(np.eye(2), np.ones((2, 2))) * -7 + 8 - np.eye(4)
    np.save(tmp_path / "cost.npy", cost)
    (tmp_path / "cost.json").write_text(json.dumps((3 * cost).tolist()))
    _, nodes = place("as-nodes", "--nodes", "2")
    for kind in ("npy", "json"):
        document, measured = place(f"as-{kind}", "--rank-cost", tmp_path / f"cost.{kind}")
        np.testing.assert_array_equal(measured, nodes)
        assert document["rank_cost"][0][1] > 0


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--nodes", "3"], 4, "Valid --nodes: 1, 2, 4"),
        (["--nodes", "2", "--rank-cost", "cost.npy"], 2, "give one"),
        (["--nodes", "2", "--goal", "time"], 2, "--goal time and --nodes do not go together"),
        (["--nodes", "2", "--compare"], 2, "--compare and --nodes do not go together"),
        (["--goal", "time", "--method", "metis"], 2, "--goal time and --method do not go together"),
        (["--goal", "time", "--compare"], 2, "--goal time and --compare do not go together"),
        (["--hardware", "wires"], 3, "nvlink-h200, pcie, ethernet"),
        (["--rank-cost", "none.npy"], 3, "none.npy cannot be read"),
        (["--rank-cost", "small.json"], 3, r"shape \(2, 2\) does not fit 4 ranks"),
        (["--rank-cost", "text.json"], 3, "text.json cannot be read"),
        (["--rank-cost", "ragged.json"], 3, "ragged.json cannot be read"),
    ],
)
def test_ranks_and_hardware_that_cannot_be_are_refused_before_any_work(tabled, run_smoe, options, code, says):
    np.save(tabled / "cost.npy", 1 - np.eye(4))
    (tabled / "small.json").write_text("[[0, 1], [1, 0]]")
    (tabled / "text.json").write_text("cost")
    (tabled / "ragged.json").write_text("[[0, 1], [1]]")
    done = run_smoe("cocluster", "--ep", "4", "--name", "no", *options, cwd=tabled, code=code)
    assert re.search(says, " ".join(done.err.split()))
    assert not (tabled / "smoe-out/placement-ep4-no").exists()


def test_time_of_a_model_that_is_not_at_hand_is_refused_with_what_to_do(tmp_path, run_smoe):
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(8), (1, 4000, 1)), axis=2)[..., :2]
    np.savez(tmp_path / "trace.npz", ids=ids)
    run_smoe("import", "trace.npz", "--quiet", cwd=tmp_path)
    run_smoe("build-tables", "--quiet", cwd=tmp_path)
    done = run_smoe("cocluster", "--ep", "2", "--goal", "time", cwd=tmp_path, code=3)
    assert "--model" in done.err
    shown = run_smoe("cocluster", "--ep", "2", "--json", "--jobs", "1", cwd=tmp_path).json()
    assert shown["validation_microseconds"] is None


def test_an_import_whose_model_is_a_short_name_has_tables_and_times_though_no_weights_are_here(tmp_path):
    """It looked for an embedding, and where there is a network would have downloaded the whole model for it."""
    generator = np.random.default_rng(0)
    ids = generator.random((16, 3000, 64)).argsort(axis=2)[:, :, :8].astype(np.uint8)
    np.savez(
        tmp_path / "olmoe.npz", ids=ids, tokens=generator.integers(0, 50304, 3000, np.uint32), num_experts=64, top_k=8,
        layer_ids=np.arange(16, dtype=np.uint8), seq_len=np.full(30, 100, np.int32), vocab_size=50304,
    )  # fmt: skip
    smoe("import", tmp_path / "olmoe.npz", "--model", "olmoe-1b-7b", "-C", tmp_path, cwd=tmp_path)
    said = smoe("build-tables", "-C", tmp_path, cwd=tmp_path).err
    assert "ids never seen take popularity, unless --model FOLDER" in said
    tables = open_artefact(tmp_path / "tables", "tables")
    assert layer_shape(tables, tmp_path) == LayerShape(2048, 1024)
