"""smoe report's document: its figures are those of the artefacts, read and counted again here, row by row."""

import json
import shutil
from collections import Counter
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest

from smoe_cli.report.document import SECTIONS
from tests.conftest import smoe

RANKS, EXPERTS, TOP_K = 4, 8, 2
NAMES = ("placement-ep4", "placement-ep4-law")


def routed(folder, name, seed, rows=1500, layers=3):
    """Rows whose token ids prefer pairs of experts, two pairs an id, as one file to import."""
    generator = np.random.default_rng(seed)
    pairs = np.array(list(combinations(range(EXPERTS), 2)))
    tokens = generator.integers(200, 260, rows)
    favourite = generator.integers(0, len(pairs), (layers, 2, 300))
    second = (generator.random((layers, rows)) < 0.2).astype(int)
    ids = pairs[favourite[np.arange(layers)[:, None], second, tokens]]
    np.savez(
        folder / f"{name}.npz",
        ids=ids.astype(np.uint8),
        tokens=tokens.astype(np.uint32),
        seq_len=np.full(rows // 50, 50, np.int32),
        layer_ids=np.arange(layers, dtype=np.uint8),
        num_experts=EXPERTS,
        top_k=TOP_K,
        vocab_size=6144,
    )
    return f"{name}.npz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trace of two sources under a bundled model's name, two placements of it, both measured."""
    path = tmp_path_factory.mktemp("report")
    files = [routed(path, name, seed) for seed, name in enumerate(("law", "intent"))]
    smoe("import", *files, "--source", "law", "--source", "intent", "--model", "tiny-mixtral", cwd=path)
    smoe("build-tables", cwd=path)
    for more in ((), ("--mix", "law=1", "--name", "law")):
        smoe("cocluster", "--ep", RANKS, "--effort", "fast", "--jobs", 1, *more, cwd=path)
    for name in NAMES:
        smoe("evaluate", "--placement", name, "--batch", 64, "--predictor", "token", "--predictor", "markov", cwd=path)
    return path / "smoe-out"


def report(folder, *options, placement=NAMES[0]):
    chosen = ("--placement", placement) if placement else ()
    return smoe("report", "--json", *chosen, *options, cwd=folder.parent).json()


@pytest.fixture(scope="module")
def document(folder):
    return report(folder)


@pytest.fixture(scope="module")
def sections(document):
    return document["sections"]


@pytest.fixture(scope="module")
def evaluation(folder):
    return json.loads((folder / "evaluation-ep4/evaluation.json").read_text())


@pytest.fixture(scope="module")
def rows(folder):
    return pq.read_table(folder / "trace/part-00000.parquet").to_pandas()


@pytest.fixture(scope="module")
def rank_of(folder):
    """By layer, the rank of every expert."""
    placement = pq.read_table(folder / "placement-ep4/placement.parquet").to_pandas()
    return {n: dict(zip(part.logical, part["rank"], strict=True)) for n, part in placement.groupby("layer")}


def test_states_are_those_of_the_evaluation(sections, evaluation):
    for table, measured, ways in (("tokens", evaluation, 4), ("requests", evaluation["dp-ep"], 1)):
        found = sections["states"][table]
        assert len(found) == sum(map(len, measured["total"].values())) + 1
        timed = set()
        for row in found:
            if row["state"] == "load_balancer":
                balanced = evaluation["load_balancer"]
                source = balanced if table == "tokens" else balanced["dp-ep"]
                total, layers = source["total"], list(source["layers"].values())
            else:
                where = (row["state"], row["predictor"], "rule")
                total, *layers = (dig(one, where) for one in (measured["total"], *measured["layers"].values()))
            for name in ("lar", "fanout", "remote_fanout", "load_imbalance"):
                assert row["total"][name] == total[name]
                assert row["layers"][name] == [layer[name] for layer in layers]
            assert row["total"]["microseconds"] == total["microseconds"]
            timed |= set(total["microseconds"])
            for way, times in row["layers"]["microseconds"].items():
                assert times == [layer["microseconds"][way] for layer in layers]
        assert len(timed) == ways


def dig(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def test_states_follow_the_order_of_predictors(sections, document):
    shuffled = [row["predictor"] for row in sections["states"]["tokens"] if row["state"] == "placed+shuffled"]
    assert shuffled == ["token", "markov"]
    (figure,) = [one for one in document["verdict"]["figures"] if one["use"] == "placed+shuffled"]
    (row,) = [row for row in sections["states"]["tokens"] if row["label"] == "placed + shuffled (token)"]
    assert figure["value"] == row["total"]["microseconds"]["speculative"]


def test_layers_of_two_digits_follow_those_of_one(folder, tmp_path, sections):
    def renamed(tree):
        layers = {"0": "2", "1": "9", "2": "10"}
        return {layers.get(key, key): renamed(value) for key, value in tree.items()} if type(tree) is dict else tree

    target = copied(folder, tmp_path, ["evaluation-ep4"])
    rewritten(target / "evaluation-ep4", lambda held: held.update(renamed(held)))
    found = report(target, placement=None)["sections"]
    for name in ("states", "reliability", "traffic"):
        assert {**found[name], "layers": None} == {**sections[name], "layers": None}
    assert found["traffic"]["layers"] == [2, 9, 10]
    assert found["prediction"]["layers"] == sections["prediction"]["layers"]


def test_states_tell_what_is_had_today_from_what_needs_more(sections):
    groups = {row["state"]: row["group"] for row in sections["states"]["tokens"]}
    assert groups == {
        "contiguous": "baseline",
        "load_balancer": "baseline",
        "placed": "placed",
        "shuffled": "more",
        "placed+shuffled": "more",
        "contiguous+oracle": "ceiling",
        "oracle": "ceiling",
    }


def test_load_is_a_count_of_held_out_rows(sections, rows, rank_of):
    held = rows[rows.split == "heldout"]
    load = sections["expert_load"]
    assert load["source"] == "heldout"
    for index, layer in enumerate(rank_of):
        counted = Counter(int(e) for row in held[f"experts_{layer:02d}"] for e in row)
        assert load["load"][index] == [counted[e] for e in range(EXPERTS)]
        by_rank = Counter()
        for expert, count in counted.items():
            by_rank[rank_of[layer][expert]] += count
        assert load["rank_load"]["placed"][index] == [by_rank[g] for g in range(RANKS)]
        slots = load["slots"]["placed"]
        assert dict(zip(slots["expert"][index], slots["rank"], strict=True)) == rank_of[layer]
        assert load["imbalance"]["placed"][index] == pytest.approx(max(by_rank.values()) * RANKS / by_rank.total())


def test_coactivation_is_a_count_of_the_tables_rows(sections, rows, rank_of):
    fitted = rows[rows.split != "heldout"]
    found = sections["coactivation"]
    assert found["pool"] == 1
    for index, layer in enumerate(rank_of):
        pairs = Counter(tuple(sorted(map(int, row))) for row in fitted[f"experts_{layer:02d}"])
        uses = Counter(e for pair, count in pairs.items() for e in pair for _ in range(count))
        mass = sum(uses[a] * uses[b] for a in range(EXPERTS) for b in range(EXPERTS) if a != b)
        inside = sum(count for (a, b), count in pairs.items() if rank_of[layer][a] == rank_of[layer][b])
        assert found["inside"]["placed"][index] == pytest.approx(inside / pairs.total())
        assert found["inside"]["chance"][index] == pytest.approx(1 / (EXPERTS - 1))
        names = [int(name) for name in found["experts"]["placed"][index]]
        assert [rank_of[layer][name] for name in names] == found["rank"]["placed"]
        for row, a in enumerate(names):
            for column, b in enumerate(names):
                cell = found["cells"]["placed"][index][row][column]
                if a == b:
                    assert cell == -1
                    continue
                expected = 2 * pairs.total() * uses[a] * uses[b] / mass
                lift = (pairs[min(a, b), max(a, b)] + 1) / (expected + 1)
                assert abs(cell - min(max(50 * (np.log(lift) / np.log(8) + 1), 0), 100)) <= 0.5 + 1e-9


def test_traffic_is_the_evaluations_without_what_stays(sections, evaluation):
    found = sections["traffic"]
    layers = evaluation["detail"]["layers"].values()
    for state in found["states"]:
        total = np.sum([layer["pairs"][state] for layer in layers], axis=0)
        assert found["home"][state] == total.diagonal().tolist()
        assert (np.array(found["total"][state]) == total - np.diag(total.diagonal())).all()
        assert np.array(found["by_layer"][state]).sum(axis=0).tolist() == found["total"][state]
        remote = evaluation["total"][state]
        first = remote.get("token", next(iter(remote.values())))["rule"]["remote_fanout"]
        assert np.sum(found["total"][state]) / found["rows"] / len(layers) == pytest.approx(first)


def test_prediction_and_reliability_are_the_evaluations(sections, evaluation):
    found, curve = sections["prediction"], sections["reliability"]
    assert found["predictors"] == curve["predictors"] == ["token", "markov"]
    for predictor in found["predictors"]:
        for name in ("lar", "oracle_share", "rank_accuracy"):
            path = ("placed+shuffled", predictor, "rule", name)
            assert found["total"][predictor][name] == dig(evaluation["total"], path)
            assert found["layers"][predictor][name] == [dig(one, path) for one in evaluation["layers"].values()]
        bins = [bin_ for one in evaluation["detail"]["layers"].values() for bin_ in one["reliability"][predictor]]
        for side in (0, 1):
            pooled = sum(bin_[side] * bin_[2] for bin_ in curve["total"][predictor])
            assert pooled == pytest.approx(sum(bin_[side] * bin_[2] for bin_ in bins))
        assert sum(bin_[2] for bin_ in curve["total"][predictor]) == sum(bin_[2] for bin_ in bins)
        assert len(curve["total"][predictor]) <= 20
    assert found["layers"]["markov"]["expert_f1"] is None
    path = ("token", "traffic", "f1")
    assert found["layers"]["token"]["expert_f1"] == [dig(one, path) for one in evaluation["experts"]["layers"].values()]
    assert found["ceiling"]["total"] == evaluation["total"]["oracle"]["oracle"]["rule"]["lar"]
    for key, groups in found["groups"].items():
        assert sum(group["rows"] for group in groups) == evaluation["context"]["rows"]
        for group in groups:
            assert group["lar"]["token"] == evaluation[key][group["group"]]["total"]["placed+shuffled"]["token"]["lar"]


def test_transfer_sets_both_placements_against_both_sources(folder, sections, evaluation):
    matrix = sections["transfer"]["matrix"]
    assert matrix["placements"] == list(NAMES)
    assert matrix["fitted_on"] == ["intent, law", "law 1.00"]
    other = json.loads((folder / "evaluation-ep4-law/evaluation.json").read_text())
    for row, measured in enumerate((evaluation, other)):
        for column, source in enumerate(matrix["sources"]):
            for state, predictor in (("placed", "none"), ("placed+shuffled", "token")):
                figures = measured["by_source"][source]["total"][state][predictor]
                for name in ("lar", "remote_fanout"):
                    assert matrix[state][name][row][column] == figures[name]
    rows = {one["source"]: one["rows"] for one in sections["transfer"]["sources"]}
    assert rows == {name: evaluation["by_source"][name]["rows"] for name in ("law", "intent")}


def test_placements_fitted_on_the_same_sources_show_no_transfer(folder, tmp_path):
    target = copied(folder, tmp_path, ["placement-ep4", "evaluation-ep4"])
    for kind in ("placement", "evaluation"):
        shutil.copytree(folder / f"{kind}-ep4", target / f"{kind}-ep4-twin")
    transfer = report(target)["sections"]["transfer"]
    assert transfer["matrix"] is None
    assert "smoe cocluster --ep 4 --mix intent=1 --name one-source" in transfer["matrix_note"]


def test_the_solvers_way_is_its_log(folder, sections):
    lines = [json.loads(line) for line in (folder / "placement-ep4/solver.jsonl").read_text().splitlines()]
    assert [layer["stages"] for layer in sections["solver"]["layers"]] == [line["stages"] for line in lines]
    assert [layer["certificate"] for layer in sections["solver"]["layers"]] == [line["certificate"] for line in lines]
    assert sections["solver"]["summary"]["optimal"] == sum(line["certificate"]["kind"] == "optimal" for line in lines)


def test_telling_tokens_have_most_of_their_experts_on_the_rank(sections, rows, rank_of):
    fitted = rows[rows.split != "heldout"]
    found = sections["tokens"]
    count = Counter(fitted.token_id.tolist())
    shares = {token: np.zeros(RANKS) for token in count}
    base = np.zeros(RANKS)
    for layer, ranks in rank_of.items():
        for token, experts in zip(fitted.token_id, fitted[f"experts_{layer:02d}"], strict=True):
            for expert in experts:
                shares[token][ranks[expert]] += 1 / (TOP_K * count[token] * len(rank_of))
                base[ranks[expert]] += 1 / (TOP_K * len(fitted) * len(rank_of))
    assert found["base"] == pytest.approx(base)
    for rank, listed in enumerate(found["ranks"]):
        assert listed
        for token in listed:
            assert token["count"] == count[token["id"]] >= found["min_count"]
            assert token["share"] == pytest.approx(shares[token["id"]][rank])
            assert token["lift"] == pytest.approx(shares[token["id"]][rank] / base[rank])
        score = {
            token: (seen * shares[token][rank] / base[rank] + 16) / (seen + 16)
            for token, seen in count.items()
            if seen >= found["min_count"]
        }
        ordered = [score[token["id"]] for token in listed]
        assert ordered == sorted(ordered, reverse=True)
        assert ordered[0] == pytest.approx(max(score.values()))


def test_tokens_have_the_texts_of_the_models_own_tokenizer(sections):
    from tokenizers import Tokenizer

    from smoe_profiles.models import BUNDLED

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tiny-mixtral/tokenizer.json"))
    texts = [(token["id"], token["text"]) for listed in sections["tokens"]["ranks"] for token in listed]
    assert sections["tokens"]["texts"]
    for number, text in texts:
        decoded = tokenizer.decode([number])
        assert text == (tokenizer.id_to_token(number) if "\ufffd" in decoded or not decoded else decoded)


def test_the_first_screen_rests_on_predicted_time_of_this_hardware(document, evaluation):
    verdict = document["verdict"]
    assert verdict["basis"] == "microseconds"
    assert verdict["conditions"]["hardware"] == evaluation["context"]["hardware"] is not None
    assert verdict["conditions"]["rows"] == evaluation["context"]["rows"]
    placed = verdict["figures"][0]
    total = evaluation["total"]
    assert placed["value"] == total["placed"]["none"]["rule"]["microseconds"]["sp-ep"]
    assert placed["contiguous"] == total["contiguous"]["none"]["rule"]["microseconds"]["sp-ep"]
    assert placed["load_balancer"] == evaluation["load_balancer"]["total"]["microseconds"]["sp-ep"]
    assert placed["speedup"] == min(placed["contiguous"], placed["load_balancer"]) / placed["value"]


def test_the_same_artefacts_give_the_same_bytes(folder, document):
    again = smoe("report", "--json", "--placement", NAMES[0], cwd=folder.parent).out
    assert json.loads(again) == document
    assert again == smoe("report", "--json", "--placement", NAMES[0], cwd=folder.parent).out
    assert "created" not in again


def copied(folder, target, names):
    for name in names:
        shutil.copytree(folder / name, target / "smoe-out" / name)
    return target / "smoe-out"


SUBSETS = {
    "trace": (["trace"], {"trace"}, "build-tables"),
    "tables": (["tables"], {"expert_load", "coactivation"}, "cocluster --ep 8"),
    "trace and tables": (["trace", "tables"], {"trace", "expert_load", "coactivation"}, "cocluster --ep 8"),
    "placement": (["placement-ep4"], {"solver"}, "profile --model M"),
    "all but an evaluation": (
        ["trace", "tables", "placement-ep4"],
        {"trace", "expert_load", "coactivation", "solver", "tokens"},
        "evaluate",
    ),
    "evaluation": (
        ["evaluation-ep4"],
        {"states", "expert_load", "traffic", "prediction", "reliability", "transfer"},
        "cocluster --ep 4",
    ),
}


@pytest.mark.parametrize(("names", "there", "following"), SUBSETS.values(), ids=SUBSETS)
def test_any_part_of_a_folder_gives_a_report(folder, tmp_path, names, there, following):
    document = report(copied(folder, tmp_path, names), placement=None)
    assert set(document["sections"]) == set(SECTIONS)
    assert {name for name, section in document["sections"].items() if section is not None} == there
    assert set(document["missing"]) == set(SECTIONS) - there
    for facts in document["missing"].values():
        assert facts["sentence"].endswith(".")
        assert facts["command"].startswith("smoe ")
    assert (document["verdict"]["answer"] == "unmeasured") == ("evaluation-ep4" not in names)
    assert document["verdict"]["next"]["command"] == f"smoe {following}"


def test_an_empty_folder_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "smoe-out").mkdir()
    refused = smoe("report", "--json", cwd=tmp_path, code=3)
    assert "holds nothing to report on" in refused.err
    assert not refused.out
    assert "smoe profile --model M" in refused.err


def test_a_name_that_is_not_there_is_refused(folder):
    assert "placement-ep9" in smoe("report", "--json", "--placement", "placement-ep9", cwd=folder.parent, code=3).err


def test_several_placements_are_listed(folder):
    assert ", ".join(NAMES) in smoe("report", "--json", cwd=folder.parent, code=2).err


def test_commands_name_the_placement_and_folder_where_they_must(folder):
    found = smoe("report", "--json", "--placement", NAMES[1], "-C", folder, cwd=folder).json()
    for engine in found["verdict"]["engines"]:
        assert engine["command"].endswith(f"--placement {NAMES[1]} -C {folder}")


def test_a_placement_of_another_folder_is_named_as_it_was(folder, tmp_path):
    target = copied(folder, tmp_path, ["trace", "tables"])
    elsewhere = folder / NAMES[0]
    found = smoe("report", "--json", "--placement", elsewhere, "-C", target, cwd=tmp_path).json()
    assert found["sections"]["states"] is not None
    vllm = found["verdict"]["engines"][-1]
    assert vllm["command"] == f"smoe regroup --placement {elsewhere} -C {target}"


def test_an_evaluation_of_another_placement_is_left_out_and_said(folder, tmp_path):
    target = copied(folder, tmp_path, ["trace", "tables", "placement-ep4"])
    shutil.copytree(folder / "evaluation-ep4-law", target / "evaluation-ep4")
    document = report(target, placement=None)
    (note,) = [one["note"] for one in document["artefacts"] if one["kind"] == "evaluation"]
    assert "another placement-ep4" in note
    assert document["sections"]["states"] is None


def test_a_damaged_artefact_is_left_out_and_said(folder, tmp_path):
    target = copied(folder, tmp_path, ["trace", "tables", "placement-ep4"])
    (target / "placement-ep4/solver.jsonl").write_text("{")
    document = report(target, placement=None)
    (placement,) = [one for one in document["artefacts"] if one["kind"] == "placement"]
    assert not placement["used"]
    assert "solver.jsonl has 1 bytes" in placement["note"]
    assert document["sections"]["coactivation"] is not None


def rewritten(path, change):
    """An artefact's JSON file changed by hand, its manifest made to agree."""
    file, manifest = path / "evaluation.json", path / "manifest.json"
    held = json.loads(file.read_text())
    change(held)
    file.write_text(json.dumps(held, sort_keys=True))
    facts = json.loads(manifest.read_text())
    facts["files"]["evaluation.json"]["bytes"] = file.stat().st_size
    manifest.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["total"].pop("oracle"),
        lambda held: held["layers"].clear(),
        lambda held: held["total"]["placed"].update(none=[]),
        lambda held: held["detail"]["layers"]["1"].update(pairs="pairs"),
        lambda held: held["context"].update(ranks="four"),
        lambda held: held.update(by_source=[1, 2]),
        lambda held: held["total"]["placed"]["none"]["rule"].update(lar=float("nan")),
        lambda held: held["detail"]["layers"]["1"]["pairs"].update(placed=[[10**30]]),
        lambda held: held["by_source"]["law"]["total"].update(contiguous={}),
    ],
)
def test_a_hostile_evaluation_is_refused_in_one_sentence(folder, tmp_path, change):
    target = copied(folder, tmp_path, ["evaluation-ep4"])
    rewritten(target / "evaluation-ep4", change)
    refused = smoe("report", "--json", cwd=tmp_path, code=3)
    assert refused.err.startswith("error: ")
    assert refused.err.count("\n") == 1


