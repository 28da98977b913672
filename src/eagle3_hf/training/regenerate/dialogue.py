"""Conversations on their way: which turns are asked, at which temperature, and what was answered."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data import Conversation

logger = logging.getLogger(__name__)


class TemperatureMix:
    """Shares of the temperatures that answers are drawn at.

    Which one a prompt gets is a function of the seed and the prompt, not of the order of work.

    Args:
        shares: temperature to weight; weights needn't sum to 1.
        seed: another one deals them differently.
    """

    def __init__(self, shares: Mapping[float, float], seed: int = 0):
        if not shares or any(t < 0 or w < 0 for t, w in shares.items()) or sum(shares.values()) <= 0:
            raise ValueError(f"a temperature mix needs temperatures >= 0 with weights >= 0, not all 0; got {shares}")
        self.shares, self.seed = dict(sorted(shares.items())), seed

    @classmethod
    def parse(cls, pairs: Sequence[str], seed: int = 0) -> TemperatureMix:
        """From texts `TEMPERATURE` or `TEMPERATURE:WEIGHT`, weight 1 unless given."""
        shares: dict[float, float] = {}
        for pair in pairs:
            temperature, _, weight = pair.partition(":")
            try:
                shares[float(temperature)] = float(weight or 1)
            except ValueError:
                raise ValueError(f"a temperature is T or T:WEIGHT, like 0.7:0.3; got {pair!r}") from None
        return cls(shares, seed)

    def of(self, key: str) -> float:
        """The temperature for this prompt."""
        draw = int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:8], "big") / 2**64
        left = draw * sum(self.shares.values())
        for temperature, share in self.shares.items():
            left -= share
            if left < 0:
                return temperature
        return max(t for t, share in self.shares.items() if share)

    def __str__(self) -> str:
        return " ".join(f"{temperature:g}:{share:g}" for temperature, share in self.shares.items())


@dataclass
class Dialogue:
    """A conversation that is being answered.

    Attributes:
        key: stands for the prompt and the number of the sample.
        temperature: of all its answers.
        pending: what the user (or a system message) says before each answer still to be written.
        messages: the text so far.
        records: finished documents, as the store takes them.
    """

    key: str
    temperature: float
    pending: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    # The document so far: its text as the template sees it, its tokens, and which of them were generated.
    text: str = ""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    finish: str = ""

    def ask(self) -> list[dict[str, Any]]:
        """Take the next turn; returns the messages to answer."""
        self.messages += self.pending.pop(0)
        return self.messages

    def close_document(self) -> None:
        """Keep the document so far as a record, if anything was generated in it."""
        if any(self.mask):
            # A prompt that got no answer any more is no part of it.
            end = len(self.mask) - self.mask[::-1].index(True)
            self._record(self.ids[:end], self.mask[:end])
        self.text, self.ids, self.mask = "", [], []

    def close_text(self) -> None:
        """Keep the messages as a record without tokens (a server gives none)."""
        self._record(None, None)

    def _record(self, ids: list[int] | None, mask: list[bool] | None) -> None:
        keep = ("role", "content", "reasoning_content")
        # Up to the last answer: a turn that was asked in vain is no part of it.
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            return
        self.records.append(
            {
                "key": self.key,
                "messages": [{k: m.get(k) for k in keep} for m in self.messages[: last + 1]],
                "input_ids": ids,
                "loss_mask": mask,
                "temperature": self.temperature,
                "finish": self.finish,
            }
        )


def dialogues_of(
    conversations: Iterable[Conversation],
    mix: TemperatureMix,
    *,
    samples: int = 1,
    done: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
    skip_bad: bool = False,
) -> Iterator[Dialogue]:
    """What is still to be answered; answers that the data has already are left out of it.

    Args:
        conversations: prompts, with or without answers.
        mix: temperatures.
        samples: answers to each prompt.
        done: keys that need no more work.
        part: `(i, n)`: only the prompts of part `i` of `n`, dealt by a hash, so that several machines share the work.
        skip_bad: leave out conversations with tool messages instead of stopping.

    Raises:
        ValueError: a conversation with tool messages, whose contents depend on answers that aren't repeated.
    """
    seen: set[str] = set()
    repeated = bad = 0
    for conversation in conversations:
        turns: list[list[dict[str, Any]]] = [[]]
        for message in conversation.messages:
            if message["role"] == "assistant":
                if turns[-1]:
                    turns.append([])
            else:
                turns[-1].append(message)
        turns = [turn for turn in turns if turn]
        if not turns or any(message["role"] == "tool" for turn in turns for message in turn):
            if not skip_bad:
                what = "tool messages, which can't be asked again" if turns else "token ids but no messages"
                raise ValueError(f"row {conversation.index + 1} has {what} (--skip-bad leaves such rows out)")
            bad += 1
            continue
        if int(conversation.key[:15], 16) % part[1] != part[0]:
            continue
        if conversation.key in seen:
            repeated += 1
            continue
        seen.add(conversation.key)
        for sample in range(samples):
            key = f"{conversation.key}-{sample}"
            if key not in done:
                yield Dialogue(key, mix.of(key), [list(turn) for turn in turns])
    if repeated or bad:
        logger.warning("%d repeated prompts asked once only, %d conversations with tools left out", repeated, bad)
