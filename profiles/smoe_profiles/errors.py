"""What can go wrong, by what the user can do about it; smoe_cli gives each its exit code (design 6)."""


class SmoeError(Exception):
    """One sentence for the user: what is wrong, the value seen, where, what to do."""


class InputError(SmoeError):
    """A file or artefact is missing, unreadable, hostile, inconsistent or of another model."""


class ImpossibleError(SmoeError):
    """The input is fine, but what was asked cannot be: a dense model, an EP that does not divide E."""


class MachineError(SmoeError):
    """Disk, memory, permission, a missing optional package, a model not cached while offline."""
