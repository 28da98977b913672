"""Which tokens of a conversation the target itself would have written: the loss mask, found from its chat template.

Two ways, neither of which looks for strings. Templates with `{% generation %}` say it themselves. For all others the
prompt of each answer is rendered as generation would (`messages[:i]` with the generation prompt): what follows it in
the rendered conversation, up to the stop token, is the answer.

Some templates rewrite earlier turns once a new one comes (thoughts dropped, another end token, the system text moved).
No single text then contains what the target saw at each turn, so such a conversation becomes several documents, each
ending with the answer that is learned.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

logger = logging.getLogger(__name__)


class MaskError(ValueError):
    """No loss mask, or a wrong one; the message shows a sample with the masked part between « and »."""


@dataclass(frozen=True)
class MaskedTokens:
    """One training document: token ids, and True on the tokens that the target writes (its stop token included)."""

    input_ids: list[int]
    loss_mask: list[bool]


def runs_of(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """`[start, end)` of each run of True."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and bool(mask[i])) != (i > 0 and bool(mask[i - 1]))]
    return list(zip(edges[::2], edges[1::2]))


def show(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool], width: int = 160) -> str:
    """A document in one line: masked parts between « and », long parts cut in their middle."""

    def text(part: Sequence[int]) -> str:
        made = repr(tokenizer.decode(list(part), clean_up_tokenization_spaces=False))[1:-1]
        return made if len(made) <= width else f"{made[: width // 2]} ... {made[-width // 2 :]}"

    out, at = [], 0
    for start, end in runs_of(mask):
        out += [text(ids[at:start]), "«", text(ids[start:end]), "»"]
        at = end
    return "".join([*out, text(ids[at:])])


