"""Distilling an ordinary small LM: loss and gradient against whole forwards, packed rows, vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import VOCAB, config_of
from transformers import AutoModelForCausalLM

from eagle3_hf.training import plain
from eagle3_hf.training.losses import LOSSES
from eagle3_hf.training.plain import plain_distillation, shared_vocabulary
from eagle3_hf.training.reference import plain_loss
from eagle3_hf.training.slots import Slots

DOCUMENTS = torch.tensor([[0] * 6 + [1] * 5 + [-1], [4] * 4 + [5] * 8])


def model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, DOCUMENTS.shape, generator=generator)
    return {"input_ids": ids, "loss_mask": torch.rand(ids.shape, generator=generator) < 0.6}


def by_hand(student: Any, teacher: Any, ids: torch.Tensor, mask: torch.Tensor, loss: str) -> tuple[torch.Tensor, int]:
    """Sum and count over one document, from whole forwards."""
    log_q = student(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    log_p = teacher(ids, use_cache=False).logits[:, :-1].detach().log_softmax(-1)
    return plain_loss(loss, log_p, log_q)[mask[:, 1:]].sum(), int(mask[:, 1:].sum())


def check(loss: str = "kl", family: str = "llama", packed: bool = False, **options: Any) -> None:
    student, teacher, data = model(family, num_hidden_layers=1), model(family, seed=1), batch()
    result = plain_distillation(
        student, teacher, **data, loss=loss, document_ids=DOCUMENTS if packed else None, **options
    )
    result.loss.backward()
    grads = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    total, count = 0.0, 0
    for row in range(2):
        spans = [DOCUMENTS[row] == d for d in DOCUMENTS[row].unique() if d >= 0] if packed else [slice(None)]
        for at in spans:
            value, n = by_hand(
                student, teacher, data["input_ids"][row, at][None], data["loss_mask"][row, at][None], loss
            )
            total, count = total + value, count + n
    (total / count).backward()
    assert int(result.count) == count
    torch.testing.assert_close(result.loss.detach(), (total / count).detach(), atol=1e-5, rtol=1e-4)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_against_whole_forwards(loss, packed):
    check(loss, packed=packed, chunk=3)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_other_families(family):
    check(family=family, packed=family == "qwen3")


@pytest.mark.parametrize("by", [1, -1])
def test_notices_off_by_one(by, monkeypatch):
    class Rolled(Slots):
        def __init__(self, mask, *args):
            super().__init__(mask.roll(by, dims=1), *args)

    monkeypatch.setattr(plain, "Slots", Rolled)
    with pytest.raises(AssertionError):
        check()


def test_measure_and_denominator():
    student, data = model(), batch()
    same = plain_distillation(student, student, **data)
    assert int(same.correct) == int(same.count) > 0
    assert abs(float(same.loss.detach())) < 1e-5
    other = plain_distillation(student, model(seed=1), **data)
    halved = plain_distillation(student, model(seed=1), **data, denominator=2 * other.count, measure=False)
    assert float(halved.loss.detach()) == pytest.approx(float(other.loss.detach()) / 2)
    assert halved.correct is None
    nothing = plain_distillation(student, student, data["input_ids"], torch.zeros_like(data["loss_mask"]))
    assert float(nothing.loss.detach()) == 0
    nothing.loss.backward()


def test_learns():
    student, teacher, data = model(), model(seed=1), batch()
    optimiser = torch.optim.Adam(student.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        result = plain_distillation(student, teacher, **data)
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
        losses.append(float(result.loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is None for p in teacher.parameters())


class Tokenizer:
    def __init__(self, *tokens: str):
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def test_vocabularies():
    small, padded = model(), model(vocab_size=VOCAB + 8)
    assert shared_vocabulary(small, small) == VOCAB
    with pytest.raises(ValueError, match=f"{VOCAB} .student. and {VOCAB + 8} .teacher"):
        plain_distillation(small, padded, **batch())
    words = [f"w{i}" for i in range(VOCAB)]
    shared = shared_vocabulary(small, padded, Tokenizer(*words), Tokenizer(*words))
    assert shared == VOCAB
    with pytest.raises(ValueError, match="id 3 is 'w3' for the student and 'other' for the teacher"):
        shared_vocabulary(small, padded, Tokenizer(*words), Tokenizer(*words[:3], "other", *words[4:]))
    with pytest.raises(ValueError, match="both models"):
        shared_vocabulary(small, padded, Tokenizer(*words))
    with pytest.raises(ValueError, match=f"only {VOCAB} logits"):
        shared_vocabulary(small, padded, Tokenizer(*words, "more"), Tokenizer(*words, "more"))
    # Padding takes no part: with the padded rows cut off the two teachers are the same.
    with torch.no_grad():
        state = {name: x[:VOCAB] if x.shape[:1] == (VOCAB + 8,) else x for name, x in padded.state_dict().items()}
        cut = model()
        cut.load_state_dict(state)
        expected = plain_distillation(small, cut, **batch()).loss
        torch.testing.assert_close(plain_distillation(small, padded, **batch(), shared=shared).loss, expected)


def test_refuses_packed_rows_where_documents_would_mix():
    with pytest.raises(ValueError, match="sliding_attention"):
        plain_distillation(model("gemma3"), model("gemma3"), **batch(), document_ids=DOCUMENTS)
    with pytest.raises(ValueError, match="unknown loss"):
        plain_distillation(model(), model(), **batch(), loss="mse")
