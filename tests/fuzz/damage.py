"""Seeded damage to sound files, by their form: bytes, texts, trees, tables, arrays.

Every function takes a `random.Random` and what to damage, and returns the damaged copy. The same seed gives the same
bytes. Damage that a form's own writer refuses falls back to damaged bytes.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1,
    2**63, 2**64, -(2**31), -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "x", "..", "../../escaped", "/dev/zero", "/", "a/b", "con\nerror: forged", "[bold]x[/bold]", "\x1b[2Jx",
    "😀", "\ud800", "\0", "é" * 300, "x" * 100_000, "nan", "1", "-1", "9" * 5000, "__proto__", "İıŞ", "true", "{}",
    "\0digits",
)  # fmt: skip
DEEP = 20_000


def odd_value(random: Random) -> Any:
    """Something that stands where another thing was expected."""
    kind = random.randrange(8)
    if kind < 3:
        return random.choice(NUMBERS)
    if kind < 5:
        return random.choice(TEXTS)
    return random.choice((None, True, False, [], {}, [[]], [None], [0], {"a": 1}, [1, 2, 3], ["x"], [0] * 1000))


# Bytes and texts.


def damage_bytes(random: Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        place = random.randrange(len(found) + 1)
        span = slice(place, place + random.choice((1, 2, 4, 8, 64, 1000)))
        match random.randrange(9):
            case 0:
                del found[place:]
            case 1:
                del found[span]
            case 2:
                found[place:place] = found[span] * random.choice((1, 2, 50))
            case 3:
                found[place:place] = random.randbytes(random.choice((1, 8, 100)))
            case 4:
                number = random.choice((0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1)) % 2**64
                width = random.choice((2, 4, 8))
                found[place : place + width] = (number % 2 ** (8 * width)).to_bytes(
                    width, random.choice(("little", "big"))
                )
            case 5:
                other = random.randrange(len(found) + 1)
                found[place:place] = found[other : other + random.choice((4, 40, 400))]
            case _ if place < len(found):
                found[place] ^= 1 << random.randrange(8)
    return bytes(found)


_TOKEN = re.compile(r'"[^"\n]*"|-?\d+(?:\.\d+)?|[A-Za-z_]+|[\[\]{}:,=]')


def damage_text(random: Random, content: bytes) -> bytes:
    """Words, numbers and brackets of a text dropped, doubled or put in another's place."""
    text = content.decode("utf-8", "surrogateescape")
    for _ in range(random.choice((1, 1, 2, 5))):
        tokens = list(_TOKEN.finditer(text))
        if not tokens:
            break
        start, stop = random.choice(tokens).span()
        match random.randrange(5):
            case 0:
                put = ""
            case 1:
                put = text[start:stop] * 2
            case 2:
                put = random.choice(tokens)[0]
            case 3:
                put = "[" * random.choice((1, 50, DEEP))
            case _:
                put = json.dumps(odd_value(random))
        text = text[:start] + put + text[stop:]
    return text.encode("utf-8", "surrogateescape")


