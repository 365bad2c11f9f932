"""A model shared by ranks is the model that one process has, and each rank reads its share alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from smoe_cli.runtime.adapter import load_model
from smoe_cli.runtime.collectives import CollectiveExchange
from smoe_cli.runtime.layer import Mode
from smoe_cli.runtime.loading import Share, Weights, empty_model
from smoe_cli.runtime.plan import take_scores
from smoe_cli.runtime.shuffle import Shuffle
from smoe_cli.runtime.tables import FUSED, RuntimeTables
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_solvers.choices import Predictor
from tests.runtime.models import (
    make_checkpoint,
    make_map,
    model_folder,
    random_placement,
    reference,
    reference_logits,
    write_tables,
)
from tests.runtime.ranks import ranks

CPU = torch.device("cpu")
MODELS = ["tiny-deepseek", "tiny-mixtral", "grouped", "qwen"]
SHUFFLED_MODES = [mode for mode in Mode if mode is not Mode.DP_EP]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def load(folder, mode, tables=None, **options):
    shuffle = Shuffle(CollectiveExchange(), tables and RuntimeTables.open(tables, CPU), debug=True, **options)
    return load_model(folder, mode, shuffle, dtype=torch.float32, device=CPU)


def teacher_forced(folder, tables, modes, ids, chunks):
    """Logits [S, V] of each mode, the sequence taken in chunks, and what the rank read."""
    found = {}
    for mode in modes:
        model, cache, parts = load(folder, mode, tables), None, []
        for part in ids.split(chunks):
            logits, cache = model.forward(part[None], cache, last=False)
            parts.append(logits[0])
        found[mode] = torch.cat(parts)
    return found, model.bytes_read


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_mode_gives_the_logits_of_one_process_and_each_other_s_bits(name, number, base):
    """A prompt, one of fewer tokens than ranks, and single tokens, under a map of random placement and tables."""
    folder = model_folder(name, base)
    ids = torch.randint(1, 90, (21,), generator=torch.Generator().manual_seed(1))
    tables = make_map(folder, number, base) / "runtime.safetensors"
    told = ranks(number).run(teacher_forced, folder, tables, SHUFFLED_MODES, ids, [16, 3, 1, 1])
    expected = reference_logits(folder, ids)
    plain = told[0][0][Mode.SP_EP]
    assert torch.allclose(plain, expected, atol=1e-4 * float(expected.abs().max()))
    for by_mode, _ in told:
        for mode, logits in by_mode.items():
            assert torch.equal(logits, plain), mode


def test_a_rank_may_be_without_experts_and_a_token_have_one_alone(base):
    folder = model_folder("few", base)
    ids = torch.randint(1, 90, (21,), generator=torch.Generator().manual_seed(1))
    told = ranks(4).run(teacher_forced, folder, None, [Mode.SP_EP, Mode.AR_EP, Mode.REPLICATED], ids, [16, 3, 1, 1])
    expected = reference_logits(folder, ids)
    for by_mode, _ in told:
        for mode, logits in by_mode.items():
            assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max())), mode


def read_names(folder, tables):
    """Names and bytes that this rank reads."""
    names = []
    original = Weights.read

    def noted(self, name, *more):
        names.append(name)
        return original(self, name, *more)

    Weights.read = noted
    try:
        model = load(folder, Mode.SPECULATIVE, tables)
    finally:
        Weights.read = original
    return names, model.bytes_read


@pytest.mark.parametrize("name", ["tiny-mixtral", "grouped"])
def test_a_rank_reads_its_own_experts_and_its_heads_alone(name, base):
    folder, number = model_folder(name, base), 4
    placement = random_placement(folder, number)
    told = ranks(number).run(read_names, folder, make_map(folder, number, base) / "runtime.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118 (not a dictionary)
    cut = ("q_proj", "q_b_proj", "kv_b_proj", "k_proj", "v_proj", "o_proj")
    for rank, (names, bytes_read) in enumerate(told):
        assert len(names) == len(set(names))
        expected = 0
        for key, size in sizes.items():
            layer = int(key.split(".")[2]) if ".layers." in key else -1
            if ".experts." in key:
                expert = int(key.partition(".experts.")[2].split(".")[0])
                slots = placement.physical_to_logical[placement.layer_ids.index(layer)]
                mine = placement.slot_to_rank[slots == expert] == rank
                assert (key in names) == bool(mine), key
                expected += size * int(mine[0])
            else:
                assert key in names
                dense = ".mlp." in key and layer not in placement.layer_ids
                expected += size // number if dense or key.split(".")[-2] in cut else size
        assert bytes_read == expected


def forward_own(folder, tables, lengths):
    """dp-ep: each rank one sequence of its own, then one more token. Returns its logits [2, V], None without any."""
    model = load(folder, Mode.DP_EP, tables)
    rank = model.exchange.rank
    ids = own_ids(rank, lengths[rank])
    logits, cache = model.forward_own(ids[None], None, max(lengths))
    more, _ = model.forward_own(ids[None, :1], cache, 1)
    return None if logits is None else torch.cat([logits, more], dim=1)[0]


def own_ids(rank, length):
    return torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("name", ["tiny-deepseek", "qwen"])
def test_ranks_with_requests_of_their_own_give_the_logits_of_one_process(name, base):
    folder, lengths = model_folder(name, base), [5, 0, 11, 1]
    tables = make_map(folder, 4, base) / "runtime.safetensors"
    for rank, logits in enumerate(ranks(4).run(forward_own, folder, tables, lengths)):
        if lengths[rank] == 0:
            assert logits is None
            continue
        ids = own_ids(rank, lengths[rank])
        expected = reference_logits(folder, torch.cat([ids, ids[:1]]))[-2:]
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))


def run_small(folder, tables, below, instead):
    """Which modes a prompt of nine tokens and single ones were run in."""
    model = load(folder, Mode.SPECULATIVE, tables, below=below, instead=instead)
    modes = []
    layer = next(iter(model.layers.values()))
    original = type(layer).run

    def noted(self, mode, *more):
        modes.append(mode)
        return original(self, mode, *more)

    type(layer).run = noted
    try:
        ids = torch.arange(1, 10)[None]
        logits, cache = model.forward(ids)
        more, _ = model.forward(ids[:, :1], cache)
    finally:
        type(layer).run = original
    return modes, torch.cat([logits, more], dim=1)


def test_speculation_is_off_below_a_number_of_tokens(base):
    folder = model_folder("tiny-mixtral", base)
    tables = make_map(folder, 2, base) / "runtime.safetensors"
    always = ranks(2).run(run_small, folder, tables, 0, Mode.SP_EP)[0]
    assert set(always[0]) == {Mode.SPECULATIVE}
    modes, logits = ranks(2).run(run_small, folder, tables, 9, Mode.REPLICATED)[0]
    assert modes == [Mode.SPECULATIVE] * 3 + [Mode.REPLICATED] * 3
    assert torch.equal(logits, always[1])


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers_that_can(base):
    config = empty_model(model_folder("qwen", base), torch.float32).config
    with pytest.raises(ImpossibleError, match=r"8 attention heads \(2 of keys and values\) .* by 3 .* 1, 2, 4, 8, or"):
        Share(0, 3).check_heads(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "olmoe"}, "does not run olmoe"), ({"quantization_config": {"quant_method": "fp8"}}, "quantised")],
)
def test_models_that_the_run_time_does_not_run_are_refused(change, message, base, tmp_path):
    config = json.loads((model_folder("qwen", base) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ImpossibleError, match=message):
        empty_model(Path(tmp_path), torch.float32)


def check_tables(folder, tables):
    try:
        load(folder, Mode.SPECULATIVE, tables)
    except InputError as error:
        return str(error)
    return "fits"


def test_tables_of_another_model_or_number_of_ranks_are_refused(base, tmp_path):
    folder = model_folder("tiny-mixtral", base)
    write_tables(tmp_path / "four.safetensors", folder, random_placement(folder, 4), "map")
    told = ranks(2).run(check_tables, folder, tmp_path / "four.safetensors")
    assert all("for 4 ranks, 2 run" in text for text in told)
    other = make_map(model_folder("grouped", base), 2, base) / "runtime.safetensors"
    assert all("this model has [8] in [0, 1, 2]" in text for text in ranks(2).run(check_tables, folder, other))
    assert ranks(2).run(check_tables, folder, make_map(folder, 2, base) / "runtime.safetensors") == ["fits"] * 2


def test_a_tensor_that_is_not_there_is_named(base):
    weights = Weights(model_folder("tiny-mixtral", base))
    with pytest.raises(InputError, match=r"holds no tensor model\.layers\.9\.x"):
        weights.read("model.layers.9.x")


def told_scores(folder, tables, predictor, ids, chunks):
    """Of each MoE layer and chunk, the gathered scores [T, G] that a plan was made of; and logits [S, V]."""
    from smoe_cli.runtime import shuffle

    noted, original = [], shuffle.make_plan

    def note(table, ranks, index):
        noted.append(take_scores(table, index))
        return original(table, ranks, index)

    shuffle.make_plan = note
    try:
        model, cache, parts = load(folder, Mode.SPECULATIVE, tables, predictor=predictor), None, []
        for part in ids.split(chunks):
            logits, cache = model.forward(part[None], cache, last=False)
            parts.append(logits[0])
    finally:
        shuffle.make_plan = original
    layers = len(model.layers)
    return [torch.cat(noted[layer::layers]) for layer in range(layers)], torch.cat(parts)


@torch.no_grad()
def expected_scores(folder, tables, predictor, ids):
    """The same from what profile records of the whole model and smoe_solvers makes of it, [T, G] of each layer."""
    from smoe_cli.placement import layer_predictors
    from smoe_profiles.capture.early import EarlyGateHooks
    from smoe_profiles.capture.linear import embedding_table, recent_ids
    from smoe_profiles.capture.points import capture_points
    from smoe_profiles.models import find_model
    from smoe_profiles.tables import load_arrays
    from smoe_profiles.trace import UNKNOWN_TOKEN
    from smoe_solvers.predictors import Context, score

    spec, model = find_model(str(folder)).spec, reference(folder)
    embedding = embedding_table(model, spec.vocab_size).float().numpy()
    recent = recent_ids(ids.numpy().astype(np.uint32), np.arange(len(ids)))
    known = embedding[np.where(recent == UNKNOWN_TOKEN, len(embedding) - 1, recent)].reshape(len(ids), -1)
    with EarlyGateHooks(capture_points(model, spec), asked=True) as hooks:
        model(ids[None])
        view = hooks.take()
    with safe_open(tables, "np") as file:
        metadata = file.metadata()
    placement = random_placement(folder, int(metadata["num_ranks"]))
    found, labels = [], []
    for index, layer in enumerate(view.layers):
        early, ones = layer.logits.numpy(), np.ones((len(ids), 1), np.float32)
        features = np.concatenate([layer.inputs.numpy(), early, known, ones], axis=1)
        one, two = [*labels[::-1], None, None][:2]
        context = Context(ids.numpy(), two=two, one=one, early=early, features=features)
        hosts = placement.hosts[index]
        known_tables = layer_predictors(load_arrays(tables), metadata, index)
        found.append(score(known_tables, Predictor(predictor), context, hosts, spec.layers[0].top_k))
        chosen = layer.truth.topk(spec.layers[0].top_k).indices.numpy()
        labels.append(hosts[chosen].sum(axis=1).argmax(axis=1).astype(np.uint8))
    return found


SERVED = [(name, layout, 2) for name in (*FUSED, "paper", "fused") for layout in ("map", "checkpoint")]
SERVED += [("early-gate", "map", 4), ("fused", "checkpoint", 4)]


@pytest.mark.parametrize(("predictor", "layout", "number"), SERVED)
def test_every_predictor_scores_as_evaluate_does(predictor, layout, number, base):
    """In chunks and single tokens, from the slices that the ranks know; another order of a float sum may cost one."""
    source = model_folder("tiny-mixtral", base)
    folder = source if layout == "map" else make_checkpoint(source, number, base)
    mapped = make_map(source, number, base) / "runtime.safetensors"
    tables = mapped if layout == "map" else folder / "smoe/runtime.safetensors"
    ids = torch.randint(1, 6000, (19,), generator=torch.Generator().manual_seed(5))
    told = ranks(number).run(told_scores, folder, tables, predictor, ids, [14, 3, 1, 1])
    expected = expected_scores(source, mapped, predictor, ids)
    for wished, logits in told:
        for layer, first, right in zip(wished, told[0][0], expected, strict=True):
            assert torch.equal(layer, first)
            assert np.abs(layer.numpy().astype(int) - right).max() <= 1
        assert torch.equal(logits, told[0][1])
    assert torch.allclose(told[0][1], reference_logits(source, ids), atol=1e-3)


def test_a_predictor_that_was_not_fitted_is_refused(base, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = model_folder("tiny-mixtral", base)
    whole = make_map(folder, 2, base) / "runtime.safetensors"
    with safe_open(whole, "pt") as file:
        metadata = file.metadata()
    left = {name: array for name, array in load_file(whole).items() if not name.startswith(("linear", "early"))}
    save_file(left, tmp_path / "runtime.safetensors", metadata)
    told = ranks(2).run(check_predictor, folder, tmp_path / "runtime.safetensors")
    assert all("has no linear predictor, because its trace was recorded without --early-gate" in text for text in told)


def check_predictor(folder, tables):
    try:
        load(folder, Mode.SPECULATIVE, tables, predictor="linear")
    except InputError as error:
        return str(error)
    return "fits"


@pytest.mark.parametrize(("width", "into", "seed"), [(600, 512, 0), (300, 256, 1), (512, 512, 0)])
def test_wide_vectors_pass_the_projection_that_was_recorded(width, into, seed):
    from smoe_cli.runtime import early
    from smoe_profiles.capture import linear

    assert (early.INPUT_WIDTH, early.EMBEDDING_WIDTH, early.RECENT) == (
        linear.INPUT_WIDTH,
        linear.EMBEDDING_WIDTH,
        linear.RECENT,
    )
    recorded, used = linear.projection(width, into, seed), early.projection(width, into, seed, CPU)
    assert (recorded is None) == (used is None)
    assert recorded is None or np.array_equal(recorded, used.numpy())


class Reusing(CollectiveExchange):
    """Uses its memory again as soon as it may: what it gathered is gone at the next gather, what it dispatched at the
    next operation on rows that go home."""

    gathered, received = (), ()

    def spoil(self, tensors):
        for tensor in tensors:
            tensor.fill_(255 if tensor.dtype is torch.uint8 else torch.nan)

    def all_gather(self, rows, plan, labels=None):
        self.spoil(self.gathered)
        found = super().all_gather(rows, plan, labels)
        self.gathered = [tensor for tensor in found if tensor is not None]
        return found

    def dispatch(self, routed):
        self.spoil(self.received)
        found = super().dispatch(routed)
        self.received = [found.rows, found.weights]
        return found

    def combine(self, parts, routed):
        self.spoil(self.received)
        return super().combine(parts, routed)

    def reduce_scatter(self, partial, plan, residual=None, norm=None):
        self.spoil(self.received)
        return super().reduce_scatter(partial, plan, residual, norm)


def forward_reusing(folder, tables, modes, ids):
    found = {}
    for mode in modes:
        shuffle = Shuffle(Reusing(), RuntimeTables.open(tables, CPU), "markov")
        model = load_model(folder, mode, shuffle, dtype=torch.float32, device=CPU)
        found[mode] = model.forward(ids[None], last=False)[0][0]
    return found


@pytest.mark.parametrize("name", ["qwen", "grouped"])
def test_nothing_is_read_from_memory_that_an_exchange_uses_again(name, base):
    folder = model_folder(name, base)
    ids = torch.randint(1, 90, (7,), generator=torch.Generator().manual_seed(2))
    tables = make_map(folder, 2, base) / "runtime.safetensors"
    expected = reference_logits(folder, ids)
    for by_mode in ranks(2).run(forward_reusing, folder, tables, SHUFFLED_MODES, ids):
        for mode, logits in by_mode.items():
            assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max())), mode


def order_of_work(folder, tables, ids, predictor):
    """What a forward does in turn: plans and attentions; and how many rows the early gate sees each time."""
    from smoe_cli.runtime import shuffle
    from smoe_cli.runtime.early import EarlyGate

    told, seen = [], []
    make, view = shuffle.make_plan, EarlyGate.view
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "make_plan", lambda *given: told.append("plan") or make(*given))
        patch.setattr(
            EarlyGate, "view", lambda gate, n, rows, *more: seen.append(len(rows)) or view(gate, n, rows, *more)
        )
        model = load(folder, Mode.SPECULATIVE, tables, predictor=predictor)
        for layer in model.model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: told.append("attention"))
        model.forward(ids[None])
    return told, seen


@pytest.mark.parametrize("predictor", ["markov", "linear"])
def test_a_plan_is_begun_before_the_attention_beside_which_it_can_be_made(predictor, base):
    folder = model_folder("tiny-mixtral", base)
    tables = make_map(folder, 4, base) / "runtime.safetensors"
    layers = reference(folder).config.num_hidden_layers
    for rank, (told, seen) in enumerate(ranks(4).run(order_of_work, folder, tables, torch.arange(1, 11), predictor)):
        assert told == ["plan", "attention"] * layers
        slice_of_rank = [3, 3, 3, 1][rank]
        assert seen == ([slice_of_rank] * layers if predictor == "linear" else [])


def test_a_projection_is_made_for_a_device_once():
    from smoe_cli.runtime.early import projection

    assert projection(600, 512, 0, CPU) is projection(600, 512, 0, CPU)
