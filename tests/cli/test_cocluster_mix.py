"""smoe cocluster with sources weighed, unequal ranks, and an old placement to stay near."""

import json

import numpy as np
import pytest

from smoe_cli.placement import read_placement
from smoe_profiles.artefact import open_artefact
from tests.conftest import smoe

FAST = ("--effort", "fast")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables of two sources, one three times as long as the other."""
    where = tmp_path_factory.mktemp("mix")
    generator = np.random.default_rng(0)
    layers = np.arange(2)
    for name, rows, favourites in (("law", 9000, (0, 1, 2, 3)), ("code", 3000, (0, 4, 5, 1))):
        heat = np.full(8, 0.05)
        heat[list(favourites)] = 1.0
        ids = np.stack(
            [[generator.choice(8, 2, replace=False, p=heat / heat.sum()) for _ in range(rows)] for _ in layers]
        )
        np.savez(
            where / f"{name}.npz",
            ids=ids.astype(np.uint8),
            tokens=generator.integers(0, 50, rows).astype(np.uint32),
            seq_len=np.full(rows // 100, 100, np.int32),
            layer_ids=layers.astype(np.uint8),
            num_experts=8,
            top_k=2,
            vocab_size=50,
        )
    smoe("import", "law.npz", "code.npz", cwd=where)
    smoe("build-tables", cwd=where)
    return where


def solved(folder, name, *options):
    found = smoe(
        "cocluster", *FAST, "--goal", "fanout", "--name", name, *options, "--force", "--json", cwd=folder
    ).json()
    placement = read_placement(open_artefact(folder / found["path"], "placement"))
    return found, placement


def test_what_each_source_gains_is_told(folder):
    found, _ = solved(folder, "plain", "--ep", 4)
    assert set(found["gains_by_source"]) == {"law", "code"}
    assert found["mix"] is None


def test_a_mix_of_one_source_serves_that_source_best(folder):
    by_mix = {name: solved(folder, name, "--ep", 4, "--mix", f"{name}=1")[0] for name in ("law", "code")}
    for name, other in (("law", "code"), ("code", "law")):
        assert by_mix[name]["gains_by_source"][name] >= by_mix[other]["gains_by_source"][name]


def test_balanced_sources_have_equal_parts(folder):
    found, _ = solved(folder, "balanced", "--ep", 4, "--balance-sources")
    assert dict(map(tuple, found["mix"])) == {"law": 0.5, "code": 0.5}


def test_a_robust_mix_is_the_one_whose_worst_source_gains_most_of_those_tried(folder):
    found, _ = solved(folder, "robust", "--ep", 4, "--robust")
    best = max(found["mixes_tried"], key=lambda one: one["worst"])
    assert dict(map(tuple, found["mix"])) == best["mix"]
    assert found["mixes_tried"][0]["mix"] == {"code": 0.5, "law": 0.5}


def test_a_rerun_that_stays_near_moves_nothing_where_nothing_changed(folder):
    _, old = solved(folder, "old", "--ep", 4)
    found, near = solved(folder, "near", "--ep", 4, "--from", "placement-ep4-old")
    assert (near.expert_to_rank == old.expert_to_rank).all()
    assert sum(layer["moved"] for layer in found["layers"]) == 0
    assert found["start"] == open_artefact(folder / "smoe-out/placement-ep4-old", "placement").id


def test_a_rerun_moves_fewer_experts_than_a_new_search(folder):
    _, old = solved(folder, "law-only", "--ep", 4, "--mix", "law=1")
    _, fresh = solved(folder, "fresh", "--ep", 4)
    _, near = solved(folder, "kept", "--ep", 4, "--from", "placement-ep4-law-only")
    away = [(one.expert_to_rank != old.expert_to_rank).sum() for one in (fresh, near)]
    assert away[1] <= away[0]


def test_unequal_ranks_hold_one_expert_more_from_the_first_on(folder):
    _, placement = solved(folder, "uneven", "--ep", 3, "--uneven")
    for ranked in placement.expert_to_rank:
        assert np.bincount(ranked).tolist() == [3, 3, 2]
    smoe("evaluate", "--placement", "placement-ep3-uneven", cwd=folder)
    smoe("inspect", "placement-ep3-uneven", cwd=folder)
    said = smoe("export", "--to", "eplb", "--placement", "placement-ep3-uneven", cwd=folder, code=2).err
    assert "--model" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--robust", "--mix", "law=1"), "both weigh the sources"),
        (("--mix", "poems=1"), "the tables' sources are code, law"),
        (("--from", "placement-ep4-old", "--redundant", "1"), "do not go together"),
        (("--uneven", "--redundant", "1"), "extra slots make ranks equal"),
        (("--goal", "time", "--nodes", "2"), "equally far apart"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_solved(folder, options, said):
    solved(folder, "old", "--ep", 4)
    assert said in smoe("cocluster", "--ep", 4, "--name", "no", *options, cwd=folder, code=2).err
    assert not (folder / "smoe-out/placement-ep4-no").exists()


def test_a_placement_for_other_ranks_is_nothing_to_stay_near(folder):
    solved(folder, "two", "--ep", 2)
    said = smoe("cocluster", "--ep", 4, "--name", "x", "--from", "placement-ep2-two", cwd=folder, code=3).err
    assert "on 2 ranks; --from needs 8 of 2 on 4" in said


def test_the_log_says_which_mix_a_placement_was_made_for(folder):
    solved(folder, "named", "--ep", 4, "--mix", "law=3", "--mix", "code=1")
    manifest = json.loads((folder / "smoe-out/placement-ep4-named/manifest.json").read_text())
    assert manifest["parameters"]["mix"] == [["law", 0.75], ["code", 0.25]]
