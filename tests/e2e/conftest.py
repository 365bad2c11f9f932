"""One finished working folder for each bundled model, made once a session by the commands themselves."""

import json
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from smoe_cli.app import run

TEXTS = Path(__file__).parents[1] / "fixtures/texts"


def smoe(*arguments, cwd, code=0):
    """Run one command in this process; returns its stdout and stderr. Fails with both if the exit code is another."""
    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        found = run([str(argument) for argument in arguments])
    assert found == code, f"exit {found}\n{out.getvalue()}\n{err.getvalue()}"
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue(), json=lambda: json.loads(out.getvalue()))


@pytest.fixture(scope="session")
def run_smoe():
    return smoe


def _path(folder, model, ep):
    """Fit texts to a placement, a second trace of other texts to measure on."""
    tokens = ("--max-tokens", "10000")
    smoe("profile", "--model", model, "--dataset", TEXTS / "fit.jsonl.gz", *tokens, "--split", "fit", cwd=folder)
    smoe(
        *("profile", "--model", model, "--dataset", TEXTS / "heldout.jsonl.gz", *tokens),
        *("--split", "heldout", "-C", "other"),
        cwd=folder,
    )
    smoe("build-tables", cwd=folder)
    smoe("cocluster", "--ep", ep, "--effort", "fast", cwd=folder)
    smoe("regroup", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def deepseek_path(tmp_path_factory):
    return _path(tmp_path_factory.mktemp("tiny-deepseek"), "tiny-deepseek", 8)


@pytest.fixture(scope="session")
def mixtral_path(tmp_path_factory):
    return _path(tmp_path_factory.mktemp("tiny-mixtral"), "tiny-mixtral", 2)
