"""The package is light to import, and everything it promises is there."""

import subprocess
import sys

import pytest

import eagle3_hf


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import eagle3_hf", "from eagle3_hf.cli import build_app; build_app()"])
def test_import_leaves_torch_and_transformers_alone(statement):
    assert not _modules_after(statement) & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("name", eagle3_hf.__all__)
def test_every_public_name_resolves(name):
    assert getattr(eagle3_hf, name) is not None
    assert name in dir(eagle3_hf)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = eagle3_hf.no_such_name
