"""What the decoding tests share: tiny random targets, drafts for them, and an oracle that makes drafts agree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from eagle3_hf import AutoEagle3Target, Eagle3CandidateGenerator, Eagle3Config, Eagle3DraftModel, SpeculationStats

VOCAB = 16
PAD, BOS, EOS = 0, 1, 2
LAYERS = 4
POSITIONS = 96
WINDOW = 8
FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt2", "mixtral")

# One of each way of drafting.
CHAIN = {"num_assistant_tokens": 4}
DYNAMIC = {"num_assistant_tokens": 4, "tree_top_k": 3, "tree_total_tokens": 10}
STATIC = {"tree_paths": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1), (0, 0, 0, 0)]}
SHAPES = {"chain": CHAIN, "dynamic": DYNAMIC, "static": STATIC}

_SHAPE = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A tiny configuration; weights drawn wide, so that tokens have clear margins and texts don't all look alike."""
    mlp = {"intermediate_size": 48}
    if family == "llama":
        config = LlamaConfig(**_SHAPE, **mlp, **_COMMON)
    elif family == "qwen3":
        config = Qwen3Config(**_SHAPE, **mlp, head_dim=8, **_COMMON)
    elif family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        config = Gemma3TextConfig(
            **_SHAPE, **mlp, head_dim=8, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=8, **_COMMON
        )
    elif family == "mistral":
        config = MistralConfig(**_SHAPE, **mlp, sliding_window=WINDOW, **_COMMON)
    elif family == "mixtral":
        config = MixtralConfig(
            **_SHAPE, **mlp, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **_COMMON
        )
    elif family == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        shape = {names[key]: value for key, value in _SHAPE.items() if key in names}
        rest = {key: value for key, value in _COMMON.items() if key != "max_position_embeddings"}
        config = GPT2Config(**shape, n_positions=POSITIONS, **rest)
    else:
        raise ValueError(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def make_target(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random target of this family, able to speculate."""
    torch.manual_seed(seed)
    target = AutoEagle3Target.from_config(config_of(family, **changes))
    # No EOS unless a test asks for one: most tests want the full length.
    target.generation_config.eos_token_id = None
    return target


def make_draft(target: Any, seed: int = 0, **changes: Any) -> Eagle3DraftModel:
    """A random draft for `target`, over a part of its vocabulary unless told otherwise."""
    text = target.config.get_text_config()
    values: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "draft_vocab_size": min(12, text.vocab_size),
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "target_num_hidden_layers": text.num_hidden_layers,
        "aux_hidden_state_layers": [1, 2, text.num_hidden_layers],
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    draft = Eagle3DraftModel(Eagle3Config(**(values | changes))).eval()
    size, vocab = draft.config.draft_vocab_size, draft.config.vocab_size
    if size < vocab:
        draft.set_draft_vocabulary(torch.randperm(vocab)[:size].sort().values)
    return draft


def prompts(batch: int, width: int, seed: int = 0, ragged: bool | None = None) -> dict[str, torch.Tensor]:
    """Random prompts, left-padded to different lengths when there are several rows (or as `ragged` says)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(EOS + 1, VOCAB, (batch, width), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1 if ragged is None else ragged:
        for row in range(batch):
            mask[row, : (row * 3 + seed) % width] = 0
    ids[mask == 0] = PAD
    return {"input_ids": ids, "attention_mask": mask}


class OracleGenerator(Eagle3CandidateGenerator):
    """Drafts as its base class does, then plants the known continuation with random mistakes.

    Random drafts are nearly always wrong, which would leave acceptance untested. This one knows the answers; rows
    are recognised by their text, which it learns from what the loop feeds to `extend`.
    """

    answers: Sequence[Sequence[int]] = ()
    rate: float = 0.8
    random = random.Random(0)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._texts: list[list[int]] = []

    def extend(self, features: torch.Tensor, next_tokens: torch.Tensor, counts: list[int]) -> None:
        self._texts = self._texts or [[] for _ in counts]
        for text, tokens, count in zip(self._texts, next_tokens.tolist(), counts):
            text += tokens[:count]
        super().extend(features, next_tokens, counts)

    def select_rows(self, rows: list[int], park: bool = False) -> None:
        self._texts = [self._texts[row] for row in rows]
        super().select_rows(rows, park)

    def propose(self, roots: torch.Tensor, depth: int) -> Any:
        assert [text[-1] for text in self._texts] == roots.tolist()
        tree = super().propose(roots, depth)
        tree.tokens = tree.tokens.clone()
        for row, text in enumerate(self._texts):
            known = [answer for answer in self.answers if list(answer[1 : len(text) + 1]) == text]
            self._plant(tree, row, self.random.choice(known)[len(text) + 1 :] if known else [])
        return tree

    def _plant(self, tree: Any, row: int, continuation: Sequence[int]) -> None:
        node, tokens, parents = 0, tree.tokens[row], tree.parents[row].tolist()
        for token in continuation:
            children = [n for n in range(1, tree.size) if parents[n] == node]
            if not children or self.random.random() > self.rate:
                return
            # Mostly the child with most below it, so that deep paths come up in trees too.
            below = tree.ancestors[row].sum(dim=0).tolist()
            node = self.random.choice([max(children, key=below.__getitem__)] * 3 + children)
            for sibling in children:  # siblings stay distinct
                if tokens[sibling] == token:
                    tokens[sibling] = tokens[node]
            tokens[node] = token


@contextmanager
def oracle(
    answers: Sequence[Sequence[int]], rate: float = 0.8, seed: int = 0, base: type = OracleGenerator, **more: Any
) -> Iterator[Any]:
    """Let drafts know `answers` (texts without padding) and follow them at each level with probability `rate`."""
    known = {"answers": answers, "rate": rate, "random": random.Random(seed), **more}
    double = type("KnowingGenerator", (base,), known)
    with mock.patch("eagle3_hf.decoding.loop.Eagle3CandidateGenerator", double):
        yield double


def texts_of(sequences: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Rows of a `generate()` output without the padding in front."""
    pads = (1 - inputs["attention_mask"]).sum(dim=1).tolist()
    repeats = len(sequences) // len(pads)
    return [row[pads[i // repeats] :] for i, row in enumerate(sequences.tolist())]


def assert_same_as_plain(
    target: Any,
    draft: Eagle3DraftModel,
    inputs: dict[str, torch.Tensor],
    drafting: dict[str, Any],
    rate: float = 0.8,
    seed: int = 0,
    **options: Any,
) -> SpeculationStats:
    """Check greedy output against plain `generate()` and return what speculation did."""
    options = {"do_sample": False, "max_new_tokens": 24} | options
    plain = target.generate(**inputs, **options)
    with oracle(texts_of(plain, inputs), rate, seed):
        fast = target.generate(**inputs, **options, assistant_model=draft, **drafting)
    assert fast.tolist() == plain.tolist()
    return target.speculation_stats


def error_line(result: Any) -> str:
    """The one line that a command with wrong input must end with; `result` is typer's."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
