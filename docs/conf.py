"""The site of `make docs`: Markdown pages as they stand, and the library's reference from its docstrings.

The pages are plain Markdown, to be read on a code host too. What only Sphinx understands is therefore added here as a
page is read: tables of contents (CONTENTS) and the modules whose docstrings a page lists (MODULES).
"""

import re
from enum import Enum
from importlib.metadata import version as installed_version

project = "smoe"
author = "the smoe authors"
release = version = installed_version("smoe")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "smoe"
html_show_copyright = False
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"

CONTENTS = {
    "index": ["tutorial", "how-to/index", "explanation", "library", "reference/index", "results", "decisions"],
    "how-to/index": [
        "how-to/recording",
        "how-to/engine-dumps",
        "how-to/large-traces",
        "how-to/many-machines",
        "how-to/placing",
        "how-to/measuring",
        "how-to/report",
        "how-to/ci",
        "how-to/deepseek-v2",
        "how-to/export",
        "how-to/checkpoint",
        "how-to/running",
        "how-to/defaults",
        "how-to/reproduce",
        "how-to/families",
    ],
    "reference/index": [
        "reference/cli",
        "reference/exit-codes",
        "terms",
        "formats/index",
        "reference/solvers",
        "reference/profiles",
        "dependencies",
    ],
    "formats/index": ["formats/*"],
}
"""Page -> the pages under it, in the order of the site's menu. A page in none of them is a warning, hence an error."""

MODULES = {"reference/solvers": "smoe_solvers", "reference/profiles": "smoe_profiles"}
"""Page -> the module whose public names it lists."""


def extend_page(_app, page, source):
    """Append what stands for a page in CONTENTS and MODULES to its text."""
    entries = "\n".join(f"/{entry}" for entry in CONTENTS.get(page, ()))
    if entries:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:maxdepth: 1\n\n{entries}\n```\n"
    if page in MODULES:
        source[0] += f"\n\n```{{eval-rst}}\n.. automodule:: {MODULES[page]}\n   :members:\n```\n"


def to_restructured_text(*event):
    """Docstrings are Markdown, one argument a line: mark code as reStructuredText does, and part the arguments."""
    lines = event[-1]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    lines[:] = [*"\n\n".join(map(_paragraph, paragraphs)).splitlines(), ""]


def _paragraph(text):
    if text.startswith(">>>"):
        return text
    if text.startswith("    "):
        return f"::\n\n{text}"
    parted = re.sub(r"\n(?=\w+(, \w+)*: |Returns |Raises |Cost: )", "\n\n", text)
    return re.sub(r"`([^`]+)`|([*|\\])|(\w)_(?=\W|$)", _quoted, parted)


def _quoted(found):
    code, special, _ = found.groups()
    return f"``{code}``" if code else f"\\{special}" if special else f"{found[0][:-1]}\\_"


def shorten_arrays(*event):
    """An array's type is its dtype: axes stand in the docstring."""
    long = r"~?numpy\.ndarray\[tuple\[~?typing\.Any, \.\.\.\], ~?numpy\.dtype\[~?(numpy\.\w+)\]\]"
    return tuple(part and re.sub(long, r"NDArray[~\1]", part) for part in event[-2:])


def keep_choices(*event):
    """The members of an enumeration need no docstring to be listed."""
    return False if isinstance(event[3], Enum) else None


def setup(app):
    app.connect("source-read", extend_page)
    app.connect("autodoc-process-docstring", to_restructured_text)
    app.connect("autodoc-process-signature", shorten_arrays)
    app.connect("autodoc-skip-member", keep_choices)
