"""Many prompts, many calls, and calls that break off in the middle."""

from __future__ import annotations

import gc
import itertools
import random
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CHAIN, DYNAMIC, EOS, PAD, SHAPES, VOCAB, make_draft, make_target, oracle, prompts, texts_of
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class StopsAt(StoppingCriteria):
    """Ends each row at a length of its own, by its place in the batch."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])


def ragged_batch(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def test_two_hundred_prompts_with_random_stops(llama, llama_draft):
    chance = random.Random(0)
    texts = [[chance.randrange(EOS + 1, VOCAB) for _ in range(chance.randrange(1, 41))] for _ in range(200)]
    answers: dict[int, list[int]] = {}
    lengths, accepted = set(), 0
    for first in range(0, len(texts), 16):
        part = texts[first : first + 16]
        inputs = ragged_batch(part)
        width = inputs["input_ids"].shape[1]
        options = {
            "do_sample": False,
            "max_new_tokens": chance.randrange(1, 33),
            "eos_token_id": chance.sample(range(EOS + 1, VOCAB), chance.randrange(1, 3)),
            "pad_token_id": PAD,
            "stopping_criteria": [StopsAt([width + chance.randrange(1, 40) for _ in part])],
        }
        plain = llama.generate(**inputs, **options)
        shape = chance.choice(list(SHAPES.values()))
        with oracle(texts_of(plain, inputs), seed=first):
            fast = llama.generate(**inputs, **options, assistant_model=llama_draft, **shape)
        assert fast.tolist() == plain.tolist()
        accepted += llama.speculation_stats.accepted
        for row, text in enumerate(texts_of(fast, inputs)):
            assert text[: len(part[row])] == part[row]
            answers[first + row] = text[len(part[row]) :]
            lengths.add(len([token for token in answers[first + row] if token != PAD]))
    assert sorted(answers) == list(range(200))
    assert len(lengths) > 15  # stops were random indeed
    assert accepted > 300


def live_bytes() -> int:
    """Bytes of all tensors that are alive."""
    storages = {}
    for thing in gc.get_objects():
        # Packed weights are opaque, there is one for each linear, made at the first call; other classes (fake tensors
        # that an export left) have no memory of their own.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident() -> int:
    """Resident bytes of this process, 0 where that can't be read."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.is_file() else 0


def growth(call: Callable[[int], None], calls: int = 10, windows: int = 2, warm: int = 4) -> dict[str, int]:
    """What is more after `calls` calls than before them: objects, tensor bytes, Python's and resident bytes.

    The least of several windows: what libraries keep once falls into one of them, a leak into all.
    """
    for i in range(warm):
        call(i)
    tracemalloc.start()
    try:
        measured = []
        for i in range(windows * calls + 1):
            call(i)
            gc.collect()
            if i % calls == 0:
                measured.append((len(gc.get_objects()), live_bytes(), tracemalloc.get_traced_memory()[0], resident()))
    finally:
        tracemalloc.stop()
    names = ("objects", "tensor bytes", "python bytes", "resident bytes")
    grown = [[after - before for before, after in zip(*pair)] for pair in itertools.pairwise(measured)]
    return {name: min(values) for name, values in zip(names, zip(*grown))}


# A leak of one list or tensor a call passes them, as the test after the next shows.
LIMITS = {"objects": 75, "tensor bytes": 4096, "python bytes": 75_000, "resident bytes": 12 << 20}


@pytest.fixture(scope="module")
def roomy() -> tuple[Any, Any]:
    target = make_target("llama", max_position_embeddings=4096)
    return target, make_draft(target)


