"""The same text gives the same rows, whatever it runs with: alone, padded in a batch, and generating (every family).

Only a choice closer than rounding may fall otherwise: such rows are counted, printed, and held to be few.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from smoe_profiles.capture.loading import LoadOptions, load_model
from smoe_profiles.capture.profile import CaptureOptions, record, trace_layers
from smoe_profiles.models import find_model
from smoe_profiles.split import Assigned, Document
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.tiny_models import FAMILY_CONFIGS, VOCAB, installed

LENGTHS = (24, 9, 15, 3)
FEW = 0.01


def rows_of(model, loaded, documents, folder, decode):
    """sequence -> its rows as dictionaries, in order of position."""
    folder.mkdir()
    writer = TraceWriter(folder, trace_layers(model), ["text"])
    record(model, loaded, documents, writer, CaptureOptions(["text"], decode=decode), lambda _: None)
    writer.close()
    table = pq.read_table(folder / "part-00000.parquet").sort_by([("sequence", "ascending"), ("position", "ascending")])
    found = {}
    for row in table.to_pylist():
        found.setdefault(row["sequence"], []).append(row)
    return found


def differing(one, other):
    """Rows of two runs of one text in which some layer's expert sets differ, up to the first other token generated."""
    count = rows = 0
    for a, b in zip(one, other, strict=False):
        if a["token_id"] != b["token_id"]:
            break  # a near tie of two tokens: from here on it is another text
        layers = [name for name in a if name.startswith("experts_")]
        count += any(set(a[name]) != set(b[name]) for name in layers)
        rows += 1
    return count, rows


@pytest.mark.parametrize("decode", [0, 4])
@pytest.mark.parametrize("name", installed(FAMILY_CONFIGS))
def test_a_text_alone_and_padded_in_a_batch_gives_the_same_rows(name, decode, tiny, tmp_path):
    model = find_model(str(tiny(name)))
    loaded = load_model(model, LoadOptions("float32"))
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    documents = [
        Assigned(Document(generator.integers(1, VOCAB, length).astype(np.uint32), "text"), "fit") for length in LENGTHS
    ]
    together = rows_of(model, loaded, documents, tmp_path / "together", decode)
    excused = total = 0
    for number, document in enumerate(documents):
        alone = rows_of(model, loaded, [document], tmp_path / f"alone-{number}", decode)[0]
        count, rows = differing(alone, together[number])
        excused, total = excused + count, total + rows
        prefill = [row for row in alone if row["phase"] == "prefill"]
        assert [row["token_id"] for row in prefill] == document.document.token_ids.tolist()
        assert [row["position"] for row in alone] == list(range(len(alone)))
        assert len(prefill) == LENGTHS[number]
    print(f"{name}: {excused} of {total} rows near a tie")
    assert total >= sum(LENGTHS)
    assert excused <= FEW * total
