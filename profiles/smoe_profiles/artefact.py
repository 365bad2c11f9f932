"""Artefacts on disk: a folder that appears whole or not at all (docs/formats/artefacts.md).

An artefact is staged as `.NAME.partial` beside its target, every file fsynced, manifest.json last, then renamed.
The manifest is a pure function of inputs and parameters; what is volatile stands in run.json, outside every hash.
After a kill the target is absent, old or new, never mixed. Long work may go on in the staging folder of a killed run:
names there that start with a dot are scratch, and no part of the artefact.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.tensors import read_json

FORMAT = "smoe"
FORMAT_VERSION = 1
SCRATCH = "."
RESUME_KEY = f"{SCRATCH}resume.json"
LIBRARIES = ("smoe", "numpy", "scipy", "numba", "pyarrow", "torch", "transformers")
MADE_BY = {
    "trace": "smoe profile or smoe import",
    "tables": "smoe build-tables",
    "tables-shard": "smoe build-tables --shard i/n",
    "placement": "smoe cocluster --ep G",
    "checkpoint": "smoe regroup",
    "map": "smoe regroup",
    "evaluation": "smoe evaluate",
}
"""What to run for an artefact that is not there."""

HASHED_AT_ONCE = 1 << 22
"""Bytes of a file that are read and hashed before progress is said."""

Progress = Callable[[int], None]


def _unseen(_bytes: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Artefact:
    """A published folder, as it was when opened.

    record: where manifest.json lies, the folder itself or its `smoe/`; id: the manifest's sha256. stamps: of its files,
    when it was opened.
    """

    path: Path
    record: Path
    manifest: dict[str, Any]
    id: str
    stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.manifest["parameters"]
        return parameters

    @property
    def model(self) -> dict[str, Any]:
        identity: dict[str, Any] = self.manifest["model"]
        return identity

    def run(self) -> dict[str, Any]:
        """The volatile facts of the run that made it; empty if run.json is gone."""
        path = self.record / "run.json"
        facts = read_json(path, own=True) if path.exists() else {}
        if not isinstance(facts, dict):
            raise InputError(f"{path} is {facts!r}; a table of facts was expected. It may be deleted.")
        return facts

    def parent_id(self, kind: str) -> str | None:
        return next((parent["id"] for parent in self.manifest["parents"] if parent["kind"] == kind), None)


@dataclass
class Draft:
    """An artefact being written: put files under `path`, or under `record` beside the manifest.

    parameters go into the manifest and may grow while writing; `run` joins the volatile facts of run.json.
    hashes: sha256 of files, by name, that were hashed as they were written.
    """

    path: Path
    record: Path
    parameters: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


def open_artefact(path: Path, kind: str, *, hashes: bool = False, progress: Progress = _unseen) -> Artefact:
    """Open a published artefact and check kind, format version and file sizes (with `hashes`, contents too).

    progress(bytes) as contents are hashed.
    Raises InputError if it is missing, damaged or of another kind.

    >>> artefact = open_artefact(folder / "tables", "tables")  # folder: a working folder, -C
    >>> artefact.kind, artefact.parent_id("trace") == open_artefact(folder / "trace", "trace").id
    ('tables', True)
    """
    restore_set_aside(path)
    record = path / "smoe" if (path / "smoe" / "manifest.json").exists() else path
    if not (record / "manifest.json").exists():
        todo = f"make it with {MADE_BY[kind]}" if kind in MADE_BY else f"it is not a finished {kind} artefact"
        raise InputError(f"{path} {'has no manifest.json' if path.exists() else 'is missing'}; {todo}.")
    manifest = read_json(record / "manifest.json", own=True)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{record / 'manifest.json'} is not a smoe manifest.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{record / 'manifest.json'} has format_version {manifest.get('format_version')}; "
            f"this smoe reads {FORMAT_VERSION}."
        )
    if manifest.get("kind") != kind:
        raise InputError(f"{path} is a {manifest.get('kind')} artefact; a {kind} was expected.")
    _check_manifest(record / "manifest.json", manifest)
    identity = file_hash(record / "manifest.json")
    for name, facts in manifest["files"].items():
        _check_file(path, name, facts, hashes, progress)
    inputs = [record / "manifest.json", *(path / name for name in manifest["files"])]
    return Artefact(path, record, manifest, identity, {path: file_stamp(path) for path in inputs})


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """The parts every reader uses must be there and of their type; a file name must stay inside the folder."""
    shapes = {"parameters": dict, "model": dict, "parents": list, "files": dict}
    for key, kind in shapes.items():
        if not isinstance(manifest.get(key), kind):
            raise InputError(f"{path} has {key} = {manifest.get(key)!r}; a {kind.__name__} was expected.")
    if not isinstance(manifest.get("seed", ""), int | None):
        raise InputError(f"{path} has no seed that is a number or null; it is not a smoe manifest.")
    _check_identity(path, manifest["model"])
    for parent in manifest["parents"]:
        if not isinstance(parent, dict) or not all(isinstance(parent.get(key), str) for key in ("kind", "id")):
            raise InputError(f"{path} names a parent {parent!r}; kind and id were expected.")
    for name, facts in manifest["files"].items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        known = isinstance(facts, dict) and type(facts.get("bytes")) is int and isinstance(facts.get("sha256"), str)
        if not inside or not known:
            raise InputError(f"{path} lists the file {name!r} with {facts!r}; a size and sha256 were expected.")


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    """What is said of the model must be of its type; nothing need be said."""
    kinds = {"family": str, "vocab_size": int, "layers": list, "router_sha256": str, "map_sha256": str}
    for key, kind in kinds.items():
        value = identity.get(key)
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{path} says of its model {key} = {value!r}; a {kind.__name__} was expected.")
    if not all(isinstance(layer, dict) for layer in identity.get("layers") or []):
        raise InputError(f"{path} lists its model's layers as {identity['layers']!r}; tables were expected.")


def _check_file(folder: Path, name: str, facts: dict[str, Any], hashes: bool, progress: Progress) -> None:
    path = folder / name
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError:  # a name that no file can have
        size = -1
    if size != facts["bytes"]:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise InputError(f"{path} {found}; its manifest says {facts['bytes']} bytes. Make the artefact again.")
    if hashes and file_hash(path, progress) != facts["sha256"]:
        raise InputError(f"{path} does not have the contents its manifest says. Make the artefact again.")


def file_stamp(path: Path) -> tuple[int, ...]:
    """What a file's size, time and place on disk are; equal stamps mean that nobody wrote or replaced it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def check_unchanged(stamps: dict[Path, tuple[int, ...]]) -> None:
    """Raises InputError if a file is not as it was when it was stamped: what was read of it may be of two versions."""
    for path, stamp in stamps.items():
        if not path.exists() or file_stamp(path) != stamp:
            raise InputError(f"{path} was changed or replaced while it was read; run the command again.")


