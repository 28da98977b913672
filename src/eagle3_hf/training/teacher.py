"""The teacher's distributions over the draft's vocabulary, from hidden states, full logits or stored top-k logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..modeling_eagle3 import Eagle3DraftModel
from .losses import TeacherRows, chunk_size

MASSES = ("vocabulary", "full")


@dataclass
class Teacher:
    """What the target thought at each token, in one of three forms; row `j` is its prediction of token `j + 1`.

    Attributes:
        hidden: `[B, T, Ht]`, the target's last state after its final norm; needs `head`.
        head: `[Vd, Ht]`, the target's head rows of the draft vocabulary in its order, or all of them `[V, Ht]`.
        logits: `[B, T, Vd]` or `[B, T, V]`.
        top_ids: int64 `[B, T, K]`, target ids of the largest logits; needs `top_values`.
        top_values: `[B, T, K]`, those logits. What isn't among them counts as zero probability.
        logsumexp: `[B, T]`, over the full vocabulary; for `mass="full"` where the form doesn't hold it itself.
        choice: int64 `[B, T]`, the first choice over the full vocabulary, negative where unknown. Without it, it is
            found from forms that span the vocabulary and from top-k; the others leave it open.

    Raises:
        ValueError: not exactly one form.
    """

    hidden: torch.Tensor | None = None
    head: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_values: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None
    choice: torch.Tensor | None = None

    def __post_init__(self) -> None:
        pairs = ((self.hidden, self.head), (self.top_ids, self.top_values))
        forms = (self.hidden, self.logits, self.top_ids)
        if any((a is None) != (b is None) for a, b in pairs) or sum(form is not None for form in forms) != 1:
            raise ValueError(
                "a teacher is exactly one of: teacher_logits; teacher_hidden and teacher_head; top_ids and top_values"
            )

    @property
    def width(self) -> int:
        """Entries of its logits: the draft's vocabulary, the target's, or `K`."""
        for form in (self.logits, self.top_values):
            if form is not None:
                return form.shape[-1]
        assert self.head is not None
        return self.head.shape[0]

    def spans(self, draft: Eagle3DraftModel) -> bool:
        """Whether its logits are over the target's whole vocabulary.

        Raises:
            ValueError: they are over neither vocabulary.
        """
        if self.top_ids is not None:
            return False
        full, pruned = draft.config.vocab_size, draft.config.draft_vocab_size
        if self.width not in (full, pruned):
            raise ValueError(
                f"the teacher has {self.width} logits a token: neither the target's vocabulary ({full}) nor the "
                f"draft's ({pruned})"
            )
        return self.width == full


class BoundTeacher:
    """A [`Teacher`] for one draft.

    Args:
        teacher: the data.
        draft: whose vocabulary it is mapped to.
        mass: `"vocabulary"`: renormalised over the draft's vocabulary; `"full"`: what lies outside stays outside, so
            that rows sum to less than one.
        need_log: give log-probabilities too.
        chunk: rows at a time; `None`: by memory.

    Raises:
        ValueError: a form that can't give what is asked for.
    """

    def __init__(self, teacher: Teacher, draft: Eagle3DraftModel, mass: str, need_log: bool, chunk: int | None = None):
        if mass not in MASSES:
            raise ValueError(f"unknown mass {mass!r}: one of {', '.join(MASSES)}")
        self.teacher, self.full_mass, self.need_log = teacher, mass == "full", need_log
        self.spans = teacher.spans(draft)
        self.size, self.vocab = draft.config.draft_vocab_size, draft.config.vocab_size
        if need_log and teacher.top_ids is not None:
            raise ValueError("reverse_kl needs every log-probability: stored top-k logits leave most of them out")
        if self.full_mass and not self.spans and teacher.logsumexp is None:
            raise ValueError("mass='full' needs logits over the target's whole vocabulary, or their logsumexp")
        self.pruned = self.size < self.vocab
        self.kept = draft.draft_to_target(torch.arange(self.size, device=draft.d2t.device))
        self.head = teacher.head
        if self.head is not None and self.spans and self.pruned and not self.full_mass:
            self.head = self.head[self.kept.to(self.head.device)]  # the rest of the rows would cancel out
        self.chunk = chunk or chunk_size(self.vocab if self.spans else self.size, draft.d2t.device)

    def choices(self, wanted: torch.Tensor) -> torch.Tensor | None:
        """First choices, int64 `[B, T]`, right at least where `wanted` (bool) is set; `None`: the form can't tell."""
        teacher = self.teacher
        if teacher.choice is not None:
            return teacher.choice
        if teacher.top_ids is not None and teacher.top_values is not None:
            return teacher.top_ids.gather(-1, teacher.top_values.argmax(-1, keepdim=True))[..., 0]
        if not self.spans:
            return None
        if teacher.logits is not None:
            return teacher.logits.argmax(-1)
        assert teacher.hidden is not None and teacher.head is not None
        found = [
            F.linear(part.to(teacher.head.dtype), teacher.head).argmax(-1)
            for part in teacher.hidden[wanted].split(self.chunk)
        ]
        out = torch.full_like(wanted, -1, dtype=torch.long)
        if found:
            out[wanted] = torch.cat(found)
        return out

    def rows(self, index: torch.Tensor) -> TeacherRows:
        """Distributions at the flat positions `index` (int64 `[rows]` into `B * T`)."""
        teacher = self.teacher
        total = None if teacher.logsumexp is None else _wide(teacher.logsumexp.flatten()[index])[:, None]
        if teacher.top_ids is not None and teacher.top_values is not None:
            return self._top(teacher.top_ids.flatten(0, 1)[index], teacher.top_values.flatten(0, 1)[index], total)
        if teacher.logits is not None:
            logits = teacher.logits.flatten(0, 1)[index]
        else:
            assert teacher.hidden is not None and self.head is not None
            logits = F.linear(teacher.hidden.flatten(0, 1)[index].to(self.head.dtype), self.head)
        logits = _wide(logits)
        if self.full_mass and self.pruned:
            total = logits.logsumexp(-1, keepdim=True) if self.spans else total
            log_p = (logits[:, self.kept] if self.spans else logits) - total
            p = log_p.exp()
            return TeacherRows(p, log_p if self.need_log else None, p.sum(-1, keepdim=True))
        if logits.shape[-1] != self.size:
            logits = logits[:, self.kept]
        if not self.need_log:
            return TeacherRows(logits.softmax(-1))
        log_p = logits.log_softmax(-1)
        return TeacherRows(log_p.exp(), log_p)

    def _top(self, ids: torch.Tensor, values: torch.Tensor, total: torch.Tensor | None) -> TeacherRows:
        draft_ids = torch.full((self.vocab,), -1, dtype=torch.long, device=ids.device)
        draft_ids[self.kept.to(ids.device)] = torch.arange(self.size, device=ids.device)
        ids, values = draft_ids[ids], _wide(values)
        values = values.masked_fill(ids < 0, float("-inf"))
        if not self.full_mass:
            total = values.logsumexp(-1, keepdim=True)
        assert total is not None
        # A row with none of its tokens in the draft's vocabulary has total -inf: it teaches nothing rather than nan.
        share = (values - total).exp().nan_to_num_(nan=0.0)
        p = torch.zeros(len(ids), self.size, dtype=values.dtype, device=ids.device)
        p.scatter_add_(1, ids.clamp(min=0), share)
        # The mass, which is one or zero when renormalised, keeps the gradient of such a row at zero.
        return TeacherRows(p, None, p.sum(-1, keepdim=True))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
