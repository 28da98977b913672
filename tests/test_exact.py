"""exact="margin": near-ties are decided by single-token forwards, and so as plain generation decides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CHAIN, PAD, SHAPES, assert_same_as_plain, make_draft, make_target, oracle, prompts, texts_of

from eagle3_hf.decoding.exact import hold_back, near_ties


def test_near_ties_by_a_bound_in_logits():
    scores = torch.tensor([[[1.0, 5.0, 4.5], [1.0, 5.0, 4.49], [3.0, 3.0, 0.0], [7.0, -torch.inf, -torch.inf]]])
    assert near_ties(scores, 0.5, torch.float32).tolist() == [[True, False, True, False]]
    assert near_ties(scores, 0.0, torch.float32).tolist() == [[False, False, True, False]]
    assert near_ties(scores, torch.inf, torch.float32).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("top", [0.75, 1.0, 13.0, 16.0, 31.0, -20.0])
def test_near_ties_by_steps_of_the_precision(dtype, top):
    # Neighbours of the best logit in its own precision, walked to one by one.
    best = torch.tensor(top, dtype=dtype)
    below = [best]
    for _ in range(3):
        below.append(torch.nextafter(below[-1], torch.tensor(-torch.inf, dtype=dtype)))
    width = best.abs().frexp().exponent.item()
    crosses = below[3].abs().frexp().exponent.item() != width  # steps are of another width there
    found = [bool(near_ties(torch.stack((best, low)).float()[None, None], None, dtype)) for low in below]
    assert found == [True, True, True, crosses and abs(top) > abs(float(below[3]))]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_hold_back(data):
    nodes, batch, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    flags = st.lists(st.booleans(), min_size=nodes, max_size=nodes)
    near = data.draw(st.lists(flags, min_size=batch, max_size=batch))
    path = data.draw(
        st.lists(st.lists(st.integers(0, nodes - 1), min_size=width, max_size=width), min_size=batch, max_size=batch)
    )
    counts = data.draw(st.lists(st.integers(0, width - 1), min_size=batch, max_size=batch))
    kept, bonus = hold_back(torch.tensor(near), torch.tensor(path), torch.tensor(counts))
    for row in range(batch):
        unsettled = [i for i in range(counts[row] + 1) if near[row][path[row][i]]]
        assert bonus[row].item() == (0 if unsettled else 1)
        assert kept[row].item() == (unsettled[0] if unsettled else counts[row])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bound", [None, 0.0, 0.4, 1e9])
def test_output_is_the_same_whatever_is_decided_again(llama, llama_draft, shape, bound):
    drafting = SHAPES[shape] | {"exact": "margin", "exact_margin": bound}
    options = {"eos_token_id": [3, 7], "pad_token_id": PAD, "repetition_penalty": 1.1}
    redecided = accepted = 0
    for seed in range(3):
        more: dict[str, Any] = {} if seed else options
        stats = assert_same_as_plain(llama, llama_draft, prompts(1, 9, seed), drafting, **more)
        redecided, accepted = redecided + stats.redecided, accepted + stats.accepted
        if bound == 1e9:
            # Nothing is ever sure; only a row's last token may have been drafted for no more.
            assert stats.accepted == 0
            assert 0 <= stats.generated - stats.redecided <= 1
    assert (redecided > 0) == (bound in (0.4, 1e9))
    assert (accepted > 0) == (bound != 1e9)


def noisy(target: Any, where: str, size: float) -> list[Any]:
    """Let verifications be off by up to `size` in these outputs, as rounding would have them; not so the prefill."""
    generator = torch.Generator().manual_seed(0)

    def disturb(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] == 1 or out.shape[1] == 19:
            return out
        return out + size * (2 * torch.rand(out.shape, generator=generator) - 1)

    parts = [module for name, module in target.named_modules() if name.endswith(where)]
    assert parts
    return [module.register_forward_hook(disturb) for module in parts]


# Logits: a token that is off is seen at once. Keys: what is off stays in the cache, so the tokens in front of a
# near-tie have to be run again too.
@pytest.mark.parametrize(("where", "size", "bound"), [("lm_head", 0.4, 0.8), ("k_proj", 0.2, 1.5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_undoes_what_forwards_over_several_tokens_get_wrong(shape, where, size, bound):
    target = make_target("llama")
    draft = make_draft(target)
    assert_same_as_plain(target, draft, prompts(1, 19), SHAPES[shape])
    differ = held = 0
    for seed in range(6):
        inputs = prompts(1, 19, seed)
        options = {"do_sample": False, "max_new_tokens": 24}
        plain = target.generate(**inputs, **options)
        hooks = noisy(target, where, size)
        try:
            with oracle(texts_of(plain, inputs)):
                loose = target.generate(**inputs, **options, assistant_model=draft, **SHAPES[shape])
                exact = target.generate(
                    **inputs, **options, assistant_model=draft, **SHAPES[shape], exact="margin", exact_margin=bound
                )
        finally:
            for hook in hooks:
                hook.remove()
        differ += loose.tolist() != plain.tolist()
        # Two logits off by `size` each change places only where they were less than twice that apart.
        assert exact.tolist() == plain.tolist()
        held += target.speculation_stats.redecided
        assert target.speculation_stats.accepted > 0
    assert differ > 1
    assert held > 5


def test_options_live_on_the_drafts_generation_config_too(llama):
    draft = make_draft(llama)
    draft.generation_config.exact = "margin"
    draft.generation_config.exact_margin = 1e9
    assert assert_same_as_plain(llama, draft, prompts(1, 9), CHAIN).redecided > 5
    assert assert_same_as_plain(llama, draft, prompts(1, 9), CHAIN | {"exact_margin": 0.0}).redecided == 0


def test_streamed_and_scored(llama, llama_draft):
    seen: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            assert value.numel() > 0 and value.dtype == torch.long
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    inputs = prompts(1, 9)
    options = {"do_sample": False, "max_new_tokens": 16, "output_scores": True, "return_dict_in_generate": True}
    plain = llama.generate(**inputs, **options)
    with oracle(texts_of(plain.sequences, inputs)):
        out = llama.generate(
            **inputs,
            **options,
            assistant_model=llama_draft,
            streamer=Streamer(),
            **CHAIN,
            exact="margin",
            exact_margin=1.0,
        )
    assert llama.speculation_stats.redecided > 0
    assert seen == out.sequences[0].tolist() == plain.sequences[0].tolist()
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(plain.scores))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exact": "bitwise"}, "exact must be 'margin' or None, got 'bitwise'"),
        ({"exact_margin": 0.1}, "exact_margin is the bound of exact='margin'"),
        ({"exact": "margin", "exact_margin": -1.0}, "exact_margin must be at least 0, got -1.0"),
        ({"exact": "margin", "exact_margin": "2"}, "exact_margin must be a number of logits, got '2'"),
        ({"exact": "margin", "do_sample": True}, "exact='margin' is for greedy decoding"),
        ({"exact": "margin", "num_return_sequences": 1, **prompts(2, 5)}, "takes one row, the batch has 2"),
    ],
)
def test_refusals(llama, llama_draft, options, words):
    with pytest.raises(ValueError, match=words):
        llama.generate(**(prompts(1, 5) | options), assistant_model=llama_draft, max_new_tokens=4)
