"""Whether a target gives a tree's nodes the logits that their texts have in plain forwards, looked at once.

Families that read masks, positions or caches in a way of their own would give wrong output without any error. They
are too many to list (and models with remote code can't be listed), so each target shows it on a few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList

from ..attention import grouped_attention
from ..aux_layers import text_config
from .cache import SpeculativeCache
from .tree import from_parents
from .verifier import Verifier

_PARENTS, _DEPTHS = [0, 0, 0, 2], [0, 1, 1, 2]
_PATH = [0, 2, 3]  # past a sibling: node 1 must stay out of its sight
# Root-mean-square deviation, in standard deviations of the logits. Over 55 families with tiny random weights in
# float32, right ones were off by at most 4e-6 and wrong ones by 0.013 to 0.9.
_TOLERANCE = 1e-3
# bfloat16's own rounding gave 0.08 on SmolLM2, so rounded weights or activations are only looked at for plain failure.
_ROUGH = 0.5


def check_target(target: Any, aux_ids: tuple[int, ...], device: torch.device) -> None:
    """Compare a small tree in a batch of two lengths with plain forwards; nothing is done a second time.

    Costs four forwards of a few tokens, once a model (again after another attention implementation or dtype was set).
    Leaves nothing behind but the mark that it was done.

    Args:
        target: a model with [`Eagle3TargetMixin`].
        aux_ids: aux hidden states that will be captured.
        device: where `generate()` holds its inputs.

    Raises:
        ValueError: the logits differ, or the model can't run the tree.
    """
    vocab, name = text_config(target).vocab_size, getattr(target, "_eagle3_original_class", type(target)).__name__
    kind = (text_config(target)._attn_implementation, target.dtype)
    # Dropout of a model in training mode would differ from forward to forward.
    if getattr(target, "_eagle3_checked", None) == kind or target.training or vocab < 10:
        return
    tokens = (torch.arange(10, device=device) * 7 + 3) % vocab
    texts, nodes = [tokens[:3], tokens[3:4]], torch.stack((tokens[4:8], tokens[6:10]))
    # Qwen-VL keeps the offset of the last text's image positions on the model.
    kept = [(m, m.rope_deltas) for m in target.modules() if "rope_deltas" in vars(m)]
    try:
        found = _tree_logits(target, aux_ids, texts, nodes)
        plain = [_plain_logits(target, torch.cat((text, node[_PATH]))[None]) for text, node in zip(texts, nodes)]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"{name} can't run draft trees: {error}") from error
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas
    for row, logits in enumerate(plain):
        expected = logits[-len(_PATH) :].float()
        off = (found[row, _PATH].float() - expected).pow(2).mean().sqrt() / expected.std()
        if not off <= deviation_allowed(target, logits.device):
            raise ValueError(
                f"{name} doesn't give draft trees the logits of plain forwards (off by {float(off):.2g} standard "
                "deviations): it reads attention masks, positions or its cache in a way of its own"
            )
    target._eagle3_checked = kind


def _tree_logits(target: Any, aux_ids: tuple[int, ...], texts: list[torch.Tensor], nodes: torch.Tensor) -> torch.Tensor:
    """Logits `[rows, nodes, vocab]` of the tree behind each text, run as a round of speculation runs it."""
    cache = SpeculativeCache(text_config(target).num_hidden_layers)
    verifier = Verifier(target, cache, LogitsProcessorList(), len(texts), aux_ids, False)
    with grouped_attention(target):
        verifier.prefill(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), list(map(len, texts)))
        shape = [torch.tensor([line, line], device=nodes.device) for line in (_PARENTS, _DEPTHS)]
        tree = from_parents(nodes, shape[0], shape[1], 2)
        return verifier.forward(tree, None, None)[0]  # type: ignore[arg-type]


def _plain_logits(target: Any, ids: torch.Tensor) -> torch.Tensor:
    # With a mask, as generate() has it: GLM-4V of 4.57 can't do without.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True}
    return target(**inputs).logits[0]


def deviation_allowed(target: Any, device: torch.device) -> float:
    """Most that a text's logits may differ between forwards of different shapes, in their own standard deviations."""
    return _TOLERANCE if _is_exact(target, device) else _ROUGH


def _is_exact(target: Any, device: torch.device) -> bool:
    """Whether forwards round nothing below float32: no half precision, autocast or quantised weights."""
    if torch.is_autocast_enabled(device.type) or getattr(target, "hf_quantizer", None) is not None:
        return False
    if any("quant" in type(module).__module__ for module in target.modules()):
        return False
    wide = (torch.float32, torch.float64)
    return all(type(p) is torch.nn.Parameter and p.dtype in wide for p in target.parameters())
