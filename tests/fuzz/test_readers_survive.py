"""The short form of `make fuzz`: a few damaged files through every reader, in this process."""

import warnings
from dataclasses import replace

import pytest

from smoe_profiles.errors import InputError
from tests.fuzz.cases import Sandbox, run_case
from tests.fuzz.readers import House, readers

CASES = 8
NAMES = [reader.name for reader in readers(House(None))]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    return House(tmp_path_factory.mktemp("house"))


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused_with_a_sentence(name, house, tmp_path):
    reader = next(reader for reader in readers(house) if reader.name == name)
    samples, sandbox = reader.samples(), Sandbox(tmp_path / "sandbox")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that write the damage, as of a name twice in an archive
        found = [run_case(reader, samples, 0, number, sandbox) for number in range(CASES)]
    assert [(number, one.fault) for number, one in enumerate(found) if one.fault] == []


def test_most_damage_is_noticed(house, tmp_path):
    """Else nothing would be damaged, or nothing looked at."""
    reader = next(reader for reader in readers(house) if reader.name == "safetensors")
    found = [run_case(reader, reader.samples(), 1, number, Sandbox(tmp_path / "sandbox")) for number in range(40)]
    assert sum(one.said is not None for one in found) > 20
    assert len({one.said for one in found}) > 10


def test_an_unexpected_error_a_file_outside_and_a_half_written_one_are_faults(house, tmp_path):
    """What the cases look for is seen when it is there."""

    def escapes(folder, _out, _target):
        (folder.parent.parent / "escaped").write_text("x")

    def leaves(_folder, out, _target):
        (out / ".trace.partial").mkdir()

    def breaks(_folder, _out, _target):
        raise KeyError("x")

    def quotes(_folder, _out, _target):
        raise InputError("x" * 10**6)

    sample = next(reader for reader in readers(house) if reader.name == "hardware model")
    told = []
    for read in (escapes, leaves, breaks, quotes):
        case = run_case(replace(sample, read=read), sample.samples(), 0, 0, Sandbox(tmp_path / read.__name__))
        told.append(case.fault)
    assert told[:3] == ["written outside: /a/escaped", "left behind: .trace.partial", "KeyError in ?: 'x'"]
    assert told[3] is None, "a sentence that quotes too much is cut, whoever raised it"
