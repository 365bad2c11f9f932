"""Every way a command can fail leaves with its own exit code, one sentence, and nothing half written.

All of it through real processes: what a shell, a CI job or a job scheduler sees.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.profiles.tiny_models import cached_model

SMOE = [sys.executable, "-m", "smoe_cli"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    return kept | OFFLINE | extra


def smoe(*arguments: object, cwd: Path | None = None, variables: dict[str, str] | None = None, **options):
    return subprocess.run(
        [*SMOE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        cwd=cwd,
        env=environment(**(variables or {})),
        **options,
    )


def assert_refused(done, code: int, *named: object) -> None:
    """The code, nothing on stdout, and one `error:` on stderr that names what it must."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "this is a bug" not in done.stderr
    assert [line[:7] for line in done.stderr.splitlines()].count("error: ") == 1
    message = done.stderr[done.stderr.index("error: ") :]
    for text in named:
        assert str(text) in message
    assert not done.stdout


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cached_model(tmp_path_factory.getbasetemp(), "mixtral")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return cached_model(tmp_path_factory.getbasetemp(), "olmoe")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """An .npz of token ids: `few` [24, 32], `many` [8000, 64], `none`, and `late` with an id too large at the end."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.npz"
    generator = np.random.default_rng(0)
    late = generator.integers(0, 256, (24, 32))
    late[-1, -1] = 256
    np.savez(
        path,
        few=generator.integers(0, 256, (24, 32)),
        many=generator.integers(0, 256, (8000, 64)),
        none=np.empty((0, 4), np.int64),
        late=late,
    )
    return path


CHAIN = """
import sys
from smoe_cli.app import run
for line in sys.stdin.read().splitlines():
    code = run(line.split("\\t"))
    assert code == 0, (line, code)
