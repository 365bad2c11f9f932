"""What the user sees: results on stdout, progress and notes on stderr, one JSON document with --json.

Piped, with NO_COLOR or on a dumb terminal everything is plain, without control codes. Rich is imported only to draw.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from time import monotonic
from typing import Any, TextIO

from smoe_cli import signals

PLAIN_INTERVAL = 5.0
WIDTH = 80
WORD = re.compile(r"[^\W\d_]{2}")
"""What tells words from numbers, which have signs and units of one letter."""

GAP = 2
"""Between columns."""


@dataclass(frozen=True)
class Console:
    """Where a command's output goes. json: one document on stdout and nothing else; quiet: results only."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0

    def note(self, message: str) -> None:
        """A line on stderr about what is being done."""
        if not self.quiet:
            print(message, file=sys.stderr)

    def detail(self, message: str) -> None:
        """A line on stderr with -v."""
        if self.verbose and not self.quiet:
            print(message, file=sys.stderr)

    def result(self, document: dict[str, Any], show: Callable[[], None], next_command: str | None = None) -> None:
        """The command's answer: the document with --json, else what `show` prints, then the next command."""
        if self.json:
            json.dump(document, sys.stdout, indent=1, sort_keys=True, allow_nan=False)
            sys.stdout.write("\n")
            sys.stdout.flush()
            return
        show()
        sys.stdout.flush()
        if next_command:
            self.note(f"next: {next_command}")

    def line(self, text: str) -> None:
        print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table on stdout: words left, numbers right but for the first column.

        Where it would be too wide words fold; numbers and each word of the head stand whole whatever the width.
        """
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for index, name in enumerate(columns):
            cells = [row[index] for row in rows]
            numbers = not any(WORD.search(cell) for cell in cells)
            whole = [*name.split(), *(cells if numbers else [])]
            table.add_column(
                Text(_head(name, cells)),
                justify="right" if index and numbers else "left",
                overflow="fold",
                no_wrap=numbers,
                min_width=max(map(len, whole), default=0),
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        out = RichConsole(
            file=sys.stdout, width=_width(sys.stdout), force_terminal=_drawable(sys.stdout), highlight=False
        )
        out.print(Text(title, style="bold"))
        out.width = max(out.width, sum(column.min_width or 0 for column in table.columns) + GAP * (len(columns) - 1))
        out.print(table)

    @contextmanager
    def progress(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Progress on stderr with rate and time left: a bar on a terminal, a plain line every few seconds elsewhere.

        A signal that a library swallowed is raised at its next step.
        """
        with self._drawn(label, total, unit) as advance:

            def step(count: int) -> None:
                signals.check()
                advance(count)

            yield step
        signals.check()

    @contextmanager
    def _drawn(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        if self.quiet:
            yield lambda _count: None
        elif _drawable(sys.stderr):
            yield from self._bar(label, total, unit)
        else:
            yield from self._lines(label, total, unit)

    def _bar(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
        )
        started = monotonic()
        with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total, done="")

            def advance(count: int) -> None:
                done = bar.tasks[0].completed + count
                bar.update(task, advance=count, done=_how_far(done, total, unit, monotonic() - started))

            yield advance

    def _lines(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        started = said = monotonic()
        done = 0

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            now = monotonic()
            if now - said >= PLAIN_INTERVAL:
                said = now
                left = f", {(total - done) * (now - started) / done:,.0f} s left" if total and done else ""
                print(f"{label}: {_how_far(done, total, unit, now - started)}{left}", file=sys.stderr)

        yield advance


def _head(name: str, cells: Sequence[str]) -> str:
    """A column's name, on as many lines as keep it from being wider than what stands below it."""
    width = max(map(len, [*name.split(), *cells]), default=0)
    return fill(name, max(width, 1), break_long_words=False, break_on_hyphens=False)


def _width(stream: TextIO) -> int | None:
    """How wide a table may be: COLUMNS, else 80; None leaves it to the terminal."""
    asked = os.environ.get("COLUMNS", "")
    return None if stream.isatty() else int(asked) if asked.isdecimal() and int(asked) else WIDTH


def _drawable(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which to draw, and nothing asks for plain text."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def _how_far(done: float, total: int | None, unit: str, seconds: float) -> str:
    """`3 of 26 layers, 1.5/s`, of bytes in MB."""
    if unit == "bytes":
        done, total, unit = done / 1e6, total and total // 10**6, "MB"
    rate = done / max(seconds, 1e-9)
    of = f" of {total:,}" if total else ""
    return f"{done:,.0f}{of} {unit}, {rate:,.{1 if rate < 10 else 0}f}/s"
