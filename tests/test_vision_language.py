"""Vision-language models: their text decoders speculate on text; image inputs are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import EOS, PAD, SHAPES, VOCAB, assert_same_as_plain, make_draft, prompts

from eagle3_hf import enable_eagle3

pytestmark = pytest.mark.filterwarnings("ignore")

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**_VISION), transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=15, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    text = transformers.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=8, layer_types=kinds)
    vision = transformers.SiglipVisionConfig(**_VISION)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_id=15)
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_scaling": rope, "rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32},
        image_token_id=15, video_token_id=14, vision_start_token_id=13, vision_end_token_id=12,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_scaling": rope, "rope_parameters": rope},
        vision_config=vision | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        image_token_id=15, video_token_id=14, vision_start_token_id=13, vision_end_token_id=12,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[llava, gemma3, qwen2_5_vl, qwen3_vl], ids=lambda make: make.__name__)
def target(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = enable_eagle3(request.param().eval())
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = PAD
    return made


def test_text(target):
    draft = make_draft(target)
    for batch, shape in ((1, "chain"), (3, "dynamic"), (2, "static")):
        inputs = prompts(batch, 20)
        inputs["input_ids"].clamp_(max=11)  # the tokens behind stand for images
        options: dict[str, Any] = {"suppress_tokens": [12, 13, 14, 15]}
        assert assert_same_as_plain(target, draft, inputs, SHAPES[shape], **options).accepted > 5


def test_images_are_refused_by_name(target):
    pixels = torch.zeros(1, 3, 8, 8)
    inputs = prompts(1, 6) | {"pixel_values": pixels}
    with pytest.raises(ValueError, match=r"not supported with an EAGLE-3 draft: pixel_values.*without assistant_model"):
        target.generate(**inputs, assistant_model=make_draft(target), max_new_tokens=4)
