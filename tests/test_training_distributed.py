"""Two gloo processes and one process with the same global batch: the same updates, evaluations and checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_models import tiny_recipe, tiny_target, training_data

from eagle3_hf.training.checkpointing import checkpoints
from eagle3_hf.training.run import run

# Each process runs the same script, as `torchrun` would start it.
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from training_models import *
from eagle3_hf.training.run import run
target = tiny_target()
data = training_data(target)
for part in {parts!r}:
    recipe = tiny_recipe(Path({folder!r}) / part["name"], training=part["training"])
    callbacks = []
    if part.get("stop_at"):
        sys.path.insert(0, {tests!r})
        from test_training_trainer import StopAt
        import os
        # Only the second process is asked. The wish travels with the next update: both stop after that.
        callbacks = [StopAt(part["stop_at"])] if os.environ["RANK"] == "1" else []
    result = run(recipe, data, resume=part.get("resume", False), target=lambda: target, callbacks=callbacks)
    assert result.updates == part["updates"], result
    assert result.finished is part["finished"], result
"""
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1}


def launch(folder: Path, parts: list[dict], processes: int = 2, **environment: str) -> None:
    """Run `parts` one after the other in that many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = str(Path(__file__).parent)
    code = SCRIPT.format(tests=tests, parts=parts, folder=str(folder))
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment,
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    for child in children:
        output, _ = child.communicate(timeout=900)
        assert child.returncode == 0, output[-4000:]


def entries(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    drop = ("tokens_per_second", "train_runtime", "grad_norm")
    return [{k: v for k, v in line.items() if k not in drop} for line in lines if "train_runtime" not in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_two_processes_do_what_one_does(tmp_path):
    """Plain SGD, so that a difference of weights is a difference of gradients; then resuming, with AdamW."""
    adam = {"max_steps": 6, "save_steps": 6, "logging_steps": 3}
    launch(tmp_path, [
        {"name": "two", "training": {**SGD, "max_steps": 3}, "updates": 3, "finished": True},
        {"name": "parts", "training": adam, "updates": 4, "finished": False, "stop_at": 3},
        {"name": "parts", "training": adam, "updates": 6, "finished": True, "resume": True},
    ])  # fmt: skip
    target = tiny_target()
    data = training_data(target)
    one = {**SGD, "max_steps": 3, "gradient_accumulation_steps": 2}
    run(tiny_recipe(tmp_path / "one", training=one), data, target=lambda: target)
    start = weights(tmp_path / "one" / "prepared" / "draft")
    single, double = weights(tmp_path / "one" / "draft"), weights(tmp_path / "two" / "draft")
    assert max((single[n] - start[n]).abs().max() for n in start if start[n].is_floating_point()) > 1e-2
    for name, tensor in single.items():
        torch.testing.assert_close(double[name], tensor, atol=2e-6, rtol=0, msg=name)
    logs = [entries(tmp_path / name) for name in ("one", "two")]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for a, b in zip(*logs):
        # Losses, accuracies, tokens, epochs, and simulated acceptance over all held-out documents.
        assert a == pytest.approx(b, abs=1e-5)

    whole = {**adam, "gradient_accumulation_steps": 2}
    run(tiny_recipe(tmp_path / "whole", training=whole), data, target=lambda: target)
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "parts" / "checkpoint-4" / "rng_state_1.pth").is_file()
    for a, b in zip(entries(tmp_path / "whole"), entries(tmp_path / "parts")):
        assert a == pytest.approx(b, abs=1e-5)
    for name, tensor in weights(tmp_path / "whole" / "draft").items():
        torch.testing.assert_close(weights(tmp_path / "parts" / "draft")[name], tensor, atol=1e-5, rtol=0, msg=name)
