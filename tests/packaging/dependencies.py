"""`make audit`: docs/dependencies.md, every package that constraints.txt pins, with its licence and why it is there.

Licences are read from the installed packages' own metadata, never guessed. Run in the environment that `make` made.

    python tests/packaging/dependencies.py docs/dependencies.md
"""

import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]

WHY = {
    "typer": "the command line",
    "rich": "tables and progress bars",
    "numpy": "arrays",
    "scipy": "assignment, sparse matrices and linear programs of the solvers",
    "numba": "compiled loops of the solvers",
    "pyarrow": "Parquet: traces, tables and placements",
    "torch": "running models, and the run time",
    "transformers": "model code and tokenizers",
    "datasets": "reading prompts from files and the hub",
    "safetensors": "reading and writing weights without pickle",
    "joblib": "processes on one machine",
    "pyyaml": "placement files of TensorRT-LLM",
    "triton": "kernels of the run time (smoe[runtime])",
    "plotly": "charts of the report (smoe[report])",
    "jinja2": "page of the report (smoe[report])",
    "ray": "layers on a cluster (smoe[ray])",
    "accelerate": "models spread over devices (smoe[large])",
    "pymetis": "METIS, to compare with (smoe[bench])",
    "mtkahypar": "a hypergraph partitioner, to compare with (smoe[bench])",
    "k-means-constrained": "balanced k-means, to compare with (smoe[bench])",
    "duckdb": "counting, to compare with (smoe[bench])",
    "polars": "counting, to compare with (tests)",
    "pytest": "tests",
    "pytest-xdist": "tests on several cores",
    "hypothesis": "tests of invariants",
    "hatchling": "building the wheel",
    "mypy": "types",
    "ruff": "rules and form of the code",
    "sphinx": "the documentation",
    "myst-parser": "Markdown in the documentation",
    "furo": "looks of the documentation",
    "uv": "clean environments of the matrix",
    "pip-audit": "known vulnerabilities",
}
"""Why each package that pyproject.toml names is there."""

COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL|EUPL", re.IGNORECASE)
LONG = 40
"""A licence field longer than this holds the licence's text, not its name."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies() -> list[str]:
    """Every package that pyproject.toml names, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return list(dict.fromkeys(_name(line) for line in lines))


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return canonical(found[0])


def pinned() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def licence(package: Distribution) -> str:
    """What a package's metadata say of its licence; `unknown` where they say nothing."""
    expression = package.metadata.get("License-Expression")
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in package.metadata.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    named = (package.metadata.get("License") or "").strip()
    short = named if len(named) <= LONG and "\n" not in named else ""
    return expression or ", ".join(classifiers) or short or "unknown"


def page() -> str:
    """The whole page as Markdown."""
    licences: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    for name in pinned():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            licences[name] = "unknown: not installed where this page was made"
            continue
        licences[name] = licence(package)
        for line in package.requires or []:
            if "extra ==" not in line:
                needed_by.setdefault(_name(line), set()).add(name)
    lines = [
        "# Dependencies and their licences",
        "",
        "Made by `make audit` from the metadata of the packages that constraints.txt pins. None of them is part of",
        "what is shipped: the wheel holds our own files only.",
        "",
        "| package | version | licence | why |",
        "| --- | --- | --- | --- |",
    ]
    for name, version in pinned().items():
        reason = (
            WHY.get(name) or f"needed by {', '.join(sorted(needed_by.get(name, {'another platform or an extra'})))}"
        )
        lines.append(f"| {name} | {version} | {licences[name]} | {reason} |")
    lines += ["", "## Worth a look", ""]
    copyleft = [f"{name} ({text})" for name, text in licences.items() if COPYLEFT.search(text)]
    unknown = [f"{name} ({text})" for name, text in licences.items() if text.startswith("unknown")]
    lines.append(f"- Copyleft, of whatever strength: {', '.join(copyleft) or 'none'}.")
    lines.append(f"- Licence not known: {', '.join(unknown) or 'none'}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
