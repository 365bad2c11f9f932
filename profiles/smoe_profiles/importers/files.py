"""Files of other programs, opened without trusting them: every failure is an InputError that names the file.

A claimed size is held against the bytes that are there before anything is allocated, and nothing is unpickled
but tensors, lists and tables of plain values.
"""

import io
import json
import lzma
import pickle
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, reason
from smoe_profiles.unpacking import check_expansion

NPY_MAGIC = b"\x93NUMPY"
ZIP_MAGIC = b"PK\x03\x04"
READ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    TypeError,
    ValueError,
)
_UNPICKLING_ERRORS = (*READ_ERRORS, pickle.UnpicklingError, AssertionError, AttributeError, ImportError)

Array = npt.NDArray[Any]


def first_bytes(path: Path, count: int = 16) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


class Archive(Mapping[str, Array]):
    """The arrays of an .npz file by key, each read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first_bytes(path)
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        except READ_ERRORS as error:
            raise InputError(f"{path} is not a readable .npz file ({reason(error)}).") from error
        if len(set(names)) != len(names):
            raise InputError(f"{path} holds an array twice; it is no plain NumPy archive.")
        self._names = names

    def __getitem__(self, key: str) -> Array:
        if key not in self._names:
            raise InputError(f"{self.path} has no array {key!r}; it holds {', '.join(self._names) or 'nothing'}.")
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as file:
                member = archive.getinfo(f"{key}.npy")
                check_expansion(f"{self.path}, array {key}", member.compress_size, member.file_size)
                return read_npy(file, member.file_size, f"{self.path}, array {key}")
        except READ_ERRORS as error:
            raise InputError(f"{self.path}: array {key} cannot be read ({reason(error)}).") from error

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def number(self, key: str) -> int | None:
        """A scalar whole number; None if the key is absent."""
        if key not in self:
            return None
        value = self[key]
        if value.size != 1 or value.dtype.kind not in "iu" or int(value.reshape(-1)[0]) < 0:
            raise InputError(f"{self.path}: {key} is {value.dtype} {list(value.shape)}; one whole number was expected.")
        return int(value.reshape(-1)[0])


def read_npy(file: IO[bytes], size: int, where: str) -> Array:
    """One array of the .npy format from `size` bytes. Raises InputError for objects, or a size other than claimed."""
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise InputError(f"{where} is of .npy version {version}; 1.0 and 2.0 are read.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy remarks on headers of Python 2
            shape, fortran, dtype = read_header[version](file)
        items = 1
        for length in shape:
            items *= length
        left = size - file.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or items * dtype.itemsize != left:
            raise InputError(f"{where} claims {dtype} {list(shape)}, but {left} bytes follow its header.")
        data = file.read(left)
        if len(data) != left:
            raise InputError(f"{where} ends after {len(data)} of {left} bytes; the file is cut short.")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except READ_ERRORS as error:
        raise InputError(f"{where} is no readable .npy array ({reason(error)}).") from error


def load_npy(path: Path) -> Array:
    """The array of one .npy file."""
    first_bytes(path)
    with path.open("rb") as file:
        return read_npy(file, path.stat().st_size, str(path))


def npy_from_bytes(data: bytes, where: str) -> Array:
    return read_npy(io.BytesIO(data), len(data), where)


def load_json(path: Path) -> list[Any]:
    """The documents of a .json file (one) or .jsonl file (one a line)."""
    first_bytes(path)
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return [json.loads(text)]
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Extra data"):
                raise
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} is not valid JSON ({reason(error)}).") from error


def load_torch(path: Path) -> Any:
    """The content of a .pt file: tensors and plain values only, on the CPU; torch itself checks no checksum."""
    import torch

    zipped = first_bytes(path).startswith(ZIP_MAGIC)
    try:
        if zipped:
            _check_sums(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=True, map_location="cpu")
    except _UNPICKLING_ERRORS as error:
        raise InputError(f"{path} is not a readable .pt file of tensors ({reason(error)}).") from error


def _check_sums(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            check_expansion(f"{path}, {member.filename}", member.compress_size, member.file_size)
        damaged = archive.testzip()
    if damaged is not None:
        raise InputError(f"{path} is damaged: {damaged} does not match its checksum.")


def tensor(value: Any, where: str, ndim: int | None = None) -> Array:
    """A tensor of a .pt file as a NumPy array of whole numbers, `ndim` axes. Raises InputError for anything else."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise InputError(f"{where} is a {type(value).__name__}; a tensor was expected.")
    try:
        array: Array = value.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{where} is a tensor of {value.dtype} that cannot be read ({reason(error)}).") from error
    return whole_numbers(array, where, ndim)


def whole_numbers(array: Array, where: str, ndim: int | None = None) -> Array:
    """The array itself, if it holds whole numbers in `ndim` axes; 64-bit ones are held inside int64."""
    if array.dtype.kind not in "iu" or (ndim is not None and array.ndim != ndim):
        wanted = "whole numbers" if ndim is None else f"whole numbers in {ndim} axes"
        raise InputError(f"{where} is {array.dtype} {list(array.shape)}; {wanted} were expected.")
    if array.dtype == np.uint64:
        return np.minimum(array, np.uint64(2**63 - 1)).astype(np.int64)
    return array


def counts(array: Array, where: str, ndim: int | None = None) -> npt.NDArray[np.int64]:
    """Whole numbers from 0 on as int64. Raises InputError for anything else."""
    found = whole_numbers(array, where, ndim).astype(np.int64)
    if found.min(initial=0) < 0:
        raise InputError(f"{where} holds {found.min()}; counts were expected.")
    return found


def number_list(value: Any, where: str) -> npt.NDArray[np.int64]:
    """A list of whole numbers as [n] int64; tensors count as lists."""
    if not isinstance(value, list):
        return tensor(value, where, 1).astype(np.int64)
    wrong = [entry for entry in value if type(entry) is not int or abs(entry) >= 2**63]
    if wrong:
        raise InputError(f"{where} holds {shortened(wrong[0])}; whole numbers were expected.")
    return np.array(value, np.int64)
