"""`past_key_values` of an earlier call: only new tokens are run, the text is that of plain generation."""

import copy
import pickle
from typing import Any

import pytest
import torch
from support import (
    BOS,
    CHAIN,
    EOS,
    PAD,
    SHAPES,
    VOCAB,
    OracleGenerator,
    make_draft,
    make_target,
    oracle,
    prompts,
    texts_of,
)
from transformers import DynamicCache, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from eagle3_hf import SpeculativeCache, disable_eagle3

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # `past_key_values` is `cache` since 5.2x; both are taken
]
FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
GREEDY = {"do_sample": False, "return_dict_in_generate": True}


def past_of(out: Any) -> Any:
    return getattr(out, FIELD)


def with_more(
    out: Any, inputs: dict[str, torch.Tensor], count: int, seed: int = 0, ended: bool = False
) -> dict[str, torch.Tensor]:
    """The next turn's input: each row's text (of rows that `ended`: without what stands behind), `count` new tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for text in texts_of(out.sequences, inputs):
        while ended and text[-1] == PAD:
            text.pop()
        rows.append(text + torch.randint(EOS + 1, VOCAB, (count,), generator=generator).tolist())
    # Plain generation's cache counts columns, padding too.
    width = max(map(len, rows)) if ended else out.sequences.shape[1] + count
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class Watch:
    """Shapes of a model's inputs, forward by forward."""

    def __init__(self, module: Any):
        self.shapes: list[tuple[int, ...]] = []
        self.hook = module.register_forward_pre_hook(lambda _, args: self.shapes.append(tuple(args[0].shape)))

    def __enter__(self) -> list[tuple[int, ...]]:
        return self.shapes

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()


class Continued(OracleGenerator):
    """Knows the texts that a resumed draft memory holds."""

    past: tuple[list[int], ...] = ()

    def resume(self, cache: Any, offsets: list[int]) -> None:
        self._texts = [text[1 : have + 1] for text, have in zip(self.past, map(sum, zip(cache.lengths, offsets)))]
        super().resume(cache, offsets)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("llama", 3), ("mistral", 3), ("gpt2", 2)])
def test_three_turns(targets, drafts, family, batch, shape):
    target, draft = targets(family), drafts(family)
    inputs, past, options = prompts(batch, 7), None, GREEDY | {"max_new_tokens": 8, "eos_token_id": [EOS, 5, 9]}
    options["pad_token_id"] = PAD
    for turn in range(3):
        plain = target.generate(**inputs, **options)
        before = [] if past is None else list(past.lengths)
        with oracle(texts_of(plain.sequences, inputs), base=Continued, past=texts_of(inputs["input_ids"], inputs)):
            with Watch(target.get_input_embeddings()) as shapes:
                out = target.generate(**inputs, **options, assistant_model=draft, past_key_values=past, **SHAPES[shape])
            resumed = target.speculation_stats
        with oracle(texts_of(plain.sequences, inputs)):
            target.generate(**inputs, **options, assistant_model=draft, **SHAPES[shape])
            fresh = target.speculation_stats
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert (resumed.accepted, resumed.rounds) == (fresh.accepted, fresh.rounds)
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        if turn:
            # Only what came since, and the last token of the turn before.
            new = max(length - have for length, have in zip(lengths, before))
            assert (batch, new) in shapes[:1] + shapes[4:5]
            assert new <= 5
        past = past_of(out)
        kept = [len(text) for text in past.kept.texts]
        assert past.lengths == [length - 1 for length in kept]
        assert [past.kept.draft.cache.lengths, past.kept.draft.offsets] == [past.lengths, [0] * batch]
        inputs = with_more(out, inputs, 4, seed=turn, ended=True)
    assert resumed.accepted + fresh.accepted > 0


def test_the_memory_is_that_of_a_fresh_run(llama, llama_draft):
    inputs = prompts(3, 7)
    out = llama.generate(**inputs, **GREEDY, max_new_tokens=6, assistant_model=llama_draft, **SHAPES["dynamic"])
    more = with_more(out, inputs, 3)
    options = GREEDY | {"max_new_tokens": 5, "assistant_model": llama_draft} | SHAPES["dynamic"]
    resumed = past_of(llama.generate(**more, **options, past_key_values=past_of(out)))
    fresh = past_of(llama.generate(**more, **options))
    assert resumed is past_of(out)
    for ours, theirs in ((resumed, fresh), (resumed.kept.draft.cache, fresh.kept.draft.cache)):
        assert ours.lengths == theirs.lengths
        for a, b in zip(ours.layers, theirs.layers):
            for row, length in enumerate(ours.lengths):
                for x, y in ((a.keys, b.keys), (a.values, b.values)):
                    torch.testing.assert_close(x[row, :, :length], y[row, :, :length], atol=1e-4, rtol=1e-4)


