"""Recording one `generate()` call: which round gave which tokens, from which draft."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..decoding.statistics import SpeculationStats
from .methods import Method
from .metrics import Block


@dataclass
class Call:
    """What one `generate()` call did.

    Attributes:
        rows: new token ids of each row, cut behind EOS.
        seconds: wall time of the whole call, prefill included.
        blocks: for one row, what each target forward gave, the prefill first; `None` where it wasn't recorded.
        trees: beside each block the draft tree it was chosen from, if there was one.
        stats: counts of the EAGLE-3 loop, where it ran.
    """

    rows: list[list[int]]
    seconds: float
    blocks: list[Block] | None = None
    trees: list[Any] = field(default_factory=list)
    stats: SpeculationStats | None = None


class _Recorder(BaseStreamer):
    """Streamer that keeps blocks; understands this package's loop (`put_block`) and transformers' own (`put`)."""

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length
        self.width = 0  # input tokens of the model's latest forward
        self.blocks: list[Block] = []
        self.trees: list[Any] = []
        self._tree: Any = None
        self._prompt_seen = False

    def see_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward hook: how many tokens go in tells how many drafted ones are verified."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            self.width = ids.shape[1]

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        tokens = value.flatten().tolist()
        # transformers' assisted decoding drafts before the prefill already. The last token is always the target's.
        drafted = self.width - (1 if self.blocks else self.prompt_length)
        self.blocks.append(Block(tuple(tokens), len(tokens) - 1, max(drafted, len(tokens) - 1)))
        self.trees.append(None)

    def put_tree(self, tree: Any) -> None:
        """The EAGLE-3 loop's draft, before the block that was chosen from it. Kept as it is: no time lost here."""
        self._tree = tree

    def put_block(self, token_ids: list[int], accepted: int) -> None:
        tree, self._tree = self._tree, None
        depth, nodes = (0, 0) if tree is None else (tree.max_depth, tree.size - 1)
        self.blocks.append(Block(tuple(token_ids), accepted, depth, nodes))
        self.trees.append(tree)

    def end(self) -> None:
        pass


def _cut(ids: list[int], eos_token_ids: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids, start=1) if token in eos_token_ids), None)
    return ids[:end]


def eos_ids(model: Any) -> set[int]:
    """The ids that end a text of this model."""
    found = model.generation_config.eos_token_id
    return set() if found is None else set(found if isinstance(found, list) else [found])


def record_call(method: Method, inputs: dict[str, torch.Tensor], options: dict[str, Any], seed: int) -> Call:
    """Run one method on one batch.

    Args:
        inputs: `input_ids` and `attention_mask`, `[rows, prompt]`, left-padded.
        options: keywords for `generate()` that all methods share.
        seed: set before the call, the same for all methods on the same prompts.
    """
    model, (rows, length) = method.model, inputs["input_ids"].shape
    recorder = _Recorder(length) if method.speculates and rows == 1 else None
    keywords = {**inputs, **options, **method.options}
    hook = None
    if recorder is not None:
        keywords["streamer"] = recorder
        hook = model.register_forward_pre_hook(recorder.see_forward, with_kwargs=True)
    # transformers adapts the number of drafted tokens and writes it into the models' settings: each call starts anew.
    assistant: Any = method.options.get("assistant_model")
    owners = [owner for owner in (model, assistant) if owner is not None]
    before = [copy.deepcopy(owner.generation_config) for owner in owners]
    for name, value in method.assistant_settings.items():
        setattr((assistant or model).generation_config, name, value)  # with early exit the model is its own assistant
    if hasattr(model, "speculation_stats"):
        model.speculation_stats = None
    cuda = inputs["input_ids"].device.type == "cuda"
    try:
        torch.manual_seed(seed)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(**keywords)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    finally:
        if hook is not None:
            hook.remove()
        for owner, config in zip(owners, before):
            owner.generation_config = config
    call = Call([_cut(ids, eos_ids(model)) for ids in out[:, length:].tolist()], seconds)
    call.stats = getattr(model, "speculation_stats", None)
    if recorder is not None:
        call.blocks, call.trees = recorder.blocks, recorder.trees
    return call
