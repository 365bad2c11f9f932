"""What the trace is: how much was recorded, of which texts, and how."""

from typing import Any

from smoe_cli.report.gathering import Found
from smoe_profiles.split import PARTS

FACTS = {
    "level": "level",
    "format": "imported from",
    "pack": "documents",
    "seq_len": "window, tokens",
    "decode": "tokens generated after each prompt",
    "max_tokens": "tokens asked for, at most",
    "dtype": "dtype",
    "early_gate": "early gate",
    "split_by": "split by",
}
"""Parameters that are shown, and their names."""


def trace_section(found: Found) -> dict[str, Any] | None:
    """Rows by part, sources, and how it was recorded; rows None where only counts were kept."""
    if found.trace is None:
        return None
    parameters = found.trace.artefact.parameters
    datasets = parameters.get("datasets") or []
    named = [str(one.get("source")) for one in datasets if isinstance(one, dict)]
    rows = parameters.get("rows")
    return {
        "level": found.trace.level.value,
        "rows": {part: rows.get(part) for part in PARTS} if isinstance(rows, dict) else None,
        "sources": list(dict.fromkeys(parameters.get("sources") or named)),
        "facts": [
            [label, str(parameters[name])]
            for name, label in FACTS.items()
            if parameters.get(name) not in (None, "", 0, "none")
        ],
    }
