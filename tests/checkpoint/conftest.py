"""Shared by the tests of renumbered checkpoints: tiny models, regrouping without a placement, and damage by hand."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from smoe_cli.checkpoint.rewrite import plan_rewrite
from smoe_cli.checkpoint.writer import write_checkpoint
from smoe_profiles.models import Model, find_model
from tests.profiles.tiny_models import EXPERTS, MOE_LAYERS, cached_model

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(name): the folder of a tiny checkpoint, built once; never written to."""
    base = tmp_path_factory.getbasetemp()
    return lambda name: cached_model(base, name)


def permutations(name: str, seed: int) -> np.ndarray:
    """A random physical_to_logical [L, E] for a tiny model."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(EXPERTS) for _ in MOE_LAYERS[name]])


def whole_groups(name: str, seed: int, groups: int = 4) -> np.ndarray:
    """A random physical_to_logical that keeps router groups whole."""
    generator = np.random.default_rng(seed)
    size = EXPERTS // groups
    return np.stack(
        [
            np.concatenate([group * size + generator.permutation(size) for group in generator.permutation(groups)])
            for _ in MOE_LAYERS[name]
        ]
    )


def regroup(source: Path | Model, physical_to_logical: np.ndarray, target: Path) -> Path:
    """Write the renumbered checkpoint and check that progress told its bytes."""
    model = source if isinstance(source, Model) else find_model(str(source))
    target.mkdir()
    done: list[int] = []
    rewrite = plan_rewrite(model, physical_to_logical, target)
    write_checkpoint(rewrite, target, done.append)
    for note in target.glob(".*.json"):
        note.unlink()
    assert sum(done) == model.nbytes
    return target


def editable(source: Path, target: Path) -> Path:
    """A copy of a one-file checkpoint that a test may damage."""
    return Path(shutil.copytree(source, target))


def edit_tensors(folder: Path, change) -> None:
    """Change the tensors of a one-file checkpoint: change(dict) in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
