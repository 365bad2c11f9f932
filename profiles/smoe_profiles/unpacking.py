"""How far a compressed file may unpack: a few bytes that claim very many are made to fill memory, and are no data."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from smoe_profiles.errors import InputError, reason

MOST_UNPACKED, MOST_RATIO = 1 << 28, 200
"""What unpacks to more bytes than this, and to more than so many times its size, is refused; routing packs 2 to 10."""

SMALL_FILE = 8 << 20
"""Larger streams are not looked through: what they may unpack to is no surprise any more."""

OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
STEP = 1 << 22


def check_expansion(where: str, packed: int, unpacked: int) -> None:
    """Raises InputError for bytes that claim to unpack to too many."""
    if unpacked > MOST_UNPACKED and unpacked > MOST_RATIO * packed:
        raise InputError(
            f"{where} unpacks from {packed} to {unpacked} bytes or more; unpack it yourself if it is meant."
        )


def check_stream(path: Path) -> None:
    """The same for a small compressed file that does not say how long it is: looked through until it is too long.

    Raises InputError if it is cut short or damaged.
    """
    packed, unpacked = path.stat().st_size, 0
    if path.suffix not in OPENERS or packed > SMALL_FILE:
        return
    try:
        with OPENERS[path.suffix](path) as file:
            while piece := len(file.read(STEP)):
                unpacked += piece
                check_expansion(str(path), packed, unpacked)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{path} cannot be unpacked ({reason(error)}).") from error
