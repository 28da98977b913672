"""The training objective: step k must be what decoding does, and nothing may be off by one."""

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from eagle3_hf.configuration_eagle3 import Eagle3Config
from eagle3_hf.modeling_eagle3 import Eagle3DraftModel
from eagle3_hf.training.objective import training_time_test

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
