"""The report's page as text: it needs nothing else, holds every section, and nothing in the document can break out."""

import base64
import hashlib
import json
import re
import sys
import zlib
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_cli.report.drawing.overview import cards, state_tables
from smoe_cli.report.drawing.text import change, label, number, token, visible
from smoe_cli.report.page import SECTIONS, render
from smoe_profiles.errors import MachineError
from tests.report.sample import HOSTILE, LAYERS, RANKS, sample_document, unmeasured_document

VOID = {"meta", "br", "link", "img", "input", "hr"}
LOADS = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction", "cite", "ping"}


class Reader(HTMLParser):
    """Collects tags, texts and ids, and checks that every element is closed where it should be."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts, self.scripts = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"{tag} repeats an attribute"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.texts).append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return "".join(self.texts)


@pytest.fixture(scope="module")
def page():
    return render(sample_document())


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def packed(page, name):
    """What lies in the page as deflate in base64."""
    found = re.search(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    return zlib.decompress(base64.b64decode(found[1])).decode()


def test_the_page_names_its_language_title_and_maker(page, read):
    assert page.startswith("<!doctype html>")
    assert read.of("html") == [{"lang": "en"}]
    assert '<meta name="generator" content="smoe report">' in page[:4096]
    assert re.search(r"<title>Worth it with a request router[^<]*sample: 3 MoE layers", page)


def test_nothing_is_fetched(read):
    addresses = [value for _, of in read.tags for name, value in of.items() if name in LOADS]
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert not read.of("link")
    style = next(text for text in read.scripts if ":root" in text)
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_lets_only_this_pages_scripts_run(page, read):
    policy = next(of["content"] for of in read.of("meta") if of.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    own = re.search(r"</script>\n<script>(.*?)</script>", page, re.DOTALL)[1]
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (own, packed(page, "library"))
    }
    assert set(rules["script-src"].split()) == hashes


def test_every_section_stands_with_its_heading_and_tables(read):
    ids = {of["id"] for of in read.of("section")}
    assert set(SECTIONS) <= ids
    for heading, _ in SECTIONS.values():
        assert read.text.count(heading) >= 2  # in the list of sections and above its own


def test_a_section_that_was_not_measured_says_what_to_run():
    read = Reader(render(unmeasured_document()))
    for name in SECTIONS:
        assert f"Not measured: {name}." in read.text
        assert f"smoe do-{name}" in read.text
    assert "smoe profile --model M -C 'a <b> c'" in read.text


def test_a_page_that_advises_nothing_names_no_command():
    document = sample_document()
    document["verdict"]["next"] = None
    assert ">Next<" not in render(document)


def test_a_slower_use_was_called_too_little_to_count():
    figures = [sample_document()["verdict"]["figures"][0] | {"speedup": speedup} for speedup in (0.95, 1.01)]
    assert [card.outcome for card in cards({"figures": figures})] == ["no gain", "too little to count"]
    doubted = figures[0] | {"speedup": 1.2, "undecided": True, "doubt": "requests"}
    assert cards({"figures": [doubted]})[0].outcome == "too few requests"


def test_a_page_without_charts_does_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert len(render(unmeasured_document())) < 60_000


@pytest.mark.parametrize("package", ["plotly.offline", "jinja2"])
def test_a_missing_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MachineError, match=r"is not installed; pip install smoe\[report\]"):
        render(sample_document())


def test_hostile_text_is_shown_and_opens_no_tag(page, read):
    assert not [of for tag, of in read.tags if tag in ("img", "svg", "a") and not of.get("href", "").startswith("#")]
    assert len(read.of("script")) == 3
    assert not [name for _, of in read.tags for name in of if name.startswith("on")]
    for text in HOSTILE:
        assert token(text) in read.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u2028\u2029]", page)


def test_hostile_names_are_plain_text_in_the_figures(page):
    figures = packed(page, "figures")
    assert "<script" not in figures
    assert "<a href" not in figures
    assert json.loads(figures)["transfer-sources"]["views"][0]["data"][0]["x"] == ["law", label(HOSTILE[1])]


@given(st.text())
def test_visible_text_has_no_unseen_character_and_is_printable_as_it_was(text):
    seen = visible(text)
    assert seen.isprintable()
    if text.isprintable() and "\\" not in text:
        assert seen == text


@given(st.text(max_size=40))
def test_a_label_holds_no_tag_however_it_was_cut(text):
    assert not re.search("[<>]", label(text))
    assert not re.search("&(?!(amp|lt|gt);)", label(text))


def test_outer_spaces_of_a_token_are_seen():
    assert [token(text) for text in (" the", "  ", "a b ", "", "\n ")] == ["␣the", "␣␣", "a b␣", "", "\\n␣"]


def test_numbers_lose_digits_behind_the_point_as_they_grow():
    shown = [number(value) for value in (0.31771, 2.45, 27.3904, 120.04, 1234.6, 7, 12345, None)]
    assert shown == ["0.318", "2.450", "27.39", "120.0", "1,235", "7", "12,345", "–"]  # noqa: RUF001
    assert [change(a, b) for a, b in ((112.0, 100.0), (98.75, 100.0), (100.0, 100.0), (1.0, 0.0))] == [
        "+12 %",
        "−1.2 %",  # noqa: RUF001
        "",
        "",
    ]


def test_the_first_screen_holds_the_documents_figures(read):
    document = sample_document()
    shown = [float(of["value"]) for of in read.of("data")]
    rows = [*document["sections"]["states"]["tokens"], *document["sections"]["states"]["requests"]]
    totals = [row["total"] for row in rows]
    expected = [total[name] for total in totals for name in ("lar", "remote_fanout", "load_imbalance")]
    expected += [time for total in totals for time in total["microseconds"].values()]
    expected += [
        figure[k] for figure in document["verdict"]["figures"] for k in ("contiguous", "load_balancer", "value")
    ]
    assert sorted(shown) == sorted(expected)


def test_what_engines_give_stands_apart_from_what_needs_more():
    tokens, requests = state_tables(sample_document()["sections"]["states"])
    assert [title for title, _ in tokens.groups] == [
        "Without a placement",
        "Placed: what today's engines give",
        "More: needs a shuffling run time",
        "Ceiling: the true routing known beforehand",
    ]
    assert [state for _, rows in tokens.groups for _, state, _ in rows][:3] == ["contiguous", "load_balancer", "placed"]
    assert [title for title, _ in requests.groups][-1] == "More: needs a request router"


def test_a_state_without_a_predicted_time_has_empty_cells():
    part = sample_document()["sections"]["states"]
    for row in part["tokens"]:
        row["total"]["microseconds"] = row["layers"]["microseconds"] = None
    tokens, _ = state_tables(part)
    assert tokens.ways == []
    assert all(len(cells) == 3 for _, rows in tokens.groups for _, _, cells in rows)


def test_tables_are_reached_by_keyboard_and_named(read):
    regions = [of for of in read.of("div") if of.get("class") == "scroll"]
    captions = {of["id"] for of in read.of("caption") if "id" in of}
    assert len(regions) > 20
    assert all(of["tabindex"] == "0" and of["aria-labelledby"] in captions for of in regions)
    assert len(captions) == len([of for of in read.of("caption") if "id" in of])
    assert all(of.get("scope") for of in read.of("th"))


def test_every_chart_says_what_it_shows_and_has_a_figure(page, read):
    charts = [of for of in read.of("div") if "data-chart" in of]
    figures = json.loads(packed(page, "figures"))
    assert {of["data-chart"] for of in charts} == set(figures)
    assert all(of["role"] == "img" and len(of["aria-label"]) > 20 for of in charts)


def test_choosers_offer_every_layer(page, read):
    figures = json.loads(packed(page, "figures"))
    assert {len(figures[f"load-{side}"]["views"]) for side in ("contiguous", "placed")} == {len(LAYERS)}
    assert len(figures["traffic-0"]["views"]) == len(LAYERS) + 1
    sections = {of["data-section"] for of in read.of("select") if "data-section" in of}
    assert {"expert_load", "coactivation", "traffic", "states", "prediction", "reliability"} <= sections


def test_rank_borders_are_drawn_between_experts_of_different_ranks(page):
    figure = json.loads(packed(page, "figures"))["coactivation-placed"]["views"][0]
    assert sorted({shape["x0"] for shape in figure["layout"]["shapes"] if shape.get("yref") == "paper"}) == [
        3.5,
        7.5,
        11.5,
    ]
    diagonal = [figure["data"][0]["z"][at][at] for at in range(16)]
    assert diagonal == [None] * 16


def test_an_expert_of_two_copies_shows_half_its_load_at_each():
    document = sample_document()
    part = document["sections"]["expert_load"]
    for at in range(len(LAYERS)):
        part["slots"]["placed"]["expert"][at] = [0, 0, *range(2, 16)]
    figure = json.loads(packed(render(document), "figures"))["load-placed"]["views"][0]
    texts = [text for row in figure["data"][0]["text"] for text in row if text.startswith("expert 0,")]
    assert len(texts) == 2
    assert "2 copies" in texts[0]
    at = [(r, c) for r, row in enumerate(figure["data"][0]["text"]) for c, text in enumerate(row) if text == texts[0]]
    load = part["load"][0]
    assert figure["data"][0]["z"][at[0][0]][at[0][1]] == pytest.approx(load[0] / 2 / (sum(load) / 16))


def test_without_a_placement_load_and_coactivation_are_still_drawn():
    document = sample_document()
    load, pairs = document["sections"]["expert_load"], document["sections"]["coactivation"]
    load |= {"rank_load": None, "imbalance": None, "source": "tables"}
    load["slots"] = {"contiguous": {"rank": [0] * 16, "expert": [list(range(16))] * len(LAYERS)}, "placed": None}
    pairs |= {"inside": None}
    pairs["rank"] = {"contiguous": [0] * 16, "placed": None}
    pairs["cells"]["placed"] = pairs["experts"]["placed"] = None
    figures = json.loads(packed(render(document), "figures"))
    assert {"load-contiguous", "coactivation-contiguous"} <= set(figures)
    assert not {"load-placed", "coactivation-placed"} & set(figures)


def test_traffic_is_drawn_as_it_was_counted_on_one_scale(page):
    part = sample_document()["sections"]["traffic"]
    figures = json.loads(packed(page, "figures"))
    for at, state in enumerate(part["states"]):
        heat = figures[f"traffic-{at}"]["views"][0]["data"][0]
        drawn = [[value or 0 for value in row] for row in heat["z"]]
        assert drawn == part["total"][state]
        assert heat["zmax"] == max(max(row) for pairs in part["total"].values() for row in pairs)
    assert len(part["total"]["placed"]) == RANKS


def test_the_same_document_gives_the_same_page(page):
    assert render(sample_document()) == page
