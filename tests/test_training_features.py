"""Features: what the target saw, stored and read back, packed, online, interrupted."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FAMILIES, LAYERS, make_target
from training_support import CHATML, chat, save_target, tiny_model, tiny_tokenizer

from eagle3_hf.cli import build_app
from eagle3_hf.training.documents import Document, TokenDataset
from eagle3_hf.training.extract import (
    FeatureWriter,
    check_space,
    extract,
    parse_teacher,
    remaining,
    settings_of,
    stored_bytes,
)
from eagle3_hf.training.features import FeatureCollator, FeatureDataset
from eagle3_hf.training.online import OnlineFeatures
from eagle3_hf.training.packing import layout
from eagle3_hf.training.target_states import TargetTeacher, needed_positions

AUX = (1, 2, LAYERS)


def documents(count=12, vocab=16, seed=0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        prompt, answer = 2 + i % 5, 1 + (i * 3) % 7
        ids = torch.randint(3, vocab, (prompt + answer,), generator=generator).numpy().astype(np.int32)
        mask = np.arange(prompt + answer) >= prompt
        if i % 4 == 3:  # two turns: a prompt in the middle
            ids = np.concatenate([ids, ids[::-1]])
            mask = np.concatenate([mask, mask])
        made.append(Document(ids, mask, group=1000 + i, temperature=0.0 if i % 2 else 0.7))
    return made


def reference(model, ids, aux=AUX):
    """Layer inputs, final state and logits `[n, ...]` by transformers' own outputs, for a text alone."""
    seen = []
    norm = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
    hook = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        out = model(torch.from_numpy(ids).long()[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    layers = len(out.hidden_states) - 1
    states = [seen[0][0] if i == layers else out.hidden_states[i][0] for i in aux]
    return torch.cat(states, -1), out.hidden_states[-1][0], out.logits[0]


def batch_of(docs):
    width = max(map(len, docs))
    ids, mask = torch.zeros(len(docs), width, dtype=torch.long), torch.zeros(len(docs), width, dtype=torch.bool)
    for row, d in enumerate(docs):
        ids[row, : len(d)], mask[row, : len(d)] = torch.from_numpy(d.input_ids), torch.from_numpy(d.loss_mask)
    return ids, mask


# --- the target's states ---


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_model(family):
    model, docs = make_target(family), documents()
    states = TargetTeacher(model, AUX, "logits")(*batch_of(docs))
    rows = iter(states.logits)
    for row, document in enumerate(docs):
        aux, final, logits = reference(model, document.input_ids)
        n = len(document)
        torch.testing.assert_close(states.aux[row, :n], aux, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(states.hidden[row, :n], final, atol=1e-4, rtol=1e-3)
        for t in range(n):
            # The position before a learned token, and no other: one place off would fail here.
            learned = t + 1 < n and bool(document.loss_mask[t + 1])
            assert bool(states.needed[row, t]) == learned
            assert int(states.argmax[row, t]) == (int(logits[t].argmax()) if learned else -1)
            if learned:
                torch.testing.assert_close(next(rows), logits[t], atol=1e-4, rtol=1e-4)
        assert not states.needed[row, n:].any()
    assert next(rows, None) is None


def test_hidden_times_head_is_the_distribution():
    model, docs = make_target("llama"), documents()
    ids, mask = batch_of(docs)
    hidden = TargetTeacher(model, AUX)(ids, mask)
    logits = TargetTeacher(model, AUX, "logits")(ids, mask)
    torch.testing.assert_close(hidden.hidden[hidden.needed] @ model.lm_head.weight.T, logits.logits)
    assert hidden.logits is None


def test_top_k_are_log_probabilities_over_everything():
    model, docs = make_target("qwen3"), documents()
    ids, mask = batch_of(docs)
    top = TargetTeacher(model, AUX, "topk", 4)(ids, mask)
    every = TargetTeacher(model, AUX, "logits")(ids, mask).logits.log_softmax(-1)
    torch.testing.assert_close(top.top_logprobs, every.topk(4).values)
    torch.testing.assert_close(every.gather(1, top.top_ids), top.top_logprobs)
    assert (top.top_ids[:, 0] == top.argmax[top.needed]).all()


def test_changed_logits_are_noticed():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, initializer_range=0.5, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    docs = documents()
    with pytest.raises(ValueError, match=r"softcapping.*use teacher topk:K or logits"):
        TargetTeacher(model, AUX)(*batch_of(docs))
    states = TargetTeacher(model, AUX, "logits")(*batch_of(docs))
    _, _, logits = reference(model, docs[0].input_ids)
    count = int(docs[0].loss_mask[1:].sum())
    torch.testing.assert_close(
        states.logits[:count], logits[np.nonzero(docs[0].loss_mask)[0] - 1], atol=1e-4, rtol=1e-4
    )
    assert not model.lm_head._forward_pre_hooks


def test_nothing_to_learn_is_no_crash():
    docs = documents(2)
    ids, mask = batch_of(docs)
    states = TargetTeacher(make_target("llama"), AUX, "topk", 3)(ids, torch.zeros_like(mask))
    assert not states.needed.any()
    assert (states.argmax == -1).all()
    assert states.top_ids.shape == (0, 3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_packed_documents_see_only_themselves(family):
    model, docs = make_target(family), documents(9)
    sizes = [[len(d) for d in docs[:5]], [len(d) for d in docs[5:]]]
    ids, positions = layout(sizes)
    tokens, mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, part in enumerate((docs[:5], docs[5:])):
        tokens[row, : sum(sizes[row])] = torch.from_numpy(np.concatenate([d.input_ids for d in part]))
        mask[row, : sum(sizes[row])] = torch.from_numpy(np.concatenate([d.loss_mask for d in part]))
    states = TargetTeacher(model, AUX)(tokens, mask, ids, positions)
    for row, part in enumerate((docs[:5], docs[5:])):
        at = 0
        for document in part:
            aux, final, logits = reference(model, document.input_ids)
            end = at + len(document)
            torch.testing.assert_close(states.aux[row, at:end], aux, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(states.hidden[row, at:end], final, atol=1e-4, rtol=1e-3)
            assert states.argmax[row, end - 1] == -1, "the next document's first token isn't this one's next"
            learned = torch.from_numpy(document.loss_mask[1:])
            assert states.argmax[row, at : end - 1][learned].tolist() == logits[:-1].argmax(-1)[learned].tolist()
            at = end


def test_needed_positions_shift_by_exactly_one():
    mask = torch.tensor([[True, False, True, True, False, True]])
    assert needed_positions(mask).tolist() == [[False, True, True, False, True, False]]
    documents_ids = torch.tensor([[0, 0, 0, 1, 1, 2]])
    assert needed_positions(mask, documents_ids).tolist() == [[False, True, False, False, False, False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "all"}, "a teacher is one of hidden, topk, logits"),
        ({"kind": "topk"}, "needs 1..16 tokens"),
        ({"kind": "topk", "top_k": 17}, "needs 1..16 tokens"),
        ({"kind": "hidden", "top_k": 2}, "needs 1..16 tokens, others none"),
        ({"aux_layers": [9]}, r"aux layer ids \[9\] are outside 0..4"),
    ],
)
def test_teacher_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        TargetTeacher(make_target("llama"), **arguments)


# --- stored ---


def write(folder, docs, model=None, kind="hidden", top_k=0, dtype=torch.float32, **options):
    teacher = TargetTeacher(model or make_target("llama"), AUX, kind, top_k)
    with FeatureWriter(folder, settings_of(teacher, "tiny", dtype)) as writer:
        todo = remaining(docs, writer.present)
        done = extract(todo, teacher, writer, dtype=dtype, batch_tokens=40, **options)
    return done


def items_by_ids(dataset):
    return {tuple(dataset[i]["input_ids"].tolist()): dataset[i] for i in range(len(dataset))}


@pytest.mark.parametrize(("kind", "top_k"), [("hidden", 0), ("topk", 5), ("logits", 0)])
def test_stored_features_are_read_back(tmp_path, kind, top_k):
    model, docs = make_target("llama"), documents(20)
    done = write(tmp_path, docs, model, kind, top_k, shard_documents=7)
    assert done.documents == 20
    assert done.tokens == sum(map(len, docs))
    dataset = FeatureDataset(tmp_path, held_out=0.3)
    assert len(dataset) == 20
    assert dataset.aux_layers == list(AUX)
    assert (dataset.teacher, dataset.target) == (kind, "tiny")
    assert dataset.lengths == [len(d) for d in docs]
    assert dataset.greedy == [d.temperature == 0 for d in docs]
    for item, document in zip((dataset[i] for i in range(20)), docs):
        aux, final, logits = reference(model, document.input_ids)
        torch.testing.assert_close(item["features"], aux, atol=1e-4, rtol=1e-3)
        assert item["input_ids"].tolist() == document.input_ids.tolist()
        assert item["loss_mask"].tolist() == document.loss_mask.tolist()
        rows = logits[:-1][torch.from_numpy(document.loss_mask[1:])]
        if kind == "hidden":
            torch.testing.assert_close(item["teacher_hidden"], final, atol=1e-4, rtol=1e-3)
        elif kind == "logits":
            torch.testing.assert_close(item["teacher_logits"], rows, atol=1e-4, rtol=1e-4)
        else:
            expected = rows.log_softmax(-1).topk(5)
            torch.testing.assert_close(item["teacher_top_logprobs"], expected.values, atol=1e-4, rtol=1e-4)
    index = json.loads((tmp_path / "index.json").read_text())
    assert sum(s["documents"] for s in index["shards"]) == 20
    assert sum(s["answer_tokens"] for s in index["shards"]) == sum(int(d.loss_mask.sum()) for d in docs)
    assert index["settings"]["teacher"] == (f"topk:{top_k}" if top_k else kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "top_k"), [("hidden", 0), ("topk", 5), ("logits", 0)])
def test_size_estimate_is_the_size(tmp_path, dtype, kind, top_k):
    docs = documents(40)
    write(tmp_path, docs, None, kind, top_k, dtype, shard_documents=20)
    teacher = TargetTeacher(make_target("llama"), AUX, kind, top_k)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    headers = 2 * 1500
    assert 0 <= size - stored_bytes(docs, teacher, dtype) < headers


def test_too_small_a_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000_000})())
    assert check_space(tmp_path, 9_000_000) == 10_000_000
    with pytest.raises(ValueError, match=r"need 9.9 MB and 10 MB are free"):
        check_space(tmp_path, 9_900_000)


