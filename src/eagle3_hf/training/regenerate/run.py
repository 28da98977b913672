"""The run itself: dialogues through a source of answers into the store, until all are done or someone says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .dialogue import Dialogue
from .store import AnswerStore


class Answers(Protocol):
    """A source of answers: [`LocalAnswers`] or [`ServerAnswers`]."""

    def run(self, dialogues: Iterator[Dialogue], stop: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of each finished dialogue until there are none or `stop()` is true."""
        ...


@dataclass
class Progress:
    """What [`regenerate`] reports: finished dialogues and generated tokens of this run."""

    dialogues: int = 0
    tokens: int = 0


def regenerate(
    dialogues: Iterable[Dialogue],
    answers: Answers,
    store: AnswerStore,
    *,
    stop: Callable[[], bool] = lambda: False,
    max_tokens: int | None = None,
    progress: Callable[[Progress], None] = lambda done: None,
) -> Progress:
    """Answer `dialogues` and keep the answers in `store`, which is left open.

    Args:
        dialogues: see [`dialogues_of`]; those in `store.done` should be left out of it.
        answers: who answers.
        store: where to.
        stop: asked again and again; once it is true, finished answers are kept and the rest is given up.
        max_tokens: stop after this many generated tokens (of all runs on this store); counts exact tokens only.
        progress: called after each finished dialogue.

    Returns:
        What this run did.
    """
    done = Progress()

    def enough() -> bool:
        return stop() or (max_tokens is not None and store.answer_tokens >= max_tokens)

    for records in answers.run(iter(dialogues), enough):
        store.add(records)
        done.dialogues += 1
        done.tokens += sum(sum(record["loss_mask"] or ()) for record in records)
        progress(done)
    return done
