"""What goes in: datasets, column maps, methods."""

import csv
import json
from pathlib import Path

import pytest

from eagle3_hf.evaluation import methods
from eagle3_hf.evaluation.methods import Method, Models, load_plugin, make_methods, register
from eagle3_hf.evaluation.prompts import Prompt, load_prompts, parse_columns, pick

PROMPT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"


def test_jsonl_with_turns_and_with_prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}\n\n{"prompt": "é?"}\n')
    assert load_prompts(str(path)) == [
        Prompt("mine", 0, "81", "writing", ("One?", "Two?")),
        Prompt("mine", 1, "1", "", ("é?",)),
    ]


def test_other_columns_are_mapped(tmp_path):
    json_file, csv_file = tmp_path / "a.json", tmp_path / "b.csv"
    json_file.write_text(json.dumps([{"question": "Why?", "topic": "math", "uid": "x7", "turns": ["not this"]}]))
    csv_file.write_text('question,topic,uid\n"Why,\nand how?",math,x7\n')
    columns = parse_columns(["prompt=question", "category=topic", "id=uid"])
    assert load_prompts(str(json_file), None, columns) == [Prompt("a", 0, "x7", "math", ("Why?",))]
    assert load_prompts(str(csv_file), None, columns) == [Prompt("b", 0, "x7", "math", ("Why,\nand how?",))]
    talk = tmp_path / "c.jsonl"
    talk.write_text('{"talk": ["a", "b"]}\n')
    assert load_prompts(str(talk), None, {"turns": "talk"})[0].turns == ("a", "b")


SEPARATORS = "a\u2028b\x0cc\x85d"  # what str.splitlines() would split at


