"""Answers of the target: the many-stream decoder, the store, interruptions, servers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from support import FAMILIES, make_target
from training_support import CHATML, THINKING, chat, save_target, tiny_model, tiny_tokenizer

from eagle3_hf.cli import build_app
from eagle3_hf.training.data import JOURNAL, Conversation, read_conversations
from eagle3_hf.training.documents import tokenise
from eagle3_hf.training.masks import AssistantMasks, runs_of
from eagle3_hf.training.regenerate import (
    AnswerStore,
    LocalAnswers,
    ServerAnswers,
    TemperatureMix,
    dialogues_of,
    regenerate,
)
from eagle3_hf.training.regenerate.streams import Job, Streams

GREEDY = TemperatureMix({0.0: 1})
STOP = {2}


def plain(model, ids, count, stop=STOP):
    """Greedy answer by transformers' own generate()."""
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=count, eos_token_id=sorted(stop) or None, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def drain(streams, jobs):
    """Run jobs to their end, admitting as rows get free."""
    answers, jobs = {}, list(jobs)
    while jobs or streams.active:
        room = len(streams.free)
        if jobs and room:
            streams.admit(jobs[:room])
            jobs = jobs[room:]
        for job, answer in streams.step():
            answers[job.owner] = answer
    return answers


# --- decoder ---


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_greedy_generation(family):
    model = make_target(family)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 16, (n,), generator=generator).tolist() for n in (1, 2, 9, 4, 12, 3, 7)]
    budgets = [9, 20, 5, 1, 14, 20, 3]
    streams = Streams(model, 3, 40, {2}, prefill_tokens=16)
    answers = drain(streams, [Job(ids, b, 0.0, i) for i, (ids, b) in enumerate(zip(prompts, budgets))])
    assert answers == {i: plain(model, ids, b) for i, (ids, b) in enumerate(zip(prompts, budgets))}


def test_shrunk_streams_go_on_with_the_same_rows():
    model = tiny_model()
    prompts = [[5 + i, 9, 30 + i] for i in range(4)]
    streams = Streams(model, 4, 40, set())
    streams.admit([Job(ids, b, 0.0, i) for i, (ids, b) in enumerate(zip(prompts, (2, 12, 3, 12)))])
    answers = {}
    while streams.active:
        for job, answer in streams.step():
            answers[job.owner] = answer
        if 0 < streams.active < len(streams.jobs):
            streams.shrink()
            assert len(streams.jobs) == streams.active == len(streams.cache.lengths)
    assert answers == {i: plain(model, ids, b, set()) for i, (ids, b) in enumerate(zip(prompts, (2, 12, 3, 12)))}


def test_each_row_has_its_own_temperature():
    model = tiny_model()
    ids = [5, 9, 30]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    streams = Streams(model, 400, 8, set(), torch.Generator().manual_seed(0))
    temperatures = {0.0: 0, 0.5: 0, 2.0: 0}
    counts = {t: torch.zeros(len(logits)) for t in temperatures}
    for _ in range(3):
        streams.admit([Job(ids, 1, t, t) for t in [0.0] * 40 + [0.5] * 180 + [2.0] * 180])
        for job, (token,) in streams.step():
            counts[job.owner][token] += 1
    assert counts[0.0].nonzero().tolist() == [[int(logits.argmax())]]
    for temperature in (0.5, 2.0):
        expected = (logits / temperature).softmax(-1)
        found = counts[temperature] / counts[temperature].sum()
        other = (logits / (2.5 - temperature)).softmax(-1)
        own, wrong = ((found - p).abs().sum() / 2 for p in (expected, other))
        # Total variation of 540 draws from themselves is about sqrt(effective tokens / 540) / 2.
        assert own < wrong
        top = expected.argmax()
        assert abs(found[top] - expected[top]) < 4 * (expected[top] * (1 - expected[top]) / 540) ** 0.5


def test_bad_jobs_are_refused():
    streams = Streams(tiny_model(), 2, 20, STOP)
    with pytest.raises(ValueError, match="3 jobs for 2 free rows"):
        streams.admit([Job([5], 1, 0.0)] * 3)
    with pytest.raises(ValueError, match="a prompt of 20 tokens"):
        streams.admit([Job([5] * 20, 1, 0.0)])
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        streams.admit([Job([], 1, 0.0)])
    with pytest.raises(ValueError, match="the model has 256 positions"):
        Streams(tiny_model(), 2, 257, STOP)


# --- dialogues ---


