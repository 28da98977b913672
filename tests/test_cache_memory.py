"""What the target's cache holds, against plain generation's: the tree under verification, and room to grow into."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from support import CHAIN, DYNAMIC, SHAPES, make_draft, make_target, oracle, prompts, texts_of
from transformers.cache_utils import DynamicCache

from eagle3_hf.decoding.cache import SpeculativeCache
from eagle3_hf.decoding.loop import _Session

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SLOT = 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes of the tiny Llama


@pytest.fixture(scope="module")
def roomy() -> tuple[Any, Any]:
    target = make_target("llama", max_position_embeddings=4096)
    return target, make_draft(target)


def held(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], **options: Any) -> tuple[int, int, list[int]]:
    """Most bytes of plain generation's cache, of ours, and the sizes that ours had one after another."""
    target, draft = models
    plain = target.generate(**inputs, do_sample=False, return_dict_in_generate=True, max_new_tokens=options["new"])
    past = plain.past_key_values
    assert isinstance(past, DynamicCache)
    bytes_of_plain = sum(t.nbytes for layer in past.layers for t in (layer.keys, layer.values))
    sizes: list[int] = []
    whole = SpeculativeCache.set_lengths
    target_layers = target.config.num_hidden_layers

    def watched(self: SpeculativeCache, lengths: list[int]) -> None:
        if len(self.layers) == target_layers and self.layers[0].is_initialized:
            sizes.append(self.nbytes())
        whole(self, lengths)

    with mock.patch.object(SpeculativeCache, "set_lengths", watched), oracle(texts_of(plain.sequences, inputs)):
        out = target.generate(
            **inputs, do_sample=False, assistant_model=draft, max_new_tokens=options["new"], **options["shape"]
        )
    assert out.tolist() == plain.sequences.tolist()
    return bytes_of_plain, max(sizes), sizes


@pytest.mark.parametrize(("shape", "nodes"), [("chain", 4), ("dynamic", 10), ("static", 9)])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_more_than_plain_and_the_tree(roomy, batch, shape, nodes):
    # Up to the length limit, which is where memory is most.
    inputs = prompts(batch, 700, ragged=False)
    plain, ours, _ = held(roomy, inputs, shape=SHAPES[shape], new=100)
    assert plain == (700 + 99) * SLOT * batch
    # The slots of the nodes and the root, and the last token, which plain generation never runs.
    assert plain <= ours <= plain + (nodes + 2) * SLOT * batch


def test_growth_is_by_a_quarter_and_seldom(roomy):
    inputs = prompts(1, 200)
    _, _, sizes = held(roomy, inputs, shape=CHAIN, new=400)
    steps = [(a, b) for a, b in itertools.pairwise(sizes) if b != a]
    assert 1 <= len(steps) <= 3
    for i, size in enumerate(sizes):
        assert size == sizes[0] or size in [b for _, b in steps], i
    for before, after in steps:
        assert after <= max(before * 1.25, before + 256 * SLOT) + 256 * SLOT


def test_a_limit_that_is_never_reached_takes_no_memory(roomy):
    target, draft = roomy
    inputs = prompts(1, 40)
    first = target.generate(**inputs, do_sample=False, max_new_tokens=8)[0, -1].item()
    with mock.patch.object(_Session, "result", lambda self: self.cache.nbytes()):
        options = {"eos_token_id": first, "pad_token_id": 0, "max_new_tokens": 4000}
        ours = target.generate(**inputs, do_sample=False, assistant_model=draft, **options, **DYNAMIC)
    assert ours <= 256 * SLOT
