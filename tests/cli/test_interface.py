"""What scripts and people rely on: options, help, the generated reference, and how fast help can be."""

import subprocess
import sys
from pathlib import Path

from smoe_cli import errors, reference

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("options.txt")
HEAVY = ("numpy", "torch", "transformers", "datasets", "pyarrow", "numba", "scipy")


def test_no_option_changes_unnoticed():
    """A change made on purpose is copied into options.txt by hand, so that somebody has read it."""
    found = [f"{name} {option.frozen()}" for name, options in reference.command_options().items() for option in options]
    assert found == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_the_reference_page_is_what_the_program_says():
    assert (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8") == reference.page()


def test_every_option_and_command_explains_itself():
    for name, options in reference.command_options().items():
        for option in options:
            assert option.help, f"{name} {option.names} has no help"


def test_help_and_version_import_nothing_heavy():
    script = (
        "import sys\n"
        "from smoe_cli.app import run\n"
        "for arguments in (['--help'], ['--version'], ['cocluster', '--help'], ['profile', '--help']):\n"
        "    run(arguments)\n"
        f"print('loaded:', sorted(set(sys.modules) & set({HEAVY!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_the_help_lists_commands_in_the_order_of_the_pipeline():
    said = subprocess.run(
        [sys.executable, "-m", "smoe_cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    listed = [line.split()[0] for line in said.partition("Commands:\n")[2].splitlines() if line[2:3].strip()]
    record, place, apply = "profile import inspect", "build-tables cocluster evaluate", "regroup verify export"
    assert listed == f"{record} {place} {apply} report demo models bench".split()


def test_piped_help_is_plain():
    done = subprocess.run(
        [sys.executable, "-m", "smoe_cli", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "\x1b" not in done.stdout
    for command in reference.command_options():
        assert command in done.stdout


def test_a_missing_package_is_named_with_its_pip_line(capsys):
    assert errors.report(ModuleNotFoundError("No module named 'datasets'", name="datasets")) == 6
    assert capsys.readouterr().err == "error: datasets is not installed; pip install datasets.\n"