def test_temperatures_are_dealt_by_their_shares():
    mix = TemperatureMix.parse(["0:0.6", "0.7:0.4"], seed=3)
    drawn = [mix.of(f"key {i}") for i in range(4000)]
    assert set(drawn) == {0.0, 0.7}
    assert abs(drawn.count(0.0) / 4000 - 0.6) < 0.03
    assert drawn == [mix.of(f"key {i}") for i in range(4000)]
    assert drawn != [TemperatureMix.parse(["0:0.6", "0.7:0.4"], seed=4).of(f"key {i}") for i in range(4000)]
    for bad in (["warm"], ["-1"], ["0.5:0"], ["0.5:-1", "1:2"]):
        with pytest.raises(ValueError, match="temperature"):
            TemperatureMix.parse(bad)


def test_dialogues_leave_out_answers_repeats_and_done():
    conversations = [
        Conversation(0, ({"role": "system", "content": "s"}, *chat("a", "old", "b", "old"))),
        Conversation(1, tuple(chat("c"))),
        Conversation(2, tuple(chat("c", "old"))),
    ]
    first, second = dialogues_of(conversations, GREEDY)
    assert first.pending == [[{"role": "system", "content": "s"}, *chat("a")], chat("b")]
    assert second.pending == [chat("c")]
    assert [d.key for d in dialogues_of(conversations, GREEDY, done={first.key})] == [second.key]
    assert len(list(dialogues_of(conversations, GREEDY, samples=3))) == 6
    parts = [[d.key for d in dialogues_of(conversations, GREEDY, part=(i, 2))] for i in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted([first.key, second.key])
    tool = Conversation(3, (*chat("a"), {"role": "tool", "content": "1"}))
    with pytest.raises(ValueError, match="row 4 has tool messages"):
        list(dialogues_of([tool], GREEDY))
    assert list(dialogues_of([tool], GREEDY, skip_bad=True)) == []


# --- with a model ---


def local(template=CHATML, model=None, **options):
    values = {"streams": 4, "max_prompt": 120, "max_new": 12} | options
    return LocalAnswers(model or tiny_model(), tiny_tokenizer(template), STOP, **values)


def records_of(folder) -> dict[str, list[dict]]:
    import pyarrow.parquet as parquet

    found: dict[str, list[dict]] = {}
    for path in sorted(Path(folder).glob("answers-*.parquet")):
        for row in parquet.read_table(path).to_pylist():
            found.setdefault(row["key"], []).append(row)
    return found


PROMPTS = [Conversation(i, tuple(chat(f"what is {i}"))) for i in range(23)]


def test_answers_are_those_of_generate(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with AnswerStore(tmp_path, {}, shard_rows=5) as store:
        done = regenerate(dialogues_of(PROMPTS, GREEDY), local(model=model), store)
    found = records_of(tmp_path)
    assert done.dialogues == len(found) == 23
    assert len(list(tmp_path.glob("*.parquet"))) == 5
    assert not (tmp_path / JOURNAL).exists()
    for conversation in PROMPTS:
        (row,) = found[f"{conversation.key}-0"]
        text = tokenizer.apply_chat_template(list(conversation.messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        answer = plain(model, ids, 12)
        assert row["input_ids"] == ids + answer
        assert row["loss_mask"] == [False] * len(ids) + [True] * len(answer)
        assert row["finish"] == ("stop" if answer[-1] == 2 else "length")
        assert row["messages"][-1]["content"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert done.tokens == sum(sum(row["loss_mask"]) for rows in found.values() for row in rows)


def ending_model():
    """A model that soon ends its answers: the head's row of the stop token is made likely."""
    model = tiny_model(seed=1)
    with torch.no_grad():
        hidden = model.model(torch.tensor([[5, 9, 30]])).last_hidden_state[0].mean(0)
        model.lm_head.weight[2] += 0.8 * hidden
    return model


def several_turns(template, tmp_path):
    conversation = Conversation(0, tuple(chat("a", "old", "b", "old", "c")))
    answers = local(template, ending_model(), max_new=60, max_prompt=180)
    with AnswerStore(tmp_path, {}) as store:
        regenerate(dialogues_of([conversation], GREEDY), answers, store)
    ((key, rows),) = records_of(tmp_path).items()
    return key, rows


def test_every_turn_is_answered_on_the_own_answers(tmp_path):
    _, (row,) = several_turns(CHATML, tmp_path)
    model, tokenizer = ending_model(), tiny_tokenizer()
    assert row["finish"] == "stop", "the test needs answers that end"
    runs = runs_of(row["loss_mask"])
    assert len(runs) == 3
    for begin, end in runs:
        # Each answer is what greedy generation gives after exactly the tokens before it.
        assert row["input_ids"][begin:end] == plain(model, row["input_ids"][:begin], 60)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 3
    between = tokenizer.decode(row["input_ids"][runs[0][1] : runs[1][0]])
    assert between == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    # No word of the old answers.
    assert "old" not in tokenizer.decode(row["input_ids"])


def test_template_that_rewrites_turns_gives_a_row_for_each(tmp_path):
    template = THINKING.replace("m['content'].split('</think>')[-1]", "'...'")
    key, rows = several_turns(template, tmp_path)
    assert len(rows) == 3
    assert {row["key"] for row in rows} == {key}
    for number, row in enumerate(rows):
        ((begin, end),) = runs_of(row["loss_mask"])
        assert end == len(row["input_ids"])
        assert row["input_ids"][begin:] == plain(ending_model(), row["input_ids"][:begin], 60)
        assert len(row["messages"]) == 2 * (number + 1)


def test_long_prompts_are_left_out_and_counted(tmp_path, caplog):
    conversations = [PROMPTS[0], Conversation(9, tuple(chat("what " * 60)))]
    seen = []
    with AnswerStore(tmp_path, {}) as store:
        regenerate(dialogues_of(conversations, GREEDY), local(), store, progress=lambda p: seen.append(p.dialogues))
    assert len(records_of(tmp_path)) == 1
    assert "1 prompts of more than 120 tokens left out" in caplog.text
    assert seen[-1] == 2


def test_max_tokens_stops_the_run(tmp_path):
    with AnswerStore(tmp_path, {}) as store:
        regenerate(dialogues_of(PROMPTS, GREEDY), local(), store, max_tokens=30)
        assert 30 <= store.answer_tokens < 30 + 4 * 12
        assert len(store.done) < 23


def test_answers_are_read_back_with_their_exact_tokens(tmp_path):
    with AnswerStore(tmp_path, {}, shard_rows=7) as store:
        regenerate(dialogues_of(PROMPTS, TemperatureMix({0.0: 1, 1.0: 1})), local(), store)
    documents = list(tokenise(read_conversations(str(tmp_path)), None, vocab_size=328))
    rows = [row for rows in records_of(tmp_path).values() for row in rows]
    assert sorted(d.input_ids.tolist() for d in documents) == sorted(row["input_ids"] for row in rows)
    assert {d.temperature for d in documents} == {0.0, 1.0}
    assert len({d.group for d in documents}) == 23


# --- the store ---


def record(key, n=3):
    return {
        "key": key, "messages": [{"role": "user", "content": "ü"}], "input_ids": [1] * n, "loss_mask": [True] * n,
        "temperature": 0.5, "finish": "stop",
    }  # fmt: skip


def test_killed_after_some_answers_loses_none(tmp_path):
    store = AnswerStore(tmp_path, {}, shard_rows=4)
    for i in range(6):
        store.add([record(f"k{i}"), record(f"k{i}")])
    store._lock.close()  # as a killed process: no shard for the rest
    assert len(records_of(tmp_path)) == 6 or (tmp_path / JOURNAL).stat().st_size
    with AnswerStore(tmp_path, {}, shard_rows=4) as again:
        assert again.done == {f"k{i}" for i in range(6)}
        assert again.answer_tokens == 36
    found = records_of(tmp_path)
    assert {key: len(rows) for key, rows in found.items()} == {f"k{i}": 2 for i in range(6)}


def test_killed_between_shard_and_journal_doubles_none(tmp_path, monkeypatch):
    store = AnswerStore(tmp_path, {}, shard_rows=100)
    for i in range(3):
        store.add([record(f"k{i}")])
    journal = (tmp_path / JOURNAL).read_bytes()
    store.close()
    (tmp_path / JOURNAL).write_bytes(journal)
    with AnswerStore(tmp_path, {}) as again:
        assert len(again.done) == again.rows == 3
    assert [len(rows) for rows in records_of(tmp_path).values()] == [1, 1, 1]


def test_killed_while_writing_keeps_what_is_whole(tmp_path, caplog):
    caplog.set_level("INFO")
    store = AnswerStore(tmp_path, {})
    for i in range(3):
        store.add([record(f"k{i}")])
    store._lock.close()
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-5])
    (tmp_path / "answers-00000.parquet.tmp").write_bytes(b"half a shard")
    with AnswerStore(tmp_path, {}) as again:
        assert again.done == {"k0", "k1"}
        again.add([record("k2")])
    assert sorted(records_of(tmp_path)) == ["k0", "k1", "k2"]
    assert "is asked again" in caplog.text


def test_store_refuses_other_settings_and_a_second_process(tmp_path):
    with AnswerStore(tmp_path, {"target": "a"}), pytest.raises(ValueError, match="another process"):
        AnswerStore(tmp_path, {"target": "a"})
    # Nothing was answered yet: another target may use the folder.
    with AnswerStore(tmp_path, {"target": "b"}) as store:
        store.add([record("k")])
    with pytest.raises(ValueError, match="target: 'b' before, 'a' now"):
        AnswerStore(tmp_path, {"target": "a"})
    with AnswerStore(tmp_path, {"target": "b"}) as store:
        assert store.done == {"k"}


# --- interruption ---


def test_stop_and_resume_give_what_one_run_gives(tmp_path):
    with AnswerStore(tmp_path / "one", {}) as store:
        regenerate(dialogues_of(PROMPTS, GREEDY), local(), store)
    calls = 0
    for _ in range(20):
        with AnswerStore(tmp_path / "many", {}, shard_rows=3) as store:
            begun = len(store.done)

            def stop(begun=begun):
                return len(store.done) >= begun + 3

            dialogues = dialogues_of(PROMPTS, GREEDY, done=set(store.done))
            regenerate(dialogues, local(), store, stop=stop)
            calls += 1
            if len(store.done) == 23:
                break
    assert calls > 3
    one, many = records_of(tmp_path / "one"), records_of(tmp_path / "many")
    assert one == many


WORKER = """
    import sys, torch
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    from eagle3_hf.cli import build_app
    build_app()({arguments!r})
"""


def start(arguments):
    code = textwrap.dedent(WORKER).format(tests=str(Path(__file__).parent), arguments=arguments)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def wait_for_answers(folder, count, process):
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        journal = folder / JOURNAL
        if journal.is_file() and journal.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} answers in time: {process.stderr.read()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_lose_no_answer(tmp_path, number):
    target = save_target(tmp_path / "target", eos_token_id=1)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"what is {i}"}) + "\n" for i in range(400)))
    out = tmp_path / "out"
    arguments = ["regenerate", "--data", str(data), "--out", str(out), "--target", target, "--streams", "4",
                 "--max-new-tokens", "40", "--max-prompt", "100", "--temperature", "0",
                 "--dtype", "float32"]  # fmt: skip
    process = start(arguments)
    wait_for_answers(out, 6, process)
    process.send_signal(number)
    error = process.communicate(timeout=300)[1]
    journal = out / JOURNAL
    if number == signal.SIGKILL:
        assert process.returncode == -number
        kept = journal.read_bytes().count(b"\n")
    else:
        assert process.returncode == 128 + number, error
        assert "the same command goes on from here" in error
        assert not journal.exists()
        kept = len(records_of(out))
    assert 6 <= kept < 400
    limited = [*arguments, "--max-tokens", str(40 * (kept + 8))]
    assert start(limited).wait(timeout=300) == 0
    found = records_of(out)
    assert len(found) >= kept + 4
    assert all(len(rows) == 1 for rows in found.values())


