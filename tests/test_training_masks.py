"""Loss masks found from chat templates."""

from __future__ import annotations

import pytest
from training_support import CHATML, MARKED, OPENED, THINKING, TWO_ENDS, chat, tiny_tokenizer

from eagle3_hf.training.masks import AssistantMasks, MaskError, runs_of, show


def learned(tokenizer, document) -> list[str]:
    """The texts under the mask."""
    return [tokenizer.decode(document.input_ids[a:b]) for a, b in runs_of(document.loss_mask)]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["derived", "marked"])
def test_mask_is_exactly_what_generation_would_write(template):
    tokenizer = tiny_tokenizer(template)
    messages = chat("what is a cat", "yes", "no?", "the sky is blue")
    (document,) = AssistantMasks(tokenizer)(messages)
    assert learned(tokenizer, document) == ["yes<|im_end|>", "the sky is blue<|im_end|>"]
    # Token by token: generation starts after the prompt's tokens and its last token is the stop token.
    ids, mask = document.input_ids, document.loss_mask
    for turn in (1, 3):
        prompt = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        begin = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        assert ids[:begin] == tokenizer(prompt, add_special_tokens=False).input_ids
        assert mask[begin]
        assert not mask[begin - 1]
        end = next(b for a, b in runs_of(mask) if a == begin)
        assert ids[end - 1] == tokenizer.eos_token_id
    assert mask[-1]


def test_trailing_question_is_no_part_of_the_document():
    tokenizer = tiny_tokenizer()
    (document,) = AssistantMasks(tokenizer)(chat("a", "b", "c"))
    assert learned(tokenizer, document) == ["b<|im_end|>"]
    assert tokenizer.decode(document.input_ids).endswith("b<|im_end|>")


def test_answer_that_merges_with_the_prompt_is_cut_where_generation_cuts():
    tokenizer = tiny_tokenizer()
    masks = AssistantMasks(tokenizer)
    prompt = masks.render(chat("a"), True)
    whole = masks.tokens(masks.render(chat("a", "\n\nyes"), False))
    head = masks.tokens(prompt)
    assert whole[: len(head)] != head, "the tokenizer must merge the newlines for this test to say anything"
    (document,) = masks(chat("a", "\n\nyes", "c", "\nno"))
    assert document.input_ids[: len(head)] == head
    assert learned(tokenizer, document) == ["\n\nyes<|im_end|>", "\nno<|im_end|>"]
    assert tokenizer.decode(document.input_ids) == masks.render(chat("a", "\n\nyes", "c", "\nno"), False).rstrip()


def test_template_that_drops_thoughts_gives_a_document_for_each_turn():
    tokenizer = tiny_tokenizer(THINKING)
    first, second = AssistantMasks(tokenizer)(chat("a", "<think>hm</think>yes", "c", "<think>oh</think>no"))
    assert learned(tokenizer, first) == ["<think>hm</think>yes<|im_end|>"]
    assert learned(tokenizer, second) == ["<think>oh</think>no<|im_end|>"]
    # What the target saw before the second answer: the first one without its thought, not learned.
    assert "assistant\nyes<|im_end|>" in tokenizer.decode(second.input_ids)
    assert "hm" not in tokenizer.decode(second.input_ids)


def test_thinking_template_without_thoughts_stays_one_document():
    tokenizer = tiny_tokenizer(THINKING)
    (document,) = AssistantMasks(tokenizer)(chat("a", "yes", "c", "no"))
    assert learned(tokenizer, document) == ["yes<|im_end|>", "no<|im_end|>"]


def test_another_end_token_for_earlier_turns_gives_a_document_for_each_turn():
    tokenizer = tiny_tokenizer(TWO_ENDS)
    first, second = AssistantMasks(tokenizer)(chat("a", "yes", "c", "no"))
    assert learned(tokenizer, first) == ["yes<|im_end|>"]
    assert learned(tokenizer, second) == ["no<|im_end|>"]
    assert "yes<|end|>" in tokenizer.decode(second.input_ids)


def test_finished_turn_with_another_beginning_than_the_prompt_is_refused():
    masks = AssistantMasks(tiny_tokenizer(OPENED))
    with pytest.raises(MaskError, match=r"another beginning than its generation prompt.*<think>.*regenerate"):
        masks(chat("a", "hm</think>yes"))


def _marks(inner: str) -> str:
    return CHATML.replace("{{ m['content'] }}<|im_end|>", inner)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        # The header is under the mask too.
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}<|im_start|>assistant\n"
            "{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m['role'] }}\n"
            "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "tokens before the answer does",
        ),
        # The user is marked, the assistant isn't.
        (
            _marks(
                "{% if m['role'] == 'user' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
                "{{ m['content'] }}{% endif %}<|im_end|>"
            ),
            "before the answer does|doesn't hold the end",
        ),
        # Everybody is marked.
        (_marks("{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>"), "marks 2 parts.*1 answers"),
        # Only the beginning of the answer is marked.
        (
            _marks(
                "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'][:5] }}{% endgeneration %}"
                "{{ m['content'][5:] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>"
            ),
            "doesn't hold the end of the answer",
        ),
    ],
    ids=["header", "user", "all", "beginning"],
)
def test_wrong_marks_are_errors_that_show_a_sample(template, fault):
    masks = AssistantMasks(tiny_tokenizer(template))
    with pytest.raises(MaskError, match=fault) as caught:
        masks(chat("what is a cat", "the sky is blue"))
    assert "«" in str(caught.value)
    assert "cat" in str(caught.value)


def test_template_without_stop_token_learns_the_text_and_warns(caplog):
    template = CHATML.replace("<|im_end|>\n", "\n")
    tokenizer = tiny_tokenizer(template)
    (document,) = AssistantMasks(tokenizer)(chat("a", "yes"))
    assert learned(tokenizer, document) == ["yes"]
    assert "won't learn where answers end" in caplog.text


def test_refusals_name_the_fault():
    masks = AssistantMasks(tiny_tokenizer())
    with pytest.raises(MaskError, match="no assistant message"):
        masks(chat("a"))
    with pytest.raises(MaskError, match="starts with the assistant"):
        masks([{"role": "assistant", "content": "a"}])
    tokenizer = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(MaskError, match="refuses the conversation: roles must alternate"):
        AssistantMasks(tokenizer)(chat("a", "b"))
    tokenizer.chat_template = None
    with pytest.raises(MaskError, match="no chat template"):
        AssistantMasks(tokenizer)


def test_show_marks_what_is_learned_in_one_line():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("yes\nno", add_special_tokens=False).input_ids
    text = show(tokenizer, ids, [False] * (len(ids) - 1) + [True])
    assert "\n" not in text
    assert text.count("«") == text.count("»") == 1
    assert text.replace("«", "").replace("»", "") == "yes\\nno"


@pytest.mark.real
def test_smollm2_mask_is_what_the_target_wrote():
    from transformers import AutoTokenizer

    from eagle3_hf import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    messages = chat("What is 2+2?", "It is 4.", "And 3+3?", "\n\n6, of course.\n")
    (document,) = AssistantMasks(tokenizer)(messages)
    assert learned(tokenizer, document) == ["It is 4.<|im_end|>", "\n\n6, of course.\n<|im_end|>"]
    begin = runs_of(document.loss_mask)[0][0]
    # The four tokens before the answer are its header.
    assert tokenizer.decode(document.input_ids[begin - 4 : begin]) == "<|im_start|>assistant\n"
    assert document.input_ids[-1] == 2
