"""One finished working folder for each bundled model, made once a session by the commands themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TEXTS = Path(__file__).parents[1] / "fixtures/texts"


def smoe(*arguments, cwd, code=0, env=None):
    """Run one command; returns its stdout and stderr. Fails with both if the exit code is another."""
    done = subprocess.run(
        [sys.executable, "-m", "smoe_cli", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return SimpleNamespace(out=done.stdout, err=done.stderr, json=lambda: json.loads(done.stdout))


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
