"""The commands `eval` and `report` as a user types them, on tiny models."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from eval_models import POSITIONS, save_models
from support import error_line
from typer.testing import CliRunner

from eagle3_hf import Eagle3Config, Eagle3DraftModel
from eagle3_hf.cli import build_app
from eagle3_hf.evaluation.results import ResultsWriter, read_results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cli():
    runner, app = CliRunner(), build_app()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


def test_the_command(cli, folders, tmp_path):
    target, draft, assistant = folders
    prompts, out, page = tmp_path / "own.jsonl", tmp_path / "r.jsonl", tmp_path / "page.html"
    prompts.write_text('{"q": "One?"}\n{"q": "Two?"}\n{"q": "left out"}\n')
    common = (
        *("eval", "--target", target, "--draft", draft, "--assistant", assistant, "--dataset", prompts),
        *("--column", "prompt=q", "--limit", 2, "--max-new-tokens", 8, "--threads", 1, "--out", out),
    )
    result = cli(*common, "--report", page)
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("<!doctype html>")
    before = out.read_bytes()
    result = cli(*common, "--format", "json")
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(before)
    data = json.loads(result.stdout)
    assert data["sessions"] == 2
    assert data["settings"]["max_new_tokens"] == 8
    names = ["plain", "plain, packed", "prompt lookup 10", "assisted", "chain 4", "static tree", "tree 5:4:16"]
    entries = data["batches"]["1"]["datasets"]["own"]
    assert list(entries) == names
    assert {entry["answers"] for entry in entries.values()} == {2}
    line = error_line(cli(*common, "--seed", 5))
    assert "seed" in line
    assert out.read_bytes().startswith(before)
    sampled = cli(
        *(*common[:-1], tmp_path / "s.jsonl", "--temperature", 1, "--format", "json"),
        *("--method", "chain:2", "--method", "assisted:2"),
    )
    assert {e["lossless"] for e in json.loads(sampled.stdout)["batches"]["1"]["datasets"]["own"].values()} == {None}


def test_a_file_grows_by_methods_with_and_without_a_draft(cli, folders, tmp_path):
    target, draft, _ = folders
    shutil.copytree(draft, tmp_path / "draft")
    prompts, out = tmp_path / "own.jsonl", tmp_path / "r.jsonl"
    prompts.write_text('{"prompt": "One?"}\n')
    common = (
        *("eval", "--target", target, "--draft", tmp_path / "draft", "--dataset", prompts, "--max-new-tokens", 4),
        *("--threads", 1, "--format", "json", "--report", tmp_path / "r.json", "--out", out),
    )
    for spec in ("early-exit:2", "chain:2", "prompt-lookup"):
        result = cli(*common, "--method", spec)
        assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert list(data["batches"]["1"]["datasets"]["own"]) == ["plain", "early exit 2", "chain 2", "prompt lookup 10"]
    assert data["settings"]["draft"] == str(tmp_path / "draft")
    # Transformers' methods take one row: of the usual ones those that can't run are left out.
    result = cli(*common[:-1], tmp_path / "b.jsonl", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    names = list(json.loads((tmp_path / "r.json").read_text())["batches"]["2"]["datasets"]["own"])
    assert names == ["plain", "plain, packed", "chain 4", "static tree", "tree 5:4:16"]
    # More training puts another draft in the same place.
    torch.manual_seed(5)
    Eagle3DraftModel(Eagle3DraftModel.from_pretrained(draft).config).save_pretrained(tmp_path / "draft")
    before = out.read_bytes()
    assert "draft_files" in error_line(cli(*common, "--method", "chain:2"))
    assert out.read_bytes() == before


def test_a_report_never_takes_the_place_of_results(cli, folders, tmp_path, monkeypatch):
    out = tmp_path / "r.html"
    with ResultsWriter(out, {}) as writer:
        record = {
            "kind": "result",
            "key": "p/b1/0/t0/plain",
            "dataset": "p",
            "unit": "p/b1/0/t0",
            "turn": 0,
            "batch": 1,
        }
        rows = [{"index": 0, "id": "0", "category": "", "prompt_tokens": 1, "ids": [1, 2]}]
        writer.add({**record, "method": "plain", "seconds": 1.0, "rows": rows, "stats": None, "blocks": None})
    before = out.read_bytes()
    target, draft, _ = folders
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "One?"}\n')
    run = ("eval", "--target", target, "--draft", draft, "--dataset", prompts, "--out", out)
    for arguments in (
        run,
        [*run, "--report", out],
        ["report", out],
        ["report", out, "--format", "json", "--report", out],
    ):
        assert "overwrite the results" in error_line(cli(*arguments))
    assert "is a folder" in error_line(cli("report", out, "--report", tmp_path))
    assert out.read_bytes() == before
    # A full disk leaves the page of an earlier run, and nothing half-written.
    page = tmp_path / "page.json"
    page.write_text("earlier")
    write = Path.write_bytes

    def full(path, data):
        write(path, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left" in error_line(cli("report", out, "--format", "json", "--report", page))
    assert page.read_text() == "earlier"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own.jsonl", "page.json", "r.html"]


def test_wrong_input_is_one_line(cli, folders, tmp_path):
    target, draft, _ = folders
    prompts, empty, long = (tmp_path / f"{name}.jsonl" for name in ("p", "empty", "long"))
    prompts.write_text('{"question": "Why?"}\n')
    empty.write_text("")
    long.write_text(json.dumps({"prompt": "x" * 600}) + "\n")
    config = Eagle3Config(vocab_size=64, hidden_size=48, intermediate_size=64, num_attention_heads=4)
    Eagle3DraftModel(config).save_pretrained(tmp_path / "other")
    loads = ("eval", "--target", target, "--draft", draft, "--out", tmp_path / "r.jsonl")
    fine = ("--dataset", prompts, "--column", "prompt=question")
    cases = [
        ([*loads, "--dataset", prompts], ["'prompt'", "'question'", "--column"]),
        ([*loads, "--dataset", empty], ["holds no prompt"]),
        ([*loads, "--dataset", long, "--method", "plain"], ["603 tokens", str(POSITIONS)]),
        ([*loads, *fine, "--method", "magic"], ["no method 'magic'"]),
        ([*loads, *fine, "--dataset", tmp_path / "none.jsonl"], ["none.jsonl"]),
        ([*loads, *fine, "--report", tmp_path / "no" / "page.html"], ["--report", "no folder"]),
        ([*loads[:-1], tmp_path / "no" / "r.jsonl", *fine], ["--out", "no folder"]),
        ([*loads, *fine, "--draft", tmp_path / "other"], ["48", "32"]),
        ([*loads, *fine, "--plugin", tmp_path / "none.py"], ["no plug-in file"]),
        ([*loads, *fine, "--method", "chain", "--assistant", target], ["--assistant", "`assisted`"]),
        ([*loads, *fine, "--method", "prompt-lookup", "--batch-size", 2], ["prompt lookup 10", "1 rows"]),
        ([*loads, "--dataset", "mt_bench", "--column", "prompt=question"], ["--column", "mt_bench"]),
        ([*loads, *fine, "--seed", 2**63], ["--seed", str(2**63)]),
        (["report", tmp_path / "none.jsonl"], ["no results file"]),
        (["report", prompts], ["p.jsonl"]),
    ]
    for arguments, words in cases:
        line = error_line(cli(*arguments))
        assert all(word in line for word in words), line


def test_methods_are_listed(cli):
    lines = cli("eval", "--list-methods").stdout.splitlines()
    assert [line.partition(":")[0].partition("[")[0] for line in lines] == [
        "plain", "packed", "prompt-lookup", "assisted", "early-exit", "chain", "static", "tree",
    ]  # fmt: skip


@pytest.mark.slow
def test_killing_the_process_gives_the_same_table(folders, tmp_path):
    target, draft, _ = folders
    prompts = tmp_path / "own.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Say {i}"}}\n' for i in range(12)))

    def start(out):
        code = "from eagle3_hf.cli import main; main()"
        arguments = ["eval", "--target", target, "--draft", draft, "--dataset", prompts, "--threads", "1"]
        arguments += ["--max-new-tokens", "32", "--format", "json", "--report", out.with_suffix(".json"), "--out", out]
        return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.DEVNULL)

    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert start(whole).wait() == 0
    killed = start(broken)
    while not broken.exists() or broken.read_bytes().count(b"\n") < 20:
        assert killed.poll() is None
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    count = len(read_results(broken).records)
    assert start(broken).wait() == 0
    assert 15 < count < len(read_results(broken).records) == 12 * 6
    tables = []
    for path in (whole, broken):
        entries = json.loads(path.with_suffix(".json").read_text())["batches"]["1"]["datasets"]["own"]
        timed = {"seconds", "tokens_per_second", "speedup", "cycle_efficiency", "milliseconds_per_round"}
        tables.append({n: {k: v for k, v in e.items() if k not in timed} for n, e in entries.items()})
    assert tables[0] == tables[1]
