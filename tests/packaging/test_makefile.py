"""The Makefile says of every target what it is for, and knows the packages that pyproject.toml names."""

import re
import subprocess
from pathlib import Path

from tests.packaging import dependencies

ROOT = Path(__file__).parents[2]
WANTED = {"lint", "type", "test", "matrix", "fuzz", "ray", "shots", "bench", "reproduce", "docs", "smoke", "audit"}


def test_every_target_is_in_the_help_and_phony():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == targets == set(phony.split())
    assert targets >= WANTED


def test_every_dependency_has_a_reason():
    assert set(dependencies.WHY) == set(dependencies.direct_dependencies())
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    for name in dependencies.direct_dependencies():
        if name in dependencies.pinned():
            assert f"| {dependencies.WHY[name]} |" in page


def test_a_licence_is_what_the_metadata_say():
    class Package:
        def __init__(self, **fields):
            from email.message import Message

            self.metadata = Message()
            for name, values in fields.items():
                for value in values:
                    self.metadata[name.replace("_", "-")] = value

    long = "Permission is hereby granted, free of charge, to any person"
    osi = "License :: OSI Approved"
    assert dependencies.licence(Package(License_Expression=["MIT"], License=["BSD"])) == "MIT"
    assert dependencies.licence(Package(Classifier=[osi, f"{osi} :: GNU GPL"], License=[long])) == "GNU GPL"
    assert dependencies.licence(Package(License=["BSD-3-Clause"])) == "BSD-3-Clause"
    assert dependencies.licence(Package(License=[long])) == dependencies.licence(Package()) == "unknown"
    assert dependencies.COPYLEFT.search("GNU GPL")
    assert not dependencies.COPYLEFT.search("Apache Software License")