def test_a_text_may_hold_any_separator_and_be_long(tmp_path):
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.CSV"
    lines.write_text(json.dumps({"prompt": SEPARATORS}, ensure_ascii=False) + "\n", encoding="utf-8")
    long = "word " * 40_000
    table.write_text(f'prompt,category\n{SEPARATORS},x\n"two\nlines",y\n{long},z\n', encoding="utf-8")
    limit = csv.field_size_limit()
    assert len(long) > limit
    assert load_prompts(str(lines))[0].turns == (SEPARATORS,)
    assert [prompt.turns[0] for prompt in load_prompts(str(table))] == [SEPARATORS, "two\nlines", long]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", '{"prompt": "é"}\n'), ("a.csv", "prompt\né\n"), ("a.json", '[{"prompt": "é"}]')]
)
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert load_prompts(str(tmp_path / name))[0].turns == ("é",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", ["a.jsonl", "UTF-8"]),
        (rb'{"prompt": "fine"}' + b"\n" + rb'{"prompt": "\ud800"}', ["a.jsonl", "row 2", "surrogate"]),
        (rb'{"prompt": "fine", "category": "\ud800"}', ["row 1", "surrogate"]),
    ],
)
def test_bytes_that_are_no_text(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are what matters
        load_prompts(str(tmp_path / "a.jsonl"))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("pair", ["prompt", "prompt=", "answer=x", "=x"])
def test_a_column_map_that_cannot_be_read(pair):
    with pytest.raises(ValueError, match="FIELD=COLUMN"):
        parse_columns([pair])


def test_turns_and_prompt_exclude_each_other():
    with pytest.raises(ValueError, match="not both"):
        parse_columns(["prompt=a", "turns=b"])


@pytest.mark.parametrize(
    ("name", "content", "columns", "words"),
    [
        ("a.jsonl", '{"question": "Why?"}\n', {}, ["'prompt'", "'question'", "--column"]),
        ("a.jsonl", '{"question": "Why?"}\n', {"prompt": "text"}, ["'text'", "'question'"]),
        ("a.jsonl", '{"prompt": "Why?"}\n', {"category": "topic"}, ["'topic'", "'prompt'"]),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', {}, ["row 2", "no text"]),
        ("a.jsonl", '{"turns": []}\n', {}, ["row 1", "'turns'"]),
        ("a.jsonl", '{"prompt": "a"}\nnonsense\n', {}, ["line 2"]),
        ("a.jsonl", "[1]\n", {}, ["line 1"]),
        ("a.jsonl", "", {}, ["holds no prompt"]),
        ("a.jsonl", "\n\n", {}, ["holds no prompt"]),
        ("a.json", "", {}, ["holds no prompt"]),
        ("a.json", "{}", {}, ["list of objects"]),
        ("a.json", "[", {}, ["not JSON"]),
        ("a.csv", "prompt\n", {}, ["holds no prompt"]),
    ],
)
def test_bad_files(tmp_path, name, content, columns, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=r"a\.") as caught:
        load_prompts(str(path), None, columns)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no dataset file"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="--data-dir"):
        load_prompts("gsm8k", tmp_path)
    with pytest.raises(ValueError, match="--data-dir"):
        load_prompts("spec-bench", None)


def test_parquet_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets isn't installed")
    path = tmp_path / "p.parquet"
    datasets.Dataset.from_list([{"q": "Why?"}, {"q": "How?"}]).to_parquet(str(path))
    found = load_prompts(str(path), None, {"prompt": "q"})
    assert [prompt.turns for prompt in found] == [("Why?",), ("How?",)]
    assert found[0].dataset == "p"


def test_a_hub_id_goes_to_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets isn't installed")
    asked = []

    def load(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return iter([{"question": "Why?"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_prompts("owner/set:main@train", None, {"prompt": "question"})[0].turns == ("Why?",)
    load_prompts("owner/set", None, {"prompt": "question"})
    assert asked == [("owner/set", "main", "train", True), ("owner/set", None, "test", True)]

    def fail(*args, **kwargs):
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="'owner/set' can't be loaded: no network"):
        load_prompts("owner/set")


@pytest.mark.skipif(not PROMPT_FOLDER.is_dir(), reason=f"no prompts in {PROMPT_FOLDER}")
@pytest.mark.parametrize("name", ["mt_bench", "gsm8k", "humaneval", "alpaca"])
def test_the_named_sets(name):
    prompts = load_prompts(name, PROMPT_FOLDER)
    assert len(prompts) == 80
    assert len({prompt.digest for prompt in prompts}) > 70
    assert {len(prompt.turns) for prompt in prompts} == ({2} if name == "mt_bench" else {1})


def test_a_limit_takes_from_all_categories():
    prompts = [Prompt("d", i, str(i), "ab"[i // 5], ("x",)) for i in range(10)]
    assert [prompt.index for prompt in pick(prompts, 4)] == [0, 1, 5, 6]
    assert [prompt.index for prompt in pick(prompts, 1)] == [0]
    assert pick(prompts, 10) == pick(prompts, 99) == pick(prompts, None) == prompts


def test_a_digest_is_of_the_text():
    a, b = Prompt("d", 0, "0", "", ("x", "y")), Prompt("e", 3, "9", "c", ("x", "y"))
    assert a.digest == b.digest
    assert a.digest != Prompt("d", 0, "0", "", ("xy",)).digest


class _Config:
    num_hidden_layers = 6
    num_assistant_tokens = 3

    def get_text_config(self):
        return self


class _Model:
    config = generation_config = _Config()


def test_methods_become_keywords():
    models = Models(_Model(), _Model(), _Model(), _Model(), packed=True)
    specs = ["packed", "prompt-lookup", "assisted:7", "early-exit", "chain", "chain:2", "static:2,1", "tree:3:2:5"]
    made = {method.name: method for method in make_methods(specs, models)}
    assert next(iter(made)) == "plain"
    assert made["plain"].model is models.plain
    assert made["plain, packed"].model is models.target
    assert made["prompt lookup 10"].options == {"prompt_lookup_num_tokens": 10}
    assert made["assisted 7"].options == {"assistant_model": models.assistant}
    assert made["assisted 7"].assistant_settings["num_assistant_tokens"] == 7
    assert made["early exit 2"].options == {"assistant_early_exit": 2}
    assert made["chain 3"].options["num_assistant_tokens"] == 3
    assert (made["chain 2"].family, made["chain 2"].depth) == ("chain", 2)
    assert made["static 2,1"].options["tree_paths"] == [(0,), (1,), (0, 0), (1, 0)]
    tree = made["tree 3:2:5"]
    assert tree.options["assistant_model"] is models.draft
    assert (tree.options["num_assistant_tokens"], tree.options["tree_top_k"], tree.options["tree_total_tokens"]) == (
        3, 2, 5,
    )  # fmt: skip
    assert {name for name, method in made.items() if method.max_batch == 1} == {
        "prompt lookup 10", "assisted 7", "early exit 2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("magic", ["'magic'", "prompt-lookup"]),
        ("chain:0", ["chain", "'0'"]),
        ("tree:3:4", ["'3:4'"]),
        ("static:2,x", ["static", "'x'"]),
        ("prompt-lookup:many", ["'many'"]),
        ("assisted", ["--assistant"]),
        ("early-exit:6", ["layers", "6"]),
        ("packed", ["float32"]),
        ("plain:3", ["plain", "'3'"]),
        ("packed:3", ["packed", "'3'"]),
        ("chain:", ["'chain:'", "colon"]),
    ],
)
def test_bad_methods(spec, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are what matters
        make_methods([spec], Models(_Model(), _Model(), _Model()))
    assert all(word in str(caught.value) for word in words), caught.value


def test_ours_need_a_draft():
    with pytest.raises(ValueError, match="--draft"):
        make_methods(["tree"], Models(_Model(), _Model()))


def test_a_plugin_of_a_few_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    path = tmp_path / "mine.py"
    path.write_text(
        "from eagle3_hf.evaluation.methods import Method, register\n\n\n"
        '@register("mine", "mine[:N]: a test")\n'
        "def mine(models, argument):\n"
        '    return Method(f"mine {argument}", models.target, {"prompt_lookup_num_tokens": int(argument or 3)})\n'
    )
    load_plugin(path)
    assert make_methods(["mine:5"], Models(_Model(), _Model()))[1].options == {"prompt_lookup_num_tokens": 5}
    assert "mine[:N]: a test" in methods.descriptions()
    with pytest.raises(ValueError, match="no plug-in file"):
        load_plugin(tmp_path / "none.py")
    path.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"mine\.py: ZeroDivisionError"):
        load_plugin(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise TypeError('no way')", ["'mine'", "TypeError", "no way"]),
        ("return None", ["'mine'", "must return a Method", "None"]),
        ("return Method('chain 2', models.target, {'num_assistant_tokens': 5})", ["'mine'", "'chain 2'"]),
    ],
)
def test_a_plugin_that_goes_wrong_is_named(tmp_path, monkeypatch, body, words):
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    path = tmp_path / "p.py"
    path.write_text(
        "from eagle3_hf.evaluation.methods import Method, register\n\n\n"
        f'@register("mine", "mine: a test")\ndef mine(models, argument):\n    {body}\n'
    )
    load_plugin(path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are what matters
        make_methods(["chain:2", "mine"], Models(_Model(), _Model(), _Model()))
    assert all(word in str(caught.value) for word in words), caught.value


def test_facts_name_models_instead_of_holding_them():
    models = Models(_Model(), _Model(), _Model(), _Model())
    facts = [method.facts(models) for method in make_methods(["static:2", "assisted:7"], models)]
    assert json.loads(json.dumps(facts)) == facts
    assert facts[0]["options"] == {"model": "plain"}
    assert facts[1]["options"] == {"model": "target", "assistant_model": "draft", "tree_paths": [[0], [1]]}
    assert facts[2]["options"]["assistant_model"] == "assistant"
    assert facts[2]["options"]["num_assistant_tokens"] == 7
    other = Method("x", models.target, {"logits_processor": [object()]}).facts(models)
    assert other["options"]["logits_processor"] == ["object"]  # not its address, another in each run


def test_register_keeps_names_apart(monkeypatch):
    monkeypatch.setattr(methods, "_REGISTRY", {})
    register("plain", "plain")(lambda models, argument: Method("plain", models.plain))
    register("x", "x")(lambda models, argument: Method("same", models.plain))
    names = [method.name for method in make_methods(["x", "x:2", "x"], Models(_Model(), _Model()))]
    assert names == ["plain", "same"]
