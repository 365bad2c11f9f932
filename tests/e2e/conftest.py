"""One finished working folder for each bundled model, made once a session by the commands themselves."""

from pathlib import Path

import pytest

from tests.conftest import smoe

TEXTS = Path(__file__).parents[1] / "fixtures/texts"


def _path(folder, model, ep):
    """Fit texts to a placement, a second trace of other texts to measure on."""
    for text, tokens, where in (("fit", "3000", ()), ("heldout", "6000", ("-C", "other"))):
        texts = ("--dataset", TEXTS / f"{text}.jsonl.gz", "--max-tokens", tokens, "--split", text)
        smoe("profile", "--model", model, *texts, *where, cwd=folder)
    smoe("build-tables", cwd=folder)
    smoe("cocluster", "--ep", ep, "--effort", "fast", "--jobs", "1", cwd=folder)
    smoe("regroup", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def deepseek_path(tmp_path_factory):
    return _path(tmp_path_factory.mktemp("tiny-deepseek"), "tiny-deepseek", 8)


@pytest.fixture(scope="session")
def mixtral_path(tmp_path_factory):
    return _path(tmp_path_factory.mktemp("tiny-mixtral"), "tiny-mixtral", 2)
