"""Measuring methods of generation against each other: pairwise, alternating, in one process."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..decoding.statistics import SpeculationStats

PLAIN, PACKED = "plain", "plain, packed"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Attributes:
        name: shown in tables; unique.
        kind: `plain` is `generate()` on the untouched model, `packed` the same on packed weights, `eagle3` speculates.
        options: drafting keywords for `generate()`.
    """

    name: str
    kind: Literal["plain", "packed", "eagle3"]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One method on one prompt; `seconds` is the median of the repeats, prefill included."""

    tokens: int
    seconds: float
    ids: list[int]
    stats: SpeculationStats | None

    @property
    def speed(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds


def read_prompts(path: Path, limit: int) -> list[dict[str, Any]]:
    """Read the first `limit` prompts of a JSON Lines file.

    Args:
        path: one object a line, with `prompt` (text) or `turns` (list of texts, of which the first is used).
        limit: most prompts to return.

    Returns:
        Dicts of `id` and `text`.

    Raises:
        ValueError: no such file, a line of another form (its number is named), or no prompt at all.
    """
    if not path.is_file():
        raise ValueError(f"no prompt file at {path}: pass --prompts FILE (JSON Lines with `turns` or `prompt`)")
    prompts: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if len(prompts) == limit:
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["turns"][0] if "turns" in record else record["prompt"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{path}, line {number}: not an object with `turns` or `prompt`") from None
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: the prompt is no text")
        prompts.append({"id": record.get("question_id", number - 1), "text": text})
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


class Bench:
    """Runs every method on every prompt.

    Args:
        plain_model: the untouched model.
        target: another instance, able to speculate.
        draft: its draft.
        methods: the first must be of kind `plain`; all are compared with it.
        options: keywords of every `generate()` call.
        seed: set anew before every call, so a method's samples don't depend on the order.
        repeats: calls for each prompt and method.
    """

    def __init__(
        self,
        plain_model: Any,
        target: Any,
        draft: Any,
        methods: list[Method],
        options: dict[str, Any],
        seed: int = 0,
        repeats: int = 1,
    ):
        self.plain_model, self.target, self.draft = plain_model, target, draft
        self.methods, self.options, self.seed, self.repeats = methods, options, seed, repeats

    def _call(self, method: Method, inputs: dict[str, Any], index: int, **extra: Any) -> Sample:
        import torch

        model = self.plain_model if method.kind == "plain" else self.target
        options = {**self.options, **method.options, **extra}
        if method.kind == "eagle3":
            options["assistant_model"] = self.draft
        torch.manual_seed(self.seed + index)
        start = time.perf_counter()
        out = model.generate(**inputs, **options)
        seconds = time.perf_counter() - start
        ids = out[0, inputs["input_ids"].shape[1] :].tolist()
        return Sample(len(ids), seconds, ids, model.speculation_stats if method.kind == "eagle3" else None)

    def warm_up(self, prompts: list[dict[str, Any]]) -> None:
        """A few tokens by every method on each of `prompts`, not measured."""
        tokens = min(_WARM_UP_TOKENS, self.options["max_new_tokens"])
        for inputs in prompts:
            for method in self.methods:
                self._call(method, inputs, 0, max_new_tokens=tokens)

    def measure(
        self, prompts: list[dict[str, Any]], on_run: Callable[[], None] = lambda: None
    ) -> list[dict[str, Sample]]:
        """Run all methods prompt by prompt; which one begins rotates, so that none profits from its place.

        Args:
            prompts: `generate()` inputs of one prompt each.
            on_run: called after each call.

        Returns:
            For each prompt, the samples by method name.
        """
        results = []
        for index, inputs in enumerate(prompts):
            calls: dict[str, list[Sample]] = {method.name: [] for method in self.methods}
            for repeat in range(self.repeats):
                first = (index + repeat) % len(self.methods)
                for method in self.methods[first:] + self.methods[:first]:
                    calls[method.name].append(self._call(method, inputs, index))
                    on_run()
            results.append({name: _merge(samples) for name, samples in calls.items()})
        return results


def _merged(samples: list[Sample]) -> SpeculationStats:
    from ..decoding.statistics import SpeculationStats

    stats = SpeculationStats()
    for sample in samples:
        stats.merge(sample.stats or SpeculationStats())
    return stats


def _merge(samples: list[Sample]) -> Sample:
    stats = None
    if samples[0].stats is not None:
        stats = _merged(samples)
    seconds = statistics.median(sample.seconds for sample in samples)
    return Sample(samples[0].tokens, seconds, samples[0].ids, stats)


def first_difference(ids: list[int], other: list[int]) -> int | None:
    """Index of the first token that differs (or that only one of them has); `None` when the lists are equal."""
    if ids == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), min(len(ids), len(other)))


def _against(results: list[dict[str, Sample]], name: str, baseline: str) -> dict[str, float]:
    """Speed of method `name` over that of `baseline`: median of the paired ratios, and ratio of the totals."""
    mine, theirs = [row[name] for row in results], [row[baseline] for row in results]
    return {
        "median": statistics.median(a.speed / b.speed for a, b in zip(mine, theirs)),
        "total": _total_speed(mine) / _total_speed(theirs),
    }


def _total_speed(samples: list[Sample]) -> float:
    return sum(sample.tokens for sample in samples) / sum(sample.seconds for sample in samples)


def per_round(stats: SpeculationStats) -> dict[str, float]:
    """Milliseconds a round (one target forward of one row), by where they went; the prefill isn't in them."""
    rounds = max(stats.rounds, 1)
    total = stats.total_seconds - stats.prefill_seconds
    parts = {"target": stats.target_seconds, "draft": stats.draft_seconds}
    parts["rest"] = total - sum(parts.values())
    return {name: 1000 * seconds / rounds for name, seconds in {**parts, "total": total}.items()}


