"""The whole path on the bundled models: what each command leaves is what the next one, and the user, can rely on."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

OUT = "smoe-out"
STATES = ["contiguous", "contiguous+oracle", "oracle", "placed", "placed+shuffled", "shuffled"]


@pytest.mark.parametrize("path", ["deepseek_path", "mixtral_path"])
def test_the_regrouped_checkpoint_is_the_same_model(path, request, run_smoe):
    folder = request.getfixturevalue(path)
    found = run_smoe("verify", "--json", "--hashes", cwd=folder).json()
    assert found["passed"]
    assert found["failures"] == []
    assert found["routing"]["tokens"] > 500
    assert all(layer["mismatches"] == 0 for layer in found["routing"]["layers"])
    assert found["routing"]["logit_max_error"] <= 1e-5


def test_placing_and_shuffling_keep_more_local_on_texts_never_seen(deepseek_path, run_smoe):
    found = run_smoe("evaluate", "--trace", "other/trace", "--json", cwd=deepseek_path).json()
    assert sorted(found["total"]) == STATES
    lar = {state: next(iter(by.values()))["exact"]["lar"] for state, by in found["total"].items()}
    assert lar["contiguous"] == pytest.approx(1 / 8, abs=0.02)
    assert lar["placed"] == pytest.approx(1 / 8, abs=0.03)
    assert lar["contiguous"] < lar["shuffled"] < lar["placed+shuffled"] < lar["oracle"]
    assert lar["shuffled"] < lar["contiguous+oracle"] < lar["oracle"]
    assert len(found["layers"]) == 3
    for state in STATES:
        layers = [next(iter(layer[state].values()))["rule"]["lar"] for layer in found["layers"].values()]
        assert next(iter(found["total"][state].values()))["rule"]["lar"] == pytest.approx(np.mean(layers))


def test_evaluate_fails_a_ci_job_on_request(deepseek_path, run_smoe):
    common = ("evaluate", "--trace", "other/trace", "--max-tokens", "2048")
    run_smoe(*common, "--fail-under", "lar=.2", "--fail-over", "remote_fanout=6", cwd=deepseek_path)
    failed = run_smoe(*common, "--fail-under", "lar=.99", cwd=deepseek_path, code=5)
    assert "lar is" in failed.err
    assert "under 0.99" in failed.err
    failed = run_smoe(*common, "--fail-over", "fanout=1.0", cwd=deepseek_path, code=5)
    assert "over 1.0" in failed.err


def test_lar_of_evaluate_equals_a_count_from_the_files(mixtral_path, run_smoe):
    """placed+shuffled, exact, layer 0, recomputed from Parquet and safetensors with nothing of smoe."""
    from scipy.optimize import linear_sum_assignment

    found = run_smoe(
        "evaluate", "--trace", "other/trace", "--max-tokens", "512", "--batch", "256", "--json", cwd=mixtral_path
    )
    placement = pq.read_table(mixtral_path / OUT / "placement-ep2/placement.parquet").to_pandas()
    rank_of = placement[placement.layer == 0].set_index("logical")["rank"]
    rows = pq.read_table(mixtral_path / "other/trace/part-00000.parquet").to_pandas()[:512]
    with safe_open(mixtral_path / OUT / "placement-ep2/runtime.safetensors", "np") as file:
        scores = file.get_tensor("token_scores")[0]
    local = 0
    for start in (0, 256):
        batch = rows[start : start + 256]
        cost = np.repeat(scores[batch.token_id].astype(int), 128, axis=1)
        home = np.empty(256, int)
        row, slot = linear_sum_assignment(cost, maximize=True)
        home[row] = slot // 128
        total = cost[row, slot].sum()
        local += sum(rank_of[e] == h for experts, h in zip(batch.experts_00, home, strict=True) for e in experts)
        assert total >= 0
    measured = found.json()["layers"]["0"]["placed+shuffled"]["token"]["exact"]["lar"]
    assert measured == pytest.approx(local / 1024, abs=0.01)  # optimal assignments of equal score may differ


def test_every_manifest_names_its_parents_and_all_files(deepseek_path):
    ids = {}
    for name, kind in (("trace", "trace"), ("tables", "tables"), ("placement-ep8", "placement")):
        manifest = json.loads((deepseek_path / OUT / name / "manifest.json").read_text())
        assert manifest["kind"] == kind
        present = {
            path.relative_to(deepseek_path / OUT / name).as_posix() for path in (deepseek_path / OUT / name).rglob("*")
        }
        assert set(manifest["files"]) == present - {"manifest.json", "run.json"}
        ids[kind] = manifest
    assert [parent["kind"] for parent in ids["tables"]["parents"]] == ["trace"]
    assert [parent["kind"] for parent in ids["placement"]["parents"]] == ["tables"]


def test_the_run_time_file_holds_what_the_design_says(deepseek_path):
    with safe_open(deepseek_path / OUT / "placement-ep8/runtime.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
        scores, rank, confidence = (file.get_tensor(f"token_{name}") for name in ("scores", "rank", "confidence"))
    assert shapes == {
        "layer_ids": (3,),
        "physical_to_logical": (3, 64),
        "token_scores": (3, 6144, 8),
        "token_rank": (3, 6144),
        "token_confidence": (3, 6144),
        "markov2_scores": (3, 64, 8),
        "markov1_scores": (3, 8, 8),
        "popularity": (3, 8),
        "predictor": (3,),
        "fusion.weights": (3, 4),
    }
    assert metadata["layout"] == "map"
    assert (rank == scores.argmax(axis=2)).all()
    assert (confidence == scores.max(axis=2)).all()
    sums = scores.astype(int).sum(axis=2)
    assert abs(sums - 255).max() <= 8  # each of 8 ranks rounds by at most one
    with safe_open(deepseek_path / OUT / "checkpoint-ep8/smoe/runtime.safetensors", "np") as file:
        assert file.metadata()["layout"] == "checkpoint"


@pytest.mark.parametrize("command", ["build-tables", "cocluster", "regroup"])
def test_two_runs_give_the_same_bytes_whatever_the_jobs(command, deepseek_path, tmp_path, run_smoe):
    made = {"build-tables": "tables", "cocluster": "placement-ep8", "regroup": "checkpoint-ep8"}[command]
    for name in ("trace", "tables", "placement-ep8"):
        if name != made:
            shutil.copytree(deepseek_path / OUT / name, tmp_path / name)
    options = {"cocluster": ("--ep", "8", "--effort", "fast", "--jobs", "2")}.get(command, ())
    run_smoe(command, "-C", tmp_path, *options, cwd=tmp_path)
    one, other = deepseek_path / OUT / made, tmp_path / made
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    for path in files:
        if path.name != "run.json":
            assert (one / path).read_bytes() == (other / path).read_bytes(), path


def test_profile_gives_the_same_bytes_twice(tmp_path, run_smoe):
    common = ("profile", "--model", "tiny-mixtral", "--max-tokens", "3000")
    for name in ("one", "two"):
        run_smoe(*common, "-C", name, cwd=tmp_path)
    files = sorted((tmp_path / "one/trace").iterdir())
    assert len(files) == 3
    for path in files:
        if path.name != "run.json":
            assert path.read_bytes() == (tmp_path / "two/trace" / path.name).read_bytes()


def test_a_checkpoint_regrouped_is_another_model_to_its_own_tables(deepseek_path, run_smoe):
    checkpoint = deepseek_path / OUT / "checkpoint-ep8"
    failed = run_smoe("regroup", "--model", checkpoint, "--force", cwd=deepseek_path, code=4)
    assert "already regrouped" in failed.err
    failed = run_smoe("build-tables", "--model", checkpoint, "--force", cwd=deepseek_path, code=3)
    assert "regrouped by map" in failed.err


def test_a_contiguous_placement_has_nothing_to_gain_and_says_so(deepseek_path, run_smoe):
    shown = run_smoe(
        *("cocluster", "--ep", "4", "--method", "contiguous", "--name", "flat", "--jobs", "1"), cwd=deepseek_path
    )
    assert "nothing to gain" in shown.out
    placement = pq.read_table(deepseek_path / OUT / "placement-ep4-flat/placement.parquet")
    assert placement["physical"].equals(placement["logical"])
    failed = run_smoe("regroup", cwd=deepseek_path, code=2)
    assert "placement-ep4-flat, placement-ep8" in failed.err
    shutil.rmtree(deepseek_path / OUT / "placement-ep4-flat")


def test_dry_run_answers_for_a_model_that_is_not_here(tmp_path, run_smoe):
    shown = run_smoe("profile", "--model", "deepseek-v2", "--dry-run", cwd=tmp_path).out
    assert "moe layers: 59 (1 to 59)" in shown
    assert "experts: 160" in shown
    assert "top k: 6" in shown
    assert "3 of 8 groups" in shown
    assert "GB" in shown
    failed = run_smoe("profile", "--model", "deepseek-v2", cwd=tmp_path, code=6)
    assert "not in the cache" in failed.err
