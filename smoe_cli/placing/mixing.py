"""Sources weighed against each other: which sample blocks a placement is solved for, and how the worst source fares.

Axes: N rows, B blocks. A mix says what part of the traffic comes from each source; its parts sum to 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from smoe_cli.errors import UsageError
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.tables import Samples, Tables

Mix = dict[str, float]
MOST_REPEATS = 4
"""A mix may take at most so many times as many blocks as there are; beyond it the largest sources are thinned."""

ROUNDS = 5


def choose_mix(
    tables: Tables, *, balance: bool, mix: Sequence[str], robust: bool
) -> tuple[list[str], tuple[tuple[str, float], ...] | None]:
    """The tables' sources, if weights are asked for at all, and the mix that the options ask for (None: as traced).

    Raises UsageError for two ways of asking at once.
    """
    asked = [name for name, given in (("--balance-sources", balance), ("--mix", mix), ("--robust", robust)) if given]
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} both weigh the sources; give one.")
    if not asked:
        return [], None
    sources = check_sources(next(tables.samples("fit")), tables.artefact.path)
    if robust:
        unjudged = sorted(set(sources) - set(next(tables.samples("validation")).source or ()))
        if unjudged:
            raise ImpossibleError(
                f"{tables.artefact.path} has no validation block of source {unjudged[0]}: what it gains cannot be "
                "judged; record more of its text."
            )
        return sources, None
    return sources, tuple((equal_mix(sources) if balance else read_mix(mix, sources)).items())


def equal_mix(sources: Sequence[str]) -> Mix:
    return {name: 1 / len(sources) for name in sources}


def read_mix(given: Sequence[str], sources: Sequence[str]) -> Mix:
    """NAME=WEIGHT, as the command line gives them; sources that are not named get nothing.

    Raises UsageError for a name that is none of the sources, or weights that are no positive numbers.
    """
    weights: dict[str, float] = {}
    for each in given:
        name, equals, text = each.rpartition("=")
        try:
            weight = float(text) if equals else math.nan
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UsageError(f"--mix {each!r} is not NAME=WEIGHT with a positive weight.")
        if name not in sources:
            raise UsageError(f"--mix names {name!r}; the tables' sources are {', '.join(sources)}.")
        weights[name] = weights.get(name, 0.0) + weight
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_sources(samples: Samples, path: object) -> list[str]:
    """The sources of the sample blocks, sorted. Raises ImpossibleError if they were not kept, or there is only one."""
    if samples.source is None:
        raise ImpossibleError(
            f"{path} does not say which source a sample is from; make it anew with smoe build-tables."
        )
    sources = sorted(set(samples.source))
    if len(sources) < 2:
        raise ImpossibleError(f"{path} has one source, {sources[0]}: there is nothing to weigh.")
    return sources


def weigh_blocks(samples: Samples, mix: Mapping[str, float]) -> Samples:
    """The blocks as often as their sources' shares ask for, in order; a source that the mix leaves out has none.

    Raises ImpossibleError if none of the mix's sources has a block.
    """
    assert samples.source is not None
    chosen = chosen_blocks(samples.source, mix)
    starts = samples.block_start
    rows = np.concatenate([np.arange(starts[block], starts[block + 1]) for block in chosen])
    lengths = (starts[1:] - starts[:-1])[chosen]
    return replace(
        samples,
        token_id=samples.token_id[rows],
        experts=samples.experts[rows],
        block_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        phase=None if samples.phase is None else samples.phase[rows],
        early=None if samples.early is None else (samples.early[0][rows], samples.early[1][rows]),
        source=tuple(samples.source[block] for block in chosen),
    )


def chosen_blocks(source: Sequence[str], mix: Mapping[str, float]) -> npt.NDArray[np.int64]:
    """Numbers of blocks, some of them several times, so that each source has its share. source: [B]."""
    names = np.array(source)
    here = {name: np.flatnonzero(names == name) for name in mix}
    shares = {name: share for name, share in mix.items() if share > 0 and len(here[name])}
    if not shares:
        raise ImpossibleError(f"no sample block is from {', '.join(mix)}; the trace has too few of its rows.")
    known = sum(shares.values())
    total = max(len(here[name]) * known / share for name, share in shares.items())
    total = min(total, MOST_REPEATS * len(names))
    picked = []
    for name, share in shares.items():
        times = max(1, round(total * share / known))
        picked.append(here[name][np.arange(times) * len(here[name]) // times])
    return np.sort(np.concatenate(picked))


def gains_by_source(gains: npt.NDArray[np.float64], source: Sequence[str]) -> dict[str, float]:
    """Mean gain of each source's blocks. gains: [L, B]; source: [B]."""
    names = np.array(source)
    return {name: float(gains[:, names == name].mean()) for name in sorted(set(source))}


@dataclass(frozen=True)
class Round:
    """One trial of `robust_mix`: the mix solved for, and each source's gain, as a part of its contiguous objective."""

    mix: Mix
    gains: dict[str, float]

    @property
    def worst(self) -> float:
        return min(self.gains.values())

    @property
    def mean(self) -> float:
        return sum(self.gains.values()) / len(self.gains)


def robust_mix(sources: Sequence[str], judge: Callable[[Mix], dict[str, float]], rounds: int = ROUNDS) -> list[Round]:
    """Trials that shift weight to sources that gain least, by smaller and smaller steps, from the equal mix on.

    judge: gains of a placement solved for a mix. The best trial is the one of greatest `worst`.
    """
    weights = np.log(np.full(len(sources), 1 / len(sources)))
    tried: list[Round] = []
    for number in range(1, rounds + 1):
        shares = np.exp(weights - weights.max())
        mix = dict(zip(sources, (shares / shares.sum()).tolist(), strict=True))
        tried.append(Round(mix, judge(mix)))
        gains = np.array([tried[-1].gains[name] for name in sources])
        spread = float(gains.max() - gains.min())
        if spread <= 0:
            break
        weights -= (gains - gains.mean()) / (spread / 2) / number
    return tried
