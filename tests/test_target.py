"""What a target gains and what it must not lose: aux states, hooks, saving, copies, other ways of generating."""

from __future__ import annotations

import copy
import io
import logging
import threading
from typing import Any

import pytest
import torch
from support import (
    CHAIN,
    DYNAMIC,
    LAYERS,
    PAD,
    assert_same_as_plain,
    config_of,
    make_draft,
    make_target,
    oracle,
    prompts,
    texts_of,
)
from test_stopping import tiny_tokenizer
from transformers import AutoModelForCausalLM, BioGptConfig, LlamaForCausalLM, LogitsProcessor, pipeline
from transformers.generation.streamers import BaseStreamer

from eagle3_hf import AutoEagle3Target, Eagle3TargetMixin, disable_eagle3, enable_eagle3
from eagle3_hf.aux_layers import check_aux_layers, default_aux_layers, find_decoder
from eagle3_hf.packing import PackedLinear, packing_available


def hooks_of(model: torch.nn.Module) -> int:
    """How many capture hooks are left (transformers 5 keeps hooks of its own)."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return sum("AuxCapture" in hook.__qualname__ for hook in hooks)


def test_aux_states_are_the_layer_inputs(targets, family):
    target = targets(family)
    inputs = prompts(2, 9)
    ids = (3, 0, LAYERS, 1)
    target.set_aux_hidden_state_layers(ids)
    try:
        with torch.no_grad():
            out = target(**inputs, output_aux_hidden_states=True, output_hidden_states=True)
            as_tuple = target(**inputs, output_aux_hidden_states=True, return_dict=False)
    finally:
        target.set_aux_hidden_state_layers(None)
    _, norm = find_decoder(target)
    for i, state, again in zip(ids, out.aux_hidden_states, as_tuple[-1]):
        if i < LAYERS:
            assert torch.equal(state, out.hidden_states[i])
        else:
            assert not torch.equal(state, out.hidden_states[i])
            torch.testing.assert_close(norm(state), out.hidden_states[i])
        assert torch.equal(state, again)
    assert hooks_of(target) == 0
    with target.capture_aux_hidden_states(ids):
        assert hooks_of(target) == len(ids)
    plain = target(**inputs)
    assert "aux_hidden_states" not in plain
    torch.testing.assert_close(plain.logits, out.logits)


def test_set_and_get(caplog):
    target = make_target("llama", num_hidden_layers=12)
    assert target.get_eagle3_aux_hidden_state_layers() == (2, 6, 9)
    target.set_aux_hidden_state_layers([9, 1])
    assert target.get_eagle3_aux_hidden_state_layers() == (9, 1)
    with target.capture_aux_hidden_states() as capture:
        target(torch.tensor([[3, 4]]))
    assert [state.shape for state in capture.take()] == [(1, 2, 32)] * 2
    with pytest.raises(RuntimeError, match="never reached"):
        capture.take()
    target.set_aux_hidden_state_layers(None)
    assert target.get_eagle3_aux_hidden_state_layers() == (2, 6, 9)
    for ids, words in (
        ([13], r"\[13\].*0\.\.12.*12 decoder layers"),
        ([-2], "outside"),
        ([1, 1], "repeat"),
        ([], "one"),
    ):
        with pytest.raises(ValueError, match=words):
            target.set_aux_hidden_state_layers(ids)
    assert check_aux_layers([12, 0], 12) == (12, 0)


@pytest.mark.parametrize(("layers", "expected"), [(32, (2, 16, 29)), (6, (2, 3)), (4, (1, 2)), (1, (0, 1)), (5, (2,))])
def test_default_ids_of_shallow_models_are_clamped_with_a_warning(layers, expected, caplog):
    with caplog.at_level("WARNING", logger="eagle3_hf"):
        assert default_aux_layers(layers) == expected
    assert bool(caplog.records) == (layers < 7)
    assert layers > 6 or f"{layers} layers" in caplog.text


class Breaker(LogitsProcessor):
    """Raises when the text is so long."""

    def __init__(self, error: type[BaseException], length: int):
        self.error, self.length = error, length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.length:
            raise self.error("stop here")
        return scores


class BreakingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.count, self.ended = 0, False

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count > 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("length", [9, 14])
def test_an_exception_leaves_the_model_clean(llama, llama_draft, error, length):
    inputs = prompts(2, 9)
    names = set(vars(llama))
    options = {"logits_processor": [Breaker(error, length)], "max_new_tokens": 12}
    with pytest.raises(error, match="stop here"):
        llama.generate(**inputs, assistant_model=llama_draft, **options, **DYNAMIC)
    assert hooks_of(llama) == 0
    assert set(vars(llama)) == names
    assert llama.config._attn_implementation == "sdpa"
    assert assert_same_as_plain(llama, llama_draft, inputs, DYNAMIC).accepted > 5


def test_an_interrupt_in_a_streamer_ends_it_and_leaves_the_model_clean(llama, llama_draft):
    streamer = BreakingStreamer()
    with pytest.raises(KeyboardInterrupt):
        llama.generate(**prompts(1, 9), assistant_model=llama_draft, streamer=streamer, max_new_tokens=30)
    assert streamer.ended
    assert hooks_of(llama) == 0
    assert llama.config._attn_implementation == "sdpa"
    assert assert_same_as_plain(llama, llama_draft, prompts(1, 9), CHAIN).accepted > 5


def test_an_exception_in_the_model_removes_the_hooks(llama, monkeypatch):
    monkeypatch.setattr(llama.model.layers[2].mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llama(torch.tensor([[3]]), output_aux_hidden_states=True)
    assert hooks_of(llama) == 0


def test_memory_stays_flat_over_calls(llama, llama_draft):
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    counts = []
    for _ in range(4):
        llama.generate(**prompts(3, 9), assistant_model=llama_draft, max_new_tokens=12, **DYNAMIC)
        counts.append(tensors())
    assert counts[-1] <= counts[1]


def test_two_threads_on_one_model(llama, llama_draft):
    cases = [prompts(2, 9, seed=1), prompts(1, 6, seed=2)]
    answers = [llama.generate(**inputs, do_sample=False, max_new_tokens=40).tolist() for inputs in cases]
    results: list[Any] = [None, None]

    def work(i: int) -> None:
        try:
            for _ in range(3):
                out = llama.generate(
                    **cases[i], do_sample=False, max_new_tokens=40, assistant_model=llama_draft, **CHAIN
                )
                results[i] = out.tolist()
                if results[i] != answers[i]:
                    return
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == answers
    assert hooks_of(llama) == 0


def test_save_and_load(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()
    assert isinstance(llama, Eagle3TargetMixin)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is LlamaForCausalLM
    again = AutoEagle3Target.from_pretrained(tmp_path, aux_hidden_state_layers=[1, 2])
    assert again.get_eagle3_aux_hidden_state_layers() == (1, 2)
    ids = prompts(2, 5)
    torch.testing.assert_close(again(**ids).logits, llama(**ids).logits)
    with pytest.raises(OSError, match="from_pretrained"):
        AutoEagle3Target()


def test_enable_and_disable_round_trip():
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of("llama")).eval()
    forward, keys, names = type(model).forward, set(model.state_dict()), set(vars(model))
    inputs = prompts(2, 7)
    with torch.no_grad():
        before = model(**inputs).logits
        target = enable_eagle3(model, pack=True)
        assert target is model
        assert isinstance(target, LlamaForCausalLM)
        assert isinstance(target.lm_head, PackedLinear) == packing_available()
        assert enable_eagle3(target) is model
        torch.testing.assert_close(target(**inputs).logits, before, atol=1e-5, rtol=1e-5)
        assert set(target.state_dict()) == keys
        assert disable_eagle3(target) is model
        assert torch.equal(model(**inputs).logits, before)
    assert type(model) is LlamaForCausalLM
    assert type(model).forward is forward
    assert set(vars(model)) == names
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert disable_eagle3(model) is model
    assert type(enable_eagle3(model, pack=False).lm_head) is torch.nn.Linear


@pytest.mark.skipif(not packing_available(), reason="this torch has no packed linears")
def test_packed_linears_follow_their_weights():
    torch.manual_seed(0)
    target = enable_eagle3(LlamaForCausalLM(config_of("llama")).eval(), pack=True)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        first = target(ids).logits
        for change in (
            lambda linear: linear.weight.mul_(0.5),
            lambda linear: linear.load_state_dict({"weight": torch.randn(16, 32)}),
            lambda linear: setattr(linear, "weight", torch.nn.Parameter(torch.randn(16, 32))),
        ):
            change(target.lm_head)
            second = target(ids).logits
            assert not torch.allclose(first, second)
            disable_eagle3(target)
            torch.testing.assert_close(target(ids).logits, second, atol=1e-4, rtol=1e-4)
            first = enable_eagle3(target, pack=True)(ids).logits
    # Training goes through the stock kernel and reaches the weight.
    target(ids).logits.sum().backward()
    assert target.lm_head.weight.grad is not None


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_are_targets_of_their_own(llama_draft, how):
    llama, inputs = make_target("llama"), prompts(2, 6)
    llama(**inputs)
    if how == "deepcopy":
        other = copy.deepcopy(llama)
    elif how == "pickle":
        buffer = io.BytesIO()
        torch.save(llama, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        buffer = io.BytesIO()
        torch.save(llama.state_dict(), buffer)
        buffer.seek(0)
        other = make_target("llama", seed=9)
        other.load_state_dict(torch.load(buffer))
    assert isinstance(other, Eagle3TargetMixin)
    assert other is not llama
    torch.testing.assert_close(other(**inputs).logits, llama(**inputs).logits)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert llama(**inputs).logits.abs().sum() > 0
    assert other(**inputs).logits.abs().sum() == 0
    assert assert_same_as_plain(llama, llama_draft, inputs, CHAIN).accepted > 5


def test_other_ways_of_generating_stay(llama):
    inputs = prompts(1, 9)
    options = {"do_sample": False, "max_new_tokens": 15, "eos_token_id": 15, "pad_token_id": PAD}
    plain = llama.generate(**inputs, **options)
    torch.manual_seed(1)
    small = LlamaForCausalLM(config_of("llama")).eval()
    small.generation_config.eos_token_id = None
    assert llama.generate(**inputs, **options, assistant_model=small, num_assistant_tokens=3).tolist() == plain.tolist()
    assert llama.generate(**inputs, **options, prompt_lookup_num_tokens=3).tolist() == plain.tolist()
    beams = llama.generate(**inputs, **options, num_beams=3, num_return_sequences=2)
    assert beams.shape[0] == 2
    undone = disable_eagle3(copy.deepcopy(llama))
    assert undone.generate(**inputs, **options, num_beams=3, num_return_sequences=2).tolist() == beams.tolist()


def test_pipeline(llama, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "a"
    config = llama.config
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    draft = make_draft(llama, **tokens)
    options = {"do_sample": False, "max_new_tokens": 10}
    plain = pipeline("text-generation", model=llama, tokenizer=tokenizer)("hcabdl", **options)
    llama.speculation_stats = None
    fast = pipeline("text-generation", model=llama, tokenizer=tokenizer, assistant_model=draft)("hcabdl", **options)
    assert fast == plain
    assert llama.speculation_stats.rounds > 0
    llama.speculation_stats = None
    per_call = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    assert per_call("hcabdl", assistant_model=draft, **options) == plain
    assert llama.speculation_stats.rounds > 0
    assert "is not supported for" not in caplog.text  # pipelines know models by the names of their classes


def test_aux_ids_set_by_hand_win(llama):
    draft = make_draft(llama, aux_hidden_state_layers=[1, 2, LAYERS])
    inputs = prompts(2, 8)
    plain = llama.generate(**inputs, do_sample=False, max_new_tokens=12)
    seen = []
    original = type(llama).capture_aux_hidden_states
    try:
        type(llama).capture_aux_hidden_states = lambda self, ids=None: seen.append(ids) or original(self, ids)
        for ids in (None, [0, 1, 3]):
            llama.set_aux_hidden_state_layers(ids)
            with oracle(texts_of(plain, inputs)):
                fast = llama.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=draft)
            assert fast.tolist() == plain.tolist()
            assert set(seen) == {tuple(ids or [1, 2, LAYERS])}
            seen.clear()
        llama.set_aux_hidden_state_layers([0, 1])
        with pytest.raises(ValueError, match="reads 3 aux hidden states, 2 are set"):
            llama.generate(**inputs, assistant_model=draft)
    finally:
        del type(llama).capture_aux_hidden_states
        llama.set_aux_hidden_state_layers(None)


def test_layers_in_an_unknown_place_are_found_by_attribute():
    config = BioGptConfig(vocab_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                          intermediate_size=48, max_position_embeddings=64, initializer_range=0.3)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"4 decoder layers of BioGptForCausalLM.*layers_attribute"):
        enable_eagle3(model)
    with pytest.raises(ValueError, match=r"no ModuleList"):
        enable_eagle3(model, layers_attribute="biogpt.layer_norm")
    target = enable_eagle3(model, layers_attribute="biogpt.layers")
    target.generation_config.eos_token_id = None
    draft = make_draft(target, aux_hidden_state_layers=[1, 2, LAYERS])
    inputs = prompts(1, 6)
    assert assert_same_as_plain(target, draft, inputs, CHAIN, max_new_tokens=20).accepted > 5
    del model.biogpt.layer_norm
    with pytest.raises(ValueError, match="id 4 needs the model's final norm"):
        target.capture_aux_hidden_states([4])
