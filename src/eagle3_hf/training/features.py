"""Stored features: the shards' format, and the dataset and collator that read them.

A folder holds `index.json` and shards `shard-NNNNN.safetensors`. A shard has whole documents laid end to end, `N`
tokens of which `M` stand before a token that is learned:

    aux          [N, n_aux * Ht]  inputs of the aux decoder layers, in the order of `aux_layers`
    final        [N, Ht]          teacher hidden: last state after the target's final norm
    logits       [M, V]           teacher logits
    top_logprobs [M, k]           teacher topk: log-probabilities over the whole vocabulary, descending
    top_ids      int32 [M, k]
    ids          int32 [N]        token ids
    argmax       int32 [N]        target's first choice for the *next* token; -1 where that isn't learned
    answer       bool [N]         loss mask
    offsets      int64 [D + 1]    where each document starts
    index        int64 [D]        number that stands for the document
    group        int64 [D]        number by which it is held out or not; `index` where absent
    greedy       bool [D]         its answer was decoded greedily

Floating columns are float16, bfloat16 or float32. The metadata holds the settings, `aux_layers` and `target` among
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from .documents import SplitDocuments
from .packing import layout, pack

INDEX = "index.json"
SHARDS = "shard-*.safetensors"


def open_shard(path: Path) -> Any:
    """`safe_open`, with an error that names the file."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no feature shard: {error}") from None


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder, in order.

    Raises:
        ValueError: none there, or one that the index names is missing.
    """
    paths = sorted(folder.glob(SHARDS))
    if not paths:
        raise ValueError(f"no {SHARDS} in {folder}: run `eagle3-hf extract` first")
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        missing = sorted({shard["file"] for shard in index["shards"]} - {path.name for path in paths})
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names")
    return paths


class FeatureDataset(SplitDocuments):
    """Documents of a feature folder. Shards are memory-mapped: only the pages in use take memory.

    An item is a dict of one document's tensors, `n` tokens, `m` of them before a learned one:

    * `features` `[n, n_aux * Ht]`, `input_ids` int64 `[n]`, `loss_mask` bool `[n]`, `teacher_argmax` int64 `[n]`
    * `teacher_hidden` `[n, Ht]`, or `teacher_logits` `[m, V]`, or `teacher_top_logprobs` and `teacher_top_ids` `[m, k]`

    Args:
        folder: written by `eagle3-hf extract`.
        held_out: share of the groups that isn't trained on; by a hash, so that it is the same when the folder grows.

    Attributes:
        aux_layers: ids of the aux states.
        teacher: `hidden`, `topk` or `logits`.
        target: name of the model that they come from.

    Raises:
        ValueError: no shards, a missing or damaged one, or shards of different settings.
    """

    def __init__(self, folder: str | os.PathLike, held_out: float = 0.02):
        self.folder = Path(folder)
        self._paths = shard_paths(self.folder)
        self._open: dict[int, dict[str, torch.Tensor]] = {}
        self.places: list[tuple[int, int, int, int]] = []
        groups: list[int] = []
        greedy: list[bool] = []
        kinds = {}
        for number, path in enumerate(self._paths):
            with open_shard(path) as file:
                names, metadata = set(file.keys()), file.metadata() or {}
                absent = {"aux", "ids", "argmax", "answer", "offsets", "index", "greedy"} - names
                if absent or "aux_layers" not in metadata:
                    raise ValueError(
                        f"{path} is no feature shard: it lacks {', '.join(sorted(absent or {'metadata'}))}"
                    )
                teacher = "topk" if "top_ids" in names else "logits" if "logits" in names else "hidden"
                kinds[path.name] = (teacher, metadata["aux_layers"], metadata.get("target"))
                offsets = file.get_tensor("offsets")
                groups += file.get_tensor("group" if "group" in names else "index").tolist()
                greedy += file.get_tensor("greedy").tolist()
                rows = [0] * len(offsets)
                if teacher != "hidden":
                    before = torch.nn.functional.pad((file.get_tensor("argmax") >= 0).cumsum(0), (1, 0))
                    rows = before[offsets].tolist()
            edges = offsets.tolist()
            self.places += [(number, start, end, row) for start, end, row in zip(edges, edges[1:], rows)]
        if len(set(kinds.values())) > 1:
            odd = ", ".join(f"{name}: {kind}" for name, kind in kinds.items() if kind != next(iter(kinds.values())))
            raise ValueError(f"shards of {self.folder} differ in settings; {next(iter(kinds.values()))} but {odd}")
        self.teacher, layers, self.target = next(iter(kinds.values()))
        self.aux_layers: list[int] = json.loads(layers)
        super().__init__([end - start for _, start, end, _ in self.places], groups, greedy, held_out)

    def __getstate__(self) -> dict[str, Any]:
        # Workers that are spawned map the files themselves.
        return {**self.__dict__, "_open": {}}

    def _shard(self, number: int) -> dict[str, torch.Tensor]:
        if number not in self._open:
            self._open[number] = load_file(self._paths[number])
        return self._open[number]

    def column(self, document: int, name: str) -> torch.Tensor:
        """A per-token column of one document, as stored."""
        number, start, end, _ = self.places[document]
        return self._shard(number)[name][start:end]

    def __getitem__(self, document: int) -> dict[str, torch.Tensor]:
        number, start, end, row = self.places[document]
        shard = self._shard(number)
        item = {
            "features": shard["aux"][start:end],
            "input_ids": shard["ids"][start:end].long(),
            "teacher_argmax": shard["argmax"][start:end].long(),
            "loss_mask": shard["answer"][start:end],
        }
        if self.teacher == "hidden":
            item["teacher_hidden"] = shard["final"][start:end]
            return item
        rows = slice(row, row + int((item["teacher_argmax"] >= 0).sum()))
        if self.teacher == "logits":
            item["teacher_logits"] = shard["logits"][rows]
        else:
            item["teacher_top_logprobs"] = shard["top_logprobs"][rows]
            item["teacher_top_ids"] = shard["top_ids"][rows].long()
        return item

    def answers(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and mask of each training document, for `count_tokens`."""
        for document in self.train:
            yield self.column(document, "ids"), self.column(document, "answer")


