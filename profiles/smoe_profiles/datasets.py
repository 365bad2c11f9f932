"""Prompts as documents of token ids: the built-in text, files and hub data sets, all streamed.

A SPEC is `builtin`, a path ending in .jsonl, .json, .txt, .parquet (optionally .xz, .gz, .zst) with a `text`,
`messages` or `input_ids` field, `FILE.npz` or `FILE.npz#key` with token ids, or a hub id `owner/name`.
"""

import ast
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, MachineError, reason
from smoe_profiles.importers.files import Archive
from smoe_profiles.parquet import open_parquet
from smoe_profiles.split import Document, TokenIds
from smoe_profiles.unpacking import OPENERS, SMALL_FILE, check_stream

BUILTIN = "builtin"
DEEP_LINE = 900
"""A line with more brackets is looked at for how deep they go."""

PIECE_CHARACTERS = 3000
BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
COMPRESSIONS = (".xz", ".gz", ".zst", ".bz2")

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

Tokenize = Callable[[Any], list[int]]
"""From a text, or from chat messages [{role, content}], to token ids."""


def read_documents(spec: str, source: str, tokenize: Tokenize, vocab_size: int) -> Iterator[Document]:
    """The documents of one data set, empty ones left out.

    Raises InputError for a missing or unreadable data set, one without `text` or `input_ids`, or an id outside
    [0, vocab_size).
    """
    if spec == BUILTIN:
        rows: Iterator[Any] = builtin_texts()
    elif ".npz" in spec.rpartition("/")[2]:
        rows = _npz_rows(spec)
    else:
        rows = _library_rows(spec)
    for row in rows:
        if isinstance(row, str) and not row:  # no text at all, which a tokenizer may still open with a token
            continue
        ids = _token_ids(tokenize(row) if _is_prose(row) else row, spec)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            bad = ids.max() if ids.min() >= 0 else ids.min()
            raise InputError(f"dataset {spec} holds token id {bad}; the model's vocabulary has {vocab_size} entries.")
        if len(ids):
            yield Document(ids.astype(np.uint32), source)


def find_file(spec: str) -> Path | None:
    """The file that a SPEC names; None for the built-in text, or a name on the hub.

    Raises InputError if it is missing, cannot be read or has no known ending: told before a model is loaded.
    """
    archive = ".npz" in spec.rpartition("/")[2]
    path = Path(spec.partition("#")[0] if archive else spec)
    known = archive or _ending(path) in BUILDERS
    on_disk = known or path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1
    if spec == BUILTIN or not on_disk:
        return None
    if not path.is_file():
        raise InputError(f"dataset {path} is missing or not a file.")
    if not known:
        raise InputError(f"dataset {path} has no known ending; smoe reads .jsonl, .txt, .parquet and .npz.")
    if not os.access(path, os.R_OK):
        raise InputError(f"dataset {path} cannot be read: permission denied.")
    return path


def _ending(path: Path) -> str:
    """The last ending of a file's name that is no compression's."""
    return next((suffix for suffix in reversed(path.suffixes) if suffix not in COMPRESSIONS), "")


def _is_prose(row: Any) -> bool:
    return isinstance(row, str) or (isinstance(row, list) and bool(row) and isinstance(row[0], dict))


def _token_ids(row: Any, spec: str) -> npt.NDArray[np.int64]:
    """One document's ids, [n]. Raises InputError for anything but a flat list of whole numbers."""
    try:
        ids = np.asarray(row)
    except ValueError as error:
        raise InputError(f"dataset {spec}: a document's ids are no flat list of numbers ({reason(error)}).") from error
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InputError(
            f"dataset {spec}: a document is {ids.dtype} {list(ids.shape)}; text or one list a document was expected."
        )
    return ids.astype(np.int64)


def limit_tokens(documents: Iterator[Document], max_tokens: int | None) -> Iterator[Document]:
    """Documents up to `max_tokens` tokens in all; the last one is cut. None: all."""
    left = max_tokens
    for document in documents:
        if left is None:
            yield document
            continue
        if left <= 0:
            return
        yield Document(document.token_ids[:left], document.source)
        left -= len(document.token_ids)


