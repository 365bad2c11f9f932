"""An import without its command: files read, checked and published, the way smoe_cli.importing joins them."""

from types import SimpleNamespace

import numpy as np

from smoe_profiles.artefact import publish
from smoe_profiles.choices import ImportFormat, Level
from smoe_profiles.importers.detect import read_records
from smoe_profiles.importers.layers import choose_layers
from smoe_profiles.importers.records import CountRecords, ReadOptions, TokenRecords
from smoe_profiles.importers.store import Wanted, count_notes, sound_rows, vocabulary, write_records
from smoe_profiles.levels import read_level
from smoe_profiles.models import find_model
from smoe_profiles.split import PARTS
from smoe_profiles.trace import open_trace

DEEPSEEK = "tiny-deepseek"
"""4 decoder layers, of which 1 to 3 have 64 experts, 6 a token."""
MIXTRAL = "tiny-mixtral"
"""3 layers of 8 experts, 2 a token."""


def options(model=None, **values):
    return ReadOptions(model=find_model(model) if model else None, **values)


def read(paths, kind=ImportFormat.AUTO, chosen_options=None):
    return read_records([*paths], kind, chosen_options or options())[1]


def store(folder, paths, chosen_options=None, wanted=None, kind=ImportFormat.AUTO):
    """A published trace of the files, with what was found on the way."""
    chosen_options = chosen_options or options()
    records = read(paths, kind, chosen_options)
    chosen = choose_layers(records, chosen_options.model, "the files")
    sound = sound_rows(records, chosen, "the files") if isinstance(records, TokenRecords) else None
    if isinstance(records, CountRecords):
        count_notes(records, chosen, "the files")
    vocab = chosen_options.model.spec.vocab_size if chosen_options.model else None
    names = [path.name.split(".")[0] for path in paths]
    with publish(folder / "trace", "trace", parameters={}, model={"family": "unknown"}) as draft:
        draft.parameters |= write_records(draft.path, records, chosen, sound, names, wanted or Wanted())
        draft.parameters["vocab_size"] = vocabulary(records, vocab, "the files")
    trace = open_trace(folder / "trace", needs=Level.COUNT)
    return SimpleNamespace(trace=trace, records=records, chosen=chosen, sound=sound)


def columns(trace, *names):
    """Columns of every part, in the order of sequence and position."""
    wanted = [*names, "sequence", "position"]
    parts = [trace.read(wanted, part) for part in PARTS]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    order = np.lexsort((joined["position"], joined["sequence"]))
    return SimpleNamespace(**{name: values[order] for name, values in joined.items()})


def entries(trace, layer, part="fit"):
    """A lower level's counts of one layer as {keys: count}."""
    found = read_level(trace, trace.layers[layer], part)
    keys = [name for name in found if name != "count"]
    rows = zip(*(found[name].tolist() for name in keys), strict=True)
    return {key if len(keys) > 1 else key[0]: count for key, count in zip(rows, found["count"].tolist(), strict=True)}


def distinct_rows(generator, shape, experts):
    """Expert ids of the given shape, the last axis without repeats."""
    *rows, top_k = shape
    return np.argsort(generator.random((*rows, experts)), axis=-1)[..., :top_k]
