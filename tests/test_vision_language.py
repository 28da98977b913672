"""Vision-language and audio models: with images in the prompt the text is that of plain generation, too."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from support import CHAIN, DYNAMIC, EOS, PAD, SHAPES, VOCAB, assert_same_as_plain, make_draft, make_target, prompts
from transformers.generation.utils import GenerateDecoderOnlyOutput

from eagle3_hf import DrafterInvariantSampling, enable_eagle3
from eagle3_hf.aux_layers import find_decoder
from eagle3_hf.compat import IS_V5, accepts
from eagle3_hf.decoding import multimodal

pytestmark = pytest.mark.filterwarnings("ignore")

FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
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


FAMILIES = [llava, gemma3, smolvlm, idefics3, qwen2_vl, qwen2_5_vl, qwen3_vl]
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
        longest = max(map(len, texts))
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
    made = enable_eagle3(model.eval())
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = PAD
    return made


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda make: make.__name__)
def target(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return ready(request.param())


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return make_draft(target)


def test_text(target, draft):
    for batch, shape in ((1, "chain"), (3, "dynamic"), (2, "static")):
        inputs = prompts(batch, 20)
        inputs["input_ids"].clamp_(max=11)  # the tokens behind stand for images
        assert assert_same_as_plain(target, draft, inputs, SHAPES[shape], **OPTIONS).accepted > 5


@pytest.mark.parametrize("shape", SHAPES)
def test_images(target, draft, shape):
    for prompt in (ONE, RAGGED):
        inputs = prompt.inputs(target)
        assert assert_same_as_plain(target, draft, inputs, SHAPES[shape], **OPTIONS).accepted > 5
        # Rows that end leave the batch; the others keep their own positions.
        assert_same_as_plain(target, draft, inputs, SHAPES[shape], **OPTIONS, eos_token_id=[EOS, 5, 9])
    # The images matter: a prefill without them would go unnoticed otherwise.
    texts = [target.generate(**RAGGED.inputs(target, seed), **OPTIONS).tolist() for seed in (0, 1)]
    assert texts[0][1] == texts[1][1] and texts[0] != texts[1]


def test_several_samples_of_each_row(target, draft):
    def sampled(**options: Any) -> list[list[int]]:
        return target.generate(
            **RAGGED.inputs(target), **OPTIONS, do_sample=True, num_return_sequences=2,
            logits_processor=[DrafterInvariantSampling(seed=3)], **options,
        ).tolist()  # fmt: skip

    assert sampled(assistant_model=draft, **DYNAMIC) == sampled()


def test_later_turns(target, draft):
    options = OPTIONS | {"return_dict_in_generate": True, "max_new_tokens": 7, "do_sample": False}
    for prompt, shape in ((ONE, CHAIN), (RAGGED, DYNAMIC)):
        inputs = whole = first = prompt.inputs(target)
        past = None
        for _ in range(3):
            fast = target.generate(**inputs, **options, **shape, assistant_model=draft, past_key_values=past)
            assert fast.sequences.tolist() == target.generate(**whole, **options).sequences.tolist()
            # What the model remembers of other prompts in between is nothing to this one.
            target.generate(**Prompt([[1, "image", "image", 4]]).inputs(target, 2), **options)
            inputs, whole = (next_turn(target, first, fast.sequences, 3, media) for media in (False, True))
            past = fast[FIELD]
        if IS_V5:  # 4.57 takes positions from the model's last prompt
            on = target.generate(**inputs, **options, past_key_values=past)
            assert on.sequences.tolist() == target.generate(**whole, **options).sequences.tolist()
        # The other way round: with the cache of plain generation, right after it.
        plain = target.generate(**first, **options)
        inputs, whole = (next_turn(target, first, plain.sequences, 3, media) for media in (False, True))
        on = target.generate(**inputs, **options, **shape, assistant_model=draft, past_key_values=plain[FIELD])
        assert on.sequences.tolist() == target.generate(**whole, **options).sequences.tolist()


def test_what_a_later_turn_cannot_take(target, draft):
    inputs, options = ONE.inputs(target), OPTIONS | {"assistant_model": draft}
    out = target.generate(**inputs, **options, return_dict_in_generate=True)
    past, more = out[FIELD], next_turn(target, inputs, out.sequences, 3)
    pixels = {"pixel_values": inputs["pixel_values"]}
    with pytest.raises(ValueError, match=r"pixel_values together with past_key_values.*the whole text again"):
        target.generate(**more, **pixels, **options, past_key_values=past)
    for types in token_types(target, more["input_ids"]):
        marks = {types: torch.ones_like(more["input_ids"])}
        with pytest.raises(ValueError, match=f"{types} marks images behind"):
            target.generate(**more, **marks, **options, past_key_values=past)
    end = inputs["input_ids"][0].tolist().index(END)
    for cut in (end - 2, 2):
        shorter = copy.deepcopy(past)
        shorter.crop(cut)
        with pytest.raises(ValueError, match=f"holds {cut} tokens of row 0, whose images end at token {end}"):
            target.generate(**more, **options, past_key_values=shorter)
    # Behind the image it may be cut, and none of that did harm.
    past.crop(end + 1)
    whole = target.generate(**next_turn(target, inputs, out.sequences, 3, media=True), **OPTIONS).tolist()
    assert target.generate(**more, **options, past_key_values=past).tolist() == whole


def test_a_wrong_number_of_placeholders(target, draft):
    inputs = ONE.inputs(target)
    wrong = {name: value.clone() for name, value in inputs.items()}
    wrong["input_ids"][0, wrong["input_ids"][0].tolist().index(IMAGE)] = 5
    found = []
    for more in ({}, {"assistant_model": draft}):
        try:
            found.append(target.generate(**wrong, **OPTIONS, **more).tolist())
        except (ValueError, RuntimeError, IndexError) as error:
            found.append(repr(error))
    # Idefics3 of 4.57 takes it, to no good.
    assert found[0] == found[1] and ("idefics3" in target.config.model_type or isinstance(found[0], str))
    assert not any(layer._forward_pre_hooks for layer in find_decoder(target)[0])
    assert_same_as_plain(target, draft, inputs, CHAIN, **OPTIONS)


def test_states(target, draft):
    target.set_attn_implementation("eager")
    names = ("hidden_states", "attentions", "scores", "logits")
    options = OPTIONS | {f"output_{name}": True for name in names} | {"return_dict_in_generate": True}
    inputs = RAGGED.inputs(target)
    plain = target.generate(**inputs, **options)
    if plain.hidden_states[0] is None:  # Qwen3-VL of 4.57
        with pytest.raises(ValueError, match=r"Qwen3VLForConditionalGeneration returns no hidden_states"):
            target.generate(**inputs, **options, assistant_model=draft)
        target.set_attn_implementation("sdpa")
        return
    fast = target.generate(**inputs, **options, assistant_model=draft, **DYNAMIC)
    target.set_attn_implementation("sdpa")
    assert fast.sequences.tolist() == plain.sequences.tolist()
    real = inputs["attention_mask"].bool()
    for name in names:
        for step, (a, b) in enumerate(zip(plain[name], fast[name], strict=True)):
            for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
                if step == 0 and name == "hidden_states":
                    x, y = x[real], y[real]
                elif step == 0 and name == "attentions":
                    x, y = (weights.transpose(1, 2)[real] for weights in (x, y))
                elif name == "attentions" and x.shape != y.shape:  # a sliding layer's of plain generation
                    y = y[..., -x.shape[-1] :]
                torch.testing.assert_close(y, x, atol=1e-4, rtol=1e-4)


def test_refusals(target, draft):
    inputs, options = ONE.inputs(target), {"assistant_model": draft, "max_new_tokens": 4}
    for name in ("image_embeds", "audio_values", "pixel_values_local"):
        with pytest.raises(ValueError, match=f"not supported with an EAGLE-3 draft: {name}. .*without assistant_model"):
            target.generate(**inputs, **{name: torch.zeros(1, 4)}, **options)
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    with pytest.raises(ValueError, match="position_ids of your own"):
        target.generate(**inputs, position_ids=positions, **options)


def test_text_models_have_no_images():
    llama = make_target("llama")
    with pytest.raises(ValueError, match=r"EAGLE-3 draft: pixel_values. Generate without"):
        llama.generate(**prompts(1, 6), pixel_values=torch.zeros(1, 3, 8, 8), assistant_model=make_draft(llama))


QWEN = pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, qwen3_vl], ids=lambda make: make.__name__)


@QWEN
def test_videos(make):
    target = ready(make())
    for rows in (ONE.rows, RAGGED.rows):
        inputs = Prompt(rows, video=True).inputs(target)
        assert assert_same_as_plain(target, make_draft(target), inputs, DYNAMIC, **OPTIONS).accepted > 5


@QWEN
def test_generation_right_behind_an_image(make):
    target = ready(make())
    inputs = Prompt([[1, 5, "image", 7, "image"], [1, 4, 3, 5, "image"]], closed=False).inputs(target)
    # Positions go on with a number for each axis there, in 5.x.
    assert assert_same_as_plain(target, make_draft(target), inputs, DYNAMIC, **OPTIONS).accepted > 5


@QWEN
def test_a_model_that_goes_on_otherwise_is_refused(make):
    target = ready(make())
    draft, inputs = make_draft(target), ONE.inputs(target)
    with (
        mock.patch.object(multimodal, "_position_offsets", return_value=None),
        pytest.raises(ValueError, match=r"VLForConditionalGeneration doesn't go on behind .* as with text"),
    ):
        target.generate(**inputs, **OPTIONS, assistant_model=draft)
    for _ in range(2):
        assert_same_as_plain(target, draft, inputs, CHAIN, **OPTIONS)


def voxtral() -> Any:
    audio = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.VoxtralConfig(
        audio_config=audio | {"num_mel_bins": 8, "max_source_positions": 8, "head_dim": 8, "initializer_range": 0.3},
        text_config={"model_type": "llama", **_TEXT}, audio_token_id=IMAGE,
    )  # fmt: skip
    return transformers.VoxtralForConditionalGeneration(config)


def test_sound():
    target = ready(voxtral())
    draft = make_draft(target)
    ids = torch.tensor([[1, 5, *[IMAGE] * 2, 7, 3], [PAD, PAD, 1, *[IMAGE] * 2, 4]])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    texts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sound = inputs | {"input_features": torch.randn(2, 8, 16)}
        assert assert_same_as_plain(target, draft, sound, DYNAMIC, **OPTIONS).accepted > 5
        texts.append(target.generate(**sound, **OPTIONS).tolist())
    assert texts[0] != texts[1]
