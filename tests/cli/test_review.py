"""Faults a first user met, each named after what went wrong."""

from pathlib import Path

import pytest
import typer

from smoe_cli.app import run
from smoe_cli.commands.evaluate import _thresholds
from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_cli.folder import choose_placement, placement_path
from smoe_profiles.artefact import publish


def test_a_bare_placement_name_means_the_folder_not_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "here/placement-ep4").mkdir(parents=True)
    with publish(tmp_path / "out/placement-ep4", "placement", parameters={}, model={}):
        pass
    monkeypatch.chdir(tmp_path / "here")
    assert choose_placement(Path("../out"), "placement-ep4").path == Path("../out/placement-ep4")


def test_an_empty_folder_is_no_placement_to_choose_from(tmp_path):
    (tmp_path / "placement-ep4-..").mkdir()
    with publish(tmp_path / "placement-ep4", "placement", parameters={}, model={}):
        pass
    assert choose_placement(tmp_path, None).path.name == "placement-ep4"


@pytest.mark.parametrize("name", ["../../evil", "..", ".hidden", "a b", ""])
def test_a_name_cannot_lead_out_of_the_folder(name, tmp_path):
    with pytest.raises(UsageError, match="--name"):
        placement_path(tmp_path, 4, name)


def test_a_second_bound_does_not_silently_replace_the_first():
    with pytest.raises(typer.BadParameter, match="bounded twice"):
        _thresholds("--fail-under", ["lar=.99", "lar=.1"])


def test_json_is_never_infinity():
    with pytest.raises(ValueError, match="JSON"):
        Console(json=True).result({"x": float("inf")}, lambda: None)


def test_a_command_name_as_a_plain_config_key_is_a_usage_error(tmp_path):
    (tmp_path / "smoe.toml").write_text("evaluate = 3\n")
    assert run(["evaluate", "--config", str(tmp_path / "smoe.toml")]) == 2


def test_an_empty_file_of_prompts_is_called_empty(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("")
    arguments = [
        "profile",
        "--model",
        "tiny-mixtral",
        "--dataset",
        str(tmp_path / "none.jsonl"),
        "-C",
        str(tmp_path / "o"),
    ]
    assert run(arguments) == 3
    assert "is empty" in capsys.readouterr().err
