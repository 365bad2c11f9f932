"""An artefact appears whole or not at all, and says truly what it holds."""

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from smoe_profiles import artefact
from smoe_profiles.artefact import check_target, open_artefact, publish, require_parent
from smoe_profiles.errors import ImpossibleError, InputError, MachineError

MODEL = {"family": "none", "router_sha256": "0" * 64, "layers": []}


def make(target: Path, text="one", **options):
    options = {"parameters": {"text": text}, "model": MODEL, "seed": 3} | options
    with publish(target, "trace", **options) as draft:
        (draft.path / "deep").mkdir()
        (draft.path / "deep" / "a.txt").write_text(text)
        (draft.path / "b.bin").write_bytes(text.encode() * 1000)
    return open_artefact(target, "trace", hashes=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_manifest_tells_every_files_size_and_sha256_and_leaves_run_json_out(tmp_path):
    made = make(tmp_path / "trace")
    found = contents(tmp_path / "trace")
    assert set(found) == {"deep/a.txt", "b.bin", "manifest.json", "run.json"}
    expected = {
        name: {"bytes": len(found[name]), "sha256": hashlib.sha256(found[name]).hexdigest()}
        for name in ("deep/a.txt", "b.bin")
    }
    manifest = json.loads(found["manifest.json"])
    assert manifest["files"] == expected
    assert set(manifest) == {
        *("format", "format_version", "kind", "parameters", "seed", "versions", "model", "parents", "files")
    }
    assert (manifest["format_version"], manifest["kind"], manifest["seed"]) == (1, "trace", 3)
    assert made.id == hashlib.sha256(found["manifest.json"]).hexdigest()
    assert {"created", "command", "host", "seconds"} <= set(json.loads(found["run.json"]))


def test_the_same_inputs_give_the_same_bytes_except_run_json(tmp_path, monkeypatch):
    one = make(tmp_path / "trace")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    monkeypatch.setattr(sys, "argv", ["another", "command"])
    (tmp_path / "else where").mkdir()
    other = make(tmp_path / "else where" / "another name")
    assert one.id == other.id
    first, second = contents(one.path), contents(other.path)
    assert first.pop("run.json") != second.pop("run.json")
    assert first == second


def test_parents_and_parameters_added_while_writing_are_recorded(tmp_path):
    parent = make(tmp_path / "trace")
    with publish(tmp_path / "tables", "tables", parameters={"a": 1}, model=MODEL, parents=[parent]) as draft:
        draft.parameters["b"] = 2
        draft.run["model"] = "somewhere"
    child = open_artefact(tmp_path / "tables", "tables")
    assert child.parameters == {"a": 1, "b": 2}
    assert child.parent_id("trace") == parent.id
    assert child.run()["model"] == "somewhere"
    assert "somewhere" not in (child.path / "manifest.json").read_text()
    require_parent(child, parent)


def test_a_parent_that_was_made_anew_is_named_with_what_to_do_and_one_id(tmp_path):
    wanted, other = make(tmp_path / "trace"), make(tmp_path / "other", "two")
    with publish(tmp_path / "tables", "tables", parameters={}, model=MODEL, parents=[wanted]):
        pass
    child = open_artefact(tmp_path / "tables", "tables")
    with pytest.raises(
        InputError, match=r"tables was made from.*other was made anew.*smoe build-tables --force"
    ) as said:
        require_parent(child, other)
    assert str(said.value).count(wanted.id[:12]) == 1
    assert other.id[:12] not in str(said.value)


def test_the_record_of_a_checkpoint_lies_in_its_own_folder(tmp_path):
    with publish(tmp_path / "checkpoint", "checkpoint", parameters={}, model=MODEL, record="smoe") as draft:
        (draft.path / "model.safetensors").write_bytes(b"weights")
        (draft.record / "map").write_bytes(b"map")
    made = open_artefact(tmp_path / "checkpoint", "checkpoint", hashes=True)
    assert made.record == tmp_path / "checkpoint" / "smoe"
    assert set(made.manifest["files"]) == {"model.safetensors", "smoe/map"}


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_whatever_interrupts_writing_leaves_the_target_as_it_was(stop, existing, tmp_path):
    target = tmp_path / "trace"
    before = contents(make(target).path) if existing else {}

    def write_half():
        with publish(target, "trace", parameters={}, model=MODEL, force=existing) as draft:
            (draft.path / "half").write_bytes(b"x" * 100)
            raise stop

    with pytest.raises(stop):
        write_half()
    assert names(tmp_path) == ({"trace"} if existing else set())
    assert not existing or contents(target) == before


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path):
    with (
        pytest.raises(TypeError),
        publish(tmp_path / "trace", "trace", parameters={"bad": object()}, model=MODEL) as draft,
    ):
        (draft.path / "a").write_text("a")
    assert names(tmp_path) == set()


