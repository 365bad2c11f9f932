"""What happens to a process from outside: full disks, signals, closed pipes; it leaves with its code and no ruins.

All of it through real processes: what a shell, a CI job or a job scheduler sees. That each refusal has its code and its
sentence is in `test_refusals.py`.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import SMOE, assert_one_error, contents, environment, names, smoe_process
from tests.conftest import smoe
from tests.forked import begin, end

# Codes.


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--version"], 0, None),
        (["cocluster", "--ep", "eight"], 2, None),
        (["cocluster", "--ep", "3", "-C", "WORK"], 4, "2, 4, 8"),
        (["verify", "--tensors-only", "-C", "WORK"], 5, "model."),
    ],
)
def test_each_code_reaches_the_shell(arguments, code, named, work, tmp_path):
    """3 and 6 reach it with the faults below."""
    if code == 5:
        weights = work / "checkpoint-ep4/model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 0x40]))
    done = smoe_process(*(work if word == "WORK" else word for word in arguments), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if named:
        assert_one_error(done.stderr, named)
    assert bool(done.stdout) == (code == 0)


# Disks.


def limit_files(size: int):
    """Before exec: no file may grow beyond `size` bytes, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_fills_up_leaves_profile_with_6_and_rows_to_go_on_from(model, prompts, tmp_path):
    command = ("profile", "--model", model, "--dataset", f"{prompts}#few", "-C", tmp_path / "out")
    code, _, stderr = end(begin(*command, cwd=tmp_path, file_size=4000), tmp_path)
    assert code == 6
    assert "disk is full" in stderr
    assert names(tmp_path / "out") == {".trace.partial"}
    smoe(*command, cwd=tmp_path)
    assert names(tmp_path / "out") == {"trace"}


def test_a_disk_that_fills_up_leaves_regroup_with_6_and_the_old_checkpoint(work):
    before = contents(work)
    done = smoe_process("regroup", "--force", "-C", work, preexec_fn=limit_files(60_000))
    assert done.returncode == 6
    assert_one_error(done.stderr, "disk is full")
    left = contents(work)
    assert {name: left[name] for name in before} == before
    assert {name.split("/")[0] for name in left.keys() - before.keys()} == {".checkpoint-ep4.partial"}


# Signals.


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


def stop(pid: int, is_alive, partial: Path, *signals: int) -> None:
    """Signal a process as soon as its staging folder is there."""
    give_up = time.monotonic() + 300
    while not partial.exists() and is_alive() and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.3)
    assert is_alive(), "it ended before it could be interrupted"
    for number in signals:
        os.kill(pid, number)
        time.sleep(0.05)


def stopped(arguments, partial: Path, *signals: int):
    """Run smoe until its staging folder is there, signal it, and return (exit code, stderr) when all are gone."""
    process = subprocess.Popen(
        [*SMOE, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    stop(process.pid, lambda: process.poll() is None, partial, *signals)
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
    process = begin("profile", "--model", model, "--dataset", f"{prompts}#many", "-C", out, cwd=tmp_path)
    stop(process.pid, process.is_alive, out / ".trace.partial", number)
    found, _, stderr = end(process, tmp_path)
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
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = smoe_process("regroup", "-C", folder, variables=c_locale)
    assert done.returncode == 3
    assert_one_error(done.stderr, "holds no placement")