def damage_lines(random: Random, content: bytes) -> bytes:
    """JSON lines: one line's tree, or lines dropped, doubled, emptied, joined."""
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    match random.randrange(6):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, random.choice(lines))
        case 2:
            lines[place] = random.choice(
                (b"", b" ", b"null", b"[]", b"{}", b"7", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0")
            )
        case _:
            lines[place] = damage_json(random, lines[place])
    return random.choice((b"\n", b"\n", b"\n", b"\r\n", b"")).join(lines)


# Trees.

_TWICE = "\0twice"


def damage_tree(random: Random, tree: Any, leaf: Callable[[Random, Any], Any] | None = None) -> Any:
    """A copy of lists, tables and leaves with one place changed. leaf: damages leaves that are arrays."""
    path: list[Any] = []
    node = tree
    while isinstance(node, dict | list) and node and (not path or random.random() < 0.85):
        step = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        path.append(step)
        node = node[step]
    return _changed(random, tree, path, leaf)


def _changed(random: Random, node: Any, path: list[Any], leaf: Callable[[Random, Any], Any] | None) -> Any:
    if not path:
        if (
            leaf is not None
            and not isinstance(node, dict | list | str | int | float | bool | None)
            and random.random() < 0.7
        ):
            return leaf(random, node)
        return _near(random, node)
    step, rest = path[0], path[1:]
    copy = dict(node) if isinstance(node, dict) else list(node)
    if rest:
        copy[step] = _changed(random, node[step], rest, leaf)
        return copy
    kind = random.randrange(6)
    if kind == 0:
        del copy[step]
    elif kind == 1 and isinstance(copy, dict):
        copy[random.choice((*TEXTS, *map(str, NUMBERS[:10])))] = copy.pop(step)
    elif kind == 1:
        copy.insert(step, node[step])
    elif kind == 2 and isinstance(copy, dict):
        copy[f"{_TWICE}{step}"] = _near(random, node[step])
    else:
        copy[step] = _changed(random, node[step], [], leaf)
    return copy


def _near(random: Random, value: Any) -> Any:
    """An odd value, more often than not of the same kind."""
    if random.random() < 0.4:
        return odd_value(random)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return random.choice(
            (value + 1, value - 1, -value, value * 2, float(value), str(value), random.choice(NUMBERS))
        )
    if isinstance(value, str):
        return random.choice((value + "x", value[:-1], value.upper(), value * 2, random.choice(TEXTS)))
    if isinstance(value, list):
        return random.choice((value * 2, value[::-1], value[:1], [value], dict(enumerate(value[:5]))))
    if isinstance(value, dict):
        return random.choice((list(value), list(value.values()), {}, {"": value}))
    return odd_value(random)


def _encoded(tree: Any) -> bytes:
    text = json.dumps(tree, indent=None).replace('"\\u0000twice', '"')
    return text.replace('"\\u0000digits"', "9" * 5000).encode()  # more digits than Python turns into a number


def damage_json(random: Random, content: bytes) -> bytes:
    if random.random() < 0.2:
        return damage_text(random, content)
    try:
        tree = json.loads(content)
    except ValueError:
        return damage_bytes(random, content)
    for _ in range(random.choice((1, 1, 2, 3))):
        tree = damage_tree(random, tree)
    if random.random() < 0.03:
        return b'{"a":' * DEEP + _encoded(tree) + b"}" * DEEP
    if random.random() < 0.02:
        return random.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" " * 10_000)) + _encoded(tree)
    return _encoded(tree).replace(b"NaN", random.choice((b"NaN", b"1e999")))


def damage_yaml(random: Random, content: bytes) -> bytes:
    import yaml

    if random.random() < 0.3:
        return damage_text(random, content)
    if random.random() < 0.05:  # each name stands for nine of the one before
        laughs = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
        return f"a0: &a0 x\n{laughs}".encode() + content
    tree = damage_tree(random, yaml.safe_load(content))
    return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")


# Arrays.

DTYPES = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bool",
    "complex64", "U3", "S2", "datetime64[s]",
)  # fmt: skip


