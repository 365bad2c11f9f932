"""One profiling run: documents through the model, routing into a trace.

Axes: B rows of a batch, S positions, T = B * S, N rows kept, K experts a token.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smoe_profiles.artefact import SCRATCH
from smoe_profiles.capture.early import EarlyGateHooks
from smoe_profiles.capture.generation import generate
from smoe_profiles.capture.linear import LinearSums, embedding_table, recent_ids
from smoe_profiles.capture.packing import Batch, Chunk, batches, cut
from smoe_profiles.capture.points import CapturePoint, capture_points
from smoe_profiles.capture.processes import ALONE, Processes
from smoe_profiles.capture.recorder import Captured, Recorder
from smoe_profiles.choices import EarlyGate, Pack
from smoe_profiles.errors import InputError
from smoe_profiles.models import Model
from smoe_profiles.split import Assigned, TokenIds
from smoe_profiles.trace import PHASES, EarlyRows, Rows, TraceLayer
from smoe_profiles.trace_writer import TraceWriter

PREFILL, DECODE = range(len(PHASES))
EARLY_EVERY = 8
"""`--early-gate sample` asks the early gate in one batch of so many."""

BEHIND = 16
"""Batches that may wait to be written; a row group is compressed at once, which takes longer than a batch."""

SAVE_SECONDS = 60
"""How often the early gate's sums are saved for a run that may be killed."""


@dataclass(frozen=True)
class CaptureOptions:
    """How documents run through the model. decode: tokens to generate after each document."""

    sources: Sequence[str]
    pack: Pack = Pack.ISOLATE
    seq_len: int = 512
    decode: int = 0
    early_gate: EarlyGate = EarlyGate.NONE


@dataclass(frozen=True)
class _Piece:
    """One forward's rows. kept: [T]; facts: the columns of Rows that are [N], by name; recent: [N, R] token ids.

    early: the early gate's ids and logits, [T, sum of M] both.
    """

    captured: Captured
    kept: npt.NDArray[np.bool_]
    facts: dict[str, npt.NDArray[Any]]
    recent: TokenIds
    early: tuple[torch.Tensor, torch.Tensor] | None = None


def trace_layers(model: Model) -> list[TraceLayer]:
    return [
        TraceLayer(layer.id, layer.num_experts, layer.top_k, num_zero=layer.num_zero_experts)
        for layer in model.spec.layers
    ]


def record(
    model: Model,
    loaded: torch.nn.Module,
    documents: Iterable[Assigned],
    writer: TraceWriter,
    options: CaptureOptions,
    progress: Callable[[int], None],
    processes: Processes = ALONE,
) -> None:
    """Run documents through the model and append their routing to the trace; progress(rows) after each batch.

    Batches are shared out over the processes in turn. Those that the writer has already, from a run that was killed,
    are left out. While the model runs, the rows of the batches before are checked, compressed and written.
    """
    stream = enumerate(batches(cut(documents, options.pack, options.seq_len, options.sources)))
    mine = ((number, batch) for number, batch in stream if number % processes.count == processes.rank)
    layers, written = trace_layers(model), writer.appended
    points = capture_points(loaded, model.spec)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        early = None
        if options.early_gate is not EarlyGate.NONE:
            early = Early(points, loaded, layers, model.spec.vocab_size, writer.folder, writer.name)
        recorder = stack.enter_context(Recorder(points, stack.enter_context(early.hooks) if early else None))
        worker = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        writing: deque[Future[None]] = deque()
        for turn, (number, batch) in enumerate(mine):
            if turn < written and (early is None or turn < early.sums.batches):
                progress(sum(len(chunk.token_ids) for chunk in batch.chunks))
                continue
            if early:
                early.hooks.asked = options.early_gate is EarlyGate.ALL or number % EARLY_EVERY == 0
            pieces = list(_run(loaded, batch, recorder, options.decode))
            if early:
                pieces = early.take(pieces, turn)
            if len(writing) == BEHIND:
                writing.popleft().result()
            if turn >= written:
                writing.append(worker.submit(lambda pieces: writer.append(_rows(pieces, layers)), pieces))
            progress(sum(int(piece.kept.sum()) for piece in pieces))
        for waiting in writing:
            waiting.result()
        if early:
            early.save()


class Early:
    """The early gate of a run: its hooks, and the sums for the linear predictor with their saved copy."""

    def __init__(
        self,
        points: Sequence[CapturePoint],
        loaded: torch.nn.Module,
        layers: Sequence[TraceLayer],
        vocab_size: int,
        folder: Path,
        name: str,
    ) -> None:
        self.hooks = EarlyGateHooks(points)
        self.sums = LinearSums(layers, embedding_table(loaded, vocab_size))
        self.path, self.saved = linear_path(folder, name), monotonic()
        self.sums.restore(self.path)

    def take(self, pieces: list[_Piece], turn: int) -> list[_Piece]:
        """Add a batch to the sums, and keep of its view what goes into rows."""
        found = []
        for piece in pieces:
            view = piece.captured.early
            if view is not None and turn >= self.sums.batches:
                self.sums.add(piece.captured, piece.kept, piece.facts, piece.recent)
            best = view.candidates([layer.num_early for layer in self.sums.layers]) if view else None
            found.append(replace(piece, captured=replace(piece.captured, early=None), early=best))
        self.sums.batches = max(self.sums.batches, turn + 1)
        if monotonic() - self.saved > SAVE_SECONDS:
            self.save()
        return found

    def save(self) -> None:
        self.sums.save(self.path)
        self.saved = monotonic()


def linear_path(folder: Path, name: str) -> Path:
    """Where a process keeps its sums while it runs."""
    return folder / f"{SCRATCH}{name}.linear"


