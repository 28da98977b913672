"""Conversations of any dataset: Hub ids and local files, in the forms that chat data is published in.

A row becomes a [`Conversation`]: a list of messages as chat templates take them. The form is found from the columns of
the first row and then holds for all rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FIELDS = ("messages", "prompt", "response", "system")
_LISTS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_PROMPTS = ("prompt", "instruction", "question", "query")
_RESPONSES = ("response", "completion", "output", "answer")
_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "developer": "developer",
}  # fmt: skip
_KEPT = ("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
JOURNAL = "unfinished.jsonl"


@dataclass(frozen=True)
class Conversation:
    """One row of a dataset.

    Attributes:
        index: its row number.
        messages: dicts with `role` and `content`, and `tool_calls` and the like where the data has them.
        tokens: `(input_ids, loss_mask)` where the row brings the exact tokens (as `eagle3-hf regenerate` writes).
        temperature: the answer was drawn at, if the row says so; 0 is greedy.
    """

    index: int
    messages: tuple[dict[str, Any], ...]
    tokens: tuple[Sequence[int], Sequence[bool]] | None = None
    temperature: float | None = None

    @property
    def key(self) -> str:
        """32 hexadecimal digits that stand for everything up to the last user turn's answer, not for the row."""
        asked = [{k: m.get(k) for k in ("role", "content")} for m in self.messages if m["role"] != "assistant"]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def group(self) -> int:
        """63-bit number of the first user turn: what shares it must not be split between training and held-out."""
        first = next((m["content"] for m in self.messages if m["role"] == "user"), None)
        if first is None and self.tokens is not None:
            ids, mask = self.tokens
            first = [int(token) for token in ids[: list(mask).index(True) if any(mask) else len(ids)]]
        return number_of(json.dumps(first))


def number_of(text: str | bytes) -> int:
    """A 63-bit hash of `text`, the same in every process."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """Read `FIELD=COLUMN` pairs: which column holds the messages, prompt, response or system text."""
    columns = {}
    for pair in pairs:
        field, equals, column = pair.partition("=")
        if field not in FIELDS or not equals or not column:
            raise ValueError(f"a column is FIELD=COLUMN with FIELD one of {', '.join(FIELDS)}; got {pair!r}")
        columns[field] = column
    if "messages" in columns and len(columns) > 1:
        raise ValueError("map either messages, or prompt, response and system; not both")
    return columns


def load_rows(spec: str, *, streaming: bool = False, shuffle_seed: int | None = None) -> Any:
    """Open a dataset with `datasets`.

    Args:
        spec: a `.jsonl`, `.json`, `.csv`, `.parquet` or `.arrow` file, a folder of such files of one kind, or a Hub id
            `owner/name[:config][@split]` (split `train` unless given).
        streaming: read as the rows come, without a copy in the cache.
        shuffle_seed: shuffle with it; when streaming, within a buffer of 10,000 rows.

    Returns:
        A `datasets.Dataset` or `IterableDataset`.

    Raises:
        ValueError: nothing there, or `datasets` can't read it.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("training data is read with `datasets`: pip install 'eagle3-hf[train]'") from None
    path = Path(spec).expanduser()
    local = bool(spec.strip()) and path.exists()
    if not local and (path.suffix in _LOADERS or spec.startswith((".", "/", "~")) or not spec.strip()):
        raise ValueError(f"no file or folder at {spec!r}")
    try:
        if local:
            kind, files = _local_files(path)
            made = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
        else:
            name, _, split = spec.partition("@")
            name, _, config = name.partition(":")
            made = datasets.load_dataset(name, config or None, split=split or "train", streaming=streaming)
    except Exception as error:
        # datasets raises dozens of kinds, down to bare Exception, for a wrong id, split, config, file or network.
        cause = (local and _bad_line(path)) or error.__cause__ or error
        raise ValueError(f"dataset {spec!r} can't be loaded: {' '.join(str(cause).split())[:500]}") from error
    if shuffle_seed is not None:
        made = made.shuffle(seed=shuffle_seed, buffer_size=10_000) if streaming else made.shuffle(seed=shuffle_seed)
    return made