# --- a server ---


class Stub(BaseHTTPRequestHandler):
    """Answers `echo N`, after what `faults` says; remembers the requests."""

    faults: list = []
    asked: list = []
    delay = 0.0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append((self.path, dict(self.headers), body))
        time.sleep(self.delay)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            self.send_response(fault)
            self.end_headers()
            self.wfile.write(b'{"error": "not now"}')
            return
        message = {"role": "assistant", "content": f"echo {body['messages'][-1]['content']}", "reasoning_content": "hm"}
        made = fault or {"choices": [{"message": message, "finish_reason": "stop"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(made).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    kind = type("Here", (Stub,), {"faults": [], "asked": []})
    made = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/v1", kind
    made.shutdown()
    made.server_close()


def test_server_answers_every_turn(tmp_path, server):
    url, stub = server
    conversations = [Conversation(0, tuple(chat("a", "old", "b"))), *PROMPTS[:4]]
    answers = ServerAnswers(url, "big", api_key="k", concurrency=2, max_new=7, extra={"top_p": 0.9})
    with AnswerStore(tmp_path, {}) as store:
        regenerate(dialogues_of(conversations, TemperatureMix({0.3: 1})), answers, store)
    rows = records_of(tmp_path)[f"{conversations[0].key}-0"]
    contents = [m["content"] for m in rows[0]["messages"]]
    assert contents == ["a", "echo a", "b", "echo b"]
    assert rows[0]["messages"][1]["reasoning_content"] == "hm"
    assert rows[0]["input_ids"] is None
    assert len(records_of(tmp_path)) == 5
    path, headers, body = stub.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_p"]) == ("big", 0.3, 7, 0.9)
    # The texts become documents by the chat template.
    masks = AssistantMasks(tiny_tokenizer())
    documents = list(tokenise(read_conversations(str(tmp_path)), masks, vocab_size=328))
    assert len(documents) == 5
    assert all(d.temperature == pytest.approx(0.3) for d in documents)


def test_busy_server_is_asked_again(tmp_path, server):
    url, stub = server
    stub.faults = [503, 429, {"choices": "odd"}]
    answers = ServerAnswers(url, "big", concurrency=1)
    answers.first_wait = 0.01
    with AnswerStore(tmp_path, {}) as store:
        with pytest.raises(ValueError, match="answered no chat completion"):
            regenerate(dialogues_of(PROMPTS[:3], GREEDY), answers, store)
        regenerate(dialogues_of(PROMPTS[:3], GREEDY, done=set(store.done)), answers, store)
    assert len(records_of(tmp_path)) == 3
    assert len(stub.asked) == 2 + 1 + 3


def test_refusing_server_ends_the_run_and_keeps_the_others(tmp_path, server):
    url, stub = server
    stub.faults = [None, None, 400]
    with AnswerStore(tmp_path, {}) as store:
        with pytest.raises(ValueError, match=r'answered 400: \{"error": "not now"\}'):
            regenerate(dialogues_of(PROMPTS, GREEDY), ServerAnswers(url, "big", concurrency=3), store)
        assert len(store.done) >= 2
    answers = ServerAnswers("http://127.0.0.1:9", "big", retries=1)
    answers.first_wait = 0.01
    with AnswerStore(tmp_path / "b", {}) as store, pytest.raises(OSError, match=r"127.0.0.1:9.*\(2 tries\)"):
        regenerate(dialogues_of(PROMPTS, GREEDY), answers, store)
    with pytest.raises(ValueError, match="an address like http"):
        ServerAnswers("host:8000", "big")


def test_stop_keeps_requests_under_way(tmp_path, server):
    url, stub = server
    stub.delay = 0.3
    with AnswerStore(tmp_path, {}) as store:
        answers = ServerAnswers(url, "big", concurrency=4)
        regenerate(dialogues_of(PROMPTS, GREEDY), answers, store, stop=lambda: len(stub.asked) >= 4)
        assert len(store.done) == len(stub.asked)
        assert 4 <= len(store.done) < 23


# --- the command ---


@pytest.fixture
def invoke():
    from typer.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(build_app(), [str(a) for a in arguments])


def test_command_answers_and_goes_on(tmp_path, invoke):
    target = save_target(tmp_path / "target")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"what is {i}"}) + "\n" for i in range(5)))
    common = ["regenerate", "--data", data, "--out", tmp_path / "out", "--target", target, "--max-new-tokens", 5,
              "--max-prompt", 60, "--streams", 2, "--dtype", "float32"]  # fmt: skip
    first = invoke(*common, "--limit", 3)
    assert first.exit_code == 0, first.output
    assert "3 answered prompts" in first.output
    second = invoke(*common)
    assert "5 answered prompts" in second.output
    assert "2 of them in this run" in second.output
    other = invoke(*common, "--seed", 1)
    assert other.exit_code == 2
    assert "begun with other settings (seed: 0 before, 1 now)" in other.output


