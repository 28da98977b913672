"""Eagle3NeuronConfig: everything that is fixed when graphs are compiled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .buckets import context_buckets

CONFIG_FILE = "neuron_config.json"
BACKENDS = ("torch-export", "xla", "neuron")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COUNTS = ("batch_size", "sequence_length", "num_speculative_tokens", "tensor_parallel_size", "padded_hidden_size")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass
class Eagle3NeuronConfig:
    """What a target and draft pair is compiled for. None of it can be changed afterwards.

    Args:
        batch_size: rows of every graph; a smaller batch leaves rows unused.
        sequence_length: slots of the key/value memory. The last one is scratch, so a prompt may have at most
            `sequence_length - 1` tokens, and a text `sequence_length`.
        num_speculative_tokens: `K`, tokens drafted a round.
        context_buckets: prompt lengths to compile for; default: powers of two up to `sequence_length`.
        kv_buckets: how many slots attention reads in a round, one set of graphs each; default: all, always.
        tensor_parallel_size: cores to split both models over (`num_cores` in older optimum-neuron).
        padded_hidden_size: width to pad the states to, where the hardware wants an aligned one (2880 -> 3072).
        torch_dtype: `float32`, `bfloat16` or `float16` (also `fp32`, `torch.float32`). Output is token-identical to
            plain generation in float32 only.
        do_sample: compile temperature and random numbers in; greedy rows still work.
        fuse_draft_loop: all `K` drafts in one graph, instead of one graph call each.
        fuse_step: verification and drafting in one graph: one call a round.
        backend: `torch-export`, `xla` or `neuron`.
        instance_type: AWS instance to compile for, `neuron` only.
        model_id, draft_model_id: where the weights came from; for the record.

    Raises:
        ValueError: values that contradict each other, naming both.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    num_speculative_tokens: int = 4
    context_buckets: list[int] | None = None
    kv_buckets: list[int] | None = None
    tensor_parallel_size: int = 1
    padded_hidden_size: int | None = None
    torch_dtype: str = "float32"
    do_sample: bool = False
    fuse_draft_loop: bool = True
    fuse_step: bool = False
    backend: str = "torch-export"
    instance_type: str | None = None
    model_id: str | None = None
    draft_model_id: str | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self.torch_dtype = full_dtype(self.torch_dtype)
        if self.torch_dtype not in DTYPES:
            raise ValueError(f"torch_dtype must be one of {', '.join(DTYPES)}, got {self.torch_dtype!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.backend == "xla" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"backend 'xla' writes graphs for one core: tensor_parallel_size {self.tensor_parallel_size} needs "
                "'neuron', or 'torch-export' to check it on CPUs"
            )
        least = self.num_speculative_tokens + 2
        if self.sequence_length <= least:
            raise ValueError(
                f"sequence_length {self.sequence_length} is too short for num_speculative_tokens "
                f"{self.num_speculative_tokens}: it must be above {least}"
            )
        self.context_buckets = _buckets(
            "context_buckets", self.context_buckets or context_buckets(self.sequence_length), self.sequence_length
        )
        self.kv_buckets = _buckets("kv_buckets", self.kv_buckets or [self.sequence_length], self.sequence_length)
        if self.kv_buckets[-1] != self.sequence_length:
            self.kv_buckets.append(self.sequence_length)
        if self.kv_buckets[0] < 1 + self.num_speculative_tokens:
            raise ValueError(
                f"the smallest of kv_buckets, {self.kv_buckets[0]}, can't hold a round of "
                f"{1 + self.num_speculative_tokens} tokens"
            )
        if self.fuse_step and not self.fuse_draft_loop:
            raise ValueError("fuse_step needs fuse_draft_loop: it has the draft's loop inside")
        if self.instance_type is not None and self.backend != "neuron":
            raise ValueError(f"instance_type is for backend 'neuron', not for {self.backend!r}")

    def _check_kinds(self) -> None:
        """Values come from files and command lines; a wrong kind would show up late, and nowhere near its name."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name == "padded_hidden_size":
                continue
            if not _whole(value):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("context_buckets", "kv_buckets"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (list, tuple)) and all(map(_whole, value))):
                raise ValueError(f"{name} must be a list of whole numbers, got {value!r}")
        for name in ("do_sample", "fuse_draft_loop", "fuse_step"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.torch_dtype]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to the file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3NeuronConfig:
        """The opposite of `to_dict`; ValueError for names it doesn't know."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"{CONFIG_FILE} has entries this version doesn't know: {', '.join(unknown)}")
        return cls(**values)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `neuron_config.json` into `folder`."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(folder) / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Eagle3NeuronConfig:
        """Read `neuron_config.json` from `folder`.

        Raises:
            ValueError: no such file, or not one of ours.
        """
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"{folder} holds no exported model: it has no {CONFIG_FILE}")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is damaged: not an object")
        try:
            return cls.from_dict(values)
        except TypeError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def full_dtype(name: str | torch.dtype) -> str:
    """`fp32`, `float32` and `torch.float32` are all `float32`; what isn't known stays as it is."""
    if isinstance(name, torch.dtype):
        return str(name).removeprefix("torch.")
    return _SHORT.get(name, name) if isinstance(name, str) else name


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _buckets(name: str, wanted: list[int], most: int) -> list[int]:
    made = sorted(set(wanted))
    if made[0] < 1 or made[-1] > most:
        raise ValueError(f"{name} {made} must lie in 1..{most} (sequence_length)")
    return made
