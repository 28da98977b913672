"""A check of a finished export against the models it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from .model import Eagle3NeuronModelForCausalLM

_NEW_TOKENS = 16


@contextmanager
def _plain_greedy(*models: Any) -> Iterator[None]:
    """Both without the target's own defaults: no penalties, no sampling, and no EOS that would cut answers short."""
    before = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in zip(models, before):
            model.generation_config = config


def compare(exported: Eagle3NeuronModelForCausalLM, target: Any, new_tokens: int = _NEW_TOKENS) -> int:
    """Greedy answers of both to random prompts, one of another length in each row of the compiled batch.

    Args:
        exported: loaded, in float32.
        target: the model it was made from.
        new_tokens: most tokens for each row.

    Returns:
        How many tokens were compared.

    Raises:
        ValueError: they differ.
    """
    config = exported.neuron_config
    new_tokens = min(new_tokens, config.sequence_length - 2)
    longest = min(config.context_buckets[-1], config.sequence_length - new_tokens)  # type: ignore[index]
    vocabulary = target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (config.batch_size, longest), generator=generator)
    total = 0
    rows = [ids[row, : max(1, longest - row * longest // config.batch_size)] for row in range(config.batch_size)]
    width = max(map(len, rows))
    padded, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, text in enumerate(rows):
        padded[row, width - len(text) :] = text
        mask[row, width - len(text) :] = 1
    with _plain_greedy(exported, target):
        answers = exported.generate(padded, mask, max_new_tokens=new_tokens)
        # Without a mask, transformers would take prompt tokens equal to the pad id for padding.
        plain = [
            target.generate(text[None], attention_mask=torch.ones_like(text[None]), max_new_tokens=new_tokens)
            for text in rows
        ]
    for text, answer, whole in zip(rows, answers, plain):
        wanted = whole[0, len(text) :].tolist()
        if (has := answer[width:].tolist()[: len(wanted)]) != wanted:
            raise ValueError(f"the exported graphs don't write what the model writes: {has} instead of {wanted}")
        total += len(wanted)
    return total
