"""Training-time test (EAGLE-3, section 3.2): the draft is trained on its own recurrent states, several steps deep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as run_checkpointed

from ..modeling_eagle3 import Eagle3DraftModel
from .attention import StepLayout, StepMemory
from .losses import HeadLossPlan, TeacherRows, head_loss, needs_log, parse_loss
from .slots import Slots, shift
from .teacher import BoundTeacher, Teacher

__all__ = ["STEP_DECAY", "Teacher", "TrainingTimeTest", "shift", "training_time_test"]

STEP_DECAY = 0.8


@dataclass
class TrainingTimeTest:
    """What [`training_time_test`] returns. Lists have one entry a step.

    Attributes:
        loss: scalar, the weighted sum of `losses`.
        losses: scalars, mean loss over the slots that learn (or the sum over the given denominator).
        scored: bool `[B, T]`, slots whose predicted token is an answer token.
        correct: bool `[B, T]`, slots of `scored` where the draft's first choice is the teacher's.
        tokens: int64 `[B, T]`, the draft's first choice as a target id; -1 where it wasn't computed.
        logits: `[B, T, Vd]` for every slot, only with `keep_logits=True`.
        counts: int64 `[steps]`, slots that learn.
    """

    loss: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    scored: list[torch.Tensor] = field(default_factory=list)
    correct: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    counts: torch.Tensor | None = None

    @property
    def accuracy(self) -> list[float]:
        """Share of answer positions the draft gets right, positions outside its vocabulary counted as misses."""
        return [float(c.sum()) / max(int(s.sum()), 1) for c, s in zip(self.correct, self.scored)]


def training_time_test(
    draft: Eagle3DraftModel,
    features: torch.Tensor,
    embeddings: nn.Module | torch.Tensor | None,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    teacher: Teacher | None = None,
    teacher_hidden: torch.Tensor | None = None,
    teacher_head: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    teacher_argmax: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    steps: int = 4,
    step_weights: Sequence[float] | torch.Tensor | None = None,
    loss: str = "soft_cross_entropy",
    mass: str = "vocabulary",
    denominators: torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None = None,
    attention: str = "auto",
    checkpoint: bool = False,
    chunk: int | None = None,
    measure: bool = True,
    keep_logits: bool = False,
) -> TrainingTimeTest:
    """Loss of `steps` draft steps from every slot at once.

    Slot `t` holds the feature of token `t`. Step `k` adds the embedding of token `t+1+k`, sits at RoPE position `t+k`,
    and predicts token `t+2+k`; its teacher is the target's distribution at token `t+1+k`. Step 0 reads the features
    through `fc`, step `k` the draft's own state of step `k-1`. A slot is scored where the *predicted* token is an
    answer token, and trained where the teacher's first choice is in the draft's vocabulary too (with `mass="full"`:
    wherever it is scored).

    Rows are right-padded: with causal attention no real slot sees padding, the masks do the rest. The slots before
    the first scored one give keys in step 0 and are left out of the later steps.

    Args:
        draft: the model; its layers are called as modules, so hooks of wrappers such as FSDP run. In training mode
            attention dropout applies.
        features: `[B, T, n_aux * Ht]`.
        embeddings: the target's table, or the embeddings of `input_ids` themselves `[B, T, H]`. A draft with its own
            embeddings uses those instead of a table, and `None` will do.
        input_ids: int64 `[B, T]`.
        loss_mask: bool `[B, T]`, True on answer tokens.
        teacher: the target's distributions; or give them by the next four.
        teacher_hidden, teacher_head, teacher_logits, teacher_argmax: `Teacher.hidden`, `head`, `logits`, `choice`.
            Where the first choice can't be told, the real next token decides whether a slot is trained, and the
            teacher's first choice within the draft's vocabulary whether it is correct.
        lengths: int64 `[B]`, real tokens of each row; `None` relies on `loss_mask` being False on padding.
        document_ids: int64 `[B, T]` for packed rows: a run of equal ids is a document, negative is padding. Attention,
            shifts and positions keep to one document.
        steps: number of steps, at least 1.
        step_weights: one a step; default `0.8 ** k`.
        loss: name or weighted sum of names, as `"kl+0.5*total_variation"`; see `losses.LOSSES`.
        mass: `"vocabulary"`: the teacher is renormalised over the draft's vocabulary; `"full"`: it isn't.
        denominators: `[steps]`, what each step's sum is divided by, or a function that makes them from `counts`
            (to average over several processes or micro-batches); default: the counts, at least 1.
        attention: backend, see `attention.step_attention`.
        checkpoint: run the layers again in the backward pass instead of keeping what they computed.
        chunk: teacher rows that are scored at a time; default: by memory.
        measure: find the draft's choices too (`tokens`, `correct`); the argmax takes a tenth of a training step.
        keep_logits: also return every slot's logits (tests, analysis).

    Raises:
        ValueError: no or two teachers, weights that don't fit `steps`, an unknown name, or shapes that contradict.
    """
    weights = [STEP_DECAY**k for k in range(steps)] if step_weights is None else list(step_weights)
    if steps < 1 or len(weights) != steps:
        raise ValueError(f"steps must be at least 1 and have a weight each: {steps} steps, {len(weights)} weights")
    single = (teacher_hidden, teacher_head, teacher_logits, teacher_argmax)
    if teacher is None:
        teacher = Teacher(teacher_hidden, teacher_head, teacher_logits, choice=teacher_argmax)
    elif any(x is not None for x in single):
        raise ValueError("pass either teacher, or teacher_logits / teacher_hidden and teacher_head / teacher_argmax")
    spec = parse_loss(loss)
    bound = BoundTeacher(teacher, draft, mass, needs_log(spec), chunk)
    shape = tuple(input_ids.shape)
    for name, given in (("features", features), ("loss_mask", loss_mask), ("document_ids", document_ids)):
        if given is not None and tuple(given.shape[:2]) != shape:
            raise ValueError(f"{name} covers {tuple(given.shape[:2])} tokens, input_ids {shape}")

    slots = Slots(loss_mask, lengths, document_ids)
    choice = bound.choices(slots.answers)
    usable = slots.teachable(None if bound.full_mass else _in_vocabulary(draft, slots, choice, input_ids))
    row_of = (usable.reshape(-1).cumsum(0) - 1).view(shape)
    result = TrainingTimeTest(loss=torch.empty(0))
    learns, rows, states = [], [], []
    for k, hidden, start in _unroll(
        draft, features, embeddings, input_ids, slots, steps, attention, checkpoint, keep_logits
    ):
        learn = slots.ahead(usable, 1 + k)
        learns.append(learn)
        rows.append(shift(row_of, 1 + k)[learn])
        # The head is the largest matrix by far: only the rows that learn pass through it.
        taken = learn[:, start:].flatten().nonzero()[:, 0]
        states.append(_head_input(draft, hidden.flatten(0, 1).index_select(0, taken)))
        result.scored.append(slots.ahead(slots.answers, 1 + k))
        if keep_logits:
            result.logits.append(draft.lm_head(_head_input(draft, hidden)))

    result.counts = torch.stack([learn.sum() for learn in learns])
    divisors = denominators(result.counts) if callable(denominators) else denominators
    divisors = result.counts.clamp(min=1) if divisors is None else divisors.to(result.counts.device)
    places, best_of_teacher = usable.reshape(-1).nonzero()[:, 0], []

    def teacher_rows(begin: int, end: int) -> TeacherRows:
        with torch.no_grad():
            found = bound.rows(places[begin:end])
            if measure and choice is None:
                best_of_teacher.append(found.p.argmax(-1))
        return found

    kind = states[0].device.type
    plan = HeadLossPlan(
        teacher=teacher_rows,
        count=len(places),
        rows=rows,
        scale=torch.stack([torch.as_tensor(w, dtype=torch.float32, device=input_ids.device) for w in weights])
        / divisors,
        spec=spec,
        chunk=bound.chunk,
        dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else draft.lm_head.weight.dtype,
        measure=measure,
    )
    result.loss = head_loss(plan, draft.lm_head.weight, states)
    assert plan.sums is not None
    result.losses = list((plan.sums / divisors).unbind())
    if measure:
        if choice is None:
            choice = torch.full_like(input_ids, -1)
            choice[usable] = draft.draft_to_target(torch.cat(best_of_teacher)) if best_of_teacher else -1
        assert plan.best is not None
        for k, (learn, best) in enumerate(zip(learns, plan.best)):
            tokens = torch.full_like(input_ids, -1)
            tokens[learn] = draft.draft_to_target(best)
            result.tokens.append(tokens)
            result.correct.append(learn & (tokens == shift(choice, 1 + k)))
    return result


def _in_vocabulary(
    draft: Eagle3DraftModel, slots: Slots, choice: torch.Tensor | None, input_ids: torch.Tensor
) -> torch.Tensor:
    """Bool `[B, T]`: the draft can say what the teacher would, or where that isn't known, what came next."""
    t2d = cast(torch.Tensor, draft.t2d)
    return t2d[shift(input_ids, 1)] if choice is None else t2d[choice.clamp(min=0)] & (choice >= 0)


