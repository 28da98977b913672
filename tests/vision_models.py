"""Tiny vision-language and audio models, and prompts as their processors make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support import EOS, PAD, VOCAB

from eagle3_hf import enable_eagle3
from eagle3_hf.compat import accepts

END, START, VIDEO, IMAGE = 12, 13, 14, 15
# No text has those of its own.
OPTIONS: dict[str, Any] = {
    "suppress_tokens": [END, START, VIDEO, IMAGE], "max_new_tokens": 16, "no_repeat_ngram_size": 3,
}  # fmt: skip
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "initializer_range": 0.3,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
_MROPE = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**_VISION), transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    text = transformers.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=8, layer_types=kinds)
    vision = transformers.SiglipVisionConfig(**_VISION)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE, tie_word_embeddings=False
    )
    made = transformers.Gemma3ForConditionalGeneration(config)
    made.model.multi_modal_projector.mm_input_projection_weight.data.normal_()  # zeros at first
    return made


def smolvlm() -> Any:
    vision = transformers.SmolVLMVisionConfig(**_VISION)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.SmolVLMConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=1, pad_token_id=PAD
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def idefics3() -> Any:
    vision = transformers.Idefics3VisionConfig(**_VISION)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=1, pad_token_id=PAD
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_scaling": dict(_MROPE), "rope_parameters": dict(_MROPE)},
        vision_config=_QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **_QWEN_IDS,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_scaling": dict(_MROPE), "rope_parameters": dict(_MROPE)},
        vision_config=_QWEN_VISION | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}, **_QWEN_IDS,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16}
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_scaling": dict(_MROPE), "rope_parameters": dict(_MROPE)},
        vision_config=_QWEN_VISION | vision | {"deepstack_visual_indexes": [0]}, **_QWEN_IDS,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


def glm4v() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 16}
    config = transformers.Glm4vConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_scaling": dict(_MROPE), "rope_parameters": dict(_MROPE)},
        vision_config=_QWEN_VISION | vision, image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=START,
        image_end_token_id=END, video_start_token_id=10, video_end_token_id=11,
    )  # fmt: skip
    return transformers.Glm4vForConditionalGeneration(config)


def aya_vision() -> Any:
    text = {"model_type": "cohere2", **_TEXT, "head_dim": 8, "sliding_window": 8}
    config = transformers.AyaVisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False), text_config=text,
        image_token_index=IMAGE, image_token_id=IMAGE, vision_feature_layer=-1, downsample_factor=1,
        adapter_layer_norm_eps=1e-6,
    )  # fmt: skip
    return transformers.AyaVisionForConditionalGeneration(config)


def paligemma() -> Any:
    vision = {"model_type": "siglip_vision_model", **_VISION, "projection_dim": 32, "vision_use_head": False}
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_TEXT, "head_dim": 8}, vision_config=vision, image_token_index=IMAGE,
        image_token_id=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def mllama() -> Any:
    vision = {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    vision |= {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32}
    config = transformers.MllamaConfig(
        text_config={**_TEXT, "cross_attention_layers": [1], "rope_scaling": dict(rope), "rope_parameters": dict(rope)},
        vision_config={name: _VISION[name] for name in _VISION if name != "num_attention_heads"} | vision,
        image_token_index=IMAGE,
    )  # fmt: skip
    return transformers.MllamaForConditionalGeneration(config)


def voxtral() -> Any:
    audio = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.VoxtralConfig(
        audio_config=audio | {"num_mel_bins": 8, "max_source_positions": 8, "head_dim": 8, "initializer_range": 0.3},
        text_config={"model_type": "llama", **_TEXT}, audio_token_id=IMAGE,
    )  # fmt: skip
    return transformers.VoxtralForConditionalGeneration(config)


def qwen2_audio() -> Any:
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    config = transformers.Qwen2AudioConfig(
        audio_config=audio | {"num_mel_bins": 8, "max_source_positions": 8, "init_std": 0.3},
        text_config={"model_type": "qwen2", **_TEXT}, audio_token_index=IMAGE, audio_token_id=IMAGE,
    )  # fmt: skip
    return transformers.Qwen2AudioForConditionalGeneration(config)


FAMILIES = [llava, gemma3, smolvlm, idefics3, qwen2_vl, qwen2_5_vl, qwen3_vl]
OTHERS = [glm4v, aya_vision]
_GRIDS = [(4, 4), (4, 8), (8, 4)]  # of Qwen's images, in patches; a token is four patches


def token_types(target: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [name for name in ("token_type_ids", "mm_token_type_ids") if accepts(type(target).forward, name)]
    return {name: (ids == IMAGE).long() + 2 * (ids == VIDEO).long() for name in names}


@dataclass
class Prompt:
    """Rows of text and images before they are padded; `"image"` stands for the next image."""

    rows: list[list[Any]]
    video: bool = False
    closed: bool = True  # a token behind each image says that it ends
    padding: int = 0  # columns in front of all rows

    def inputs(self, target: Any, seed: int = 0) -> dict[str, torch.Tensor]:
        """What a family's processor makes of it, with random pixels."""
        generator = torch.Generator().manual_seed(seed)
        qwen = hasattr(target.config.vision_config, "spatial_merge_size")
        texts: list[list[int]] = []
        grids: list[tuple[int, int, int]] = []
        for row in self.rows:
            text: list[int] = []
            for part in row:
                if part != "image":
                    text.append(part)
                    continue
                count = 4
                if qwen:
                    height, width = _GRIDS[len(grids) % len(_GRIDS)]
                    # Qwen3-VL sees a video as images, each between tokens of its own.
                    frames = 2 if self.video and not target.config.model_type.startswith("qwen3") else 1
                    grids.append((frames, height, width))
                    count = grids[-1][0] * height * width // 4
                text += [START, *[VIDEO if self.video else IMAGE] * count, *[END] * self.closed]
            texts.append(text)
        longest = max(map(len, texts)) + self.padding
        ids = torch.tensor([[PAD] * (longest - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        made = {"input_ids": ids, "attention_mask": mask}
        made |= token_types(target, ids)
        images = [sum(part == "image" for part in row) for row in self.rows]
        if not sum(images):
            return made
        kind = "video" if self.video else "image"
        if qwen:
            patches = sum(t * h * w for t, h, w in grids)
            name = "pixel_values_videos" if self.video else "pixel_values"
            made[name] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
            made[f"{kind}_grid_thw"] = torch.tensor(grids)
        elif "smolvlm" in target.config.model_type or "idefics3" in target.config.model_type:
            made["pixel_values"] = torch.zeros(len(images), max(images), 3, 8, 8)
            made["pixel_attention_mask"] = torch.ones(len(images), max(images), 8, 8, dtype=torch.bool)
            for row, count in enumerate(images):
                made["pixel_values"][row, :count] = torch.randn(count, 3, 8, 8, generator=generator)
        else:
            made["pixel_values"] = torch.randn(sum(images), 3, 8, 8, generator=generator)
        return made


MEDIA = ("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_grid_thw", "video_grid_thw")


def next_turn(
    target: Any, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, count: int, media: bool = False
) -> dict[str, torch.Tensor]:
    """Each row's text with `count` tokens behind it; with `media` as a fresh run needs it."""
    new = torch.arange(len(sequences) * count).view(-1, count) % 8 + EOS + 1
    ids = torch.cat((sequences, new), dim=1)
    old = inputs["attention_mask"]
    mask = torch.nn.functional.pad(old, (0, ids.shape[1] - old.shape[1]), value=1)
    made = {"input_ids": ids, "attention_mask": mask}
    if media:
        made |= token_types(target, ids) | {name: inputs[name] for name in MEDIA if name in inputs}
    return made


ONE = Prompt([[1, 5, 6, "image", 7, 3, 8]])
RAGGED = Prompt([
    [1, 5, "image", 7, 3, "image", 4],
    [1, 9, 9, 4],
    [1, "image", 8, 6, 5, 3, 11, 10, 4, 5],
])  # fmt: skip


def ready(model: Any) -> Any:
    """The model as a target."""
    made = enable_eagle3(model.eval())
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = PAD
    return made
