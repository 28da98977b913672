"""What the tests of training data share: a byte-level tokenizer with chat templates, and a tiny target that uses it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|end|>", "<think>", "</think>"]
_CORPUS = [
    "the sky is blue because of the way light is scattered\n\n\nuser system assistant",
    "what is a cat\n\nyes no",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, with the answer (not its end) marked.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts are kept for the last turn only, as Qwen3 and others do.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that finished turns don't show, as DeepSeek-R1 does.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Another end for the last answer than for earlier ones, as gpt-oss does.
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}<|im_end|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.lru_cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS * 4, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL[:4])
    )
    tokenizer.add_tokens(SPECIAL[4:])
    return tokenizer.to_str()


def tiny_tokenizer(template: str = CHATML) -> Any:
    """A byte-level BPE tokenizer with this chat template; `<|im_end|>` ends a turn."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    """A tiny random Llama over the tokenizer's vocabulary that ends an answer now and then."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 328,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()


def save_target(folder: str | os.PathLike, template: str = CHATML, **changes: Any) -> str:
    """A target folder with model and tokenizer, as commands take it."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return str(Path(folder))


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