def test_another_token_behind_the_cached_ones(llama, llama_draft, turn):
    past, more = turn
    more["input_ids"][1, -4] = (more["input_ids"][1, -4] + 1 - EOS) % (VOCAB - EOS - 1) + EOS + 1
    with Watch(llama.get_input_embeddings()) as shapes:
        go_on(llama, llama_draft, more, past)
    assert shapes[0] == (2, 5)
    assert past.lengths == (more["attention_mask"].sum(dim=1) + 4).tolist()


def test_sampling_goes_on_too(llama, llama_draft):
    inputs = prompts(2, 7)
    options = {"assistant_model": llama_draft, "return_dict_in_generate": True, "do_sample": True, "max_new_tokens": 6}
    first = llama.generate(**inputs, **options)
    more = with_more(first, inputs, 3)
    torch.manual_seed(1)
    resumed = llama.generate(**more, **options, past_key_values=past_of(first))
    torch.manual_seed(1)
    assert resumed.sequences.tolist() == llama.generate(**more, **options).sequences.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("source", ["generate", "forward"])
def test_the_cache_of_plain_generation(targets, drafts, family, source):
    target, draft = targets(family), drafts(family)
    inputs = prompts(3, 12, seed=1)
    if source == "generate":
        first = target.generate(**inputs, **GREEDY, max_new_tokens=6)
        past, more = past_of(first), with_more(first, inputs, 3)
        assert isinstance(past, DynamicCache)
    else:
        past, more = DynamicCache(), inputs
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, :9]
        target(
            input_ids=inputs["input_ids"][:, :9], attention_mask=inputs["attention_mask"][:, :9],
            position_ids=positions, use_cache=True, **{FIELD: past},
        )  # fmt: skip
    plain = target.generate(**more, **GREEDY, max_new_tokens=9)
    for _ in range(2):  # it is copied, not changed
        with Watch(target.get_input_embeddings()) as shapes:
            fast = target.generate(
                **more, **GREEDY, max_new_tokens=9, assistant_model=draft, past_key_values=past, **SHAPES["dynamic"]
            )
        assert fast.sequences.tolist() == plain.sequences.tolist()
    assert shapes[0] == (3, more["input_ids"].shape[1] - past.get_seq_length())
    # The draft knows what came after, and goes on from there.
    ours = past_of(fast)
    assert min(ours.kept.draft.offsets) > 0
    again = with_more(fast, more, 3)
    expected = target.generate(**again, **GREEDY, max_new_tokens=9).sequences.tolist()
    options = GREEDY | {"max_new_tokens": 9, "assistant_model": draft, "past_key_values": ours}
    assert target.generate(**again, **options).sequences.tolist() == expected


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_plain_generation_takes_ours(targets, drafts, family):
    target, draft = targets(family), drafts(family)
    inputs = prompts(3, 7)
    options = GREEDY | {"eos_token_id": [EOS, 5, 9], "pad_token_id": PAD}
    first = target.generate(**inputs, **options, max_new_tokens=12, assistant_model=draft)
    more = with_more(first, inputs, 4, ended=True)
    past = past_of(first)
    plain = target.generate(**more, **options, max_new_tokens=8)
    with Watch(target.get_input_embeddings()) as shapes:
        out = target.generate(**more, **options, max_new_tokens=8, past_key_values=past)
    assert out.sequences.tolist() == plain.sequences.tolist()
    pads = (1 - more["attention_mask"]).sum(dim=1).tolist()
    assert shapes[0][1] == more["input_ids"].shape[1] - min(map(sum, zip(past.lengths, pads)))
    with pytest.raises(ValueError, match="holds 3 rows, the input has 2"):
        target.generate(**{k: v[:2] for k, v in more.items()}, past_key_values=past)


def test_a_bare_forward_refuses_ours(llama_draft):
    target = make_target("llama")
    inputs = prompts(1, 7)
    out = target.generate(**inputs, **GREEDY, max_new_tokens=6, assistant_model=llama_draft)
    with pytest.raises(ValueError, match=r"to_dynamic_cache\(\)"):
        target(out.sequences[:, -1:], **{FIELD: past_of(out)})
    plain = disable_eagle3(target)
    whole = plain(out.sequences).logits[:, -1]
    past = past_of(out).to_dynamic_cache()
    torch.testing.assert_close(plain(out.sequences[:, -1:], **{FIELD: past}).logits[:, -1], whole, atol=1e-4, rtol=1e-4)


@pytest.fixture
def turn(llama, llama_draft):
    inputs = prompts(2, 7)
    out = llama.generate(**inputs, **GREEDY, max_new_tokens=6, assistant_model=llama_draft)
    return past_of(out), with_more(out, inputs, 3)


