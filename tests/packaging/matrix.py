"""`make matrix`: the wheel and the sdist, each installed in a clean environment outside the source tree, and run there.

Three environments: the lowest versions that pyproject.toml allows, those of constraints.txt, and the newest ones on the
newest Python of this machine. In each, a whole path on the bundled model is run as a user would type it. A warning that
points at a line of ours fails the cell. Packages come from the registry through uv; where PyTorch's own index can be
reached, UV_TORCH_BACKEND=cpu spares the download of CUDA libraries, and UV_FIND_LINKS names a folder of wheels.

    python tests/packaging/matrix.py [oldest|pinned|newest ...]
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = ("torch", "transformers", "typer", "rich", "numpy", "scipy", "numba", "pyarrow", "datasets", "triton")
LAST_MINOR, FIRST_MINOR = 15, 11

PATH_STEPS = (
    ("profile", "--model", "tiny-deepseek", "--max-tokens", "4000"),
    ("inspect",),
    ("build-tables",),
    ("cocluster", "--ep", "8", "--effort", "fast"),
    ("regroup",),
    ("verify",),
    ("evaluate",),
    ("export", "--to", "sglang"),
    ("report",),
)
"""The job from prompts to a served placement, one command after the other in one folder."""

REFUSED = {(): 2, ("frobnicate",): 2, ("profile", "--frobnicate"): 2, ("verify", "-C", "nowhere"): 3}
"""Wrong calls and the exit codes that scripts rely on."""


@dataclass(frozen=True)
class Cell:
    """One environment. resolution: how uv chooses versions, None for constraints.txt; built: what is installed."""

    name: str
    python: Path
    resolution: str | None
    built: str


class CellError(Exception):
    """A command of a cell did not do what it must."""


def main(wanted: list[str]) -> int:
    """Run the cells wanted, all by default; returns how many failed."""
    oldest, newest = find_python(FIRST_MINOR), next(filter(None, map(_python, range(LAST_MINOR, FIRST_MINOR, -1))))
    cells = [
        Cell("oldest", oldest, "lowest-direct", "*.whl"),
        Cell("pinned", oldest, None, "*.tar.gz"),
        Cell("newest", newest, "highest", "*.whl"),
    ]
    rows, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="smoe-matrix-") as scratch:
        folder = Path(scratch)
        call([sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")], cwd=ROOT)
        for cell in cells:
            if wanted and cell.name not in wanted:
                continue
            started = time.monotonic()
            try:
                versions = install(cell, folder)
                warned = smoke(folder / cell.name, folder / f"{cell.name}-work")
                result = f"all {len(PATH_STEPS)} steps"
            except CellError as error:
                print(f"{cell.name}: {error}", file=sys.stderr)
                versions, warned, result, failed = {}, 0, "FAILED", failed + 1
            shutil.rmtree(folder / cell.name, ignore_errors=True)
            facts = {"cell": cell.name, "built": cell.built[2:], **versions}
            rows.append(facts | {"warnings": str(warned), "minutes": f"{(time.monotonic() - started) / 60:.1f}"})
            rows[-1]["result"] = result
    print_table(rows)
    return failed


def find_python(minor: int) -> Path:
    found = _python(minor)
    if found is None:
        raise SystemExit(f"Python 3.{minor} is not on this machine.")
    return found


def _python(minor: int) -> Path | None:
    """An interpreter of Python 3.minor that runs: on PATH, or among those that pyenv keeps."""
    name = f"python3.{minor}"
    places = [shutil.which(name), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))]
    for place in filter(None, places):
        if subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(place)
    return None


def install(cell: Cell, folder: Path) -> dict[str, str]:
    """Make the cell's environment in `folder`; returns the versions in it."""
    environment = folder / cell.name
    python = environment / "bin" / "python"
    requirements = folder / f"{cell.name}.txt"
    version = call([str(cell.python), "-c", "import platform; print(platform.python_version())"]).stdout.strip()
    how = ["--resolution", cell.resolution] if cell.resolution else ["--constraint", str(ROOT / "constraints.txt")]
    extras = ["--extra", "report", "--extra", "runtime"]
    chosen = ["pip", "compile", "--quiet", "--python-version", version, *extras, *how, "--output-file"]
    uv(*chosen, str(requirements), str(ROOT / "pyproject.toml"))
    uv("venv", "--quiet", "--python", str(cell.python), str(environment))
    uv("pip", "install", "--quiet", "--python", str(python), "--requirement", str(requirements))
    (built,) = (folder / "dist").glob(cell.built)
    uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", str(built))
    uv("pip", "check", "--python", str(python))
    listed = json.loads(uv("pip", "list", "--format", "json", "--python", str(python)).stdout)
    versions = {package["name"]: package["version"] for package in listed}
    return {"python": version, **{name: versions.get(name, "none") for name in SHOWN}}


def smoke(environment: Path, work: Path) -> int:
    """Run the path and the refused calls; returns how many warnings other packages raised."""
    work.mkdir()
    script = environment / "bin" / "smoe"
    where = call([str(environment / "bin" / "python"), "-c", "import smoe_cli; print(smoe_cli.__file__)"], cwd=work)
    if not where.stdout.startswith(str(environment)):
        raise CellError(f"smoe was imported from {where.stdout.strip()}, not from the environment.")
    warned = 0
    help_pages = [("--help",), ("--version",), *((step[0], "--help") for step in PATH_STEPS)]
    for arguments in (*help_pages, ("models", "--json"), *PATH_STEPS):
        said = call([str(script), *arguments], cwd=work).stderr
        warnings = [line for line in said.splitlines() if "Warning: " in line]
        ours = [line for line in warnings if "/smoe_" in line]
        if ours:
            raise CellError(f"smoe {' '.join(arguments)} warns: {ours[0]}")
        warned += len(warnings)
    for arguments, code in REFUSED.items():
        call([str(script), *arguments], cwd=work, code=code)
    return warned


def uv(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return call([sys.executable, "-m", "uv", *arguments])


def call(command: list[str], *, cwd: Path | None = None, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run a command without what this checkout's environment says of Python. Raises CellError for another exit code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMOE_", "VIRTUAL_"))}
    variables = kept | {"PYTHONWARNINGS": "default", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != code:
        said = "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-15:]])
        raise CellError(f"{' '.join(command)} left with {done.returncode}, not {code}:\n{said}")
    return done


def print_table(rows: list[dict[str, str]]) -> None:
    """One column a cell, one line a fact: fits any terminal."""
    names = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    for name in names:
        print(f"{name:>14}  " + "  ".join(f"{row.get(name, ''):<12}" for row in rows).rstrip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
