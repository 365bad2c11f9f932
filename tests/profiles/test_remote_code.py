"""A model folder may bring Python files; nothing in them runs, and nobody is asked whether it may."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from smoe_profiles.capture.loading import LoadOptions, load_model, load_tokenizer
from smoe_profiles.errors import InputError
from smoe_profiles.models import find_model
from tests.profiles.tiny_models import cached_model

EVIL = "from pathlib import Path\nPath({marker!r}).write_text('ran')\nclass Evil: pass\n"


@pytest.fixture
def hostile(tmp_path, tmp_path_factory, monkeypatch):
    """A tiny model whose configuration names classes in its own evil.py, and a user who says yes to everything."""
    folder = Path(shutil.copytree(cached_model(tmp_path_factory.getbasetemp(), "mixtral"), tmp_path / "model"))
    (folder / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def add(path, **keys):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))


def test_a_models_own_classes_are_not_imported(hostile, tmp_path):
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "evil.Evil")
    add(hostile / "config.json", auto_map=classes)
    load_model(find_model(str(hostile)), LoadOptions())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("named", ["Evil", "PreTrainedTokenizerFast"])
def test_a_tokenizers_own_class_is_not_imported(named, hostile, tmp_path):
    add(
        hostile / "tokenizer_config.json",
        tokenizer_class=named,
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    )
    with suppress(InputError):  # whether the tokenizer can be loaded without it is not the question
        load_tokenizer(find_model(str(hostile)))
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_pickles_are_not_opened(hostile):
    (hostile / "model.safetensors").rename(hostile / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        find_model(str(hostile)).files()
