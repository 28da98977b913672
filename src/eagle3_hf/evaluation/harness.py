"""The harness: every method on every prompt, alternating, into a results file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .methods import PLAIN, Method
from .prompts import Prompt
from .recorder import Call, record_call
from .results import ResultsWriter

_WARM_UP_TOKENS = 16


@dataclass
class Task:
    """How to run.

    Attributes:
        options: `generate()` keywords that all methods share, `max_new_tokens` among them.
        batch_sizes: rows a call; each size is a pass over all prompts.
        turns: most turns of a conversation.
        seed: with the prompts' text it gives each call's own seed.
        traces: conversations of each dataset whose draft trees are kept, to be shown in the report.
    """

    options: dict[str, Any]
    batch_sizes: Sequence[int] = (1,)
    turns: int | None = None
    seed: int = 0
    traces: int = 3


@dataclass(frozen=True)
class _Unit:
    """What all methods run one after the other: one turn of one group of at most `batch` prompts."""

    batch: int
    start: int
    turn: int
    group: tuple[Prompt, ...]

    @property
    def prompts(self) -> list[Prompt]:
        """The rows: those whose conversation has this turn."""
        return [prompt for prompt in self.group if self.turn < len(prompt.turns)]

    def before(self, turn: int) -> _Unit:
        """The unit of an earlier turn."""
        return replace(self, turn=turn)

    @property
    def name(self) -> str:
        # All of a batch counts: which rows run together changes time and rounding.
        texts = "+".join(f"{prompt.index}-{prompt.digest}" for prompt in self.prompts)
        return f"{self.prompts[0].dataset}/b{self.batch}/{texts}/t{self.turn}"

    def key(self, method: str) -> str:
        return f"{self.name}/{method}"


class Harness:
    """Runs methods over datasets.

    Prompts of the datasets take turns, so that a run that is broken off has some of each. Which method begins
    rotates from call to call: none profits from its place, and drift of the machine meets all.

    Args:
        methods: the first is plain generation, whose answers are the history of the later turns for all methods:
            so all see the same prompts, when sampling too.
        tokenizer: with a chat template, or the turns are joined by newlines.
        datasets: prompts by dataset.
        writer: results that it has already aren't made again.
        max_positions: length that a prompt and its answer must fit into; `None` for no limit.
    """

    def __init__(
        self,
        methods: list[Method],
        tokenizer: Any,
        datasets: dict[str, list[Prompt]],
        writer: ResultsWriter,
        task: Task,
        max_positions: int | None = None,
    ):
        if not methods or methods[0].name != PLAIN:
            raise ValueError("the first method must be plain generation: all others are compared with it")
        for method in methods:
            if method.max_batch is not None and min(task.batch_sizes) > method.max_batch:
                raise ValueError(
                    f"{method.name} takes {method.max_batch} rows a call at most, the batches are of "
                    f"{', '.join(map(str, task.batch_sizes))}: add that size, or leave the method out"
                )
        self.methods, self.tokenizer, self.datasets, self.writer, self.task = (
            methods, tokenizer, datasets, writer, task,
        )  # fmt: skip
        self.max_positions = max_positions
        self.device = methods[0].model.device

    def _units(self) -> Iterator[_Unit]:
        for batch in self.task.batch_sizes:
            longest = max(map(len, self.datasets.values()))
            for start in range(0, longest, batch):
                for prompts in self.datasets.values():
                    group = tuple(prompts[start : start + batch])
                    turns = max((len(prompt.turns) for prompt in group), default=0)
                    for turn in range(min(turns, self.task.turns or turns)):
                        yield _Unit(batch, start, turn, group)

    def _runs(self, unit: _Unit) -> list[Method]:
        return [m for m in self.methods if m.max_batch is None or unit.batch <= m.max_batch]

    def total(self) -> int:
        """Calls of `generate()` that the whole run has, those done before included."""
        return sum(len(self._runs(unit)) for unit in self._units())

    def check_lengths(self) -> None:
        """Look at all first turns before anything runs.

        Raises:
            ValueError: a prompt with its answer is longer than the model; both are named.
        """
        for prompts in self.datasets.values():
            for prompt in prompts:
                problem = self._too_long(_Unit(1, 0, 0, (prompt,)))
                if problem:
                    raise ValueError(problem)

    def _too_long(self, unit: _Unit) -> str | None:
        limit, new = self.max_positions, self.task.options["max_new_tokens"]
        if limit is None:
            return None
        for prompt in unit.prompts:
            length = len(self._encode(self._messages(prompt, unit)))
            if length + new > limit:
                return (
                    f"{prompt.dataset}, prompt {prompt.id}: {length} tokens and {new} new ones don't fit into the "
                    f"model's {limit} positions"
                )
        return None

    def _messages(self, prompt: Prompt, unit: _Unit) -> list[dict[str, str]]:
        messages = []
        for turn in range(unit.turn):
            before = unit.before(turn)
            record = self.writer.find(before.key(PLAIN))
            assert record is not None  # turns run in order
            ids = record["rows"][before.prompts.index(prompt)]["ids"]
            answer = self.tokenizer.decode(ids, skip_special_tokens=True)
            messages.append({"role": "user", "content": prompt.turns[turn]})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": prompt.turns[unit.turn]}]

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        return list(self.tokenizer("\n".join(message["content"] for message in messages)).input_ids)

    def _inputs(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        pad = (self.tokenizer.eos_token_id or 0) if pad is None else pad
        ids = [[pad] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return {
            "input_ids": torch.tensor(ids, device=self.device),
            "attention_mask": torch.tensor(mask, device=self.device),
        }

    def run(self, on_call: Callable[[dict[str, Any] | None], None] = lambda record: None, warm_up: bool = True) -> None:
        """Run what isn't in the results file yet.

        Args:
            on_call: called for each call, with its record, or `None` where there is nothing new (done before, or its
                turn has grown too long for the model).
            warm_up: begin with a few tokens by each method, unmeasured.
        """
        self.check_lengths()
        warm: set[str] = set()
        for number, unit in enumerate(self._units()):
            runs = self._runs(unit)
            missing = [method for method in runs if not self.writer.find(unit.key(method.name))]
            for _ in range(len(runs) - len(missing)):
                on_call(None)
            if not missing:
                continue
            if self.writer.find(unit.key("skipped")) or self._skip(unit):
                for _ in missing:
                    on_call(None)
                continue
            rows = [self._encode(self._messages(prompt, unit)) for prompt in unit.prompts]
            inputs = self._inputs(rows)
            if warm_up:
                # As they come: not all methods run at the first batch size.
                cold = [method for method in missing if method.name not in warm]
                self._warm_up(cold, inputs)
                warm.update(method.name for method in cold)
            first = number % len(runs)
            for method in runs[first:] + runs[:first]:
                if method in missing:
                    seed = self.task.seed + zlib.crc32(unit.name.encode())
                    call = record_call(method, inputs, self.task.options, seed)
                    record = self._record(unit, method, rows, call)
                    self.writer.add(record)
                    on_call(record)

    def _warm_up(self, methods: list[Method], inputs: dict[str, torch.Tensor]) -> None:
        tokens = min(_WARM_UP_TOKENS, self.task.options["max_new_tokens"])
        for method in methods:
            record_call(method, inputs, {**self.task.options, "max_new_tokens": tokens}, self.task.seed)

    def _skip(self, unit: _Unit) -> bool:
        """Note a later turn that its history has made too long; the turns after it are too long as well."""
        if unit.turn == 0:
            return False
        if self.writer.find(unit.before(unit.turn - 1).key("skipped")):
            problem = "an earlier turn was skipped"
        else:
            problem = self._too_long(unit) or ""
        if problem:
            fields = {"kind": "skipped", "key": unit.key("skipped"), "dataset": unit.prompts[0].dataset}
            self.writer.add({**fields, "turn": unit.turn, "batch": unit.batch, "reason": problem})
        return bool(problem)

    def _record(self, unit: _Unit, method: Method, prompts: list[list[int]], call: Call) -> dict[str, Any]:
        rows = []
        for prompt, ids, new in zip(unit.prompts, prompts, call.rows):
            about = {"index": prompt.index, "id": prompt.id, "category": prompt.category}
            rows.append({**about, "prompt_tokens": len(ids), "ids": new})
        record = {
            "kind": "result",
            "key": unit.key(method.name),
            "dataset": unit.prompts[0].dataset,
            "unit": unit.name,
            "turn": unit.turn,
            "batch": unit.batch,
            "method": method.name,
            "seconds": call.seconds,
            "rows": rows,
            "stats": None if call.stats is None else asdict(call.stats),
            "blocks": None,
        }
        if call.blocks is not None:
            record["blocks"] = [[len(b.tokens), b.accepted, b.depth, b.verified] for b in call.blocks]
        if unit.batch == 1 and unit.start < self.task.traces:
            record["trace"] = self._trace(unit.prompts[0].turns[unit.turn], call)
        return record

    def _trace(self, prompt: str, call: Call) -> dict[str, Any]:
        """The texts that a trace view shows; ids would need the tokenizer to be at hand then."""

        def pieces(ids: Sequence[int]) -> list[str]:
            return [self.tokenizer.decode([token]) for token in ids]

        trees: list[dict[str, Any] | None] = []
        for tree in call.trees:
            if tree is None:
                trees.append(None)
                continue
            tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
            trees.append({"pieces": pieces(tokens), "ids": tokens, "parents": parents})
        return {"prompt": prompt, "pieces": pieces(call.rows[0]), "trees": trees}
