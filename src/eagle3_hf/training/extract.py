"""Storing features: the target over all documents, into shards (format: `features.py`)."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file

from ..files import write_whole
from .documents import Document
from .features import INDEX, SHARDS, open_shard
from .files import lock_folder, settings_match
from .plan import length_batches
from .target_states import KINDS, TargetTeacher, TeacherStates

logger = logging.getLogger(__name__)

VERSION = 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# A shard is held in memory until it is written.
SHARD_BYTES = 2 << 30


def parse_teacher(text: str) -> tuple[str, int]:
    """Read `hidden`, `logits` or `topk:K`; returns the kind and K (0 for the others)."""
    kind, colon, number = text.partition(":")
    if kind in KINDS and (kind == "topk") == bool(colon) and (not colon or (number.isdigit() and int(number) > 0)):
        return kind, int(number or 0)
    raise ValueError(f"a teacher is hidden, logits or topk:K, like topk:64; got {text!r}")


def stored_bytes(documents: Iterable[Document], teacher: TargetTeacher, dtype: torch.dtype) -> int:
    """Bytes that the features of `documents` take on disk."""
    size = dtype.itemsize
    states = len(teacher.aux_layers) + (teacher.kind == "hidden")
    token = states * teacher.hidden_size * size + 4 + 4 + 1
    row = {"hidden": 0, "topk": teacher.top_k * (size + 4), "logits": teacher.vocab_size * size}[teacher.kind]
    return sum(len(d) * token + int(d.loss_mask[1:].sum()) * row + 25 for d in documents)


def human(count: float) -> str:
    """Bytes with a unit of thousands."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class FeatureWriter:
    """A feature folder, open for one process.

    Args:
        folder: made if it isn't there.
        settings: what the features depend on; a folder begun with others is refused.

    Attributes:
        present: `index` of every document that is in a shard.

    Raises:
        ValueError: other settings, shards without an index, or another process has it open.
    """

    def __init__(self, folder: str | os.PathLike, settings: dict[str, Any]):
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        try:
            self._shards: list[dict[str, Any]] = []
            self.present: set[int] = set()
            paths = sorted(self.folder.glob(SHARDS))
            if paths and not (self.folder / INDEX).is_file():
                raise ValueError(f"{self.folder} holds shards of another program and no {INDEX}: use another folder")
            if paths:
                before = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
                settings_match(self.folder, before["settings"], self.settings)
            # The shards themselves say what is done: a process may have ended between a shard and its index.
            for path in paths:
                with open_shard(path) as file:
                    self.present.update(file.get_tensor("index").tolist())
                    self._note(path, file.get_tensor("offsets"), file.get_tensor("answer"))
            self._number = int(paths[-1].stem.split("-")[1]) + 1 if paths else 0
            self._write_index()
        except BaseException:
            self._lock.close()
            raise

    def _note(self, path: Path, offsets: torch.Tensor, answer: torch.Tensor) -> None:
        self._shards.append(
            {
                "file": path.name,
                "documents": len(offsets) - 1,
                "tokens": int(offsets[-1]),
                "answer_tokens": int(answer.sum()),
                "bytes": path.stat().st_size,
            }
        )

    def _write_index(self) -> None:
        index = {"version": VERSION, "settings": self.settings, "shards": self._shards}
        write_whole(self.folder / INDEX, json.dumps(index, indent=1).encode())

    def write(self, documents: Sequence[Document], columns: Sequence[dict[str, torch.Tensor]]) -> None:
        """Write one shard of `documents`, whose tensors are `columns`."""
        shard = {name: torch.cat([column[name] for column in columns]) for name in columns[0]}
        shard["offsets"] = torch.tensor([0, *map(len, documents)]).cumsum(0)
        shard["index"] = torch.tensor([document.index for document in documents])
        shard["group"] = torch.tensor([document.group for document in documents])
        shard["greedy"] = torch.tensor([document.temperature == 0 for document in documents])
        path = self.folder / f"shard-{self._number:05d}.safetensors"
        scratch = path.with_name(f"{path.stem}.tmp")
        metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        save_file(shard, scratch, metadata=metadata)
        os.replace(scratch, path)
        self._number += 1
        self.present.update(shard["index"].tolist())
        self._note(path, shard["offsets"], shard["answer"])
        self._write_index()

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Extracted:
    """What [`extract`] reports: documents and tokens of this run."""

    documents: int = 0
    tokens: int = 0


