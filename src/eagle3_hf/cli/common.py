"""Finding and loading models, and tokenising prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..modeling_eagle3 import Eagle3DraftModel


def project_root() -> Path | None:
    """The source checkout this package runs from, or `None` for an installed wheel."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "recipes").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return None


def check_model_name(what: str, name: str) -> str:
    """Return `name` if it may be a model folder or a Hub id.

    Raises:
        ValueError: it is neither; transformers' own errors would talk of repo ids and connections.
    """
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is no {what} folder: it has no config.json")
        return str(path)
    # A Hub id is `name` or `owner/name`; anything else was meant as a path.
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"no {what} folder at {name!r}")
    return name


def find_draft(draft: str | None, resolved_target: str) -> str:
    """Settle which draft to load.

    Args:
        draft: what the user gave, if anything.
        resolved_target: the target as `resolve_model` returned it; a recipe whose folder name is part of the
            target's name has its draft.

    Raises:
        ValueError: no such folder, or none given and none shipped; the message says to pass --draft.
    """
    if draft is None:
        root, name = project_root(), Path(resolved_target).name.lower()
        recipes = sorted((root / "recipes").iterdir()) if root else []
        for recipe in recipes:
            if recipe.name in name and (recipe / "draft" / "config.json").is_file():
                return str(recipe / "draft")
        place = f"in {root / 'recipes'}" if root else "beside the installed package"
        raise ValueError(f"no draft for {Path(resolved_target).name} {place}: pass --draft FOLDER")
    return check_model_name("draft", draft)


def quiet_libraries() -> None:
    """Keep load reports, generation hints and the Hub's retries out of the output."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def pick_dtype(name: str) -> Any:
    """The torch dtype called `name`; ValueError for any but the three floating ones used here."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"--dtype must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def check_device(name: str) -> None:
    """ValueError for a device that torch doesn't know or can't reach here."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without that backend
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error


@dataclass
class Loaded:
    """A target with its tokenizer and, where wanted, its draft."""

    target: Any
    tokenizer: Any
    draft: Eagle3DraftModel | None
    target_path: str
    draft_path: str | None


def load(target: str, draft: str | None, device: str, dtype: str, with_draft: bool = True) -> Loaded:
    """Load target (ready to speculate), tokenizer and draft, in eval mode on `device`."""
    from transformers import AutoTokenizer

    from .. import AutoEagle3Target, Eagle3DraftModel, enable_eagle3, resolve_model
    from ..target import check_draft_fits

    quiet_libraries()
    check_device(device)
    kind = pick_dtype(dtype)
    target_path = resolve_model(check_model_name("target", target))
    draft_path = find_draft(draft, target_path) if with_draft else None
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    model = AutoEagle3Target.from_pretrained(target_path, dtype=kind, pack=False).to(device).eval()
    enable_eagle3(model)  # packs, now that the weights are where they stay
    fitting = None
    if draft_path is not None:
        fitting = Eagle3DraftModel.from_pretrained(draft_path, target=model, dtype=kind).to(device).eval()
        check_draft_fits(model, fitting)
    return Loaded(model, tokenizer, fitting, target_path, draft_path)


def encode(tokenizer: Any, text: str, device: Any, raw: bool = False) -> dict[str, Any]:
    """Tokenise one prompt as one user message, or as it is where `raw` or the tokenizer has no chat template.

    Returns:
        `input_ids` and `attention_mask`, int64 `[1, sequence]`, on `device`.
    """
    chat = not raw and getattr(tokenizer, "chat_template", None)
    if chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    made = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)
    return {name: made[name].long().to(device) for name in ("input_ids", "attention_mask")}


@contextmanager
def thread_count(threads: int | None) -> Iterator[int]:
    """Use that many CPU threads inside; yields the number in use."""
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
