"""Publishing a draft: its model card, and the upload to the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..modeling_eagle3 import Eagle3DraftModel
from .export import export_draft
from .layout import sglang_line, vllm_line

_COLUMNS = (
    ("prompts", "prompts", "{}"),
    ("drafting", "drafting", "{}"),
    ("temperature", "temperature", "{}"),
    ("tau", "tau (tokens a target forward)", "{:.2f}"),
    ("acceptance_rate", "accepted / drafted", "{:.2f}"),
)


def acceptance_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of measured acceptance.

    Args:
        rows: one a measurement; keys `prompts`, `drafting`, `temperature`, `tau`, `acceptance_rate`, of which columns
            that no row has are left out. `SpeculationStats.as_dict()` gives the last two.

    Raises:
        ValueError: no row, or one without `tau`.
    """
    if not rows:
        raise ValueError("an acceptance table needs at least one row")
    if any("tau" not in row for row in rows):
        raise ValueError("every row of the acceptance table needs `tau`")
    columns = [column for column in _COLUMNS if any(column[0] in row for row in rows)]
    lines = [
        "| " + " | ".join(title for _, title, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [form.format(row[key]) if key in row else "" for key, _, form in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def model_card(
    draft: Eagle3DraftModel,
    repo_id: str,
    target: str,
    licence: str,
    acceptance: Sequence[Mapping[str, Any]] = (),
    format: str = "transformers",
) -> str:
    """The `README.md` of a published draft.

    Args:
        draft: the draft.
        repo_id: where it will be.
        target: Hub id of the model it was trained for.
        licence: SPDX id, as the Hub spells it (`apache-2.0`).
        acceptance: see [`acceptance_table`]; without it the card says that nothing was measured.
        format: layout of the files.
    """
    config = draft.config
    ids = config.aux_hidden_state_layers
    if ids:
        aux = f"inputs of layers {', '.join(map(str, ids))}"
    elif config.use_aux_hidden_state:
        aux = "the default, inputs of layers 2, L//2, L-3"
    else:
        aux = "none; the output of the final norm"
    tokens = draft.generation_config.num_assistant_tokens
    measured = acceptance_table(acceptance) if acceptance else "Not measured."
    place = Path(repo_id)
    servers = {
        "speculators": f"vLLM: `--speculative-config '{vllm_line(place, tokens)}'`",
        "eagle": f"vLLM: `--speculative-config '{vllm_line(place, tokens)}'`",
        "specforge": f"SGLang: `{sglang_line(place, tokens)}`",
    }
    serve = f"\n{servers[format]}\n" if format in servers else ""
    return f"""---
license: {licence}
base_model: {target}
base_model_relation: adapter
pipeline_tag: text-generation
tags:
- eagle3
- speculative-decoding
---

# {repo_id.rpartition("/")[2]}

An EAGLE-3 draft for [{target}](https://huggingface.co/{target}): with it the model writes the same text in fewer
forwards. It is of no use alone, or with another model.

| | |
|---|---|
| target | {target} |
| aux hidden states | {aux} |
| draft vocabulary | {config.draft_vocab_size} of {config.vocab_size} tokens |
| width, layers | {config.hidden_size}, {config.num_hidden_layers} |
| layout | {format} |
| licence | {licence} |

## Use

```python
from eagle3_hf import AutoEagle3Target, Eagle3DraftModel

target = AutoEagle3Target.from_pretrained("{target}")
draft = Eagle3DraftModel.from_pretrained("{repo_id}")
target.generate(**inputs, assistant_model=draft)
```
{serve}
## Acceptance

{measured}

`tau` counts the bonus token and leaves out the prefill.
"""


def push_draft(
    draft: Eagle3DraftModel,
    repo_id: str,
    target: str | None = None,
    licence: str | None = None,
    acceptance: Sequence[Mapping[str, Any]] = (),
    format: str = "transformers",
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload EAGLE-3 draft",
    create_pr: bool = False,
) -> str:
    """Upload a draft with its model card.

    Args:
        draft: the draft.
        repo_id: `owner/name`; made if need be.
        target: Hub id of its target; default: what the checkpoint it was loaded from says.
        licence: must be given: nobody may use a draft without one.
        acceptance, format: see [`model_card`] and [`export_draft`].
        token, private, revision, commit_message, create_pr: as in `huggingface_hub`.

    Returns:
        Address of the commit.

    Raises:
        ValueError: no target or licence, or a format that can't hold the draft.
    """
    from huggingface_hub import HfApi

    target = target or getattr(draft.config, "target_name_or_path", None)
    if not target:
        raise ValueError("the model card must name the target: pass target='owner/name'")
    if not licence:
        raise ValueError("the model card must name a licence: pass licence='apache-2.0' or another SPDX id")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "draft"
        export_draft(draft, folder, format)
        card = model_card(draft, repo_id, target, licence, acceptance, format)
        (folder / "README.md").write_text(card, encoding="utf-8")
        api = HfApi(token=token)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not create_pr:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder, repo_id=made.repo_id, revision=revision, commit_message=commit_message,
            create_pr=create_pr,
        )  # fmt: skip
    return str(done.commit_url)
