"""Training-time test (EAGLE-3, section 3.2): the draft is trained on its own recurrent states, several steps deep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from ..modeling_eagle3 import Eagle3Attention, Eagle3DecoderLayer, Eagle3DraftModel

STEP_DECAY = 0.8


@dataclass
class TrainingTimeTest:
    """What [`training_time_test`] returns. Lists have one entry a step.

    Attributes:
        loss: scalar, the weighted sum of `losses`.
        losses: scalars, mean soft cross-entropy over the slots that have a usable teacher.
        scored: bool `[B, T]`, slots whose predicted token is an answer token.
        correct: bool `[B, T]`, slots of `scored` where the draft's first choice is the teacher's.
        tokens: int64 `[B, T]`, the draft's first choice as a target id; -1 where it wasn't computed.
        logits: `[B, T, Vd]` for every slot, only with `keep_logits=True`.
    """

    loss: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    scored: list[torch.Tensor] = field(default_factory=list)
    correct: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def accuracy(self) -> list[float]:
        """Share of answer positions the draft gets right, positions outside its vocabulary counted as misses."""
        return [float(c.sum()) / max(int(s.sum()), 1) for c, s in zip(self.correct, self.scored)]


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross-entropy `-sum p log softmax(logits)`, `p` constant.

    The gradient `softmax(logits) - p` is made in the forward pass, in the buffer of the log-probabilities: rows times
    vocabulary is the largest tensor of training, and autograd would keep three of them.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log_q = logits.float().log_softmax(-1)
        loss = -torch.dot(target.reshape(-1), log_q.reshape(-1))
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_q.exp_().sub_(target).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0].to(grad.dtype), None


def soft_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over rows of the soft cross-entropy.

    Args:
        logits: `[rows, Vd]`, any floating dtype.
        target: `[rows, Vd]` fp32 distribution, no gradient.

    Returns:
        fp32 scalar.
    """
    return _SoftCrossEntropy.apply(logits, target)


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """`out[:, t] = x[:, t + by]`, zero (False) past the end. `x`: `[B, T]`."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])))


def ttt_attention(
    attention: Eagle3Attention,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    bias: torch.Tensor,
) -> torch.Tensor:
    """Attention of step `k`: causal over the keys of step 0, the same index only for those of steps 1..k.

    A slot's later steps were drafted for that slot alone, so only the diagonal of their keys is visible to it. These
    diagonals are `k` scores a slot, appended to the `T` scores of step 0 under one fp32 softmax.

    Args:
        attention: supplies the scale.
        query: `[B, heads, Q, D]`, slots `T-Q..T-1`.
        keys, values: `[B, kv_heads, T, D]` of step 0, then `[B, kv_heads, Q, D]` of each later step.
        bias: fp32 `[Q, T]`, 0 where the step-0 key is visible, else -inf.

    Returns:
        `[B, Q, heads * D]`, before `o_proj`.
    """
    batch, heads, count, dim = query.shape
    kv_heads, length = keys[0].shape[1], keys[0].shape[2]
    # Query head i reads kv head i // groups, so a view groups them; keys need not be repeated.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, count, dim) * attention.scaling
    scores = grouped.flatten(2, 3) @ keys[0].transpose(2, 3)
    scores = scores.view(batch, kv_heads, -1, count, length).float() + bias
    if len(keys) > 1:
        own = [(grouped * key.unsqueeze(2)).float().sum(-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat([scores, *own], dim=-1)
    weights = scores.softmax(-1)
    if attention.training and attention.attention_dropout:
        weights = F.dropout(weights, attention.attention_dropout)
    weights = weights.to(values[0].dtype)
    out = weights[..., :length].flatten(2, 3) @ values[0]
    out = out.view(batch, kv_heads, -1, count, dim)
    for step, value in enumerate(values[1:]):
        out = out + weights[..., length + step, None] * value.unsqueeze(2)
    return out.reshape(batch, heads, count, dim).transpose(1, 2).reshape(batch, count, heads * dim)


def training_time_test(
    draft: Eagle3DraftModel,
    features: torch.Tensor,
    embeddings: nn.Module | torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    teacher_hidden: torch.Tensor | None = None,
    teacher_head: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    teacher_argmax: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    steps: int = 4,
    step_weights: list[float] | None = None,
    measure: bool = True,
    keep_logits: bool = False,
) -> TrainingTimeTest:
    """Loss of `steps` draft steps from every slot at once.

    Slot `t` holds the feature of token `t`. Step `k` adds the embedding of token `t+1+k`, sits at RoPE position `t+k`,
    and predicts token `t+2+k`; its target is the teacher's distribution at token `t+1+k`, renormalised over the draft
    vocabulary. Step 0 reads the features through `fc`, step `k` the draft's own state of step `k-1`. A slot is scored
    where the *predicted* token is an answer token, and trained where the teacher's first choice is in the vocabulary.

    Sequences are right-padded: with causal attention no real slot sees padding, the masks do the rest. The slots
    before the first scored one give keys in step 0 and are left out of the later steps.

    Args:
        draft: the model; in training mode attention dropout applies.
        features: `[B, T, n_aux * Ht]`.
        embeddings: the target's table, or the embeddings of `input_ids` themselves `[B, T, H]`.
        input_ids: int64 `[B, T]`.
        loss_mask: bool `[B, T]`, True on answer tokens.
        teacher_hidden: `[B, T, Ht]`, the target's last state after its final norm; needs `teacher_head`.
        teacher_head: `[Vd, Ht]`, the target's head rows of the draft vocabulary, in its order.
        teacher_logits: `[B, T, Vd]`, instead of the two.
        teacher_argmax: int64 `[B, T]`, the teacher's first choice in the full vocabulary (negative: unknown, counted
            as outside the draft's). Without it the real next token decides whether a slot is trained, and the
            teacher's first choice within the draft vocabulary whether it is correct.
        lengths: int64 `[B]`, real tokens of each row; `None` relies on `loss_mask` being False on padding.
        steps: number of steps, at least 1.
        step_weights: one a step; default `0.8 ** k`.
        measure: find the draft's choices too (`tokens`, `correct`); the argmax takes a tenth of a training step.
        keep_logits: also return every slot's logits (tests, analysis).

    Raises:
        ValueError: no or two teachers, or weights that don't fit `steps`.
    """
    if (teacher_logits is None) == (teacher_hidden is None or teacher_head is None):
        raise ValueError("pass either teacher_logits, or teacher_hidden and teacher_head")
    weights = [STEP_DECAY**k for k in range(steps)] if step_weights is None else list(step_weights)
    if steps < 1 or len(weights) != steps:
        raise ValueError(f"steps must be at least 1 and have a weight each: {steps} steps, {len(weights)} weights")
    batch, length = input_ids.shape
    device = input_ids.device
    mask = loss_mask.bool()
    if lengths is not None:
        mask = mask & (torch.arange(length, device=device) < lengths[:, None])

    # Teacher, indexed by the token j it stands on. Each row is used by up to `steps` slots, so softmax it once.
    layers = cast(list[Eagle3DecoderLayer], list(draft.layers))
    t2d = cast(torch.Tensor, draft.t2d)
    if teacher_argmax is None:
        in_vocab = t2d[shift(input_ids, 1)]
    else:
        in_vocab = t2d[teacher_argmax.clamp(min=0)] & (teacher_argmax >= 0)
    predicts_answer = shift(mask, 1)
    usable = predicts_answer & in_vocab
    usable[:, 0] = False  # no slot predicts token 1
    row_of = (usable.reshape(-1).cumsum(0) - 1).view(batch, length)
    with torch.no_grad():
        if teacher_logits is None:
            assert teacher_hidden is not None and teacher_head is not None
            teacher_rows = F.linear(teacher_hidden[usable].to(teacher_head.dtype), teacher_head)
        else:
            teacher_rows = teacher_logits[usable]
        if teacher_argmax is None:
            choice = torch.full_like(input_ids, -1)
            choice[usable] = draft.draft_to_target(teacher_rows.argmax(-1))
        else:
            choice = teacher_argmax
        target = teacher_rows.float().softmax(-1)
        del teacher_rows

    any_scored = (predicts_answer[:, 1:]).any(0).nonzero()
    # Step k predicts k tokens further on: step `steps-1` of slot t is the first to reach the answer.
    first = max(int(any_scored[0]) + 1 - steps, 0) if len(any_scored) else 0
    first = 0 if keep_logits else first

    embeds = embeddings(input_ids) if isinstance(embeddings, nn.Module) else embeddings
    hidden = draft.fuse(features)
    # The residual stream stays fp32 under autocast: only the GEMMs are bf16.
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.float()
    embeds = F.pad(embeds.to(hidden.dtype), (0, 0, 0, steps))
    positions = torch.arange(length, device=device)[None]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    bias = torch.zeros(length, length, device=device).masked_fill_(~causal, float("-inf"))

    result = TrainingTimeTest(loss=hidden.new_zeros((), dtype=torch.float32))
    keys: list[list[torch.Tensor]] = [[] for _ in layers]
    values: list[list[torch.Tensor]] = [[] for _ in layers]
    start = 0
    for k in range(steps):
        if k == 1 and first:
            # From here on only slots that are scored in some step matter.
            hidden, positions, bias, start = hidden[:, first:], positions[:, first:], bias[first:], first
        rope = draft.rotary_emb(hidden, positions + k)
        step_embeds = embeds[:, start + 1 + k : length + 1 + k]
        for index, layer in enumerate(layers):
            x, residual = layer.attention_input(step_embeds, hidden)
            query, key, value = layer.self_attn.project(x, rope)
            keys[index].append(key)
            values[index].append(value)
            attended = ttt_attention(layer.self_attn, query, keys[index], values[index], bias)
            hidden = layer.feed_forward(residual + layer.self_attn.o_proj(attended))
        learn = shift(usable, 1 + k)
        rows = shift(row_of, 1 + k)[learn]
        step_target = target if len(rows) == len(target) else target[rows]
        logits, loss = _score(draft, hidden, learn[:, start:], step_target, keep_logits)
        result.loss = result.loss + weights[k] * loss
        result.losses.append(loss.detach())
        result.scored.append(shift(predicts_answer, 1 + k))
        if measure:
            tokens = torch.full_like(choice, -1)
            kept = logits.detach().reshape(-1, logits.shape[-1])
            kept = kept[learn[:, start:].reshape(-1)] if keep_logits else kept
            tokens[learn] = draft.draft_to_target(kept.argmax(-1))
            result.tokens.append(tokens)
            result.correct.append(learn & (tokens == shift(choice, 1 + k)))
        if keep_logits:
            result.logits.append(logits)
        hidden = cast(torch.Tensor, draft.head(hidden, None).last_hidden_state)
    return result


def _score(
    draft: Eagle3DraftModel, hidden: torch.Tensor, learn: torch.Tensor, target: torch.Tensor, every_slot: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the slots `learn` `[B, Q]`, or of every slot, and the mean loss of those slots.

    `hidden`: `[B, Q, H]`, the last layer's output; `target`: `[learn.sum(), Vd]`, in the order of the slots.
    """
    taken = learn.reshape(-1).nonzero()[:, 0]
    if every_slot:
        logits = cast(torch.Tensor, draft.head(hidden, 0).logits)
        chosen = logits.reshape(-1, logits.shape[-1])[taken]
    else:
        # The head is the largest matrix by far: only the rows that learn pass through it.
        logits = cast(torch.Tensor, draft.head(hidden.reshape(1, -1, hidden.shape[-1])[:, taken], 0).logits)
        chosen = logits[0]
    return logits, soft_cross_entropy(chosen, target) / max(len(target), 1)