def _head_input(draft: Eagle3DraftModel, hidden: torch.Tensor) -> torch.Tensor:
    """What the head reads of the last layer's output."""
    return cast(torch.Tensor, draft.norm(hidden))


def _embed(
    draft: Eagle3DraftModel, embeddings: nn.Module | torch.Tensor | None, input_ids: torch.Tensor
) -> torch.Tensor:
    if isinstance(embeddings, torch.Tensor):
        return embeddings
    table = draft.get_input_embeddings() or embeddings  # as in decoding: a draft's own come first
    if table is None:
        raise ValueError("this draft has no embeddings of its own: pass the target's")
    return table(input_ids)


def _unroll(
    draft: Eagle3DraftModel,
    features: torch.Tensor,
    embeddings: nn.Module | torch.Tensor | None,
    input_ids: torch.Tensor,
    slots: Slots,
    steps: int,
    attention: str,
    checkpoint: bool,
    every_slot: bool,
) -> Any:
    """Yield `(k, output of the last layer [B, T - start, H], start)` for each step."""
    length = input_ids.shape[1]
    hidden = draft.fuse(features)
    # The residual stream stays fp32 under autocast: only the GEMMs are bf16.
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.float()
    embeds = F.pad(_embed(draft, embeddings, input_ids).to(hidden.dtype), (0, 0, 0, steps))
    first = 0 if every_slot or steps == 1 else slots.first(steps)
    layout = StepLayout(length, 0, slots.starts)
    layers = list(draft.layers)
    keys: list[list[torch.Tensor]] = [[] for _ in layers]
    values: list[list[torch.Tensor]] = [[] for _ in layers]
    start, positions = 0, slots.positions
    for k in range(steps):
        if k == 1 and first:
            # From here on only slots that are scored in some step matter.
            hidden, positions, start = hidden[:, first:], positions[:, first:], first
            layout = StepLayout(length, first, slots.starts)
        rope = draft.rotary_emb(hidden, positions + k)
        step_embeds = embeds[:, start + 1 + k : length + 1 + k]
        for index, layer in enumerate(layers):
            inputs = (
                layer,
                layout,
                attention,
                step_embeds,
                hidden,
                rope,
                len(keys[index]),
                *keys[index],
                *values[index],
            )
            if checkpoint and torch.is_grad_enabled():
                hidden, key, value = run_checkpointed(_run_layer, *inputs, use_reentrant=False)
            else:
                hidden, key, value = _run_layer(*inputs)
            keys[index].append(key)
            values[index].append(value)
        yield k, hidden, start
        hidden = cast(torch.Tensor, draft.head(hidden, None).last_hidden_state)


def _run_layer(
    layer: nn.Module,
    layout: StepLayout,
    attention: str,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    past: int,
    *kv: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's output and its new keys and values; `kv` are those of the `past` steps before, keys first."""
    memory = StepMemory(layout, list(kv[:past]), list(kv[past:]), attention)
    hidden = layer(embeds, hidden, rope, None, memory)
    assert memory.key is not None and memory.value is not None
    return hidden, memory.key, memory.value
