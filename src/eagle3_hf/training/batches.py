"""Which documents go into which batch: by token budget, the same for any number of processes, findable on resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def pack_by_length(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut `order` (document numbers, ascending in length) into batches of about `budget` padded tokens.

    A batch is closed where one more document would miss the budget by more than leaving it out does.
    """
    batches: list[list[int]] = []
    current: list[int] = []
    for document in order:
        now = len(current) * lengths[current[-1]] if current else 0
        if current and (len(current) + 1) * lengths[document] - budget > budget - now:
            batches.append(current)
            current = []
        current.append(document)
    return [*batches, current] if current else batches


@dataclass(frozen=True)
class BatchPlan:
    """The batches of every epoch, a function of these fields alone.

    Attributes:
        lengths: tokens of each document.
        budget: padded tokens a batch.
        seed: of the shuffling.
        window: documents sorted by length together.
    """

    lengths: tuple[int, ...]
    budget: int
    seed: int
    window: int = 256
    _sizes: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("there is no document to train on")
        if self.budget < 1 or self.window < 1:
            raise ValueError(f"budget and window must be at least 1: {self.budget}, {self.window}")

    def epoch(self, number: int) -> list[list[int]]:
        """Batches of one epoch: each document once."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        batches: list[list[int]] = []
        for at in range(0, len(order), self.window):
            window = sorted(order[at : at + self.window], key=self.lengths.__getitem__)
            batches += pack_by_length(window, self.lengths, self.budget)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def size(self, number: int) -> int:
        """Batches of one epoch."""
        if number not in self._sizes:
            self._sizes[number] = len(self.epoch(number))
        return self._sizes[number]

    def count(self, epochs: float) -> int:
        """Batches in that many epochs."""
        whole = int(epochs)
        total = sum(self.size(number) for number in range(whole))
        return total + round((epochs - whole) * self.size(whole)) if epochs > whole else total

    def stream(self) -> Iterator[tuple[float, list[int]]]:
        """Batches for ever, with the epoch that is reached behind each."""
        number = 0
        while True:
            batches = self.epoch(number)
            for index, batch in enumerate(batches):
                yield number + (index + 1) / len(batches), batch
            number += 1

    def epochs_after(self, batches: int) -> float:
        """Epochs that so many batches of the stream are."""
        number = 0
        while batches > (size := self.size(number)):
            batches, number = batches - size, number + 1
        return number + batches / size

    @property
    def fingerprint(self) -> str:
        """Changes when the data or the way it is cut changes."""
        digest = hashlib.sha256(repr((self.budget, self.seed, self.window)).encode())
        digest.update(torch.tensor(self.lengths, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()[:16]


def plan_updates(args: Any, plan: BatchPlan) -> int:
    """Updates of a run with these `TrainingArguments`: `max_steps`, or what `num_train_epochs` come to; at least 1."""
    if args.max_steps > 0:
        return args.max_steps
    per_update = args.gradient_accumulation_steps * args.world_size
    return max(plan.count(args.num_train_epochs) // per_update, 1)


class StreamSampler:
    """Batch sampler over a plan's endless stream: process `rank` of `world` takes each `world`-th batch.

    One process that accumulates over two batches and two processes with one each so see the same two in an update.
    """

    def __init__(self, plan: BatchPlan, batches: int, rank: int = 0, world: int = 1):
        self.plan, self.batches, self.rank, self.world = plan, batches, rank, world

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for number, (_, batch) in enumerate(self.plan.stream()):
            if number >= self.batches * self.world:
                return
            if number % self.world == self.rank:
                yield batch


class CountingCollator:
    """Adds `tokens`, int64 `[]`, the real tokens of a batch, to what the collator makes."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(documents)
        batch["tokens"] = torch.tensor(sum(len(document["input_ids"]) for document in documents))
        return batch
