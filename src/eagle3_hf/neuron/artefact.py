"""The folder an export writes: graphs, weights, configs, and a manifest that vouches for all of them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from .. import __version__
from .backends import Backend
from .config import CONFIG_FILE, Eagle3NeuronConfig
from .families import Models
from .specs import Graph, TensorSpec
from .split import rank_weights

MANIFEST_FILE = "manifest.json"
FORMAT = 2
_WEIGHTS = ("target", "draft")
_BROKEN_OFF = f"no {MANIFEST_FILE}, so the export was broken off or copied in part; delete it and export again"
_RANK_FILE = "tp{}_sharded_checkpoint.safetensors"


@dataclass(frozen=True)
class Entry:
    """A compiled graph, as the manifest describes it; see `Graph` and `Compiled` for the fields of the same name."""

    file: str
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    memory: tuple[TensorSpec, ...]
    weights: tuple[str, ...]
    aliases: dict[int, int]
    operators: dict[str, int]
    parameters: tuple[int | tuple[str, float], ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """What was compiled, for what, and the hash of every file."""

    compiled: Eagle3NeuronConfig
    graphs: dict[str, Entry]
    files: dict[str, str]
    versions: dict[str, str]


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            made.update(block)
    return made.hexdigest()


def _own_digest(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_weights(folder: Path, models: Models, world: int) -> None:
    for rank in range(world) if world > 1 else ():
        save_file(rank_weights(models, rank, world), folder / _RANK_FILE.format(rank), metadata={"format": "pt"})
    for who in _WEIGHTS if world == 1 else ():
        tensors = {name: tensor for name, tensor in models.stored.items() if name.startswith(f"{who}.")}
        save_file(tensors, folder / f"{who}.safetensors", metadata={"format": "pt"})


def check_place(folder: Path) -> None:
    """Check that an export can be written to `folder`, before minutes are spent on it.

    Raises:
        ValueError: it has something in it, isn't a folder, or can't be made or written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST_FILE).is_file():
            raise ValueError(f"{folder} isn't empty: it has {_BROKEN_OFF}")
        raise ValueError(f"{folder} isn't empty: choose another folder")
    place = folder.absolute()
    there = next(each for each in (place, *place.parents) if each.exists() or each.is_symlink())
    if not there.is_dir():
        what = "it isn't a folder" if there == place else f"{there} isn't a folder"
        raise ValueError(f"{folder} can't be made: {what}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} can't be written: no permission for {there}")


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """Makes `folder`, which must be empty or new, and removes what was written to it if the block breaks off.

    Raises:
        ValueError: as `check_place`.
    """
    check_place(folder)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if new:
            folder.rmdir()
        raise


def copy(source: Path, place: Path) -> None:
    """Copy an exported folder to an empty or new one, the manifest last.

    Raises:
        ValueError: as `check_place`.
    """
    with all_or_nothing(place):
        shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        shutil.copy2(source / MANIFEST_FILE, place / MANIFEST_FILE)


def write(folder: Path, models: Models, config: Eagle3NeuronConfig, graphs: Sequence[Graph], backend: Backend) -> None:
    """Compile `graphs` and write the whole folder, the manifest last; nothing is left of it if that breaks off.

    Raises:
        ValueError: as `check_place`.
    """
    with all_or_nothing(folder):
        _write(folder, models, config, graphs, backend)


def _write(folder: Path, models: Models, config: Eagle3NeuronConfig, graphs: Sequence[Graph], backend: Backend) -> None:
    (folder / "weights").mkdir()
    (folder / "draft").mkdir()
    models.target_config.save_pretrained(folder)
    models.draft_config.save_pretrained(folder / "draft")
    models.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)
    world = config.tensor_parallel_size
    stored = rank_weights(models, 0, world)
    _write_weights(folder / "weights", models, world)
    compiled = backend.compile_all(graphs, stored, folder)
    digests = {made.path: sha256(made.path) for made in compiled.values()}
    entries = {}
    for graph in graphs:
        made = compiled[graph.name]
        entries[graph.name] = Entry(
            file=made.path.relative_to(folder).as_posix(),
            sha256=digests[made.path],
            inputs=graph.inputs,
            outputs=graph.outputs,
            memory=graph.memory,
            weights=graph.weights,
            aliases=graph.aliases,
            operators=made.operators,
            parameters=made.parameters,
        )
    others = sorted(path for path in folder.rglob("*") if path.is_file() and path not in digests)
    content: dict[str, Any] = {
        "format": FORMAT,
        "versions": {
            "eagle3_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "compiled": config.to_dict(),
        "graphs": {name: asdict(entry) for name, entry in entries.items()},
        # neuron_config.json isn't hashed: it is compared entry by entry, which can say what was changed.
        "files": {path.relative_to(folder).as_posix(): sha256(path) for path in others if path.name != CONFIG_FILE},
    }
    content = json.loads(json.dumps(content))
    content["digest"] = _own_digest(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _specs(values: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(value["name"], tuple(value["shape"]), value["dtype"]) for value in values)


def _parameters(values: list[Any] | None) -> tuple[int | tuple[str, float], ...] | None:
    return None if values is None else tuple(tuple(each) if isinstance(each, list) else each for each in values)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest, without looking at the files it names.

    Raises:
        ValueError: none there, damaged, or of another format.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no exported model: it has {_BROKEN_OFF}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("digest") != _own_digest(content):
        raise ValueError(f"{path} is damaged: it isn't what the export wrote (its digest differs); export again")
    if content["format"] != FORMAT:
        raise ValueError(f"{path} has format {content['format']}, this version of eagle3-hf reads {FORMAT}")
    graphs = {}
    for name, value in content["graphs"].items():
        specs = {key: _specs(value[key]) for key in ("inputs", "outputs", "memory")}
        graphs[name] = Entry(
            file=value["file"],
            sha256=value["sha256"],
            weights=tuple(value["weights"]),
            aliases={int(i): output for i, output in value["aliases"].items()},
            operators=value["operators"],
            parameters=_parameters(value["parameters"]),
            **specs,
        )
    compiled = Eagle3NeuronConfig.from_dict(content["compiled"])
    return Manifest(compiled, graphs, content["files"], content["versions"])


def check_unchanged(config: Eagle3NeuronConfig, manifest: Manifest, where: str) -> None:
    """ValueError if `config` asks for something else than what was compiled; it names each entry."""
    asked, compiled = config.to_dict(), manifest.compiled.to_dict()
    changed = [f"{key} {compiled[key]!r} -> {asked[key]!r}" for key in compiled if asked[key] != compiled[key]]
    if changed:
        raise ValueError(
            f"{where} differs from what the graphs were compiled for ({', '.join(changed)}): these are fixed at "
            "export, export again"
        )


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there and is the one that was exported.

    Raises:
        ValueError: one is missing or has another hash; it is named.
    """
    wanted = dict(manifest.files) | {entry.file: entry.sha256 for entry in manifest.graphs.values()}
    for name, digest in wanted.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is incomplete: {name} is missing")
        if (has := sha256(path)) != digest:
            raise ValueError(
                f"{path} isn't the file that was exported: its sha256 is {has}, the manifest says {digest}"
            )


def read_weights(folder: Path, rank: int, world: int) -> dict[str, torch.Tensor]:
    """One rank's weights under their stored names."""
    if world > 1:
        return load_file(folder / "weights" / _RANK_FILE.format(rank))
    weights: dict[str, torch.Tensor] = {}
    for who in _WEIGHTS:
        weights |= load_file(folder / "weights" / f"{who}.safetensors")
    return weights
