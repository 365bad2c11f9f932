"""What can go wrong, by what the user can do about it; smoe_cli gives each its exit code."""

MOST_CHARACTERS = 1200
"""A sentence that quotes what a file holds says at most so much of it."""


class SmoeError(Exception):
    """One sentence for the user: what is wrong, the value seen, where, what to do."""

    def __str__(self) -> str:
        """On a few lines at most, and nothing in it that a terminal would obey."""
        text = "".join(letter if letter.isprintable() else _escaped(letter) for letter in super().__str__())
        middle = MOST_CHARACTERS // 2
        return text if len(text) <= MOST_CHARACTERS else f"{text[:middle]} [...] {text[-middle:]}"


def reason(error: BaseException) -> str:
    """What a library found wrong in a file, on one line and without Python's names for it."""
    match error:
        case UnicodeDecodeError():
            return "it is not text in UTF-8"
        case RecursionError():
            return "it is nested too deep"
        case KeyError():
            return f"there is no {error}"
        case OSError() if error.strerror:
            return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or "it is cut off or damaged"


def _escaped(letter: str) -> str:
    return letter if letter == "\n" else letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class InputError(SmoeError):
    """A file or artefact is missing, unreadable, hostile, inconsistent or of another model."""


class ImpossibleError(SmoeError):
    """The input is fine, but what was asked cannot be: a dense model, an EP that does not divide E."""


class MachineError(SmoeError):
    """Disk, memory, permission, a missing optional package, a model not cached while offline."""
