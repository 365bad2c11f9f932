"""smoe_solvers and smoe_profiles as libraries: public names, the examples in docstrings, the page docs/library.md."""

import ast
import doctest
import inspect
import io
import re
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from enum import EnumType
from importlib import import_module
from pathlib import Path

import pytest

import smoe_profiles
import smoe_solvers
from smoe_cli.placement import read_placement
from smoe_profiles import open_artefact
from tests.conftest import smoe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/library.md"
PACKAGES = (smoe_profiles, smoe_solvers)
PUBLIC = [(package, name) for package in PACKAGES for name in package.__all__]
FUNCTIONS = [(package, name) for package, name in PUBLIC if inspect.isfunction(getattr(package, name))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the trace and tables of real routing, and the archive they came from."""
    base = tmp_path_factory.mktemp("library")
    shutil.copy(ROOT / "tests/fixtures/routing/gptoss20b_layers.npz", base / "routing.npz")
    smoe("import", "routing.npz", cwd=base)
    smoe("build-tables", cwd=base)
    return base / "smoe-out"


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_a_public_name_comes_from_where_the_package_says_and_explains_itself(package, name):
    found = getattr(package, name)
    assert found is getattr(import_module(f"{package.__name__}.{package._HOME[name]}"), name)
    assert found.__doc__


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_are_there_at_run_time(package):
    block = next(node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If))
    shown = {alias.name: node.module for node in block.body for alias in node.names}
    assert shown == {name: f"{package.__name__}.{module}" for name, module in package._HOME.items()}
    assert sorted(shown) == sorted(package.__all__) == dir(package)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_name_that_is_not_public_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="placements"):
        _ = package.placements


def test_importing_the_packages_imports_nothing_heavy():
    heavy = "numpy scipy numba pyarrow torch transformers datasets safetensors joblib"
    code = f"import smoe_profiles, smoe_solvers, sys; print(sys.modules.keys() & set({heavy.split()!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_reading_traces_and_tables_imports_no_torch():
    code = "from smoe_profiles import *; import sys; print(sys.modules.keys() & {'torch', 'transformers', 'datasets'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(("package", "name"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_the_examples_of_a_public_function_hold(package, name, folder):
    function = getattr(package, name)
    [found] = doctest.DocTestFinder(recurse=False).find(function, name, extraglobs={"folder": folder})
    assert found.examples, f"{name} shows no example"
    said = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(found, out=said.write)
    assert not said.getvalue(), said.getvalue()


def test_the_page_prints_what_it_shows(folder):
    namespace, printed, shown = {}, None, 0
    with chdir(folder.parent):
        for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if language == "python":
                out = io.StringIO()
                with redirect_stdout(out):
                    exec(compile(text, str(PAGE), "exec"), namespace)  # the page is ours
                printed = out.getvalue()
            elif language == "text":
                assert printed == text
                shown += 1
    assert shown >= 3
    smoe("import", "placement.npz", "--as", "placement", cwd=folder.parent)
    placement = read_placement(open_artefact(folder / "placement-ep4", "placement"))
    assert placement.expert_to_rank.tolist() == [ranks.tolist() for ranks in namespace["found"].values()]


def test_the_first_example_is_five_lines():
    first = next(text for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if language == "python")
    assert len([line for line in first.splitlines() if line.strip()]) == 5


def test_the_page_names_everything_public_and_nothing_else():
    rows = re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(name for _, name in PUBLIC)


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_a_public_function_says_its_types(package, name):
    found = getattr(package, name)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(one.annotation is not one.empty for one in signature.parameters.values())
    else:
        assert isinstance(found, EnumType | type)


def test_the_packages_say_that_they_are_typed():
    for name in ("smoe_cli", "smoe_profiles", "smoe_solvers"):
        assert (Path(import_module(name).__file__).parent / "py.typed").is_file()