def test_float16_range_is_kept(tmp_path):
    model = make_target("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1e6
    write(tmp_path, documents(4), model, dtype=torch.float16)
    dataset = FeatureDataset(tmp_path)
    values = torch.cat([dataset[i]["features"] for i in range(4)])
    assert values.isfinite().all()
    assert values.abs().max() == torch.finfo(torch.float16).max


def test_repeated_documents_are_stored_once(tmp_path):
    docs = documents(6)
    write(tmp_path, docs + docs[:2])
    write(tmp_path, docs)
    assert len(FeatureDataset(tmp_path)) == 6
    assert len(list(tmp_path.glob("shard-*"))) == 1


def test_stop_and_resume_lose_and_double_nothing(tmp_path):
    docs = documents(30)
    write(tmp_path / "one", docs, shard_documents=8)
    for _ in range(40):
        calls = iter(range(1000))
        done = write(tmp_path / "many", docs, shard_documents=8, stop=lambda calls=calls: next(calls) >= 2)
        if not done.documents:
            break
    assert len(list((tmp_path / "many").glob("shard-*"))) > 4
    one, many = (items_by_ids(FeatureDataset(tmp_path / name)) for name in ("one", "many"))
    assert len(FeatureDataset(tmp_path / "many")) == 30
    assert one.keys() == many.keys()
    for key in one:
        for name in one[key]:
            torch.testing.assert_close(one[key][name], many[key][name], atol=1e-4, rtol=1e-3)


def test_killed_in_the_middle_of_a_shard(tmp_path):
    docs = documents(20)
    write(tmp_path, docs[:12], shard_documents=6)
    # Half a file that was being written, and a shard that the index doesn't know yet.
    (tmp_path / "shard-00002.tmp").write_bytes(b"half")
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"].pop()
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert len(FeatureDataset(tmp_path)) == 12
    done = write(tmp_path, docs, shard_documents=6)
    assert done.documents == 8
    assert sorted(items_by_ids(FeatureDataset(tmp_path))) == sorted(tuple(d.input_ids.tolist()) for d in docs)
    assert len(json.loads((tmp_path / "index.json").read_text())["shards"]) == 4


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="run `eagle3-hf extract` first"):
        FeatureDataset(tmp_path)
    write(tmp_path, documents(12), shard_documents=4)
    with pytest.raises(ValueError, match="dtype: 'float32' before, 'float16' now"):
        write(tmp_path, documents(20), dtype=torch.float16)
    other = tmp_path / "other"
    write(other, documents(12), kind="logits")
    saved = (tmp_path / "shard-00001.safetensors").read_bytes()
    (tmp_path / "shard-00001.safetensors").write_bytes((other / "shard-00000.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"differ in settings.*shard-00001"):
        FeatureDataset(tmp_path)
    (tmp_path / "shard-00001.safetensors").write_bytes(saved[:100])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is no feature shard"):
        FeatureDataset(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks shard-00001.safetensors, which its index.json names"):
        FeatureDataset(tmp_path)


def test_one_process_at_a_time(tmp_path):
    teacher = TargetTeacher(make_target("llama"), AUX)
    settings = settings_of(teacher, "tiny", torch.float32)
    with FeatureWriter(tmp_path, settings), pytest.raises(ValueError, match="another process"):
        FeatureWriter(tmp_path, settings)


def old_shard(docs, first=0):
    """A shard of the form that came before index.json."""
    sizes = torch.tensor([0, *map(len, docs)])
    total = int(sizes.sum())
    return {
        "aux": torch.randn(total, 6).half(),
        "final": torch.randn(total, 2).half(),
        "ids": torch.from_numpy(np.concatenate([d.input_ids for d in docs])),
        "argmax": torch.randint(0, 16, (total,), dtype=torch.int32),
        "answer": torch.from_numpy(np.concatenate([d.loss_mask for d in docs])),
        "offsets": sizes.cumsum(0),
        "index": torch.arange(first, first + len(docs)),
        "greedy": torch.arange(len(docs)) % 2 == 0,
    }


def test_shards_of_the_recipe_stay_readable(tmp_path):
    docs = documents(12)
    shards = [old_shard(docs[:5]), old_shard(docs[5:], 5)]
    for number, shard in enumerate(shards):
        metadata = {"aux_layers": "[2, 15, 27]", "target": "smollm2"}
        save_file(shard, tmp_path / f"shard-{number:05d}.safetensors", metadata=metadata)
    dataset = FeatureDataset(tmp_path, held_out=0.25)
    assert (dataset.aux_layers, dataset.teacher, len(dataset)) == ([2, 15, 27], "hidden", 12)
    # The split of the recipe's own reader.
    apart = [i for i in range(12) if (i * 2654435761 % 2**32) / 2**32 < 0.25]
    assert dataset.held_out == apart
    assert apart
    item = dataset[6]
    start = int(shards[1]["offsets"][1])
    assert torch.equal(item["features"], shards[1]["aux"][start : start + len(docs[6])])
    with pytest.raises(ValueError, match=r"of another program and no index.json"):
        write(tmp_path, docs)


def test_collator_is_right_padded_and_exact(tmp_path):
    docs = documents(8)
    write(tmp_path, docs)
    dataset = FeatureDataset(tmp_path)
    batch = FeatureCollator(dtype=torch.float32)([dataset[i] for i in (3, 1, 6)])
    width = max(len(docs[i]) for i in (3, 1, 6))
    for row, i in enumerate((3, 1, 6)):
        n = len(docs[i])
        assert batch["input_ids"][row].tolist() == docs[i].input_ids.tolist() + [0] * (width - n)
        assert batch["loss_mask"][row].tolist() == docs[i].loss_mask.tolist() + [False] * (width - n)
        assert torch.equal(batch["features"][row, :n], dataset[i]["features"])
        assert not batch["features"][row, n:].any()
        assert torch.equal(batch["teacher_hidden"][row, :n], dataset[i]["teacher_hidden"])
        assert (batch["teacher_argmax"][row, n - 1 :] == -1).all()
    assert FeatureCollator()([dataset[0]])["features"].dtype == torch.bfloat16
    assert "document_ids" not in batch


def test_stored_logits_become_those_of_the_draft_vocabulary(tmp_path):
    model, docs = make_target("llama"), documents(8)
    vocabulary = torch.tensor([2, 3, 5, 8, 13])
    for kind, k in (("logits", 0), ("topk", 6)):
        write(tmp_path / kind, docs, model, kind, k)
    full, top = (FeatureDataset(tmp_path / kind) for kind in ("logits", "topk"))
    chosen = [4, 3, 7]
    dense = FeatureCollator(torch.float32, vocabulary, 16)([full[i] for i in chosen])
    sparse = FeatureCollator(torch.float32, vocabulary, 16)([top[i] for i in chosen])
    stored = FeatureCollator(torch.float32)([top[i] for i in chosen])
    for row, i in enumerate(chosen):
        _, _, logits = reference(model, docs[i].input_ids)
        for t in range(len(docs[i])):
            learned = t + 1 < len(docs[i]) and docs[i].loss_mask[t + 1]
            if not learned:
                assert not dense["teacher_logits"][row, t].any()
                continue
            torch.testing.assert_close(dense["teacher_logits"][row, t], logits[t, vocabulary], atol=1e-4, rtol=1e-4)
            exact = logits[t].log_softmax(-1)
            assert stored["teacher_top_ids"][row, t].tolist() == exact.topk(6).indices.tolist()
            torch.testing.assert_close(stored["teacher_top_values"][row, t], exact.topk(6).values, atol=1e-4, rtol=1e-4)
            inside = torch.isin(vocabulary, exact.topk(6).indices)
            made = sparse["teacher_logits"][row, t]
            torch.testing.assert_close(made[inside], exact[vocabulary][inside], atol=1e-4, rtol=1e-4)
            rest = (1 - exact.topk(6).values.exp().sum()) / 10
            torch.testing.assert_close(made[~inside].exp(), rest.expand(int((~inside).sum())), atol=1e-5, rtol=1e-3)
    assert torch.equal(dense["input_ids"], sparse["input_ids"])
    with pytest.raises(ValueError, match="vocab_size"):
        FeatureCollator(vocabulary=vocabulary)([top[0]])


def test_dataset_goes_through_a_loader_with_workers(tmp_path):
    write(tmp_path, documents(12), shard_documents=5)
    dataset = FeatureDataset(tmp_path)
    assert dataset[3] and len(pickle.dumps(dataset)) < 20_000
    batches = [[0, 5, 11], [1, 2]]
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=FeatureCollator(), num_workers=1)
    for batch, chosen in zip(loader, batches):
        same = FeatureCollator()([dataset[i] for i in chosen])
        assert all(torch.equal(batch[name], same[name]) for name in same)


# --- online ---


@pytest.mark.parametrize("pack_length", [None, 40])
def test_online_features_are_the_stored_ones(tmp_path, pack_length):
    model, docs = make_target("llama"), documents(10)
    write(tmp_path, docs, model)
    stored, tokens = FeatureDataset(tmp_path), TokenDataset(docs)
    assert (stored.train, stored.held_out) == (tokens.train, tokens.held_out)
    assert stored.train_lengths == tokens.train_lengths
    collate = FeatureCollator(torch.float32, pack_length=pack_length)
    chosen = [2, 9, 3, 5]
    expected = collate([stored[i] for i in chosen])
    made = OnlineFeatures(model, AUX, dtype=torch.float32)(collate([tokens[i] for i in chosen]))
    assert made.keys() == expected.keys()
    real = torch.zeros_like(expected["loss_mask"])
    for row in range(len(real)):
        real[row, : int((expected["features"][row].abs().sum(-1) > 0).nonzero().max()) + 1] = True
    for name in expected:
        value, wanted = made[name], expected[name]
        if name in ("features", "teacher_hidden"):  # padding holds what the target made of it
            value, wanted = value[real], wanted[real]
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-3)


def test_online_logits_are_over_the_draft_vocabulary():
    model, docs = make_target("llama"), documents(4)
    vocabulary = torch.tensor([3, 5, 8])
    batch = FeatureCollator()([TokenDataset(docs)[i] for i in range(4)])
    made = OnlineFeatures(model, AUX, "logits", vocabulary)(batch)
    _, _, logits = reference(model, docs[1].input_ids)
    t = int(docs[1].loss_mask.argmax()) - 1
    torch.testing.assert_close(made["teacher_logits"][1, t], logits[t, vocabulary], atol=1e-4, rtol=1e-4)
    assert not made["teacher_logits"][1, t - 1].any()
    with pytest.raises(ValueError, match="hidden or logits"):
        OnlineFeatures(model, AUX, "topk")


def test_objective_takes_the_batches(tmp_path):
    from support import make_draft

    from eagle3_hf.training.objective import training_time_test

    model, docs = make_target("llama"), documents(6)
    draft = make_draft(model, aux_hidden_state_layers=list(AUX))
    vocabulary = draft.draft_to_target(torch.arange(draft.config.draft_vocab_size))
    losses = []
    for kind in ("hidden", "logits"):
        write(tmp_path / kind, docs, model, kind)
        dataset = FeatureDataset(tmp_path / kind)
        batch = FeatureCollator(torch.float32, vocabulary, 16)([dataset[i] for i in range(6)])
        head = {"teacher_head": model.lm_head.weight[vocabulary]} if kind == "hidden" else {}
        losses.append(
            training_time_test(draft, embeddings=model.get_input_embeddings(), **batch, **head, steps=3).loss.item()
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- the command ---


@pytest.fixture
def invoke():
    from typer.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(build_app(), [str(a) for a in arguments])


def prepare(tmp_path, count=6):
    target = save_target(tmp_path / "target")
    data = tmp_path / "data.jsonl"
    rows = [{"messages": chat(f"what is {i}", "yes", "no?", f"the sky {i}")} for i in range(count)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target, data, rows


def test_command_extracts_and_goes_on(tmp_path, invoke):
    target, data, rows = prepare(tmp_path)
    common = ["extract", "--data", data, "--target", target, "--out", tmp_path / "out", "--dtype", "float32",
              "--aux-layer", 1, "--aux-layer", 2, "--store-dtype", "float32"]  # fmt: skip
    dry = invoke(*common, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "6 documents" in dry.output
    assert not (tmp_path / "out").exists()
    first = invoke(*common, "--limit", 4)
    assert first.exit_code == 0, first.output
    assert "«yes<|im_end|>»" in first.output
    assert "to write" in first.output
    assert "4 documents in" in first.output
    second = invoke(*common)
    assert "2 documents of" in second.output
    assert "6 documents in" in second.output
    dataset = FeatureDataset(tmp_path / "out")
    tokenizer = tiny_tokenizer(CHATML)
    model = tiny_model()
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip() for row in rows]
    assert sorted(tokenizer.decode(dataset[i]["input_ids"]) for i in range(6)) == sorted(texts)
    item = dataset[0]
    aux, _, logits = reference(model, item["input_ids"].numpy().astype(np.int32), (1, 2))
    torch.testing.assert_close(item["features"], aux, atol=1e-4, rtol=1e-3)
    learned = item["loss_mask"][1:]
    assert item["teacher_argmax"][:-1][learned].tolist() == logits[:-1].argmax(-1)[learned].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--teacher", "topk"], "a teacher is hidden, logits or topk:K"),
        (["--teacher", "topk:0"], "a teacher is hidden, logits or topk:K"),
        (["--store-dtype", "int8"], "--store-dtype must be one of"),
        (["--aux-layer", "7"], "aux layer ids [7] are outside 0..4"),
        (["--data", "nowhere.jsonl"], "no file or folder at 'nowhere.jsonl'"),
        (["--max-length", "5"], "no document with an answer token is left"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(tmp_path, invoke, arguments, message):
    target, data, _ = prepare(tmp_path, 2)
    done = invoke("extract", "--data", data, "--target", target, "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_data_without_answers_is_refused_with_its_row(tmp_path, invoke):
    target, _, _ = prepare(tmp_path, 2)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hi"}\n')
    done = invoke("extract", "--data", data, "--target", target, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "row 1: no assistant message to learn from" in done.output


def test_parse_teacher():
    assert parse_teacher("hidden") == ("hidden", 0)
    assert parse_teacher("topk:64") == ("topk", 64)
    for bad in ("topk:", "topk:x", "hidden:3", "all", ""):
        with pytest.raises(ValueError, match="topk:K"):
            parse_teacher(bad)


KILLED = """
import pathlib, time
from test_training_features import documents, write
write(pathlib.Path({folder!r}), documents(120), shard_documents=5, progress=lambda done: time.sleep(0.02))
"""


def test_killed_process_loses_at_most_its_shard(tmp_path):
    # A fresh interpreter: after a fork torch's threads are gone, and its first parallel operator waits for them.
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(folder=str(tmp_path))], env=os.environ | {"PYTHONPATH": paths}
    )
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("shard-*.safetensors"))) < 4 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = len(FeatureDataset(tmp_path))
    assert 20 <= before < 120
    assert before % 5 == 0
    done = write(tmp_path, documents(120), shard_documents=50)
    assert done.documents == len({d.index for d in documents(120)}) - before
    found = items_by_ids(FeatureDataset(tmp_path))
    assert sorted(found) == sorted({tuple(d.input_ids.tolist()) for d in documents(120)})


@pytest.mark.real
def test_smollm2_features_are_those_of_the_objective(tmp_path, smollm2):
    """Stored with the real target and template: the teacher's choice at each place is what greedy generation says."""
    from eagle3_hf.training.data import Conversation
    from eagle3_hf.training.documents import tokenise
    from eagle3_hf.training.masks import AssistantMasks

    tokenizer, target = smollm2.tokenizer, smollm2.target
    prompt = tokenizer.apply_chat_template(chat("What is 2+2?"), tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    out = target.generate(**inputs, do_sample=False, max_new_tokens=12)[0]
    answer = tokenizer.decode(out[inputs.input_ids.shape[1] :], skip_special_tokens=True)
    conversations = [Conversation(0, tuple(chat("What is 2+2?", answer)))]
    docs = list(tokenise(conversations, AssistantMasks(tokenizer), vocab_size=target.config.vocab_size))
    write(tmp_path, docs, target)
    item = FeatureDataset(tmp_path)[0]
    assert item["input_ids"][: len(out)].tolist() == out.tolist()[: len(item["input_ids"])]
    begin = inputs.input_ids.shape[1]
    # The teacher at t says token t + 1; the answer was greedy, so it is the text itself.
    assert item["teacher_argmax"][begin - 1 : len(out) - 1].tolist() == out[begin:].tolist()
    assert (item["teacher_argmax"][: begin - 1] == -1).all()


def test_dataset_item_doesnt_change_with_the_batch(tmp_path):
    write(tmp_path, documents(5))
    dataset = FeatureDataset(tmp_path)
    before = copy.deepcopy(dataset[2])
    FeatureCollator()([dataset[2], dataset[4]])["features"].zero_()
    assert all(torch.equal(before[name], dataset[2][name]) for name in before)
    assert load_file(tmp_path / "shard-00000.safetensors")["index"].unique().numel() == 5
