"""smoe build-tables as a command: shards and merges, several traces, and what is refused with which code."""

import json
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures/routing"
THREE_LAYERS, ONE_LAYER = FIXTURES / "gptoss20b_layers.npz", FIXTURES / "gptoss20b_layer12.npz"


def manifest(folder):
    return json.loads((folder / "smoe-out/tables/manifest.json").read_text())


@pytest.fixture
def imported(run_smoe, tmp_path):
    run_smoe("import", THREE_LAYERS, "--source", "chat", cwd=tmp_path)
    return tmp_path


def test_shards_made_in_any_order_merge_into_the_very_tables(run_smoe, imported):
    document = run_smoe("build-tables", "--min-count", 2, "--seed", 3, "--json", cwd=imported).json()
    assert (document["min_count"], document["seed"], document["sources"]) == (2, 3, ["chat"])
    whole = manifest(imported)
    for number in (2, 1, 3):
        out = run_smoe("build-tables", "--shard", f"{number}/3", "--seed", 3, cwd=imported)
        assert f"tables-{number}-of-3: shard {number} of 3 of 3 MoE layers" in out.out
        assert "next: smoe build-tables --merge" in out.err
    run_smoe("build-tables", "--merge", "--min-count", 2, "--hashes", "--force", cwd=imported)
    assert manifest(imported) == whole


def test_merging_says_which_shard_is_missing(run_smoe, imported):
    assert "holds no shards" in run_smoe("build-tables", "--merge", cwd=imported, code=3).err
    run_smoe("build-tables", "--shard", "2/3", cwd=imported)
    assert "lacks shard 1, 3 of 3" in run_smoe("build-tables", "--merge", cwd=imported, code=3).err
    assert "exists already" in run_smoe("build-tables", "--shard", "2/3", cwd=imported, code=4).err


def test_a_seed_that_is_not_the_shards_is_refused(run_smoe, imported):
    run_smoe("build-tables", "--shard", "1/1", "--seed", 2, cwd=imported)
    assert "were made with seed 2" in run_smoe("build-tables", "--merge", "--seed", 1, cwd=imported, code=2).err
    run_smoe("build-tables", "--merge", "--seed", 2, cwd=imported)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/2/3", "a/b", "-1/2", "1/0", "1/9999999", "¹/2"])
def test_a_shard_that_is_none_is_a_usage_error(run_smoe, imported, shard):
    assert "i/n is meant" in run_smoe("build-tables", f"--shard={shard}", cwd=imported, code=2).err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--merge", "--shard", "1/2"), "leave out --trace and --shard"),
        (("--merge", "--trace", "t"), "leave out --trace and --shard"),
        (("--shard", "1/2", "--min-count", "2"), "belong to the whole"),
        (("--shard", "1/2", "--model", "mixtral-8x7b"), "belong to the whole"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(run_smoe, imported, options, message):
    assert message in run_smoe("build-tables", *options, cwd=imported, code=2).err


def test_several_traces_go_into_one_set_of_tables(run_smoe, imported):
    run_smoe("import", THREE_LAYERS, "--source", "code", "-C", "other", cwd=imported)
    traces = ("--trace", "smoe-out/trace", "--trace", "other/trace")
    document = run_smoe("build-tables", *traces, "--json", cwd=imported).json()
    one = json.loads((imported / "other/trace/manifest.json").read_text())["parameters"]["rows"]
    assert document["sources"] == ["chat", "code"]
    assert document["rows"] == {part: 2 * one[part] for part in ("fit", "validation")}
    assert len(manifest(imported)["parents"]) == 2


def test_traces_of_two_models_are_an_input_error(run_smoe, imported):
    run_smoe("import", ONE_LAYER, "-C", "other", cwd=imported)
    traces = ("--trace", "smoe-out/trace", "--trace", "other/trace")
    err = run_smoe("build-tables", *traces, cwd=imported, code=3).err
    assert "smoe-out/trace is of" in err
    assert "but other/trace of" in err
    assert not (imported / "smoe-out/tables").exists()


def test_a_trace_without_token_ids_is_placed_by_popularity(run_smoe, tmp_path):
    run_smoe("import", ONE_LAYER, cwd=tmp_path)
    run_smoe("build-tables", cwd=tmp_path)
    arguments = ("cocluster", "--ep", "4", "--goal", "fanout", "--effort", "fast", "--jobs", "1", "--json")
    document = run_smoe(*arguments, cwd=tmp_path).json()
    assert document["confirmed"]
    assert document["validation_gain"] > 0
