"""The pages of docs/formats/ say everything: readers written from them see what smoe sees, and nothing is left out."""

import hashlib
import json
import re
import shutil
from collections import Counter
from contextlib import chdir
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors import safe_open

from smoe_cli.placement import layer_predictors, read_runtime
from smoe_cli.placement import read_placement as smoe_read_placement
from smoe_profiles import open_artefact, open_tables, open_trace
from smoe_profiles.artefact import publish
from smoe_profiles.choices import Level
from smoe_profiles.gates import gate_record
from smoe_profiles.levels import write_level
from smoe_profiles.models import BUNDLED
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import Context, rank_labels, score
from tests.conftest import smoe
from tests.formats.pages import columns_of, files_of, page, said_on, tensors_of, written_keys
from tests.formats.readers import (
    Runtime,
    layer_label,
    read_counts,
    read_linear,
    read_manifest,
    read_placement,
    read_samples,
    read_trace,
)

ROOT = Path(__file__).parents[2]
TARGETS = {"sglang": "json", "sglang-pt": "pt", "trtllm": "yaml", "eplb": "pt", "ascend": "json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with everything that can stand in one, of a small trace with the early gate's record."""
    base = tmp_path_factory.mktemp("formats")
    texts = ROOT / "tests/fixtures/texts/fit.jsonl.gz"
    smoe(
        *("profile", "--model", "tiny-mixtral", "--dataset", texts),
        *("--max-tokens", "1500", "--seq-len", "128", "--early-gate", "all"),
        cwd=base,
    )
    smoe("build-tables", cwd=base)
    for shard in ("1/2", "2/2"):
        smoe("build-tables", "--shard", shard, cwd=base)
    smoe("cocluster", "--ep", "2", "--effort", "fast", "--jobs", "1", cwd=base)
    smoe("evaluate", "--predictor", "paper", "--predictor", "fused", cwd=base)
    smoe("regroup", cwd=base)
    smoe("regroup", "--layout", "map", cwd=base)
    smoe("regroup", "--inverse", "--model", "smoe-out/checkpoint-ep2", cwd=base)
    for target in TARGETS:
        smoe("export", "--to", target, cwd=base)
    shutil.copy(ROOT / "tests/fixtures/routing/gptoss20b_layers.npz", base / "routing.npz")
    smoe("import", "routing.npz", "--no-order", "-C", "counts", cwd=base)
    smoe("import", "smoe-out/placement-ep2.eplb.pt", "--as", "placement", "--ep", "2", "-C", "map", cwd=base)
    return base / "smoe-out"


@pytest.fixture(scope="module")
def trace(folder):
    return open_trace(folder / "trace")


@pytest.fixture(scope="module")
def rows(folder):
    return read_trace(folder / "trace")


def of_part(rows, part):
    """Numbers of the rows of one part."""
    return [number for number, split in enumerate(rows["split"]) if split == part]


# Readers written from the pages see what smoe sees.


@pytest.mark.parametrize("name", ["trace", "tables", "placement-ep2", "checkpoint-ep2", "map-ep2", "evaluation-ep2"])
def test_an_id_is_the_sha256_of_the_manifest_and_every_file_is_in_it(folder, name):
    manifest, identity = read_manifest(folder / name)
    assert identity == open_artefact(folder / name, manifest["kind"], hashes=True).id
    there = {path.relative_to(folder / name).as_posix() for path in (folder / name).rglob("*") if path.is_file()}
    assert there - set(manifest["files"]) == {path for path in there if path.endswith(("manifest.json", "run.json"))}


def test_the_parents_of_an_evaluation_lead_back_to_the_trace(folder):
    manifest, _ = read_manifest(folder / "evaluation-ep2")
    ids = {parent["kind"]: parent["id"] for parent in manifest["parents"]}
    placement, placement_id = read_manifest(folder / "placement-ep2")
    tables, tables_id = read_manifest(folder / "tables")
    assert ids == {"placement": placement_id, "trace": read_manifest(folder / "trace")[1]}
    assert placement["parents"] == [{"kind": "tables", "id": tables_id}]
    assert tables["parents"] == [{"kind": "trace", "id": ids["trace"]}]


def test_a_trace_reads_alike(folder, trace, rows):
    parameters = read_manifest(folder / "trace")[0]["parameters"]
    assert Counter(rows["split"]) == parameters["rows"]
    for part in ("fit", "heldout"):
        mine = of_part(rows, part)
        for layer, said in zip(trace.layers, parameters["layers"], strict=True):
            label = layer_label(said)
            assert [rows[f"experts_{label}"][i] for i in mine] == trace.experts(layer, part).tolist()
            weights = trace.read([layer.weight_column], part)[layer.weight_column]
            assert np.array_equal([rows[f"weights_{label}"][i] for i in mine], weights)
        assert [rows["token_id"][i] for i in mine] == trace.read(["token_id"], part)["token_id"].tolist()
    for experts, weights in zip(rows["experts_01"], rows["weights_01"], strict=True):
        assert list(zip(weights, experts, strict=True)) == sorted(
            zip(weights, experts, strict=True), key=lambda pair: (-pair[0], pair[1])
        )


def test_counts_below_level_token_read_alike(folder):
    where = folder.parent / "counts/trace"
    with pytest.raises(AssertionError):
        read_trace(where)
    smoe("import", "routing.npz", "-C", "whole", cwd=folder.parent)
    whole = read_trace(folder.parent / "whole/trace")
    for label in ("11", "13"):
        by_hand = Counter(
            (split, token, expert)
            for split, token, experts in zip(whole["split"], whole["token_id"], whole[f"experts_{label}"], strict=True)
            for expert in experts
        )
        assert read_counts(where, label) == by_hand


def test_tables_read_alike_and_add_up_the_trace(folder, rows):
    tables = open_tables(folder / "tables")
    layer, label, before = tables.layers[1], "01", "00"
    statistics = tables.statistics(layer)
    for code, part in enumerate(("fit", "validation")):
        mine = of_part(rows, part)
        counted = {key[1:]: n for key, n in read_counts(folder / "tables", label).items() if key[0] == part}
        theirs = tables.counts(layer, [part])
        assert counted == {
            (int(t), int(e)): int(c) for t, e, c in zip(theirs.token_id, theirs.expert, theirs.count, strict=True)
        }
        assert counted == Counter((rows["token_id"][i], e) for i in mine for e in rows[f"experts_{label}"][i])
        together, follow, top = (np.zeros((8, 8), int) for _ in range(3))
        for i in mine:
            experts, earlier = rows[f"experts_{label}"][i], rows[f"experts_{before}"][i]
            together[np.ix_(experts, experts)] += 1
            follow[np.ix_(earlier, experts)] += 1
            top[earlier[0], experts] += 1
        assert np.array_equal(together, statistics["coactivation"][code])
        assert np.array_equal(np.diag(together), statistics["popularity"][code])
        assert np.array_equal(follow, statistics["transitions"][code])
        assert np.array_equal(top, tables.onegram(layer)[code])
        occurrences, neighbour = tables.vocabulary()
        assert np.array_equal(np.bincount([rows["token_id"][i] for i in mine], minlength=6144), occurrences[code])
    seen = np.flatnonzero(occurrences.sum(axis=0))
    assert np.array_equal(neighbour[seen], seen)
    assert np.isin(neighbour, seen).all()


def test_the_two_gram_counts_both_parts_together(folder, rows):
    tables = open_tables(folder / "tables")
    found = tables.bigram(tables.layers[2])
    by_hand = Counter(
        (rows["experts_00"][i][0], rows["experts_01"][i][0], expert)
        for i in of_part(rows, "fit") + of_part(rows, "validation")
        for expert in rows["experts_02"][i]
    )
    theirs = zip(*(found[name].tolist() for name in ("first", "second", "expert")), strict=True)
    assert dict(zip(theirs, found["count"].tolist(), strict=True)) == by_hand


def test_samples_read_alike(folder):
    tables = open_tables(folder / "tables")
    for part in ("fit", "validation"):
        mine = read_samples(folder / "tables", part)
        for layer, theirs in zip(tables.layers, tables.samples(part), strict=True):
            assert mine[f"experts_{layer.id:02d}"] == theirs.experts.tolist()
            assert mine["token_id"] == theirs.token_id.tolist()
            assert [mine["block"].index(block) for block in sorted(set(mine["block"]))] == theirs.block_start[
                :-1
            ].tolist()


def test_shards_add_up_to_the_tables(folder):
    shards = [folder / f"tables-{number}-of-2" for number in (1, 2)]
    added = sum((Counter(read_counts(shard, "02")) for shard in shards), Counter())
    assert added == read_counts(folder / "tables", "02")
    assert [read_manifest(shard)[0]["parameters"]["shard"] for shard in shards] == [
        {"number": 1, "of": 2},
        {"number": 2, "of": 2},
    ]


def test_a_placement_reads_alike_and_its_hash_is_in_the_manifest(folder):
    theirs = smoe_read_placement(open_artefact(folder / "placement-ep2", "placement"))
    mine = read_placement(folder / "placement-ep2")
    assert tuple(mine) == theirs.layer_ids
    slots = np.array([row for row, _ in mine.values()])
    assert np.array_equal(slots, theirs.physical_to_logical)
    assert all(hosts == theirs.slot_to_rank.tolist() for _, hosts in mine.values())
    said = read_manifest(folder / "placement-ep2")[0]["parameters"]["map_sha256"]
    assert said == hashlib.sha256(slots.astype("<u2").tobytes()).hexdigest()


def test_the_run_time_tables_give_the_scores_of_every_predictor(folder, trace):
    artefact = open_artefact(folder / "placement-ep2", "placement")
    mine = Runtime(folder / "placement-ep2/runtime.safetensors")
    arrays, metadata = read_runtime(artefact)
    placement, index = smoe_read_placement(artefact), 2
    layer, hosts = layer_predictors(arrays, metadata, index), placement.hosts[index]
    labels = [rank_labels(trace.experts(one, "heldout"), placement.hosts[i]) for i, one in enumerate(trace.layers)]
    record = gate_record(folder / "trace")
    gates = record.rows(trace.layers[index], "heldout", 60)
    features, _ = read_linear(folder / "trace/linear", "02")
    early = pq.read_table(folder / "trace/part-00000.parquet").filter(
        [split == "heldout" for split in read_trace(folder / "trace")["split"]]
    )
    ids = early["token_id"].to_pylist()
    context = Context(np.array(ids[:60]), labels[0][:60], labels[1][:60], gates.early, gates.features)
    theirs = {name: score(layer, name, context, hosts, 2) for name in layer.available()}
    assert {name.value for name in theirs} == {"token", "markov", "paper", "early-gate", "linear", "fused"}
    for t in range(60):
        two, one = int(labels[0][t]), int(labels[1][t])
        parts = [
            mine.token(index, ids[t]),
            mine.markov(index, two, one),
            mine.early_gate(index, gates.early[t]),
            mine.linear(index, features[t]),
        ]
        for name, scores in zip(("token", "markov", "early-gate", "linear"), parts, strict=True):
            assert np.array_equal(scores, theirs[Predictor(name)][t]), name
        assert np.array_equal(mine.paper(index, ids[t], two, one), theirs[Predictor.PAPER][t])
        assert np.array_equal(mine.fused(index, parts), theirs[Predictor.FUSED][t])
    assert mine.tensors["token_rank"].tolist() == mine.tensors["token_scores"].argmax(axis=2).tolist()
    assert mine.tensors["token_confidence"].tolist() == mine.tensors["token_scores"].max(axis=2).tolist()
    assert mine.chosen()[index] == layer.chosen


def test_a_checkpoints_experts_are_those_its_map_names(folder):
    runtime = Runtime(folder / "checkpoint-ep2/smoe/runtime.safetensors")
    assert runtime.facts["layout"] == "checkpoint"
    with (
        safe_open(BUNDLED / "tiny-mixtral/model.safetensors", "pt") as source,
        safe_open(folder / "checkpoint-ep2/model.safetensors", "pt") as copy,
    ):
        name = next(key for key in source.keys() if "layers.1." in key and key.endswith("gate.weight"))  # noqa: SIM118
        for slot, expert in enumerate(runtime.tensors["physical_to_logical"][1]):
            assert (copy.get_tensor(name)[slot] == source.get_tensor(name)[int(expert)]).all()


def test_the_figures_of_an_evaluation_are_what_the_trace_and_the_placement_give(folder, rows):
    document = json.loads((folder / "evaluation-ep2/evaluation.json").read_text())
    mine, layers = of_part(rows, "heldout"), read_placement(folder / "placement-ep2")
    assert document["context"]["rows"] == len(mine)
    quota, means = -(-len(mine) // 2), []
    assert len(mine) <= document["context"]["batch"]
    for layer, (slots, hosts) in layers.items():
        rank = dict(zip(slots, hosts, strict=True))
        needed = [{rank[e] for e in rows[f"experts_{layer:02d}"][i]} for i in mine]
        local = [sum(rank[e] == t // quota for e in rows[f"experts_{layer:02d}"][i]) for t, i in enumerate(mine)]
        figures = document["layers"][str(layer)]["placed"]["none"]["rule"]
        assert figures["lar"] == pytest.approx(sum(local) / (2 * len(mine)))
        assert figures["fanout"] == pytest.approx(np.mean([len(held) for held in needed]))
        remote = np.mean([len(held - {t // quota}) for t, held in enumerate(needed)])
        assert figures["remote_fanout"] == pytest.approx(remote)
        assert figures["wire_rows"]["sp-ep"] == pytest.approx(2 + 2 * remote)
        load = Counter(rank[e] for i in mine for e in rows[f"experts_{layer:02d}"][i])
        assert document["detail"]["layers"][str(layer)]["rank_load"]["placed"] == [load[0], load[1]]
        means.append(figures["lar"])
    assert document["total"]["placed"]["none"]["rule"]["lar"] == pytest.approx(np.mean(means))


@pytest.mark.parametrize("target", TARGETS)
def test_an_exported_file_has_the_slots_of_the_placement(folder, target):
    import torch

    wanted = [slots for slots, _ in read_placement(folder / "placement-ep2").values()]
    path = folder / f"placement-ep2.{target}.{TARGETS[target]}"
    content = torch.load(path) if path.suffix == ".pt" else yaml.safe_load(path.read_text())
    match target:
        case "sglang" | "sglang-pt":
            assert np.array_equal(content["physical_to_logical_map"], wanted)
        case "trtllm":
            assert list(content["initial_global_assignments"].values()) == wanted
            assert (content["num_slots"], content["layer_updates_per_iter"]) == (8, 0)
        case "eplb":
            assert content["phy2log"].tolist() == wanted
            copies = content["log2phy"]
            for layer, row in enumerate(wanted):
                assert [row.index(e) for e in range(8)] == copies[layer, :, 0].tolist()
            assert (content["logcnt"] == 1).all()
        case "ascend":
            held = [[device["device_expert"] for device in one["device_list"]] for one in content["layer_list"]]
            assert [[expert for device in layer for expert in device] for layer in held] == wanted


@pytest.mark.parametrize("name", ["artefacts", "trace", "tables", "placement", "runtime", "evaluation"])
def test_what_a_page_shows_to_read_a_file_reads_it(folder, name):
    [text] = re.findall(r"^```python\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)
    found = {}
    with chdir(folder.parent):
        exec(compile(text, f"{name}.md", "exec"), found)  # the page is ours
    match name:
        case "artefacts":
            assert found["identity"] == open_artefact(folder / "placement-ep2", "placement").id
        case "trace":
            assert found["experts"].shape == (found["fit"].num_rows, 2)
        case "tables":
            assert found["expected"].groupby("token_id").sum().to_numpy() == pytest.approx(2)
        case "placement":
            slots = [row for row, _ in read_placement(folder / "placement-ep2").values()]
            assert found["physical_to_logical"].tolist() == slots
        case "runtime":
            assert found["ranks"] == 2
        case "evaluation":
            assert found["lar"] == pytest.approx(np.mean(list(found["by_layer"].values())))


# Nothing that is written is left out of its page.


def test_every_manifest_key_is_on_its_page(folder):
    said = said_on(page("artefacts"))
    for name in ("trace", "tables", "placement-ep2", "checkpoint-ep2", "evaluation-ep2"):
        manifest, _ = read_manifest(folder / name)
        manifest["parameters"] = {}
        manifest["files"] = {"any": next(iter(manifest["files"].values()))}
        assert written_keys(manifest, skip=("files",)) - {"any"} <= said
        assert manifest["kind"] in said
        record = folder / name / "smoe" if name.startswith("checkpoint") else folder / name
        assert set(json.loads((record / "run.json").read_text())) <= said


@pytest.mark.parametrize(
    ("name", "on"),
    [("trace", "trace"), ("tables", "tables"), ("tables-1-of-2", "tables"), ("placement-ep2", "placement")],
)
def test_every_file_column_and_parameter_is_on_its_page(folder, name, on):
    said = said_on(page(on)) | (said_on(page("trace")) if on == "tables" else set())  # linear/ is as in the trace
    parameters = read_manifest(folder / name)[0]["parameters"]
    assert files_of(folder / name) <= said
    assert columns_of(folder / name) <= said
    assert written_keys(parameters, skip=("rows", "blocks")) - {"fit", "validation", "heldout"} <= said


def test_every_tensor_of_a_trace_and_tables_is_on_its_page(folder):
    assert tensors_of(folder / "trace") <= {word for text in said_on(page("trace")) for word in text.split(", ")}
    own = {name for path in (folder / "tables").glob("*.safetensors") for name in tensor_names(path)}
    assert own <= said_on(page("tables"))


def tensor_names(path):
    with safe_open(path, "numpy") as file:
        return list(file.keys())


def test_every_run_time_tensor_and_fact_is_on_its_page(folder):
    for name in ("placement-ep2", "checkpoint-ep2/smoe"):
        assert tensors_of(folder / name) <= said_on(page("runtime"))
    map_alone = tensors_of(folder.parent / "map/placement-ep2")
    assert map_alone == {"format_version", "layout", "num_ranks", "predictors", "layer_ids", "physical_to_logical"}


def test_every_parameter_and_file_of_checkpoints_maps_and_inverses_is_on_their_page(folder):
    said = said_on(page("checkpoint"))
    [inverse] = folder.glob("inverse-*")
    for path, record in ((folder / "checkpoint-ep2", "smoe"), (folder / "map-ep2", "."), (inverse, "smoe")):
        manifest, _ = read_manifest(path)
        assert manifest["kind"] in said | {"checkpoint", "map"}
        assert set(manifest["parameters"]) <= said
        assert {file.name for file in (path / record).iterdir()} <= {word for text in said for word in text.split(", ")}
    assert read_placement(folder / "map-ep2") == read_placement(folder / "placement-ep2")
    assert Runtime(folder / "map-ep2/runtime.safetensors").facts["layout"] == "map"


def test_every_key_of_the_solvers_log_is_on_its_page(folder):
    said = said_on(page("placement"))
    for line in (folder / "placement-ep2/solver.jsonl").read_text().splitlines():
        found = json.loads(line)
        assert {key for key in written_keys(found | {"reasons": {}}) if key not in said} == set()


def test_every_key_of_an_evaluation_is_on_its_page(folder):
    document = json.loads((folder / "evaluation-ep2/evaluation.json").read_text())
    groups = {"layers", "by_source", "by_phase", "by_frequency"}
    states = {*document["total"], *(p for state in document["total"].values() for p in state)}
    said = said_on(page("evaluation"))
    assert written_keys(document, skip=groups) - said == set()
    assert states <= said


def test_every_key_of_a_reports_document_is_on_its_page(folder):
    document = smoe("report", "--json", cwd=folder.parent).json()
    assert not document["missing"]
    said = said_on(page("report"))
    names = {*document["sections"]["prediction"]["predictors"], *document["sections"]["traffic"]["states"]}
    ways = {"ar-ep", "sp-ep", "speculative", "dp-ep", "replicated"}
    assert written_keys(document) - said - names - ways == set()
    assert document["verdict"]["answer"] in said


def test_every_key_of_an_exported_file_is_on_the_page(folder):
    import torch

    said = said_on(page("engines"))
    for target, suffix in TARGETS.items():
        path = folder / f"placement-ep2.{target}.{suffix}"
        content = torch.load(path) if suffix == "pt" else yaml.safe_load(path.read_text())
        assert {key for key in written_keys(content) if isinstance(key, str)} <= said
        assert f"## {target}" in page("engines") or target in page("engines")


def test_every_column_of_counts_by_pair_and_by_expert_is_on_the_page(tmp_path, trace):
    layer, said = trace.layers[0], said_on(page("trace"))
    for level, keys in ((Level.PAIR, ("expert", "other")), (Level.COUNT, ("expert",))):
        entries = {name: np.array([0, 1]) for name in (*keys, "count")}
        with publish(tmp_path / level, "trace", parameters={}, model={}) as draft:
            write_level(draft.path, layer, level, {"fit": entries})
        assert columns_of(tmp_path / level) == {*keys, "count", "split"} <= said
        assert read_counts(tmp_path / level, layer.label) == {("fit", *[1] * len(keys)): 1}


def test_a_workload_is_what_the_page_says(folder, trace, tmp_path):
    from smoe_cli.benching import record_workload

    path, tables = tmp_path / "w.safetensors", open_tables(folder / "tables")
    chosen = open_artefact(folder / "placement-ep2", "placement")
    record_workload(chosen, tables, trace, layer_id=1, hidden=64, width=32).save(path)
    with safe_open(path, "numpy") as file:
        assert list(file.metadata()) == ["workload"]
        facts = json.loads(file.metadata()["workload"])
        names = {re.sub(r"scores/[^/]+/[^/]+", "scores/PLACEMENT/PREDICTOR", name) for name in file.keys()}  # noqa: SIM118
        mine = read_trace(folder / "trace")
        experts = [mine["experts_01"][i] for i in of_part(mine, "heldout")]
        assert file.get_tensor("experts").tolist() == experts
    said = {word for text in said_on(page("machines")) for word in text.split(", ")}
    assert names <= said
    assert written_keys(facts) <= said