def damage_array(random: Random, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = array.copy()
    match random.randrange(8):
        case 0:
            with np.errstate(all="ignore"):
                return found.astype(random.choice(DTYPES))
        case 1:
            return found.reshape(random.choice([(-1,), (1, *found.shape), (*found.shape, 1), found.shape[::-1]]))
        case 2:
            return np.ascontiguousarray(np.moveaxis(found, 0, -1)) if found.ndim else found[None]
        case 3:
            axis = random.randrange(found.ndim) if found.ndim else 0
            count = random.choice((0, 1, max(found.shape[axis] - 1, 0))) if found.ndim else 0
            return np.take(found, range(min(count, found.shape[axis])), axis=axis) if found.ndim else found
        case 4:
            return np.concatenate([found, found]) if found.ndim else found
        case _ if found.size:
            if found.dtype.kind in "iu":
                limits = np.iinfo(found.dtype)
                odd = [number for number in NUMBERS if number == number and limits.min <= number <= limits.max]
                odd += [limits.max, limits.min, int(found.max()) + (1 if found.max() < limits.max else 0)]
            else:
                odd = [np.nan, np.inf, -1.0, 0.0, 65504.0] if found.dtype.kind == "f" else [0]
            flat = found.reshape(-1)
            for _ in range(random.choice((1, 1, 3, found.size))):
                flat[random.randrange(found.size)] = random.choice(odd)
            return flat.reshape(found.shape)
    return found


def npy_bytes(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=array.dtype == object)
    return buffer.getvalue()


def damage_npy(random: Random, content: bytes) -> bytes:
    """The array, or the text of its header with the length set right."""
    if random.random() < 0.5:
        return npy_bytes(damage_array(random, np.load(io.BytesIO(content))))
    length = int.from_bytes(content[8:10], "little")
    header = damage_text(random, content[10 : 10 + length])[: 2**16 - 1]
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + length :]


def damage_zip(random: Random, content: bytes) -> bytes:
    """An archive whose members are dropped, doubled, renamed or damaged, with checksums that fit."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    place = random.randrange(len(members))
    name, data = members[place]
    match random.randrange(8):
        case 0:
            del members[place]
        case 1:
            members.append((name, data))
        case 2:
            members[place] = (
                random.choice(("../../escaped.npy", "/escaped.npy", "a\\b.npy", "ids.npy", ".npy", "é.npy")),
                data,
            )
        case 3:
            members[place] = name, npy_bytes(np.array([{"a": 1}, None], dtype=object))
        case 4:
            members[place] = name, damage_bytes(random, data)
        case _ if name.endswith(".npy"):
            members[place] = name, damage_npy(random, data)
        case _:
            members[place] = name, damage_bytes(random, data)
    kind = random.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, kind)
    return buffer.getvalue()


def damage_safetensors(random: Random, content: bytes) -> bytes:
    """A header's table with its length set right, or the arrays, written as a sound file."""
    from safetensors.numpy import load, save

    length = int.from_bytes(content[:8], "little")
    if random.random() < 0.4:
        header = damage_json(random, content[8 : 8 + length])
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    arrays = load(content)
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    name = random.choice(sorted(arrays))
    match random.randrange(5):
        case 0:
            del arrays[name]
        case 1:
            arrays[random.choice(("x", "1_2", "", "../x"))] = arrays.pop(name)
        case 2 if metadata:
            key = random.choice(sorted(metadata))
            metadata[key] = random.choice(
                ("", "0", "-1", "x", "99999999999", "null", "[]", '{"a": 1}', "nan", "1e9", metadata[key] * 2)
            )
        case _:
            arrays[name] = damage_array(random, arrays[name])
    return bytes(save({key: np.ascontiguousarray(array) for key, array in arrays.items()}, metadata))


