"""What `generate()` of an exported model takes and refuses; graphs uncompiled."""

import copy

import pytest
import torch
from neuron_support import LENGTH, assert_same_as_plain, in_process, make_pair
from support import EOS, PAD, prompts
from transformers import GenerationConfig, WatermarkingConfig

from eagle3_hf.neuron import options
from eagle3_hf.neuron.validation import compare


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def greedy(pair):
    return in_process(*pair)


@pytest.fixture(scope="module")
def sampler(pair):
    return in_process(*pair, do_sample=True)


@pytest.fixture
def own(greedy, pair, monkeypatch):
    """Sets fields of the generation config of both, the exported model and the one it was made from."""

    def change(**values):
        for model in (greedy, pair[0]):
            config = copy.deepcopy(model.generation_config)
            for name, value in values.items():
                setattr(config, name, value)
            monkeypatch.setattr(model, "generation_config", config)

    return change


def test_every_generation_option_has_a_place():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    tables = [options.FOLLOWED, set(options.UNSUPPORTED), set(options.UNSUPPORTED_SAMPLING), options.WITHOUT_EFFECT]
    places = [name for table in tables for name in table]
    assert fields <= set(places), "a new field of GenerationConfig: say what graphs make of it"
    assert len(places) == len(set(places))


@pytest.mark.parametrize("name", [*options.UNSUPPORTED, *options.UNSUPPORTED_SAMPLING])
def test_what_graphs_can_not_follow_is_refused_by_name(name, greedy, sampler):
    config = GenerationConfig()
    if not hasattr(config, name):
        pytest.skip(f"this transformers has no {name}")
    idle = (options.UNSUPPORTED | options.UNSUPPORTED_SAMPLING)[name]
    drawn = name in options.UNSUPPORTED_SAMPLING
    # Nearly any other value will do: it is refused before anything reads it.
    special = {"suppress_tokens": [3], "watermarking_config": WatermarkingConfig()}
    setattr(config, name, special.get(name, True if idle is False else 0.5 if drawn else 3))
    if drawn:
        config.do_sample, config.top_k = True, 0
    with pytest.raises(ValueError, match=name):
        (sampler if drawn else greedy).generate(torch.tensor([[5, 6]]), generation_config=config)


@pytest.mark.parametrize("name", ["logits_processor", "assistant_model", "streamer", "past_key_values", "tree_top_k"])
def test_arguments_of_the_loaded_model_are_refused_by_name(name, greedy):
    with pytest.raises(TypeError, match=name):
        greedy.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **{name: object()})


def test_a_given_config_is_completed_by_the_targets_own(greedy, pair, own):
    inputs = prompts(2, 6, 9)
    free = pair[0].generate(**inputs, do_sample=False, max_new_tokens=16)
    own(eos_token_id=[int(free[0, 6 + 4]), int(free[1, 6 + 9])], pad_token_id=PAD)
    given = GenerationConfig(max_new_tokens=16)
    plain = pair[0].generate(**inputs, generation_config=given)
    assert plain.shape[1] < 6 + 16
    assert greedy.generate(**inputs, generation_config=given).tolist() == plain.tolist()
    own(repetition_penalty=1.3)
    with pytest.raises(ValueError, match="repetition_penalty"):
        greedy.generate(**inputs, generation_config=given)


def test_another_k_in_a_config(greedy):
    with pytest.raises(
        ValueError, match="num_assistant_tokens 9: the graphs were compiled for num_speculative_tokens 3"
    ):
        greedy.generate(torch.tensor([[5, 6]]), generation_config=GenerationConfig(num_assistant_tokens=9))


def test_lengths(greedy, pair):
    inputs = prompts(2, 6, 1)
    for given in (GenerationConfig(max_length=20), GenerationConfig(max_length=17)):
        if given.max_length == GenerationConfig().max_length:
            continue  # transformers 4: not to be told from a length that nobody gave
        plain = pair[0].generate(**inputs, generation_config=given)
        assert greedy.generate(**inputs, generation_config=given).tolist() == plain.tolist()
    assert greedy.generate(**inputs, max_length=20).tolist() == pair[0].generate(**inputs, max_length=20).tolist()
    for wrong in (0, -3):
        with pytest.raises(ValueError, match="max_new_tokens"):
            greedy.generate(**inputs, max_new_tokens=wrong)


