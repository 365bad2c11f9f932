"""A regroup that is killed, or whose disk fills up, leaves no target or one to go on from; never one that looks whole.

The source has five shards and is read in small chunks, so that there are many moments to be interrupted at.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from smoe_profiles.artefact import open_artefact
from tests.checkpoint.conftest import permutations
from tests.conftest import smoe
from tests.e2e.regroup_paths import file_bytes, make_path, split_shards
from tests.profiles.tiny_models import cached_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A working folder with a placement, and the bytes of its checkpoint when nothing interferes."""
    folder = tmp_path_factory.mktemp("interrupted")
    tiny = cached_model(tmp_path_factory.getbasetemp(), "mixtral")
    make_path(folder, split_shards(tiny, folder / "source", 5), permutations("mixtral", 1))
    smoe("regroup", "-q", cwd=folder)
    checkpoint = folder / "smoe-out/checkpoint-ep4"
    wanted = file_bytes(checkpoint)
    checkpoint.rename(folder / "undisturbed")
    return folder, wanted


@pytest.fixture
def work(made):
    """The same folder, with nothing written yet."""
    folder, wanted = made
    for path in (folder / "smoe-out").glob("*checkpoint*"):
        path.rename(folder / f"{len(list(folder.iterdir()))}-before")
    return folder, wanted


def fault_after(count, code, written):
    """A write_all that writes no more than `count` bytes in all, and then fails; written: bytes so far."""
    from smoe_cli.checkpoint import writer

    real = writer.write_all

    def write(descriptor, data):
        room = count - sum(written)
        real(descriptor, data[:room])
        written.append(min(room, len(data)))
        if room < len(data):
            raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_disk_that_fills_up_leaves_something_to_go_on_from(share, jobs, work, monkeypatch):
    from smoe_cli.checkpoint import writer

    folder, wanted = work
    total = sum(len(data) for name, data in wanted.items() if name.endswith(".safetensors") and "/" not in name)
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", fault_after(int(share * total), errno.ENOSPC, written))
        failed = smoe("regroup", "-q", "--jobs", jobs, cwd=folder, code=6)
    assert "disk is full" in failed.err
    assert not (folder / "smoe-out/checkpoint-ep4").exists()
    assert not (folder / "smoe-out/.checkpoint-ep4.partial/smoe/manifest.json").exists()
    again = []
    monkeypatch.setattr(writer, "write_all", fault_after(10**9, errno.ENOSPC, again))
    smoe("regroup", "-q", cwd=folder)
    assert file_bytes(folder / "smoe-out/checkpoint-ep4") == wanted
    whole = sum(len(data) for name, data in wanted.items() if not name.startswith("smoe/"))
    if share > 0.9:
        assert sum(again) < 0.5 * whole
    if share < 0.2:
        assert sum(again) > 0.9 * whole


def test_a_disk_that_fails_when_it_is_forced_leaves_something_to_go_on_from(work, monkeypatch):
    folder, wanted = work
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 6:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        smoe("regroup", "-q", cwd=folder, code=6)
    assert not (folder / "smoe-out/checkpoint-ep4").exists()
    smoe("regroup", "-q", cwd=folder)
    assert file_bytes(folder / "smoe-out/checkpoint-ep4") == wanted


def test_a_shard_that_was_noted_but_lost_its_end_is_written_again(work, monkeypatch):
    """A note is written after its shard is on disk; where a file is shorter all the same, the note does not count."""
    from smoe_cli.checkpoint import writer

    folder, wanted = work
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", fault_after(150_000, errno.ENOSPC, []))
        smoe("regroup", "-q", "--jobs", "1", cwd=folder, code=6)
    staging = folder / "smoe-out/.checkpoint-ep4.partial"
    notes = sorted(staging.glob(".model-*.json"))
    assert notes
    path = staging / notes[0].name[1:].removesuffix(".json")
    path.write_bytes(path.read_bytes()[:-8])
    smoe("regroup", "-q", cwd=folder)
    assert file_bytes(folder / "smoe-out/checkpoint-ep4") == wanted


@pytest.mark.parametrize("change", ["placement", "source"])
def test_what_another_placement_or_source_left_is_not_gone_on_from(change, work, monkeypatch):
    from smoe_cli.checkpoint import writer
    from tests.e2e.regroup_paths import set_map

    folder, wanted = work
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", fault_after(150_000, errno.ENOSPC, []))
        smoe("regroup", "-q", "--jobs", "1", cwd=folder, code=6)
    if change == "source":
        for path in (folder / "source").glob("*.safetensors"):
            os.utime(path)
    else:
        set_map(folder / "smoe-out/placement-ep4", permutations("mixtral", 2))
    again = []
    monkeypatch.setattr(writer, "write_all", fault_after(10**9, errno.ENOSPC, again))
    smoe("regroup", "-q", cwd=folder)
    weights = sum(len(data) for name, data in wanted.items() if name.endswith(".safetensors") and "/" not in name)
    assert sum(again) > weights
    verified = smoe("verify", "--tensors-only", "--json", cwd=folder).json()
    assert verified["passed"]
    set_map(folder / "smoe-out/placement-ep4", permutations("mixtral", 1))


