"""What the training tests share: a tiny target that can be predicted, documents it wrote, and recipes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_hf.aux_layers import AuxCapture, find_decoder
from eagle3_hf.training.recipe import Recipe, parse_recipe
from eagle3_hf.training.run import TrainingData

VOCAB, HIDDEN, AUX = 48, 32, [1, 2, 4]


def tiny_target(seed: int = 0, folder: Path | None = None) -> Any:
    """A random Llama of 4 layers, in float32; saved to `folder` if one is given."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    if folder is not None:
        model.save_pretrained(folder)
    return model


@torch.no_grad()
def documents(target: Any, count: int, prompt: int = 4, answer: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Random prompts with the target's greedy answers, and its states on them, as the collator takes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, prompt), generator=generator)
    text = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=answer)
    layers, norm = find_decoder(target)
    with AuxCapture(layers, norm, AUX) as capture:
        out = target(text, output_hidden_states=True)
    features = torch.cat(capture.take(), -1)
    made = []
    for row in range(count):
        length = text.shape[1] - row % 5  # documents of several lengths
        made.append(
            {
                "input_ids": text[row, :length],
                "features": features[row, :length],
                "teacher_hidden": out.hidden_states[-1][row, :length],
                "teacher_argmax": out.logits[row, :length].argmax(-1),
                "loss_mask": torch.arange(length) >= prompt,
            }
        )
    return made


class Documents(Dataset):
    """Documents in memory."""

    def __init__(self, items: list[dict[str, Any]]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-padded batch."""
    width = max(len(item["input_ids"]) for item in items)

    def pad(name: str, fill: int = 0) -> torch.Tensor:
        first = items[0][name]
        out = torch.full((len(items), width, *first.shape[1:]), fill, dtype=first.dtype)
        for row, item in enumerate(items):
            out[row, : len(item[name])] = item[name]
        return out

    names = {"features": 0, "teacher_hidden": 0, "input_ids": 0, "teacher_argmax": -1, "loss_mask": 0}
    return {name: pad(name, fill) for name, fill in names.items()}


def training_data(target: Any, count: int = 64, held_out: int = 8, vocabulary: int | None = None) -> TrainingData:
    """Documents of the target, the last `held_out` of them held out."""
    items = documents(target, count + held_out)
    kept = None
    if vocabulary is not None:
        counts = torch.bincount(torch.cat([item["input_ids"][4:] for item in items]), minlength=VOCAB)
        kept = counts.argsort(descending=True, stable=True)[:vocabulary].sort().values
    return TrainingData(
        train=Documents(items[:count]),
        lengths=[len(item["input_ids"]) for item in items[:count]],
        collate=collate,
        held_out=Documents(items[count:]) if held_out else None,
        aux_layers=AUX,
        vocabulary=kept,
        prompts=[item["input_ids"][:4].tolist() for item in items[count:]],
    )


def tiny_recipe(output: Path, target: Path | str = "unused", **sections: dict[str, Any]) -> Recipe:
    """A recipe for the tiny target; `training={...}` and so on are merged over its values."""
    content: dict[str, Any] = {
        "target": {"model": str(target), "dtype": "float32"},
        "draft": {"dtype": "float32"},
        "data": {"held_out": 0.1, "tokens_per_batch": 128},
        "objective": {"steps": 3, "measure_every": 1},
        "evaluation": {"chain": 3},
        "training": {
            "output_dir": str(output), "max_steps": 6, "learning_rate": 5e-3, "logging_steps": 1, "save_steps": 2,
            "eval_steps": 3, "use_cpu": True, "seed": 1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
            "dataloader_pin_memory": False,
        },
    }  # fmt: skip
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    return parse_recipe(content)
