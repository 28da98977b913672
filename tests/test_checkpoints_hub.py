"""Publishing: what is uploaded, with what card. No network: the Hub's client is replaced by a recorder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from checkpoint_fixtures import FIXTURES

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.checkpoints.hub import acceptance_table, model_card

ROWS = [
    {"prompts": "MT-bench", "drafting": "chain of 4", "temperature": 0, "tau": 2.345, "acceptance_rate": 0.336},
    {"prompts": "GSM8K", "drafting": "tree of 16", "temperature": 0, "tau": 3.0},
]


class Recorder:
    """Stands in for `HfApi`; keeps what it was asked."""

    calls: list[tuple[str, dict[str, Any]]] = []

    def __init__(self, token: Any = None):
        self.calls.append(("token", {"token": token}))

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, folder_path: Path, **options: Any) -> Any:
        content = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        self.calls.append(("upload_folder", {"content": content, **options}))
        return SimpleNamespace(commit_url="https://huggingface.co/acme/draft/commit/1")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr("huggingface_hub.HfApi", Recorder)
    return Recorder.calls


def draft(tmp_path: Path, name: str = "speculators") -> Eagle3DraftModel:
    return Eagle3DraftModel.from_pretrained(FIXTURES[name].write(tmp_path / "in"))


@pytest.mark.parametrize("format", ["transformers", "speculators"])
def test_push(format: str, tmp_path: Path, calls: list):
    made = draft(tmp_path)
    address = made.push_to_hub(
        "acme/draft", licence="apache-2.0", acceptance=ROWS, format=format, token="secret", private=True, revision="v2"
    )
    assert address.endswith("/commit/1")
    done = dict(calls)
    assert done["token"] == {"token": "secret"}
    assert done["create_repo"] == {"repo_id": "acme/draft", "private": True, "exist_ok": True}
    assert done["create_branch"]["branch"] == "v2"
    assert done["upload_folder"]["revision"] == "v2"
    content = done["upload_folder"]["content"]
    # What was uploaded is a checkpoint that loads, as what it was.
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    again = Eagle3DraftModel.from_pretrained(folder)
    assert again.provenance.family == format
    assert again.fc.weight.equal(made.fc.weight)
    card = content["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "apache-2.0"
    assert head["base_model"] == "acme/Target"  # the checkpoint named it
    assert "inputs of layers 2, 4, 5" in card
    assert f"| MT-bench | chain of 4 | 0 | {2.345:.2f} | 0.34 |" in card
    assert "| GSM8K | tree of 16 | 0 | 3.00 |  |" in card
    assert ("speculative-config" in card) == (format == "speculators")
    assert b"secret" not in b"".join(content.values())


def test_licence_and_target_are_needed(tmp_path: Path, calls: list):
    with pytest.raises(ValueError, match="must name a licence"):
        draft(tmp_path).push_to_hub("acme/draft")
    with pytest.raises(ValueError, match="must name the target"):
        draft(tmp_path / "b", "eagle").push_to_hub("acme/draft", licence="mit")
    assert calls == []


def test_unmeasured_is_said(tmp_path: Path, calls: list):
    draft(tmp_path).push_to_hub("acme/draft", licence="mit")
    assert "Not measured." in dict(calls)["upload_folder"]["content"]["README.md"].decode()


def test_aux_states_on_the_card(tmp_path: Path):
    for name, text in (
        ("eagle", "the default, inputs of layers 2, L//2, L-3"),
        ("speculators", "inputs of layers 2, 4, 5"),
        ("modelopt-no-aux", "none; the output of the final norm"),
    ):
        card = model_card(draft(tmp_path / name, name), "acme/draft", "acme/target", "mit")
        assert f"| aux hidden states | {text} |" in card


def test_table_errors():
    with pytest.raises(ValueError, match="at least one row"):
        acceptance_table([])
    with pytest.raises(ValueError, match="needs `tau`"):
        acceptance_table([{"prompts": "a"}])
