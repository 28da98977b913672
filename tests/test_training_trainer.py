"""The trainer: it learns, resumes exactly, loses at most a step when killed, and says so when it diverges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from training_models import AUX, VOCAB, Documents, documents, tiny_recipe, tiny_target, training_data
from transformers import TrainerCallback

from eagle3_hf import Eagle3DraftModel, enable_eagle3
from eagle3_hf.training.batches import BatchPlan, StreamSampler, pack_by_length
from eagle3_hf.training.checkpointing import MARKER, checkpoints, is_complete, last_checkpoint, mark_complete, rotate
from eagle3_hf.training.initialise import new_draft
from eagle3_hf.training.recipe import DraftSection
from eagle3_hf.training.run import run
from eagle3_hf.training.trainer import DivergedError


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def data(target):
    return training_data(target)


def losses(folder: Path) -> dict[int, list[float]]:
    """Logged loss of every step by update."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {e["step"]: [e["loss_0"], e["loss_1"], e["loss_2"]] for e in lines if "loss_0" in e}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class StopAt(TrainerCallback):
    """Sends this process a signal in the middle of an update."""

    def __init__(self, step: int, number: int = signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def test_accuracy_rises_to_a_bar_and_the_draft_speeds_generation_up(target, tmp_path):
    data = training_data(target, 192, 16)
    recipe = tiny_recipe(
        tmp_path / "run",
        data={"tokens_per_batch": 512},
        evaluation={"generate_every": 100, "generate_prompts": 8, "generate_new_tokens": 16},
        training={"max_steps": 100, "learning_rate": 1e-2, "logging_steps": 10, "eval_steps": 100, "save_steps": 100},
    )
    before = run(
        tiny_recipe(tmp_path / "before", training={"max_steps": 1, "eval_steps": 1}), data, target=lambda: target
    )
    result = run(recipe, data, target=lambda: target)
    enable_eagle3(target)  # generation has made it a speculating target
    assert result.finished
    first, last = before.numbers["evaluation"], result.numbers["evaluation"]
    # The bar: 55 % of first steps and 45 % of third ones right, on documents that weren't trained on.
    assert last["eval_accuracy_0"] > 0.55 > first["eval_accuracy_0"] + 0.05
    assert last["eval_accuracy_2"] > 0.45 > first["eval_accuracy_2"] + 0.1
    assert last["eval_tau"] > 2.25 > first["eval_tau"] + 0.1
    # A chain of 4 in real generation, on prompts that weren't trained on.
    assert result.numbers["generation"]["eval_generate_tau"] > 1.7
    draft = Eagle3DraftModel.from_pretrained(result.folder, target=target)
    assert not draft.training and draft.config.aux_hidden_state_layers == AUX
    assert (tmp_path / "run" / "training.png").read_bytes().startswith(b"\x89PNG")
    card = (result.folder / "README.md").read_text()
    assert "tokens" in card and f"{last['eval_tau']:.2f}" in card
    assert result.numbers["tokens"] > 40_000 and result.numbers["hours"] > 0


def test_the_trained_draft_is_exported_and_read_back(target, data, tmp_path):
    from eagle3_hf.checkpoints import export_draft

    result = run(tiny_recipe(tmp_path / "run", training={"max_steps": 2}), data, target=lambda: target)
    draft = Eagle3DraftModel.from_pretrained(result.folder, target=target)
    for format in ("speculators", "specforge", "transformers"):
        export_draft(draft, tmp_path / format, format)
        again = Eagle3DraftModel.from_pretrained(tmp_path / format, target=target)
        for name in ("fc.weight", "lm_head.weight", "layers.0.self_attn.q_proj.weight"):
            assert torch.equal(again.state_dict()[name], draft.state_dict()[name]), (format, name)


RESUMED = {"max_steps": 7, "logging_steps": 2, "save_steps": 100, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def uninterrupted(target, tmp_path_factory):
    """Data, folder and result of the run that a resumed one must equal."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    some = training_data(target, vocabulary=32)
    whole = run(tiny_recipe(folder, training=RESUMED, draft={"vocab_size": 32}), some, target=lambda: target)
    return some, folder, whole


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_resume_is_exact(target, uninterrupted, tmp_path, stop):
    """Stopped by a signal in the middle of a logging window, the run ends where an uninterrupted one does."""
    some, folder, whole = uninterrupted
    recipe = tiny_recipe(tmp_path / "parts", training=RESUMED, draft={"vocab_size": 32})
    stopped = run(recipe, some, target=lambda: target, callbacks=[StopAt(3, stop)])
    assert not stopped.finished and stopped.updates == 3 and stopped.signal == stop
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-3"]
    torch.manual_seed(99)

    def no_target():
        raise AssertionError("resuming needs no target")

    resumed = run(recipe, some, resume=True, target=no_target)
    assert resumed.finished and resumed.updates == 7
    assert losses(tmp_path / "parts") == losses(folder)
    for name, tensor in weights(folder / "draft").items():
        assert torch.equal(tensor, weights(tmp_path / "parts" / "draft")[name]), name
    assert resumed.numbers["tokens"] == whole.numbers["tokens"]
    both = [
        json.loads((path / "checkpoint-7" / "eagle3_state.json").read_text()) for path in (folder, tmp_path / "parts")
    ]
    assert both[0]["progress"]["window"] == both[1]["progress"]["window"]


def test_resume_refuses_another_run(target, data, tmp_path):
    run(tiny_recipe(tmp_path, training={"max_steps": 2}), data, target=lambda: target)
    with pytest.raises(ValueError, match=r"holds a run up to checkpoint-2: add --resume"):
        run(tiny_recipe(tmp_path), data, target=lambda: target)
    with pytest.raises(ValueError, match=r"objective\.steps \(3 then, 2 now\)"):
        run(tiny_recipe(tmp_path, objective={"steps": 2}), data, resume=True, target=lambda: target)
    more = tiny_recipe(tmp_path, training={"gradient_accumulation_steps": 2})
    with pytest.raises(ValueError, match=r"processes x gradient_accumulation_steps changed \(1 then, 2 now\)"):
        run(more, data, resume=True, target=lambda: target)
    other = training_data(target, 40)
    with pytest.raises(ValueError, match="the training documents"):
        run(tiny_recipe(tmp_path), other, resume=True, target=lambda: target)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from training_models import *
from eagle3_hf.training.run import run
import torch
torch.set_num_threads(1)
target = tiny_target()
training = {{"max_steps": 400, "save_steps": 1, "save_total_limit": 2, "eval_steps": 1000}}
recipe = tiny_recipe({folder!r}, training=training)
run(recipe, training_data(target), target=lambda: target)
"""


def test_a_killed_run_loses_at_most_one_update(target, data, tmp_path):
    """`kill -9` at a random moment: the newest whole checkpoint is that of the last finished update, or the one before.

    The child has no chance to clean up, so a half-written checkpoint may lie there: it isn't picked.
    """
    folder = tmp_path / "run"
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while last_checkpoint(folder) is None or int(last_checkpoint(folder).name[11:]) < 4:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = last_checkpoint(folder)
    done = int(kept.name[11:])
    # Whatever else lies there was begun after that update.
    assert all(int(path.name[11:]) <= done + 1 for path in checkpoints(folder, whole=False))
    recipe = tiny_recipe(
        folder, training={"max_steps": 400, "save_steps": 1, "save_total_limit": 2, "eval_steps": 1000}
    )
    result = run(recipe, data, resume=True, target=lambda: target, callbacks=[StopAt(done + 2)])
    assert result.updates == done + 2
    # The very losses of a run that nothing happened to.
    whole = tiny_recipe(tmp_path / "whole", training={"max_steps": 400, "save_steps": 1000, "eval_steps": 1000})
    run(whole, data, target=lambda: target, callbacks=[StopAt(done + 2)])
    assert losses(folder) == losses(tmp_path / "whole")


def test_half_written_checkpoints_are_never_picked(tmp_path):
    for step in (2, 10, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        if step != 10:
            mark_complete(folder)
    assert last_checkpoint(tmp_path).name == "checkpoint-9"
    (tmp_path / "checkpoint-9" / "model.safetensors").write_bytes(b"wei")  # truncated after it was marked
    assert not is_complete(tmp_path / "checkpoint-9")
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    (tmp_path / "checkpoint-2" / MARKER).write_text("{")
    assert last_checkpoint(tmp_path) is None


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "file").write_text("x")
        if step != 3:
            mark_complete(folder)
    assert sorted(path.name[11:] for path in rotate(tmp_path, 2, tmp_path / "checkpoint-1")) == ["2", "3", "4"]
    assert [path.name[11:] for path in checkpoints(tmp_path)] == ["1", "5"]
    assert rotate(tmp_path, None) == []


def test_a_loss_that_is_not_finite_is_an_error(target, tmp_path):
    data = training_data(target)
    data.train = Documents([dict(item) for item in data.train.items])
    for item in data.train.items[30:]:
        item["features"] = item["features"].clone()
        item["features"][5] = float("nan")
    recipe = tiny_recipe(tmp_path, training={"save_steps": 1, "max_steps": 40})
    with pytest.raises(DivergedError, match=r"the loss is nan after update \d+: training has diverged") as error:
        run(recipe, data, target=lambda: target)
    assert "training.learning_rate" in str(error.value)
    # What was saved before is sound.
    for folder in checkpoints(tmp_path):
        assert all(torch.isfinite(tensor.float()).all() for tensor in weights(folder).values())


def test_weights_that_are_not_finite_are_never_saved(target, data, tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.draft.fc.weight[0, 0] = float("inf")

    with pytest.raises(DivergedError, match="the norm of the draft's weights is inf"):
        run(tiny_recipe(tmp_path, training={"save_steps": 1}), data, target=lambda: target, callbacks=[Spoil()])
    assert checkpoints(tmp_path) == []


def test_accumulation_is_the_mean_over_the_whole_update(target, data, tmp_path):
    """Two micro-batches of different sizes weigh by their slots: as one batch of both."""
    docs = data.train.items
    two = {"max_steps": 1, "gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0.0, "eval_steps": 100}
    apart = run(tiny_recipe(tmp_path / "two", training=two), data, target=lambda: target)
    plan = BatchPlan(tuple(data.lengths), 128, 1)
    stream = plan.stream()
    joined = [docs[i] for _ in range(2) for i in next(stream)[1]]
    at_once = training_data(target)
    at_once.train, at_once.lengths = Documents(joined), [len(item["input_ids"]) for item in joined]
    one = {**two, "gradient_accumulation_steps": 1}
    recipe = tiny_recipe(tmp_path / "one", training=one, data={"tokens_per_batch": 10_000})
    together = run(recipe, at_once, target=lambda: target)
    a, b = weights(apart.folder), weights(together.folder)
    start = weights(tmp_path / "one" / "prepared" / "draft")
    assert max((b[name] - start[name]).abs().max() for name in b if b[name].is_floating_point()) > 1e-4
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-6, rtol=0)


def test_early_stopping_follows_tau(target, data, tmp_path):
    recipe = tiny_recipe(
        tmp_path,
        evaluation={"early_stopping_patience": 2, "early_stopping_threshold": 10.0},
        training={"max_steps": 60, "eval_steps": 2},
    )
    result = run(recipe, data, target=lambda: target)
    assert result.finished and result.updates == 6  # the first is the best, two more don't beat it by 10
    assert result.numbers["best_tau"] < 4


def test_bf16_checkpointing_and_compile_reach_the_objective(target, data, tmp_path):
    training = {"bf16": True, "gradient_checkpointing": True, "max_steps": 2, "eval_steps": 2}
    result = run(tiny_recipe(tmp_path / "bf16", training=training), data, target=lambda: target)
    assert result.finished
    assert all(
        t.dtype in (torch.float32, torch.int64, torch.bool) for t in weights(tmp_path / "bf16/checkpoint-2").values()
    )
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2, "eval_steps": 2}
    again = run(tiny_recipe(tmp_path / "compiled", training=compiled), data, target=lambda: target)
    plain = run(
        tiny_recipe(tmp_path / "plain", training={"max_steps": 2, "eval_steps": 2}), data, target=lambda: target
    )
    for name, tensor in weights(plain.folder).items():
        torch.testing.assert_close(weights(again.folder)[name], tensor, atol=1e-5, rtol=0)


def test_batch_plan_is_the_same_for_any_number_of_processes():
    lengths = tuple(5 + (7 * i) % 23 for i in range(50))
    plan = BatchPlan(lengths, 64, seed=3, window=16)
    for epoch in range(3):
        assert sorted(i for batch in plan.epoch(epoch) for i in batch) == list(range(50))
    assert plan.epoch(0) != plan.epoch(1) and plan.epoch(1) == BatchPlan(lengths, 64, seed=3, window=16).epoch(1)
    whole = list(StreamSampler(plan, 40))
    parts = [list(StreamSampler(plan, 20, rank, 2)) for rank in range(2)]
    assert [batch for pair in zip(*parts) for batch in pair] == whole
    assert plan.count(1.5) == plan.size(0) + round(plan.size(1) / 2)
    assert plan.epochs_after(plan.size(0)) == 1.0 and plan.epochs_after(plan.size(0) + plan.size(1)) == 2.0
    assert plan.fingerprint != BatchPlan(lengths, 65, seed=3, window=16).fingerprint
    assert pack_by_length([0, 1, 2], [100, 3, 4], 10) == [[0], [1, 2]]
    with pytest.raises(ValueError, match="no document"):
        BatchPlan((), 64, 0)


def test_a_new_draft_starts_as_the_target_does(target):
    """With the whole vocabulary, fc's identity and nothing on the embedding half, step 0 is the target's last layer."""
    section = DraftSection(aux_hidden_state_layers=[1, 2, 3], fc_noise=0.0)
    draft = new_draft(target, section)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(draft.layers[0].self_attn, name).weight[:, :32] = 0
        ids = torch.randint(3, VOCAB, (2, 9))
        states = target(ids, output_hidden_states=True)
        features = torch.cat([states.hidden_states[i] for i in (1, 2, 3)], -1)
        embeds = F.embedding(ids, target.get_input_embeddings().weight)
        logits = draft(features, inputs_embeds=embeds).logits
    torch.testing.assert_close(logits, states.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True}, {"fc_norm": True}, {"num_hidden_layers": 2}, {"own_embeddings": True},
        {"aux_hidden_state_layers": [0, 1, 2, 3, 4]}, {"qk_norm": True}, {"norm_output": True},
        {"initialise": "scratch"}, {"initialise": "scratch", "hidden_size": 48, "head_dim": 12},
    ],
    ids=str,
)  # fmt: skip
def test_variants_of_drafts_train(target, tmp_path, changes):
    items = documents(target, 12)
    ids = changes.get("aux_hidden_state_layers", AUX)
    if len(ids) != len(AUX):
        for item in items:
            item["features"] = torch.cat([item["features"], item["features"][:, : 2 * 32]], -1)
    data = training_data(target, 8, 4)
    data.train, data.lengths, data.held_out = (
        Documents(items[:8]),
        [len(i["input_ids"]) for i in items[:8]],
        Documents(items[8:]),
    )
    data.aux_layers = None
    section = {"aux_hidden_state_layers": ids, **changes}
    training = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
    result = run(tiny_recipe(tmp_path, draft=section, training=training), data, target=lambda: target)
    trained, start = weights(result.folder), weights(tmp_path / "prepared" / "draft")
    still = [n for n in start if start[n].is_floating_point() and torch.equal(trained[n], start[n])]
    assert still == []
    # Going on from it: same weights, and a recipe that contradicts it is refused.
    go_on = DraftSection(initialise=str(result.folder))
    again = new_draft(target, go_on, aux_layers=ids)
    assert all(torch.equal(again.state_dict()[n], trained[n].to(again.state_dict()[n].dtype)) for n in trained)
    go_on.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"draft\.num_hidden_layers is 3 in the recipe"):
        new_draft(target, go_on)
