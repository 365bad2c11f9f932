"""Every reader of files that smoe has: which sound files are damaged for it, and how they are read, as commands do."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path

from smoe_cli.console import Console
from smoe_profiles.models import Model
from smoe_profiles.workers import LocalWorkers
from tests.fuzz import sound
from tests.fuzz.sound import Files

QUIET = Console(quiet=True)
ONE = LocalWorkers(1, QUIET.note)
LOWER = ("token-count/", "pair/", "count/")
SUFFIXES = {
    ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".npz": "npz", ".npy": "npy", ".pt": "pt",
    ".yaml": "yaml",
    ".safetensors": "safetensors", ".toml": "text", ".txt": "text", ".gz": "jsonl.gz", ".xz": "jsonl.xz",
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Sound files, path -> bytes, of which one of `targets` is damaged. artefacts: folders whose manifests are kept
    true to the damaged files' sizes."""

    files: Files
    targets: tuple[str, ...]

    @property
    def artefacts(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("manifest.json") for name in self.files if name.endswith("manifest.json"))


@dataclass(frozen=True)
class Reader:
    """read: (folder with the damaged files, empty folder to write to, the damaged file). share: of a thousand cases."""

    name: str
    samples: Callable[[], list[Sample]]
    read: Callable[[Path, Path, Path], None]
    share: int = 40


@dataclass
class House:
    """Sound files, made once below a folder."""

    folder: Path
    held: dict[str, Files] = field(default_factory=dict)

    def get(self, name: str, make: Callable[[Path], Files]) -> Files:
        if name not in self.held:
            (self.folder / name).mkdir(parents=True)
            self.held[name] = make(self.folder / name)
        return self.held[name]

    def made(self) -> Files:
        return self.get("made", sound.working_folder)

    def levels(self) -> Files:
        return self.get("levels", sound.traces)

    def gated(self) -> Files:
        return self.get("gated", sound.gated_tables)

    def model(self) -> Files:
        return self.get("model", sound.model)

    def apart(self, *names: str) -> Callable[[], list[Sample]]:
        """One sample for each engine's format whose name begins so."""

        def listed() -> list[Sample]:
            every = self.get("dumps", sound.dumps)
            formats = sorted({name.partition("/")[0] for name in every if name.startswith(names)})
            each = [{name: every[name] for name in _below(every, f"{form}/")} for form in formats]
            return [Sample(files, tuple(files)) for files in each]

        return listed

    def config(self) -> list[Sample]:
        return [Sample({"config.json": self.model()["config.json"]}, ("config.json",))]

    def placed(self) -> list[Sample]:
        """Each engine's placement beside the config of the model it is of."""
        files = self.get("engines", lambda folder: sound.engine_placements(folder, self.made()))
        config = {"config.json": self.model()["config.json"]}
        return [Sample(config | {name: content}, (name,)) for name, content in files.items()]


def of_suffix(name: str) -> str:
    """The form of a file by its name."""
    return next((form for suffix, form in SUFFIXES.items() if name.endswith(suffix)), "bytes")


def _below(files: Files, *folders: str, suffix: str = "") -> tuple[str, ...]:
    return tuple(name for name in files if name.startswith(folders) and name.endswith(suffix))


def _whole(files: Files, folder: str, suffix: str = "") -> list[Sample]:
    """One folder, any file of which is damaged."""
    kept = {name: files[name] for name in _below(files, folder)}
    return [Sample(kept, _below(kept, "", suffix=suffix))]


def _all_but(files: Files, left_out: str) -> Sample:
    kept = {name: content for name, content in files.items() if not name.startswith(left_out)}
    return Sample(kept, tuple(kept))


def _recorded(files: Files) -> Sample:
    """An evaluation and how a placement was found, with the tables beside them."""
    kept = _all_but(files, "trace/").files
    return Sample(kept, _below(kept, "evaluation-", "placement-ep4/solver"))


