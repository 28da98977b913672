"""Losses and the head: values and gradients against the plain formulas, for every name, teacher and chunk size."""

from __future__ import annotations

import pytest
import torch
from support import VOCAB, make_draft
from torch.nn import functional as F

from eagle3_hf.training.losses import (
    LOSSES,
    HeadLossPlan,
    TeacherRows,
    head_loss,
    logit_loss,
    loss_and_gradient,
    parse_loss,
)
from eagle3_hf.training.reference import plain_loss
from eagle3_hf.training.teacher import BoundTeacher, Teacher

ROWS, WIDTH, SIZE = 11, 6, 12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name, full):
    logits = draw(ROWS, 7, seed=1).requires_grad_()
    log_p = (2 * draw(ROWS, 10 if full else 7)).log_softmax(-1)[:, :7]  # a part of the mass, or all of it
    mass = log_p.exp().sum(-1, keepdim=True) if full else None
    value, grad = loss_and_gradient(((1.0, name),), TeacherRows(log_p.exp(), log_p, mass), logits.detach())
    expected = plain_loss(name, log_p, logits.log_softmax(-1))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("spec", ["kl+0.5*total_variation", "0.3 * reverse_kl + 2*soft_cross_entropy", "2e-1*kl"])
def test_mixtures(spec, full):
    terms = {"kl+0.5*total_variation": {"kl": 1, "total_variation": 0.5}, "2e-1*kl": {"kl": 0.2}}
    weights = terms.get(spec, {"reverse_kl": 0.3, "soft_cross_entropy": 2})
    logits = draw(ROWS, 7, seed=1).requires_grad_()
    log_p = draw(ROWS, 9 if full else 7).log_softmax(-1)[:, :7]
    mass = log_p.exp().sum(-1, keepdim=True) if full else None
    value, grad = loss_and_gradient(parse_loss(spec), TeacherRows(log_p.exp(), log_p, mass), logits.detach())
    expected = sum(w * plain_loss(name, log_p, logits.log_softmax(-1)) for name, w in weights.items())
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])


@torch.no_grad()
def test_total_variation_is_the_rejection_rate():
    """Of a token drawn from the draft and verified by min(1, p/q), tokens outside its vocabulary included."""
    p = draw(1, 9).softmax(-1)
    q = F.pad(draw(1, 7, seed=1).softmax(-1), (0, 2))
    teacher = TeacherRows(p[:, :7], None, p[:, :7].sum(-1, keepdim=True))
    value, _ = loss_and_gradient(((1.0, "total_variation"),), teacher, q[:, :7].log())
    torch.testing.assert_close(value, 0.5 * (p - q).abs().sum(-1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("soft_crossentropy", "did you mean 'soft_cross_entropy'"),
        ("kl+", "unknown loss ''"),
        ("kl+-1*total_variation", "unknown loss|positive"),
        ("0*kl", "positive"),
        ("1.2.3*kl", "'1.2.3' of 'kl'"),
        ("kl total_variation", "unknown loss 'kl total_variation'"),
    ],
)
def test_refuses_specifications(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_loss(spec)


def plan_for(log_p: torch.Tensor, rows: list[torch.Tensor], scale: list[float], spec: str, chunk: int) -> HeadLossPlan:
    calls: list[tuple[int, int]] = []

    def teacher(start: int, end: int) -> TeacherRows:
        calls.append((start, end))
        return TeacherRows(log_p[start:end].exp(), log_p[start:end])

    plan = HeadLossPlan(
        teacher, len(log_p), rows, torch.tensor(scale, dtype=torch.float64), parse_loss(spec), chunk, torch.float64
    )
    plan.calls = calls  # type: ignore[attr-defined]
    return plan


@pytest.mark.parametrize("chunk", [1, 3, 4, ROWS, 100])
@pytest.mark.parametrize("spec", ["soft_cross_entropy", "kl+0.5*total_variation"])
def test_head_loss(spec, chunk):
    log_p = draw(ROWS, 7).log_softmax(-1)
    # Steps use different rows of the teacher: all, a part with a hole over a whole chunk, one, none.
    rows = [torch.arange(ROWS), torch.tensor([0, 1, 8, 10]), torch.tensor([4]), torch.tensor([], dtype=torch.long)]
    scale = [1.0, 0.5, 2.0, 3.0]
    weight = draw(7, WIDTH, seed=2).requires_grad_()
    states = [draw(len(index), WIDTH, seed=3 + k).requires_grad_() for k, index in enumerate(rows)]
    plan = plan_for(log_p, rows, scale, spec, chunk)
    plan.measure = True
    loss = head_loss(plan, weight, states)
    terms = {"soft_cross_entropy": {"soft_cross_entropy": 1.0}}.get(spec, {"kl": 1.0, "total_variation": 0.5})
    sums = [
        sum(w * plain_loss(name, log_p[index], (state @ weight.T).log_softmax(-1)).sum() for name, w in terms.items())
        for index, state in zip(rows, states)
    ]
    torch.testing.assert_close(plan.sums, torch.stack(sums).detach())
    expected = sum(s * x for s, x in zip(scale, sums))
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, [weight, *states]), torch.autograd.grad(3 * expected, [weight, *states])
    ):
        torch.testing.assert_close(ours, theirs)
    for best, state in zip(plan.best, states):
        assert best.tolist() == (state @ weight.T).argmax(-1).tolist()
    # Every teacher row was made once, whatever the number of steps.
    assert sorted(i for start, end in plan.calls for i in range(start, end)) == list(range(ROWS))


