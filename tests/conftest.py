"""No test reaches a network or the user's own hub cache: both are switched off before anything reads them.

Hypothesis draws the same examples in every run and never judges by the clock, so that a run can be repeated; new
examples are what `make fuzz` is for.
"""

import json
import os
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")

os.environ["HF_HUB_OFFLINE"] = "1"
_HUB = tempfile.TemporaryDirectory(prefix="smoe-hub-")  # removed when the tests end
os.environ["HF_HOME"] = _HUB.name


def smoe(*arguments, cwd, code=0):
    """Run one command in this process; returns its stdout and stderr. Fails with both if the exit code is another."""
    from smoe_cli.app import run

    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        found = run([str(argument) for argument in arguments])
    assert found == code, f"exit {found}\n{out.getvalue()}\n{err.getvalue()}"
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue(), json=lambda: json.loads(out.getvalue()))


@pytest.fixture(scope="session")
def run_smoe():
    return smoe