def _manifests(*several: Files) -> list[Sample]:
    """Every artefact's manifest, the artefact's other files beside it."""
    named = [(files, name) for files in several for name in files if name.endswith("manifest.json")]
    return [
        Sample({other: files[other] for other in _below(files, name.removesuffix("manifest.json"))}, (name,))
        for files, name in named
    ]


def _single(files: Files, *suffixes: str) -> list[Sample]:
    """Files that are read alone."""
    return [Sample({name: files[name]}, (name,)) for name in files if name.endswith(suffixes)]


# Artefacts.


def _manifest(folder: Path, _out: Path, target: Path) -> None:
    """An artefact opened and described, its rows and tables left alone."""
    from smoe_cli.inspection.summaries import artefact_kind, describe
    from smoe_profiles.artefact import open_artefact
    from smoe_profiles.choices import Level
    from smoe_profiles.trace import open_trace, read_layers

    path = folder / target.relative_to(folder).parts[0]
    kind = artefact_kind(path)
    artefact = open_artefact(path, kind, hashes=True)
    with redirect_stdout(StringIO()):
        Console(json=True).result(describe(artefact), lambda: None)
    if kind == "trace":
        _ = open_trace(path, needs=Level.COUNT).total_rows
    elif kind == "tables":
        read_layers(artefact)


def _inspect(folder: Path, _out: Path, target: Path) -> None:
    """Every artefact in the folder, printed both ways."""
    from smoe_cli.inspection.inspecting import inspect_artefact
    from smoe_cli.inspection.showing import show_summary, show_trace

    artefact = folder / target.relative_to(folder).parts[0]
    document = inspect_artefact(artefact, ep=None, hashes=False, console=QUIET)
    with redirect_stdout(StringIO()):
        Console(json=True).result(document, lambda: None)
        (show_trace if document["kind"] == "trace" else show_summary)(QUIET, document)


def _build(folder: Path, out: Path, target: Path) -> None:
    from smoe_cli.tabulating import build_whole, open_traces

    traces = open_traces([folder / target.relative_to(folder).parts[0]], hashes=False)
    build_whole(traces, out, None, seed=0, min_count=1, workers=LocalWorkers(), force=False, console=QUIET)


def _merge(folder: Path, out: Path, _target: Path) -> None:
    from smoe_cli.tabulating import merge_shards_of

    for shard in folder.glob("tables-*"):
        (out / shard.name).symlink_to(shard)
    try:
        merge_shards_of(
            out, None, seed=0, min_count=1, hashes=False, workers=LocalWorkers(), force=False, console=QUIET
        )
    finally:
        for link in out.glob("tables-*-of-*"):
            link.unlink()


def _tables(folder: Path, _out: Path, _target: Path) -> None:
    """Everything that Tables and the early gate's record can be asked for."""
    from smoe_profiles.gates import gate_record
    from smoe_profiles.tables import FIT_PARTS, open_tables

    tables = open_tables(folder / "tables")
    tables.vocabulary()
    for layer in tables.layers:
        tables.counts(layer), tables.statistics(layer), tables.onegram(layer), tables.bigram(layer)
    for part in FIT_PARTS:
        list(tables.samples(part))
    record = gate_record(tables.artefact.path)
    if record:
        record.token_id("validation")
        for layer in tables.layers:
            record.sums(layer), record.rows(layer, "validation")


def _solve(folder: Path, out: Path, _target: Path) -> None:
    """Solved and contracted as cocluster does, with whatever lies in the tables."""
    from smoe_cli.placement import contiguous_placement
    from smoe_cli.placing.solving import layer_inputs, write_served
    from smoe_profiles.tables import open_tables

    tables = open_tables(folder / "tables")
    layer_inputs(tables)
    placement = contiguous_placement(tuple(layer.id for layer in tables.layers), tables.layers[0].num_experts, 4)
    write_served(out / "runtime.safetensors", tables, placement, QUIET)
    (out / "runtime.safetensors").unlink()


