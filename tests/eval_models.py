"""A tiny target with a tokenizer, a draft and a small assistant on disk, for the tests of the harness and examples."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_hf import Eagle3Config, Eagle3DraftModel

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{% else %}<bot>{% endif %}{{ m['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
_SPECIALS = ("<eos>", "<user>", "<end>", "<bot>")
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
POSITIONS = 512


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, four special tokens, a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*_SPECIALS, *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _language_model(size: int, layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    # Wide weights: clear margins between tokens, so that rounding can't make greedy outputs differ.
    config = LlamaConfig(
        vocab_size=size, num_hidden_layers=layers, eos_token_id=0, initializer_range=0.3,
        max_position_embeddings=POSITIONS, **_SHAPE,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save_models(place: Path) -> tuple[str, str, str]:
    """Save the three; returns the folders of target, draft and assistant."""
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    for name, layers in (("target", 6), ("assistant", 1)):
        _language_model(size, layers, seed=layers).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    config = Eagle3Config(
        vocab_size=size, draft_vocab_size=100, target_num_hidden_layers=6, aux_hidden_state_layers=[1, 3, 5], **_SHAPE
    )
    torch.manual_seed(0)
    Eagle3DraftModel(config).save_pretrained(place / "draft")
    return str(place / "target"), str(place / "draft"), str(place / "assistant")
