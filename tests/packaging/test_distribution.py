"""What is shipped: wheel and sdist hold what they must and nothing else, and the wheel runs outside this tree."""

import email
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "smoe_cli": ROOT / "smoe_cli",
    "smoe_profiles": ROOT / "profiles/smoe_profiles",
    "smoe_solvers": ROOT / "solvers/smoe_solvers",
}
MADE = {".pyc", ".nbi", ".nbc"}


def build(source: Path, target: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the unpacked sdist: what is not in the one cannot be in the other."""
    folder = tmp_path_factory.mktemp("source")
    subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
    (source,) = folder.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked, as pip does with one of pure Python."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file that belongs to a package, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in MADE
    }


def run_installed(installed, *command, **variables):
    """Run Python on the unpacked wheel in front of everything else, outside this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    return subprocess.run(
        [sys.executable, "-P", *command],
        cwd=installed,
        env=kept | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_of_a_package(package, installed):
    """Hardware models, bundled models, the report's templates and the rest, byte by byte."""
    assert contents(installed / package) == contents(PACKAGES[package])


def test_the_wheel_holds_nothing_else(installed):
    assert {path.name for path in installed.iterdir()} == {*PACKAGES, f"smoe-{version()}.dist-info"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_type_marker_is_in_the_wheel(package, wheel):
    assert f"{package}/py.typed" in zipfile.ZipFile(wheel).namelist()


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_sdist_is_what_makes_the_wheel_and_no_more(sdist):
    with tarfile.open(sdist) as archive:
        names = {Path(name).relative_to(f"smoe-{version()}").parts[0] for name in archive.getnames()}
    texts = {"PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", ".gitignore"}
    assert names == {"smoe_cli", "profiles", "solvers", *texts}


def test_the_metadata_say_what_pyproject_says(installed):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = email.message_from_string((installed / f"smoe-{version()}.dist-info/METADATA").read_text("utf-8"))
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(plain) == sorted(project["dependencies"])
    assert (installed / f"smoe-{version()}.dist-info/licenses/LICENSE").exists()
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_the_wheel_runs_outside_this_tree(installed):
    script = (
        "import sys, smoe_cli.app, smoe_profiles, smoe_solvers\n"
        f"assert smoe_cli.app.__file__.startswith({str(installed)!r}), smoe_cli.app.__file__\n"
        "from smoe_cli.hardware import load_hardware\n"
        "print(load_hardware('pcie').name, file=sys.stderr)\n"
        "sys.exit(smoe_cli.app.run(['models', '--json']))\n"
    )
    done = run_installed(installed, "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "pcie\n"
    models = {model["model"]: model["here"] for model in json.loads(done.stdout)["models"]}
    assert models["tiny-deepseek"]
    assert models["tiny-mixtral"]


WITHOUT_TRITON = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_everything_but_the_kernels_is_imported_without_triton(installed):
    """A kernel's import is what names the missing package."""
    script = (
        WITHOUT_TRITON + "import smoe_solvers, smoe_profiles, smoe_cli.runtime.layer, smoe_cli.runtime.region\n"
        "assert 'triton' not in sys.modules\n"
        "from smoe_cli import errors\n"
        "try:\n"
        "    import smoe_cli.runtime.plan_kernel\n"
        "except BaseException as error:\n"
        "    sys.exit(errors.report(error))\n"
    )
    done = run_installed(installed, "-c", script)
    assert done.returncode == 6, done.stderr
    assert done.stderr == "error: triton is not installed; pip install 'smoe[runtime]'.\n"
