"""How strings and numbers of a report are written, whatever they hold.

Names, paths and token texts come from files that anyone may have made. Nothing of them may reorder, hide or end what
stands around it: characters that are not seen are written as escapes, and the page escapes the rest for HTML.
"""

import html
from typing import Any

SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
LONGEST = 32
"""Characters of a label in a chart."""

TIMES = "×"  # noqa: RUF001 - a factor is not the letter
ABSENT = "–"  # noqa: RUF001 - the sign for "no value" in a table


def visible(text: str) -> str:
    r"""The text with every unseen character as an escape: `\n`, `\x1b`, `\u202e`, spaces other than the plain one."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    wide = f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
    return SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else wide)


def token(text: str) -> str:
    """A token's text with its outer spaces seen: they tell `the` from ` the`."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text)
    lead = len(text) - len(text.lstrip(" "))
    return "␣" * lead + visible(inner) + "␣" * (len(text) - lead - len(inner))


def label(text: Any) -> str:
    """A string for a chart, short enough for an axis: plotly reads a few tags in texts, and entities as characters."""
    seen = visible(str(text))
    return html.escape(seen if len(seen) <= LONGEST else seen[: LONGEST - 1] + "…", quote=False)


def number(value: float | None, digits: int = 3) -> str:
    """A figure: `0.318`, `27.39`, `120.0`, `1,234`; a larger one has fewer digits behind the point, a count none."""
    if value is None:
        return ABSENT
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits - (abs(value) >= 10) - (abs(value) >= 100)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share: `12.5 %`."""
    return ABSENT if value is None else f"{value * 100:.{digits}f} %"


def times(value: float, digits: int = 2) -> str:
    """A factor: `1.14×`."""
    return f"{value:.{digits}f}{TIMES}"


def change(value: float, base: float) -> str:
    """How far a figure is from another: `+12 %`; nothing where there is no difference to show."""
    if not base or round(abs(value / base - 1), 3) < 0.001:
        return ""
    relative = (value / base - 1) * 100
    return f"{'+' if relative > 0 else '−'}{abs(relative):.{0 if abs(relative) >= 10 else 1}f} %"  # noqa: RUF001