def _placement(folder: Path, _out: Path, _target: Path) -> None:
    """A placement's files, as evaluate, regroup and the run time read them."""
    from smoe_cli.folder import choose_placement
    from smoe_cli.placement import layer_predictors, read_placement, read_runtime
    from smoe_cli.runtime.tables import RuntimeTables
    from smoe_profiles.models import recorded_map

    artefact = choose_placement(folder, None)
    read_placement(artefact)
    arrays, metadata = read_runtime(artefact)
    for index in range(3):
        layer_predictors(arrays, metadata, index)
    RuntimeTables.open(artefact.path / "runtime.safetensors", "cpu")
    (folder / "smoe").symlink_to(artefact.path)
    try:
        recorded_map(folder, 3, 8)
    finally:
        (folder / "smoe").unlink()


def _evaluate(folder: Path, out: Path, _target: Path) -> None:
    from smoe_cli.app import run

    copy = shutil.copytree(folder, out / "copy", symlinks=True)
    try:
        _command(run, "evaluate", "-C", str(copy), "-q", "--batch", "32", "--predictor", "token")
    finally:
        shutil.rmtree(copy)


def _report(folder: Path, _out: Path, _target: Path) -> None:
    from smoe_cli.app import run

    _command(run, "report", "-C", str(folder), "--json", "-q")


def _command(run: Callable[[list[str]], int], *arguments: str, fine: tuple[int, ...] = (0,)) -> None:
    """A whole command line; what smoe itself calls a bug raises, and so does memory it asked for in vain."""
    from smoe_profiles.errors import InputError

    said = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(said):
        code = run([*arguments])
    if code in (1, 6, 130, 143) or code < 0:
        raise AssertionError(f"exit {code}: {said.getvalue()[-2000:]}")
    if code not in fine:
        raise InputError(said.getvalue()[-1000:])


# Files of others.


def _import(_folder: Path, out: Path, target: Path) -> None:
    from smoe_cli.importing import ImportPlan, import_trace
    from smoe_profiles.choices import ImportFormat
    from smoe_profiles.importers.records import ReadOptions
    from smoe_profiles.importers.store import Wanted

    path = target.parent if (target.parent / "meta_info.json").exists() else target
    model = None if target.suffix == ".npz" else _model(top_k=1 if target.name == "trace.npy" else 2)
    options = ReadOptions(model=model)
    import_trace(
        ImportPlan([path], ["x"], ImportFormat.AUTO, options, Wanted()), out / "trace", force=False, console=QUIET
    )


@cache
def _model(top_k: int) -> Model:
    """What the dumps were made of."""
    from smoe_profiles.families.config import read_spec

    config = {
        "model_type": "deepseek_v2", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 50, "n_routed_experts": 8,
        "num_experts_per_tok": top_k, "first_k_dense_replace": 1,
    }  # fmt: skip
    return Model("fuzzed", None, read_spec(config, "fuzz"), "fuzzed", "fuzz")


def _import_placement(folder: Path, out: Path, target: Path) -> None:
    from smoe_cli.engines.importing import import_placement, inspect_engine_map
    from smoe_cli.inspection.showing import show_engine_map

    document = inspect_engine_map(target, model_name=str(folder), ep=None if target.suffix == ".npz" else 4)
    with redirect_stdout(StringIO()):
        Console(json=True).result(document, lambda: None)
        show_engine_map(QUIET, document)
    import_placement(target, out, model_name=str(folder), ep=document["ranks"], name=None, force=False, console=QUIET)


def _checkpoint(folder: Path, _out: Path, _target: Path) -> None:
    from smoe_profiles.models import find_model, input_embedding, model_identity
    from smoe_profiles.neighbours import StoredEmbedding

    model = find_model(str(folder))
    model_identity(model)
    StoredEmbedding(*input_embedding(model))


