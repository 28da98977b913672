"""SmolLM2 through compiled graphs: exported, loaded in a fresh process, compared with plain `generate()`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import resolve_model
from eagle3_hf.cli.common import encode
from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
DRAFT = Path(os.environ.get("EAGLE3_TEST_DRAFT", ROOT / "recipes" / "smollm2-135m-instruct" / "draft"))
PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"
BUCKETS, LENGTH, NEW, COUNT = [64, 128, 256], 256, 48, 10

# Knows the folder alone. Dynamo counts the programs it compiled, so one more after warm-up would show.
_SERVE = """
import json, sys
import torch
from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM

folder, jobs, compiled = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3] == "compiled"
graphs = []
def count(module, inputs):
    graphs.append(module)
    return module
model = Eagle3NeuronModelForCausalLM.from_pretrained(folder, torch_compile=count if compiled else None)
warm = len(graphs)
answers = []
with torch.compiler.set_stance("fail_on_recompile"):
    for job in jobs:
        out = model.generate(torch.tensor(job["ids"]), torch.tensor(job["mask"]), max_new_tokens=job["new"])
        answers.append({"ids": out.tolist(), "tau": model.speculation_stats.tau})
json.dump({"warm": warm, "after": len(graphs), "graphs": len(model.graphs), "answers": answers,
           "calls": model.runtime.calls}, open(sys.argv[4], "w"))
"""


def _chosen(tokenizer):
    """The first prompts that fit, with the chat template: nine for the two smaller buckets, one for the largest.

    Sorted by length, so that batches of four as well need each bucket.
    """
    short, long = [], []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        text = record["turns"][0] if "turns" in record else record["prompt"]
        ids = encode(tokenizer, text, "cpu")["input_ids"][0].tolist()
        if len(ids) + NEW <= LENGTH:
            (short if len(ids) <= BUCKETS[1] else long).append(ids)
    assert len(short) >= COUNT - 1 and long, "too few prompts fit"
    return sorted([*short[: COUNT - 1], long[0]], key=len)


def _padded(rows, pad):
    width = max(map(len, rows))
    return {
        "ids": [[pad] * (width - len(row)) + row for row in rows],
        "mask": [[0] * (width - len(row)) + [1] * len(row) for row in rows],
        "new": NEW,
    }


@pytest.fixture(scope="module")
def work():
    if not PROMPTS.is_file() or not (DRAFT / "config.json").is_file():
        pytest.skip("needs ../shared/data/prompts/mt_bench.jsonl and the recipe's draft")
    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = _chosen(tokenizer)
    plain = [
        target.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False)[0, len(row) :].tolist()
        for row in rows
    ]
    return path, rows, plain, target.generation_config.pad_token_id or 0


# Compiled, the same loaded programs go through Dynamo as well, and its guards watch every call.
@pytest.mark.parametrize(("batch", "mode"), [(1, "exported"), (4, "compiled")])
def test_token_identical_in_a_fresh_process(batch, mode, work, tmp_path):
    path, rows, plain, pad = work
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(
        path, DRAFT, batch_size=batch, sequence_length=LENGTH, context_buckets=BUCKETS
    )
    Eagle3NeuronModelForCausalLM.export(path, DRAFT, config, output=tmp_path / "out")
    groups = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    (tmp_path / "jobs.json").write_text(json.dumps([_padded(group, pad) for group in groups]))
    (tmp_path / "serve.py").write_text(_SERVE)
    command = [sys.executable, "serve.py", "out", "jobs.json", mode, "answers.json"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    result = json.loads((tmp_path / "answers.json").read_text())
    answers = [row for answer in result["answers"] for row in answer["ids"]]
    width = [max(map(len, group)) for group in groups for _ in group]
    new = [answer[at:] for answer, at in zip(answers, width)]
    # Rows that ended early are padded to the longest of their own batch.
    assert [row[: len(wanted)] for row, wanted in zip(new, plain)] == plain
    assert all(set(row[len(wanted) :]) <= {pad} for row, wanted in zip(new, plain))
    assert result["after"] == result["warm"] == (result["graphs"] if mode == "compiled" else 0)
    assert all(result["calls"][f"target_prefill_{size}"] > 0 for size in BUCKETS), "a bucket wasn't used"
    sys.stdout.write(f"{mode} batch {batch}: tau {[round(a['tau'], 2) for a in result['answers']]} {result['calls']}\n")
