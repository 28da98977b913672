"""Prompts of a dataset: the named sets, local files, anything `datasets` can load."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

NAMED = ("mt_bench", "gsm8k", "humaneval", "alpaca", "spec_bench")
FIELDS = ("turns", "prompt", "category", "id")
_DEFAULT_COLUMNS = {"turns": "turns", "prompt": "prompt", "category": "category", "id": "question_id"}
_LOCAL = (".jsonl", ".json", ".csv")
_TABLES = (".parquet", ".arrow")  # files that `datasets` reads
# Rows read of a set where --limit picks a few: enough to see its categories, without reading millions.
_MOST_ROWS = 10_000


@dataclass(frozen=True)
class Prompt:
    """One conversation to hold.

    Attributes:
        dataset: name of its set.
        index: its row in the set.
        id: what the set calls it.
        category: empty where the set has none.
        turns: what the user says, turn by turn.
    """

    dataset: str
    index: int
    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Short hash of the text: a result belongs to a text, not to a row that may change."""
        return hashlib.sha256("\0".join(self.turns).encode()).hexdigest()[:12]


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """Read `FIELD=COLUMN` pairs: which column of a dataset has the turns, prompt, category or id."""
    columns = {}
    for pair in pairs:
        field, equals, column = pair.partition("=")
        if field not in FIELDS or not equals or not column:
            raise ValueError(f"a column is FIELD=COLUMN with FIELD one of {', '.join(FIELDS)}; got {pair!r}")
        columns[field] = column
    if "turns" in columns and "prompt" in columns:
        raise ValueError("map either turns (a list of texts) or prompt (one text), not both")
    return columns


def _rows_of_csv(path: Path, text: str) -> list[dict[str, Any]]:
    # The csv module refuses fields above a limit that is one for the process: a long prompt is no mistake.
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    try:
        # Not `splitlines()`, here and below: it also splits at characters that belong to a text, U+2028 or a form feed.
        return list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _rows_of_file(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from None
    if path.suffix.lower() == ".csv":
        return _rows_of_csv(path, text)
    if path.suffix.lower() == ".json":
        try:
            rows = json.loads(text) if text.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: a .json file of prompts is a list of objects")
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    return rows


def _rows_of_hub(spec: str) -> Iterable[dict[str, Any]]:
    """Rows of `owner/name[:config][@split]`, or of a local file that only `datasets` reads (Parquet, Arrow)."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{spec!r} is no named set ({', '.join(NAMED)}) and no {', '.join(_LOCAL)} file; for the Hub and other "
            "formats: pip install datasets"
        ) from None
    path = Path(spec).expanduser()
    try:
        if path.is_file():
            made = datasets.load_dataset(path.suffix.lower().lstrip("."), data_files=str(path), split="train")
        else:
            name, _, split = spec.partition("@")
            name, _, config = name.partition(":")
            made = datasets.load_dataset(name, config or None, split=split or "test", streaming=True)
        return list(islice(made, _MOST_ROWS))
    except Exception as error:
        # datasets raises dozens of kinds, down to bare Exception, for a wrong id, split, config or network.
        raise ValueError(f"dataset {spec!r} can't be loaded: {' '.join(str(error).split())}") from error


def _prompt(row: Mapping[str, Any], where: str, columns: Mapping[str, str], name: str, index: int) -> Prompt:
    wanted = _DEFAULT_COLUMNS | dict(columns)
    if "prompt" in columns or ("turns" not in columns and wanted["turns"] not in row):
        field = "prompt"
    else:
        field = "turns"
    column = wanted[field]
    if column not in row:
        raise ValueError(
            f"{where} has no column {column!r}, only {', '.join(map(repr, row))}: say --column {field}=NAME"
        )
    value = row[column]
    turns = (value,) if isinstance(value, str) else value
    if not isinstance(turns, list | tuple) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}, row {index + 1}: column {column!r} holds no text and no list of texts")
    for optional in ("category", "id"):
        if optional in columns and columns[optional] not in row:
            raise ValueError(f"{where} has no column {columns[optional]!r}, only {', '.join(map(repr, row))}")
    category, number = row.get(wanted["category"]), row.get(wanted["id"])
    prompt = Prompt(
        dataset=name,
        index=index,
        id=str(index if number is None else number),
        category="" if category is None else str(category),
        turns=tuple(turns),
    )
    try:
        "".join((prompt.id, prompt.category, *turns)).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}, row {index + 1}: half a character (a lone surrogate), which is no text") from None
    return prompt


def load_prompts(spec: str, data_dir: Path | None = None, columns: Mapping[str, str] | None = None) -> list[Prompt]:
    """All prompts of one dataset, in its order.

    Args:
        spec: a named set (`NAMED`, found as `NAME.jsonl` in `data_dir`), a `.jsonl`, `.json` or `.csv` file, or, with
            `datasets`, any other file or a Hub id `owner/name[:config][@split]` (split `test` unless given; at most
            the first 10,000 rows).
        data_dir: folder of the named sets.
        columns: which column is which of `FIELDS`; not used for named sets, whose columns are known. By default
            `turns` or `prompt`, `category` and `question_id`.

    Raises:
        ValueError: nothing there, an empty set, a missing column, rows that hold no text.
    """
    named = spec.replace("-", "_")
    if named in NAMED:
        if data_dir is None:
            raise ValueError(f"no folder with {named}.jsonl: pass --data-dir FOLDER, or the path of the file")
        path, name, columns = data_dir / f"{named}.jsonl", named, {}
        if not path.is_file():
            raise ValueError(f"no {named}.jsonl in {data_dir}: pass --data-dir FOLDER, or the path of a file")
    else:
        path = Path(spec).expanduser()
        name = path.stem if path.is_file() else spec
    suffix = path.suffix.lower()
    if suffix in (*_LOCAL, *_TABLES) and not path.is_file():
        raise ValueError(f"no dataset file at {path}")
    if suffix in _LOCAL:
        rows, where = _rows_of_file(path), str(path)
    else:
        rows, where = _rows_of_hub(spec), f"dataset {spec}"
    prompts = [_prompt(row, where, columns or {}, name, index) for index, row in enumerate(rows)]
    if not prompts:
        raise ValueError(f"{where} holds no prompt")
    return prompts


def pick(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts, taken from the categories in turn, in the order of the set.

    Sets are sorted by category: their plain beginning would be of one kind.
    """
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds = max(map(len, groups.values()))
    dealt = [group[turn] for turn in range(rounds) for group in groups.values() if turn < len(group)]
    return sorted(dealt[:limit], key=lambda prompt: prompt.index)
