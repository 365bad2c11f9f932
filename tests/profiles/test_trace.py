"""The trace on disk: written as docs/formats/trace.md says, read back whole, and never believed when damaged."""

import re
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles import trace_writer
from smoe_profiles.artefact import publish
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.trace import UNKNOWN_TOKEN, Rows, TraceLayer, open_trace, schema
from smoe_profiles.trace_writer import TraceWriter, sort_by_weight
from tests.profiles.conftest import IDENTITY, SOURCES, publish_trace, random_rows, trace_parameters

LAYERS = [TraceLayer(1, 8, 2), TraceLayer(3, 300, 3)]
PARTS = ("fit", "validation", "heldout")


def joined(batches):
    """The batches' columns one after another, as lists."""
    names = {"source": SOURCES, "split": PARTS}
    columns = {
        name: [int(value) for rows in batches for value in getattr(rows, name)]
        for name in ("sequence", "position", "token_id", *names)
    }
    columns |= {name: [words[code] for code in columns[name]] for name, words in names.items()}
    for index, layer in enumerate(LAYERS):
        columns[layer.column] = np.concatenate([rows.experts[index] for rows in batches]).tolist()
        columns[layer.weight_column] = np.concatenate([rows.weights[index] for rows in batches]).tolist()
    return columns


def test_columns_and_types_are_those_of_the_design():
    names = pa.dictionary(pa.int16(), pa.string())
    assert schema(LAYERS) == pa.schema(
        [
            pa.field("sequence", pa.uint32(), nullable=False),
            pa.field("position", pa.uint32(), nullable=False),
            pa.field("token_id", pa.uint32()),
            pa.field("phase", names, nullable=False),
            pa.field("source", names, nullable=False),
            pa.field("split", names, nullable=False),
            pa.field("experts_01", pa.list_(pa.uint8(), 2), nullable=False),
            pa.field("weights_01", pa.list_(pa.float16(), 2)),
            pa.field("experts_03", pa.list_(pa.uint16(), 3), nullable=False),
            pa.field("weights_03", pa.list_(pa.float16(), 3)),
        ]
    )


@pytest.mark.parametrize(("experts", "kind"), [(256, pa.uint8()), (257, pa.uint16())])
def test_ids_are_stored_in_the_narrowest_type_that_holds_them(experts, kind, tmp_path):
    layer = TraceLayer(0, experts, 2)
    rows = random_rows(np.random.default_rng(0), 4, [layer])
    rows.experts[0][0] = [experts - 1, 0]
    trace = publish_trace(tmp_path / "trace", [layer], [rows])
    assert trace.experts(layer, "fit")[0].tolist() == [experts - 1, 0]
    assert pq.read_schema(tmp_path / "trace" / "part-00000.parquet").field("experts_00").type == pa.list_(kind, 2)


