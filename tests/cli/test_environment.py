"""What the machine does to a run: a full or read-only disk, another run in the folder, odd names and clocks."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smoe_cli.console import Console
from smoe_cli.importing import ImportPlan, import_trace
from smoe_cli.tabulating import build_whole, open_traces
from smoe_profiles.artefact import open_artefact, publish
from smoe_profiles.choices import ImportFormat
from smoe_profiles.errors import InputError
from smoe_profiles.importers.records import ReadOptions
from smoe_profiles.importers.store import Wanted
from smoe_profiles.workers import LocalWorkers
from tests.engine_writers import npz_trace, routing

QUIET = Console(quiet=True)
ONE = LocalWorkers(1, QUIET.note)
LENGTHS = (30, 25, 40, 20, 30, 20, 30, 20, 25, 20, 31, 17)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return npz_trace(tmp_path_factory.mktemp("dump"), routing(lengths=LENGTHS))[0]


def import_dump(dump, folder, **options):
    plan = ImportPlan([dump], ["x"], ImportFormat.AUTO, ReadOptions(), Wanted())
    return import_trace(plan, folder / "trace", force=False, console=QUIET, **options)


def build(folder, advance=None):
    traces = open_traces([folder / "trace"], hashes=False)
    if advance:
        advance()
    return build_whole(traces, folder, None, seed=0, min_count=1, workers=ONE, force=False, console=QUIET)


def names(folder):
    return {path.name for path in folder.iterdir()}


def bytes_of(folder):
    """Every file but run.json, which tells the time."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "run.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# Another run, and files that change.


def test_a_folder_that_another_command_writes_to_leaves_with_6_and_names_it(dump, run_smoe, tmp_path):
    with publish(tmp_path / "trace", "trace", parameters={}, model={}):
        said = run_smoe("import", dump, "-C", tmp_path, cwd=tmp_path, code=6).err
    assert "is being written by another smoe command" in said


@pytest.mark.parametrize("what", ["part-00000.parquet", "manifest.json"])
def test_a_trace_that_is_replaced_while_tables_are_counted_is_noticed(what, dump, tmp_path):
    """Of equal size, so that only time and place tell."""
    import_dump(dump, tmp_path)
    path = tmp_path / "trace" / what

    def replace_it():
        shutil.copy(path, tmp_path / "new")
        (tmp_path / "new").replace(path)

    with pytest.raises(InputError, match=rf"{what} was changed or replaced while it was read"):
        build(tmp_path, replace_it)
    assert names(tmp_path) == {"trace"}
    build(tmp_path)


def test_a_dump_that_grows_while_it_is_imported_is_noticed(dump, tmp_path, monkeypatch):
    copy = Path(shutil.copy(dump, tmp_path / "growing.npz"))
    read = np.lib.format.read_magic

    def read_while_it_grows(file):
        with copy.open("ab") as growing:
            growing.write(b"more")
        return read(file)

    monkeypatch.setattr(np.lib.format, "read_magic", read_while_it_grows)
    with pytest.raises(InputError):
        import_dump(copy, tmp_path)
    assert names(tmp_path) == {"growing.npz"}


