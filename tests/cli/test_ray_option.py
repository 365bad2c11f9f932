"""--ray where there is no Ray, or no such address; clusters are tested by `make ray`."""

import sys
from pathlib import Path

import pytest

ROUTING = Path(__file__).parents[1] / "fixtures/routing/gptoss20b_layers.npz"
COMMANDS = (
    ("build-tables", "--force"),
    ("build-tables", "--shard", "1/2"),
    ("cocluster", "--ep", 4),
    ("cocluster", "--ep", 4, "--compare"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_smoe):
    path = tmp_path_factory.mktemp("ray")
    run_smoe("import", ROUTING, cwd=path)
    run_smoe("build-tables", cwd=path)
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command)))
def test_ray_that_is_not_installed_is_named_with_its_pip_line(run_smoe, folder, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = run_smoe(*command, "--ray", "auto", cwd=folder, code=6).err
    assert said == "error: --ray needs Ray, which is not installed; pip install smoe[ray].\n"
    assert sorted(path.name for path in (folder / "smoe-out").iterdir()) == ["tables", "trace"]


@pytest.mark.parametrize("address", ["local", "head", "http://head:6379", "ray://head", "head:", ":6379", "a:b:1"])
def test_an_address_that_is_none_is_a_usage_error(run_smoe, folder, address):
    said = run_smoe("cocluster", "--ep", 4, "--ray", address, cwd=folder, code=2).err
    assert f"--ray {address!r}: HOST:PORT, ray://HOST:PORT or auto is meant" in said
