"""Sources and forms of data, documents, packing, the draft vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from training_support import chat, tiny_tokenizer

from eagle3_hf.training.data import (
    Conversation,
    conversations_of,
    count_conversations,
    detect_form,
    parse_columns,
    read_conversations,
)
from eagle3_hf.training.documents import Document, TokenDataset, tokenise
from eagle3_hf.training.features import FeatureCollator
from eagle3_hf.training.masks import AssistantMasks, MaskError
from eagle3_hf.training.packing import layout, pack, visible
from eagle3_hf.training.plan import is_held_out, length_batches
from eagle3_hf.training.vocabulary import choose_vocabulary, count_tokens

ROWS = {
    "messages": {"messages": chat("hi", "yes")},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    "pair": {"prompt": "hi", "response": "yes"},
    "alpaca": {"instruction": "hi", "output": "yes", "input": ""},
    "trl": {"prompt": chat("hi"), "completion": [{"role": "assistant", "content": "yes"}]},
    "question": {"question": "hi", "answer": "yes"},
}


@pytest.mark.parametrize("form", ROWS)
def test_forms_are_recognised(form):
    (made,) = conversations_of([ROWS[form]], "here")
    assert list(made.messages) == chat("hi", "yes")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_are_read(tmp_path, kind, streaming):
    import datasets

    rows = [{"prompt": f"q{i}", "response": f"a{i}"} for i in range(5)]
    path = tmp_path / f"data.{kind}"
    made = datasets.Dataset.from_list(rows)
    if kind == "csv":
        made.to_csv(path)
    elif kind == "parquet":
        made.to_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(read_conversations(str(path), streaming=streaming, limit=4))
    assert [c.messages[0]["content"] for c in found] == ["q0", "q1", "q2", "q3"]
    assert count_conversations([str(path)], limit=None) == 5
    # A folder of such files is a source too.
    assert len(list(read_conversations(str(tmp_path), streaming=streaming))) == 5


def test_shuffle_is_a_permutation_of_its_seed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(20)))
    first, again, other = (
        [c.messages[0]["content"] for c in read_conversations(str(path), shuffle_seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other) == sorted(f"q{i}" for i in range(20))


def test_arrow_keys_of_other_messages_are_dropped():
    raw = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "assistant", "content": "yes", "x": 1}]
    (made,) = conversations_of([{"messages": raw}], "here")
    assert list(made.messages) == chat("hi", "yes")


def test_columns_of_the_user_win():
    row = {"prompt": "no", "ask": "hi", "reply": "yes", "rules": "be brief"}
    columns = parse_columns(["prompt=ask", "response=reply", "system=rules"])
    (made,) = conversations_of([row], "here", columns=columns)
    assert list(made.messages) == [{"role": "system", "content": "be brief"}, *chat("hi", "yes")]


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"text": "a", "label": 1}, None, r"no form recognised in its columns 'text', 'label'"),
        ({"text": "a"}, {"prompt": "ask"}, r"no column 'ask' for prompt; its columns: 'text'"),
        ({"text": "a"}, {"messages": "text"}, r"column 'text' holds no list of messages"),
    ],
)
def test_unknown_forms_name_the_columns(row, columns, message):
    with pytest.raises(ValueError, match=message):
        detect_form(row, columns)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown role 'wizard'"),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "starts with the assistant"),
        ({"messages": [{"role": "user", "content": None}]}, "has no content"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no user message"),
    ],
)
def test_bad_rows_are_named_or_counted(row, message, caplog):
    rows = [ROWS["messages"], row, ROWS["messages"]]
    with pytest.raises(ValueError, match=f"here, row 2: .*{message}"):
        list(conversations_of(rows, "here"))
    assert [c.index for c in conversations_of(rows, "here", skip_bad=True)] == [0, 2]
    assert "1 rows left out" in caplog.text
    assert message.split("'")[0] in caplog.text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./missing.jsonl", "no file or folder"),
        ("missing.parquet", "no file or folder"),
        ("", "no file or folder"),
    ],
)
def test_missing_sources_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        list(read_conversations(spec))


def test_broken_and_mixed_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": ')
    with pytest.raises(ValueError, match="can't be loaded"):
        list(read_conversations(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "b.csv").write_text("prompt\nhi\n")
    with pytest.raises(ValueError, match=r"\.csv, \.jsonl files mixed"):
        list(read_conversations(str(tmp_path)))
    (tmp_path / "c.txt").write_text("hi")
    with pytest.raises(ValueError, match=r"a \.txt file can't be read"):
        list(read_conversations(str(tmp_path / "c.txt")))
    (tmp_path / "d.csv").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"holds no conversation|can't be loaded"):
        list(read_conversations(str(tmp_path / "d.csv")))


def test_key_and_group_stand_for_the_questions_alone():
    one, two = (Conversation(i, tuple(chat("hi", answer))) for i, answer in enumerate(("yes", "no")))
    assert one.key == two.key
    assert one.group == two.group
    more = Conversation(0, tuple(chat("hi", "yes", "and?")))
    assert more.key != one.key
    assert more.group == one.group
    tokens = [Conversation(i, (), ([5, 6, 7, i], [False, False, True, True])) for i in range(2)]
    assert tokens[0].group == tokens[1].group != Conversation(0, (), ([5, 9, 7], [False, False, True])).group


def test_exact_tokens_of_a_row_are_used_as_they_are():
    rows = [{"ids": [3, 4, 5], "answer": [6, 7], "greedy": True}, {"ids": [3, 4], "answer": [8], "greedy": False}]
    first, second = tokenise(conversations_of(rows, "here"), None, vocab_size=16)
    assert first.input_ids.tolist() == [3, 4, 5, 6, 7]
    assert first.loss_mask.tolist() == [False, False, False, True, True]
    assert first.temperature == 0
    assert np.isnan(second.temperature)
    with pytest.raises(ValueError, match="tokens of another model"):
        list(tokenise(conversations_of(rows, "here"), None, vocab_size=8))
    texts = [{"prompt": "a", "response": "b"}]
    with pytest.raises(ValueError, match="no token ids"):
        list(tokenise(conversations_of(texts, "here"), None, vocab_size=8))


def test_documents_are_cut_and_empty_ones_left_out(caplog):
    masks = AssistantMasks(tiny_tokenizer())
    whole = masks(chat("hi", "the sky is blue"))[0]
    begin = whole.loss_mask.index(True)
    conversations = [Conversation(0, tuple(chat("hi", "the sky is blue")))]
    (cut,) = tokenise(conversations, masks, vocab_size=400, max_length=begin + 1)
    assert cut.input_ids.tolist() == whole.input_ids[: begin + 1]
    assert cut.loss_mask.sum() == 1
    assert "1 documents cut" in caplog.text
    with pytest.raises(ValueError, match="no document with an answer token"):
        list(tokenise(conversations, masks, vocab_size=400, max_length=begin))


def test_a_wrong_mask_names_its_row():
    masks = AssistantMasks(tiny_tokenizer())
    conversations = [Conversation(6, tuple(chat("hi")))]
    with pytest.raises(MaskError, match="row 7: no assistant message"):
        list(tokenise(conversations, masks, vocab_size=400))


def test_held_out_is_settled_by_the_group():
    rows = [
        Document(np.array([1, 2, 3 + i], np.int32), np.array([False, False, True]), group=i // 2) for i in range(400)
    ]
    dataset = TokenDataset(rows, held_out=0.2)
    assert sorted(dataset.train + dataset.held_out) == list(range(400))
    assert 40 < len(dataset.held_out) < 120
    assert all((i ^ 1) in dataset.held_out for i in dataset.held_out)
    more = TokenDataset(rows + rows[:3], held_out=0.2)
    assert len(more) == 400
    assert more.held_out == dataset.held_out
    assert TokenDataset(rows, held_out=0).held_out == []
    assert not is_held_out(5, 0.0)
    with pytest.raises(ValueError, match="held-out share"):
        TokenDataset(rows, held_out=1.0)


def test_length_batches_stay_below_the_budget():
    lengths = [5, 30, 7, 7, 2, 9]
    batches = length_batches(lengths, 21)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert all(len(b) * max(lengths[i] for i in b) <= 21 for b in batches if len(b) > 1)


# --- packing ---


def test_pack_fits_everything_once():
    lengths = [7, 3, 5, 5, 2, 8, 10, 1]
    rows = pack(lengths, range(len(lengths)), 10)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows)
    assert len(rows) == 5  # 41 tokens can't do with less
    with pytest.raises(ValueError, match="a document of 11 tokens"):
        pack([11], [0], 10)


def test_layout_counts_documents_and_positions():
    ids, positions = layout([[2, 3], [4]], width=6)
    assert ids.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, -1, -1]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]]
    seen = visible(ids)[0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_collator_packs_tokens_of_whole_documents():
    items = [{"input_ids": torch.arange(n) + 10 * n, "loss_mask": torch.arange(n) > 0} for n in (3, 5, 2)]
    batch = FeatureCollator(pack_length=8)(items)
    assert batch["input_ids"].tolist() == [[50, 51, 52, 53, 54, 30, 31, 32], [20, 21, 0, 0, 0, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, -1, -1, -1, -1, -1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, *[True] * 4, False, True, True], [False, True, *[False] * 6]]


# --- vocabulary ---


def test_vocabulary_counts_answer_tokens_only(caplog):
    caplog.set_level("INFO")
    ids = torch.tensor([9, 9, 9, 9, 3, 3, 3, 5, 5, 4])
    mask = torch.tensor([False] * 4 + [True] * 6)
    counts = count_tokens([(ids, mask), (ids.int(), mask)], 12)
    assert counts.tolist() == [0, 0, 0, 6, 2, 4, 0, 0, 0, 0, 0, 0]
    made = choose_vocabulary(counts, 2)
    assert made.ids.tolist() == [3, 5]
    assert made.coverage == pytest.approx(10 / 12)
    assert made.seen == 3
    assert "83.33 %" in caplog.text


def test_vocabulary_off_by_one_at_the_edges():
    # A mask shifted by one to either side counts other tokens: 9 begins the prompt, 4 ends the answer.
    ids, mask = torch.tensor([9, 7, 3, 4]), torch.tensor([False, False, True, True])
    assert choose_vocabulary(count_tokens([(ids, mask)], 12), 2).ids.tolist() == [3, 4]
    # One place is enough to drop the rarest.
    counts = torch.tensor([5, 4, 3, 2, 1])
    assert choose_vocabulary(counts, 4).ids.tolist() == [0, 1, 2, 3]
    assert choose_vocabulary(counts, 4, always=[4]).ids.tolist() == [0, 1, 2, 4]
    assert choose_vocabulary(counts, 5).coverage == 1.0
    # Equal counts: the lower id first, on every platform.
    assert choose_vocabulary(torch.tensor([1, 0, 1, 0, 1, 0]), 5).ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "always", "counts", "message"),
    [
        (7, [], [1] * 6, "at most the target's 6"),
        (2, [0, 1], [1] * 6, "more than the 2 tokens"),
        (3, [6], [1] * 6, r"\[6\] are outside"),
        (3, [], [0] * 6, "masks are empty"),
    ],
)
def test_vocabulary_refusals(size, always, counts, message):
    with pytest.raises(ValueError, match=message):
        choose_vocabulary(torch.tensor(counts), size, always)


def test_token_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="token id 12 is outside"):
        count_tokens([(torch.tensor([12]), torch.tensor([True]))], 12)
