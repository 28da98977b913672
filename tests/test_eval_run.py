"""The harness on tiny models: what each method did, resuming, batches, conversations, and wrong input."""

import copy
import zlib
from dataclasses import replace

import pytest
import torch
from eval_models import POSITIONS, save_models
from support import oracle, texts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel
from eagle3_hf.cli.common import thread_count
from eagle3_hf.evaluation import harness as harness_module
from eagle3_hf.evaluation import metrics
from eagle3_hf.evaluation.harness import Harness, Task
from eagle3_hf.evaluation.html import kept_nodes
from eagle3_hf.evaluation.methods import Method, Models, make_methods
from eagle3_hf.evaluation.prompts import Prompt
from eagle3_hf.evaluation.recorder import record_call
from eagle3_hf.evaluation.results import ResultsWriter, read_results
from eagle3_hf.evaluation.summary import ALL, summarise

SPECS = ["packed", "prompt-lookup:3", "assisted:3", "early-exit:2", "chain:3", "static:2,1,1", "tree:3:2:5"]
GREEDY = {"do_sample": False, "max_new_tokens": 12}
TALK = Prompt("talk", 0, "t0", "chat", ("Hello?", "Again, aaaa"))
PLAIN = [Prompt("plain", i, str(i), "ab"[i % 2], (text,)) for i, text in enumerate(["One", "Twoo", "abababab"])]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with thread_count(1):  # two on a busy machine make tiny models ten times as slow
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(folders):
    target, draft, assistant = folders
    return Models(
        AutoModelForCausalLM.from_pretrained(target).eval(),
        AutoEagle3Target.from_pretrained(target).eval(),
        Eagle3DraftModel.from_pretrained(draft).eval(),
        AutoModelForCausalLM.from_pretrained(assistant).eval(),
        packed=True,
    )


@pytest.fixture(scope="module")
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders[0])


def _run(path, methods, tokenizer, datasets, task, limit=POSITIONS, stop_after=None, warm_up=False):
    seen = []

    def on_call(record):
        seen.append(record)
        if stop_after is not None and len([r for r in seen if r]) == stop_after:
            raise KeyboardInterrupt

    with ResultsWriter(path, {"temperature": 0.0}) as writer:
        harness = Harness(methods, tokenizer, datasets, writer, task, limit)
        writer.add_session({"environment": {}, "methods": [{"name": m.name} for m in methods]})
        harness.run(on_call, warm_up=warm_up)
        assert len(seen) == harness.total()
    return read_results(path), seen


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, models, tokenizer):
    path = tmp_path_factory.mktemp("full") / "r.jsonl"
    datasets = {"plain": PLAIN[:2], "talk": [TALK]}
    return _run(path, make_methods(SPECS, models), tokenizer, datasets, Task(GREEDY, traces=1), warm_up=True)[0]


def test_all_methods_give_the_tokens_of_plain_generation(full_run):
    assert len(full_run.records) == 8 * (2 + 2)
    for entries in summarise(full_run)["batches"]["1"]["datasets"].values():
        assert len(entries) == 8
        assert {entry["lossless"] for entry in entries.values()} == {1.0}


def test_blocks_hold_all_tokens_and_what_the_loop_counted(full_run):
    counted = 0
    for record in full_run.records:
        assert record["seconds"] > 0
        if record["blocks"] is None:
            assert record["method"] in {"plain", "plain, packed"}
            continue
        ids = record["rows"][0]["ids"]
        assert sum(block[0] for block in record["blocks"]) == len(ids)
        if record["stats"] is not None:
            counted += 1
            rounds = record["blocks"][1:]
            stats = record["stats"]
            assert (stats["rounds"], stats["generated"]) == (len(rounds), sum(block[0] for block in rounds))
            assert stats["drafted"] == sum(block[3] for block in rounds)
            assert stats["accepted"] == sum(block[1] for block in rounds)
    assert counted == 3 * 4  # chain, static and dynamic tree