def test_a_second_stack_has_its_own_prefix():
    assert TraceLayer(4, 8, 2, stack="talker_").column == "experts_talker_04"


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_rows_come_back_whole_over_many_row_groups_and_parts(sizes, seed, tmp_path_factory):
    generator = np.random.default_rng(seed)
    batches = [random_rows(generator, size, LAYERS, first_sequence=100 * i) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 8)
        patch.setattr(trace_writer, "PART_ROWS", 24)
        trace = publish_trace(tmp_path_factory.mktemp("rows") / "trace", LAYERS, batches)
    wanted = joined(batches)
    files = sorted(trace.artefact.path.glob("part-*.parquet"))
    assert len(files) == -(-sum(sizes) // 24)
    groups = [
        pq.ParquetFile(path).metadata.row_group(group).num_rows
        for path in files
        for group in range(pq.ParquetFile(path).num_row_groups)
    ]
    assert all(rows == 8 for rows in groups[:-1])
    assert groups[-1] <= 8
    table = pa.concat_tables(pq.read_table(path).cast(schema(LAYERS)) for path in files)
    for name, values in wanted.items():
        assert table[name].to_pylist() == values
    for part in PARTS:
        mine = [value == part for value in wanted["split"]]
        assert trace.rows(part) == sum(mine)
        found = trace.read(list(wanted), part)
        for name, values in wanted.items():
            assert found[name].tolist() == [value for value, keep in zip(values, mine, strict=True) if keep]


def test_files_are_compressed_with_zstd(tmp_path):
    publish_trace(tmp_path / "trace", LAYERS, [random_rows(np.random.default_rng(0), 50, LAYERS)])
    column = pq.ParquetFile(tmp_path / "trace" / "part-00000.parquet").metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"


def test_the_same_rows_give_the_same_bytes(tmp_path):
    paths = [tmp_path / "one" / "trace", tmp_path / "two" / "trace"]
    for path in paths:
        path.parent.mkdir()
    traces = [publish_trace(path, LAYERS, [random_rows(np.random.default_rng(5), 99, LAYERS)]) for path in paths]
    assert traces[0].artefact.id == traces[1].artefact.id


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_sorting_is_by_falling_weight_and_ties_go_to_the_lower_id(seed, top_k, rows):
    generator = np.random.default_rng(seed)
    experts = np.stack([generator.permutation(12)[:top_k] for _ in range(rows)])
    weights = generator.integers(0, 3, (rows, top_k)).astype(np.float32) / 4
    ids, sorted_weights = sort_by_weight(experts, weights)
    for row in range(rows):
        pairs = sorted(zip(weights[row].tolist(), experts[row].tolist(), strict=True), key=lambda p: (-p[0], p[1]))
        assert list(zip(sorted_weights[row].tolist(), ids[row].tolist(), strict=True)) == pairs


@pytest.mark.parametrize(
    ("row", "message"),
    [([3, 3], "row 2.*repeat"), ([3, 8], "id 8; it has 8"), ([65535, 0], "65535"), ([0, 0], "repeat")],
)
def test_a_row_that_cannot_be_a_choice_is_refused_on_writing(row, message, tmp_path):
    rows = random_rows(np.random.default_rng(0), 5, LAYERS)
    rows.experts[0][2] = row
    with pytest.raises(InputError, match=rf"layer 1.*{message}"):
        TraceWriter(tmp_path, LAYERS, SOURCES).append(rows)


def test_a_negative_id_is_refused_on_writing(tmp_path):
    rows = random_rows(np.random.default_rng(0), 5, LAYERS)
    rows = replace(rows, experts=[rows.experts[0].astype(np.int64) - 8, rows.experts[1]])
    with pytest.raises(InputError, match=r"layer 1 holds expert id -"):
        TraceWriter(tmp_path, LAYERS, SOURCES).append(rows)


def test_another_number_of_experts_a_token_is_refused_on_writing(tmp_path):
    rows = random_rows(np.random.default_rng(0), 5, [TraceLayer(1, 8, 3), LAYERS[1]])
    with pytest.raises(InputError, match="layer 1 gave 3 experts a token; its config says 2"):
        TraceWriter(tmp_path, LAYERS, SOURCES).append(rows)


ONE = [TraceLayer(0, 8, 2)]


def good_table(rows=40):
    """A trace part as a stranger would write it with pyarrow."""
    generator = np.random.default_rng(0)
    made = random_rows(generator, rows, ONE)
    return pa.table(
        {
            "sequence": pa.array(made.sequence),
            "position": pa.array(made.position),
            "token_id": pa.array(made.token_id),
            "phase": pa.array(["prefill"] * rows).dictionary_encode(),
            "source": pa.array(["text"] * rows).dictionary_encode(),
            "split": pa.array(["fit"] * rows).dictionary_encode(),
            "experts_00": pa.FixedSizeListArray.from_arrays(pa.array(made.experts[0].reshape(-1), pa.uint8()), 2),
        }
    )


def publish_tables(path, tables, damage=None):
    """An artefact whose hashes are right, whatever its Parquet parts hold."""
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        for number, table in enumerate(tables):
            part = draft.path / f"part-{number:05d}.parquet"
            pq.write_table(table, part, write_page_checksum=True)
            if damage:
                part.write_bytes(damage(part.read_bytes()))
        rows = {"fit": sum(map(len, tables)), "validation": 0, "heldout": 0}
        draft.parameters |= trace_parameters(ONE, rows)
    return open_trace(path)


def with_experts(kind, change=None):
    values = good_table()["experts_00"].to_pylist()
    if change:
        change(values)
    return good_table().set_column(6, "experts_00", pa.array(values, pa.list_(kind, 2)))


def test_a_strangers_table_is_read_like_our_own(tmp_path):
    trace = publish_tables(tmp_path / "trace", [good_table(), good_table(7)])
    assert trace.experts(ONE[0], "fit").tolist() == [
        *good_table()["experts_00"].to_pylist(),
        *good_table(7)["experts_00"].to_pylist(),
    ]


def put(row, ids):
    return lambda values: values.__setitem__(row, ids)


STRANGE = {
    "an expert id beyond the last": with_experts(pa.uint8(), put(3, [1, 8])),
    "an expert twice in a row": with_experts(pa.uint8(), put(3, [5, 5])),
    "rows of zeros as some engines write": with_experts(pa.uint8(), put(3, [0, 0])),
    "a negative id": with_experts(pa.int16(), put(3, [1, -1])),
    "an id that wraps to a valid one in 16 bits": with_experts(pa.int64(), put(3, [1, 65536 + 2])),
    "a negative id that wraps to a valid one": with_experts(pa.int64(), put(3, [1, -65536 + 2])),
    "ids as fractions": with_experts(pa.float32(), put(3, [1.0, 2.5])),
    "ids as text": good_table().set_column(6, "experts_00", pa.array(["1,2"] * 40)),
    "a single id a row": good_table().set_column(6, "experts_00", pa.array([1] * 40, pa.uint8())),
    "three ids a row": good_table().set_column(6, "experts_00", pa.array([[1, 2, 3]] * 40, pa.list_(pa.uint8(), 3))),
    "lists of varying length": good_table().set_column(
        6, "experts_00", pa.array([[1, 2]] * 39 + [[1]], pa.list_(pa.uint8()))
    ),
    "a row without ids": with_experts(pa.uint8(), put(3, None)),
    "a missing column": good_table().drop_columns(["experts_00"]),
    "no split": good_table().drop_columns(["split"]),
    "split as a number": good_table().set_column(5, "split", pa.array([1] * 40)),
}


@pytest.mark.parametrize("fault", STRANGE)
def test_a_strangers_table_that_is_no_trace_is_an_input_error(fault, tmp_path):
    trace = publish_tables(tmp_path / "trace", [STRANGE[fault]])
    with pytest.raises(InputError):
        trace.experts(ONE[0], "fit")


def test_a_column_missing_from_one_part_only_is_named_with_that_part(tmp_path):
    trace = publish_tables(tmp_path / "trace", [good_table(), good_table().drop_columns(["experts_00"])])
    with pytest.raises(InputError, match=r"part-00001\.parquet has no column experts_00"):
        trace.experts(ONE[0], "fit")


CUTS = {
    "the footer": lambda data: data[:-20],
    "half": lambda data: data[: len(data) // 2],
    "all but the magic": lambda data: data[:4],
    "everything": lambda _data: b"",
}


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_parquet_is_an_input_error_naming_the_part(cut, tmp_path):
    trace = publish_tables(tmp_path / "trace", [good_table()], CUTS[cut])
    with pytest.raises(InputError, match=r"part-00000\.parquet cannot be read"):
        trace.experts(ONE[0], "fit")


def test_a_part_cut_short_after_publishing_is_found_on_opening(tmp_path):
    trace = publish_tables(tmp_path / "trace", [good_table()])
    part = trace.artefact.path / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match=re.escape(str(part))):
        open_trace(trace.artefact.path)


def test_a_flipped_bit_in_a_page_never_changes_what_is_read(tmp_path):
    """Every 7th byte of one column's pages: the checksum of the page, or its header, gives it away."""
    trace = publish_trace(tmp_path / "trace", ONE, [random_rows(np.random.default_rng(0), 200, ONE)])
    part = trace.artefact.path / "part-00000.parquet"
    good = part.read_bytes()
    wanted = trace.experts(ONE[0], "fit").tolist()
    columns = pq.ParquetFile(part).metadata.row_group(0)
    column = next(
        columns.column(i)
        for i in range(columns.num_columns)
        if columns.column(i).path_in_schema.startswith("experts_00")
    )
    start = column.dictionary_page_offset or column.data_page_offset
    refused = 0
    for place in range(start, start + column.total_compressed_size, 7):
        damaged = bytearray(good)
        damaged[place] ^= 0x10
        part.write_bytes(damaged)
        try:
            assert trace.experts(ONE[0], "fit").tolist() == wanted
        except InputError:
            refused += 1
    assert refused > 3


def test_rows_without_parts_give_an_input_error_not_a_crash(tmp_path):
    with publish(tmp_path / "trace", "trace", parameters={}, model=IDENTITY) as draft:
        draft.parameters |= trace_parameters(ONE, dict.fromkeys(PARTS, 0))
    trace = open_trace(tmp_path / "trace")
    with suppress(InputError):
        assert len(trace.experts(ONE[0], "fit")) == 0


def test_another_level_is_refused_with_the_command_that_records_tokens(tmp_path):
    parameters = trace_parameters(ONE, dict.fromkeys(PARTS, 0)) | {"level": "count"}
    with publish(tmp_path / "trace", "trace", parameters=parameters, model=IDENTITY):
        pass
    with pytest.raises(ImpossibleError, match=r"level count.*smoe profile"):
        open_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": None},
        {"layers": [{"id": 0}]},
        {"layers": [{"id": 0, "num_experts": 8, "top_k": 2, "stack": "", "extra": 1}]},
        {"vocab_size": None},
        {"vocab_size": "many"},
    ],
)
def test_a_manifest_with_parameters_of_another_shape_is_an_input_error(change, tmp_path):
    parameters = trace_parameters(ONE, dict.fromkeys(PARTS, 0)) | change
    with publish(tmp_path / "trace", "trace", parameters=parameters, model=IDENTITY):
        pass
    with pytest.raises(InputError, match="trace"):
        open_trace(tmp_path / "trace")


