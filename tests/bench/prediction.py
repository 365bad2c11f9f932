"""What each predictor is worth, held out: the table of docs/results.md. `make prediction`, about six minutes.

Reference models and real traces lie outside the repository; SMOE_DATA names their folder (default ../shared/data).
"""

import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import numpy as np

from smoe_cli.app import run
from smoe_cli.evaluation.measuring import HeldOut, layer_figures, walk_layers
from smoe_cli.placement import Placement
from smoe_cli.placing.contraction import choose_smoothing, contract_tables, kept_local
from smoe_cli.placing.solve_options import SolveOptions
from smoe_cli.placing.solving import solve_layers
from smoe_profiles.capture.linear import RECENT
from smoe_profiles.gates import gate_record
from smoe_profiles.tables import Tables, open_tables
from smoe_profiles.trace import Trace, open_trace
from smoe_profiles.workers import LocalWorkers
from smoe_solvers.choices import Effort, Goal, Method, Predictor
from smoe_solvers.figures import Figures, mean_figures
from smoe_solvers.linear import choose_ridge
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.predictors import by_rank, choose_temperature, inclusion, local_counts, quantise

DATA = Path(os.environ.get("SMOE_DATA", Path(__file__).parents[3] / "shared/data")).resolve()
BATCH = 1024
HELD_OUT = 16_384
ALL = list(Predictor)
TABLES_ONLY = [Predictor.TOKEN, Predictor.MARKOV, Predictor.PAPER, Predictor.FUSED, Predictor.SELECTED]


def smoe(*arguments: object) -> None:
    code = run([str(argument) for argument in arguments])
    if code:
        sys.exit(f"smoe {' '.join(map(str, arguments))}: exit {code}")


def pair_weights(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """How often two experts are used by one token, [E, E], zero on the diagonal. experts: [N, K]."""
    used = np.zeros((len(experts), num_experts), np.float32)
    np.put_along_axis(used, experts.astype(np.int64), 1, axis=1)
    weights = np.rint(used.T @ used).astype(np.int64)
    np.fill_diagonal(weights, 0)
    return weights


def swapped(weights: np.ndarray, placement: np.ndarray, ranks: int) -> np.ndarray:
    """The best swap of two experts, again and again, until none adds pair weight inside a rank."""
    place = placement.copy()
    while True:
        inside = weights @ np.eye(ranks)[place]
        moved = inside[:, place] - inside[np.arange(len(place)), place][:, None]
        gain = moved + moved.T - 2 * weights
        gain[place[:, None] == place] = 0
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] <= 1e-6:
            return place
        place[[one, other]] = place[[other, one]]


def plain_placement(tables: Tables, ranks: int) -> Placement:
    """METIS from ten permuted seeds on the pair weight, then swaps; what a reader can redo without smoe."""
    rows = []
    for layer, samples in zip(tables.layers, tables.samples("fit"), strict=True):
        weights = pair_weights(samples.experts, layer.num_experts)
        found = [swapped(weights, start, ranks) for start in metis_placements(weights, ranks, 10)]
        rows.append(max(found, key=lambda place: float(weights[place[:, None] == place].sum())))
    return Placement.of_ranks(tuple(layer.id for layer in tables.layers), np.stack(rows), ranks)


def default_placement(tables: Tables, ranks: int) -> Placement:
    options = SolveOptions(
        ep=ranks, goal=Goal.BLEND, method=Method.CE, effort=Effort.DEFAULT, theta=0.1, mu=0.25, seed=0,
        whole_groups=False, metis_seeds=False,
    )  # fmt: skip
    return solve_layers(tables, options, LocalWorkers(2), lambda _: None)[0]


def report(name: str, tables: Tables, trace: Trace, placement: Placement, predictors: list[Predictor]) -> None:
    """Print lar and its share of the oracle's, exact assignment, mean over layers and layer by layer."""
    choice = choose_smoothing(tables, placement)
    served = list(contract_tables(tables, placement, choice))
    record = gate_record(trace.artefact.path)
    ids = record.token_id("heldout") if record else trace.read(["token_id"], "heldout")["token_id"].astype(np.uint32)
    rows = HeldOut(trace, ids[:HELD_OUT], record)
    runs = walk_layers(rows, tables, placement, served, choice, predictors=predictors, batch=BATCH)
    measured = [layer_figures(run, BATCH) for run in runs]

    def mean(state: str, predictor: str, assignment: str) -> Figures:
        return mean_figures([layer[state][predictor][assignment] for layer in measured])

    ceiling = [layer["oracle"]["oracle"]["exact"].lar for layer in measured]
    oracle, bare = mean("oracle", "oracle", "exact"), mean("contiguous", "none", "exact")
    print(
        f"\n{name}: {len(rows.token_id):,} held-out tokens; oracle lar {oracle.lar:.3f}, fan-out {oracle.fanout:.3f}; "
        f"contiguous lar {bare.lar:.3f}, remote {bare.remote_fanout:.3f}\n"
        f"{'predictor':<12}{'lar':>7}{'rule':>7}{'share':>7}{'remote':>8}  share of the oracle's lar by layer"
    )
    for predictor in predictors:
        exact = mean("placed+shuffled", predictor.value, "exact")
        rule = mean("placed+shuffled", predictor.value, "rule")
        shares = [
            layer["placed+shuffled"][predictor.value]["exact"].lar / top
            for layer, top in zip(measured, ceiling, strict=True)
        ]
        listed = " ".join(f"{value:.2f}" for value in shares)
        print(
            f"{predictor.value:<12}{exact.lar:>7.3f}{rule.lar:>7.3f}{np.mean(shares):>7.3f}"
            f"{exact.remote_fanout:>8.3f}  {listed if len(shares) <= 8 else ''}"
        )
    if served[0].linear is not None:
        features, experts = served[0].linear.shape
        print(f"linear: {2 * features * experts:,} FLOP and {4 * features:,} bytes of features a token and layer; "
              f"chosen by layer: {', '.join(layer.chosen.value for layer in served)}")  # fmt: skip