def test_an_existing_target_is_refused_before_any_work(tmp_path):
    made = make(tmp_path / "trace")
    before = contents(made.path)
    with (
        pytest.raises(ImpossibleError, match=r"exists already; give --force"),
        publish(tmp_path / "trace", "trace", parameters={}, model=MODEL),
    ):
        raise AssertionError("the body must not run")
    assert contents(made.path) == before
    assert names(tmp_path) == {"trace"}


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchanged", "set aside"])
def test_force_puts_the_new_one_in_place_and_leaves_nothing_of_the_old(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(artefact, "_exchange", lambda *_: False)
    old_id = make(tmp_path / "trace", "one").id
    new = make(tmp_path / "trace", "two", force=True)
    assert new.id != old_id
    assert contents(new.path)["deep/a.txt"] == b"two"
    assert names(tmp_path) == {"trace"}


def test_an_artefact_replaced_during_a_run_keeps_the_id_it_was_opened_with(tmp_path):
    """Otherwise a child made from the old rows would name the new artefact as its parent."""
    opened = make(tmp_path / "trace", "one")
    manifest = (opened.path / "manifest.json").read_bytes()
    opened = open_artefact(tmp_path / "trace", "trace")
    make(tmp_path / "trace", "two", force=True)
    assert opened.id == hashlib.sha256(manifest).hexdigest()


def test_a_linked_target_is_refused_even_with_force_and_what_it_points_to_is_kept(tmp_path):
    made = make(tmp_path / "real")
    before = contents(made.path)
    (tmp_path / "trace").symlink_to("real")
    with pytest.raises(ImpossibleError, match="trace"):
        make(tmp_path / "trace", "two", force=True)
    assert contents(made.path) == before


def test_a_staging_name_that_links_elsewhere_does_not_empty_what_it_points_to(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("words")
    (tmp_path / ".trace.partial").symlink_to("precious")
    with pytest.raises((MachineError, OSError)):
        make(tmp_path / "trace")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "words"


def test_a_link_left_in_the_staging_folder_is_removed_and_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("words")
    staging = tmp_path / ".trace.partial"
    staging.mkdir()
    (staging / "link").symlink_to(tmp_path / "precious")
    made = make(tmp_path / "trace")
    assert "link" not in names(made.path)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "words"


def test_a_parent_that_is_a_file_is_a_matter_of_the_machine(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file"):
        check_target(tmp_path / "file" / "trace", force=False)


def test_what_a_killed_run_left_in_the_staging_folder_is_not_published(tmp_path):
    staging = tmp_path / ".trace.partial"
    (staging / "sub").mkdir(parents=True)
    (staging / "sub" / "stale").write_text("stale")
    (staging / "manifest.json").write_text("{}")
    made = make(tmp_path / "trace")
    assert set(contents(made.path)) == {"deep/a.txt", "b.bin", "manifest.json", "run.json"}


def test_a_second_writer_of_the_same_target_is_refused_while_the_first_goes_on(tmp_path):
    target = tmp_path / "trace"
    with publish(target, "trace", parameters={}, model=MODEL) as draft:
        (draft.path / "a").write_text("first")
        with pytest.raises(MachineError, match="another smoe command"):
            make(target, "second")
        assert (draft.path / "a").read_text() == "first"
    assert contents(open_artefact(target, "trace", hashes=True).path)["a"] == b"first"
    assert names(tmp_path) == {"trace"}


def test_a_target_that_appeared_while_writing_is_not_replaced_without_force(tmp_path):
    target = tmp_path / "trace"
    target_taken = False
    try:
        with publish(target, "trace", parameters={}, model=MODEL) as draft:
            (draft.path / "a").write_text("late")
            target.mkdir()
            (target / "other").write_text("another program's file")
            target_taken = True
    except (ImpossibleError, OSError):
        pass
    assert target_taken
    assert (target / "other").read_text() == "another program's file"


KILLED = """
import os, signal, sys
from pathlib import Path
from smoe_profiles.artefact import open_artefact, publish

target, replacing = Path(sys.argv[1]) / "trace", sys.argv[2] == "replacing"
WATCHED = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.scandir", "os.listdir",
           "shutil.rmtree", "fcntl.flock", "ctypes.dlsym"}

def make(text):
    with publish(target, "trace", parameters={"text": text}, model={}, force=replacing) as draft:
        for name in ("a", "b"):
            with (draft.path / name).open("w") as file:
                file.write(text)

def state():
    if not target.exists():
        return "absent"
    return open_artefact(target, "trace", hashes=True).parameters["text"]

def kill_before(step):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

make("warm"); import shutil; shutil.rmtree(target)
for step in range(1, 400):
    if replacing:
        make("old")
    child = os.fork()
    if not child:
        sys.addaudithook(kill_before(step))
        make("new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    between = state()
    try:
        make("again")
    except Exception as error:
        made = f"{type(error).__name__}"
        shutil.rmtree(target)
        make("again")
    else:
        made = "made"
    left = sorted(path.name for path in target.parent.iterdir())
    print(step, between, made, state(), ",".join(left))
    if not replacing:
        shutil.rmtree(target)
    if not killed:
        break
"""


@pytest.mark.parametrize("mode", ["new", "replacing"])
def test_a_kill_before_any_file_operation_leaves_the_target_absent_old_or_new(mode, tmp_path):
    """One fork a file operation of `publish`; afterwards the next run succeeds and leaves nothing else behind."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), mode], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) > 15, "too few file operations were seen for this to be a test"
    states = [line[1] for line in lines]
    assert set(states) == ({"old", "new"} if mode == "replacing" else {"absent", "new"})
    assert states == sorted(states, key=lambda state: state == "new")
    for _, state, made, after, left in lines:
        refused = mode == "new" and state == "new"
        assert made == ("ImpossibleError" if refused else "made")
        assert (after, left) == ("again", "trace")


def test_an_old_artefact_that_a_kill_left_set_aside_is_put_back(tmp_path):
    made = make(tmp_path / "trace")
    made.path.rename(tmp_path / ".trace.old")
    assert open_artefact(tmp_path / "trace", "trace", hashes=True).id == made.id
    assert names(tmp_path) == {"trace"}


def test_check_target_restores_a_set_aside_artefact_rather_than_lose_it(tmp_path):
    make(tmp_path / "trace").path.rename(tmp_path / ".trace.old")
    with pytest.raises(ImpossibleError, match="exists already"):
        check_target(tmp_path / "trace", force=False)
    assert names(tmp_path) == {"trace"}


def test_a_set_aside_copy_never_covers_a_newer_target(tmp_path):
    old = make(tmp_path / "trace", "one")
    old.path.rename(tmp_path / ".old")
    new = make(tmp_path / "trace", "two")
    (tmp_path / ".old").rename(tmp_path / ".trace.old")
    assert open_artefact(tmp_path / "trace", "trace").id == new.id


def test_a_missing_artefact_is_called_missing(tmp_path):
    with pytest.raises(InputError, match=r"trace is missing; make it with smoe profile"):
        open_artefact(tmp_path / "trace", "trace")


def edit(made, change):
    path = made.path / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGE = {
    "another format": lambda manifest: manifest.update(format="other"),
    "a later version": lambda manifest: manifest.update(format_version=2),
    "another kind": lambda manifest: manifest.update(kind="tables"),
    "a wrong size": lambda manifest: manifest["files"]["b.bin"].update(bytes=5),
    "a wrong sha256": lambda manifest: manifest["files"]["b.bin"].update(sha256="0" * 64),
    "a file that is not there": lambda manifest: manifest["files"].update(c={"bytes": 0, "sha256": "0" * 64}),
    "no files": lambda manifest: manifest.pop("files"),
    "files as a list": lambda manifest: manifest.update(files=["b.bin"]),
    "a file without a size": lambda manifest: manifest["files"]["b.bin"].pop("bytes"),
    "no parameters": lambda manifest: manifest.pop("parameters"),
    "no model": lambda manifest: manifest.pop("model"),
    "no parents": lambda manifest: manifest.pop("parents"),
    "parents as text": lambda manifest: manifest.update(parents="trace"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_manifest_that_does_not_fit_is_refused_by_path(damage, tmp_path):
    made = make(tmp_path / "trace")
    edit(made, DAMAGE[damage])
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "trace"))):
        open_artefact(tmp_path / "trace", "trace", hashes=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "smoe", "format": "smoe"}', "\udcff"])
def test_a_manifest_that_is_no_json_object_is_refused_by_path(text, tmp_path):
    made = make(tmp_path / "trace")
    (made.path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=re.escape(str(made.path / "manifest.json"))):
        open_artefact(made.path, "trace")


def test_changed_contents_of_equal_size_are_found_with_hashes_only(tmp_path):
    made = make(tmp_path / "trace")
    data = bytearray((made.path / "b.bin").read_bytes())
    data[500] ^= 1
    (made.path / "b.bin").write_bytes(data)
    open_artefact(made.path, "trace")
    with pytest.raises(InputError, match=r"b\.bin does not have the contents"):
        open_artefact(made.path, "trace", hashes=True)


def test_a_file_cut_short_is_found_without_hashes(tmp_path):
    made = make(tmp_path / "trace")
    os.truncate(made.path / "b.bin", 10)
    with pytest.raises(InputError, match=r"b\.bin has 10 bytes; its manifest says 3000"):
        open_artefact(made.path, "trace")


@pytest.mark.parametrize("name", ["two words", "line\nbreak", "ünïcödé", "-C"])
def test_odd_folder_names_work(name, tmp_path):
    made = make(tmp_path / name / "trace")
    assert open_artefact(made.path, "trace").id == made.id


def test_hashing_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(artefact, "HASHED_AT_ONCE", 1000)
    made = make(tmp_path / "trace")
    seen = []
    open_artefact(tmp_path / "trace", "trace", hashes=True, progress=seen.append)
    assert sum(seen) == sum(facts["bytes"] for facts in made.manifest["files"].values())
    assert max(seen) == 1000


def test_a_run_that_goes_on_does_not_list_what_a_killed_one_said_of_itself(tmp_path):
    """run.json of a run killed just before its manifest stood in the next one's, with another size."""
    resume = {"of": "a test"}
    with (
        suppress(KeyboardInterrupt),
        publish(tmp_path / "x", "test", parameters={}, model={}, resume=resume) as draft,
    ):
        (draft.record / "run.json").write_text("{}")
        raise KeyboardInterrupt
    with publish(tmp_path / "x", "test", parameters={}, model={}, resume=resume) as draft:
        assert (draft.record / "run.json").exists()
    assert list(open_artefact(tmp_path / "x", "test").manifest["files"]) == []