"""


@pytest.fixture(scope="module")
def made(model, prompts, tmp_path_factory):
    """A working folder with trace, tables, placement-ep4 and checkpoint-ep4 of the tiny Mixtral."""
    folder = tmp_path_factory.mktemp("made") / "out"
    steps = [
        ["profile", "--model", model, "--dataset", f"{prompts}#few"],
        ["build-tables"],
        ["cocluster", "--ep", "4", "--effort", "fast", "--jobs", "1"],
        ["regroup"],
    ]
    lines = "\n".join("\t".join(map(str, [*step, "-C", folder])) for step in steps)
    done = subprocess.run(
        [sys.executable, "-c", CHAIN], input=lines, capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def work(made, tmp_path):
    """A copy of that folder to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))


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
    done = smoe(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
    assert (done.stderr if code else done.stdout).strip() or not arguments
    assert names(tmp_path) == set()


def test_no_arguments_show_the_commands(tmp_path):
    done = smoe(cwd=tmp_path)
    assert "cocluster" in done.stdout + done.stderr


# Where a value comes from.


def chosen_folder(tmp_path, *arguments, **variables):
    """Which -C `smoe regroup` took: it says so, as there is no placement there."""
    done = smoe("regroup", *arguments, cwd=tmp_path, variables=variables)
    assert_refused(done, 3, "holds no placement")
    return done.stderr.split()[1]


def test_a_flag_beats_a_variable_beats_the_config_beats_the_default(tmp_path):
    (tmp_path / "smoe.toml").write_text('dir = "from-config"\n')
    config = ["--config", "smoe.toml"]
    assert chosen_folder(tmp_path) == "smoe-out"
    assert chosen_folder(tmp_path, *config) == "from-config"
    assert chosen_folder(tmp_path, *config, SMOE_DIR="from-variable") == "from-variable"
    assert chosen_folder(tmp_path, *config, "-C", "from-flag", SMOE_DIR="from-variable") == "from-flag"


def test_a_commands_own_table_beats_the_shared_keys_and_other_tables_do_not_count(tmp_path):
    (tmp_path / "smoe.toml").write_text('dir = "shared"\n[regroup]\ndir = "own"\n[verify]\ndir = "verify"\n')
    assert chosen_folder(tmp_path, SMOE_CONFIG="smoe.toml") == "own"


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
    done = smoe("regroup", "--config", "smoe.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


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
    done = smoe("profile", "--model", tmp_path / "model", "--dataset", f"{prompts}#few", "-C", tmp_path / "out")
    assert_refused(done, 4, named, "config.json")
    assert names(tmp_path / "out") == set()


def test_a_model_that_is_nowhere_leaves_with_3(tmp_path):
    assert_refused(smoe("profile", "--model", "./nothing", "-C", tmp_path / "out"), 3, "./nothing")
    assert names(tmp_path / "out") == set()


def test_a_published_model_that_is_not_cached_leaves_with_6_and_says_how_to_get_it(tmp_path):
    done = smoe(
        *("profile", "--model", "mixtral-8x7b", "-C", tmp_path / "out"), variables={"HF_HOME": str(tmp_path / "hf")}
    )
    assert_refused(done, 6, "hf download mistralai/Mixtral-8x7B-v0.1")
    assert names(tmp_path / "out") == set()


# Inputs.


@pytest.mark.parametrize("command", [["build-tables"], ["cocluster", "--ep", "4"], ["verify"]])
def test_a_folder_that_does_not_exist_leaves_with_3(command, tmp_path):
    assert_refused(smoe(*command, "-C", tmp_path / "nowhere"), 3, tmp_path / "nowhere")
    assert names(tmp_path) <= {"nowhere"}
    assert names(tmp_path / "nowhere") == set()


@pytest.mark.parametrize(("key", "named"), [("none", "is empty"), ("late", "token id 256")])
def test_a_data_set_that_cannot_be_profiled_leaves_with_3_and_no_trace(key, named, model, prompts, tmp_path):
    done = smoe("profile", "--model", model, "--dataset", f"{prompts}#{key}", "-C", tmp_path / "out")
    assert_refused(done, 3, named, "prompts.npz")
    assert names(tmp_path / "out") == set()


def test_a_hub_data_set_while_offline_leaves_with_6(model, tmp_path):
    done = smoe(
        *("profile", "--model", model, "--dataset", "nobody/nothing", "-C", tmp_path / "out"),
        variables={"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1"},
    )
    assert_refused(done, 6, "nobody/nothing")
    assert names(tmp_path / "out") == set()


def test_more_sources_than_data_sets_are_a_usage_error(model, prompts, tmp_path):
    options = ["--dataset", f"{prompts}#few", "--source", "a", "--source", "b"]
    assert_refused(smoe("profile", "--model", model, *options, "-C", tmp_path / "out"), 2, "2 --source for 1")


def test_a_trace_with_a_flipped_byte_leaves_with_3_and_names_the_part(work):
    shutil.rmtree(work / "tables")
    part = work / "trace" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 4] ^= 0x40
    part.write_bytes(data)
    assert_refused(smoe("build-tables", "--hashes", "-C", work), 3, "part-00000.parquet")
    assert names(work) == {"trace", "placement-ep4", "checkpoint-ep4"}


@pytest.mark.parametrize("command", ["build-tables", "regroup"])
def test_another_model_leaves_with_3_naming_both(command, work, other_model):
    if command == "build-tables":
        shutil.rmtree(work / "tables")
    if command == "regroup":
        shutil.rmtree(work / "checkpoint-ep4")
    before = names(work)
    assert_refused(smoe(command, "--model", other_model, "-C", work), 3, "mixtral with routers", "olmoe with routers")
    assert names(work) == before


def test_tables_of_another_model_leave_with_3(work):
    """The placement's tables were replaced by those of another model's trace."""
    facts = json.loads((work / "tables" / "manifest.json").read_text())
    facts["model"]["router_sha256"] = "f" * 64
    facts["parents"] = [{"kind": "trace", "id": "f" * 64}]
    (work / "tables" / "manifest.json").write_text(json.dumps(facts))
    assert_refused(smoe("evaluate", "-C", work), 3, "placement-ep4", "tables")
    assert "evaluation-ep4" not in names(work)


# What cannot be.


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--ep", "3"], 4, "2, 4, 8"),
        (["--ep", "1"], 4, "2, 4, 8"),
        (["--ep", "4", "--groups", "whole", "--name", "w"], 4, "whole"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_any_work(options, code, named, made):
    before = names(made)
    assert_refused(smoe("cocluster", *options, "-C", made), code, named)
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
    assert_refused(smoe(*arguments, "-C", made), 4, target, "--force")
    assert contents(made) == before


def test_several_placements_and_none_named_leave_with_2_and_are_listed(work):
    shutil.copytree(work / "placement-ep4", work / "placement-ep4-quick")
    for command in ("regroup", "evaluate"):
        assert_refused(smoe(command, "-C", work), 2, "placement-ep4, placement-ep4-quick", "--placement")


def test_regrouping_what_this_placement_already_made_leaves_with_4(work):
    (work / "checkpoint-ep4").rename(work.parent / "regrouped")
    done = smoe("regroup", "--model", work.parent / "regrouped", "-C", work)
    assert_refused(done, 4, "already regrouped by placement-ep4")
    assert "checkpoint-ep4" not in names(work)


def test_a_target_inside_the_models_own_folder_leaves_with_4(work, model):
    source = Path(shutil.copytree(model, work.parent / "source"))
    shutil.rmtree(work / "checkpoint-ep4")
    shutil.copytree(work, source / "out")
    before = contents(source)
    assert_refused(smoe("regroup", "--model", source, "-C", source / "out"), 4, "inside each other")
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
    assert_refused(smoe("verify", "--tensors-only", "-C", work), 5, name)


def test_a_threshold_that_is_missed_leaves_with_5_after_the_result(work):
    done = smoe("evaluate", "-C", work, "--fail-under", "lar=1.5", "--json")
    assert done.returncode == 5
    assert "lar is" in done.stderr
    assert "under 1.5" in done.stderr
    assert json.loads(done.stdout)["total"]


# The machine.


def limit_files(size: int):
    """Before exec: no file may grow beyond `size` bytes, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_fills_up_leaves_profile_with_6_and_rows_to_go_on_from(model, prompts, tmp_path):
    command = ("profile", "--model", model, "--dataset", f"{prompts}#few", "-C", tmp_path / "out")
    done = smoe(*command, preexec_fn=limit_files(4000))
    assert done.returncode == 6
    assert "disk is full" in done.stderr
    assert names(tmp_path / "out") == {".trace.partial"}
    assert smoe(*command).returncode == 0
    assert names(tmp_path / "out") == {"trace"}


def test_a_disk_that_fills_up_leaves_regroup_with_6_and_the_old_checkpoint(work):
    before = contents(work)
    done = smoe("regroup", "--force", "-C", work, preexec_fn=limit_files(60_000))
    assert_refused(done, 6, "disk is full")
    left = contents(work)
    assert {name: left[name] for name in before} == before
    assert {name.split("/")[0] for name in left.keys() - before.keys()} == {".checkpoint-ep4.partial"}


def test_a_working_folder_that_cannot_be_made_leaves_with_6(model, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    done = smoe("profile", "--model", model, "--dataset", f"{prompts}#few", "-C", tmp_path / "file" / "out")
    assert_refused(done, 6, tmp_path / "file")


def processes_of_session(session: int) -> list[str]:
    """Command lines of the processes still alive in a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def stopped(arguments, partial: Path, *signals: int):
    """Run smoe until its staging folder is there, signal it, and return (exit code, stderr)."""
    process = subprocess.Popen(
        [*SMOE, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    give_up = time.monotonic() + 300
    while not partial.exists() and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.3)
    assert process.poll() is None, "it ended before it could be interrupted"
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    _, stderr = process.communicate(timeout=300)
    give_up = time.monotonic() + 120
    while processes_of_session(process.pid) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert processes_of_session(process.pid) == []
    return process.returncode, stderr


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_a_stopped_profile_leaves_with_its_signals_code_and_no_trace(number, code, word, model, prompts, tmp_path):
    out = tmp_path / "out"
    arguments = ["profile", "--model", model, "--dataset", f"{prompts}#many", "-C", out]
    found, stderr = stopped(arguments, out / ".trace.partial", number)
    assert (found, "Traceback" in stderr) == (code, False), stderr
    assert names(out) == {".trace.partial"}
    assert f"error: {word}" in stderr


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_a_stopped_cocluster_leaves_the_old_placement_and_no_worker(number, code, word, work):
    before = contents(work)
    arguments = ["cocluster", "--ep", "4", "--effort", "thorough", "--jobs", "2", "--force", "-C", work]
    found, stderr = stopped(arguments, work / ".placement-ep4.partial", number)
    assert (found, "Traceback" in stderr) == (code, False), stderr
    assert contents(work) == before
    assert names(work) == {"trace", "tables", "placement-ep4", "checkpoint-ep4"}
    assert f"error: {word}" in stderr


def test_an_impatient_second_interrupt_still_reads_130_in_a_shell_and_leaves_no_target(work):
    """Killed by SIGINT itself (-2 here) is 130 to a shell; which of the two depends on when the second one came."""
    before = contents(work / "placement-ep4")
    arguments = ["cocluster", "--ep", "4", "--effort", "thorough", "--jobs", "2", "--name", "x", "-C", work]
    found, stderr = stopped(arguments, work / ".placement-ep4-x.partial", signal.SIGINT, signal.SIGINT)
    assert found in (130, -signal.SIGINT)
    assert "this is a bug" not in stderr
    assert "placement-ep4-x" not in names(work)
    assert contents(work / "placement-ep4") == before


# Output that nobody reads.


@pytest.mark.parametrize("arguments", [["models", "--json"], ["--help"]])
def test_a_reader_that_left_is_no_error_message(arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*SMOE, *arguments], stdout=write, stderr=subprocess.PIPE, check=False, env=environment())
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_stdout_is_quiet():
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -m smoe_cli models --json >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode in (0, 141), done.stderr
    assert "error" not in done.stderr


def test_a_closed_stdin_is_no_matter():
    command = 'exec "$0" -m smoe_cli models --json <&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["models"]


def test_a_full_disk_behind_stdout_leaves_with_6():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*SMOE, "models", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment()
        )
    assert done.returncode == 6, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_locale_without_utf8_does_not_break_messages(tmp_path):
    folder = tmp_path / "ordner-ü"
    done = smoe("regroup", "-C", folder, variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert_refused(done, 3, "holds no placement")
