"""Every way a command can refuse leaves with its own exit code, one sentence, and nothing half written.

Through the program's entry point, in this process; that the codes reach a shell is in `test_failures.py`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.processes import assert_one_error, contents, names
from tests.conftest import smoe
from tests.profiles.tiny_models import cached_model


def assert_refused(arguments, code: int, *named: object, cwd: Path | str = ".") -> str:
    """The code, nothing on stdout, and one `error:` on stderr that names what it must; returns stderr."""
    done = smoe(*arguments, cwd=cwd, code=code)
    assert_one_error(done.err, *named)
    assert not done.out
    return done.err


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return cached_model(tmp_path_factory.getbasetemp(), "olmoe")


# Usage.


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["--help"], 0),
        (["--version"], 0),
        (["frobnicate"], 2),
        (["--frobnicate"], 2),
        (["profile", "--frobnicate"], 2),
        (["cocluster"], 2),
        (["cocluster", "--ep", "eight"], 2),
        (["cocluster", "--ep", "4", "--theta", "2"], 2),
        (["regroup", "--layout", "sideways"], 2),
        (["evaluate", "--fail-under", "speed=1"], 2),
    ],
)
def test_usage_errors_leave_with_2_and_help_with_0(arguments, code, tmp_path):
    done = smoe(*arguments, cwd=tmp_path, code=code)
    assert "Traceback" not in done.out + done.err
    assert (done.err if code else done.out).strip() or not arguments
    assert names(tmp_path) == set()


def test_no_arguments_show_the_commands(tmp_path):
    done = smoe(cwd=tmp_path, code=2)
    assert "cocluster" in done.out + done.err


# Where a value comes from.


def chosen_folder(tmp_path, *arguments):
    """Which -C `smoe regroup` took: it says so, as there is no placement there."""
    return assert_refused(("regroup", *arguments), 3, "holds no placement", cwd=tmp_path).split()[1]


def test_a_flag_beats_a_variable_beats_the_config_beats_the_default(tmp_path, monkeypatch):
    (tmp_path / "smoe.toml").write_text('dir = "from-config"\n')
    config = ["--config", "smoe.toml"]
    assert chosen_folder(tmp_path) == "smoe-out"
    assert chosen_folder(tmp_path, *config) == "from-config"
    monkeypatch.setenv("SMOE_DIR", "from-variable")
    assert chosen_folder(tmp_path, *config) == "from-variable"
    assert chosen_folder(tmp_path, *config, "-C", "from-flag") == "from-flag"


def test_a_commands_own_table_beats_the_shared_keys_and_other_tables_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "smoe.toml").write_text('dir = "shared"\n[regroup]\ndir = "own"\n[verify]\ndir = "verify"\n')
    monkeypatch.setenv("SMOE_CONFIG", "smoe.toml")
    assert chosen_folder(tmp_path) == "own"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[regroup]\ncolour = 'red'\n", "colour"),
        ("dir = \n", "smoe.toml"),
        ("[regroup]\nlayout = 'sideways'\n", "sideways"),
        (None, "smoe.toml"),
    ],
    ids=["unknown option", "no TOML", "impossible value", "missing"],
)
def test_a_config_that_cannot_be_used_is_a_usage_error(text, named, tmp_path):
    if text:
        (tmp_path / "smoe.toml").write_text(text)
    error = smoe("regroup", "--config", "smoe.toml", cwd=tmp_path, code=2).err
    assert named in error
    assert "Traceback" not in error


# Models.


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}, "llama"),
        ({"model_type": "switch_transformers", "num_experts": 8}, "switch_transformers"),
        ({"architectures": ["SomethingNew"]}, "None"),
    ],
    ids=["dense", "unknown family", "no family"],
)
def test_a_model_without_experts_to_place_leaves_with_4(config, named, prompts, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    command = ("profile", "--model", tmp_path / "model", "--dataset", f"{prompts}#few", "-C", tmp_path / "out")
    assert_refused(command, 4, named, "config.json")
    assert names(tmp_path / "out") == set()


def test_a_model_that_is_nowhere_leaves_with_3(tmp_path):
    assert_refused(("profile", "--model", "./nothing", "-C", tmp_path / "out"), 3, "./nothing")
    assert names(tmp_path / "out") == set()


def test_a_published_model_that_is_not_cached_leaves_with_6_and_says_how_to_get_it(tmp_path):
    command = ("profile", "--model", "mixtral-8x7b", "-C", tmp_path / "out")
    assert_refused(command, 6, "hf download mistralai/Mixtral-8x7B-v0.1")
    assert names(tmp_path / "out") == set()


# Inputs.


@pytest.mark.parametrize("command", [["build-tables"], ["cocluster", "--ep", "4"], ["verify"]])
def test_a_folder_that_does_not_exist_leaves_with_3(command, tmp_path):
    assert_refused((*command, "-C", tmp_path / "nowhere"), 3, tmp_path / "nowhere")
    assert names(tmp_path) <= {"nowhere"}
    assert names(tmp_path / "nowhere") == set()


@pytest.mark.parametrize(("key", "named"), [("none", "is empty"), ("late", "token id 256")])
def test_a_data_set_that_cannot_be_profiled_leaves_with_3_and_no_trace(key, named, model, prompts, tmp_path):
    command = ("profile", "--model", model, "--dataset", f"{prompts}#{key}", "-C", tmp_path / "out")
    assert_refused(command, 3, named, "prompts.npz")
    assert names(tmp_path / "out") == set()


def test_a_hub_data_set_while_offline_leaves_with_6(model, tmp_path):
    command = ("profile", "--model", model, "--dataset", "nobody/nothing", "-C", tmp_path / "out")
    assert_refused(command, 6, "nobody/nothing")
    assert names(tmp_path / "out") == set()


def test_more_sources_than_data_sets_are_a_usage_error(model, prompts, tmp_path):
    options = ["--dataset", f"{prompts}#few", "--source", "a", "--source", "b"]
    assert_refused(("profile", "--model", model, *options, "-C", tmp_path / "out"), 2, "2 --source for 1")


def test_a_trace_with_a_flipped_byte_leaves_with_3_and_names_the_part(work):
    shutil.rmtree(work / "tables")
    part = work / "trace" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 4] ^= 0x40
    part.write_bytes(data)
    assert_refused(("build-tables", "--hashes", "-C", work), 3, "part-00000.parquet")
    assert names(work) == {"trace", "placement-ep4", "checkpoint-ep4"}


@pytest.mark.parametrize("command", ["build-tables", "regroup"])
def test_another_model_leaves_with_3_naming_both(command, work, other_model):
    if command == "build-tables":
        shutil.rmtree(work / "tables")
    if command == "regroup":
        shutil.rmtree(work / "checkpoint-ep4")
    before = names(work)
    assert_refused((command, "--model", other_model, "-C", work), 3, "mixtral with routers", "olmoe with routers")
    assert names(work) == before


def test_tables_of_another_model_leave_with_3(work):
    """The placement's tables were replaced by those of another model's trace."""
    facts = json.loads((work / "tables" / "manifest.json").read_text())
    facts["model"]["router_sha256"] = "f" * 64
    facts["parents"] = [{"kind": "trace", "id": "f" * 64}]
    (work / "tables" / "manifest.json").write_text(json.dumps(facts))
    assert_refused(("evaluate", "-C", work), 3, "placement-ep4", "tables")
    assert "evaluation-ep4" not in names(work)


# What cannot be.


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--ep", "3"], 4, "2, 4, 8"),
        (["--ep", "1"], 4, "one rank leaves nothing to place. Valid --ep: 2, 4, 8"),
        (["--ep", "4", "--groups", "whole", "--name", "w"], 4, "whole"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_any_work(options, code, named, made):
    before = names(made)
    assert_refused(("cocluster", *options, "-C", made), code, named)
    assert names(made) == before


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (["profile", "--model", "MODEL"], "trace"),
        (["build-tables"], "tables"),
        (["cocluster", "--ep", "4"], "placement-ep4"),
        (["regroup"], "checkpoint-ep4"),
    ],
)
def test_an_existing_target_leaves_with_4_and_stays_as_it_was(command, target, made, model):
    before = contents(made)
    arguments = [str(model) if argument == "MODEL" else argument for argument in command]
    assert_refused((*arguments, "-C", made), 4, target, "--force")
    assert contents(made) == before


def test_several_placements_and_none_named_leave_with_2_and_are_listed(work):
    shutil.copytree(work / "placement-ep4", work / "placement-ep4-quick")
    for command in ("regroup", "evaluate"):
        assert_refused((command, "-C", work), 2, "placement-ep4, placement-ep4-quick", "--placement")


def test_regrouping_what_this_placement_already_made_leaves_with_4(work):
    (work / "checkpoint-ep4").rename(work.parent / "regrouped")
    command = ("regroup", "--model", work.parent / "regrouped", "-C", work)
    assert_refused(command, 4, "already regrouped by placement-ep4")
    assert "checkpoint-ep4" not in names(work)


def test_a_target_inside_the_models_own_folder_leaves_with_4(work, model):
    source = Path(shutil.copytree(model, work.parent / "source"))
    shutil.rmtree(work / "checkpoint-ep4")
    shutil.copytree(work, source / "out")
    before = contents(source)
    assert_refused(("regroup", "--model", source, "-C", source / "out"), 4, "inside each other")
    assert contents(source) == before


# Checks that do not hold.


def test_a_damaged_checkpoint_leaves_verify_with_5_and_the_tensors_name(work):
    path = work / "checkpoint-ep4" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name] = tensors[name] + np.float32(1)
    save_file(tensors, path, metadata={"format": "pt"})
    size = json.loads((work / "checkpoint-ep4" / "smoe" / "manifest.json").read_text())["files"][path.name]["bytes"]
    assert path.stat().st_size == size
    assert_refused(("verify", "--tensors-only", "-C", work), 5, name)


def test_a_threshold_that_is_missed_leaves_with_5_after_the_result(work):
    done = smoe("evaluate", "-C", work, "--fail-under", "lar=1.5", "--json", cwd=work, code=5)
    assert "lar is" in done.err
    assert "under 1.5" in done.err
    assert done.json()["total"]


# The machine.


def test_a_working_folder_that_cannot_be_made_leaves_with_6(model, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    command = ("profile", "--model", model, "--dataset", f"{prompts}#few", "-C", tmp_path / "file" / "out")
    assert_refused(command, 6, tmp_path / "file")
