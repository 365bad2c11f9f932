"""The pages of docs/formats/, what they name, and the names that files bring with them."""

import re
from pathlib import Path

import pyarrow.parquet as pq
from safetensors import safe_open

from tests.formats.readers import read_manifest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/formats"


def page(name):
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def said_on(text):
    """Every `name` of a page."""
    return set(re.findall(r"`([^`\n]+)`", text))


def generic(name):
    """A name with the number of a layer or a part left open."""
    return re.sub(r"^part-\d+", "part-*", re.sub(r"_\d\d(?=$|\.)", "_LL", name))


def written_keys(value, skip=()):
    """Every key of a JSON document; below a key in `skip` the next keys are data: layers, groups, predictors."""
    if isinstance(value, list):
        return set().union(*(written_keys(one, skip) for one in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found = set()
    for key, inner in value.items():
        found.add(key)
        if key in skip and isinstance(inner, dict):
            found |= set().union(*(written_keys(one, skip) for one in inner.values()))
        else:
            found |= written_keys(inner, skip)
    return found


def columns_of(folder):
    return {generic(name) for path in folder.rglob("*.parquet") for name in pq.read_schema(path).names}


def tensors_of(folder):
    found = set()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            found |= {*file.keys(), *(file.metadata() or {})}
    return found


def files_of(folder):
    return {generic(name) for name in read_manifest(folder)[0]["files"]}
