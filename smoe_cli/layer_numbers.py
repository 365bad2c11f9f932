"""MoE layers as a user writes and reads them, by their decoder numbers: 1-4, 9."""

from collections.abc import Sequence

from smoe_cli.errors import UsageError


def parse_layers(text: str, there: Sequence[int]) -> list[int]:
    """The layers a list such as 1-4,9 names, rising; a range holds the MoE layers from its first to its last.

    there: the model's MoE layers, rising. Raises UsageError, which names them, for anything that is none of them.
    """
    place = {str(layer): index for index, layer in enumerate(there)}
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        start, stop = place.get(first), place.get(last if dash else first)
        if start is None or stop is None or stop < start:
            raise UsageError(
                f"--layers {text!r}: {part.strip()!r} is no MoE layer and no range of them; "
                f"the model's MoE layers are {name_layers(there)}."
            )
        chosen.update(there[start : stop + 1])
    return sorted(chosen)


def name_layers(layers: Sequence[int]) -> str:
    """Rising numbers, neighbours joined."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
