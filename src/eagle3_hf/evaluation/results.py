"""The results file: JSON Lines, written as results come, read back to resume and to report."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
# Of each kind of line the field that all later code relies on; the rest is this package's own writing.
_NEEDED: dict[str, tuple[str, type]] = {
    "settings": ("settings", dict), "session": ("kind", str), "result": ("key", str), "skipped": ("key", str),
}  # fmt: skip


@dataclass
class Results:
    """A results file's content.

    Attributes:
        settings: what must be the same for results to be comparable.
        sessions: for each run that added results, its environment and methods.
        records: the results, and the turns that were skipped (`kind` says which).
        size: bytes of the file that are whole lines.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0

    def methods(self) -> dict[str, dict[str, Any]]:
        """Facts about each method, by name, in the order in which they first came."""
        found: dict[str, dict[str, Any]] = {}
        for session in self.sessions:
            for method in session.get("methods", []):
                found.setdefault(method["name"], method)
        for record in self.records:  # own scripts may note no session
            if record["kind"] == "result":
                found.setdefault(record["method"], {"name": record["method"]})
        return found


def read_results(path: Path) -> Results:
    """Read a results file. A last line that a killed run left unfinished is passed over.

    Raises:
        ValueError: no such file, or not a results file.
    """
    if not path.is_file():
        raise ValueError(f"no results file at {path}")
    content, results = path.read_bytes(), Results()
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
            kind = entry["kind"]
            needed, of_type = _NEEDED[kind]
            fits = isinstance(entry[needed], of_type)
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise ValueError(f"{path}, line {number}: not a line of a results file")
        if number == 1 and (kind != "settings" or entry.get("format") != FORMAT):
            raise ValueError(f"{path} is no results file of this version of eagle3-hf eval")
        if kind == "settings":
            results.settings = entry["settings"]
        elif kind == "session":
            results.sessions.append(entry)
        else:
            results.records.append(entry)
        results.size += len(line)
    if content and not results.size:
        raise ValueError(f"{path} is no results file: pass another --out")
    return results


def _lock(file: int, path: Path) -> None:
    """Hold the file for this process until it is closed: two writers would write over each other's lines."""
    try:
        import fcntl
    except ImportError:  # not on Windows; there two runs on one file are the user's to avoid
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another run is writing to it; wait for that, or pass another --out") from None
    except OSError:
        pass  # a file system without locks


class ResultsWriter:
    """Appends to a results file, whole lines or nothing; one writer at a time.

    Args:
        path: made if it isn't there; else its results are kept and `settings` must be the same.
        settings: see [`Results`]. `None` is for what a run doesn't use (a draft, for methods without): that goes with
            any value, and the file keeps the value.

    Raises:
        ValueError: the file is of other settings (the first that differs is named), no results file, or one that
            another run is writing to.
        OSError: it can't be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.results = Results()
        self._by_key: dict[str, dict[str, Any]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(self._file, path)
            self._begin(settings)
        except BaseException:
            self.close()
            raise

    def _begin(self, settings: dict[str, Any]) -> None:
        before = read_results(self.path)
        known = before.settings
        now = json.loads(json.dumps(settings))  # as JSON reads them back: tuples are lists there
        for name, value in now.items() if before.size else ():
            if value is not None and known.get(name, value) not in (value, None):
                raise ValueError(
                    f"{self.path} was made with {name} {known[name]!r}, now it is {value!r}: use the same, or another "
                    "--out"
                )
        os.ftruncate(self._file, before.size)
        self.results = before
        self._by_key = {record["key"]: record for record in before.records}
        merged = {**now, **{name: value for name, value in known.items() if value is not None}}
        if not before.size or merged != known:
            self._write({"kind": "settings", "format": FORMAT, "settings": merged})
            self.results.settings = merged

    def find(self, key: str) -> dict[str, Any] | None:
        """The record of this key, if it is there already."""
        return self._by_key.get(key)

    def add_session(self, session: dict[str, Any]) -> None:
        """Note who adds the results that follow.

        Raises:
            ValueError: a method has the name of an earlier one and other `options`: their results would be mixed.
        """
        known = self.results.methods()
        for method in json.loads(json.dumps(session.get("methods", []))):
            before = known.get(method["name"], {}).get("options")
            if before is not None and method.get("options", before) != before:
                raise ValueError(
                    f"{self.path} has results of {method['name']!r} with {before}, now it is {method['options']}: give "
                    "the method another name, or pass another --out"
                )
        self._write({"kind": "session", **session})
        self.results.sessions.append(session)

    def add(self, record: dict[str, Any]) -> None:
        """Append one record; it is on disk when this returns."""
        self._write(record)
        self.results.records.append(record)
        self._by_key[record["key"]] = record

    def _write(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        start, left = self.results.size, line
        os.lseek(self._file, start, os.SEEK_SET)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            os.ftruncate(self._file, start)  # half a line helps nobody
            reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
            raise OSError(
                f"{self.path}: {reason}; the {len(self.results.records)} results before are kept, the same command "
                "goes on from there"
            ) from error
        self.results.size += len(line)

    def close(self) -> None:
        """Close the file, and let others write to it."""
        os.close(self._file)

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
