"""smoe in processes of its own, as a shell, a CI job or a job scheduler starts it, and what lies in a folder after."""

import os
import subprocess
import sys
from pathlib import Path

SMOE = [sys.executable, "-m", "smoe_cli"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    return kept | OFFLINE | extra


def smoe_process(*arguments: object, variables: dict[str, str] | None = None, **options):
    return subprocess.run(
        [*SMOE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment(**(variables or {})),
        **options,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_one_error(stderr: str, *named: object) -> None:
    """One `error:` that names what it must, and nothing of Python's."""
    assert "Traceback" not in stderr
    assert "this is a bug" not in stderr
    assert [line[:7] for line in stderr.splitlines()].count("error: ") == 1
    message = stderr[stderr.index("error: ") :]
    for text in named:
        assert str(text) in message
