"""Models, traces and tables: everything in smoe that knows files and model formats.

    from smoe_profiles import open_trace

    trace = open_trace(Path("smoe-out/trace"))
    experts = trace.experts(trace.layers[0], "fit")  # [tokens, K]

The names in `__all__` are the public ones; docs/library.md tells of them. Each is imported when it is first used, so
that `import smoe_profiles` costs nothing, and torch and transformers only by what loads a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoe_profiles.artefact import Artefact, open_artefact
    from smoe_profiles.choices import Level
    from smoe_profiles.errors import ImpossibleError, InputError, MachineError, SmoeError
    from smoe_profiles.models import Model, find_model, model_identity, same_model
    from smoe_profiles.split import Document, assign_parts, document_fraction
    from smoe_profiles.tables import Counts, Samples, Tables, count_tokens, open_tables
    from smoe_profiles.trace import Trace, TraceLayer, open_trace

__all__ = [
    "Artefact",
    "Counts",
    "Document",
    "ImpossibleError",
    "InputError",
    "Level",
    "MachineError",
    "Model",
    "Samples",
    "SmoeError",
    "Tables",
    "Trace",
    "TraceLayer",
    "assign_parts",
    "count_tokens",
    "document_fraction",
    "find_model",
    "model_identity",
    "open_artefact",
    "open_tables",
    "open_trace",
    "same_model",
]

_MODULES = {
    "artefact": ("Artefact", "open_artefact"),
    "choices": ("Level",),
    "errors": ("ImpossibleError", "InputError", "MachineError", "SmoeError"),
    "models": ("Model", "find_model", "model_identity", "same_model"),
    "split": ("Document", "assign_parts", "document_fraction"),
    "tables": ("Counts", "Samples", "Tables", "count_tokens", "open_tables"),
    "trace": ("Trace", "TraceLayer", "open_trace"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'smoe_profiles' has no attribute {name!r}")
    return getattr(import_module(f"smoe_profiles.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