def _bad_line(path: Path) -> str | None:
    """What is wrong with a source of JSON lines; `datasets` names neither the file nor the line."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        if file.suffix not in (".jsonl", ".json", ".csv"):
            continue
        if not file.stat().st_size:
            return f"{file.name} is empty"
        if file.suffix != ".jsonl" or file.name == JOURNAL:
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line) if line.strip() else {}
                except ValueError as error:
                    return f"{file.name}, line {number} isn't JSON: {error}"
                if not isinstance(row, dict):
                    return f"{file.name}, line {number} is no JSON object"
    return None


def _local_files(path: Path) -> tuple[str, list[str]]:
    """The loader and the files of a local source."""
    if path.is_file():
        if path.suffix not in _LOADERS:
            raise ValueError(f"a {path.suffix or 'nameless'} file can't be read; kinds: {', '.join(_LOADERS)}")
        return _LOADERS[path.suffix], [str(path)]
    journal = path / JOURNAL
    if journal.is_file() and journal.stat().st_size:
        logger.warning(
            "%s: answers of an unfinished run aren't in its shards yet; run `eagle3-hf regenerate` again", path
        )
    files = sorted(f for f in path.iterdir() if f.suffix in _LOADERS and f.name not in (JOURNAL, "regenerate.json"))
    suffixes = sorted({f.suffix for f in files})
    if len(suffixes) != 1:
        found = f"{', '.join(suffixes)} files mixed" if suffixes else f"no {', '.join(_LOADERS)} file"
        raise ValueError(f"a folder of data holds files of one kind; {path} has {found}")
    return _LOADERS[suffixes[0]], [str(f) for f in files]


@dataclass(frozen=True)
class Form:
    """How rows hold their conversation: `kind` is `messages`, `pair`, `turns` or `tokens`; `columns` by field."""

    kind: str
    columns: Mapping[str, str]


def detect_form(row: Mapping[str, Any], columns: Mapping[str, str] | None = None, where: str = "the dataset") -> Form:
    """Find the form of a dataset from one row.

    Args:
        row: the first row.
        columns: what the user said, see [`parse_columns`]; wins over the usual names.
        where: named in errors.

    Raises:
        ValueError: no known form; the message names the columns that are there.
    """
    columns = dict(columns or {})
    found = ", ".join(map(repr, row)) or "none"
    for field, name in columns.items():
        if name not in row:
            raise ValueError(f"{where} has no column {name!r} for {field}; its columns: {found}")
    if not columns:
        if "input_ids" in row and "loss_mask" in row:
            return Form("tokens", {"input_ids": "input_ids", "loss_mask": "loss_mask"})
        if "ids" in row and isinstance(row.get("answer"), list | tuple):
            return Form("tokens", {"prompt_ids": "ids", "answer_ids": "answer"})
    if "messages" in columns or not columns:
        for name in [columns["messages"]] if "messages" in columns else _LISTS:
            value = row.get(name)
            if isinstance(value, list | tuple) and value:
                if isinstance(value[0], Mapping) and ({"role", "from"} & set(value[0])):
                    return Form("messages", {"messages": name})
                if isinstance(value[0], str):
                    return Form("turns", {"turns": name})
        if "messages" in columns:
            raise ValueError(
                f"{where}: column {columns['messages']!r} holds no list of messages (dicts with role and content, or "
                "from and value) and no list of texts"
            )
    prompt = columns.get("prompt") or next((name for name in _PROMPTS if name in row), None)
    if prompt is None:
        raise ValueError(
            f"{where}: no form recognised in its columns {found}; expected a list of messages ({', '.join(_LISTS)}), "
            f"or a prompt ({', '.join(_PROMPTS)}) with or without a response ({', '.join(_RESPONSES)}); say --column "
            "FIELD=NAME otherwise"
        )
    chosen = {"prompt": prompt}
    response = columns.get("response") or next((name for name in _RESPONSES if name in row), None)
    if response is not None:
        chosen["response"] = response
    if (system := columns.get("system") or ("system" if "system" in row else None)) is not None:
        chosen["system"] = system
    if prompt == "instruction" and "input" in row:
        chosen["input"] = "input"  # Alpaca's: the text that the instruction is about
    return Form("pair", chosen)


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"a message is a dict, found {type(raw).__name__}")
    role = raw.get("role", raw.get("from"))
    if role is None or str(role).lower() not in _ROLES:
        raise ValueError(f"unknown role {role!r}; known: {', '.join(_ROLES)}")
    made: dict[str, Any] = {"role": _ROLES[str(role).lower()]}
    # Arrow gives every message the keys of all; None stands for absent.
    made.update({key: raw[key] for key in _KEPT if raw.get(key) is not None})
    if "content" not in made and raw.get("value") is not None:
        made["content"] = raw["value"]
    if "content" not in made:
        if not made.get("tool_calls"):
            raise ValueError(f"a message of {made['role']} has no content")
        made["content"] = ""
    return made


def _pair(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    value = {field: row.get(column) for field, column in columns.items()}
    messages = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    for field, role in (("prompt", "user"), ("response", "assistant")):
        text = value.get(field)
        if isinstance(text, list | tuple):  # as TRL has it: lists of messages
            messages += [_message(raw) for raw in text]
        elif isinstance(text, str) and text.strip():
            more = value.get("input") if field == "prompt" else None
            messages.append({"role": role, "content": f"{text}\n\n{more}" if more else text})
        elif field in columns:
            raise ValueError(f"column {columns[field]!r} holds no text")
    return messages


def to_conversation(row: Mapping[str, Any], form: Form, index: int) -> Conversation:
    """One row as a conversation.

    Raises:
        ValueError: an unknown role, no text, an answer before any question; the message doesn't name the row.
    """
    columns, tokens = form.columns, None
    if form.kind == "messages":
        messages = [_message(raw) for raw in row[columns["messages"]] or []]
    elif form.kind == "turns":
        messages = [{"role": "user", "content": text} for text in row[columns["turns"]] or []]
    elif form.kind == "pair":
        messages = _pair(row, columns)
    else:
        if "input_ids" in columns:
            ids, mask = row["input_ids"], row["loss_mask"]
        else:
            prompt, answer = row[columns["prompt_ids"]], row[columns["answer_ids"]]
            ids, mask = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
        messages = [_message(raw) for raw in row.get("messages") or []]
        if ids is not None:  # an external server gives texts only
            if len(ids) != len(mask):
                raise ValueError(f"{len(ids)} input_ids but a loss_mask of {len(mask)}")
            tokens = (ids, mask)
    if not messages and tokens is None:
        raise ValueError("no message")
    if messages and messages[0]["role"] == "assistant":
        raise ValueError("the conversation starts with the assistant: there is no prompt that it answers")
    if messages and not any(m["role"] == "user" for m in messages):
        raise ValueError("no user message")
    temperature = row.get("temperature")
    if temperature is None and row.get("greedy") is True:
        temperature = 0.0
    return Conversation(index, tuple(messages), tokens, None if temperature is None else float(temperature))


def read_conversations(
    specs: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    streaming: bool = False,
    shuffle_seed: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Iterator[Conversation]:
    """Conversations of one or more datasets, one after the other.

    Args:
        specs: see [`load_rows`].
        columns: see [`parse_columns`]; for all of them.
        streaming, shuffle_seed: see [`load_rows`].
        limit: most conversations from each.
        skip_bad: leave out rows that hold no conversation (their number is logged) instead of stopping at the first.

    Raises:
        ValueError: a source that can't be read, no known form, a bad row (its number is named), an empty source.
    """
    for spec in [specs] if isinstance(specs, str) else specs:
        rows = load_rows(spec, streaming=streaming, shuffle_seed=shuffle_seed)
        yield from conversations_of(rows, spec, columns=columns, limit=limit, skip_bad=skip_bad)


def conversations_of(
    rows: Iterable[Mapping[str, Any]],
    where: str,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Iterator[Conversation]:
    """Conversations of rows at hand; arguments as [`read_conversations`]."""
    form, bad, given, first_fault = None, 0, 0, ""
    for index, row in enumerate(rows):
        if limit is not None and given >= limit:
            break
        try:
            form = form or detect_form(row, columns, where)
        except ValueError:
            # A first row that is empty says nothing about the others.
            if not skip_bad or any(row.values()):
                raise
            bad += 1
            continue
        try:
            conversation = to_conversation(row, form, index)
        except ValueError as error:
            if not skip_bad:
                raise ValueError(f"{where}, row {index + 1}: {error} (--skip-bad leaves such rows out)") from None
            bad, first_fault = bad + 1, first_fault or f"row {index + 1}: {error}"
            continue
        given += 1
        yield conversation
    if bad:
        logger.warning("%s: %d rows left out; the first: %s", where, bad, first_fault or "an empty row")
    if not given:
        raise ValueError(f"{where} holds no conversation")


def count_conversations(specs: str | Sequence[str], limit: int | None = None) -> int | None:
    """How many rows the sources have (at most `limit` of each); `None` where only reading would tell."""
    total = 0
    for spec in [specs] if isinstance(specs, str) else specs:
        rows = load_rows(spec)
        total += min(len(rows), limit or len(rows))
    return total
