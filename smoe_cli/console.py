"""What the user sees: results on stdout, progress and notes on stderr, one JSON document with --json.

Piped, with NO_COLOR or on a dumb terminal everything is plain; rich is imported only to draw.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

PLAIN_INTERVAL = 5.0
WIDTH = 80


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
        """A table on stdout, first column left, the others right."""
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), title_justify="left", title_style="bold")
        for index, name in enumerate(columns):
            table.add_column(Text(name), justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        terminal = RichConsole(file=sys.stdout, highlight=False)
        terminal = terminal if terminal.is_terminal else RichConsole(file=sys.stdout, width=WIDTH, highlight=False)
        terminal.print(table)

    @contextmanager
    def progress(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Progress on stderr with rate and time left: a bar on a terminal, a plain line every few seconds elsewhere."""
        if self.quiet:
            yield lambda _count: None
        elif sys.stderr.isatty():
            yield from self._bar(label, total, unit)
        else:
            yield from self._lines(label, total, unit)

    def _bar(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        started = monotonic()
        with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total, rate="")

            def advance(count: int) -> None:
                done = bar.tasks[0].completed + count
                bar.update(task, advance=count, rate=f"{done / max(monotonic() - started, 1e-9):,.0f} {unit}/s")

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
                rate = done / (now - started)
                left = f" of {total:,}, {(total - done) / rate:,.0f} s left" if total and rate else ""
                print(f"{label}: {done:,} {unit}{left} ({rate:,.0f} {unit}/s)", file=sys.stderr)

        yield advance
