"""Extra slots from cocluster to regroup: what the files hold, what is measured, counted again row by row."""

import json
import shutil
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from smoe_cli.evaluation.requests import Requests
from smoe_cli.placement import Placement, contiguous_placement, read_placement, write_placement
from smoe_cli.placing.solve_options import check_ep
from smoe_profiles.artefact import open_artefact
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_solvers.assignment import assign_rule
from smoe_solvers.redundancy import Copies
from tests.cli.test_evaluate import short_texts
from tests.conftest import smoe

EXPERTS, TOP_K, BATCH = 8, 2, 64
PLACEMENTS = {"placement-ep4": (4, 3), "placement-ep3": (3, 3)}
"""Ranks and slots a rank, with one extra slot each; three ranks cannot share eight experts equally."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny-mixtral, eight experts, up to evaluated placements with copies."""
    path = tmp_path_factory.mktemp("redundant") / "out"
    file = path.parent / "texts.jsonl"
    texts = [*short_texts("fit", 40), *short_texts("heldout", 20)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    smoe("profile", "--model", "tiny-mixtral", "--dataset", file, "-C", path, cwd=path.parent)
    smoe("build-tables", "-C", path, cwd=path.parent)
    return path


@pytest.fixture(scope="module")
def made(folder):
    """What cocluster prints, by placement."""
    common = ("--redundant", "1", "--effort", "fast", "--jobs", "1", "-C", folder, "--json")
    return {
        name: smoe("cocluster", "--ep", ranks, *common, cwd=folder).json() for name, (ranks, _) in PLACEMENTS.items()
    }


@pytest.fixture(scope="module")
def measured(folder, made):
    common = ("--batch", BATCH, "-C", folder, "--json")
    return {name: smoe("evaluate", "--placement", name, *common, cwd=folder).json() for name in made}


def hosts_of(folder, name, layer):
    """The ranks of every expert, from the file."""
    table = pq.read_table(folder / name / "placement.parquet").to_pandas()
    mine = table[table.layer == layer]
    return [set(mine[mine.logical == e]["rank"]) for e in range(EXPERTS)]


def served(row, home, hosts):
    """The rank that serves each expert: home, else the first of the smallest sets of other ranks that hold the rest."""
    foreign = [e for e in row if home not in hosts[e]]
    ranks = sorted(set().union(*hosts) - {home})
    chosen = next(
        some for size in range(len(foreign) + 1) for some in combinations(ranks, size)
        if all(hosts[e] & set(some) for e in foreign)
    )  # fmt: skip
    return [home if home in hosts[e] else min(hosts[e] & set(chosen)) for e in row]


def spread(row, hosts):
    """The least number of ranks that hold a row's experts."""
    ranks = sorted(set().union(*hosts))
    fits = (
        size
        for size in range(1, TOP_K + 1)
        for some in combinations(ranks, size)
        if all(hosts[e] & set(some) for e in row)
    )
    return next(fits)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_rank_has_its_slots_and_every_expert_one(name, folder, made):
    ranks, slots = PLACEMENTS[name]
    table = pq.read_table(folder / name / "placement.parquet").to_pandas()
    for _, layer in table.groupby("layer"):
        assert layer["rank"].tolist() == np.repeat(range(ranks), slots).tolist()
        assert layer.physical.tolist() == list(range(ranks * slots))
        assert set(layer.logical) == set(range(EXPERTS))
        assert all(len(set(mine.logical)) == slots for _, mine in layer.groupby("rank"))
    runtime = load_file(folder / name / "runtime.safetensors")
    assert runtime["physical_to_logical"].reshape(-1).tolist() == table.logical.tolist()
    assert made[name]["extra_slots"] == ranks * slots / EXPERTS - 1


def test_the_log_and_the_document_say_what_the_copies_gained(folder, made):
    document = made["placement-ep4"]
    lines = [json.loads(line) for line in (folder / "placement-ep4/solver.jsonl").read_text().splitlines()]
    assert lines == document["layers"]
    for line in lines:
        plain, filled, copies = line["stages"][-3:]
        assert (filled["name"], copies["name"]) == ("filled", "copies")
        assert line["objective"] == copies["objective"] < plain["objective"]
        assert copies["lar"] > plain["lar"]
        assert 0 < line["validation_gain_of_copies"] < line["validation_gain"]
        assert line["certificate"]["kind"] == "unknown"  # what is proved is of placements without copies


def test_placed_again_it_is_the_same_bytes_and_the_memory_is_told(folder, made):
    assert set(made) == set(PLACEMENTS)
    files = [folder / "placement-ep4" / file for file in ("placement.parquet", "runtime.safetensors", "solver.jsonl")]
    before = [file.read_bytes() for file in files]
    options = ("--ep", 4, "--redundant", 1, "--effort", "fast", "--jobs", 1, "--force")
    shown = smoe("cocluster", *options, "-C", folder, cwd=folder).out
    assert [file.read_bytes() for file in files] == before
    assert "1 extra slots a rank, +50.0% expert slots" in shown


@pytest.mark.parametrize("name", PLACEMENTS)
def test_figures_count_served_copies(name, folder, measured):
    """Scores from the token table of the run time, the served rule, then every row by hand."""
    ranks, _ = PLACEMENTS[name]
    rows = pq.read_table(folder / "trace/part-00000.parquet").to_pandas()
    rows = rows[rows.split == "heldout"].reset_index(drop=True)
    runtime = load_file(folder / name / "runtime.safetensors")
    for index, layer in enumerate(runtime["layer_ids"].tolist()):
        hosts = hosts_of(folder, name, layer)
        scores = runtime["token_scores"][index][rows.token_id]
        parts = [scores[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        home = np.concatenate([assign_rule(part, -(-len(part) // ranks)) for part in parts]).tolist()
        local, needed, remote, load = 0, 0, 0, [0] * ranks
        for row, here in zip(rows[f"experts_{layer:02d}"], home, strict=True):
            by = served(row, here, hosts)
            local += by.count(here)
            needed += spread(row, hosts)
            remote += len(set(by) - {here})
            for g in by:
                load[g] += 1
        found = measured[name]["layers"][str(layer)]["placed+shuffled"]["token"]["rule"]
        assert found["lar"] == pytest.approx(local / (TOP_K * len(rows)))
        assert found["fanout"] == pytest.approx(needed / len(rows))
        assert found["remote_fanout"] == pytest.approx(remote / len(rows))
        assert found["load_imbalance"] == pytest.approx(max(load) / np.mean(load))


def test_requests_of_several_homes_are_served_from_each(folder, measured):
    """Round robin under attention-DP: every held-out sequence at the rank of its turn."""
    rows = pq.read_table(folder / "trace/part-00000.parquet").to_pandas()
    rows = rows[rows.split == "heldout"].sort_values(["sequence", "position"])
    turn = {sequence: number % 4 for number, sequence in enumerate(sorted(set(rows.sequence)))}
    for layer, states in measured["placement-ep4"]["dp-ep"]["layers"].items():
        hosts, load, local, remote = hosts_of(folder, "placement-ep4", int(layer)), [0] * 4, 0, 0
        for sequence, row in zip(rows.sequence, rows[f"experts_{int(layer):02d}"], strict=True):
            by = served(row, turn[sequence], hosts)
            local += by.count(turn[sequence])
            remote += len(set(by) - {turn[sequence]})
            for g in by:
                load[g] += 1
        found = states["placed"]["none"]["rule"]
        assert found["lar"] == pytest.approx(local / sum(load))
        assert found["remote_fanout"] == pytest.approx(remote / len(rows))
        assert found["load_imbalance"] == pytest.approx(max(load) / np.mean(load))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_sequence_of_several_requests_is_served_from_the_home_of_each(seed):
    generator = np.random.default_rng(seed)
    size = generator.integers(1, 6, 3)
    order, start = generator.permutation(size.sum()), np.concatenate([[0], np.cumsum(size)])
    sequence, length, home = (generator.integers(low, high, 8) for low, high in ((0, 3), (1, 12), (0, 4)))
    experts = np.argsort(generator.random((size.sum(), 6)), axis=1)[:, :3]
    hosts = generator.random((6, 4)) < 0.4
    hosts[np.arange(6), generator.integers(0, 4, 6)] = True
    requests = Requests(order, start, sequence, length, length, {})
    served_by_rank, needed = requests.serve(Copies(experts, hosts), home.astype(np.int32))
    by_expert = [set(np.flatnonzero(row).tolist()) for row in hosts]
    for r in range(8):
        rows = order[start[sequence[r]] : start[sequence[r] + 1]]
        by = [served(experts[rows[i % len(rows)]], int(home[r]), by_expert) for i in range(length[r])]
        assert served_by_rank[r].tolist() == [sum(row.count(g) for row in by) for g in range(4)]
        assert needed[r].tolist() == [sum(g in row for row in by) for g in range(4)]


def test_contiguous_with_extra_slots_is_what_engines_start_from():
    placement = contiguous_placement((3,), 60, 8, 1)
    assert placement.physical_to_logical.tolist() == [[*range(60), 0, 1, 2, 3]]
    assert placement.hosts[0].sum(axis=0).tolist() == [8] * 8


def test_sixty_experts_on_eight_ranks_are_refused_with_the_way_out():
    layers = [{"id": 3, "num_experts": 60}]
    with pytest.raises(ImpossibleError, match=r"60 experts .layer 3. .* 8 ranks.* or --redundant 1 for 64 slots"):
        check_ep(layers, 8, whole_groups=False)
    check_ep(layers, 8, whole_groups=False, redundant=1)


def test_copies_keep_more_local_than_the_placement_they_were_added_to(folder, measured):
    smoe("cocluster", "--ep", 4, "--effort", "fast", "--jobs", 1, "--name", "plain", "-C", folder, cwd=folder)
    plain = smoe(
        "evaluate", "--placement", "placement-ep4-plain", "--batch", BATCH, "-C", folder, "--json", cwd=folder
    ).json()
    with_copies = measured["placement-ep4"]
    for state in ("placed", "placed+shuffled", "oracle"):
        for predictor, figures in with_copies["total"][state].items():
            assert figures["rule"]["lar"] > plain["total"][state][predictor]["rule"]["lar"] + 0.02
            assert figures["rule"]["remote_fanout"] < plain["total"][state][predictor]["rule"]["remote_fanout"]


@pytest.mark.usefixtures("made")
def test_inspect_tells_how_many_experts_have_copies(folder):
    document = smoe("inspect", folder / "placement-ep4", "--json", cwd=folder).json()
    assert document["slots"] == 12
    for name, layer in document["layers"].items():
        hosts = hosts_of(folder, "placement-ep4", int(name))
        assert layer["copied"] == {str(e): len(ranks) for e, ranks in enumerate(hosts) if len(ranks) > 1}
        assert layer["moved"] == sum(e // 2 not in ranks for e, ranks in enumerate(hosts))
    shown = smoe("inspect", folder / "placement-ep4", cwd=folder).out
    assert "12 slots" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("made")
def test_a_checkpoint_of_copies_is_refused_and_a_map_is_written(folder):
    refused = smoe(
        "regroup", "--placement", "placement-ep4", "--layout", "checkpoint", "-C", folder, cwd=folder, code=4
    )
    assert "--layout map" in refused.err
    smoe("regroup", "--placement", "placement-ep4", "-C", folder, cwd=folder)
    written = load_file(folder / "map-ep4/runtime.safetensors")
    kept = read_placement(open_artefact(folder / "map-ep4", "map"))
    assert kept.redundant
    assert written["physical_to_logical"].tolist() == kept.physical_to_logical.tolist()
    smoe("verify", "--placement", "placement-ep4", "-C", folder, cwd=folder)


@pytest.mark.usefixtures("made")
def test_an_expert_twice_on_a_rank_is_found_when_a_placement_is_read(folder, tmp_path):
    """Engines lose such a slot without a word."""
    artefact = open_artefact(shutil.copytree(folder / "placement-ep4", tmp_path / "placement-ep4"), "placement")
    slots = np.array([[0, 1, 1, 2, 3, 4, 5, 6, 7]])
    write_placement(artefact.path / "placement.parquet", Placement((0,), slots, 3))
    with pytest.raises(InputError, match="layer 0 holds an expert twice on one rank"):
        read_placement(artefact)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--ep", "3"], 4, "--redundant 1 for 9 slots"),
        (["--ep", "4", "--redundant", "7"], 4, "at most 6 extra slots"),
        (["--ep", "9", "--redundant", "1"], 4, "2 to 8 ranks"),
        (["--ep", "4", "--redundant", "-1"], 2, "--redundant"),
        (["--ep", "4", "--redundant", "1", "--goal", "ilp"], 2, "--goal ilp"),
        (["--ep", "4", "--redundant", "1", "--nodes", "2"], 2, "--nodes"),
        (["--ep", "4", "--redundant", "1", "--compare"], 2, "--compare"),
        (["--ep", "4", "--redundant", "1", "--groups", "whole"], 4, "--groups whole"),
    ],
)
def test_what_extra_slots_cannot_do_is_refused_before_any_work(options, code, named, folder):
    refused = smoe("cocluster", *options, "--name", "refused", "-C", folder, cwd=folder, code=code)
    assert named in refused.err
    assert not list(folder.glob("placement-*refused"))


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_bench_of_copies_or_unequal_ranks_is_refused_before_its_processes_fail(name, folder):
    said = smoe("bench", "--placement", name, "--cpu", "--tokens", "64", "-C", folder, cwd=folder, code=4).err
    assert f"{name} has copies of experts, or ranks with unequally many" in said
