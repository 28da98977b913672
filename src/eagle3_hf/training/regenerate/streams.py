"""Many sequences decoded together, each with its own length and temperature; a finished one makes room at once.

Speculation is of no use here: with hundreds of rows a forward is bound by arithmetic, not by reading the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention import grouped_attention
from ...aux_layers import text_config
from ...compat import accepts, cache_argument
from ...decoding.cache import SpeculativeCache
from ...decoding.masks import TargetMasks
from ...target import _check_target


@dataclass
class Job:
    """One prompt for [`Streams`]: `ids` (at least one token), most tokens to generate, temperature (0 is greedy)."""

    ids: list[int]
    budget: int
    temperature: float
    owner: Any = None


class Streams:
    """A fixed number of sequences decoded together in one [`SpeculativeCache`].

    Args:
        model: a decoder-only causal LM with `sdpa` or `eager` attention.
        count: sequences at a time.
        max_length: longest prompt and answer together; memory for it is taken at the first use.
        stop_ids: tokens that end an answer.
        generator: for sampling, on the model's device.
        prefill_tokens: padded prompt tokens a forward.

    Raises:
        ValueError: a model with recurrent state or another attention, or `max_length` past its position table.
    """

    def __init__(
        self,
        model: Any,
        count: int,
        max_length: int,
        stop_ids: Collection[int],
        generator: torch.Generator | None = None,
        prefill_tokens: int = 4096,
    ):
        _check_target(model)
        config = text_config(model)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and max_length > limit:
            raise ValueError(
                f"prompts and answers of up to {max_length} tokens, the model has {limit} positions: lower "
                "--max-prompt or --max-new-tokens"
            )
        self.model, self.max_length, self.generator = model, max_length, generator
        self.prefill_tokens, self.device = prefill_tokens, model.device
        self.layers = config.num_hidden_layers
        self.masks = TargetMasks(config, model.dtype)
        self.cache_argument = cache_argument(type(model).forward)
        self.last_only = {"logits_to_keep": 1} if accepts(type(model).forward, "logits_to_keep") else {}
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.device)
        self.jobs: list[Job | None] = [None] * count
        self.cache = self._empty_cache(count)
        self.cache.capacity_for(max_length)
        new = {"dtype": torch.long, "device": self.device}
        self.lengths = torch.zeros(count, **new)
        self.next_token = torch.zeros(count, **new)
        self.produced = torch.zeros(count, **new)
        self.budget = torch.zeros(count, **new)
        self.temperature = torch.zeros(count, device=self.device)
        self.answers = torch.zeros(count, max_length, **new)
        self.sampling = False

    def _empty_cache(self, count: int) -> SpeculativeCache:
        cache = SpeculativeCache(self.layers)
        cache.lengths = [0] * count
        return cache

    @property
    def free(self) -> list[int]:
        """Rows without a job."""
        return [row for row, job in enumerate(self.jobs) if job is None]

    @property
    def active(self) -> int:
        """Rows with a job."""
        return len(self.jobs) - self.jobs.count(None)

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> None:
        """Start jobs in free rows.

        Raises:
            ValueError: more jobs than free rows, an empty prompt, or one that leaves no room for an answer.
        """
        free = self.free
        if len(jobs) > len(free):
            raise ValueError(f"{len(jobs)} jobs for {len(free)} free rows")
        bad = next((job for job in jobs if not 1 <= len(job.ids) < self.max_length or job.budget < 1), None)
        if bad is not None:
            raise ValueError(f"a prompt of {len(bad.ids)} tokens, a budget of {bad.budget} in {self.max_length} places")
        # By length, so that prompts that are prefilled together need little padding.
        placed = list(zip(free, sorted(jobs, key=lambda job: len(job.ids))))
        start = 0
        for end in range(1, len(placed) + 1):
            width = len(placed[min(end, len(placed) - 1)][1].ids)
            if end == len(placed) or (end - start + 1) * width > self.prefill_tokens:
                self._prefill(placed[start:end])
                start = end
        rows = torch.tensor([row for row, _ in placed], dtype=torch.long, device=self.device)
        for name, values in (
            ("lengths", [len(job.ids) - 1 for _, job in placed]),
            ("next_token", [job.ids[-1] for _, job in placed]),
            ("budget", [job.budget for _, job in placed]),
            ("temperature", [job.temperature for _, job in placed]),
        ):
            column = getattr(self, name)
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self.device)
        self.produced[rows] = 0
        for row, job in placed:
            self.jobs[row] = job
            self.cache.lengths[row] = len(job.ids) - 1
        self.sampling = any(job is not None and job.temperature > 0 for job in self.jobs)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: SpeculativeCache) -> torch.Tensor:
        with grouped_attention(self.model):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **{self.cache_argument: cache},
                **self.last_only,
            )
        return out.logits[:, -1]

    def _prefill(self, placed: Sequence[tuple[int, Job]]) -> None:
        """Keys and values of all prompt tokens but the last, which the next step feeds.

        So the first answer token is chosen like every other, and no row needs logits of its own place here.
        """
        width = max(len(job.ids) for _, job in placed) - 1
        if width == 0:
            return
        ids = torch.tensor([(job.ids[:-1] + [0] * width)[:width] for _, job in placed], device=self.device)
        fresh = self._empty_cache(len(placed))
        fresh.begin_write(None, width)
        # Right-padded: causality keeps padding out of sight, and its keys are overwritten as the answer grows.
        self._forward(ids, torch.arange(width, device=self.device)[None].repeat(len(placed), 1), None, fresh)
        rows = torch.tensor([row for row, _ in placed], device=self.device)
        for layer, new in zip(self.cache.layers, fresh.layers):
            if not layer.is_initialized:
                blank = new.keys.new_zeros(len(self.jobs), *new.keys.shape[1:])
                layer.lazy_initialization(blank, new.values.new_zeros(len(self.jobs), *new.values.shape[1:]))
            layer.keys[rows.to(layer.keys.device), :, :width] = new.keys[:, :, :width]
            layer.values[rows.to(layer.values.device), :, :width] = new.values[:, :, :width]

    def _pick(self, logits: torch.Tensor) -> torch.Tensor:
        token = logits.argmax(-1)
        if self.sampling:
            drawn = (self.temperature > 0).nonzero()[:, 0]
            mass = (logits[drawn].float() / self.temperature[drawn, None]).softmax(-1).cumsum(-1)
            # Inverse transform sampling: one random number a row instead of one a vocabulary entry.
            uniform = torch.rand(len(drawn), 1, generator=self.generator, device=self.device) * mass[:, -1:]
            token[drawn] = torch.searchsorted(mass, uniform, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        return token

    @torch.inference_mode()
    def step(self) -> list[tuple[Job, list[int]]]:
        """One token for every row; returns the jobs that ended, with their answers (a stop token is part of it)."""
        self.cache.begin_write(self.lengths[:, None], 1)
        slots = torch.arange(self.cache.used, device=self.device)[None]
        visible = slots <= self.lengths[:, None]
        keys = slots.expand(len(self.jobs), -1)
        mask = self.masks.build(visible[:, None], self.lengths[:, None], keys)
        logits = self._forward(self.next_token[:, None], self.lengths[:, None], mask, self.cache)
        self.next_token = self._pick(logits.to(self.device))
        self.answers.scatter_(1, self.produced[:, None], self.next_token[:, None])
        busy = torch.tensor([job is not None for job in self.jobs], device=self.device)
        self.produced += busy
        self.lengths += busy
        ended = torch.isin(self.next_token, self.stop_ids) | (self.produced >= self.budget)
        ended = (ended | (self.lengths >= self.max_length - 1)) & busy
        rows = ended.nonzero()[:, 0]
        done = []
        for row, count, answer in zip(rows.tolist(), self.produced[rows].tolist(), self.answers[rows].tolist()):
            job = self.jobs[row]
            assert job is not None
            done.append((job, answer[:count]))
            self.jobs[row] = None
        # A free row sits at slot 0 and goes on there, seen by nobody.
        self.lengths[rows] = 0
        self.produced[rows] = 0
        self.temperature[rows] = 0
        self.cache.set_lengths(self.lengths.tolist())
        return done

    @torch.inference_mode()
    def shrink(self) -> None:
        """Drop the free rows: at the end of the work they'd cost as much as the others."""
        rows = [row for row, job in enumerate(self.jobs) if job is not None]
        self.cache.select_rows(rows)
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for name in ("lengths", "next_token", "produced", "budget", "temperature", "answers"):
            setattr(self, name, getattr(self, name)[index])
        self.jobs = [self.jobs[row] for row in rows]