def stop_ids_of(model_or_config: Any, tokenizer: Any) -> set[int]:
    """Token ids that end an answer: those of the generation config, else the tokenizer's EOS."""
    eos = getattr(getattr(model_or_config, "generation_config", model_or_config), "eos_token_id", None)
    ids = set(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    return ids or ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class AssistantMasks:
    """Turns conversations into token ids and loss masks.

    Args:
        tokenizer: the target's, with a chat template.
        stop_ids: tokens that end an answer (see [`stop_ids_of`]); default: the tokenizer's EOS.
        template_kwargs: more variables for the template, as `enable_thinking`.

    Raises:
        MaskError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Collection[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise MaskError("the target's tokenizer has no chat template, from which the loss mask would be found")
        self.tokenizer = tokenizer
        self.stop_ids = set(stop_ids) if stop_ids is not None else stop_ids_of(None, tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        self._warned = False
        template = tokenizer.get_chat_template()
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def __call__(self, messages: Sequence[dict[str, Any]]) -> list[MaskedTokens]:
        """The documents of a conversation: one, or one for each stretch that the template leaves as it was.

        Each ends with its last learned token; a last message that isn't the assistant's is left out.

        Raises:
            MaskError: no answer in it, the template refuses it, or no mask can be found that is certainly right.
        """
        messages = list(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise MaskError("no assistant message to learn from")
        if turns[0] == 0:
            raise MaskError("the conversation starts with the assistant: there is no prompt that it answers")
        return [self._document(messages, turns, group) for group in self._groups(messages, turns)]

    def render(self, messages: Sequence[dict[str, Any]], generation_prompt: bool) -> str:
        """The template's text."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.template_kwargs
            )
        except Exception as error:
            # Templates raise jinja errors of their own wording for roles and orders that they don't take.
            raise MaskError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error

    def tokens(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has written the special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _groups(self, messages: list[dict[str, Any]], turns: list[int]) -> list[list[int]]:
        """Turns that can share a document: the text up to each is still there when the next has come."""
        groups, before = [[turns[0]]], self.render(messages[: turns[0] + 1], False)
        for turn in turns[1:]:
            text = self.render(messages[: turn + 1], False)
            if text.startswith(before.rstrip()):
                groups[-1].append(turn)
            else:
                groups.append([turn])
            before = text
        return groups

    def _document(self, messages: list[dict[str, Any]], turns: list[int], group: list[int]) -> MaskedTokens:
        last = group[-1]
        text = self.render(messages[: last + 1], False)
        prompts = [self.render(messages[:turn], True) for turn in group]
        ends = [self.render(messages[: turn + 1], False) for turn in group]
        foreign = next((prompt for prompt in prompts if not text.startswith(prompt)), None)
        if foreign is not None:
            at = next((i for i, (a, b) in enumerate(zip(foreign, text)) if a != b), min(len(foreign), len(text)))
            raise MaskError(
                "the chat template renders a finished answer with another beginning than its generation prompt: "
                f"...{foreign[max(at - 40, 0) : at + 40]!r} is generated from, but the conversation has "
                f"...{text[max(at - 40, 0) : at + 40]!r}. Let the target write the answers (`eagle3-hf regenerate`), "
                "which keeps their exact tokens"
            )
        ids, starts, stops = self._tokenise(text, prompts, ends)
        if self.marked:
            spans = self._marked_spans(messages[: last + 1], ids, turns, group)
        else:
            spans = [self._span(ids, start, stop) for start, stop in zip(starts, stops)]
        mask = [False] * len(ids)
        for start, end in spans:
            mask[start:end] = [True] * (end - start)
        self._check(messages, group, ids, mask, starts, spans)
        length = spans[-1][1]
        return MaskedTokens(ids[:length], mask[:length])

    def _tokenise(self, text: str, prompts: list[str], ends: list[str]) -> tuple[list[int], list[int], list[int]]:
        """Token ids of `text`, and up to where they agree with those of each prompt and each finished turn."""
        ids = self.tokens(text)
        heads = [self.tokens(prompt) for prompt in prompts]
        tails = [self.tokens(end) for end in ends]
        if not self.marked and any(ids[: len(head)] != head for head in heads):
            # A token spans the end of a prompt, as "\n" + "\n...". Generation can't make it: its prompt is tokenised
            # first. So cut there.
            whole = ids
            ids = self._in_pieces(text, prompts)
            heads = [self._in_pieces(prompt, prompts[:i]) for i, prompt in enumerate(prompts)]
            tails = [self._in_pieces(end, prompts[: i + 1]) for i, end in enumerate(ends)]
            decoded = [self.tokenizer.decode(made, clean_up_tokenization_spaces=False) for made in (ids, whole)]
            if decoded[0] != decoded[1] or any(ids[: len(head)] != head for head in heads):
                raise MaskError(
                    "the tokens of a prompt aren't the beginning of the conversation's tokens, and this tokenizer's "
                    f"text can't be cut there: {show(self.tokenizer, ids, [False] * len(ids))}"
                )
        return ids, [_agree(ids, head) for head in heads], [_agree(ids, tail) for tail in tails]

    def _in_pieces(self, text: str, prompts: list[str]) -> list[int]:
        """Token ids of `text` cut at the end of each of `prompts`, all of them beginnings of it."""
        cuts = [0, *(len(prompt) for prompt in prompts), len(text)]
        return [token for a, b in pairwise(cuts) for token in self.tokens(text[a:b])]

    def _span(self, ids: list[int], start: int, stop: int) -> tuple[int, int]:
        """The answer after `start`: up to its last stop token before `stop`, where its turn ends."""
        found = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self.stop_ids), None)
        if found is not None:
            return start, found + 1
        if not self._warned:
            logger.warning(
                "the chat template ends an answer with none of the stop tokens %s: the draft won't learn where answers "
                "end",
                sorted(self.stop_ids),
            )
            self._warned = True
        while stop > start and not self.tokenizer.decode(ids[stop - 1 : stop]).strip():
            stop -= 1
        return start, stop

    def _marked_spans(
        self, messages: list[dict[str, Any]], ids: list[int], turns: list[int], group: list[int]
    ) -> list[tuple[int, int]]:
        made = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **self.template_kwargs
        )
        mask = [bool(value) for value in made["assistant_masks"]]
        runs = runs_of(mask)
        before = [turn for turn in turns if turn <= group[-1]]
        if list(made["input_ids"]) != ids or len(runs) != len(before):
            raise MaskError(
                f"the template's {{% generation %}} marks {len(runs)} parts, the conversation has {len(before)} "
                f"answers: {show(self.tokenizer, made['input_ids'], mask)}"
            )
        spans = []
        for start, end in runs[-len(group) :]:
            # Some templates leave the stop token outside; the target writes it all the same.
            more = end < len(ids) and ids[end] in self.stop_ids and ids[end - 1] not in self.stop_ids
            spans.append((start, end + more))
        return spans

    def _check(
        self,
        messages: list[dict[str, Any]],
        group: list[int],
        ids: list[int],
        mask: list[bool],
        starts: list[int],
        spans: list[tuple[int, int]],
    ) -> None:
        """A mask must begin no earlier than generation does, and hold the end of the message's text."""
        for turn, begin, (start, end) in zip(group, starts, spans):
            decoded = "".join(self.tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False).split())
            content = messages[turn].get("content")
            tail = "".join(content.split())[-24:] if isinstance(content, str) else ""
            if start < begin:
                fault = f"begins {begin - start} tokens before the answer does"
            elif start >= end:
                fault = "is empty"
            elif tail not in decoded:
                fault = f"doesn't hold the end of the answer, {tail!r}"
            else:
                continue
            raise MaskError(f"the loss mask of message {turn + 1} {fault}: {show(self.tokenizer, ids, mask)}")