class FeatureCollator:
    """Makes a batch of documents: right-padded rows of one each, or packed rows.

    The batch: `features` `[B, T, n_aux * Ht]`, `input_ids` int64, `loss_mask` bool, `teacher_argmax` int64 (-1 where
    unknown) `[B, T]`; the teacher as `teacher_hidden` `[B, T, Ht]`, `teacher_logits` `[B, T, Vd]`, or `teacher_top_ids`
    int64 and `teacher_top_values` `[B, T, k]` (log-probabilities); with `pack_length` also `document_ids` (-1 on
    padding) and `position_ids` int64 `[B, T]`. Rows of a teacher that nobody learns from are zero.

    Args:
        dtype: of features and final states; bfloat16 has the range that their outliers need.
        vocabulary: int64 `[Vd]`, target ids in the draft's order: teachers `topk` and `logits` become `teacher_logits`
            over these. `None` leaves them as they are stored.
        vocab_size: of the target; with a vocabulary and `topk` needed, since what the top k leave of the probability is
            spread evenly over the other tokens.
        pack_length: tokens a packed row; the documents of a batch then share rows.

    Raises:
        ValueError: documents longer than `pack_length`, or `topk` with a vocabulary and no `vocab_size`.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        vocabulary: torch.Tensor | None = None,
        vocab_size: int | None = None,
        pack_length: int | None = None,
    ):
        self.dtype, self.vocabulary, self.pack_length = dtype, vocabulary, pack_length
        self.vocab_size = vocab_size
        self._place: torch.Tensor | None = None
        if vocabulary is not None and vocab_size is not None:
            self._place = torch.full((vocab_size,), -1, dtype=torch.long)
            self._place[vocabulary] = torch.arange(len(vocabulary))

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        sizes = [len(item["input_ids"]) for item in items]
        rows = [[i] for i in range(len(items))]
        if self.pack_length is not None:
            rows = pack(sizes, range(len(items)), self.pack_length)
        width = max(sum(sizes[i] for i in row) for row in rows)

        def lay(name: str, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            out = torch.full((len(rows), width, *items[0][name].shape[1:]), fill, dtype=dtype)
            for number, row in enumerate(rows):
                at = 0
                for i in row:
                    out[number, at : at + sizes[i]] = items[i][name]
                    at += sizes[i]
            return out

        batch = {"input_ids": lay("input_ids", torch.long), "loss_mask": lay("loss_mask", torch.bool)}
        if "features" in items[0]:
            batch["features"] = lay("features", self.dtype)
            batch["teacher_argmax"] = lay("teacher_argmax", torch.long, -1)
        if "teacher_hidden" in items[0]:
            batch["teacher_hidden"] = lay("teacher_hidden", self.dtype)
        elif "features" in items[0]:
            # Row by row and from left to right, which is the order of a boolean index.
            needed = batch["teacher_argmax"] >= 0
            for name, parts in self._teacher([items[i] for row in rows for i in row]).items():
                stored = torch.cat(parts)
                batch[name] = stored.new_zeros(len(rows), width, stored.shape[-1])
                batch[name][needed] = stored
        if self.pack_length is not None:
            batch["document_ids"], batch["position_ids"] = layout([[sizes[i] for i in row] for row in rows], width)
        return batch

    def _teacher(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """Rows of a stored distribution, by name in the batch."""
        if self.vocabulary is None and "teacher_top_ids" in items[0]:
            return {
                "teacher_top_ids": [item["teacher_top_ids"] for item in items],
                "teacher_top_values": [item["teacher_top_logprobs"].float() for item in items],
            }
        return {"teacher_logits": [self._dense(item) for item in items]}

    def _dense(self, item: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 `[m, Vd]` teacher logits of one document."""
        if "teacher_logits" in item:
            logits = item["teacher_logits"]
            return (logits if self.vocabulary is None else logits[:, self.vocabulary]).float()
        if self._place is None or self.vocabulary is None or self.vocab_size is None:
            raise ValueError("a vocabulary over the top k of the teacher needs FeatureCollator(vocab_size=) too")
        known, ids = item["teacher_top_logprobs"].float(), item["teacher_top_ids"]
        others = max(self.vocab_size - ids.shape[1], 1)
        rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log() - torch.tensor(float(others)).log()
        # No token outside the top k is likelier than the last within.
        dense = torch.minimum(rest, known[:, -1:]).repeat(1, len(self.vocabulary))
        place = self._place[ids]
        row, column = (place >= 0).nonzero(as_tuple=True)
        dense[row, place[row, column]] = known[row, column]
        return dense