def test_later_turns_have_the_answers_before_them(full_run, tokenizer):
    first, second = (
        next(r for r in full_run.records if r["dataset"] == "talk" and r["turn"] == turn and r["method"] == "plain")
        for turn in (0, 1)
    )
    answer = tokenizer.decode(first["rows"][0]["ids"], skip_special_tokens=True)
    text = f"<user>{TALK.turns[0]}<end><bot>{answer}<end><user>{TALK.turns[1]}<end><bot>"
    assert second["rows"][0]["prompt_tokens"] == len(tokenizer(text, add_special_tokens=False).input_ids)


def test_traces_show_the_answer(full_run, tokenizer):
    traced = [record for record in full_run.records if "trace" in record]
    assert len(traced) == 8 * 3  # the first prompt of each set, both turns of the talk
    for record in traced:
        ids, trace = record["rows"][0]["ids"], record["trace"]
        assert trace["pieces"] == [tokenizer.decode([token]) for token in ids]
        if record["stats"] is not None:
            assert len(trace["trees"]) == len(record["blocks"])
            for tree, block in zip(trace["trees"], record["blocks"]):
                assert (0 if tree is None else len(tree["ids"]) - 1) == block[3]
            assert trace["trees"][0] is None
            assert trace["trees"][1] is not None


@pytest.mark.parametrize("spec", ["chain:3", "static:2,1,1", "tree:3:2:5"])
def test_a_draft_that_knows_the_answer_is_recorded_as_such(models, tokenizer, spec):
    plain, method = make_methods([spec], models)
    inputs = dict(tokenizer("abcabcabc", return_tensors="pt"))
    expected = record_call(plain, inputs, GREEDY, 0)
    texts = texts_of(torch.tensor([inputs["input_ids"][0].tolist() + expected.rows[0]]), inputs)
    with oracle(texts, rate=1.0):
        call = record_call(method, inputs, GREEDY, 0)
    assert call.rows == expected.rows
    rounds = call.blocks[1:]
    assert metrics.acceptance_length(rounds) == call.stats.tau > 2.5
    start = 1
    for block, tree in zip(rounds, call.trees[1:]):
        drawn = {"ids": tree.tokens[0].tolist(), "parents": tree.parents[0].tolist()}
        accepted = call.rows[0][start : start + block.accepted]
        kept = kept_nodes(drawn, accepted)
        assert [drawn["ids"][node] for node in kept] == accepted
        start += len(block.tokens)


def test_an_assistant_that_is_the_target_has_all_accepted(models, tokenizer):
    same = replace(models, assistant=copy.deepcopy(models.plain))
    method = make_methods(["assisted:3"], same)[1]
    before = same.assistant.generation_config.to_dict()
    inputs = dict(tokenizer("abc", return_tensors="pt"))
    call = record_call(method, inputs, {"do_sample": False, "max_new_tokens": 12}, 0)
    # The prefill's forward verifies a draft already: 4 tokens, then two rounds of 4, and nothing is left.
    assert [(len(b.tokens), b.accepted, b.depth) for b in call.blocks] == [(4, 3, 3)] * 3
    assert same.assistant.generation_config.to_dict() == before


def test_prompt_lookup_counts_what_it_copied(models, tokenizer):
    plain, method = make_methods(["prompt-lookup:3"], models)
    inputs = dict(tokenizer("abc", return_tensors="pt"))
    continued = torch.cat((inputs["input_ids"], torch.tensor([record_call(plain, inputs, GREEDY, 0).rows[0]])), dim=1)
    # A text that repeats its own continuation: something is found and verified.
    again = torch.cat((continued, continued[:, :4]), dim=1)
    call = record_call(method, {"input_ids": again, "attention_mask": torch.ones_like(again)}, GREEDY, 0)
    assert max(block.depth for block in call.blocks) <= 3
    assert call.blocks[0].depth == 3
    assert sum(len(block.tokens) for block in call.blocks) == len(call.rows[0])


