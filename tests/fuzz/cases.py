"""One case: sound files with one of them damaged, read, and what must hold afterwards.

Reading ends well or with a SmoeError, in bounded time and memory; what was read is as it was; nothing is written
outside the folder given for it, and nothing is left in it half published.
"""

import json
import os
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from smoe_profiles.errors import SmoeError
from tests.fuzz.damage import damage
from tests.fuzz.readers import Reader, Sample, of_suffix

CPU_SECONDS = 5
MOST_TEXT = 3000


class Slow(BaseException):
    """A case took longer than CPU_SECONDS of processor time."""


@dataclass(frozen=True)
class Outcome:
    """said: the sentence of a refusal. fault: what went wrong that must not, None where all held."""

    said: str | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Sandbox:
    """folder/a/b/in is read and folder/a/b/out written to; a path with `..` in it that gets out is seen above."""

    folder: Path

    @property
    def given(self) -> Path:
        return self.folder / "a" / "b" / "in"

    @property
    def out(self) -> Path:
        return self.folder / "a" / "b" / "out"

    def fill(self, files: dict[str, bytes]) -> None:
        """Empty, then the given files."""
        given = str(self.given)
        shutil.rmtree(self.folder / "a", ignore_errors=True)
        self.out.mkdir(parents=True)
        for folder in {name.rpartition("/")[0] for name in files}:
            os.makedirs(f"{given}/{folder}", exist_ok=True)  # noqa: PTH103 (many small files: pathlib would double the time)
        for name, content in files.items():
            with open(f"{given}/{name}", "wb") as file:  # noqa: PTH123
                file.write(content)

    def state(self) -> dict[str, Any]:
        """What lies everywhere but in `out`. Folders on the way there change as it fills."""
        out, way = str(self.out), {str(self.given), str(self.given.parent), str(self.given.parent.parent)}
        return {
            path: (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
            for path, status in _walk(str(self.folder))
            if not path.startswith(out) and path not in way
        }


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for entry in os.scandir(folder):
        yield entry.path, entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)


def damaged(reader: Reader, samples: list[Sample], seed: int, number: int) -> tuple[dict[str, bytes], str, Random]:
    """The files of a case and which of them is damaged: a function of the reader, the seed and the number alone."""
    random = Random(f"{seed}/{reader.name}/{number}")
    sample = random.choice(samples)
    target = random.choice(sample.targets)
    files = dict(sample.files)
    files[target] = damage(random, files[target], of_suffix(target))
    if not target.endswith("manifest.json") and random.random() < 0.95:
        _keep_true(files, target, sample)
    return files, target, random


def _keep_true(files: dict[str, bytes], target: str, sample: Sample) -> None:
    """Give the damaged file's size to its manifest, so that it is read at all."""
    for folder in sample.artefacts:
        name = target.removeprefix(folder)
        if target.startswith(folder) and f"{folder}manifest.json" in files:
            manifest = json.loads(files[f"{folder}manifest.json"])
            if name in manifest["files"]:
                manifest["files"][name]["bytes"] = len(files[target])
                files[f"{folder}manifest.json"] = json.dumps(manifest).encode()


def _misplace(random: Random, target: Path) -> None:
    """Once in fifty cases no file stands there, but a folder, a loop, or a link that leads nowhere."""
    kind = random.randrange(150)
    if kind < 3:
        target.unlink()
        if kind == 0:
            target.mkdir()
        else:
            target.symlink_to(target if kind == 1 else target.parent / "nowhere")


def run_case(reader: Reader, samples: list[Sample], seed: int, number: int, sandbox: Sandbox) -> Outcome:
    files, target, random = damaged(reader, samples, seed, number)
    sandbox.fill(files)
    _misplace(random, sandbox.given / target)
    before = sandbox.state()
    said = fault = None
    try:
        reader.read(sandbox.given, sandbox.out, sandbox.given / target)
    except SmoeError as error:
        said, fault = str(error), _doubtful(error)
    except (Exception, Slow) as error:  # noqa: BLE001 (any other is what is looked for)
        fault = describe(error)
    return Outcome(said, fault or _traces(sandbox, before, refused=said is not None))


def _doubtful(error: SmoeError) -> str | None:
    """A refusal that is none: memory was asked for in vain, or nobody would read the sentence."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return f"memory: {describe(cause)}"
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    return (
        f"a sentence of {len(text)} characters: {describe(error)[:300]}" if len(text) > MOST_TEXT or not text else None
    )


def _traces(sandbox: Sandbox, before: dict[str, Any], *, refused: bool) -> str | None:
    after = sandbox.state()
    if after != before:
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        return f"written outside: {changed[0].removeprefix(str(sandbox.folder))}"
    left = sorted(entry.name for entry in os.scandir(sandbox.out))
    half = [name for name in left if refused or name.startswith(".")]
    return f"left behind: {half[0]}" if half else None


def describe(error: BaseException) -> str:
    """The exception and the innermost line of the project's own that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "/tests/" not in frame.filename and any(part in frame.filename for part in ("smoe_",))
    ]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    return f"{type(error).__name__} in {where}: {str(error)[:300]}"


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise Slow in a case that takes too much processor time; restart it with `signal.setitimer` for each case."""

    def stop(_signal: int, _frame: Any) -> None:
        raise Slow

    old = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