KILLED = """
import io, json, os, random, shutil, signal, sys
from contextlib import redirect_stdout
from pathlib import Path
from smoe_cli.app import run
from smoe_cli.checkpoint import rewrite, writer
from smoe_profiles.artefact import open_artefact

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
target, staging = folder / "smoe-out/checkpoint-ep4", folder / "smoe-out/.checkpoint-ep4.partial"
rewrite.CHUNK = 4096
COMMAND = ["regroup", "-C", str(folder / "smoe-out"), "-q", "--jobs", "1"]
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "shutil.rmtree"}
real = writer.write_all

def quietly():
    with redirect_stdout(io.StringIO()):
        return run(COMMAND)

def child(step):
    # Run the command; SIGKILL at its n-th file operation or halfway through its n-th write.
    # Prints how many there were.
    seen = 0
    def count():
        nonlocal seen
        seen += 1
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
    def write(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        count()
        real(descriptor, data[len(data) // 2 :])
    writer.write_all = write
    sys.addaudithook(lambda event, _: event in WATCHED and count())
    code = quietly()
    print(json.dumps(seen), flush=True)
    os._exit(code)

def forked(step):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writing, 1)
        child(step)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading) as said:
        return status, said.read()

assert quietly() == 0  # imports are no moments of interest
shutil.rmtree(target)
status, steps = forked(-1)
assert status == 0, status
steps = int(steps)
shutil.rmtree(target)
moments = random.Random(0)
killed = 0
while killed < kills:
    status, _ = forked(moments.randrange(1, steps))
    killed += os.WIFSIGNALED(status)  # a run that goes on has fewer moments, and may end first
    state = "absent"
    if target.exists():
        open_artefact(target, "checkpoint", hashes=True)
        state = "whole"
    reused = len(list(staging.glob(".model-*.json"))) if staging.exists() else 0
    print(os.WIFSIGNALED(status), state, reused, staging.exists(), flush=True)
    if state == "whole":
        shutil.rmtree(target)
    elif killed % 5 == 0:
        assert quietly() == 0
        found = {
            path.relative_to(target).as_posix(): path.read_bytes()
            for path in target.rglob("*")
            if path.is_file() and path.name != "run.json"
        }
        wanted = folder / "undisturbed"
        assert found == {name: (wanted / name).read_bytes() for name in found}
        assert len(found) == sum(path.is_file() and path.name != "run.json" for path in wanted.rglob("*"))
        shutil.rmtree(target)
"""


def test_a_kill_at_any_of_50_moments_leaves_no_target_or_a_whole_one(work):
    folder, _ = work
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), "50"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sum(killed == "True" for killed, *_ in lines) == 50
    assert {state for _, state, *_ in lines} <= {"absent", "whole"}
    assert {int(reused) for _, _, reused, _ in lines} > {0, 5}, "no run went on from another one's shards"
    assert not list((folder / "smoe-out").glob("*checkpoint*"))


def test_the_bytes_do_not_depend_on_the_number_of_jobs(work):
    folder, wanted = work
    for jobs in ("1", "3", "9"):
        smoe("regroup", "-q", "--jobs", jobs, "--force", cwd=folder)
        assert file_bytes(folder / "smoe-out/checkpoint-ep4") == wanted
    manifest = json.loads((folder / "smoe-out/checkpoint-ep4/smoe/manifest.json").read_text())
    assert len(manifest["files"]) == len(wanted) - 1
    open_artefact(folder / "smoe-out/checkpoint-ep4", "checkpoint", hashes=True)


def test_the_index_is_written_after_everything_it_names(work, monkeypatch):
    """A folder whose index is there has all its weights and settings."""
    from smoe_cli.checkpoint import writer

    folder, _ = work
    real, order = writer._write, []

    def write(path, chunks):
        order.append(path.name)
        return real(path, chunks)

    monkeypatch.setattr(writer, "_write", write)
    smoe("regroup", "-q", "--jobs", "2", cwd=folder)
    shards = [name for name in order if name.endswith(".safetensors")]
    assert len(shards) == 5
    assert order[-1] == "model.safetensors.index.json"
    assert max(order.index(name) for name in shards) < order.index("config.json")
