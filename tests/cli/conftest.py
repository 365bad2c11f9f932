"""What a refused or interrupted command finds: tiny models, prompts, and a finished working folder to spoil."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import smoe
from tests.profiles.tiny_models import cached_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return cached_model(tmp_path_factory.getbasetemp(), "mixtral")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """An .npz of token ids: `few` [24, 32], `many` [8000, 64], `none`, and `late` with an id too large at the end."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.npz"
    generator = np.random.default_rng(0)
    late = generator.integers(0, 256, (24, 32))
    late[-1, -1] = 256
    np.savez(
        path,
        few=generator.integers(0, 256, (24, 32)),
        many=generator.integers(0, 256, (8000, 64)),
        none=np.empty((0, 4), np.int64),
        late=late,
    )
    return path


@pytest.fixture(scope="session")
def made(model, prompts, tmp_path_factory):
    """A working folder with trace, tables, placement-ep4 and checkpoint-ep4 of the tiny Mixtral."""
    folder = tmp_path_factory.mktemp("made") / "out"
    for step in (
        ["profile", "--model", model, "--dataset", f"{prompts}#few"],
        ["build-tables"],
        ["cocluster", "--ep", "4", "--effort", "fast", "--jobs", "1"],
        ["regroup"],
    ):
        smoe(*step, "-C", folder, cwd=folder.parent)
    return folder


@pytest.fixture
def work(made, tmp_path):
    """A copy of that folder to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))
