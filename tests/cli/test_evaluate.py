"""smoe evaluate taken apart: every figure beside the states is counted again from the files, row by row."""

import gzip
import json
import lzma
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import smoe_cli.hardware
from smoe_cli.evaluation.breakdown import by_frequency, score_logits
from smoe_cli.evaluation.requests import read_arrivals
from smoe_profiles.errors import InputError
from smoe_profiles.models import find_model
from tests.cli.figures_by_hand import RANKS, figures_by_hand, held, home_of, microseconds_by_hand, routed_by_hand
from tests.conftest import smoe

TEXTS = Path(__file__).parents[1] / "fixtures/texts"
LAYER = 1
TREES = ("by_phase", "by_source", "by_frequency")


def short_texts(name, count):
    """The beginnings of documents, of unlike length."""
    with gzip.open(TEXTS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        whole = "".join(json.loads(line)["text"] for line in file)
    return [whole[place * 300 :][: 40 + place * 37 % 80] for place in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny-mixtral on two data sets, with generated tokens and the early gate, up to a placement."""
    path = tmp_path_factory.mktemp("evaluate") / "out"
    texts = []
    for source, name in (("docs", "fit"), ("code", "heldout")):
        file = path.parent / f"{source}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in short_texts(name, 30)))
        texts += ["--dataset", file, "--source", source]
    more = ("--decode", "4", "--early-gate", "all")
    smoe("profile", "--model", "tiny-mixtral", *texts, *more, "-C", path, cwd=path.parent)
    smoe("build-tables", "-C", path, cwd=path.parent)
    smoe("cocluster", "--ep", RANKS, "--effort", "fast", "--jobs", "1", "-C", path, cwd=path.parent)
    return path


def evaluate(folder, *options):
    return smoe("evaluate", "-C", folder, "--json", *options, cwd=folder).json()


@pytest.fixture(scope="module")
def found(folder):
    """All held-out rows, fewer than 400, by token id."""
    return evaluate(folder, "--batch", "64")


@pytest.fixture(scope="module")
def gated(folder):
    """The same, also by what the early gate knows."""
    predictors = [option for name in ("token", "early-gate", "linear") for option in ("--predictor", name)]
    return evaluate(folder, *predictors)


@pytest.fixture(scope="module")
def rows(folder):
    """The held-out rows as the trace has them."""
    table = pq.read_table(folder / "trace/part-00000.parquet").to_pandas()
    return table[table.split == "heldout"].reset_index(drop=True)


@pytest.fixture(scope="module")
def runtime(folder):
    return load_file(folder / f"placement-ep{RANKS}/runtime.safetensors")


@pytest.fixture(scope="module")
def ranks_of(folder, rows):
    """The rank of each expert of each row, by layer: lists of K."""
    placement = pq.read_table(folder / f"placement-ep{RANKS}/placement.parquet").to_pandas()
    return {
        int(layer): [[place[e] for e in experts] for experts in rows[f"experts_{layer:02d}"]]
        for layer, place in ((n, part.set_index("logical")["rank"]) for n, part in placement.groupby("layer"))
    }


# Each state.


def test_total_is_the_mean_of_the_layers_and_a_share_is_of_the_same_placement_and_assignment(gated):
    for state, by_predictor in gated["total"].items():
        ceiling = "contiguous+oracle" if state in ("contiguous", "shuffled", "contiguous+oracle") else "oracle"
        for predictor, by_assignment in by_predictor.items():
            for assignment, figures in by_assignment.items():
                layers = [layer[state][predictor][assignment] for layer in gated["layers"].values()]
                for layer, figure in zip(gated["layers"].values(), layers, strict=True):
                    top = layer[ceiling]["oracle"][assignment]["lar"]
                    assert figure["oracle_share"] == pytest.approx(figure["lar"] / top)
                for name in ("lar", "oracle_share", "remote_fanout"):
                    assert figures[name] == pytest.approx(np.mean([figure[name] for figure in layers]))


def test_a_predicted_rank_is_right_if_it_holds_most_experts(found, rows, runtime, ranks_of):
    right = 0
    for token, ranks in zip(rows.token_id, ranks_of[LAYER], strict=True):
        score = runtime["token_scores"][LAYER, int(token)].tolist()
        right += score.index(max(score)) == held(ranks).index(max(held(ranks)))
    figures = found["layers"][str(LAYER)]["placed+shuffled"]["token"]["rule"]
    assert figures["rank_accuracy"] == pytest.approx(right / len(rows))
    assert found["total"]["oracle"]["oracle"]["rule"]["rank_accuracy"] == 1
    assert found["total"]["placed"]["none"]["rule"]["rank_accuracy"] is None


def test_bytes_on_the_wire_are_rows_of_the_hidden_size_in_two_bytes(found, folder, tmp_path):
    hidden = find_model("tiny-mixtral").spec.hidden_size
    figures = found["total"]["placed+shuffled"]["token"]["rule"]
    assert figures["wire_bytes"] == pytest.approx({way: n * hidden * 2 for way, n in figures["wire_rows"].items()})
    unknown = shutil.copytree(folder, tmp_path / "out")
    (unknown / "trace/run.json").unlink()
    without = evaluate(unknown, "--max-tokens", 50)
    assert without["context"]["rows"] == without["context"]["requests"]["rows"] == 50
    assert without["context"]["hidden_size"] is None
    assert "wire_bytes" not in without["total"]["placed+shuffled"]["token"]["rule"]
    assert "wire_bytes" not in without["dp-ep"]["total"]["placed"]["none"]["rule"]


# Predicted times, the load balancer, and what a report draws.


def test_a_predicted_time_is_that_of_the_busiest_rank_of_every_batch(found, rows, runtime, ranks_of):
    shipped = json.loads((Path(smoe_cli.hardware.__file__).parent / "hardware/nvlink-h200.json").read_text())
    width = json.loads((find_model("tiny-mixtral").local_folder() / "config.json").read_text())["intermediate_size"]
    machine = (shipped["stages"], shipped["expert_flops"], width)
    cuts = [slice(i, i + 64) for i in range(0, len(rows), 64)]
    ranks = [ranks_of[LAYER][cut] for cut in cuts]
    still = [[i // -(-len(part) // RANKS) for i in range(len(part))] for part in ranks]
    scores = runtime["token_scores"][LAYER][rows.token_id.to_numpy().astype(int)]
    moved = [home_of(scores)[cut] for cut in cuts]
    layer = found["layers"][str(LAYER)]
    placed, shuffled = (layer[state][by]["rule"]["microseconds"] for state, by in STATES_TIMED)
    assert placed["sp-ep"] == pytest.approx(microseconds_by_hand(*machine, ranks, still, "sp-ep"))
    assert placed["ar-ep"] == pytest.approx(microseconds_by_hand(*machine, ranks, still, "ar-ep"))
    assert shuffled == {"speculative": pytest.approx(microseconds_by_hand(*machine, ranks, moved, "speculative"))}
    assert found["context"]["hardware"] == shipped["name"]


STATES_TIMED = (("placed", "none"), ("placed+shuffled", "token"))


def test_slower_links_take_longer_and_a_model_without_a_config_has_no_times(found, folder, tmp_path):
    slow = evaluate(folder, "--batch", "64", "--hardware", "ethernet")
    for state, by in STATES_TIMED:
        fast = found["total"][state][by]["rule"]["microseconds"]
        assert all(time > fast[way] for way, time in slow["total"][state][by]["rule"]["microseconds"].items())
    assert slow["dp-ep"]["total"]["placed"]["none"]["rule"]["microseconds"].keys() == {"dp-ep"}
    unknown = shutil.copytree(folder, tmp_path / "out")
    (unknown / "trace/run.json").unlink()
    without = evaluate(unknown, "--max-tokens", 50)
    assert without["context"]["hardware"] is None
    assert "microseconds" not in without["total"]["placed"]["none"]["rule"]
    assert "layer us" not in smoe("evaluate", "--max-tokens", 50, "-C", unknown, cwd=tmp_path).out


def test_the_load_balancer_gives_the_next_expert_to_the_emptiest_rank(found, folder, rows):
    load = load_file(folder / f"tables/statistics_{LAYER:02d}.safetensors")["popularity"].sum(axis=0)
    experts = len(load)
    rank_of, borne = {}, [0] * RANKS
    for expert in sorted(range(experts), key=lambda expert: (-load[expert], expert)):
        free = [g for g in range(RANKS) if list(rank_of.values()).count(g) < experts // RANKS]
        rank_of[expert] = min(free, key=lambda g: (borne[g], g))
        borne[rank_of[expert]] += load[expert]
    ranks = [[rank_of[e] for e in mine] for mine in rows[f"experts_{LAYER:02d}"]]
    sizes = [(min(64, len(rows) - i // 64 * 64), i % 64) for i in range(len(rows))]
    home = [place // -(-size // RANKS) for size, place in sizes]
    figures = found["load_balancer"]["layers"][str(LAYER)]
    remote = sum(len(set(mine) - {here}) for mine, here in zip(ranks, home, strict=True))
    assert figures["remote_fanout"] == pytest.approx(remote / len(rows))
    assert figures["microseconds"].keys() == {"sp-ep", "ar-ep", "replicated"}
    assert found["load_balancer"]["dp-ep"]["layers"][str(LAYER)]["microseconds"].keys() == {"dp-ep"}


def test_what_a_report_draws_adds_up_to_the_figures(found, rows, ranks_of):
    detail, layer = found["detail"]["layers"][str(LAYER)], found["layers"][str(LAYER)]
    count = Counter(expert for mine in rows[f"experts_{LAYER:02d}"] for expert in mine)
    assert detail["expert_load"] == [count[e] for e in range(len(detail["expert_load"]))]
    assert detail["rank_load"]["placed"] == [sum(m.count(g) for m in ranks_of[LAYER]) for g in range(RANKS)]
    assert detail["pairs"].keys() == layer.keys()
    for state, pairs in detail["pairs"].items():
        between = np.array(pairs) * (1 - np.eye(RANKS))
        (figures,) = layer[state].values()
        assert between.sum() / len(rows) == pytest.approx(figures["rule"]["remote_fanout"])
    bins = detail["reliability"]["token"]
    assert sum(size for *_, size in bins) == len(rows) * RANKS
    assert sum(measured * size for _, measured, size in bins) == pytest.approx(sum(count.values()))
    assert all(bins[i][0] < bins[i + 1][0] for i in range(len(bins) - 1))


def test_without_a_shuffle_the_placement_is_judged_as_it_stands(folder, found):
    told = smoe(
        "evaluate", "-C", folder, "--batch", "64", "--mode", "sp-ep", "--fail-under", "lar=1", cwd=folder, code=5
    )
    assert "placed, none, rule: lar is {:.4f}".format(found["total"]["placed"]["none"]["rule"]["lar"]) in told.err
    assert "load-balanced" in told.out
    assert "oracle" not in told.out


# Groups of rows.


def test_phase_source_and_frequency_are_counted_row_by_row(found, folder, rows, runtime, ranks_of):
    occurrences = load_file(folder / "tables/vocabulary.safetensors")["occurrences"].sum(axis=0)
    edges = ((0, "unseen"), (9, "1-9"), (99, "10-99"), (999, "100-999"), (10**9, "1000+"))
    bands = [next(name for most, name in edges if occurrences[token] <= most) for token in rows.token_id]
    groups = {"by_phase": rows.phase, "by_source": rows.source, "by_frequency": bands}
    scores = runtime["token_scores"][LAYER][rows.token_id.to_numpy().astype(int)]
    counts = np.array([held(ranks) for ranks in ranks_of[LAYER]])
    home = home_of(scores)
    best = home_of(np.rint(counts * (255 / counts[0].sum())).astype(np.uint8))
    for key, names in groups.items():
        assert {name: group["rows"] for name, group in found[key].items() if group["rows"]} == Counter(names)
        for name in set(names):
            mine = [place for place, other in enumerate(names) if other == name]
            local = sum(counts[place][home[place]] for place in mine)
            ceiling = sum(counts[place][best[place]] for place in mine)
            remote = sum(len(set(ranks_of[LAYER][place]) - {int(home[place])}) for place in mine)
            figures = found[key][name]["layers"][str(LAYER)]["placed+shuffled"]["token"]
            assert figures["lar"] == pytest.approx(local / sum(counts[place].sum() for place in mine))
            assert figures["oracle_share"] == pytest.approx(local / ceiling)
            assert figures["remote_fanout"] == pytest.approx(remote / len(mine))
    assert found["context"]["unseen_tokens"] == bands.count("unseen") / len(rows)


def test_groups_weighted_by_rows_are_the_whole(gated):
    assert list(gated["by_phase"]) == ["decode", "prefill"]
    assert list(gated["by_source"]) == ["code", "docs"]
    for key in TREES:
        groups = [group for group in gated[key].values() if group["rows"]]
        assert sum(group["rows"] for group in groups) == gated["context"]["rows"]
        for state, by_predictor in gated["total"].items():
            for predictor, by_assignment in by_predictor.items():
                for name in ("lar", "remote_fanout"):
                    total = sum(group["rows"] * group["total"][state][predictor][name] for group in groups)
                    assert total / gated["context"]["rows"] == pytest.approx(by_assignment["rule"][name])


def test_the_early_gates_sample_has_the_facts_of_the_rows_it_sampled(folder, gated):
    """Here it samples every held-out row, in another order or not."""
    table = pq.read_table(folder / "trace/part-00000.parquet", columns=["phase", "source", "split"]).to_pandas()
    table = table[table.split == "heldout"]
    assert {name: group["rows"] for name, group in gated["by_phase"].items()} == Counter(table.phase)
    assert {name: group["rows"] for name, group in gated["by_source"].items()} == Counter(table.source)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 2000), min_size=1, max_size=20), data=st.data())
def test_an_id_is_in_the_band_of_its_count_and_one_not_known_is_unseen(counts, data):
    ids = data.draw(st.lists(st.integers(0, len(counts) + 2), min_size=1, max_size=40))
    grouping = by_frequency(np.array(ids, np.uint32), np.array(counts))
    for token, code in zip(ids, grouping.code, strict=True):
        seen = counts[token] if token < len(counts) else 0
        digits = "unseen" if seen == 0 else ["1-9", "10-99", "100-999", "1000+"][len(str(seen)) - 1]
        assert grouping.names[code] == digits


# Experts.


def test_the_hottest_experts_of_an_id_are_scored_by_row_and_by_id(found, folder, rows):
    counts = pq.read_table(folder / f"tables/counts_{LAYER:02d}.parquet").to_pandas()
    seen = {}
    for token, expert, count in zip(counts["token_id"], counts["expert"], counts["count"], strict=True):
        seen.setdefault(token, Counter())[expert] += count
    by_row, by_id, silent = [], {}, 0
    for token, experts in zip(rows.token_id, rows[f"experts_{LAYER:02d}"], strict=True):
        counter = seen.get(token, Counter())
        hot = set(sorted(counter, key=lambda expert: (-counter[expert], expert))[: len(experts)])
        if not hot:
            silent += 1
            continue
        hits = len(hot & set(experts))
        by_row.append((hits / len(hot), hits / len(experts), 2 * hits / (len(hot) + len(experts))))
        by_id.setdefault(token, []).append(by_row[-1])
    figures = found["experts"]["layers"][str(LAYER)]["token"]
    names = ("precision", "recall", "f1")
    assert [figures["traffic"][name] for name in names] == pytest.approx(np.mean(by_row, axis=0))
    means = [np.mean(each, axis=0) for each in by_id.values()]
    assert [figures["types"][name] for name in names] == pytest.approx(np.mean(means, axis=0))
    assert figures["traffic"]["predicted"] == pytest.approx(1 - silent / len(rows))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 4))
def test_the_k_highest_logits_are_compared_with_the_rows_experts(seed, top_k):
    generator = np.random.default_rng(seed)
    logits = generator.integers(0, 5, (10, 6)).astype(np.float32)
    experts = np.argsort(generator.random((10, 6)), axis=1)[:, :top_k].astype(np.uint16)
    for row, mine, score in zip(logits.tolist(), experts.tolist(), score_logits(logits, experts).f1, strict=True):
        best = sorted(range(6), key=lambda expert, row=row: (-row[expert], expert))[:top_k]
        assert score == pytest.approx(len(set(best) & set(mine)) / top_k)


def test_a_predictor_that_sees_more_names_more_experts(gated):
    f1 = {name: figures["traffic"]["f1"] for name, figures in gated["experts"]["total"].items()}
    assert f1["early-gate"] < f1["linear"]
    assert set(f1) == {"token", "early-gate", "linear"}
    assert gated["experts"]["total"]["linear"]["traffic"]["predicted"] == 1


# Requests.


def check_requests(document, requests, prompts, rows, runtime, ranks_of):
    """prompts: the row numbers of each request that are known when it arrives."""
    wishes = [
        sum(runtime["token_scores"][:, int(rows.token_id[row])].sum(axis=0, dtype=int) for row in mine)
        for mine in prompts
    ]
    truth = [np.sum([held(layer[row]) for layer in ranks_of.values() for row in mine], axis=0) for mine in requests]
    ways = {
        ("placed", "none"): [number % RANKS for number in range(len(requests))],
        ("placed+shuffled", "token"): routed_by_hand(wishes),
        ("oracle", "oracle"): routed_by_hand(truth),
    }
    for (state, router), homes in ways.items():
        lar, remote = figures_by_hand(requests, homes, ranks_of[LAYER])
        figures = document["dp-ep"]["layers"][str(LAYER)][state][router]["rule"]
        assert figures["lar"] == pytest.approx(lar)
        assert figures["remote_fanout"] == pytest.approx(remote)
        assert figures["wire_rows"] == pytest.approx({"dp-ep": 2 * remote})


def test_every_held_out_sequence_is_a_request_routed_by_its_prompt(found, rows, runtime, ranks_of):
    requests = [list(part.sort_values("position").index) for _, part in rows.groupby("sequence")]
    prompts = [[row for row in mine if rows.phase[row] == "prefill"] for mine in requests]
    assert len(requests) > RANKS
    assert sum(map(len, prompts)) < len(rows)
    assert found["context"]["requests"] == {
        "from": "held-out sequences", "count": len(requests), "rows": len(rows), "prompt_rows": sum(map(len, prompts)),
    }  # fmt: skip
    check_requests(found, requests, prompts, rows, runtime, ranks_of)


def test_arrivals_of_a_file_take_the_held_out_sequences_in_turn(folder, tmp_path, rows, runtime, ranks_of):
    arrivals = [(2.0, 90, 5), (0.5, 7, 0), (1.0, 300, 40), (3.0, 1, 1), (4.5, 60, 2), (9.0, 33, 3)]
    path = tmp_path / "arrivals.jsonl.xz"
    with lzma.open(path, "wt") as file:
        for seconds, prompt, output in arrivals:
            file.write(json.dumps({"t_s": seconds, "input_length": prompt, "output_length": output}) + "\n")
    options = ("--mode", "dp-ep", "--requests", path)
    found = evaluate(folder, *options)
    sequences = [list(part.sort_values("position").index) for _, part in rows.groupby("sequence")]
    requests, prompts = [], []
    for number, (_, prompt, output) in enumerate(sorted(arrivals)):
        mine = sequences[number % len(sequences)]
        requests.append([mine[place % len(mine)] for place in range(prompt + output)])
        prompts.append(requests[-1][:prompt])
    check_requests(found, requests, prompts, rows, runtime, ranks_of)
    told = found["context"]["requests"]
    assert (told["from"], told["count"], told["seconds"]) == ("arrivals.jsonl.xz", 6, 8.5)
    assert (told["rows"], told["prompt_rows"]) == (542, 491)
    assert "held-out sequence" in told["routing"]
    shown = smoe("evaluate", "-C", folder, *options, cwd=folder)
    assert "the file holds no routing" in shown.out


def test_one_short_request_is_measured_even_where_its_rank_serves_none_of_a_layer(folder):
    found = evaluate(folder, "--max-tokens", 1, "--mode", "dp-ep")
    assert found["context"]["requests"]["count"] == 1
    for layer in found["dp-ep"]["layers"].values():
        share, lar = (layer["oracle"]["oracle"]["rule"][name] for name in ("oracle_share", "lar"))
        assert share == (1 if lar else None)


@pytest.mark.parametrize(
    "bad",
    [
        "no json",
        "[1, 2]",
        "null",
        '{"t_s": 1, "input_length": 5}',
        '{"input_length": 5, "output_length": 1}',
        '{"t_s": 1, "input_length": 0, "output_length": 1}',
        '{"t_s": 1, "input_length": 5, "output_length": -1}',
        '{"t_s": 1, "input_length": 5.5, "output_length": 1}',
        '{"t_s": NaN, "input_length": 5, "output_length": 1}',
        '{"t_s": 1e999, "input_length": 5, "output_length": 1}',
        '{"t_s": 1, "input_length": true, "output_length": 1}',
        '{"t_s": [], "input_length": 5, "output_length": 1}',
        f'{{"t_s": 1{"0" * 400}, "input_length": 5, "output_length": 1}}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_request_is_named(bad, tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"timestamp_ms": 1500, "input_length": 5, "output_length": 0}\n' + bad + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_arrivals(path)


def test_milliseconds_are_read_and_an_empty_or_broken_file_is_refused(tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"timestamp_ms": 1500, "input_length": 5, "output_length": 0}\n')
    assert read_arrivals(path).tolist() == [[1.5, 5, 0]]
    path.write_text("")
    with pytest.raises(InputError, match="no request"):
        read_arrivals(path)
    broken = tmp_path / "arrivals.jsonl.xz"
    broken.write_bytes(b"not xz")
    for missing in (broken, tmp_path / "absent.jsonl"):
        with pytest.raises(InputError, match=missing.name):
            read_arrivals(missing)


def test_requests_without_their_mode_are_a_mistake_and_an_unreadable_file_leaves_nothing(folder, tmp_path):
    clean = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("evaluation-*"))
    path = tmp_path / "arrivals.jsonl"
    failed = smoe("evaluate", "-C", clean, "--requests", path, cwd=clean, code=2)
    assert "--mode dp-ep" in failed.err
    failed = smoe("evaluate", "-C", clean, "--mode", "dp-ep", "--requests", path, cwd=clean, code=3)
    assert "arrivals.jsonl" in failed.err
    assert not list(clean.glob("evaluation-*"))


# What is shown.


@pytest.mark.parametrize("mode", ["speculative", "dp-ep"])
def test_the_human_form_fits_80_columns_and_says_where_the_rest_is(mode, folder):
    options = [option for name in ("token", "early-gate", "selected") for option in ("--predictor", name)]
    shown = smoe("evaluate", "-C", folder, "--mode", mode, *options, cwd=folder)
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 30
    assert "--json" in lines[-1]
    assert "dp-ep" in shown.out


def test_a_bound_is_on_what_the_mode_shows(folder, gated):
    requests = gated["dp-ep"]["total"]["placed+shuffled"]["token"]["rule"]["lar"]
    tokens = gated["total"]["placed+shuffled"]["token"]["rule"]["lar"]
    bound = (*("evaluate", "-C", folder), "--fail-under", f"lar={(requests + tokens) / 2}", "--mode")
    fails, passes = ("dp-ep", "speculative") if requests < tokens else ("speculative", "dp-ep")
    smoe(*bound, passes, cwd=folder)
    assert "lar is" in smoe(*bound, fails, cwd=folder, code=5).err


def test_what_was_fitted_on_and_measured_on_is_told_for_a_table_of_transfers(gated, folder):
    assert gated["context"]["fitted_on"] == ["code", "docs"]
    assert gated["context"]["tables"] == smoe("inspect", "tables", "-C", folder, "--json", cwd=folder).json()["id"]
    shown = smoe("inspect", f"evaluation-ep{RANKS}", "-C", folder, cwd=folder)
    assert "placed+shuffled (token)" in shown.out
