"""Tables and pages from results made by hand."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from eagle3_hf.evaluation import report, svg
from eagle3_hf.evaluation.html import kept_nodes, page
from eagle3_hf.evaluation.results import Results
from eagle3_hf.evaluation.summary import ALL, summarise

NASTY = "</script><script>alert(1)</script> & <!-- \u2028"


def _result(dataset, number, turn, method, seconds, ids, blocks=None, stats=None, category="", trace=None):
    unit = f"{dataset}/b1/{number}/t{turn}"
    row = {"index": number, "id": f"id{number}", "category": category, "prompt_tokens": 5, "ids": ids}
    record = {
        "kind": "result", "key": f"{unit}/{method}", "dataset": dataset, "unit": unit, "turn": turn, "batch": 1,
        "method": method, "seconds": seconds, "rows": [row], "stats": stats, "blocks": blocks,
    }  # fmt: skip
    return record if trace is None else {**record, "trace": trace}


def _stats(**values):
    counts = {"rounds": 2, "generated": 5, "drafted": 6, "accepted": 3}
    lists = {"reached": [2, 2, 1], "accepted_at": [2, 1, 0], "speculated": [2, 2, 2]}
    times = {"prefill_seconds": 1.0, "target_seconds": 0.6, "draft_seconds": 0.3, "total_seconds": 2.0}
    return {**counts, **lists, **times, "candidates_per_round": 4, **values}


@pytest.fixture
def results():
    ids = [1, 2, 3, 4, 5, 6]
    tree = {"pieces": ["one", "two", NASTY, "x"], "ids": [1, 2, 3, 9], "parents": [0, 0, 1, 1]}
    trace = {"prompt": NASTY, "pieces": ["a", "b", NASTY, "d", "e", "f"], "trees": [None, tree, None]}
    fast_blocks = [[1, 0, 0, 0], [3, 2, 3, 3], [2, 1, 3, 3]]
    records = [
        _result("one", 0, 0, "plain", 6.0, ids, category="math", trace={**trace, "trees": []}),
        _result("one", 0, 0, "chain 3", 2.0, ids, fast_blocks, _stats(), "math", trace),
        _result("two", 0, 0, "plain", 6.0, ids),
        _result("two", 0, 0, "chain 3", 4.0, [*ids[:5], 9], fast_blocks, _stats()),
        _result("two", 0, 0, "lookup | 2", 3.0, ids, [[2, 1, 2, 2], [3, 2, 2, 2], [1, 0, 0, 0]]),
    ]
    methods = [
        {"name": "plain", "family": None, "depth": None},
        {"name": "lookup | 2", "family": None, "depth": None},
        {"name": "chain 3", "family": "chain", "depth": 3},
    ]
    settings = {"target": "T", "draft": "D", "temperature": 0.0, "max_new_tokens": 6, "dtype": "float32"}
    return Results(settings, [{"environment": {"cpu": "C", "threads": 1}, "methods": methods}], records)


def test_the_numbers_by_hand(results):
    found = summarise(results)["batches"]["1"]
    chain = found["datasets"][ALL]["chain 3"]
    assert list(found["datasets"]) == [ALL, "one", "two"]
    assert list(found["datasets"][ALL]) == ["plain", "lookup | 2", "chain 3"]
    # 12 tokens in 6 s against 12 in 12 s; prompt by prompt 3 and 1.5.
    assert (chain["tokens_per_second"], chain["speedup"]["total"]) == (2.0, 2.0)
    assert (chain["speedup"]["median"], chain["speedup"]["mean"]) == (2.25, 2.25)
    assert (chain["speedup"]["low"], chain["speedup"]["high"]) == (1.5, 3.0)
    assert chain["lossless"] == 0.5
    assert chain["tau"] == 10 / 4
    assert chain["tokens_per_forward"] == 12 / (2 + 4)
    assert chain["acceptance_rate"] == 6 / 12
    assert chain["conditional_acceptance"] == [1.0, 0.5, 0.0]
    assert chain["unconditional_acceptance"] == [1.0, 0.5, 0.0]
    assert chain["cycle_efficiency"] == pytest.approx(0.9)
    assert chain["milliseconds_per_round"] == pytest.approx({"target": 300, "draft": 150, "rest": 50, "total": 500})
    assert found["datasets"]["one"]["chain 3"]["lossless"] == 1.0
    assert found["categories"] == {"one: math": {"chain 3": 2.5}, "two": {"lookup | 2": 2.0, "chain 3": 2.5}}
    assert found["depth"] == {"chain": {"measured": [[3, 2.5]], "expected": [[1, 2.0], [2, 2.5], [3, 2.5]]}}


def test_the_prefills_block_counts_in_no_round(results):
    lookup = summarise(results)["batches"]["1"]["datasets"]["two"]["lookup | 2"]
    assert (lookup["rounds"], lookup["accepted"], lookup["drafted"]) == (2, 2, 2)
    assert lookup["tau"] == 4 / 2
    assert lookup["tokens_per_forward"] == 6 / 3
    assert "cycle_efficiency" not in lookup


def test_one_conversation_has_no_interval(results):
    speed = summarise(results)["batches"]["1"]["datasets"]["one"]["chain 3"]["speedup"]
    assert (speed["total"], speed["low"], speed["high"]) == (3.0, None, None)
    assert report.table_row(summarise(results)["batches"]["1"]["datasets"]["one"]["chain 3"])[1] == "3.00"


def test_turns_of_a_conversation_are_resampled_together(results):
    more = [
        _result("one", 0, 1, "plain", 8.0, [1] * 8),
        _result("one", 0, 1, "chain 3", 1.0, [1] * 8, [[8, 7, 7, 7]]),
    ]
    both = Results(results.settings, results.sessions, results.records[:2] + more)
    assert summarise(both)["batches"]["1"]["datasets"]["one"]["chain 3"]["speedup"]["low"] is None


def test_sampled_answers_are_not_compared(results):
    results.settings["temperature"] = 0.7
    assert summarise(results)["batches"]["1"]["datasets"][ALL]["chain 3"]["lossless"] is None


def test_a_result_without_its_plain_one_yet(results):
    results.records = results.records[1:]
    entry = summarise(results)["batches"]["1"]["datasets"]["one"]["chain 3"]
    assert entry["speedup"] is None
    assert report.table_row(entry)[1] == "-"


def test_a_share_of_nothing_is_none_and_not_zero(results):
    never = _stats(rounds=2, generated=2, drafted=6, accepted=0, reached=[2, 0, 0], accepted_at=[0, 0, 0])
    at_once = {"rounds": 0, "generated": 0, "drafted": 0, "accepted": 0}
    results.records = [
        *results.records[2:3],
        _result("two", 0, 0, "chain 3", 4.0, [1], [[1, 0, 0, 0], [1, 0, 3, 3], [1, 0, 3, 3]], never),
        _result("two", 0, 0, "lookup | 2", 3.0, [1], [[1, 0, 0, 0]]),  # the first token was EOS
        _result("two", 0, 0, "ended", 3.0, [1], [[1, 0, 0, 0]], _stats(**at_once)),
    ]
    summary = summarise(results)
    found = summary["batches"]["1"]
    entries = found["datasets"]["two"]
    assert entries["chain 3"]["conditional_acceptance"] == [0.0, None, None]
    assert entries["chain 3"]["unconditional_acceptance"] == [0.0, 0.0, 0.0]
    assert found["depth"]["chain"] == {"measured": [[3, 1.0]], "expected": [[1, 1.0], [2, 1.0], [3, 1.0]]}
    for name in ("lookup | 2", "ended"):
        assert (entries[name]["tau"], entries[name]["acceptance_rate"]) == (None, None)
        assert entries[name]["tokens_per_forward"] == 1.0
        assert "cycle_efficiency" not in entries[name]
    assert found["categories"] == {"two": {"chain 3": 1.0}}
    assert "| chain 3 | 0.00 / 0.00 | - / 0.00 | - / 0.00 |" in report.markdown(summary)
    pytest.importorskip("jinja2")
    for chart in re.findall(r"<svg.*?</svg>", page(summary, results), re.DOTALL):
        ElementTree.fromstring(chart)


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, "greedy"),
        ({"chat_template": True, "dtype": "float32"}, "greedy, chat template, float32"),
        ({"chat_template": False}, "greedy, no chat template"),
    ],
)
def test_only_settings_that_are_known_are_told(results, settings, end):
    results.settings = {"target": "T", "max_new_tokens": 6, **settings}
    assert f"- 6 new tokens at most, {end}\n" in report.render(results, "markdown")


def test_a_cell_stays_in_its_line(results):
    for record in results.records[:2]:
        record["rows"][0]["category"] = "two\nlines"
    assert "| one: two lines | - | 2.50 |" in report.render(results, "markdown")


def test_nothing_to_report():
    with pytest.raises(ValueError, match="no results"):
        report.render(Results(), "json")
    with pytest.raises(ValueError, match="'pdf'"):
        report.render(Results(), "pdf")


def test_markdown(results):
    text = report.render(results, "markdown")
    assert "| chain 3 | 2.0 | 2.00 [1.50, 3.00] | 2.25 | 2.50 | 2.00 | 50% | 0.90 | 50% |" in text
    assert "| lookup \\| 2 |" in text
    assert "## one, batch 1 (1 answers)" in text
    assert "| chain 3 | 1.00 / 1.00 | 0.50 / 0.50 | 0.00 / 0.00 |" in text
    assert "| one: math | - | 2.50 |" in text


def test_json_is_the_summary(results):
    assert json.loads(report.render(results, "json")) == json.loads(json.dumps(summarise(results)))


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.scripts, self.links, self.texts, self._script = [], [], [], None

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [value for name, value in found.items() if name in {"src", "href", "srcset", "data"}]
        if tag == "script":
            self._script = [found, ""]
            self.scripts.append(self._script)

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script is not None:
            self._script[1] += data
        else:
            self.texts.append(data)


def test_the_page(results):
    pytest.importorskip("jinja2")
    text = report.render(results, "html")
    read = _Page()
    read.feed(text)
    # Opens offline: nothing is loaded, and the only address is the name of the SVG language.
    assert read.links == []
    assert set(re.findall(r"https?://[^\"'<>\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    # Two scripts, whatever the prompts hold: the data and the page's own.
    assert len(read.scripts) == 2
    units = json.loads(read.scripts[0][1])
    assert [unit["title"] for unit in units] == ["one, prompt id0, turn 1 (math)"]
    assert units[0]["prompt"] == NASTY
    assert list(units[0]["methods"]) == ["plain", "chain 3"]
    chain = units[0]["methods"]["chain 3"]
    assert [(r["pieces"], r["accepted"], r["drafted"]) for r in chain["rounds"]] == [
        (["a"], 0, 0), (["b", NASTY, "d"], 2, 3), (["e", "f"], 1, 3),
    ]  # fmt: skip
    # Tokens 2 and 3 were accepted: nodes 1 and 2 of the tree.
    assert chain["rounds"][1]["tree"]["kept"] == [1, 2]
    assert [len(r["pieces"]) for r in units[0]["methods"]["plain"]["rounds"]] == [1] * 6
    assert "prefers-color-scheme: dark" in text
    for heading in ("Speed against plain generation", "Acceptance", "tau by category", "Token by token"):
        assert heading in text
    assert "2.00 [1.50, 3.00]" in read.texts


def test_all_charts_are_well_formed(results):
    pytest.importorskip("jinja2")
    results.records[0]["dataset"] = results.records[1]["dataset"] = 'a<b>&"c"'
    charts = re.findall(r"<svg.*?</svg>", page(summarise(results), results), re.DOTALL)
    assert len(charts) == 3 + 2 + 1 + 1  # bars of each set and all, two of positions, depth, times
    for chart in charts:
        ElementTree.fromstring(chart)


def test_a_page_without_traces_or_speculation(results):
    pytest.importorskip("jinja2")
    plain = Results(results.settings, results.sessions, [results.records[2]])
    text = report.render(plain, "html")
    assert "<h2>Acceptance" not in text
    assert json.loads(re.search(r'id="data">(.*?)</script>', text)[1]) == []


def test_kept_nodes_follow_the_accepted_tokens():
    tree = {"ids": [7, 1, 2, 2, 3], "parents": [0, 0, 0, 1, 3]}
    assert kept_nodes(tree, [1, 2, 3]) == [1, 3, 4]
    assert kept_nodes(tree, [2]) == [2]
    assert kept_nodes(tree, []) == []


@pytest.mark.parametrize(
    ("top", "expected"),
    [(0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3.3, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4, 5]), (0, [0, 1])],
)
def test_ticks(top, expected):
    assert svg.ticks(top) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["a", "before, tree 5:4:16", "x" * 32])
def test_names_have_room_beside_their_bars(name):
    for chart in (
        svg.interval_bars([(name, 0, 1.0, 0.5, 2.0), ("b", 1, 2.0, None, None)], 2.0, "x"),
        svg.stacked_bars([(name, {"target": 2.0}), ("b", {"target": 1.0})], ["target"], "ms"),
    ):
        text = next(t for t in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text") if t.text == name)
        assert text.get("text-anchor") == "end"
        assert float(text.get("x")) >= 7 * len(name)


def test_bars_are_as_long_as_their_values():
    chart = ElementTree.fromstring(svg.interval_bars([("a", 0, 1.0, 0.5, 2.0), ("b", 1, 2.0, None, None)], 2.0, "x"))
    space = "{http://www.w3.org/2000/svg}"
    first, second = (float(bar.get("width")) for bar in chart.iter(f"{space}rect"))
    assert second == pytest.approx(2 * first, abs=0.2)
    whiskers = [line for line in chart.iter(f"{space}line") if line.get("class") == "whisker"]
    assert len(whiskers) == 3
    assert float(whiskers[0].get("x2")) - float(whiskers[0].get("x1")) == pytest.approx(1.5 * first, abs=0.2)