def test_command_with_a_server(tmp_path, invoke, server, monkeypatch):
    url, stub = server
    monkeypatch.setenv("MY_KEY", "secret")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hi"}\n')
    done = invoke("regenerate", "--data", data, "--out", tmp_path / "out", "--target", "big", "--server", url,
                  "--api-key-env", "MY_KEY", "--server-body", '{"top_p": 0.5}')  # fmt: skip
    assert done.exit_code == 0, done.output
    assert stub.asked[0][1]["Authorization"] == "Bearer secret"
    assert stub.asked[0][2]["top_p"] == 0.5
    assert "secret" not in (tmp_path / "out" / "regenerate.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "hot"], "a temperature is T or T:WEIGHT"),
        (["--part", "2/2"], "a part is I/N"),
        (["--column", "prompt"], "a column is FIELD=COLUMN"),
        (["--template", "{"], "--template isn't JSON"),
        (["--server-body", "[]"], "--server-body must be a JSON object"),
        (["--max-new-tokens", "300"], "the model has 256 positions"),
        (["--data", "nowhere.jsonl"], "no file or folder at 'nowhere.jsonl'"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(tmp_path, invoke, arguments, message):
    target = save_target(tmp_path / "target")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hi"}\n')
    done = invoke("regenerate", "--data", data, "--out", tmp_path / "out", "--target", target, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output
