"""Prompts from files of every kind: the documents they hold, or one sentence about what is wrong with them."""

import gzip
import json
import lzma
import pickle
import re
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles.datasets import builtin_texts, limit_tokens, read_documents
from smoe_profiles.errors import InputError
from smoe_profiles.split import Document

VOCAB = 256


def tokenize(text):
    """Bytes as ids; none for a text of spaces alone."""
    return list(text.strip().encode())


def read(spec, vocab=VOCAB):
    return [(item.token_ids.tolist(), item.source) for item in read_documents(str(spec), "mine", tokenize, vocab)]


def read_or_refuse(path):
    """The documents; none, too, where the library's reader refuses a file of no rows and the error names it."""
    try:
        return read(path)
    except InputError as error:
        return [] if str(path) in str(error) else [str(error)]


def ids(*texts):
    return [(list(text.encode()), "mine") for text in texts]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


TEXTS = lines({"text": "one"}, {"text": "  "}, {"text": ""}, {"text": "three, ü", "meta": 1})


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.xz", lzma.compress), ("a.jsonl.gz", gzip.compress), ("a b\u00fc.jsonl", bytes)],
)
def test_json_lines_give_a_document_a_line_and_leave_empty_ones_out(name, pack, tmp_path):
    (tmp_path / name).write_bytes(pack(TEXTS.encode()))
    assert read(tmp_path / name) == ids("one", "three, ü")


def test_a_text_of_nothing_is_no_document_though_its_tokenizer_opens_with_a_token(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": ""}, {"text": "a"}))
    found = read_documents(str(tmp_path / "a.jsonl"), "mine", lambda text: [1, *text.encode()], VOCAB)
    assert [item.token_ids.tolist() for item in found] == [[1, 97]]


def test_a_row_without_text_among_others_is_not_told_that_it_has_one(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": "a"}, {"txt": "x"}))
    with pytest.raises(InputError, match="has a row without text"):
        read(tmp_path / "a.jsonl")


def test_ids_are_taken_as_they_are_and_preferred_to_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"input_ids": [5, 0, 255], "text": "x"}, {"input_ids": [7], "text": "y"}))
    assert read(tmp_path / "a.jsonl") == [([5, 0, 255], "mine"), ([7], "mine")]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    assert read(tmp_path / "a.txt") == ids("first\n\nsecond")


def test_parquet_gives_a_document_a_row(tmp_path):
    pq.write_table(pa.table({"text": ["one", "two", None]}).slice(0, 2), tmp_path / "text.parquet")
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]]}), tmp_path / "ids.parquet")
    assert read(tmp_path / "text.parquet") == ids("one", "two")
    assert read(tmp_path / "ids.parquet") == [([1, 2], "mine"), ([3], "mine")]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_npz_gives_one_document_or_one_a_row(dtype, tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.array([1, 2, 3], dtype), prompts=np.array([[4, 5], [6, 7]], dtype))
    assert read(tmp_path / "a.npz") == [([1, 2, 3], "mine")]
    assert read(f"{tmp_path / 'a.npz'}#prompts") == [([4, 5], "mine"), ([6, 7], "mine")]


def test_builtin_text_is_the_same_every_time_and_needs_no_file():
    first, again = (list(islice(builtin_texts(), 20)) for _ in range(2))
    assert first == again
    assert all(text.strip() for text in first)
    assert len(read_some := list(islice(read_documents("builtin", "builtin", tokenize, VOCAB), 3))) == 3
    assert {item.source for item in read_some} == {"builtin"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.npz", "a.jsonl.xz"])
def test_a_missing_file_is_called_missing(name, tmp_path):
    with pytest.raises(InputError, match=rf"{re.escape(str(tmp_path / name))} is missing"):
        read(tmp_path / name)


def test_a_folder_is_no_data_set(tmp_path):
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        read(tmp_path)


def test_an_unknown_ending_lists_what_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\n")
    with pytest.raises(InputError, match=r"\.jsonl, \.txt, \.parquet and \.npz"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize("rows", [[], [{"text": ""}], [{"input_ids": []}, {"input_ids": []}]])
def test_a_data_set_without_a_token_gives_no_document(rows, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    assert read_or_refuse(tmp_path / "a.jsonl") == []


def test_an_empty_parquet_gives_no_document(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert read_or_refuse(tmp_path / "a.parquet") == []


def test_an_empty_array_gives_no_document(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.empty(0, np.int64), rows=np.empty((3, 0), np.int64))
    assert read(tmp_path / "a.npz") == []
    assert read(f"{tmp_path / 'a.npz'}#rows") == []


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"content": "x"}, "fields content"),
        ({"text": None, "title": "x"}, "row without text"),
        ({"input_ids": [1, 256]}, "token id 256; the model's vocabulary has 256"),
        ({"input_ids": [1, -1]}, "token id -1"),
        ({"input_ids": [[1, 2], [3, 4]]}, "one list a document"),
        ({"input_ids": [[1, 2], [3]]}, "a.jsonl"),
        ({"input_ids": [1.5, 2.0]}, "a.jsonl"),
        ({"input_ids": ["1", "2"]}, "a.jsonl"),
        ({"input_ids": [1, None]}, "a.jsonl"),
        ({"input_ids": 5}, "a.jsonl"),
        ({"text": 5}, "a.jsonl"),
        ({"text": ["a", "b"]}, "a.jsonl"),
        ({"text": {"a": 1}}, "a.jsonl"),
    ],
)
def test_a_row_that_is_no_prompt_is_an_input_error(row, named, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(row))
    with pytest.raises(InputError, match=named):
        read(tmp_path / "a.jsonl")