def _timeless(monkeypatch):
    """Times that depend on nothing but the call, so that whole tables can be compared."""

    def call(method, inputs, options, seed):
        made = record_call(method, inputs, options, seed)
        made.seconds = 1.0 + zlib.crc32(f"{method.name}{seed}".encode()) % 100 / 100
        if made.stats is not None:
            made.stats.prefill_seconds, made.stats.target_seconds = 0.1, 0.5
            made.stats.draft_seconds, made.stats.total_seconds = 0.2, 1.0
        return made

    monkeypatch.setattr(harness_module, "record_call", call)


def test_a_broken_run_goes_on_to_the_same_table(tmp_path, monkeypatch, models, tokenizer):
    _timeless(monkeypatch)
    methods = make_methods(["prompt-lookup:3", "chain:3"], models)
    datasets, task = {"plain": PLAIN[:2], "talk": [TALK]}, Task({"do_sample": True, "max_new_tokens": 8}, traces=1)
    whole, _ = _run(tmp_path / "whole.jsonl", methods, tokenizer, datasets, task)
    path = tmp_path / "broken.jsonl"
    with pytest.raises(KeyboardInterrupt):
        _run(path, methods, tokenizer, datasets, task, stop_after=5)
    path.write_bytes(path.read_bytes() + b'{"kind":"resu')
    resumed, seen = _run(path, methods, tokenizer, datasets, task)
    assert [record is None for record in seen] == [True] * 5 + [False] * 7
    tables = [summarise(results) for results in (whole, resumed)]
    assert [table.pop("sessions") for table in tables] == [1, 2]
    assert tables[0] == tables[1]
    again, seen = _run(path, methods, tokenizer, datasets, task)
    assert seen == [None] * 12
    assert again.records == resumed.records


def test_another_method_is_added_to_what_is_there(tmp_path, models, tokenizer):
    path, datasets = tmp_path / "r.jsonl", {"plain": PLAIN[:1]}
    _run(path, make_methods([], models), tokenizer, datasets, Task(GREEDY))
    results, seen = _run(path, make_methods(["chain:2"], models), tokenizer, datasets, Task(GREEDY))
    assert sorted(record is None for record in seen) == [False, True]
    assert list(summarise(results)["batches"]["1"]["datasets"]["plain"]) == ["plain", "chain 2"]


def test_the_same_text_twice_is_run_twice_and_a_changed_one_anew(tmp_path, models, tokenizer):
    path, methods = tmp_path / "r.jsonl", make_methods([], models)
    twice = [PLAIN[0], replace(PLAIN[0], index=1)]
    results, _ = _run(path, methods, tokenizer, {"plain": twice}, Task(GREEDY))
    assert [record["rows"][0]["index"] for record in results.records] == [0, 1]
    changed = [PLAIN[0], replace(PLAIN[1], index=1)]
    _, seen = _run(path, methods, tokenizer, {"plain": changed}, Task(GREEDY))
    assert [record is None for record in seen] == [True, False]


def test_methods_begin_in_turn(tmp_path, models, tokenizer):
    methods = make_methods(["chain:1"], models)
    results, _ = _run(tmp_path / "r.jsonl", methods, tokenizer, {"plain": PLAIN}, Task(GREEDY))
    order = [record["method"] for record in results.records]
    assert order == ["plain", "chain 1", "chain 1", "plain", "plain", "chain 1"]


def test_batches(tmp_path, models, tokenizer):
    methods = make_methods(["prompt-lookup:3", "chain:2"], models)
    with pytest.raises(ValueError, match="prompt lookup 3 takes 1 rows a call at most, the batches are of 2, 3"):
        Harness(methods, tokenizer, {"plain": PLAIN}, None, Task(GREEDY, batch_sizes=(2, 3)))
    datasets = {"plain": PLAIN, "talk": [TALK, replace(TALK, index=1, turns=("Only one",))]}
    results, _ = _run(tmp_path / "r.jsonl", methods, tokenizer, datasets, Task(GREEDY, batch_sizes=(1, 2)))
    tables = summarise(results)["batches"]
    assert list(tables["2"]["datasets"][ALL]) == ["plain", "chain 2"]  # transformers' own take one row
    assert list(tables["1"]["datasets"][ALL]) == ["plain", "prompt lookup 3", "chain 2"]
    for batch in ("1", "2"):
        found = tables[batch]["datasets"]["talk"]["chain 2"]
        assert (found["answers"], found["lossless"]) == (3, 1.0)
    both = tables["2"]["datasets"]["plain"]["chain 2"]
    assert (both["calls"], both["answers"]) == (2, 3)
    # One prefill a row, and a token comes from each.
    assert both["tokens_per_forward"] == both["tokens"] / (both["rounds"] + 3)
    second = [r for r in results.records if r["batch"] == 2 and r["dataset"] == "talk" and r["turn"] == 1]
    assert [len(record["rows"]) for record in second] == [1, 1]


