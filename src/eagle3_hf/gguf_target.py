"""Turn a Llama-architecture GGUF file into an ordinary fp32 Hugging Face folder.

transformers 5.24 keeps GGUF weights packed (slower, not trainable, not serialisable) and 4.57 reads the
special tokens of SmolLM2 wrongly, so the conversion is done once, here, straight from the file. The folder
that comes out loads the same on both lines.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(gguf_name: str) -> str:
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    raise ValueError(f"unknown tensor {gguf_name!r} in the GGUF file: only the plain Llama layout is read here")


def _undo_rope_permutation(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    # llama.cpp stores q/k rows with rotary pairs interleaved; HF rotates halves.
    rows, cols = weight.shape
    return weight.view(n_heads, rows // n_heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def read_llama_gguf(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read a Llama-architecture GGUF file.

    Args:
        path: the `.gguf` file.

    Returns:
        The file's metadata, and the dequantised float32 state dict under Hugging Face names.

    Raises:
        ImportError: the `gguf` package is missing.
        ValueError: the file holds another architecture, or a tensor this reader doesn't know.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ImportError("reading a GGUF file needs the `gguf` package: pip install 'eagle3-hf[demo]'") from error
    import torch

    reader = GGUFReader(str(path))
    meta = _metadata(reader)
    if meta.get("general.architecture") != "llama":
        raise ValueError(f"{path} holds a {meta.get('general.architecture')!r} model; only 'llama' is read here")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)
        if name.endswith("q_proj.weight"):
            weight = _undo_rope_permutation(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _undo_rope_permutation(weight, kv_heads)
        state[name] = weight.contiguous()
    return meta, state


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if meta.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    control = 3  # GGUF token type of special tokens
    backend.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=meta["llama.context_length"],
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    # 5.x writes a class name that 4.57 doesn't have, and keeps the template in a file of its own.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["chat_template"] = meta["tokenizer.chat_template"]
    config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False))


def convert_llama_gguf(path: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """Write a GGUF Llama as an fp32 Hugging Face model folder (config, safetensors, tokenizer).

    The folder appears whole or not at all: everything is written beside it and renamed at the end.

    Args:
        path: the `.gguf` file.
        folder: where the model goes; returned as it is when it already holds one.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    meta, state = read_llama_gguf(path)
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    theta = float(meta.get("llama.rope.freq_base", 10000.0))
    eos, pad = meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.padding_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        # 4.57 reads rope_theta, 5.x reads rope_parameters: both are written.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "lm_head.weight" not in state,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos, "pad_token_id": pad}
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (work / "config.json").write_text(json.dumps(config, indent=2))
        (work / "generation_config.json").write_text(json.dumps(generation, indent=2))
        save_file(state, work / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(meta, work)
        try:
            os.replace(work, folder)
        except OSError:
            # Another process finished first; its copy is as good as ours.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    logger.info("wrote %s (dequantised from %s)", folder, path)
    return folder
