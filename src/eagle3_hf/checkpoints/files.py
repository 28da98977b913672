"""Reading a checkpoint's files, from a folder or the Hub: config, safetensors, `.bin`, sharded or whole."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies",
)  # fmt: skip
# Tried in this order: safetensors never run code, so a folder that has both is read from those.
_WEIGHTS = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_SIDE_MAP = "eagle_meta.pt"  # where NeMo Automodel kept the vocabulary map, before it went into the weights


@dataclass
class CheckpointFiles:
    """A checkpoint's place.

    Args:
        source: folder or Hub id.
        hub: keywords for the Hub, those of `HUB_ARGUMENTS`.
    """

    source: str
    hub: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = os.fspath(self.source)

    @property
    def is_folder(self) -> bool:
        return Path(self.source).expanduser().is_dir()

    def path(self, name: str, needed: bool = False) -> Path | None:
        """Where the file is on this machine (fetched if need be), or `None` if there is none of this name.

        Raises:
            OSError: a file that is `needed` isn't there, or the Hub can't be asked for it.
        """
        if self.is_folder:
            file = Path(self.source).expanduser() / (self.hub.get("subfolder") or "") / name
            if not file.is_file() and needed:
                raise OSError(f"{file.parent} has no {name}: is it a checkpoint's folder?")
            return file if file.is_file() else None
        if Path(self.source).expanduser().is_absolute() or self.source.startswith("."):
            raise OSError(f"there is no folder {self.source!r}")
        from transformers.utils import cached_file

        options = {key: value for key, value in self.hub.items() if value is not None}
        try:
            found = cached_file(
                self.source,
                name,
                _raise_exceptions_for_missing_entries=needed,
                _raise_exceptions_for_connection_errors=needed,
                **options,
            )
        except OSError as error:
            # The library's message doesn't always say which of several models it is about.
            raise OSError(f"cannot get {name} of {self.source!r}: {error}") from error
        return None if found is None else Path(found)

    def json(self, name: str, needed: bool = False) -> dict[str, Any] | None:
        """The content of a JSON file, which must be an object."""
        file = self.path(name, needed)
        if file is None:
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} isn't valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
        return content

    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`."""
        config = self.json(CONFIG, needed=True)
        assert config is not None
        return config

    def weight_files(self) -> list[Path]:
        """The files that hold the weights, in reading order.

        Raises:
            ValueError: an index names a shard that isn't there.
            OSError: there are no weights.
        """
        for name in _WEIGHTS:
            file = self.path(name)
            if file is None:
                continue
            if not name.endswith(".index.json"):
                return [file]
            places = (self.json(name) or {}).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
                raise ValueError(f"{file} has no weight_map from tensor names to file names: it is no index of shards")
            shards = sorted(set(places.values()))
            strange = [shard for shard in shards if Path(shard).name != shard]
            if strange:
                raise ValueError(f"{file} names shards outside its own folder: {', '.join(strange)}")
            found = {shard: self.path(shard) for shard in shards}
            missing = [shard for shard, place in found.items() if place is None]
            if missing or not shards:
                raise ValueError(f"{file} names shards that aren't there: {', '.join(missing) or 'none at all'}")
            return [place for place in found.values() if place is not None]
        raise OSError(f"{self.source} has no weights: looked for {', '.join(_WEIGHTS)}")

    def indexed_names(self) -> set[str] | None:
        """Tensor names that an index promises, or `None` without an index."""
        for name in _WEIGHTS:
            if self.path(name) is not None:
                index = self.json(name) if name.endswith(".index.json") else None
                return None if index is None else set(index["weight_map"])
        return None

    def read(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """All tensors by name, and the names of the files they came from.

        Raises:
            ValueError: a damaged file, a pickle that holds more than tensors, a name in two shards, or one that the
                index promises and no shard has.
        """
        weights: dict[str, torch.Tensor] = {}
        files = self.weight_files()
        for file in files:
            read = _read_safetensors(file) if file.suffix == ".safetensors" else read_pickle(file)
            twice = sorted(set(read) & set(weights))
            if twice:
                raise ValueError(f"{file} holds tensors that another shard holds too: {', '.join(twice)}")
            weights |= read
        absent = sorted((self.indexed_names() or set()) - set(weights))
        if absent:
            raise ValueError(f"the shards of {self.source} lack tensors that their index names: {', '.join(absent)}")
        names = [file.name for file in files]
        side = self.path(_SIDE_MAP) if "d2t" not in weights else None
        if side is not None:
            for name, tensor in read_pickle(side).items():
                if name in {"d2t", "t2d"}:
                    weights[name] = tensor
            names.append(side.name)
        return weights, names

    def check(self) -> None:
        """Open every weight file, so that a damaged one is named before anything is loaded from it.

        Pickles are read whole: what is in them can't be known without.
        """
        for file in self.weight_files():
            if file.suffix == ".safetensors":
                kinds = _damaged_or(file, lambda file=file: _stored_kinds(file))
            else:
                kinds = {name: str(tensor.dtype) for name, tensor in read_pickle(file).items()}
            # PreTrainedModel casts whatever it finds: a float map loses ids, integer weights their scales.
            for name, kind in kinds.items():
                is_float = kind.startswith(("F", "BF", "torch.float", "torch.bfloat"))
                if is_float == (name in {"d2t", "t2d"}):
                    raise ValueError(f"{name} is stored as {kind}: the checkpoint was cast, get the original file")


def _stored_kinds(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - no mapping


def _damaged_or(file: Path, read: Any) -> Any:
    try:
        return read()
    except (SafetensorError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged or cut short ({error}; {file.stat().st_size} bytes): fetch or copy it again"
        ) from error


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    def read() -> dict[str, torch.Tensor]:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping

    return _damaged_or(file, read)


def _is_pickle(file: Path) -> bool:
    with file.open("rb") as opened:
        start = opened.read(2)
    return start in {b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}  # zip archive, or a bare pickle


def _looks_like(file: Path) -> str:
    known = {b"\x1f\x8b": "it is gzip-compressed", b"<!": "it is a web page", b"<h": "it is a web page",
             b"ve": "it may be a Git LFS pointer, the file itself wasn't fetched", b"": "it is empty"}  # fmt: skip
    with file.open("rb") as opened:
        start = opened.read(2)
    return known.get(start, f"it begins with {start!r}") + "; fetch it again"


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a `.bin` or `.pt` file; nothing in it is ever executed.

    Raises:
        ValueError: the file is damaged, or holds objects other than tensors.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message goes on to recommend weights_only=False, which is what must not be done here.
        found = str(error).partition("GLOBAL ")[2].split()
        named = found[0] if found else "objects other than tensors"
        if not found and not _is_pickle(file):
            raise ValueError(f"{file} isn't a file that torch.save wrote: {_looks_like(file)}") from None
        raise ValueError(
            f"{file} is refused: unpickling it would run code ({named}). Only tensors are read; ask its "
            "publisher for safetensors"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{file} is damaged or cut short ({(str(error) or type(error).__name__).splitlines()[0]}): fetch it again"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a dict of tensors, it holds a {type(content).__name__}")
    unnamed = [name for name in content if not isinstance(name, str)]
    if unnamed:
        raise ValueError(f"{file} must hold tensors by name, it has one called {unnamed[0]!r}")
    odd = sorted(str(name) for name, value in content.items() if not isinstance(value, torch.Tensor))
    if odd:
        raise ValueError(f"{file} holds things that are no tensors: {', '.join(odd)}")
    return content