def settings_of(teacher: TargetTeacher, target: str, dtype: torch.dtype) -> dict[str, Any]:
    """What stored features depend on."""
    return {
        "target": target,
        "target_class": type(teacher.model).__name__,
        "computed_in": str(teacher.model.dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
        "aux_layers": list(teacher.aux_layers),
        "teacher": teacher.kind if teacher.kind != "topk" else f"topk:{teacher.top_k}",
        "hidden_size": teacher.hidden_size,
        "vocab_size": teacher.vocab_size,
    }


def remaining(documents: Iterable[Document], present: set[int]) -> list[Document]:
    """Documents that no shard holds, each once."""
    left = {document.index: document for document in documents}
    return [document for index, document in left.items() if index not in present]


def check_space(folder: Path, size: int) -> int:
    """Bytes free on the disk of `folder`.

    Raises:
        ValueError: `size` bytes and a twentieth to spare don't fit.
    """
    free = shutil.disk_usage(folder).free
    if size * 1.05 > free:
        raise ValueError(
            f"the features need {human(size)} and {human(free)} are free at {folder}: use fewer documents, another "
            "disk, --teacher hidden, --store-dtype float16, or train online"
        )
    return free


def extract(
    documents: Sequence[Document],
    teacher: TargetTeacher,
    writer: FeatureWriter,
    *,
    dtype: torch.dtype = torch.float16,
    batch_tokens: int = 1024,
    shard_documents: int = 512,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Extracted], None] = lambda done: None,
) -> Extracted:
    """Run the target over `documents` and write their features.

    Args:
        documents: those to do, see [`remaining`].
        teacher: the target.
        writer: where to; left open.
        dtype: of the stored states; values past float16's range are clamped to it.
        batch_tokens: padded tokens a forward; on a CPU more leaves its caches.
        shard_documents: documents a shard, fewer where they would take more than 2 GiB.
        stop: asked before each forward; once true, what is computed is written and the rest left.
        progress: called after each forward.

    Returns:
        What this run did.
    """
    done = Extracted()
    for part in _parts(documents, teacher, dtype, shard_documents):
        columns: dict[int, dict[str, torch.Tensor]] = {}
        for batch in length_batches([len(document) for document in part], batch_tokens):
            if stop():
                break
            made = _columns(teacher, [part[i] for i in batch], dtype)
            columns.update(zip(batch, made))
            done.documents += len(batch)
            done.tokens += sum(len(part[i]) for i in batch)
            progress(done)
        if columns:
            order = sorted(columns)
            writer.write([part[i] for i in order], [columns[i] for i in order])
        if len(columns) < len(part):
            break
    return done


def _parts(
    documents: Sequence[Document], teacher: TargetTeacher, dtype: torch.dtype, most: int
) -> Iterable[list[Document]]:
    part: list[Document] = []
    size = 0
    for document in documents:
        own = stored_bytes([document], teacher, dtype)
        if part and (len(part) == most or size + own > SHARD_BYTES):
            yield part
            part, size = [], 0
        part.append(document)
        size += own
    if part:
        yield part


def _columns(
    teacher: TargetTeacher, documents: Sequence[Document], dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """Each document's columns, unpadded, on the CPU."""
    width = max(map(len, documents))
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    mask = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.from_numpy(document.input_ids)
        mask[row, : len(document)] = torch.from_numpy(document.loss_mask)
    device = teacher.model.device
    states = teacher(ids.to(device), mask.to(device))
    tokens = {"aux": _store(states.aux, dtype), "ids": ids.int(), "argmax": states.argmax.int().cpu(), "answer": mask}
    if teacher.kind == "hidden":
        tokens["final"] = _store(states.hidden, dtype)
    made = [{name: column[row, : len(d)] for name, column in tokens.items()} for row, d in enumerate(documents)]
    counts = states.needed.sum(1).tolist()
    for name, rows in _row_columns(states, dtype).items():
        for columns, piece in zip(made, rows.split(counts)):
            columns[name] = piece
    return made


def _row_columns(states: TeacherStates, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if states.logits is not None:
        return {"logits": _store(states.logits, dtype)}
    if states.top_logprobs is not None and states.top_ids is not None:
        return {"top_logprobs": _store(states.top_logprobs, dtype), "top_ids": states.top_ids.int().cpu()}
    return {}


def _store(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return states.clamp(-limit, limit).to(dtype).cpu() if dtype == torch.float16 else states.to(dtype).cpu()
