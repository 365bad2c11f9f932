"""smoe import as a command: what it says, what it leaves, and what an unknown model can still be used for."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from smoe_cli.app import run
from smoe_cli.errors import UsageError
from smoe_cli.importing import identity, name_files
from smoe_profiles.importers.layers import Chosen
from smoe_profiles.models import BUNDLED, describe_identity, find_model, model_identity, same_model
from smoe_profiles.trace import TraceLayer

FIXTURES = Path(__file__).parents[1] / "fixtures/routing"
ROUTING = FIXTURES / "gptoss20b_layers.npz"


@pytest.fixture
def smoe(tmp_path, capsys):
    def call(*arguments, code=0):
        with chdir(tmp_path):
            found = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return call


def manifest(folder):
    return json.loads((folder / "trace/manifest.json").read_text())


def test_the_document_says_what_was_found(smoe, tmp_path):
    document = json.loads(smoe("import", ROUTING, "--json", "--source", "chat", "-C", "a")[0])
    assert sum(document.pop("rows").values()) == 3978
    assert document == {
        "path": "a/trace",
        "model": "unknown model",
        "level": "token",
        "ordered": False,
        "format": "npz",
        "id_space": "logical",
        "layers_found": 3,
        "layers_expected": None,
        "sources": ["chat"],
        "vocab_size": document["vocab_size"],
        "has_weights": True,
        "has_token_ids": True,
        "unknown_token_ids": 0,
        "padding": 0,
        "rejected": {},
        "notes": [],
    }
    parameters = manifest(tmp_path / "a")["parameters"]
    assert parameters["datasets"] == [{"spec": "gptoss20b_layers.npz", "source": "chat"}]
    assert parameters["imported"]["format"] == "npz"
    assert manifest(tmp_path / "a")["model"]["router_sha256"] is None


def test_rows_without_a_token_id_among_others_were_not_told(smoe, tmp_path):
    tokens = np.arange(600) % 50
    tokens[::3] = -1
    ids = np.tile(np.arange(8).reshape(1, 4, 2), (1, 150, 1))
    np.savez(tmp_path / "some.npz", ids=ids, tokens=tokens)
    assert "without a token id: 200, which count for placing, not for predicting\n" in smoe("import", "some.npz")[0]
    assert "without a token id" not in smoe("import", ROUTING, "-C", "all")[0]


def test_the_same_file_gives_the_same_bytes(smoe, tmp_path):
    for name in ("a", "b"):
        smoe("import", ROUTING, "-C", name)
    assert manifest(tmp_path / "a") == manifest(tmp_path / "b")


def test_an_imported_trace_of_an_unknown_model_goes_through_to_figures(smoe):
    smoe("import", ROUTING)
    smoe("build-tables")
    smoe("cocluster", "--ep", "4", "--method", "contiguous", "--jobs", "1")
    assert "placed+shuffled" in smoe("evaluate")[0]


def test_a_trace_without_token_ids_can_be_placed_by_co_activation(smoe):
    smoe("import", FIXTURES / "gptoss20b_layer12.npz")
    smoe("build-tables")
    out, _ = smoe("cocluster", "--ep", "4", "--goal", "fanout", "--effort", "fast")
    assert "confirmed on validation blocks" in out
    measured = json.loads(smoe("evaluate", "--json")[0])["total"]
    assert measured["placed"]["none"]["rule"]["fanout"] < measured["contiguous"]["none"]["rule"]["fanout"] - 0.1


def test_a_lower_level_says_that_it_is_too_low(smoe):
    out, err = smoe("import", FIXTURES / "mixtral8x7b_triples.npz", "--model", "mixtral-8x7b")
    assert "level token-count, 3 of 32 MoE layers" in out
    assert "next: smoe inspect" in err
    assert "is of level token-count; level token is needed" in smoe("build-tables", code=4)[1]


def test_rejected_rows_are_named_and_nothing_is_left(smoe, tmp_path):
    with np.load(ROUTING) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["ids"][1, 100:110] = 7
    np.savez(tmp_path / "bad.npz", **arrays)
    err = smoe("import", "bad.npz", code=3)[1]
    assert "10 of 3978 rows are rejected" in err
    assert "repeated id: 10 (first: row 100 of bad.npz, layer 12: [7, 7, 7, 7])" in err
    assert not (tmp_path / "smoe-out").exists() or not list((tmp_path / "smoe-out").iterdir())
    arrays["ids"][1, 103:110] = [1, 2, 3, 4]
    np.savez(tmp_path / "few.npz", **arrays)
    assert "rejected, repeated id: 3" in smoe("import", "few.npz")[0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((ROUTING, "--source", "a", "--source", "b"), 2, "2 --source for 1 files"),
        ((FIXTURES / "missing.npz",), 3, "is missing"),
        ((ROUTING, "--from", "vllm"), 3, "is not valid JSON"),
        ((ROUTING, "--model", "mixtral-8x7b"), 3, "32 experts in layer 11, but mixtral-8x7b has 8"),
        (("reply.json", "--axes", "token,layer,slot"), 2, "--axes is for NumPy archives"),
        ((FIXTURES / "gptoss20b_layer12.npz", "--no-order"), 4, "no token id is known"),
    ],
)
def test_what_cannot_be_imported_leaves_with_its_code(arguments, code, message, smoe, tmp_path):
    array = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    np.save(tmp_path / "reply.npy", array)
    shutil.move(tmp_path / "reply.npy", tmp_path / "reply.json")  # told by content, not by name
    assert message in smoe("import", *arguments, code=code)[1]


def test_more_sources_than_a_trace_can_number_are_a_usage_error():
    files = [Path(f"request-{number}.npy") for number in range(2**15)]
    assert name_files(files[1:], [])[-1] == "request-32767"
    assert set(name_files(files, ["chat"] * len(files))) == {"chat"}
    with pytest.raises(UsageError, match="32768 sources are more than 32767"):
        name_files(files, [])


def test_options_of_import_come_from_a_configuration_too(smoe, tmp_path, monkeypatch):
    (tmp_path / "smoe.toml").write_text('[import]\nfrom = "npz"\nno-order = true\n')
    assert "level token-count" in smoe("import", ROUTING, "--config", "smoe.toml")[0]
    monkeypatch.setenv("SMOE_FROM", "exflow")
    assert "is no readable .npy array" in smoe("import", ROUTING, "-C", "b", code=3)[1]


def test_an_unknown_model_agrees_with_every_model_of_its_layers_and_no_other():
    spec = find_model("tiny-mixtral").spec
    chosen = Chosen(
        tuple(TraceLayer(layer.id, layer.num_experts, layer.top_k) for layer in spec.layers), (0, 1, 2), None
    )
    unknown = identity(None, chosen, 99)
    known = model_identity(find_model("tiny-mixtral"))
    assert same_model(unknown, known)
    assert same_model(known, unknown)
    assert not same_model(unknown, model_identity(find_model("tiny-deepseek")))
    assert not same_model(unknown | {"family": "olmoe"}, known)
    assert describe_identity(unknown) == "an unknown model (3 MoE layers, 8 experts, top 2)"


def test_a_short_name_or_a_config_gives_layers_and_family_without_the_model(tmp_path):
    model = find_model("deepseek-v2-lite", download=False)
    found = identity(model, Chosen((), (), None), 5)
    assert (found["family"], len(found["layers"]), found["router_sha256"]) == ("deepseek_v2", 26, None)
    shutil.copy(BUNDLED / "tiny-mixtral/config.json", tmp_path)
    alone = identity(find_model(str(tmp_path)), Chosen((), (), None), 5)
    assert (alone["family"], len(alone["layers"]), alone["router_sha256"]) == ("mixtral", 3, None)
    local = find_model("tiny-mixtral")
    assert identity(local, Chosen((), (), None), 5) == model_identity(local)
