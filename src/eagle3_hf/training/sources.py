"""Where a recipe's documents come from: stored features, or conversations with the target in the loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .documents import SplitDocuments, TokenDataset
from .features import FeatureCollator, FeatureDataset
from .recipe import Recipe
from .run import TrainingData
from .vocabulary import choose_vocabulary, count_tokens

logger = logging.getLogger(__name__)


class Chosen(Dataset):
    """Some documents of a dataset, numbered from 0."""

    def __init__(self, dataset: Any, documents: Sequence[int]):
        self.dataset, self.documents = dataset, list(documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.dataset[self.documents[index]]


def open_data(recipe: Recipe) -> TrainingData:
    """The documents that a recipe names.

    Raises:
        ValueError: a key that the mode needs is missing, or see [`FeatureDataset`] and `read_conversations`.
        OSError: the target's config or tokenizer can't be found.
    """
    from transformers import AutoConfig

    from ..resolve import resolve_model

    path = resolve_model(_model_name(recipe.target.model))
    whole = AutoConfig.from_pretrained(path, **_revision(recipe))
    config = whole.get_text_config()
    if recipe.target.model_type not in (None, whole.model_type, config.model_type):
        raise ValueError(
            f"target.model_type is {recipe.target.model_type}, the target's config says {whole.model_type}"
        )
    online = recipe.features.mode == "online"
    dataset = _conversations(recipe, path, config) if online else _stored(recipe, config)
    for share, found in (("training", dataset.train), ("held-out", dataset.held_out)):
        if not found and (share == "training" or recipe.training.get("eval_steps")):
            raise ValueError(
                f"data.held_out {recipe.data.held_out} of {len(dataset)} documents leaves no {share} document: "
                "change it, or take more data"
            )
    held_out = evaluation_documents(dataset, recipe.evaluation.documents)

    def vocabulary() -> torch.Tensor | None:
        size = recipe.draft.vocab_size
        if size is None or size == config.vocab_size or recipe.draft.initialise not in ("target", "scratch"):
            return None
        counts = count_tokens(dataset.answers(), config.vocab_size)
        return choose_vocabulary(counts, size, _stop_tokens(recipe, path, config)).ids

    data = TrainingData(
        train=Chosen(dataset, dataset.train),
        lengths=dataset.train_lengths,
        collate=FeatureCollator(),
        held_out=Chosen(dataset, held_out) if held_out else None,
        aux_layers=None if online else dataset.aux_layers,  # type: ignore[attr-defined]
        vocabulary=vocabulary,
        prompts=_prompts(dataset, held_out),
    )

    def attach(module: Any, target: Callable[[], Any], device: torch.device) -> None:
        if recipe.objective.kind == "plain":
            data.collate = FeatureCollator(pack_length=recipe.data.pack_length)
            module.attach(target().to(device), _tokenizers(recipe, path))
            return
        draft = module.draft
        dtype = torch.bfloat16 if recipe.training.get("bf16") else torch.float32
        kept = draft.draft_to_target(torch.arange(draft.config.draft_vocab_size))
        kept = None if len(kept) == config.vocab_size else kept
        data.collate = FeatureCollator(
            dtype,
            torch.arange(config.vocab_size) if kept is None else kept,
            config.vocab_size,
            recipe.data.pack_length,
        )
        if online:
            from .online import OnlineFeatures

            data.complete_batch = OnlineFeatures(
                target().to(device), draft.config.aux_hidden_state_layers, recipe.features.teacher, kept, dtype
            )

    data.attach = attach
    return data


def evaluation_documents(dataset: SplitDocuments, most: int) -> list[int]:
    """Held-out documents to evaluate on: greedy answers, whose tokens are what greedy generation accepts."""
    greedy = [document for document in dataset.held_out if dataset.greedy[document]]
    if dataset.held_out and not greedy:
        logger.warning(
            "no held-out answer is known to be greedy: the simulated acceptance length is that of the answers as they "
            "are, compare it within this run only"
        )
    return (greedy or dataset.held_out)[:most]


def _revision(recipe: Recipe) -> dict[str, Any]:
    return {} if recipe.target.revision is None else {"revision": recipe.target.revision}


def _tokenizers(recipe: Recipe, path: str) -> tuple[Any, Any] | None:
    """Of the small model and its teacher; `None` where one has none."""
    from transformers import AutoTokenizer

    from ..resolve import resolve_model

    assert recipe.draft.model is not None
    try:
        return (
            AutoTokenizer.from_pretrained(resolve_model(recipe.draft.model)),
            AutoTokenizer.from_pretrained(path, **_revision(recipe)),
        )
    except (OSError, ValueError, ImportError):
        return None


def _model_name(name: str) -> str:
    """`name`, unless it was meant as a path that isn't there, which transformers would take for a Hub id."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not Path(name).expanduser().exists():
            raise ValueError(f"target.model: there is no folder {name!r}")
        return str(Path(name).expanduser())
    return name


