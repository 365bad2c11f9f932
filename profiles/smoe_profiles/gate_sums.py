"""The early gate's records of several traces as one. `smoe_profiles.capture.linear` says what they hold."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError
from smoe_profiles.tables import load_arrays, save_arrays

SUMS = ("xx", "xy", "yy")
SAME = "embedding.safetensors"
SAMPLE_ROWS = 16_384
"""Rows kept of each part, the first that come; as recorded."""


def add_records(folders: Sequence[Path], target: Path) -> None:
    """Add `linear/` folders up into one: sums added, sampled rows one after another, the embedding as it is.

    Folders that are not there are passed over; one alone is copied. Raises InputError where they do not go together.
    """
    found = [folder for folder in folders if folder.is_dir()]
    if not found:
        return
    if len(found) == 1:
        shutil.copytree(found[0], target)
        return
    target.mkdir()
    names = sorted(path.name for path in found[0].iterdir())
    for name in names:
        pieces = [load_arrays(folder / name) for folder in found]
        for folder, piece in zip(found, pieces, strict=True):
            _check_alike(folder / name, piece, found[0] / name, pieces[0])
        save_arrays(target / name, _added(pieces) if name != SAME else pieces[0])


def _check_alike(
    path: Path, piece: dict[str, npt.NDArray[Any]], first_path: Path, first: dict[str, npt.NDArray[Any]]
) -> None:
    if piece.keys() != first.keys():
        raise InputError(f"{path} holds {sorted(piece)}; {first_path} holds {sorted(first)}.")
    for name, array in piece.items():
        whole = path.name == SAME or name in SUMS
        same = array.shape == first[name].shape if whole else array.shape[1:] == first[name].shape[1:]
        if not same or (path.name == SAME and not np.array_equal(array, first[name])):
            raise InputError(f"{path} and {first_path} differ in {name}; their features are not the same.")


def _added(pieces: Sequence[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {
        name: np.sum([piece[name] for piece in pieces], axis=0)
        if name in SUMS
        else np.concatenate([piece[name] for piece in pieces])[:SAMPLE_ROWS]
        for name in pieces[0]
    }