def require_parent(child: Artefact, parent: Artefact) -> None:
    """Check that `child` was made from `parent`; InputError names both sides."""
    wanted = child.parent_id(parent.kind)
    if wanted == parent.id:
        return
    if wanted is None:
        raise InputError(f"{child.path} was made without {parent.kind}, so {parent.path} does not go with it.")
    raise InputError(
        f"{child.path} was made from an earlier {parent.kind} artefact ({wanted[:12]}): {parent.path} was made anew "
        f"since, or comes from elsewhere. Make {child.path.name} again: {MADE_BY[child.kind]} --force."
    )


def check_target(target: Path, *, force: bool) -> None:
    """Refuse an existing target before any work, and make nothing.

    Raises ImpossibleError, or MachineError if it cannot be written.
    """
    restore_set_aside(target)
    if target.is_symlink() or (target.exists() and not force):
        raise ImpossibleError(f"{target} exists already; give --force to replace it.")
    parent = standing_folder(target)
    if not parent.is_dir():
        raise MachineError(f"{parent} is a file, not a folder; choose another -C.")
    if any("\ud800" <= letter <= "\udfff" for letter in str(target.parent)):
        raise MachineError(
            f"{target.parent} is not named in UTF-8, as the Parquet library needs it; choose another -C."
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MachineError(f"{parent} is not writable.")


def standing_folder(target: Path) -> Path:
    """The nearest of the folders above a target that is there already."""
    return next(path for path in target.absolute().parents if os.path.lexists(path))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{path} cannot be made: {error.strerror}.") from error


@contextmanager
def publish(
    target: Path,
    kind: str,
    *,
    parameters: dict[str, Any],
    model: dict[str, Any],
    seed: int | None = None,
    parents: Sequence[Artefact] = (),
    force: bool = False,
    record: str = ".",
    resume: dict[str, Any] | None = None,
) -> Iterator[Draft]:
    """Write an artefact: yields a Draft, and on a clean exit makes it appear at `target` in one rename.

    On any exception, an interrupt included, the staging folder is removed and the target is as it was.
    record: sub-folder that holds manifest.json and run.json (`smoe` inside a checkpoint).
    resume: everything that the content depends on. The staging folder then outlives a failure that another attempt may
    not meet, and a run with an equal `resume` finds in it what the one before had written; any other run empties it.
    Raises ImpossibleError if the target exists and `force` is not given, MachineError if another run writes it.
    """
    check_target(target, force=force)
    _make_folder(target.parent)
    staging = staging_path(target)
    started = time.monotonic()
    lock = _lock(staging)
    try:
        _prepare(staging, staging / record, resume)
        draft = Draft(staging, staging / record, dict(parameters))
        draft.record.mkdir(exist_ok=True)
        yield draft
        for parent in parents:
            check_unchanged(parent.stamps)
        (draft.record / "run.json").unlink(missing_ok=True)  # of a killed run that this one goes on from
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "parameters": draft.parameters,
            "seed": seed,
            "versions": library_versions(),
            "model": model,
            "parents": [{"kind": parent.kind, "id": parent.id} for parent in parents],
            "files": _file_table(staging, draft.hashes),
        }
        run = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "host": socket.gethostname(),
            "seconds": round(time.monotonic() - started, 3),
        }
        _write_json(draft.record / "run.json", run | draft.run)
        _write_json(draft.record / "manifest.json", manifest)
        for scratch in staging.glob(f"{SCRATCH}*"):
            _remove(scratch)
        for folder in {path.parent for path in staging.rglob("*")}:
            sync_to_disk(folder)
        check_target(target, force=force)
        _rename(staging, target)
    except BaseException as error:
        if resume is None or isinstance(error, InputError | ImpossibleError):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(staging: Path) -> int:
    """Make the staging folder and lock it for this process."""
    while True:
        if staging.is_symlink():
            raise MachineError(f"{staging} is a symbolic link; smoe stages there and will not write through it.")
        staging.mkdir(exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise MachineError(f"{staging} is being written by another smoe command; wait for it to end.") from error
        if staging.exists() and os.fstat(lock).st_ino == staging.stat().st_ino:
            break
        os.close(lock)  # the other run published and renamed it between our open and our lock
    return lock


def _prepare(staging: Path, record: Path, resume: dict[str, Any] | None) -> None:
    """Empty what a killed run left in the staging folder, unless it was this very run."""
    key = staging / RESUME_KEY
    if resume is not None and key.exists() and not (record / "manifest.json").exists():
        try:
            if read_json(key) == json.loads(json.dumps(resume)):
                return
        except InputError:
            pass  # the kill came while the key was written
    for path in staging.iterdir():
        _remove(path)
    if resume is not None:
        _write_json(key, resume)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def library_versions() -> dict[str, str]:
    """The versions that a manifest records."""
    return {name: _version(name) for name in LIBRARIES}


_version = cache(version)


def staging_path(target: Path) -> Path:
    """Where an artefact is written before it appears at its target."""
    return target.with_name(f".{target.name}.partial")


def _file_table(folder: Path, known: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file, each fsynced on the way. known: sha256 by name, where it need not be computed."""
    table = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.relative_to(folder).parts[0].startswith(SCRATCH):
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        name = path.relative_to(folder).as_posix()
        table[name] = {"bytes": path.stat().st_size, "sha256": known.get(name) or file_hash(path)}
    return table


def file_hash(path: Path, progress: Progress = _unseen) -> str:
    """The sha256 of a file's contents; progress(bytes) as they are read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASHED_AT_ONCE):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_to_disk(path: Path) -> None:
    """Have a file, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(staging: Path, target: Path) -> None:
    """Put `staging` at `target`; an old target is exchanged in one step where the system can, else set aside."""
    if not target.exists():
        staging.rename(target)
        sync_to_disk(target.parent)
    elif _exchange(staging, target):
        sync_to_disk(target.parent)
        shutil.rmtree(staging)
    else:
        aside = _set_aside_name(target)
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        staging.rename(target)
        sync_to_disk(target.parent)
        shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically (renameat2 with RENAME_EXCHANGE); False where the system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _set_aside_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def restore_set_aside(target: Path) -> None:
    """Put back an old artefact that a killed replacement had set aside, where nothing took its place."""
    aside = _set_aside_name(target)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