def _config(folder: Path, _out: Path, _target: Path) -> None:
    from smoe_profiles.models import find_model

    find_model(str(folder)).spec.layer_table()


def _documents(_folder: Path, _out: Path, target: Path) -> None:
    from smoe_profiles.datasets import limit_tokens, read_documents

    def tokenize(text: object) -> list[int]:
        return [ord(letter) % 50 for letter in json.dumps(text)[:100]]

    list(limit_tokens(read_documents(str(target), "x", tokenize, 50), 10_000))


def _requests(_folder: Path, _out: Path, target: Path) -> None:
    from smoe_cli.evaluation.requests import read_arrivals

    read_arrivals(target)


def _hardware(_folder: Path, _out: Path, target: Path) -> None:
    from smoe_cli.hardware import LayerShape, load_hardware
    from smoe_solvers.choices import Mode

    load_hardware(str(target)).layer_cost(Mode.SPECULATIVE, 8, LayerShape(32, 16))


def _rank_cost(_folder: Path, _out: Path, target: Path) -> None:
    from smoe_cli.hardware import read_rank_cost

    read_rank_cost(target, 4)


def _toml(_folder: Path, _out: Path, target: Path) -> None:
    from smoe_cli.app import run

    _command(run, "models", "--config", str(target))
    _command(run, "cocluster", "--ep", "4", "--config", str(target), "-C", str(target.parent), fine=(0, 3))  # no tables


def readers(house: House) -> Iterator[Reader]:
    """Every reader, over sound files below the house's folder."""
    made, levels, gated, settings = house.made, house.levels, house.gated, sound.settings

    yield Reader("manifest", lambda: _manifests(made(), levels()), _manifest, 110)
    yield Reader("trace", lambda: _whole(levels(), "token/"), _inspect, 15)
    yield Reader("trace, counted", lambda: _whole(levels(), "token/", suffix=".parquet"), _build, 15)
    yield Reader("trace of counts", lambda: [one for level in LOWER for one in _whole(levels(), level)], _inspect, 60)
    yield Reader("tables", lambda: _whole(gated(), "tables/"), _tables, 45)
    yield Reader("tables, served", lambda: _whole(gated(), "tables/"), _solve, 10)
    yield Reader("shards", lambda: _whole(gated(), "tables-"), _merge, 15)
    yield Reader("placement", lambda: _whole(made(), "placement-"), _placement, 70)
    yield Reader("evaluation and solver", lambda: [_recorded(made())], _inspect, 40)
    yield Reader("report", lambda: [Sample(made(), _below(made(), "evaluation-", "placement-ep4/solver"))], _report, 2)
    yield Reader("evaluate", lambda: [_all_but(made(), "evaluation-")], _evaluate, 2)
    yield Reader("npz dumps", house.apart("npz"), _import, 60)
    yield Reader("replies", house.apart("sglang reply", "vllm"), _import, 80)
    yield Reader("pt dumps", house.apart("sglang stat", "sglang per", "megatron", "verl"), _import, 70)
    yield Reader("TensorRT-LLM dumps", house.apart("trtllm"), _import, 70)
    yield Reader("ExFlow dumps", house.apart("exflow"), _import, 20)
    yield Reader("engine placements", house.placed, _import_placement, 60)
    yield Reader("safetensors", lambda: [Sample(house.model(), _below(house.model(), "model"))], _checkpoint, 100)
    yield Reader("config.json", house.config, _config, 90)
    yield Reader("TOML config", lambda: _single(settings(), ".toml"), _toml, 5)
    yield Reader("hardware model", lambda: _single(settings(), "hardware.json", "bench.json"), _hardware, 50)
    yield Reader("costs between ranks", lambda: _single(settings(), "cost.json", "cost.npy"), _rank_cost, 35)
    yield Reader("requests", lambda: _single(sound.requests(), ""), _requests, 60)
    yield Reader("data sets", lambda: _single(sound.prompts(), ""), _documents, 10)
