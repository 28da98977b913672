"""Vision-language and audio models: with images in the prompt the text is that of plain generation, too."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from support import CHAIN, DYNAMIC, EOS, PAD, SHAPES, assert_same_as_plain, make_draft, make_target, prompts
from transformers.generation.utils import GenerateDecoderOnlyOutput
from vision_models import (
    END,
    FAMILIES,
    IMAGE,
    ONE,
    OPTIONS,
    OTHERS,
    RAGGED,
    Prompt,
    mllama,
    next_turn,
    paligemma,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3_vl,
    ready,
    token_types,
    voxtral,
)  # fmt: skip

from eagle3_hf import DrafterInvariantSampling
from eagle3_hf.aux_layers import find_decoder
from eagle3_hf.compat import IS_V5
from eagle3_hf.decoding import multimodal

pytestmark = pytest.mark.filterwarnings("ignore")

FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


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
    assert_same_as_plain(target, draft, Prompt(RAGGED.rows, padding=2).inputs(target), SHAPES[shape], **OPTIONS)
    assert_same_as_plain(target, draft, ONE.inputs(target), SHAPES[shape] | {"exact": "margin"}, **OPTIONS)
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


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_other_families(make):
    target = ready(make())
    draft = make_draft(target)
    for prompt in (ONE, RAGGED):
        assert assert_same_as_plain(target, draft, prompt.inputs(target), DYNAMIC, **OPTIONS).accepted > 5


def test_families_that_are_refused():
    target = ready(paligemma())
    with pytest.raises(ValueError, match=r"PaliGemma.* doesn't give draft trees the logits of plain forwards"):
        target.generate(**ONE.inputs(target), assistant_model=make_draft(target))
    target = ready(mllama())
    inputs = ONE.inputs(target) | {"pixel_values": torch.zeros(1, 1, 1, 3, 8, 8)}
    inputs |= {"aspect_ratio_ids": torch.ones(1, 1).long(), "aspect_ratio_mask": torch.ones(1, 1, 1).long()}
    inputs["cross_attention_mask"] = torch.ones(*inputs["input_ids"].shape, 1, 1).long()
    named = r"EAGLE-3 draft: aspect_ratio_ids, aspect_ratio_mask, cross_attention_mask\."
    with pytest.raises(ValueError, match=named if IS_V5 else r"Mllama.* can't run draft trees"):
        target.generate(**inputs, assistant_model=make_draft(target, aux_hidden_state_layers=[2, 3, 4]))


@pytest.mark.parametrize(("make", "count"), [(voxtral, 2), (qwen2_audio, 4)])
def test_sound(make, count):
    target = ready(make())
    draft = make_draft(target)
    ids = torch.tensor([[1, 5, *[IMAGE] * count, 7, 3], [PAD, PAD, 1, *[IMAGE] * count, 4]])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if count == 4:
        inputs["feature_attention_mask"] = torch.ones(2, 16).long()
    texts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sound = inputs | {"input_features": torch.randn(2, 8, 16)}
        assert assert_same_as_plain(target, draft, sound, DYNAMIC, **OPTIONS).accepted > 5
        texts.append(target.generate(**sound, **OPTIONS).tolist())
    assert texts[0] != texts[1]
