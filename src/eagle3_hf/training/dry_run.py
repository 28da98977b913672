"""Trying a recipe out on a shrunk random model of its target's family, in seconds, before it costs anything."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from ..aux_layers import AuxCapture, check_aux_layers, default_aux_layers, find_decoder
from ..modeling_eagle3 import Eagle3DraftModel
from .initialise import draft_config
from .recipe import Recipe
from .run import TrainingData, run

logger = logging.getLogger(__name__)

LAYERS, VOCAB, WIDTH = 8, 256, 64
_SHRUNK = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "intermediate_size": 96, "moe_intermediate_size": 48, "n_inner": 96,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": VOCAB, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "experts_per_token": 2, "sliding_window": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_KEPT_TRAINING = (
    "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "lr_scheduler_kwargs", "gradient_accumulation_steps", "gradient_checkpointing", "activation_checkpointing",
    "bf16", "fp16", "tf32", "seed", "learning_rate", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "use_cpu",
)  # fmt: skip


def shrunk_config(recipe: Recipe) -> tuple[Any, Any]:
    """The target's own config if it can be read (else `None`), and a small one of its family.

    Raises:
        ValueError: neither the config nor `target.model_type` is there, or they contradict each other.
    """
    from transformers import AutoConfig

    from ..resolve import resolve_model

    section = recipe.target
    try:
        real = AutoConfig.from_pretrained(resolve_model(section.model), revision=section.revision or "main")
    except OSError as error:
        if section.model_type is None:
            raise ValueError(
                f"the config of target.model {section.model} can't be read, and target.model_type doesn't say what "
                f"kind of model it is ({' '.join(str(error).split())[:200]})"
            ) from None
        logger.warning("the config of %s can't be read: sizes are those of any %s", section.model, section.model_type)
        real = None
    if real is not None and section.model_type not in (None, real.model_type):
        raise ValueError(f"target.model_type is {section.model_type}, {section.model} is a {real.model_type}")
    base = AutoConfig.for_model(section.model_type) if real is None else copy.deepcopy(real)
    return real, _shrink(base)


def _shrink(config: Any) -> Any:
    text = config.get_text_config()
    for name, value in _SHRUNK.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types[:LAYERS])
    for one in (config, text):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return config


def shrunk_recipe(recipe: Recipe, output: Path) -> Recipe:
    """The recipe with sizes of the shrunk target, three updates, and everything else as it is."""
    small = copy.deepcopy(recipe)
    draft = small.draft
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        setattr(draft, name, None)
    if draft.intermediate_size is not None:
        draft.intermediate_size = 96
    if draft.vocab_size is not None:
        draft.vocab_size = VOCAB // 2
    if draft.aux_hidden_state_layers is not None:
        draft.aux_hidden_state_layers = list(range(1, 1 + len(draft.aux_hidden_state_layers)))
    if draft.initialise not in ("target", "scratch"):
        logger.warning("the draft to go on from (%s) doesn't fit a shrunk target: started anew", draft.initialise)
        draft.initialise = "scratch"
    small.data.tokens_per_batch = min(small.data.tokens_per_batch, 128)
    small.data.held_out = 0.1
    evaluation = small.evaluation
    evaluation.generate_every, evaluation.generate_prompts, evaluation.generate_new_tokens = 3, 2, 8
    kept = {name: recipe.training[name] for name in _KEPT_TRAINING if name in recipe.training}
    if not torch.accelerator.is_available():
        kept["use_cpu"] = True
    small.training = kept | {
        "output_dir": str(output), "max_steps": 3, "eval_steps": 3, "save_steps": 3, "logging_steps": 1,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return small


@torch.no_grad()
def _documents(target: Any, ids: list[int], count: int = 12, length: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, VOCAB, (count, length), generator=generator)
    layers, norm = find_decoder(target)
    with AuxCapture(layers, norm, ids) as capture:
        out = target(text, output_hidden_states=True)
    features = torch.cat(capture.take(), -1)
    return [
        {
            "input_ids": text[row],
            "features": features[row],
            "teacher_hidden": out.hidden_states[-1][row],
            "teacher_argmax": out.logits[row].argmax(-1),
            "loss_mask": torch.arange(length) >= 4,
        }
        for row in range(count)
    ]


def _stack(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def dry_run(recipe: Recipe, output: Path) -> dict[str, Any]:
    """Run the recipe on a shrunk target: draft, three updates, evaluation by `generate()`, saving, loading back.

    Args:
        recipe: see [`Recipe`].
        output: an empty folder for what it writes.

    Returns:
        Facts to show: the target's family and sizes, the draft's, the first and last loss, what generation said.

    Raises:
        ValueError: whatever the recipe can't do.
    """
    from transformers import AutoModelForCausalLM

    real, config = shrunk_config(recipe)
    facts: dict[str, Any] = {"target": recipe.target.model, "family": config.model_type}
    if real is not None:
        full = draft_config(real, recipe.draft)  # the real sizes, without weights
        check_aux_layers(full.aux_hidden_state_layers or [], real.get_text_config().num_hidden_layers)
        with torch.device("meta"):
            facts["draft parameters"] = sum(p.numel() for p in Eagle3DraftModel(full).parameters())
        facts["aux layers"] = full.aux_hidden_state_layers
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    small = shrunk_recipe(recipe, output)
    ids = small.draft.aux_hidden_state_layers or list(default_aux_layers(LAYERS))
    items = _documents(target, ids)
    size = small.draft.vocab_size
    data = TrainingData(
        train=items[:8],
        lengths=[len(item["input_ids"]) for item in items[:8]],
        collate=_stack,
        held_out=items[8:],
        aux_layers=ids,
        vocabulary=None if size is None else torch.arange(size),
        prompts=[item["input_ids"][:4].tolist() for item in items[8:]],
    )
    result = run(small, data, target=lambda: target)
    assert result.folder is not None
    Eagle3DraftModel.from_pretrained(result.folder, target=target)  # read back, checked against its target
    facts |= {
        "updates": result.updates,
        "loss": [round(entry["loss"], 4) for entry in result.numbers["losses"]],
        "tau": result.numbers["evaluation"]["eval_tau"],
        "generate tau": result.numbers["generation"]["eval_generate_tau"],
    }
    return facts
