"""What the tests of smoe import share: a trace read with pyarrow and json alone, and the command in a folder."""

import functools
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer.main

from tests.engine_writers import model_folder, routing

PARTS = {"fit", "validation", "heldout"}


# Reading a trace without smoe.


@dataclass(frozen=True)
class Trace:
    path: Path

    @property
    def manifest(self):
        return json.loads((self.path / "manifest.json").read_text())

    @property
    def level(self):
        return self.manifest["parameters"]["level"]

    @property
    def layers(self):
        return [(layer["id"], layer["num_experts"], layer["top_k"]) for layer in self.manifest["parameters"]["layers"]]

    @property
    def table(self):
        """All rows of level `token`, by sequence and position."""
        tables = [pq.read_table(path) for path in sorted(self.path.glob("part-*.parquet"))]
        assert len(tables) == 1
        return tables[0].sort_by([("sequence", "ascending"), ("position", "ascending")])

    def column(self, name):
        return self.table[name].to_pylist()

    def experts(self, layer):
        """[rows, K]"""
        return np.array(self.column(f"experts_{layer:02d}"))

    def rows(self, *, tokens=True):
        """One (sequence, position, token id, each layer's experts in order of id) a row."""
        ids = [column for column in self.table.column_names if column.startswith("experts_")]
        names = ["sequence", "position", "token_id", *ids]
        found = zip(*(self.column(name) for name in names), strict=True)
        return [
            (sequence, position, token if tokens else None, tuple(tuple(sorted(ids)) for ids in experts))
            for sequence, position, token, *experts in found
        ]

    def sequences(self, *, tokens=True):
        """Every sequence as its rows, without its number; in an order that does not depend on numbers."""
        found = {}
        for sequence, *row in self.rows(tokens=tokens):
            found.setdefault(sequence, []).append(tuple(row))
        return sorted(found.values(), key=repr)

    def counts(self, layer):
        """Key columns -> count over all parts, of a level below `token`."""
        table = pq.read_table(self.path / f"counts_{layer:02d}.parquet")
        keys = [name for name in table.column_names if name not in ("count", "split")]
        assert set(table["split"].to_pylist()) <= PARTS
        found = Counter()
        for *key, count in zip(*(table[name].to_pylist() for name in [*keys, "count"]), strict=True):
            found[tuple(key)] += count
        return keys, found


def wanted(known, *, rows="all", tokens=True, start=0):
    """The sequences of a known routing in the form of Trace.sequences."""
    found = []
    for span in known.spans:
        stop = span.stop - 1 if rows == "last" else span.stop
        found.append(
            [
                (
                    index - span.start,
                    int(known.tokens[index]) if tokens else None,
                    tuple(tuple(sorted(layer[index].tolist())) for layer in known.experts),
                )
                for index in range(span.start + start, stop)
            ]
        )
    return sorted(found, key=repr)


def wanted_rows(known):
    """Every row's experts in the order of the dump."""
    return [tuple(tuple(sorted(layer[row].tolist())) for layer in known.experts) for row in range(len(known.tokens))]


def assert_counts(trace, known, layers):
    for ordinal, layer in enumerate(layers):
        keys, found = trace.counts(layer)
        if trace.level == "count":
            assert keys == ["expert"]
            assert found == {(e,): n for e, n in enumerate(known.counts()[ordinal].tolist()) if n}
        elif trace.level == "token-count":
            assert keys == ["token_id", "expert"]
            assert found == known.token_counts(ordinal)
        else:
            assert keys == ["expert", "other"]
            together = known.pairs(ordinal)
            for one in range(known.num_experts):
                for other in range(one + 1, known.num_experts):
                    assert found[one, other] == found[other, one] == together[one, other]


# Other routings, and what a trace of them says.


def wanted_in_order(known):
    return [wanted(replace_sequences(known, [number]))[0] for number in range(len(known.lengths))]


def replace_sequences(known, chosen):
    """Only the chosen sequences, in that order."""
    rows = np.concatenate([np.arange(known.spans[number].start, known.spans[number].stop) for number in chosen])
    return replace(
        known,
        experts=known.experts[:, rows],
        weights=known.weights[:, rows],
        tokens=known.tokens[rows],
        lengths=tuple(known.lengths[number] for number in chosen),
    )


def spoilt(known, row, value, *, layers=None):
    """A copy of the routing with other ids in one row of every layer, or of the layers of those ordinals."""
    for layer in range(len(known.experts)) if layers is None else layers:
        known = known.with_rows(layer, row, value)
    return known


def from_zero(sequences, *, tokens=True):
    """Sequences with their first position called 0: where one starts inside its padding is not looked at."""
    found = [[(p - rows[0][0], token if tokens else None, ids) for p, token, ids in rows] for rows in sequences]
    return sorted(found, key=repr)


# Running the command.

COMMAND = functools.cache(typer.main.get_command)
"""Building the command of all commands takes longer than most imports here; once is enough."""


@dataclass(frozen=True)
class Bench:
    """A folder of its own for one test: dumps, a model's config, and the command."""

    folder: Path
    smoe: object

    def model(self, known, **changes):
        return model_folder(self.folder / "model", known, **changes)

    def options(self, form, known):
        """What a format needs besides its files."""
        return ["--model", self.model(known)] if form.model else []

    def run(self, engine, files, *options, out="out", code=0):
        return self.smoe(
            "import", *files, "--from", engine, *options, "-C", self.folder / out, cwd=self.folder, code=code
        )

    def code(self, engine, files, *options):
        """Whichever exit code it is."""
        try:
            self.run(engine, files, *options)
        except AssertionError as error:
            return int(str(error).split()[1])
        return 0

    def trace(self, engine, files, *options, out="out"):
        self.run(engine, files, *options, out=out)
        return Trace(self.folder / out / "trace")

    def refused(self, engine, files, *options, code=3, out="out"):
        """The command must fail with one sentence and leave nothing behind; returns the sentence."""
        before = listing(self.folder / out)
        done = self.run(engine, files, *options, out=out, code=code)
        assert not done.out
        assert "Traceback" not in done.err
        assert [line[:7] for line in done.err.splitlines()].count("error: ") == 1
        assert listing(self.folder / out) == before
        return done.err[done.err.index("error: ") :].replace(str(self.folder), "")  # its name may hold any number


def listing(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def bench(tmp_path, run_smoe, monkeypatch):
    monkeypatch.setattr(typer.main, "get_command", COMMAND)
    return Bench(tmp_path, run_smoe)


@pytest.fixture
def known():
    return routing()


@pytest.fixture
def long():
    """2,160 tokens, so that two rows are less than 0.1 % and three are more."""
    return routing(layers=3, lengths=(180,) * 12)