def go_on(target: Any, draft: Any, more: dict[str, torch.Tensor], past: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": 5}
    fast = target.generate(**more, **options, assistant_model=draft, past_key_values=past).tolist()
    assert fast == target.generate(**more, **options).tolist()
    return fast


def test_what_does_not_go_together(llama, llama_draft, turn):
    past, more = turn
    changed = {"input_ids": more["input_ids"].clone(), "attention_mask": more["attention_mask"]}
    changed["input_ids"][1, -6] = (changed["input_ids"][1, -6] + 1 - EOS) % (VOCAB - EOS - 1) + EOS + 1
    place = int(more["attention_mask"][1].sum()) - 6
    cases = [
        (llama, llama_draft, {k: v[:, :10] for k, v in more.items()}, "row 0, whose text has 10.*whole text"),
        (llama, llama_draft, {k: v[:1] for k, v in more.items()}, "holds 2 rows, the input has 1"),
        (llama, llama_draft, changed, rf"row 1 differs at token {place} of .*trim_to"),
        (make_target("llama", seed=1), llama_draft, more, "another model's"),
        (
            make_target("llama", num_hidden_layers=5),
            make_draft(make_target("llama", num_hidden_layers=5)),
            more,
            "another",
        ),
        (llama, make_draft(llama, seed=1), more, "another draft"),
    ]
    for target, draft, inputs, words in cases:
        with pytest.raises(ValueError, match=words):
            target.generate(**inputs, assistant_model=draft, past_key_values=past, max_new_tokens=4)
    # None of that did it harm.
    go_on(llama, llama_draft, more, copy.deepcopy(past))
    past.kept.draft = None
    go_on(llama, make_draft(llama, seed=1), more, past)


def test_other_kinds_of_caches(llama, llama_draft, turn):
    _, more = turn
    static = StaticCache(config=llama.config, max_cache_len=32)
    llama(more["input_ids"][:, :4], use_cache=True, **{FIELD: static})
    with pytest.raises(ValueError, match="type StaticCache isn't supported"):
        go_on(llama, llama_draft, more, static)
    assert go_on(llama, llama_draft, more, DynamicCache()) == go_on(llama, llama_draft, more, SpeculativeCache(4))


def test_trimming_to_an_edited_text(llama, llama_draft, turn):
    past, more = turn
    more["input_ids"][1, -6] = BOS
    lengths = list(past.lengths)
    kept = list(past.trim_to(**more))
    assert kept == [lengths[0], int(more["attention_mask"][1].sum()) - 7]
    go_on(llama, llama_draft, more, copy.deepcopy(past))
    past.crop(-2)
    assert past.lengths == [lengths[0] - 2, kept[1] - 2]
    go_on(llama, llama_draft, more, copy.deepcopy(past))
    past.crop(3)
    assert past.lengths == [3, 3]
    go_on(llama, llama_draft, more, past)
    past.trim_to(torch.full((2, 4), BOS))
    assert past.lengths == [0, 0]
    go_on(llama, llama_draft, prompts(2, 5), past)
    with pytest.raises(ValueError, match=r"each of the 2 rows .* got 1"):
        past.trim_to(torch.full((1, 4), BOS))


def test_copies_files_and_rows(llama, llama_draft, turn):
    past, more = turn
    for again in (copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        go_on(llama, llama_draft, more, again)
    twice = copy.deepcopy(past)
    twice.batch_repeat_interleave(2)
    go_on(llama, llama_draft, {k: v.repeat_interleave(2, dim=0) for k, v in more.items()}, twice)
    swapped = copy.deepcopy(past)
    swapped.batch_select_indices(torch.tensor([1]))
    go_on(llama, llama_draft, {k: v[1:] for k, v in more.items()}, swapped)


def test_an_interrupted_call_leaves_the_cache_as_it_was(llama, llama_draft, turn):
    past, more = turn
    lengths = list(past.lengths)

    def interrupt(*_: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return torch.zeros(2, dtype=torch.bool)

    for given in (past, SpeculativeCache(4)):
        calls: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            llama.generate(
                **more, max_new_tokens=9, assistant_model=llama_draft, past_key_values=given,
                stopping_criteria=[interrupt], **CHAIN,
            )  # fmt: skip
        assert given.lengths == (lengths if given is past else [])
        go_on(llama, llama_draft, more, given)


def test_states_of_the_second_turn(llama_draft):
    target = make_target("llama")
    target.set_attn_implementation("eager")
    inputs = prompts(1, 7)
    options = GREEDY | {"max_new_tokens": 6, "output_hidden_states": True, "output_attentions": True}
    plain = target.generate(**inputs, **options)
    fast = target.generate(**inputs, **options, assistant_model=llama_draft)
    more = with_more(plain, inputs, 3)
    theirs = target.generate(**more, **options, past_key_values=past_of(plain))
    ours = target.generate(**more, **options, past_key_values=past_of(fast), assistant_model=llama_draft)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(getattr(theirs, name), getattr(ours, name), strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(y, x, atol=1e-4, rtol=1e-4)