def test_padding_without_a_mask_is_seen_as_transformers_sees_it(greedy, pair, own):
    inputs = prompts(3, 7, 2)
    ids = inputs["input_ids"]
    own(pad_token_id=PAD)
    plain = pair[0].generate(ids, max_new_tokens=12)
    assert plain.tolist() == pair[0].generate(**inputs, max_new_tokens=12).tolist()
    assert greedy.generate(ids, max_new_tokens=12).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="pass an attention_mask"):
        greedy.generate(torch.tensor([[5, PAD, 6]]), max_new_tokens=2)
    own(pad_token_id=PAD, eos_token_id=PAD)  # as many tokenizers have it: nothing can be said then
    one = torch.tensor([[5, PAD, 6]])
    assert greedy.generate(one, max_new_tokens=9).tolist() == pair[0].generate(one, max_new_tokens=9).tolist()


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([5, 6], None, r"input_ids must be integers \[batch, prompt\]"),
        ([[5.0, 6.0]], None, r"input_ids must be integers \[batch, prompt\]"),
        ([[5, 6], [7, 8]], [[1, 1]], r"attention_mask must be \[2, 2\], as input_ids, got \[1, 2\]"),
        ([[5, 6]], [[1]], r"attention_mask must be \[1, 2\], as input_ids, got \[1, 1\]"),
        ([[5, 6]], [[1, 1, 1]], r"attention_mask must be \[1, 2\]"),
        ([[5, 16]], None, "token 16 isn't one of the target's 16"),
        ([[-1, 5]], None, "token -1 isn't one of the target's 16"),
    ],
)
def test_inputs_of_the_wrong_kind(ids, mask, message, greedy):
    mask = None if mask is None else torch.tensor(mask)
    with pytest.raises(ValueError, match=message):
        greedy.generate(torch.tensor(ids), mask, max_new_tokens=2)


def test_a_batch_of_nothing(greedy):
    with pytest.raises(ValueError, match="empty"):
        greedy.generate(torch.zeros(0, 3, dtype=torch.long))


def test_hidden_padding_may_be_any_number(greedy, pair):
    """What stands where the mask is zero isn't read, so it needn't be a token."""
    inputs = prompts(2, 6, 4)
    wanted = greedy.generate(**inputs, max_new_tokens=5)[:, 6:]
    inputs["input_ids"][inputs["attention_mask"] == 0] = -100
    assert greedy.generate(**inputs, max_new_tokens=5)[:, 6:].tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", [torch.tensor, lambda ids: ids, lambda ids: ids[0]])
def test_eos_in_every_form(kind, greedy, pair):
    inputs = prompts(1, 6, 9)
    free = pair[0].generate(**inputs, do_sample=False, max_new_tokens=16)
    stats = assert_same_as_plain(greedy, pair[0], inputs, 16, eos_token_id=kind([int(free[0, 6 + 5])]))
    assert stats.generated < 15


def test_eos_as_the_first_token(greedy, pair):
    inputs = prompts(2, 6, 9)
    first = pair[0].generate(**inputs, do_sample=False, max_new_tokens=1)[:, 6].tolist()
    for eos in ([first[0]], first):
        assert_same_as_plain(greedy, pair[0], inputs, 16, eos_token_id=eos, pad_token_id=PAD)


def test_sampling_that_graphs_were_not_compiled_for(greedy, sampler, own):
    ids = torch.tensor([[5, 6]])
    own(do_sample=True, temperature=0.6, top_p=0.9)  # Llama 3.1's own
    with pytest.raises(ValueError, match=r"graphs are greedy.*generation config.*pass do_sample=False"):
        greedy.generate(ids, max_new_tokens=2)
    assert greedy.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 4)
    for heat in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            sampler.generate(ids, max_new_tokens=2, do_sample=True, top_k=0, temperature=heat)
    with pytest.raises(ValueError, match="pass top_k=0"):
        sampler.generate(ids, max_new_tokens=2, do_sample=True, top_k=5)


def test_validation_of_a_target_with_penalties_of_its_own(greedy, pair, own):
    """Qwen2.5's generation config has a repetition penalty, which graphs don't follow and validation doesn't want."""
    own(repetition_penalty=1.3, do_sample=True, temperature=0.7, top_p=0.8, top_k=20, eos_token_id=EOS)
    before = greedy.generation_config, pair[0].generation_config
    assert compare(greedy, pair[0]) == 3 * 16
    assert (greedy.generation_config, pair[0].generation_config) == before


def test_a_break_in_a_call_leaves_the_next_as_it_was(greedy, pair):
    def interrupt(ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        greedy.generate(**prompts(3, 9, 3), max_new_tokens=9, stopping_criteria=[interrupt])
    assert_same_as_plain(greedy, pair[0], prompts(3, 9, 4), LENGTH - 9)