def damage_torch(random: Random, content: bytes) -> bytes:
    import torch

    def leaf(random: Random, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return odd_value(random)
        if random.random() < 0.1:
            return value.to(random.choice((torch.bfloat16, torch.float16, torch.bool, torch.int8)))
        return torch.from_numpy(np.ascontiguousarray(damage_array(random, value.numpy())))

    buffer = io.BytesIO()
    tree = damage_tree(random, torch.load(io.BytesIO(content), weights_only=True), leaf)
    torch.save(tree, buffer, _use_new_zipfile_serialization=random.random() < 0.8)
    return buffer.getvalue()


# Parquet tables.

TYPES = (
    pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float16(),
    pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.date32(),
    pa.timestamp("us"), pa.decimal128(38, 3),
)  # fmt: skip


@lru_cache(8)
def _table(content: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(content))


def damage_parquet(random: Random, content: bytes) -> bytes:
    """One column or all rows of a table changed, written as a sound file in one of many ways."""
    table = _table(content)
    for _ in range(random.choice((1, 1, 1, 2))):
        place = random.randrange(table.num_columns)
        name = table.column_names[place]
        match random.randrange(10):
            case 0:
                table = table.remove_column(place)
            case 1:
                names = [*table.column_names]
                names[place] = random.choice((*TEXTS[:12], *table.column_names))
                table = table.rename_columns(names)
            case 2:
                table = table.slice(0, random.choice((0, 1, max(len(table) - 1, 0))))
            case 3:
                order = [random.randrange(len(table)) for _ in range(random.choice((1, len(table), 2 * len(table))))]
                table = table.take(order) if len(table) else table
            case 4:
                table = pa.concat_tables([table] * random.choice((2, 5)))
            case _:
                table = table.set_column(place, name, _damage_column(random, table[name].combine_chunks()))
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression=random.choice(("zstd", "none", "gzip", "snappy")),
        row_group_size=random.choice((13, 64, 1 << 20)),
        use_dictionary=random.choice((True, False)),
        data_page_version=random.choice(("1.0", "2.0")),
        write_page_checksum=random.choice((True, False)),
        store_schema=random.random() < 0.8,
    )
    return sink.getvalue()


def _damage_column(random: Random, column: pa.Array) -> pa.Array:
    values = column.to_pylist()
    if not values:
        return pa.nulls(0, random.choice(TYPES))
    match random.randrange(8):
        case 0:
            return column.cast(random.choice(TYPES), safe=False)
        case 1:
            return pa.nulls(len(values), column.type)
        case 2:
            gaps = [None if random.random() < 0.2 else value for value in values]
            return pa.array(gaps, column.type)
        case 3:
            return pa.array([[value] for value in values])
        case 4 if pa.types.is_dictionary(column.type):
            names = [random.choice((None, *TEXTS)) for _ in column.dictionary]
            return pa.DictionaryArray.from_arrays(column.indices, pa.array(names, pa.string()))
        case 4 | 5 if pa.types.is_fixed_size_list(column.type):
            width = random.choice((0, 1, column.type.list_size - 1, column.type.list_size + 1))
            rows = [(row + row)[:width] for row in values]
            return pa.array(rows, pa.list_(column.type.value_type, *random.choice(((width,), ()))))
    if pa.types.is_fixed_size_list(column.type):
        flat = damage_array(random, column.flatten().to_numpy(zero_copy_only=False))
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), column.type.list_size)
    if pa.types.is_dictionary(column.type):
        return pa.array([random.choice(values) for _ in values]).dictionary_encode()
    return pa.array(damage_array(random, column.to_numpy(zero_copy_only=False)).reshape(-1)[: len(values)])


def _packed(pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    return lambda random, content: pack(damage_lines(random, unpack(content)))


Damage = Callable[[Random, bytes], bytes]
FORMS: dict[str, Damage] = {
    "bytes": damage_bytes,
    "text": damage_text,
    "json": damage_json,
    "jsonl": damage_lines,
    "jsonl.gz": _packed(gzip.compress, gzip.decompress),
    "jsonl.xz": _packed(lzma.compress, lzma.decompress),
    "jsonl.bz2": _packed(bz2.compress, bz2.decompress),
    "yaml": damage_yaml,
    "npy": damage_npy,
    "npz": damage_zip,
    "safetensors": damage_safetensors,
    "pt": damage_torch,
    "parquet": damage_parquet,
}

_NO_SUCH_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RuntimeError, NotImplementedError,
    RecursionError, UnicodeError, pa.ArrowException, zipfile.BadZipFile,
    SafetensorError,
)  # fmt: skip


def damage(random: Random, content: bytes, form: str) -> bytes:
    """A file's content, damaged once by its form or, three times in ten, by its bytes alone."""
    if random.random() < 0.3:
        return damage_bytes(random, content)
    try:
        return FORMS[form](random, content)
    except _NO_SUCH_DAMAGE:
        return damage_bytes(random, content)