def _run(loaded: Any, batch: Batch, recorder: Recorder, decode: int) -> Iterator[_Piece]:
    """The forwards of a batch. To generate, chunks that end their document go apart from those that do not."""
    prompts = [chunk for chunk in batch.chunks if chunk.last] if decode else []
    plain = [chunk for chunk in batch.chunks if not chunk.last] if decode else batch.chunks
    if plain:
        yield _prefill(loaded, Batch(plain), recorder)
    for group in _paddable(prompts, recorder.points[0].family.left_padding):
        yield from _generate(loaded, Batch(group), recorder, decode)


def _paddable(prompts: list[Chunk], left_padding: bool) -> list[list[Chunk]]:
    """Prompts that may generate together: all of them or, where a model looks at padding, those of one length."""
    if left_padding:
        return [prompts] if prompts else []
    lengths = dict.fromkeys(len(chunk.token_ids) for chunk in prompts)
    return [[chunk for chunk in prompts if len(chunk.token_ids) == length] for length in lengths]


def _prefill(loaded: Any, batch: Batch, recorder: Recorder) -> _Piece:
    input_ids = torch.from_numpy(batch.input_ids()).to(loaded.device)
    loaded.base_model(input_ids=input_ids, use_cache=False)
    return _Piece(recorder.take(), batch.real().reshape(-1), _facts(batch.chunks), _recent(batch.chunks))


def _generate(loaded: Any, batch: Batch, recorder: Recorder, decode: int) -> Iterator[_Piece]:
    """The prompts' prefill, and a piece a step with the sequences still alive."""
    found = generate(loaded, batch, recorder, decode)
    real = batch.real(left=True).reshape(-1)
    yield _Piece(found.prefill, real, _facts(batch.chunks), _recent(batch.chunks))
    first = _first_facts(batch.chunks)
    texts = [np.concatenate([chunk.token_ids, ids]) for chunk, ids in zip(batch.chunks, found.token_id.T, strict=True)]
    for step, captured in enumerate(found.steps):
        alive = found.alive[step]
        facts = first | {"token_id": found.token_id[step], "position": first["position"] + np.uint32(step)}
        places = [np.array([len(chunk.token_ids) + step]) for chunk in batch.chunks]
        recent = np.concatenate([recent_ids(text, place) for text, place in zip(texts, places, strict=True)])
        yield _Piece(captured, alive, {name: column[alive] for name, column in facts.items()}, recent[alive])


def _recent(chunks: Sequence[Chunk]) -> TokenIds:
    """The ids of a batch's own tokens and of those before them, [N, R]."""
    return np.concatenate([recent_ids(chunk.token_ids, np.arange(len(chunk.token_ids))) for chunk in chunks])


def _facts(chunks: Sequence[Chunk]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a batch's own tokens, [N] each."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    position = [np.arange(len(chunk.token_ids)) + chunk.first_position for chunk in chunks]
    return {
        "sequence": np.repeat(np.array([chunk.sequence for chunk in chunks], np.uint32), lengths),
        "position": np.concatenate(position).astype(np.uint32),
        "token_id": np.concatenate([chunk.token_ids for chunk in chunks]),
        "phase": np.full(sum(lengths), PREFILL, np.int16),
        "source": np.concatenate([chunk.source for chunk in chunks]),
        "split": np.repeat(np.array([chunk.part for chunk in chunks], np.int16), lengths),
    }


def _first_facts(chunks: Sequence[Chunk]) -> dict[str, npt.NDArray[Any]]:
    """The columns of the first token generated after each prompt, [B] each; token ids are not known yet."""
    return {
        "sequence": np.array([chunk.sequence for chunk in chunks], np.uint32),
        "position": np.array([chunk.first_position + len(chunk.token_ids) for chunk in chunks], np.uint32),
        "phase": np.full(len(chunks), DECODE, np.int16),
        "source": np.array([chunk.source[-1] for chunk in chunks], np.int16),
        "split": np.array([chunk.part for chunk in chunks], np.int16),
    }


def _rows(pieces: Sequence[_Piece], layers: Sequence[TraceLayer]) -> Rows:
    """Trace rows of a batch, padding and ended sequences dropped. Raises InputError for a weight that is no number."""
    found = [piece.captured.to_numpy(piece.kept) for piece in pieces]
    ids, weights = (np.concatenate(wide) if len(pieces) > 1 else wide[0] for wide in zip(*found, strict=True))
    by_layer = pieces[0].captured.by_layer
    if not np.isfinite(weights).all():
        bad = [not np.isfinite(column).all() for column in by_layer(weights)].index(True)
        raise InputError(f"layer {layers[bad].id} gives router weights that are no numbers; try --dtype float32.")
    facts = {name: np.concatenate([piece.facts[name] for piece in pieces]) for name in pieces[0].facts}
    return Rows(**facts, experts=by_layer(ids), weights=by_layer(weights), early=_early_rows(pieces, layers))


def _early_rows(pieces: Sequence[_Piece], layers: Sequence[TraceLayer]) -> EarlyRows | None:
    """The early gate's columns of a batch; it was asked in all of its forwards or in none."""
    found = [(piece.early, piece.kept) for piece in pieces if piece.early]
    if not found:
        return None
    ids = np.concatenate([early[0].cpu().numpy().astype(np.uint16)[kept] for early, kept in found])
    logits = np.concatenate([early[1].cpu().numpy()[kept] for early, kept in found])
    borders = np.cumsum([layer.num_early for layer in layers])[:-1]
    return EarlyRows(np.split(ids, borders, axis=1), np.split(logits, borders, axis=1))
