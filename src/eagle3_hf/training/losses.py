"""Losses between a draft's and a teacher's distribution by name, over rows in chunks, gradients made on the way.

Rows times vocabulary is the largest tensor of training; autograd would keep several in fp32. Here a chunk of rows is
scored and its gradient reduced to the size of the states and of the head before the next one starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_BYTES = {"cpu": 32 << 20}  # of one fp32 chunk [rows, vocabulary]
DEFAULT_CHUNK_BYTES = 512 << 20
Spec = tuple[tuple[float, str], ...]


@dataclass
class TeacherRows:
    """The teacher's distribution for some rows, over the draft's vocabulary.

    Attributes:
        p: fp32 `[rows, Vd]`.
        log_p: its logarithm, or `None` if that wasn't asked for.
        mass: `[rows, 1]`, `p.sum(-1)`, or `None` where that is one.
    """

    p: torch.Tensor
    log_p: torch.Tensor | None = None
    mass: torch.Tensor | None = None


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Row sums of `x * y`, without the product in memory."""
    return (x[:, None] @ y[:, :, None])[:, 0, 0]


def _soft_cross_entropy(teacher: TeacherRows, log_q: torch.Tensor, q: torch.Tensor):
    grad = q - teacher.p if teacher.mass is None else torch.addcmul(teacher.p.neg(), q, teacher.mass)
    return -_dot(teacher.p, log_q), grad


def _kl(teacher: TeacherRows, log_q: torch.Tensor, q: torch.Tensor):
    value, grad = _soft_cross_entropy(teacher, log_q, q)
    return value + torch.special.xlogy(teacher.p, teacher.p).sum(-1), grad


def _reverse_kl(teacher: TeacherRows, log_q: torch.Tensor, q: torch.Tensor):
    assert teacher.log_p is not None
    ratio = log_q - teacher.log_p
    value = _dot(q, ratio)
    return value, ratio.sub_(value[:, None]).mul_(q)


def _total_variation(teacher: TeacherRows, log_q: torch.Tensor, q: torch.Tensor):
    below = q * (q < teacher.p)
    grad = q * below.sum(-1, keepdim=True) - below
    return 1 - torch.minimum(teacher.p, q).sum(-1), grad


def _log_acceptance(teacher: TeacherRows, log_q: torch.Tensor, q: torch.Tensor):
    _, grad = _total_variation(teacher, log_q, q)
    accepted = torch.minimum(teacher.p, q).sum(-1).clamp_(min=torch.finfo(q.dtype).tiny)
    return -accepted.log(), grad.div_(accepted[:, None])


