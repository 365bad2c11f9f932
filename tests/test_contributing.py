"""CONTRIBUTING.md names files and targets that are there, and no target is left out."""

import re

from tests.test_imports import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_make_target_has_a_row():
    table = TEXT[TEXT.index("## Make targets") : TEXT.index("## Recipes")]
    rows = {name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rows == set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_file_named_is_there():
    named = {name for name in re.findall(r"`([\w./]+/[\w./]*)`", TEXT) if "NAME" not in name}
    places = ("", "smoe_cli", "profiles/smoe_profiles", "solvers/smoe_solvers", "tests", "docs")
    lost = {name for name in named if not any((ROOT / place / name).exists() for place in places)}
    assert len(named) > 30
    assert not lost
