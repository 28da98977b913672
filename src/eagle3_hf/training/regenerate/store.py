"""Where answers go: a journal, line by line, and from time to time a Parquet shard written whole.

An answer is on disk as soon as it is finished. A process may end at any moment, killed or not: a journal's last line
that is cut off was never finished, and answers that are in a shard and still in the journal are taken once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ...files import write_whole
from ..data import JOURNAL
from ..files import lock_folder, settings_match

logger = logging.getLogger(__name__)

SETTINGS = "regenerate.json"


class AnswerStore:
    """A folder of answers, open for one process.

    Args:
        folder: made if it isn't there.
        settings: what the answers depend on; a folder begun with other settings is refused.
        shard_rows: rows a shard.

    Raises:
        ValueError: other settings, or another process has it open.
    """

    def __init__(self, folder: str | os.PathLike, settings: dict[str, Any], shard_rows: int = 2000):
        self.folder, self.shard_rows = Path(folder), shard_rows
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        try:
            self._check_settings(settings)
            self.done: set[str] = set()
            self.rows = self.answer_tokens = 0
            self._shards = sorted(self.folder.glob("answers-*.parquet"))
            for shard in self._shards:
                keys, tokens = _summary(shard)
                self.done.update(keys)
                self.rows += len(keys)
                self.answer_tokens += tokens
            self._waiting: list[dict[str, Any]] = []
            self._journal = self._open_journal()
        except BaseException:
            self._lock.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path, journal = self.folder / SETTINGS, self.folder / JOURNAL
        holds = any(self.folder.glob("answers-*.parquet")) or (journal.is_file() and journal.stat().st_size > 0)
        if holds and not path.is_file():
            raise ValueError(f"{self.folder} holds answers but no {SETTINGS}: use another folder")
        if holds:
            settings_match(self.folder, json.loads(path.read_text(encoding="utf-8")), settings)
        else:  # an earlier start that came to nothing, as by a mistyped target, binds nobody
            write_whole(path, json.dumps(settings, indent=2).encode())

    def _open_journal(self) -> IO[bytes]:
        path = self.folder / JOURNAL
        if path.is_file():
            # A crash between writing a shard and emptying the journal leaves answers in both.
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    logger.info("an answer that was being written when the last run ended is asked again")
                    break
                records = json.loads(line)
                if records and records[0]["key"] not in self.done:
                    self._waiting += records
                    self._note(records)
            write_whole(path, b"".join(_line(group) for group in _by_key(self._waiting)))
        return path.open("ab", buffering=0)

    def _note(self, records: Sequence[dict[str, Any]]) -> None:
        self.done.update(record["key"] for record in records)
        self.rows += len(records)
        self.answer_tokens += sum(sum(record["loss_mask"] or ()) for record in records)

    def add(self, records: list[dict[str, Any]]) -> None:
        """Keep the documents of one finished conversation."""
        if not records:
            return
        self._journal.write(_line(records))
        self._waiting += records
        self._note(records)
        if len(self._waiting) >= self.shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard."""
        if not self._waiting:
            return
        number = int(self._shards[-1].stem.split("-")[1]) + 1 if self._shards else 0
        path = self.folder / f"answers-{number:05d}.parquet"
        _write(path, self._waiting)
        self._shards.append(path)
        self._waiting = []
        self._journal.truncate(0)

    def close(self) -> None:
        """Write the last shard and let go of the folder."""
        if self._journal.closed:
            return
        self.flush()
        self._journal.close()
        (self.folder / JOURNAL).unlink()
        self._lock.close()

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(records: list[dict[str, Any]]) -> bytes:
    return json.dumps(records).encode() + b"\n"


def _by_key(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["key"], []).append(record)
    return list(groups.values())


def _summary(path: Path) -> tuple[list[str], int]:
    """Keys of a shard and its number of generated tokens."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["key", "loss_mask"])
    return table["key"].to_pylist(), compute.sum(compute.list_flatten(table["loss_mask"])).as_py() or 0


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    text = pyarrow.string()
    message = pyarrow.struct([("role", text), ("content", text), ("reasoning_content", text)])
    schema = pyarrow.schema(
        [
            ("key", text),
            ("messages", pyarrow.list_(message)),
            ("input_ids", pyarrow.list_(pyarrow.int32())),
            ("loss_mask", pyarrow.list_(pyarrow.bool_())),
            ("temperature", pyarrow.float32()),
            ("finish", text),
        ]
    )
    scratch = path.with_name(f"{path.name}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(records, schema=schema), scratch, compression="zstd")
    os.replace(scratch, path)