def builtin_texts() -> Iterator[str]:
    """Docstrings and sources of the running Python's standard library, one module after another.

    The order is fixed by the hash of a module's path, so that any prefix is a mix. The text differs between Python
    versions; no threshold may rest on it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    names = [
        name
        for path in root.rglob("*.py")
        if not skipped & set((name := path.relative_to(root)).parts) and not name.parts[0].startswith("config-")
    ]
    if not names:
        raise InputError(f"the standard library has no sources under {root}; give --dataset a file instead of builtin.")
    for name in sorted(names, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        try:
            text = (root / name).read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        yield from _pieces(_docstrings(tree), "\n\n")
        yield from _pieces(text.split("\n\n"), "\n\n")


def _docstrings(tree: ast.Module) -> list[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners))
    return [text for text in found if text]


def _pieces(paragraphs: list[str], joint: str) -> Iterator[str]:
    """Paragraphs joined to documents of about PIECE_CHARACTERS."""
    piece: list[str] = []
    for paragraph in paragraphs:
        piece.append(paragraph)
        if sum(map(len, piece)) >= PIECE_CHARACTERS:
            yield joint.join(piece)
            piece = []
    if any(part.strip() for part in piece):
        yield joint.join(piece)


def _npz_rows(spec: str) -> Iterator[TokenIds | npt.NDArray[Any]]:
    find_file(spec)
    path, _, key = spec.partition("#")
    archive, key = Archive(Path(path)), key or "input_ids"
    if key not in archive:
        raise InputError(f"{path} has no array {key!r}; it holds {', '.join(archive)} (use FILE.npz#key).")
    ids = archive[key]
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        raise InputError(f"{spec} is {ids.dtype} {list(ids.shape)}; integer token ids [n] or [rows, n] were expected.")
    yield from [ids] if ids.ndim == 1 else ids


def _library_rows(spec: str) -> Iterator[Any]:
    """Rows of a file or hub data set through the datasets library, streamed."""
    from datasets import load_dataset
    from datasets import logging as library_logging
    from datasets.exceptions import DatasetNotFoundError

    library_logging.set_verbosity(logging.CRITICAL)  # what it would log of a broken file is in the error that it raises

    path = find_file(spec)
    builder = _builder(path) if path else None
    local = path is not None
    try:
        if builder is None:
            stream = load_dataset(spec, split="train", streaming=True)
        else:
            options = {"sample_by": "document"} if builder == "text" else {}
            stream = load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
        for row in stream:
            yield _content(row, spec)
    except (InputError, GeneratorExit):
        raise
    except StopIteration:  # the library's answer to a file with no row at all
        return
    except (DatasetNotFoundError, ConnectionError) as error:
        raise MachineError(
            f"dataset {spec} is no file and not in the cache, and the hub was not reachable or has none of that name."
        ) from error
    except (OSError, ValueError, TypeError, EOFError) as error:
        if isinstance(error, OSError) and not local:
            raise MachineError(f"dataset {spec} could not be fetched ({reason(error)}).") from error
        raise InputError(f"dataset {spec} cannot be read ({reason(error)}).") from error
    except Exception as error:
        # Builders raise classes of their own (pyarrow, pandas, DatasetGenerationError) for a broken file.
        if not local:
            raise
        raise InputError(f"dataset {spec} cannot be read ({reason(error)}).") from error


def _builder(path: Path) -> str:
    """The library's reader for a file, which does not unpack to too much."""
    builder = BUILDERS[_ending(path)]
    check_stream(path)
    if builder == "json" and (path.suffix not in OPENERS or path.stat().st_size <= SMALL_FILE):
        _check_lines(path)
    if path.suffix == ".parquet":
        open_parquet(path)
    return builder


def _check_lines(path: Path) -> None:
    """Raises InputError for a line that would end the process in the library's reader: nested deep, or `null` alone."""
    opened: Callable[..., Any] = OPENERS.get(path.suffix, open)
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() in (b"null", b"true", b"false"):
                raise InputError(f"dataset {path}: line {number} is {line.strip().decode()}; an object was expected.")
            if line.count(b"[") + line.count(b"{") > DEEP_LINE and _too_deep(line):
                raise InputError(f"dataset {path}: line {number} is nested too deep to be a document.")


def _too_deep(line: bytes) -> bool:
    """Whether brackets go deeper than Python reads; of a line that is no document alone, by counting them."""
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        letters = np.frombuffer(line, np.uint8)
        steps = np.isin(letters, list(b"[{")).astype(np.int64) - np.isin(letters, list(b"]}"))
        return int(steps.cumsum().max()) > DEEP_LINE
    return False


def _content(row: dict[str, Any], spec: str) -> Any:
    """A row's ids (padding left out where a mask says so), text or messages."""
    if row.get("input_ids") is not None:
        ids, mask = row["input_ids"], row.get("attention_mask")
        return ids if mask is None else [token for token, real in zip(ids, mask, strict=True) if real]
    for key in ("text", "messages"):
        if row.get(key) is not None:
            return row[key]
    if row.get("conversations") is not None:  # ShareGPT's own names
        turns = row["conversations"]
        return [{"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    if any(key in row for key in ("input_ids", "text", "messages", "conversations")):
        raise InputError(f"dataset {spec} has a row without text; all rows need `text` or `input_ids`.")
    raise InputError(f"dataset {spec} has fields {', '.join(map(str, row))}; `text` or `input_ids` was expected.")


@dataclass(frozen=True)
class Survey:
    """What a set of documents amounts to; sha256: of all token ids, each document's length before it."""

    documents: int
    tokens: int
    sha256: str


def survey(documents: Iterator[Document]) -> Survey:
    """Read every document once: a fault in the last line is found before hours of work, and the total is known."""
    digest = hashlib.sha256()
    count = tokens = 0
    for document in documents:
        count, tokens = count + 1, tokens + len(document.token_ids)
        digest.update(len(document.token_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(document.token_ids, "<u4").tobytes())
    return Survey(count, tokens, digest.hexdigest())


def is_local(spec: str) -> bool:
    """Whether a data set is read from this machine; a hub data set streams, and may have no end in reach."""
    return spec == BUILTIN or Path(spec.partition("#")[0]).exists()