def test_an_evaluation_without_times_and_details_rests_on_rows(folder, tmp_path):
    target = copied(folder, tmp_path, ["trace", "tables", "placement-ep4", "evaluation-ep4"])

    def older(held):
        del held["detail"], held["load_balancer"], held["context"]["hardware"]
        for tree in (
            held["total"],
            held["dp-ep"]["total"],
            *held["layers"].values(),
            *held["dp-ep"]["layers"].values(),
        ):
            for figures in (rule for state in tree.values() for one in state.values() for rule in one.values()):
                figures.pop("microseconds")

    rewritten(target / "evaluation-ep4", older)
    document = report(target, placement=None)
    assert document["verdict"]["basis"] == "remote_fanout"
    assert document["verdict"]["figures"][0]["load_balancer"] is None
    assert any("No layer time is predicted" in caution for caution in document["verdict"]["cautions"])
    assert document["sections"]["expert_load"]["source"] == "tables"
    assert document["sections"]["traffic"] is None
    assert document["missing"]["traffic"]["command"] == "smoe evaluate"


def test_the_page_holds_the_documents_first_screen_and_is_written_again(folder, document):
    pytest.importorskip("plotly")
    for _ in range(2):
        said = smoe("report", "--placement", NAMES[0], cwd=folder.parent)
    page = (folder / "report-ep4.html").read_text(encoding="utf-8")
    assert document["verdict"]["headline"].split(":")[0] in page
    assert document["verdict"]["headline"].split(":")[0] in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert document["verdict"]["next"] is None  # a model as small as this: nearly all time is fixed cost
    assert said.err == ""
    (folder / "report-ep4.html").unlink()


def test_the_next_command_stands_on_the_page_and_below_what_is_said(folder, tmp_path):
    target = copied(folder, tmp_path, ["trace"])
    assert smoe("report", cwd=tmp_path).err == "next: smoe build-tables\n"
    assert "<code>smoe build-tables</code>" in (target / "report.html").read_text(encoding="utf-8")


def test_a_file_that_is_no_report_is_not_replaced(folder, tmp_path):
    diary = tmp_path / "diary.html"
    diary.write_text("dear diary")
    refused = smoe("report", "--placement", NAMES[0], "--out", diary, cwd=folder.parent, code=4)
    assert "is not a smoe report; --force replaces it" in refused.err
    assert diary.read_text() == "dear diary"
