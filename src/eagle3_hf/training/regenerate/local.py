"""Answers by a model in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from ..masks import AssistantMasks
from .dialogue import Dialogue
from .streams import Job, Streams

logger = logging.getLogger(__name__)


class LocalAnswers:
    """Answers of a model that is loaded here, many streams at a time. Records hold the exact tokens.

    Args:
        model: the target, in eval mode.
        tokenizer: with a chat template.
        stop_ids: tokens that end an answer.
        streams: sequences at a time; more is faster until the memory or the arithmetic is used up.
        max_prompt: dialogues whose prompt is longer are left out (a later turn: end there); their number is logged.
        max_new: most tokens an answer.
        seed: of the sampling.
        template_kwargs: more variables for the chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_ids: Collection[int],
        *,
        streams: int = 128,
        max_prompt: int = 1024,
        max_new: int = 512,
        seed: int = 0,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.stop_ids = tokenizer, set(stop_ids)
        self.max_prompt, self.max_new, self.count = max_prompt, max_new, streams
        self.chat = AssistantMasks(tokenizer, stop_ids, template_kwargs)
        generator = torch.Generator(model.device).manual_seed(seed)
        # One place more: the last token of an answer is never fed.
        self.streams = Streams(model, streams, max_prompt + max_new + 1, stop_ids, generator)
        self.too_long = 0

    def _job(self, dialogue: Dialogue) -> Job | None:
        text = self.chat.render(dialogue.ask(), True)
        if dialogue.text and text.startswith(dialogue.text):
            # The tokens that the target wrote stay as they are: its text tokenised anew may give others.
            more = self.chat.tokens(text[len(dialogue.text) :])
            dialogue.ids, dialogue.mask = dialogue.ids + more, dialogue.mask + [False] * len(more)
        else:
            dialogue.close_document()
            dialogue.ids = self.chat.tokens(text)
            dialogue.mask = [False] * len(dialogue.ids)
        dialogue.text = text
        if len(dialogue.ids) > self.max_prompt:
            self.too_long += 1
            return None
        return Job(dialogue.ids, self.max_new, dialogue.temperature, dialogue)

    def _take(self, dialogue: Dialogue, answer: list[int]) -> None:
        written = self.tokenizer.decode(answer, clean_up_tokenization_spaces=False)
        content = self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        dialogue.finish = "stop" if answer[-1] in self.stop_ids else "length"
        dialogue.messages.append({"role": "assistant", "content": content})
        dialogue.ids = dialogue.ids + answer
        dialogue.mask = dialogue.mask + [True] * len(answer)
        dialogue.text += written

    def run(self, dialogues: Iterator[Dialogue], stop: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of each finished dialogue.

        Dialogues that are under way when `stop()` turns true are given up; they have no record yet.
        """
        streams, exhausted = self.streams, False
        again: list[Job] = []
        least = max(1, min(16, self.count // 8))
        while not stop():
            free = len(streams.jobs) - streams.active
            # Some at once: a prefill costs a forward however few rows it has.
            if free and (free >= least or streams.active == 0 or (exhausted and again)):
                jobs, again = again[:free], again[free:]
                while len(jobs) < free and not exhausted and not stop():
                    fresh = next(dialogues, None)
                    if fresh is None:
                        exhausted = True
                    elif (job := self._job(fresh)) is not None:
                        jobs.append(job)
                    else:
                        yield []  # counted as done, though there is nothing to keep
                if jobs:
                    streams.admit(jobs)
            if streams.active == 0:
                if exhausted and not again:
                    break
                continue
            if exhausted and not again and streams.active <= len(streams.jobs) // 2:
                streams.shrink()
            for job, answer in streams.step():
                dialogue = job.owner
                self._take(dialogue, answer)
                following = self._job(dialogue) if dialogue.pending and dialogue.finish == "stop" else None
                if following is not None:
                    again.append(following)
                    continue
                dialogue.close_document()
                yield dialogue.records
        if self.too_long:
            logger.warning("%d prompts of more than %d tokens left out", self.too_long, self.max_prompt)