def test_every_method_is_warmed_up_once_when_its_batch_size_comes(tmp_path, monkeypatch, models, tokenizer):
    calls = []

    def record(method, inputs, options, seed):
        calls.append((method.name, options["max_new_tokens"]))
        return record_call(method, inputs, options, seed)

    monkeypatch.setattr(harness_module, "record_call", record)
    methods = make_methods(["prompt-lookup:3"], models)
    task = Task({**GREEDY, "max_new_tokens": 20}, batch_sizes=(2, 1))
    _run(tmp_path / "r.jsonl", methods, tokenizer, {"plain": PLAIN[:2]}, task, warm_up=True)
    assert [call for call in calls if call[1] == 16] == [("plain", 16), ("prompt lookup 3", 16)]
    assert calls.index(("prompt lookup 3", 16)) < calls.index(("prompt lookup 3", 20))


def test_answers_end_with_eos(models, tokenizer):
    inputs = dict(tokenizer("abc", return_tensors="pt"))
    plain, chain = make_methods(["chain:3"], models)
    ids = record_call(plain, inputs, GREEDY, 0).rows[0]
    end = next(token for token in ids[3:] if token not in ids[:3])
    for model in (models.plain, models.target):
        model.generation_config.eos_token_id = [end]
    try:
        # Two rows, the second of another text: what pads the first behind its end isn't part of the answer.
        rows = torch.cat((inputs["input_ids"], inputs["input_ids"].roll(1)))
        both = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for method in (plain, chain):
            assert record_call(method, both, GREEDY, 0).rows[0] == ids[: ids.index(end) + 1]
    finally:
        for model in (models.plain, models.target):
            model.generation_config.eos_token_id = 0


def test_a_prompt_longer_than_the_model(tmp_path, models, tokenizer):
    long = Prompt("plain", 7, "77", "", ("x" * 600,))
    with pytest.raises(ValueError, match=rf"plain, prompt 77: 603 tokens and 12 new ones .* {POSITIONS} positions"):
        _run(tmp_path / "r.jsonl", make_methods([], models), tokenizer, {"plain": [PLAIN[0], long]}, Task(GREEDY))
    assert read_results(tmp_path / "r.jsonl").records == []  # said before anything was run


def test_a_later_turn_that_grew_too_long_is_skipped_and_told(tmp_path, models, tokenizer):
    talk = replace(TALK, turns=("a" * 200, "b" * 300, "c"))
    path, methods = tmp_path / "r.jsonl", make_methods(["chain:1"], models)
    results, seen = _run(path, methods, tokenizer, {"talk": [talk]}, Task(GREEDY))
    assert [record["kind"] for record in results.records] == ["result", "result", "skipped", "skipped"]
    assert seen[2:] == [None] * 4
    skipped = summarise(results)["skipped"]
    assert "512 positions" in skipped[0]
    assert skipped[1] == "an earlier turn was skipped"
    assert _run(path, methods, tokenizer, {"talk": [talk]}, Task(GREEDY))[0].records == results.records


def test_plain_generation_comes_first(models, tokenizer, tmp_path):
    with ResultsWriter(tmp_path / "r.jsonl", {}) as writer, pytest.raises(ValueError, match="plain generation"):
        Harness([Method("other", models.plain)], tokenizer, {}, writer, Task(GREEDY))