BROKEN = {
    "a.jsonl": b'{"text": "one"}\n{"text": \n',
    "b.jsonl": b"\x00\x01\x02\xff",
    "a.jsonl.xz": lzma.compress(TEXTS.encode())[:-10],
    "b.jsonl.xz": b"not xz",
    "a.parquet": b"PAR1 and nothing else PAR1",
    "a.txt": b"\xff\xfe\x80 not UTF-8",
    "a.npz": b"PK\x03\x04 cut",
    "b.npz": b"",
    "c.npz": pickle.dumps([1, 2]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_an_input_error_naming_it(name, tmp_path):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(InputError, match=re.escape(name)):
        read(tmp_path / name)


def test_a_damaged_file_never_gives_tokens_first_and_the_error_later_unnoticed(tmp_path):
    """The error of a late line must reach the caller, not end the stream."""
    (tmp_path / "a.jsonl").write_text(lines(*({"text": f"row {i}"} for i in range(500))) + "{broken\n")
    with pytest.raises(InputError, match=r"a\.jsonl"):
        read(tmp_path / "a.jsonl")


class Planted:
    """Unpickling it would be noticed."""

    fired = False

    def __reduce__(self):
        return (setattr, (Planted, "fired", True))


def test_a_pickled_array_is_refused_and_never_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.array([Planted()], object))
    with pytest.raises(InputError, match=r"a\.npz"):
        read(tmp_path / "a.npz")
    assert not Planted.fired


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros((2, 2, 2), int), r"int64 \[2, 2, 2\]"),
        (np.array(3), r"int64 \[\]"),
        (np.array([1.0]), "float64"),
        (np.array(["w1"]), "integer token ids"),
        (np.array([True]), "bool"),
        (np.array([2**63], np.uint64), "token id"),
        (np.array([300]), "token id 300"),
    ],
)
def test_an_array_that_is_no_prompt_is_an_input_error(array, named, tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=array)
    with pytest.raises(InputError, match=named):
        read(tmp_path / "a.npz")


def test_a_missing_key_lists_the_ones_there_are(tmp_path):
    np.savez(tmp_path / "a.npz", prompts=np.array([1]), more=np.array([2]))
    with pytest.raises(InputError, match="no array 'input_ids'; it holds prompts, more"):
        read(tmp_path / "a.npz")
    with pytest.raises(InputError, match="no array 'x'"):
        read(f"{tmp_path / 'a.npz'}#x")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=6), st.integers(1, 25) | st.none())
def test_a_token_limit_keeps_a_prefix_of_the_stream(corpus, limit):
    documents = (Document(np.array(tokens, np.uint32), f"s{i}") for i, tokens in enumerate(corpus))
    found = [(int(token), item.source) for item in limit_tokens(documents, limit) for token in item.token_ids]
    wanted = [(token, f"s{i}") for i, tokens in enumerate(corpus) for token in tokens]
    assert found == wanted[:limit]


def test_a_token_limit_reads_no_further_than_it_must():
    read_so_far = []

    def stream():
        for number in range(100):
            read_so_far.append(number)
            yield Document(np.arange(10, dtype=np.uint32), "s")

    assert sum(len(item.token_ids) for item in limit_tokens(stream(), 25)) == 25
    assert len(read_so_far) <= 4


@pytest.mark.parametrize("text", ['{"text": "fine"}\n{"text": \n', "no json at all\n", '{"text": 1}\n["a"]\n'])
def test_a_broken_file_is_one_error_and_no_log_line_of_the_library(text, tmp_path, capfd):
    (tmp_path / "broken.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"broken\.jsonl"):
        list(read_documents(str(tmp_path / "broken.jsonl"), "s", lambda _: [1], 8))
    assert capfd.readouterr() == ("", "")