def test_rows_hold_exactly_what_a_trace_row_needs():
    assert {field.name for field in fields(Rows)} == {
        *("sequence", "position", "token_id", "phase", "source", "split", "experts", "weights", "early")
    }


def test_unknown_token_ids_and_weights_are_null_on_disk_and_come_back_as_such(tmp_path):
    rows = random_rows(np.random.default_rng(0), 12, LAYERS)
    rows.token_id[[0, 7]] = UNKNOWN_TOKEN
    rows.token_id[1] = UNKNOWN_TOKEN - 1
    rows = replace(rows, split=np.zeros(12, np.int16), weights=[None, rows.weights[1]])
    trace = publish_trace(tmp_path / "trace", LAYERS, [rows])
    table = pq.read_table(tmp_path / "trace" / "part-00000.parquet")
    assert [i for i, value in enumerate(table["token_id"].to_pylist()) if value is None] == [0, 7]
    assert table["weights_01"].null_count == 12
    back = trace.read(["token_id", "weights_01", "weights_03"], "fit")
    assert back["token_id"].tolist() == rows.token_id.tolist()
    assert np.isnan(back["weights_01"]).all()
    assert back["weights_01"].shape == (12, 2)
    assert (back["weights_03"] == rows.weights[1]).all()


def write_in_lives(folder, batches, deaths, cut=0):
    """Append batches through a writer that is dropped after each of `deaths` appends and built anew over its folder."""
    folder.mkdir()
    for death in [*deaths, None]:
        writer = TraceWriter(folder, LAYERS, SOURCES)
        left = batches[writer.appended :]
        for rows in left if death is None else left[:death]:
            writer.append(rows)
        if death is None:
            writer.close()
        elif cut:
            journal = folder / ".part.journal"
            journal.write_bytes(journal.read_bytes()[:-cut])
    return {path.name: path.read_bytes() for path in folder.glob("part-*.parquet")}, writer.rows


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    deaths=st.lists(st.integers(0, 4), max_size=3),
    cut=st.sampled_from([0, 1, 7, 300]),
)
def test_a_writer_killed_anywhere_and_built_again_gives_the_same_bytes(sizes, deaths, cut, tmp_path_factory):
    base = tmp_path_factory.mktemp("lives")
    batches = [random_rows(np.random.default_rng(i), size, LAYERS) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 8)
        patch.setattr(trace_writer, "PART_ROWS", 24)
        assert write_in_lives(base / "killed", batches, deaths, cut) == write_in_lives(base / "whole", batches, [])


def test_a_resumed_writer_does_not_start_again(tmp_path):
    batches = [random_rows(np.random.default_rng(i), 10, LAYERS) for i in range(4)]
    first = TraceWriter(tmp_path, LAYERS, SOURCES)
    for rows in batches[:3]:
        first.append(rows)
    assert TraceWriter(tmp_path, LAYERS, SOURCES).appended == 3


def test_a_kill_while_a_journal_was_taken_over_lost_the_rows_not_yet_copied(tmp_path, monkeypatch):
    """The new journal took the old one's name before it held the old one's rows."""
    batches = [random_rows(np.random.default_rng(i), 10, LAYERS) for i in range(4)]
    first = TraceWriter(tmp_path, LAYERS, SOURCES)
    for rows in batches[:3]:
        first.append(rows)
    with monkeypatch.context() as patch:
        patch.delattr(TraceWriter, "_take")
        with pytest.raises(AttributeError):
            TraceWriter(tmp_path, LAYERS, SOURCES)
    assert TraceWriter(tmp_path, LAYERS, SOURCES).appended == 3