def call_of(models: tuple[Any, Any], keep: list[Any] | None = None) -> Callable[[int], None]:
    target, draft = models
    inputs = prompts(4, 300)

    def call(i: int) -> None:
        shape = [CHAIN, DYNAMIC, SHAPES["static"]][i % 3]
        out = target.generate(
            **inputs, assistant_model=draft, **shape, do_sample=i % 2 == 1, max_new_tokens=12, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        if keep is not None:
            keep.append(out.scores)

    return call


def test_memory_is_flat_across_calls(roomy):
    grown = growth(call_of(roomy))
    over = {name: value for name, value in grown.items() if value > LIMITS[name]}
    assert not over, grown


def test_a_leak_would_be_seen(roomy):
    kept: list[Any] = []
    grown = growth(call_of(roomy, kept))
    assert grown["tensor bytes"] > LIMITS["tensor bytes"] and grown["objects"] > LIMITS["objects"], grown
    hoard: list[Any] = []

    def caches(i: int) -> None:
        hoard.append(torch.ones(1 << 20))

    grown = growth(caches)
    assert grown["resident bytes"] == 0 or grown["resident bytes"] > LIMITS["resident bytes"], grown


class Boom(Exception):
    pass


def failing(kind: str) -> Callable[[], None]:
    def fail() -> None:
        if kind == "interrupt":
            # A shell's background jobs start with the signal ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        raise Boom

    return fail


class FailingProcessor(LogitsProcessor):
    stateless = True  # the countdown doesn't touch the scores

    def __init__(self, when: int, fail: Callable[[], None]):
        self.left, self.fail = when, fail

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return scores


class FailingCriterion(StoppingCriteria):
    def __init__(self, when: int, fail: Callable[[], None]):
        self.left, self.fail = when, fail

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(BaseStreamer):
    def __init__(self, when: int, fail: Callable[[], None]):
        self.left, self.fail, self.ended = when, fail, False

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            self.fail()

    def end(self) -> None:
        self.ended = True


def state_of(model: Any) -> list[Any]:
    """Everything about a model that a call could leave changed."""
    modules = [
        (
            name, type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks),
            sorted(module.__dict__), "forward" in module.__dict__,
        )
        for name, module in model.named_modules()
    ]  # fmt: skip
    weights = [(name, value.data_ptr(), value.requires_grad) for name, value in model.named_parameters()]
    config = model.config.get_text_config()
    return [modules, weights, config.to_dict(), config._attn_implementation, model.generation_config.to_dict()]


PLACES = ("processor", "criterion", "streamer", "draft", "target", "head")


@pytest.mark.parametrize("kind", ["exception", "interrupt"])
@pytest.mark.parametrize("when", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_breaks_off_leaves_nothing_behind(llama, llama_draft, monkeypatch, place, when, kind):
    batch = 1 if place == "streamer" else 3
    inputs = prompts(batch, 9)
    options = {"do_sample": False, "max_new_tokens": 20, "assistant_model": llama_draft, **DYNAMIC}
    expected = llama.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert llama.generate(**inputs, **options).tolist() == expected.tolist()
    before = [state_of(llama), state_of(llama_draft), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    fail = failing(kind)
    more: dict[str, Any] = {}
    count = [0]
    modules = {"draft": llama_draft, "target": llama.model.layers[2].mlp, "head": llama.lm_head}
    with monkeypatch.context() as patch:
        if place == "processor":
            more["logits_processor"] = [FailingProcessor(when, fail)]
        elif place == "criterion":
            more["stopping_criteria"] = [FailingCriterion(when, fail)]
        elif place == "streamer":
            more["streamer"] = FailingStreamer(when, fail)
        else:
            inner = type(modules[place]).forward

            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if self is modules[place]:
                    count[0] += 1
                    if count[0] > when:
                        fail()
                return inner(self, *args, **kwargs)

            patch.setattr(type(modules[place]), "forward", forward)
        with pytest.raises(KeyboardInterrupt if kind == "interrupt" else Boom):
            llama.generate(**inputs, **options, **more)
    if place == "streamer":
        assert more["streamer"].ended
    after = [state_of(llama), state_of(llama_draft), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    assert after == before
    assert llama.generate(**inputs, **options).tolist() == expected.tolist()
    assert llama.generate(**inputs, do_sample=False, max_new_tokens=20).tolist() == expected.tolist()


def test_modes_stay_as_they_were(llama, llama_draft):
    llama.train()
    llama_draft.train()
    try:
        llama.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=4)
        assert all(module.training for model in (llama, llama_draft) for module in model.modules())
    finally:
        llama.eval()
        llama_draft.eval()
    assert torch.is_grad_enabled()