def test_head_loss_of_frozen_parts():
    log_p, rows = draw(ROWS, 7).log_softmax(-1), [torch.arange(ROWS)]
    for learns in ("weight", "state", "nothing"):
        weight = draw(7, WIDTH).requires_grad_(learns == "weight")
        state = draw(ROWS, WIDTH).requires_grad_(learns == "state")
        loss = head_loss(plan_for(log_p, rows, [1.0], "kl", 4), weight, [state])
        assert loss.requires_grad == (learns != "nothing")
        if loss.requires_grad:
            loss.backward()
        assert (weight.grad is not None, state.grad is not None) == (learns == "weight", learns == "state")
    with torch.no_grad():
        assert not head_loss(plan_for(log_p, rows, [1.0], "kl", 4), weight, [state]).requires_grad


def test_head_loss_in_bfloat16():
    """GEMMs in bf16, sums and the head's gradient in fp32: within rounding of the exact one, and not coarser."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(400, 50, generator=generator).log_softmax(-1)
    weight = torch.randn(50, 16, generator=generator).requires_grad_()
    state = torch.randn(400, 16, generator=generator).requires_grad_()
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        plan = HeadLossPlan(
            lambda start, end: TeacherRows(log_p[start:end].exp()),
            400,
            [torch.arange(400)],
            torch.ones(1),
            parse_loss("soft_cross_entropy"),
            50,
            dtype,
        )
        loss = head_loss(plan, weight, [state])
        assert loss.dtype == torch.float32
        grads.append(torch.autograd.grad(loss, [weight, state]))
    for exact, rounded in zip(*grads):
        assert rounded.dtype == torch.float32
        assert ((rounded - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("name", LOSSES)
def test_logit_loss(name, chunk):
    logits, teacher = draw(ROWS, 7, seed=1).requires_grad_(), 2 * draw(ROWS, 7)
    loss = logit_loss(logits, teacher, name, chunk)
    expected = plain_loss(name, teacher.log_softmax(-1), logits.log_softmax(-1)).sum()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(2 * loss, logits), torch.autograd.grad(2 * expected, logits)):
        torch.testing.assert_close(ours, theirs)


def test_no_logits_outlive_their_chunk():
    """The largest tensor of forward and backward is a chunk of logits, not rows times vocabulary."""
    from test_training_attention import largest_tensor

    count, size, width, chunk = 512, 300, 8, 16
    log_p = torch.randn(count, size).log_softmax(-1)
    weight, state = torch.randn(size, width, requires_grad=True), torch.randn(count, width, requires_grad=True)
    plan = HeadLossPlan(
        lambda start, end: TeacherRows(log_p[start:end].exp()),
        count,
        [torch.arange(count)] * 4,
        torch.ones(4),
        parse_loss("kl"),
        chunk,
        torch.float32,
    )
    assert largest_tensor(lambda: head_loss(plan, weight, [state] * 4).backward()) <= chunk * size

    def plainly() -> None:
        plain_loss("kl", log_p, (state @ weight.T).log_softmax(-1)).sum().backward()

    assert largest_tensor(plainly) >= count * size


# --- teachers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(targets):
    return make_draft(targets("llama"))


def full_logits() -> torch.Tensor:
    return 2 * draw(2, 5, VOCAB, seed=7)


def forms(draft, logits: torch.Tensor) -> dict[str, Teacher]:
    """The same teacher in every form."""
    kept = draft.draft_to_target(torch.arange(SIZE))
    # A head and states whose product is `logits`: states are the logits, the head is the identity.
    identity = torch.eye(VOCAB, dtype=torch.float64)
    lse, choice = logits.logsumexp(-1), logits.argmax(-1)
    everything = logits.topk(VOCAB, -1)
    return {
        "full logits": Teacher(logits=logits),
        "full head": Teacher(hidden=logits, head=identity),
        "draft logits": Teacher(logits=logits[..., kept], logsumexp=lse, choice=choice),
        "draft head": Teacher(hidden=logits, head=identity[kept], logsumexp=lse, choice=choice),
        "top-k of all": Teacher(top_ids=everything.indices, top_values=everything.values, logsumexp=lse),
    }


FORMS = ("full logits", "full head", "draft logits", "draft head", "top-k of all")


@pytest.mark.parametrize("mass", ["vocabulary", "full"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_forms_of_a_teacher(draft, form, mass):
    logits = full_logits()
    kept = draft.draft_to_target(torch.arange(SIZE))
    bound = BoundTeacher(forms(draft, logits)[form], draft, mass, need_log=not form.startswith("top-k"), chunk=2)
    index = torch.tensor([1, 3, 4, 9])
    rows = bound.rows(index)
    log_p = logits.log_softmax(-1).flatten(0, 1)[index][:, kept]
    log_p = log_p.log_softmax(-1) if mass == "vocabulary" else log_p
    torch.testing.assert_close(rows.p, log_p.exp())
    if rows.log_p is not None:
        torch.testing.assert_close(rows.log_p, log_p)
    if mass == "full":
        torch.testing.assert_close(rows.mass, log_p.exp().sum(-1, keepdim=True))
        assert (rows.mass < 1).all()
    elif rows.mass is not None:
        torch.testing.assert_close(rows.mass, torch.ones(4, 1, dtype=torch.float64))
    wanted = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    assert torch.equal(bound.choices(wanted)[wanted], logits.argmax(-1)[wanted])


@torch.no_grad()
def test_top_k_leaves_the_rest_out(draft):
    logits = full_logits()
    top = logits.topk(4, -1)
    teacher = Teacher(top_ids=top.indices, top_values=top.values, logsumexp=logits.logsumexp(-1))
    kept = draft.draft_to_target(torch.arange(SIZE))
    p = torch.where(logits >= top.values[..., -1:], logits.softmax(-1), 0.0).flatten(0, 1)[:, kept]
    index = torch.arange(10)
    torch.testing.assert_close(BoundTeacher(teacher, draft, "full", False).rows(index).p, p)
    renormalised = BoundTeacher(teacher, draft, "vocabulary", False).rows(index).p
    torch.testing.assert_close(renormalised, (p / p.sum(-1, keepdim=True)).nan_to_num(0.0))
    # A row whose stored tokens are all unknown to the draft teaches nothing, and doesn't break the others.
    outside = (~draft.t2d).nonzero()[:, 0]
    teacher.top_ids = teacher.top_ids.clone()
    teacher.top_ids[0, 0] = outside[:4]
    rows = BoundTeacher(teacher, draft, "vocabulary", False).rows(index)
    assert rows.p[0].tolist() == [0.0] * SIZE
    torch.testing.assert_close(rows.p[1:], renormalised[1:])
    value, grad = loss_and_gradient(parse_loss("kl"), rows, draw(10, SIZE))
    assert value[0] == 0
    assert grad[0].abs().max() == 0
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("teacher", "mass", "log", "message"),
    [
        ({}, "vocabulary", False, "exactly one"),
        ({"hidden": 6}, "vocabulary", False, "exactly one"),
        ({"logits": 16, "hidden": 6, "head": 6}, "vocabulary", False, "exactly one"),
        ({"logits": 13}, "vocabulary", False, r"13 logits.*\(16\).*\(12\)"),
        ({"logits": 12}, "full", False, "logsumexp"),
        ({"top_ids": 4, "top_values": 4}, "full", False, "logsumexp"),
        ({"top_ids": 4, "top_values": 4}, "vocabulary", True, "reverse_kl"),
        ({"logits": 16}, "half", False, "'half'"),
    ],
)
def test_refuses_teachers(draft, teacher, mass, log, message):
    with pytest.raises(ValueError, match=message):
        BoundTeacher(Teacher(**{name: torch.zeros(2, 5, n) for name, n in teacher.items()}), draft, mass, log)