# Disks.

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_disk_that_is_full_only_when_files_are_synced_leaves_nothing(step, dump, tmp_path, monkeypatch):
    import_dump(dump, tmp_path)
    before = bytes_of(tmp_path)
    calls = []

    def fsync(_file):
        calls.append(step)
        if len(calls) == step:
            raise NO_SPACE

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as caught:
        build(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert bytes_of(tmp_path) == before
    assert names(tmp_path) == {"trace"}


UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def may_mount():
    """Whether a process may have file systems of its own on this machine: many containers do not allow it."""
    command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


MOUNTS = ["mount"] if may_mount() else []
"""Tests of a disk have a form for all machines, and one on a disk of its own where that can be had."""


def on_a_disk_of_its_own(options, folder, *command):
    """A command in a mount namespace of its own, where `folder` is a small file system."""
    mount = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    return [*UNSHARE, "sh", "-c", mount, folder, *command]


def finished(command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("full", ["file size", *MOUNTS])
def test_a_full_disk_leaves_with_6_at_whatever_byte_and_nothing_half_written(full, dump, tmp_path):
    command = [sys.executable, "-c", FULL[full] + FILLING, tmp_path, dump]
    ended = finished(on_a_disk_of_its_own("size=1m", tmp_path, *command) if full == "mount" else command)
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout)
    assert {code for code, _ in codes} == {0, 6}
    assert all(left == (["trace"] if code == 0 else []) for code, left in codes), codes


FULL = {
    "file size": """
import resource

def leave(free):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, most))
""",
    "mount": """
import os, sys
from pathlib import Path

def leave(free):
    filler = Path(sys.argv[1], "filler")
    filler.unlink(missing_ok=True)
    disk = os.statvfs(sys.argv[1])
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - free))
""",
}
"""How a disk fills up: no file may grow beyond a size, as the kernel then says; or a file takes all space but some."""

FILLING = """
import json, os, shutil, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from smoe_cli.app import run

out, found = Path(sys.argv[1], "out"), []
for free in (500000, 0, 4096, 12288, 40960, 65536):
    leave(free)
    said = StringIO()
    with redirect_stderr(said), redirect_stdout(StringIO()):
        code = run(["import", sys.argv[2], "-C", str(out), "-q"])
    assert (code == 0) == (said.getvalue() == ""), said.getvalue()
    assert code == 0 or "disk is full" in said.getvalue(), said.getvalue()
    found.append((code, sorted(os.listdir(out)) if out.exists() else []))
    shutil.rmtree(out, ignore_errors=True)
print(json.dumps(found))
"""


@pytest.mark.parametrize("read_only", ["mode", *MOUNTS])
def test_a_read_only_folder_leaves_with_6_before_any_work(read_only, dump, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555)
    command = [sys.executable, "-c", AS_ANYBODY, "import", dump, "-C", folder, "-q"]
    ended = finished(on_a_disk_of_its_own("size=1m,ro", folder, *command) if read_only == "mount" else command)
    assert ended.returncode == 6, ended.stderr
    assert "is not writable" in ended.stderr
    assert ended.stdout == ""
    assert not names(folder)


AS_ANYBODY = """
import ctypes, os, sys
from smoe_cli.app import run

if os.geteuid() == 0:  # to root every folder is writable; a process may lay that right (CAP_DAC_OVERRIDE) down
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[:3] = [kept & ~(1 << 1) for kept in sets[:3]]  # effective, permitted, inheritable
    assert libc.capset(header, sets) == 0
sys.exit(run(sys.argv[1:]))
"""


# Names, locales, clocks.


@pytest.mark.parametrize("name", ["two words [bold] \N{GRINNING FACE}", "line\nbreak", "ordner-ü"])
def test_a_folder_of_any_name_works_from_the_dump_to_the_tables(name, dump, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    import_dump(Path(shutil.copy(dump, folder / "dump [1].npz")), folder)
    build(folder)
    assert open_artefact(folder / "tables", "tables", hashes=True).parent_id("trace")


def test_a_folder_whose_name_is_no_utf8_is_refused_before_any_work(dump, run_smoe, tmp_path):
    """pyarrow cannot open a file there."""
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    said = run_smoe("import", dump, "-C", folder, cwd=tmp_path, code=6).err
    assert r"\udcff\udcfe is not named in UTF-8" in said
    assert not folder.exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"},
    ],
)
def test_locale_time_zone_and_the_files_own_times_change_no_byte(variables, dump, tmp_path):
    (tmp_path / "plain").mkdir()
    import_dump(dump, tmp_path / "plain")
    odd = tmp_path / "ordner-ü"
    odd.mkdir()
    copy = Path(shutil.copy(dump, odd / dump.name))
    os.utime(copy, (2**32, 2**32))  # the year 2106
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    command = [sys.executable, "-m", "smoe_cli", "import", copy, "--source", "x", "-C", odd, "-q"]
    done = subprocess.run(command, capture_output=True, check=False, env=kept | {"HF_HUB_OFFLINE": "1"} | variables)
    assert done.returncode == 0, done.stderr
    assert bytes_of(odd / "trace") == bytes_of(tmp_path / "plain" / "trace")


def test_a_clock_that_steps_back_or_stands_at_the_epoch_changes_no_byte(dump, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    import_dump(dump, tmp_path / "one")
    times = iter(range(10**6, 0, -1))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    import_dump(dump, tmp_path / "two")
    os.utime(tmp_path / "two" / "trace" / "manifest.json", (0, 0))
    build(tmp_path / "one")
    build(tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