# Name to (value [rows], gradient with respect to the logits [rows, Vd]).
LOSSES: dict[str, Callable[[TeacherRows, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "soft_cross_entropy": _soft_cross_entropy,
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "total_variation": _total_variation,
    "log_acceptance": _log_acceptance,
}


def parse_loss(spec: str) -> Spec:
    """`"kl+0.5*total_variation"` to `((1.0, "kl"), (0.5, "total_variation"))`.

    Raises:
        ValueError: an unknown name (the nearest one is named) or a weight that isn't a positive number.
    """
    terms = []
    for term in spec.split("+"):
        match = re.fullmatch(r"\s*(?:([0-9.eE-]+)\s*\*)?\s*([a-z_]+)\s*", term)
        name = match[2] if match else term.strip()
        if name not in LOSSES:
            near = difflib.get_close_matches(name, LOSSES, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown loss {name!r} in {spec!r}{hint}; known: {', '.join(LOSSES)}")
        assert match is not None
        try:
            weight = float(match[1] or 1)
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight {match[1]!r} of {name!r} in {spec!r} must be a positive number")
        terms.append((weight, name))
    return tuple(terms)


def needs_log(spec: Spec) -> bool:
    """Whether a loss reads the teacher's log-probabilities, so that none of them may be minus infinity."""
    return any(name == "reverse_kl" for _, name in spec)


def chunk_size(width: int, device: torch.device) -> int:
    """Rows a chunk takes when one fp32 `[rows, width]` may have [`CHUNK_BYTES`]."""
    return max(CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES) // (4 * width), 1)


def loss_and_gradient(spec: Spec, teacher: TeacherRows, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values fp32 `[rows]` and gradients fp32 `[rows, Vd]` of `logits` `[rows, Vd]`, for the sum over rows."""
    log_q = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    if spec in (((1.0, "soft_cross_entropy"),), ((1.0, "kl"),)) and teacher.mass is None:
        # The usual case, in place: half the memory traffic.
        value = -_dot(teacher.p, log_q)
        if spec[0][1] == "kl":
            value = value + torch.special.xlogy(teacher.p, teacher.p).sum(-1)
        return value, log_q.exp_().sub_(teacher.p)
    q = log_q.exp()
    total: tuple[torch.Tensor, torch.Tensor] | None = None
    for weight, name in spec:
        value, grad = LOSSES[name](teacher, log_q, q)
        value, grad = value * weight, grad.mul_(weight)
        total = (value, grad) if total is None else (total[0] + value, total[1].add_(grad))
    assert total is not None
    return total


class _HeadLoss(torch.autograd.Function):
    """Weighted sum over steps and rows; gradients of the states and of the head are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, plan: HeadLossPlan, weight: torch.Tensor, *states: torch.Tensor):
        dtype, device = plan.dtype, weight.device
        head = weight.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = torch.zeros(len(states), dtype=wide, device=device)
        learns_head, learns_states = plan.gradients and weight.requires_grad, plan.gradients
        grad_head = torch.zeros_like(weight, dtype=wide) if learns_head else None
        grads = [torch.empty_like(state) if learns_states else None for state in states]
        best: list[list[torch.Tensor]] = [[] for _ in states]
        edges = plan.edges()
        for chunk, start in enumerate(range(0, plan.count, plan.chunk)):
            teacher = plan.teacher(start, min(start + plan.chunk, plan.count))
            for step, state in enumerate(states):
                begin, end = edges[step][chunk], edges[step][chunk + 1]
                if begin == end:
                    continue
                part = state[begin:end].to(dtype)
                logits = part @ head.T
                if plan.measure:
                    best[step].append(logits.argmax(-1))
                rows = _select(teacher, plan.rows[step][begin:end] - start, end - begin)
                value, grad = loss_and_gradient(plan.spec, rows, logits)
                del logits
                sums[step] += value.sum()
                if not plan.gradients:
                    continue
                grad = grad.mul_(plan.scale[step]).to(dtype)
                grads[step][begin:end] = grad @ head  # type: ignore[index]
                if grad_head is None:
                    continue
                if grad_head.dtype == dtype:
                    grad_head.addmm_(grad.T, part)
                else:
                    grad_head += grad.T @ part
        plan.best = [torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device) for parts in best]
        plan.sums = sums
        if plan.gradients:
            ctx.save_for_backward(*(g for g in (None if grad_head is None else grad_head.to(weight.dtype), *grads)))
        return (sums * plan.scale).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        return None, *(None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)


def _select(teacher: TeacherRows, index: torch.Tensor, count: int) -> TeacherRows:
    """The rows `index` (ascending, distinct) of a chunk; the chunk itself where that is all of them."""
    if count == len(teacher.p):
        return teacher
    parts = (None if x is None else x[index] for x in (teacher.p, teacher.log_p, teacher.mass))
    return TeacherRows(*parts)  # type: ignore[arg-type]


@dataclass
class HeadLossPlan:
    """What [`head_loss`] needs beside tensors that learn, and where it leaves what isn't differentiable.

    Attributes:
        teacher: from a range of teacher rows to their distributions.
        count: number of teacher rows.
        rows: for each step int64 `[M_k]`, ascending: the teacher row of each of its states.
        scale: fp32 `[steps]`, factor of each step's sum in the total.
        spec: see [`parse_loss`].
        chunk: teacher rows at a time.
        dtype: of the GEMMs.
        measure: also find the draft's first choices.
        sums: fp32 `[steps]`, filled in: the unscaled sums.
        best: int64 `[M_k]` for each step, filled in with `measure`: draft ids.
    """

    teacher: Callable[[int, int], TeacherRows]
    count: int
    rows: list[torch.Tensor]
    scale: torch.Tensor
    spec: Spec
    chunk: int
    dtype: torch.dtype
    measure: bool = False
    gradients: bool = True
    sums: torch.Tensor | None = None
    best: list[torch.Tensor] | None = None

    def edges(self) -> list[list[int]]:
        """For each step, where its states' chunks begin and end; one host-device sync."""
        starts = list(range(0, self.count, self.chunk))
        limits = torch.tensor([*starts, self.count], device=self.scale.device)
        return torch.stack([torch.searchsorted(rows, limits) for rows in self.rows]).tolist()


@torch.compiler.disable
def head_loss(plan: HeadLossPlan, weight: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
    """`sum_k scale_k * sum_rows loss(teacher row, softmax(states_k @ weight.T))`, a scalar.

    A teacher row is made once and used by the states of all steps that stand on it. Nothing of size rows times
    vocabulary outlives its chunk; the gradients are exact.

    Args:
        plan: teacher and options; its `sums` and `best` are filled in.
        weight: `[Vd, H]`, the head.
        states: `[M_k, H]` for each step, what the head reads.
    """
    plan.gradients = torch.is_grad_enabled() and (weight.requires_grad or any(s.requires_grad for s in states))
    with torch.autocast(weight.device.type, enabled=False):
        return _HeadLoss.apply(plan, weight, *states)


class _LogitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, teacher: Any, spec: Spec, chunk: int, gradients: bool):
        total = torch.zeros((), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
        total = total.to(logits.device)
        kept = torch.empty_like(logits) if gradients else None
        for start in range(0, len(logits), chunk):
            end = min(start + chunk, len(logits))
            value, grad = loss_and_gradient(spec, teacher(start, end), logits[start:end])
            total += value.sum()
            if kept is not None:
                kept[start:end] = grad
        if kept is not None:
            ctx.save_for_backward(kept)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        (kept,) = ctx.saved_tensors
        return kept * grad.to(kept.dtype), None, None, None, None


def logit_loss(
    logits: torch.Tensor, teacher: torch.Tensor, loss: str = "soft_cross_entropy", chunk: int | None = None
) -> torch.Tensor:
    """Sum over rows of a loss between two sets of logits over one vocabulary, in fp32 chunks.

    Args:
        logits: `[rows, V]`, any floating dtype, learns.
        teacher: `[rows, V]` logits, no gradient.
        loss: see [`parse_loss`].
        chunk: rows at a time.

    Returns:
        fp32 scalar.
    """
    spec = parse_loss(loss)

    def rows(start: int, end: int) -> TeacherRows:
        part = teacher[start:end].detach()
        log_p = F.log_softmax(part if part.dtype == torch.float64 else part.float(), dim=-1)
        return TeacherRows(log_p.exp(), log_p) if needs_log(spec) else TeacherRows(log_p.exp_())

    size = chunk or chunk_size(logits.shape[-1], logits.device)
    return _LogitLoss.apply(logits, rows, spec, size, torch.is_grad_enabled() and logits.requires_grad)