def ablation(tables: Tables, trace: Trace, placement: Placement) -> None:
    """The linear map on fewer features: what each block adds, by its share of the oracle's lar."""
    fitted, measured = gate_record(tables.artefact.path), gate_record(trace.artefact.path)
    assert fitted
    assert measured
    shares: dict[str, list[float]] = {}
    for index, layer in enumerate(tables.layers):
        hosts = placement.hosts[index]
        (xx, xy), judged = fitted.sums(layer), fitted.rows(layer, "validation")
        rows = measured.rows(layer, "heldout", HELD_OUT)
        local, seen = (local_counts(part.experts, hosts) for part in (rows, judged))
        edges = np.append(np.arange(0, len(local), BATCH), len(local))
        ceiling = kept_local(quantise(local, layer.top_k), local, edges)
        inputs = len(xx) - layer.num_experts - 1 - RECENT * (width := fitted.embedding_width)
        tokens = inputs + layer.num_experts
        blocks = {"the router's input": range(inputs), "+ the token": [*range(inputs), *range(tokens, tokens + width)]}
        for back in range(1, RECENT):
            blocks[f"+ {back} before it"] = [*range(inputs), *range(tokens, tokens + (back + 1) * width)]
        for name, chosen in blocks.items():
            kept = [*chosen, len(xx) - 1]
            features = judged.features[:, kept]
            _, weights = choose_ridge(xx[np.ix_(kept, kept)], xy[kept], features, judged.truth)
            sharpness = choose_temperature(features @ weights, seen, hosts, layer.top_k)
            found = inclusion(rows.features[:, kept] @ weights, layer.top_k, sharpness)
            scores = quantise(by_rank(found, hosts), layer.top_k)
            shares.setdefault(name, []).append(kept_local(scores, local, edges) / ceiling)
    print(f"\nlinear map, EP{placement.num_ranks}, by features: share of the oracle's lar")
    for name, by_layer in shares.items():
        print(f"{name:<24}{np.mean(by_layer):.3f}  {' '.join(f'{share:.2f}' for share in by_layer)}")


def reference_model() -> None:
    """ref-deepseek-v2, as its README measures: fitted on `train`, measured on the first 16,384 tokens of `test`."""
    model, tokens = DATA / "models/ref-deepseek-v2", DATA / "models/ref_tokens.npz"
    plain = ("--pack", "windows", "--dtype", "float32", "--early-gate", "all", "--quiet")
    smoe("profile", "--model", model, "--dataset", f"{tokens}#train", "--split", "fit", *plain)
    smoe("profile", "--model", model, "--dataset", f"{tokens}#test", "--split", "heldout", "-C", "test", *plain)
    smoe("build-tables", "--quiet")
    tables, trace = open_tables(Path("smoe-out/tables")), open_trace(Path("test/trace"))
    for ranks in (4, 8):
        plain_one = plain_placement(tables, ranks)
        report(f"ref-deepseek-v2, EP{ranks}, METIS x 10 and swaps", tables, trace, plain_one, ALL)
        ablation(tables, trace, plain_one)
        report(f"ref-deepseek-v2, EP{ranks}, our default", tables, trace, default_placement(tables, ranks), ALL)


def real_trace(name: str, files: list[str], ranks: tuple[int, ...]) -> None:
    """A real trace, its own held-out sequences; what its level allows."""
    smoe("import", *(DATA / "traces" / f"{file}.npz" for file in files), "-C", name, "--quiet")
    smoe("build-tables", "-C", name, "--quiet")
    tables, trace = open_tables(Path(name) / "tables"), open_trace(Path(name) / "trace")
    for count in ranks:
        report(f"{name}, EP{count}, METIS x 10 and swaps", tables, trace, plain_placement(tables, count), TABLES_ONLY)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        reference_model()
        real_trace("dsv2lite-law", ["dsv2lite_esft_law"], (4, 8))
        real_trace("dsv2lite-intent", ["dsv2lite_esft_intent"], (4, 8))
        real_trace("gptoss20b", ["gptoss20b_gen", "gptoss20b_gen_b"], (4, 8))


if __name__ == "__main__":
    main()
