"""ExFlow's trace.npy (commit 2696131): [token, MoE layer], the one expert of each (top-1), no token ids or borders."""

from collections.abc import Sequence
from pathlib import Path

from smoe_profiles.importers.files import load_npy, whole_numbers
from smoe_profiles.importers.records import Facts, LayerAxis, Piece, ReadOptions, Records, join


def read(paths: Sequence[Path], _options: ReadOptions) -> Records:
    """Every file is one stretch of tokens; K is 1."""
    pieces = [
        Piece(whole_numbers(load_npy(path), str(path), 2).T[:, :, None], str(path), source)
        for source, path in enumerate(paths)
    ]
    return join(pieces, Facts(LayerAxis.ORDINAL))