def summarise(methods: list[Method], results: list[dict[str, Sample]], greedy: bool) -> dict[str, dict[str, Any]]:
    """What the tables show and the JSON holds, by method name.

    `ratio_to_plain` and `ratio_to_packed` have `median` (over prompts, of paired tokens/s ratios) and `total` (all
    tokens over all seconds). `identical_to_plain` is the share of prompts with the same tokens (`None` when sampling).
    """
    summary = {}
    names = [method.name for method in methods]
    for method in methods:
        samples = [row[method.name] for row in results]
        entry: dict[str, Any] = {
            "kind": method.kind,
            "options": method.options,
            "tokens": sum(sample.tokens for sample in samples),
            "seconds": sum(sample.seconds for sample in samples),
            "tokens_per_second_median": statistics.median(sample.speed for sample in samples),
            "tokens_per_second_total": _total_speed(samples),
            "ratio_to_plain": _against(results, method.name, PLAIN),
            "ratio_to_packed": _against(results, method.name, PACKED) if PACKED in names else None,
            "identical_to_plain": None,
        }
        if greedy:
            same = [sample.ids == row[PLAIN].ids for sample, row in zip(samples, results)]
            entry["identical_to_plain"] = sum(same) / len(same)
        if method.kind == "eagle3":
            stats = _merged(samples)
            entry |= {"speculation": stats.as_dict(), "milliseconds_per_round": per_round(stats)}
        summary[method.name] = entry
    return summary


def prompt_records(
    prompts: list[dict[str, Any]], lengths: list[int], results: list[dict[str, Sample]], greedy: bool
) -> list[dict[str, Any]]:
    """The single measurements, for the JSON file."""
    records = []
    for prompt, length, row in zip(prompts, lengths, results):
        runs = {}
        for name, sample in row.items():
            run: dict[str, Any] = {"tokens": sample.tokens, "seconds": sample.seconds}
            if greedy:
                run["first_difference_from_plain"] = first_difference(sample.ids, row[PLAIN].ids)
            if sample.stats is not None:
                run["speculation"] = sample.stats.as_dict()
            runs[name] = run
        records.append({"id": prompt["id"], "prompt_tokens": length, "runs": runs})
    return records


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment(device: Any) -> dict[str, Any]:
    """Versions and machine, for the JSON file."""
    import torch
    import transformers

    from .. import __version__

    found = {
        "eagle3_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "device": str(device),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    if hasattr(os, "getloadavg"):
        found["load_average"] = os.getloadavg()[0]
    return found
