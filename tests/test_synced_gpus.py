"""`synced_gpus`: processes that share a sharded target make equally many forwards, and nothing else changes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import CHAIN, prompts

# Every forward of the target is a collective, as where its weights are sharded. What it adds up tells a forward of the
# other process from its question whether anyone is still at work; without as many forwards they would meet.
SCRIPT = """
import datetime, os, sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from support import *
rank = int(os.environ["RANK"])
target = make_target("llama")
draft = make_draft(target)
forwards = []
def meet(*_):
    met = torch.full((1,), 100.0)
    dist.all_reduce(met)
    assert met.item() == 200.0, met
    forwards.append(1)
lengths = [(6, 24), (24, 6), (1, 20)]
cases = [(shape, pair[rank]) for shape in SHAPES for pair in lengths]
inputs = prompts(1 + 2 * rank, 9, seed=rank)
options = {{"do_sample": False, "eos_token_id": [3, 7], "pad_token_id": PAD}}
plain = {{n: target.generate(**inputs, **options, max_new_tokens=n) for n in {{n for _, n in cases}}}}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
target.register_forward_pre_hook(meet)
made = []
for shape, n in cases:
    with oracle(texts_of(plain[n], inputs)):
        fast = target.generate(
            **inputs, **options, max_new_tokens=n, assistant_model=draft, synced_gpus=True, **SHAPES[shape]
        )
    assert fast.tolist() == plain[n].tolist(), (shape, n)
    made.append(len(forwards))
    total = torch.tensor([len(forwards)])
    dist.all_reduce(total)
    assert total.item() == 2 * len(forwards), (shape, n, total, len(forwards))
print("done", made)
dist.destroy_process_group()
"""


def test_a_process_that_ends_earlier_goes_on_with_empty_forwards():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent))],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for child in children:
        try:
            outputs.append(child.communicate(timeout=300)[0])
        finally:
            child.kill()
        assert child.returncode == 0, outputs[-1][-4000:]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert outputs[0].splitlines()[-1].startswith("done")


def test_margin_checks_are_refused(llama, llama_draft):
    options = {"max_new_tokens": 3, "assistant_model": llama_draft, "exact": "margin", **CHAIN}
    with pytest.raises(ValueError, match=r"synced_gpus.*exact='margin'"):
        llama.generate(**prompts(1, 5), synced_gpus=True, **options)
    llama.generate(**prompts(1, 5), synced_gpus=False, **options)