def _stored(recipe: Recipe, config: Any) -> FeatureDataset:
    folder = recipe.features.folder
    if folder is None:
        raise ValueError("features.folder is missing: the folder that `eagle3-hf extract` wrote")
    dataset = FeatureDataset(Path(os.path.expandvars(folder)).expanduser(), recipe.data.held_out)
    if dataset.target is not None and Path(dataset.target).name != Path(recipe.target.model).name:
        logger.warning(
            "the features say they are of %s, the recipe's target is %s", dataset.target, recipe.target.model
        )
    _check_fit(dataset, config)
    return dataset


def _check_fit(dataset: FeatureDataset, config: Any) -> None:
    """Features of another model are named before anything is made of them."""
    if not len(dataset):
        return
    item = dataset[0]
    pairs = [
        ("hidden size", item["features"].shape[-1] / len(dataset.aux_layers), config.hidden_size),
        ("vocabulary", max(int(item["input_ids"].max()) + 1, config.vocab_size), config.vocab_size),
    ]
    if "teacher_logits" in item:
        pairs.append(("vocabulary", item["teacher_logits"].shape[-1], config.vocab_size))
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(
                f"the features in {dataset.folder} are of another model: {what} {theirs:g}, target.model has {ours}"
            )


def _conversations(recipe: Recipe, path: str, config: Any) -> TokenDataset:
    from transformers import AutoTokenizer

    from .data import read_conversations
    from .documents import tokenise
    from .masks import AssistantMasks

    section = recipe.data
    if not section.sources:
        raise ValueError("data.sources is missing: with features.mode online, the conversations to train on")
    masks = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_revision(recipe))
    except (OSError, ValueError, ImportError) as error:  # rows may bring their tokens; `tokenise` says if not
        logger.warning("no tokenizer for %s: %s", path, error)
        tokenizer = None
    if tokenizer is not None and tokenizer.chat_template:
        masks = AssistantMasks(tokenizer, _stop_tokens(recipe, path, config), section.template)
    conversations = read_conversations(
        [os.path.expandvars(source) for source in section.sources],
        columns=section.columns,
        limit=section.limit,
        skip_bad=section.skip_bad,
    )
    documents = tokenise(
        conversations,
        masks,
        vocab_size=config.vocab_size,
        max_length=section.max_length,
        skip_bad=section.skip_bad,
    )
    return TokenDataset(documents, section.held_out)


def _stop_tokens(recipe: Recipe, path: str, config: Any) -> list[int]:
    """Ids that end an answer, by the target's generation config, else its config."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path, **_revision(recipe)).eos_token_id
    except OSError:
        found = config.eos_token_id
    return found if isinstance(found, list) else [] if found is None else [found]


def _prompts(dataset: Any, documents: Sequence[int], most: int = 64) -> list[list[int]]:
    """What stands before the first answer token of held-out documents."""
    prompts = []
    for document in list(documents)[:most]:
        item = dataset[document]
        answers = item["loss_mask"].nonzero()
        if len(answers) and int(answers[0]) > 0:
            prompts.append(item["input_ids"][: int(answers[0])].tolist())
    return prompts
