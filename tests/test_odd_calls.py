"""Calls that aren't quite as meant: stateful processors, unprepared models, wrapped drafts, caches of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DYNAMIC, STATIC, make_draft, make_target, prompts
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, StaticCache

from eagle3_hf.compat import cache_argument

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


class Countdown(LogitsProcessor):
    """Changes its mind after some calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls < 6 else scores.roll(1, dims=-1)


class Follower(LogitsProcessor):
    """Goes along with the text, as matchers of grammars do, and takes no token twice."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = input_ids[0].tolist()
        if self.seen and self.seen != text[:-1]:
            raise RuntimeError("out of order")
        self.seen = text
        return scores


class Endless(LogitsProcessor):
    """A function of the text that knows no way on from what it makes likeliest."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 8:
            raise RuntimeError("the text has ended")
        return scores


def rotating(calls: list[int]) -> Any:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        calls.append(row)
        return [3 + len(calls) % 7]

    return allowed


@pytest.mark.parametrize("processor", [Countdown, Follower])
def test_processors_with_a_state_are_refused(llama, llama_draft, processor):
    given = LogitsProcessorList([processor()])
    with pytest.raises(ValueError, match=rf"{processor.__name__} keeps state between calls"):
        llama.generate(**prompts(1, 8), assistant_model=llama_draft, logits_processor=given, **GREEDY)


def test_prefix_functions_with_a_state_are_refused(llama, llama_draft):
    with pytest.raises(ValueError, match="keeps state between calls"):
        llama.generate(
            **prompts(2, 8), assistant_model=llama_draft, prefix_allowed_tokens_fn=rotating([]), **DYNAMIC, **GREEDY
        )


def test_a_state_that_doesn_t_matter_may_be_kept(llama, llama_draft):
    counting = Countdown()
    counting.calls, counting.stateless = -10_000, True  # type: ignore[attr-defined]
    out = llama.generate(**prompts(2, 8), assistant_model=llama_draft, logits_processor=[counting], **GREEDY)
    assert out.tolist() == llama.generate(**prompts(2, 8), **GREEDY).tolist()


def test_asking_processors_twice_leaves_ended_texts_and_the_seed_alone(llama, llama_draft):
    options = {"max_new_tokens": 1, "eos_token_id": None, "do_sample": True}
    outs = []
    for processors in ([], [Endless()]):
        torch.manual_seed(4)
        outs.append(
            llama.generate(**prompts(1, 8), assistant_model=llama_draft, logits_processor=processors, **options)
        )
    assert outs[0].tolist() == outs[1].tolist()


def test_processors_that_draw_are_no_state(llama, llama_draft):
    def noise(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn_like(scores)

    out = llama.generate(**prompts(2, 8), assistant_model=llama_draft, logits_processor=[noise], **GREEDY)
    assert out.shape == (2, 20)


def test_a_model_that_is_no_target_says_what_to_do(llama, llama_draft):
    plain = LlamaForCausalLM(llama.config)
    with pytest.raises(ValueError, match=r"enable_eagle3\(model\)"):
        plain.generate(**prompts(1, 6), assistant_model=llama_draft, max_new_tokens=4)


def test_a_wrapped_draft_says_what_to_do(llama, llama_draft):
    wrapped = torch.compile(llama_draft, backend="eager")
    with pytest.raises(ValueError, match=r"draft\.compile\(\)"):
        llama.generate(**prompts(1, 6), assistant_model=wrapped, max_new_tokens=4)
    with pytest.raises(ValueError, match="got OptimizedModule"):
        llama.generate(**prompts(1, 6), assistant_model=wrapped, max_new_tokens=4, tree_top_k=2)


@pytest.mark.parametrize("paths", ["x", 5, [(0.5,)], [0, 1]])
def test_tree_paths_that_are_none(llama, llama_draft, paths):
    with pytest.raises(ValueError, match="tree_paths must be paths of child ranks"):
        llama.generate(**prompts(1, 6), assistant_model=llama_draft, max_new_tokens=4, tree_paths=paths)


def test_a_fixed_tree_and_a_size_contradict_each_other(llama, llama_draft):
    with pytest.raises(ValueError, match="leave out tree_top_k, or tree_paths"):
        llama.generate(**prompts(1, 6), assistant_model=llama_draft, max_new_tokens=4, tree_top_k=2, **STATIC)


def test_a_size_in_the_call_replaces_the_drafts_fixed_tree(llama):
    draft = make_draft(llama)
    draft.generation_config.tree_paths = [(0,)]
    llama.generate(**prompts(1, 6), assistant_model=draft, **DYNAMIC, **GREEDY)
    assert llama.speculation_stats.candidates_per_round == DYNAMIC["tree_total_tokens"] + 1


def test_an_empty_static_cache_is_refused_and_an_empty_dynamic_one_mentioned(llama, llama_draft, caplog):
    static = StaticCache(config=llama.config, max_cache_len=40)
    with pytest.raises(ValueError, match="StaticCache isn't supported"):
        llama.generate(**prompts(1, 6), assistant_model=llama_draft, past_key_values=static, **GREEDY)
    plain = llama.generate(**prompts(1, 6), **GREEDY)
    with caplog.at_level("WARNING", logger="eagle3_hf"):
        out = llama.generate(**prompts(1, 6), assistant_model=llama_draft, past_key_values=DynamicCache(), **GREEDY)
    assert out.tolist() == plain.tolist()
    assert "stays empty" in caplog.text
    caplog.clear()
    llama.generate(**prompts(1, 6), assistant_model=llama_draft, **GREEDY)
    assert not caplog.text


def test_a_cache_made_in_inference_mode_goes_on_outside(llama, llama_draft):
    inputs = prompts(3, 8)
    with torch.inference_mode():
        given = {name: value.clone() for name, value in inputs.items()}
        first = llama.generate(**given, assistant_model=llama_draft, return_dict_in_generate=True, **DYNAMIC, **GREEDY)
    text = torch.cat((first.sequences, torch.full((3, 2), 5)), dim=1)
    mask = torch.cat((inputs["attention_mask"], torch.ones(3, text.shape[1] - 8, dtype=torch.long)), dim=1)
    past = first[cache_argument(type(llama).forward)]
    out = llama.generate(
        text, attention_mask=mask, assistant_model=llama_draft, past_key_values=past, **DYNAMIC, **GREEDY
    )
    assert out.tolist() == llama.generate(text, attention_mask=mask, **GREEDY).tolist()


def test_router_logits_asked_for_by_the_config():
    target = make_target("mixtral", output_router_logits=True)
    assert target.config.output_router_logits
    draft = make_draft(target)
    out = target.generate(**prompts(2, 8), assistant_model=draft, **DYNAMIC, **GREEDY)
    target.config.output_router_logits = False  # plain generation of 4.57 fails with it
    assert out.tolist() == target.generate(**prompts(2, 8), **GREEDY).tolist()


@pytest.mark.real
def test_the_shipped_draft_fits_into_a_pipeline(smollm2):
    # What transformers compares when a pipeline is made with an assistant.
    target, draft = smollm2.target.config, smollm2.draft.config
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(draft, name) == getattr(target, name)


def test_an_assistant_tokenizer_is_refused_with_the_way_out(llama, llama_draft):
    with pytest.raises(ValueError, match="assistant_model when calling the pipeline"):
        llama.generate(**prompts(1, 6), assistant_model=llama_draft, assistant_tokenizer=object(), max_new_tokens=4)
