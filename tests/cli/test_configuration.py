"""Where an option's value comes from when it is a file or a variable, and what a file may not say."""

import pytest

from smoe_cli import errors
from smoe_cli.app import run


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(here, text, *arguments):
    """Run a command under a configuration; returns its exit code."""
    (here / "smoe.toml").write_text(text)
    return run([*arguments, "--config", "smoe.toml"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sede = 7\n", "no smoe command has no option 'sede'"),
        ("[cocluster]\nteta = 0.1\n", "smoe cocluster has no option 'teta'"),
        ("[coclustr]\nep = 8\n", "[coclustr] names no smoe command"),
        ("[regroup]\nconfig = 'other.toml'\n", "no option 'config'"),
    ],
    ids=["at the top", "in another command's table", "a table's own name", "a config in a config"],
)
def test_a_misspelt_name_in_a_config_is_not_ignored(here, text, named, capsys):
    assert configured(here, text, "regroup") == errors.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert named in said
    assert "smoe.toml" in said


def test_a_shared_key_is_for_the_commands_that_have_it(here, capsys):
    assert configured(here, "ep = 8\ndir = 'elsewhere'\n", "regroup") == errors.INPUT
    assert "elsewhere holds no placement" in capsys.readouterr().err


def test_a_plain_text_for_a_repeatable_option_is_one_value_and_not_its_letters(here, capsys):
    assert configured(here, "[build-tables]\ntrace = 'some trace'\n", "build-tables") == errors.INPUT
    assert "some trace is missing" in capsys.readouterr().err


def test_a_list_is_for_repeatable_options(here, capsys):
    assert configured(here, "[build-tables]\ntrace = ['first trace', 'b']\n", "build-tables") == errors.INPUT
    assert "first trace is missing" in capsys.readouterr().err
    assert configured(here, "[regroup]\nmodel = ['a', 'b']\n", "regroup") == errors.USAGE
    assert "one number or text was expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[cocluster]\nseed = 1.5\n", "--seed"),
        ("[cocluster]\nseed = true\n", "one number or text"),
        ("[cocluster]\nforce = 'yes'\n", "true or false"),
        ("[cocluster]\nmix = [['a']]\n", "one number or text"),
        ("cocluster = 8\n", "a table [cocluster] was expected"),
    ],
)
def test_a_value_of_another_kind_is_refused(here, text, named, capsys):
    assert configured(here, text, "cocluster", "--ep", "8") == errors.USAGE
    assert named in " ".join(capsys.readouterr().err.split())


def boom(*_arguments, **_options):
    raise ZeroDivisionError("made to fail")


@pytest.mark.parametrize("way", ["flag", "variable", "config"])
def test_debug_shows_the_traceback_however_it_is_asked_for(here, way, monkeypatch, capsys):
    monkeypatch.setattr("smoe_profiles.models.bundled_names", boom)
    (here / "smoe.toml").write_text("debug = true\n")
    if way == "variable":
        monkeypatch.setenv("SMOE_DEBUG", "1")
    arguments = {"flag": ["--debug"], "variable": [], "config": ["--config", "smoe.toml"]}[way]
    assert run(["models", *arguments]) == errors.BUG
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last)") == 1
    assert "error: this is a bug in smoe: ZeroDivisionError: made to fail" in said


def test_without_debug_there_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("smoe_profiles.models.bundled_names", boom)
    assert run(["models"]) == errors.BUG
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", [["models"], ["regroup"], ["export", "--to", "vllm"], ["verify"], ["inspect"]])
@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_folder_that_is_a_file_is_refused_alike_by_every_command(here, command, way, monkeypatch, capsys):
    (here / "file").write_text("")
    if way == "variable":
        monkeypatch.setenv("SMOE_DIR", "file")
    assert run([*command, *(["-C", "file"] if way == "flag" else [])]) == errors.USAGE
    assert "'file' is a file" in capsys.readouterr().err
