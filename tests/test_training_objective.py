"""The training objective: step k must be what decoding does, and nothing may be off by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from eagle3_hf.configuration_eagle3 import Eagle3Config
from eagle3_hf.modeling_eagle3 import Eagle3DraftModel
from eagle3_hf.training import objective
from eagle3_hf.training.losses import LOSSES
from eagle3_hf.training.objective import Teacher, TrainingTimeTest, training_time_test
from eagle3_hf.training.reference import reference_losses
from eagle3_hf.training.slots import Slots
from eagle3_hf.training.teacher import BoundTeacher

VOCAB, DRAFT_VOCAB, WIDTH, TARGET_WIDTH, STEPS = 40, 16, 32, 32, 4


def make_draft(**changes) -> Eagle3DraftModel:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    draft = Eagle3DraftModel(Eagle3Config(**settings | changes))
    # Ids that no constant offset explains, so a lost d2t shows.
    draft.set_draft_vocabulary(torch.tensor([0, 1, 3, 4, 8, 9, 13, 14, 20, 21, 25, 30, 31, 35, 38, 39]))
    return draft.eval()


def make_batch(batch=2, length=12, prompt=5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    answer = torch.zeros(batch, length, dtype=torch.bool)
    answer[:, prompt:] = True
    return {
        "features": torch.randn(batch, length, 3 * TARGET_WIDTH, generator=generator),
        "embeddings": torch.randn(batch, length, WIDTH, generator=generator),
        "input_ids": torch.randint(0, VOCAB, (batch, length), generator=generator),
        "loss_mask": answer,
        "teacher_hidden": torch.randn(batch, length, TARGET_WIDTH, generator=generator),
        "teacher_head": torch.randn(DRAFT_VOCAB, TARGET_WIDTH, generator=generator),
        "teacher_argmax": torch.randint(0, VOCAB, (batch, length), generator=generator),
    }


def decode(draft: Eagle3DraftModel, features: torch.Tensor, embeddings: torch.Tensor, slot: int) -> list[torch.Tensor]:
    """Logits `[Vd]` of every step from `slot` of one sequence, drafted the way generation does it."""
    cache = DynamicCache()
    context = slice(0, slot + 1)
    out = draft(features[:, context], inputs_embeds=embeddings[:, 1 : slot + 2], cache=cache)
    logits = [out.logits[0, -1]]
    for k in range(1, STEPS):
        out = draft(
            out.last_hidden_state[:, -1:],
            inputs_embeds=embeddings[:, slot + 1 + k : slot + 2 + k],
            position_ids=torch.tensor([[slot + k]]),
            cache=cache,
            recurrent=True,
        )
        logits.append(out.logits[0, -1])
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_output": True},
        {"norm_before_residual": True, "qk_norm": True},
        {"fc_norm": True, "attention_bias": True},
        {"num_hidden_layers": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    ],
)
@torch.no_grad()
def test_every_step_equals_decoding(changes):
    draft, batch = make_draft(**changes), make_batch()
    result = training_time_test(draft, **batch, steps=STEPS, keep_logits=True)
    length = batch["input_ids"].shape[1]
    for slot in range(length - STEPS):
        expected = decode(draft, batch["features"][1:], batch["embeddings"][1:], slot)
        for k in range(STEPS):
            torch.testing.assert_close(result.logits[k][1, slot], expected[k], atol=1e-4, rtol=0)


def by_hand(draft: Eagle3DraftModel, batch: dict[str, torch.Tensor], logits: list[torch.Tensor]) -> list[float]:
    """The losses, slot by slot in loops, from the definition."""
    losses = []
    for k in range(STEPS):
        terms = []
        for row in range(len(batch["input_ids"])):
            for slot in range(batch["input_ids"].shape[1]):
                teacher, predicted = slot + 1 + k, slot + 2 + k
                if predicted >= batch["input_ids"].shape[1] or not batch["loss_mask"][row, predicted]:
                    continue
                if not draft.t2d[batch["teacher_argmax"][row, teacher]]:
                    continue
                target = (batch["teacher_head"] @ batch["teacher_hidden"][row, teacher]).softmax(-1)
                terms.append(-(target * logits[k][row, slot].log_softmax(-1)).sum())
        losses.append(float(torch.stack(terms).mean()))
    return losses


# With a short prompt the last steps have no slot for the first answer tokens, whose teacher rows then go unused.
@pytest.mark.parametrize("prompt", [5, 2])
@torch.no_grad()
def test_losses_follow_the_definition(prompt):
    draft, batch = make_draft(), make_batch(prompt=prompt)
    batch["loss_mask"][1, 8] = False  # a hole: every shift by one moves it
    full = training_time_test(draft, **batch, steps=STEPS, keep_logits=True)
    expected = by_hand(draft, batch, full.logits)
    # With and without the short cut that leaves prompt slots out of the later steps.
    for result in (full, training_time_test(draft, **batch, steps=STEPS)):
        assert [float(x) for x in result.losses] == pytest.approx(expected, abs=1e-4)
        assert float(result.loss) == pytest.approx(sum(0.8**k * x for k, x in enumerate(expected)), abs=1e-4)


@pytest.mark.parametrize("k", range(STEPS))
@torch.no_grad()
def test_only_the_predicted_token_opens_a_slot(k):
    draft, batch = make_draft(), make_batch(batch=1)
    batch["loss_mask"].zero_()
    batch["loss_mask"][0, 9] = True
    scored = training_time_test(draft, **batch, steps=STEPS).scored[k]
    assert scored.nonzero().tolist() == [[0, 9 - 2 - k]]


@torch.no_grad()
def test_vocabulary_mapping():
    draft, batch = make_draft(), make_batch()
    everything = training_time_test(draft, **batch, steps=STEPS, keep_logits=True)
    # A teacher whose every choice is the draft's own at step 0 finds all of them correct, and only there.
    own = draft.draft_to_target(everything.logits[0].argmax(-1))
    batch["teacher_argmax"] = F.pad(own[:, :-1], (1, 0), value=-1)
    result = training_time_test(draft, **batch, steps=STEPS)
    assert result.accuracy[0] == 1.0
    assert torch.equal(result.tokens[0][result.scored[0]], own[result.scored[0]])
    # Choices outside the vocabulary are misses, and teach nothing.
    outside = (~draft.t2d).nonzero()[0, 0]
    batch["teacher_argmax"] = torch.full_like(batch["teacher_argmax"], int(outside))
    result = training_time_test(draft, **batch, steps=STEPS)
    assert result.accuracy == [0.0] * STEPS
    assert float(result.loss) == 0.0
    assert all(scored.any() for scored in result.scored)


@torch.no_grad()
def test_real_next_token_stands_in_for_the_argmax():
    draft, batch = make_draft(), make_batch()
    next_token = F.pad(batch["input_ids"][:, 1:], (0, 1))
    batch["teacher_argmax"] = next_token
    expected = training_time_test(draft, **batch, steps=STEPS)
    logits = batch.pop("teacher_hidden") @ batch.pop("teacher_head").T
    del batch["teacher_argmax"]
    result = training_time_test(draft, **batch, steps=STEPS, teacher_logits=logits)
    assert float(result.loss) == pytest.approx(float(expected.loss), abs=1e-5)


@pytest.mark.parametrize("by_lengths", [True, False])
def test_padding_changes_nothing(by_lengths):
    draft, batch = make_draft(), make_batch()
    plain = training_time_test(draft, **batch, steps=STEPS)
    plain.loss.backward()
    gradient = draft.fc.weight.grad.clone()
    draft.zero_grad()
    length, extra = batch["input_ids"].shape[1], 5
    padded = {}
    for name, value in batch.items():
        if name != "teacher_head":
            shape = (value.shape[0], extra, *value.shape[2:])
            # Rubbish rather than zeros: nothing may read it.
            fill = torch.randint(0, VOCAB, shape) if value.dtype == torch.long else torch.ones(shape).to(value.dtype)
            if name == "loss_mask" and not by_lengths:
                fill = torch.zeros(shape, dtype=torch.bool)
            value = torch.cat([value, fill], dim=1)
        padded[name] = value
    lengths = torch.full((len(batch["input_ids"]),), length) if by_lengths else None
    result = training_time_test(draft, **padded, lengths=lengths, steps=STEPS)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(plain.loss.detach()), abs=1e-5)
    torch.testing.assert_close(draft.fc.weight.grad, gradient, atol=1e-5, rtol=1e-4)
    assert result.accuracy == plain.accuracy


def test_learns():
    draft, batch = make_draft(), make_batch()
    draft.train()
    optimiser = torch.optim.Adam(draft.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        result = training_time_test(draft, **batch, steps=STEPS)
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
        losses.append(float(result.loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_refuses_what_does_not_fit():
    draft, batch = make_draft(), make_batch()
    with pytest.raises(ValueError, match="teacher_logits"):
        training_time_test(draft, **batch, teacher_logits=torch.zeros(2, 12, DRAFT_VOCAB))
    with pytest.raises(ValueError, match="weight"):
        training_time_test(draft, **batch, steps=2, step_weights=[1.0])


# --- against the straightforward implementation ----------------------------------------------------------------------

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 6 + [2] * 2 + [3] * 5, [0] * 12 + [1] * 8])


def packed_batch() -> dict[str, Any]:
    """Two rows of several documents, masks with holes, a teacher over the whole vocabulary."""
    generator = torch.Generator().manual_seed(2)
    shape = DOCUMENTS.shape
    logits = 2 * torch.randn(*shape, VOCAB, generator=generator)
    return {
        "features": torch.randn(*shape, 3 * TARGET_WIDTH, generator=generator),
        "embeddings": torch.randn(*shape, WIDTH, generator=generator),
        "input_ids": torch.randint(0, VOCAB, shape, generator=generator),
        "loss_mask": torch.rand(shape, generator=generator) < 0.7,
        "teacher": Teacher(logits=logits),
    }


def compare(
    draft: Eagle3DraftModel, batch: dict[str, Any], documents: torch.Tensor | None = None, steps: int = STEPS, **options
) -> TrainingTimeTest:
    """Check losses, gradients of every parameter, accuracy counts and slots against the reference."""
    draft.zero_grad()
    result = training_time_test(draft, **batch, document_ids=documents, steps=steps, **options)
    result.loss.backward()
    ours = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad()
    embeds = batch["embeddings"]
    if not isinstance(embeds, torch.Tensor):
        embeds = (draft.get_input_embeddings() or embeds)(batch["input_ids"])
    logits, mask = batch["teacher"].logits, batch["loss_mask"]
    names = {name: options[name] for name in ("loss", "mass") if name in options}
    losses, every = reference_losses(
        draft, batch["features"], embeds, mask, logits, logits.argmax(-1), documents=documents, steps=steps, **names
    )
    total = (losses * torch.tensor([0.8**k for k in range(steps)])).sum()
    total.backward()
    torch.testing.assert_close(torch.stack(result.losses), losses.detach(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(result.loss.detach(), total.detach(), atol=2e-5, rtol=1e-4)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(ours[name], parameter.grad, atol=2e-4, rtol=1e-3, msg=lambda m, name=name: name + m)
    draft.zero_grad()
    # Which tokens are predicted, what the draft says there and whether the teacher says so too: from the definition.
    documents = torch.zeros_like(batch["input_ids"]) if documents is None else documents
    length = mask.shape[1]
    vocabulary = [0, 1, 3, 4, 8, 9, 13, 14, 20, 21, 25, 30, 31, 35, 38, 39]
    for k in range(steps):
        for row, slot in [(row, slot) for row in range(len(mask)) for slot in range(length)]:
            predicted = slot + 2 + k
            scored = predicted < length and bool(mask[row, predicted])
            scored = scored and bool(documents[row, predicted] == documents[row, slot])
            assert bool(result.scored[k][row, slot]) == scored
            choice = int(logits[row, predicted - 1].argmax()) if scored else -1
            learned = scored and (choice in vocabulary or options.get("mass") == "full")
            token = vocabulary[int(every[k][row, slot].argmax())] if learned else -1
            assert int(result.tokens[k][row, slot]) == token
            assert bool(result.correct[k][row, slot]) == (learned and token == choice)
    assert result.counts.tolist() == [int((tokens >= 0).sum()) for tokens in result.tokens]
    return result


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "packed"])
@pytest.mark.parametrize("mass", ["vocabulary", "full"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_against_reference(loss, mass, documents):
    compare(make_draft(), packed_batch(), documents, loss=loss, mass=mass)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3, "norm_before_residual": True, "qk_norm": True},
        {"norm_output": True, "fc_norm": True, "attention_bias": True, "mlp_bias": True, "fc_bias": True},
        {"final_norm": False, "norm_before_fc": True},
        {"own_embeddings": True, "hidden_size": 24, "target_hidden_size": TARGET_WIDTH, "head_dim": 6},
        {"aux_hidden_state_layers": [1], "num_key_value_heads": 4},
    ],
)
def test_variants_against_reference(changes):
    draft, batch = make_draft(**changes), packed_batch()
    batch["features"] = batch["features"][..., : draft.config.num_aux_hidden_states * TARGET_WIDTH]
    if draft.config.own_embeddings:
        batch["embeddings"] = None
    compare(draft, batch, DOCUMENTS)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": True},
        {"chunk": 1},
        {"chunk": 5},
        {"attention": "blocks"},
        {"attention": "dense"},
        {"checkpoint": True, "attention": "blocks", "chunk": 3, "loss": "kl"},
        {"steps": 1},
        {"steps": 7},
    ],
    ids=str,
)
def test_options_against_reference(options):
    compare(make_draft(num_hidden_layers=2), packed_batch(), DOCUMENTS, **options)


def test_a_long_prompt_against_reference():
    """Its slots are left out of the later steps."""
    batch = packed_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    batch["loss_mask"][:, 14:] = True
    assert Slots(batch["loss_mask"]).first(STEPS) == 9  # token 14 is first predicted by slot 14 - 2 - 3
    compare(make_draft(), batch)


def test_packed_rows_equal_separate_ones():
    draft, batch = make_draft(), packed_batch()
    packed = training_time_test(draft, **batch, document_ids=DOCUMENTS, steps=STEPS, keep_logits=True)
    total, count = torch.zeros(STEPS), torch.zeros(STEPS)
    for row in range(len(DOCUMENTS)):
        for document in DOCUMENTS[row].unique():
            at = DOCUMENTS[row] == document
            alone = {name: value[row : row + 1, at] for name, value in batch.items() if name != "teacher"}
            result = training_time_test(
                draft, **alone, teacher=Teacher(logits=batch["teacher"].logits[row : row + 1, at]), steps=STEPS,
                keep_logits=True,
            )  # fmt: skip
            total += torch.stack(result.losses) * result.counts
            count += result.counts
            for k, logits in enumerate(result.logits):
                inside = logits.shape[1] - 1 - k  # slots whose next tokens are in the document
                if inside > 0:
                    theirs = packed.logits[k][row, at][:inside]
                    torch.testing.assert_close(logits[0, :inside], theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(packed.losses), total / count, atol=1e-5, rtol=1e-4)


def test_negative_document_ids_are_padding():
    draft, batch = make_draft(), packed_batch()
    documents = DOCUMENTS.clone()
    documents[0, 15:] = -1
    padded = training_time_test(draft, **batch, document_ids=documents, steps=STEPS)
    batch["loss_mask"][0, 15:] = False
    torch.testing.assert_close(padded.loss, training_time_test(draft, **batch, document_ids=DOCUMENTS).loss)


def test_denominators_make_parts_add_up():
    """Two halves over the counts of both give the loss and gradient of the whole."""
    draft, batch = make_draft(), packed_batch()
    whole = training_time_test(draft, **batch, steps=STEPS)
    whole.loss.backward()
    expected = draft.fc.weight.grad.clone()
    draft.zero_grad()
    losses = []
    for row in range(2):
        part = {name: value[row : row + 1] for name, value in batch.items() if name != "teacher"}
        teacher = Teacher(logits=batch["teacher"].logits[row : row + 1])
        for given in (whole.counts, lambda counts: whole.counts):
            losses.append(training_time_test(draft, **part, teacher=teacher, steps=STEPS, denominators=given).loss / 2)
            losses[-1].backward()
    torch.testing.assert_close(sum(losses), whole.loss)
    torch.testing.assert_close(draft.fc.weight.grad, expected, atol=1e-5, rtol=1e-4)


def test_autocast_stays_close():
    draft, batch = make_draft(initializer_range=0.1), packed_batch()
    exact = training_time_test(draft, **batch, steps=STEPS)
    exact.loss.backward()
    expected = {name: p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = training_time_test(draft, **batch, steps=STEPS)
    rounded.loss.backward()
    assert rounded.loss.dtype == torch.float32
    assert float(rounded.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=1e-2)
    for name, parameter in draft.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - expected[name]).norm() < 0.1 * expected[name].norm(), name


# --- off by one: each must be noticed ---------------------------------------------------------------------------------


def rolled_mask(by: int) -> type:
    class Rolled(Slots):
        def __init__(self, loss_mask, *args):
            super().__init__(loss_mask.roll(by, dims=1), *args)

    return Rolled


def longer_shift(by: int) -> type:
    class Longer(Slots):
        def ahead(self, x, steps):
            return super().ahead(x, max(steps + by, 0))

    return Longer


class NextTeacher(BoundTeacher):
    def rows(self, index):
        return super().rows((index + 1).clamp(max=DOCUMENTS.numel() - 1))


class NextVocabulary(BoundTeacher):
    def __init__(self, *args):
        super().__init__(*args)
        self.kept = (self.kept + 1).clamp(max=VOCAB - 1)


class NextDocument(Slots):
    def __init__(self, mask, lengths=None, documents=None):
        super().__init__(mask, lengths, documents.roll(1, dims=1))


MUTANTS = {
    "mask late": ("Slots", rolled_mask(1)),
    "mask early": ("Slots", rolled_mask(-1)),
    "shift far": ("Slots", longer_shift(1)),
    "shift near": ("Slots", longer_shift(-1)),
    "document late": ("Slots", NextDocument),
    "teacher late": ("BoundTeacher", NextTeacher),
    "vocabulary of the teacher": ("BoundTeacher", NextVocabulary),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_notices_off_by_one(name, monkeypatch):
    where, mutant = MUTANTS[name]
    monkeypatch.setattr(objective, where, mutant)
    with pytest.raises((AssertionError, IndexError)):
        compare(make_draft(), packed_batch(), DOCUMENTS)


def test_notices_a_vocabulary_off_by_one(monkeypatch):
    draft = make_draft()
    inside = objective._in_vocabulary
    with monkeypatch.context() as patch:
        # Which tokens the draft knows, one further on.
        patch.setattr(objective, "_in_vocabulary", lambda *args: inside(*args[:2], args[2] - 1, args[3]))
        with pytest.raises(AssertionError):
            compare(draft, packed_batch(), DOCUMENTS)
    with monkeypatch.context() as patch:
        # What its choices stand for, one further on; the teacher's rows are mapped as before.
        mapping, bound = draft.draft_to_target, BoundTeacher(packed_batch()["teacher"], draft, "vocabulary", False)
        right = training_time_test(draft, **packed_batch(), document_ids=DOCUMENTS)
        patch.setattr(objective, "BoundTeacher", lambda *args: bound)
        patch.setattr(draft, "draft_to_target", lambda ids: mapping(ids) + 1)
        wrong = training_time_test(draft, **packed_batch(), document_ids=DOCUMENTS)
        assert float(wrong.loss.detach()) == float(right.loss.detach())
        assert wrong.accuracy != right.accuracy  # and `compare` holds the right one to the definition
    compare(draft, packed_batch(), DOCUMENTS)


def test_memory_does_not_grow_with_the_steps():
    """No tensor of a forward and backward pass gets larger with more steps."""
    from test_training_attention import largest_tensor

    draft, batch = make_draft(), make_batch(batch=1, length=400)

    def run(steps: int) -> None:
        training_time_test(draft, **batch, steps=steps, chunk=16).loss.backward()

    few, many = largest_tensor(lambda: run(1)), largest_tensor(lambda: run(6))
    # What is as long as the tokens: the first layer's input, twice the width, and the features.
    assert many == few <= 400 * 3 * TARGET_WIDTH


def test_names_what_does_not_fit():
    draft, batch = make_draft(), packed_batch()
    with pytest.raises(ValueError, match="did you mean 'reverse_kl'"):
        training_time_test(draft, **batch, loss="revers_kl")
    with pytest.raises(ValueError, match="unknown attention backend 'sdpa'"):
        training_time_test(draft, **batch, attention="sdpa")
    with pytest.raises(ValueError, match="features covers"):
        training_time_test(draft, **(batch | {"features": batch["features"][:, 1:]}))
    with pytest.raises(ValueError, match="document_ids covers"):
        training_time_test(draft, **batch, document_ids=DOCUMENTS[:, 1:])
    with pytest.raises(ValueError, match="no embeddings of its own"):
        training_time_test(draft, **(batch | {"embeddings": None}))
    with pytest.raises(ValueError, match="either teacher"):
        training_time_test(draft, **batch, teacher_argmax=batch["input_ids"])
