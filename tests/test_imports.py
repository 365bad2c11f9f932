"""Imports go from smoe_cli to smoe_profiles and smoe_solvers, which know nothing of each other."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "smoe_cli": ROOT / "smoe_cli",
    "smoe_profiles": ROOT / "profiles/smoe_profiles",
    "smoe_solvers": ROOT / "solvers/smoe_solvers",
}
FORBIDDEN = {
    "smoe_cli": set(),
    "smoe_profiles": {"smoe_cli", "smoe_solvers", "typer", "rich"},
    "smoe_solvers": {"smoe_cli", "smoe_profiles", "typer", "rich", "torch", "transformers", "pyarrow", "safetensors"},
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    files = list(PACKAGES[package].rglob("*.py"))
    assert len(files) > 5
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def test_the_solvers_touch_no_files():
    for path in PACKAGES["smoe_solvers"].rglob("*.py"):
        assert not imported(path) & {"pathlib", "os", "json", "shutil"}, path


@pytest.mark.parametrize("path", sorted((ROOT / "tests/bench").rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_names_nothing_that_is_gone(path):
    """They run for minutes and are not part of this suite; a renamed function would show only then."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), f"{node.module}.{name}"
