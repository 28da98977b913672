"""A training run from a recipe to a saved draft."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..files import write_whole
from ..modeling_eagle3 import Eagle3DraftModel
from .arguments import training_arguments
from .batches import BatchPlan, plan_updates
from .checkpointing import checkpoints
from .initialise import new_draft
from .module import Eagle3TrainingModule
from .plain_module import PlainTrainingModule
from .recipe import Recipe, load_recipe
from .trainer import Eagle3Trainer

logger = logging.getLogger(__name__)

RECIPE, PREPARED, DRAFT, NUMBERS, CURVES = "recipe.yaml", "prepared", "draft", "training.json", "training.png"
# A change here would make another run of it; the rest (how often to log, evaluate, save) may change on resume.
_FIXED_SECTIONS = ("target", "draft", "data", "features", "objective")


@dataclass
class TrainingData:
    """What a run learns from.

    Attributes:
        train, held_out: map-style datasets of documents, dicts with `input_ids`; `held_out` may be `None`.
        lengths: tokens of each training document.
        collate: documents to the batch dict of the objective.
        aux_layers: which layer inputs the features are; `None` if the recipe settles it.
        vocabulary: int64, ascending target ids for the draft's head, or a function that counts them when they are
            needed; `None`: the whole vocabulary.
        prompts: held-out prompts as token ids, for evaluation by `generate()`.
        complete_batch: see [`Eagle3Trainer`].
        attach: `attach(module, target, device)` is called in each process once there is a module to train
            (`target()` loads the target), to settle what depends on it, such as `collate` and `complete_batch`.
    """

    train: Any
    lengths: Sequence[int]
    collate: Callable[[list], dict[str, torch.Tensor]]
    held_out: Any = None
    aux_layers: Sequence[int] | None = None
    vocabulary: torch.Tensor | Callable[[], torch.Tensor | None] | None = None
    prompts: Sequence[Sequence[int]] = ()
    complete_batch: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    attach: Callable[[Any, Callable[[], Any], torch.device], None] | None = None


@dataclass
class RunResult:
    """How a run ended.

    Attributes:
        updates: done so far, over all starts.
        finished: False if a signal ended it; `--resume` goes on.
        signal: that signal.
        folder: of the saved draft; `None` if it isn't finished.
        numbers: what `training.json` holds.
    """

    updates: int
    finished: bool
    signal: int | None
    folder: Path | None
    numbers: dict[str, Any]


def load_target(recipe: Recipe) -> Any:
    """The recipe's target on the CPU, in eval mode."""
    from transformers import AutoModelForCausalLM

    from ..resolve import resolve_model

    section = recipe.target
    options: dict[str, Any] = {"dtype": "auto" if section.dtype == "auto" else getattr(torch, section.dtype)}
    if section.revision is not None:
        options["revision"] = section.revision
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation
    return AutoModelForCausalLM.from_pretrained(resolve_model(section.model), **options).eval()


def run(
    recipe: Recipe,
    data: TrainingData,
    resume: bool = False,
    target: Callable[[], Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Train, evaluate and save.

    Args:
        recipe: see [`Recipe`].
        data: documents and how they are batched.
        resume: go on from the newest complete checkpoint in `training.output_dir`, from the start if there is none.
        target: gives the loaded target where it is needed; default: [`load_target`]. Resuming needs none, unless the
            recipe evaluates by `generate()`.
        callbacks: further callbacks for the `Trainer`.

    Raises:
        ValueError: an `output_dir` that holds another run, or see [`Eagle3Trainer`].
        FailedElsewhereError: in all processes but the first, if that one couldn't prepare the run.
    """
    args = training_arguments(recipe)
    output = Path(args.output_dir)
    targets = _Once(target or (lambda: load_target(recipe)))
    with _main_process_first(args):
        if args.process_index == 0:
            _claim(output, recipe, resume)
            prepare(recipe, data, targets, output / PREPARED)
    module = load_prepared(output / PREPARED, recipe, args.bf16)
    if data.attach is not None:
        data.attach(module, targets, args.device)
    plan = BatchPlan(
        tuple(int(n) for n in data.lengths),
        recipe.data.tokens_per_batch,
        args.data_seed if args.data_seed is not None else args.seed,
        recipe.data.window,
    )
    args.max_steps = plan_updates(args, plan)
    trainer = Eagle3Trainer(
        module,
        args,
        plan,
        data.train,
        data.collate,
        data.held_out,
        step_weights=recipe.objective.weights if recipe.objective.kind == "eagle3" else [1.0],
        measure_every=recipe.objective.measure_every,
        chain=recipe.evaluation.chain,
        complete_batch=data.complete_batch,
        generate=_generator(recipe, data, targets) if recipe.evaluation.generate_every and data.prompts else None,
        generate_every=recipe.evaluation.generate_every,
        callbacks=[*_early_stopping(recipe), *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return finish(trainer, recipe, output)


class FailedElsewhereError(ValueError):
    """Process 0 couldn't prepare the run, and says why itself."""


@contextmanager
def _main_process_first(args: Any) -> Iterator[None]:
    """Process 0 runs the body while the others wait; its error ends them too, instead of a lost connection."""
    if args.world_size == 1:
        yield
        return
    if args.process_index == 0:
        outcome: list[str | None] = ["it was ended"]
        try:
            yield
            outcome = [None]
        except Exception as error:
            outcome = [str(error)]
            raise
        finally:
            torch.distributed.broadcast_object_list(outcome, src=0, device=args.device)
        return
    outcome = [None]
    torch.distributed.broadcast_object_list(outcome, src=0, device=args.device)
    if outcome[0] is not None:
        raise FailedElsewhereError(f"process 0: {outcome[0]}")
    yield


class _Once:
    """Calls `make` at the first use only."""

    def __init__(self, make: Callable[[], Any]):
        self.make, self.made = make, None

    def __call__(self) -> Any:
        if self.made is None:
            self.made = self.make()
        return self.made


def _early_stopping(recipe: Recipe) -> list[Any]:
    from transformers import EarlyStoppingCallback

    section = recipe.evaluation
    if not section.early_stopping_patience:
        return []
    return [EarlyStoppingCallback(section.early_stopping_patience, section.early_stopping_threshold)]


def _claim(output: Path, recipe: Recipe, resume: bool) -> None:
    """Check that `output` is free, or holds this very run; write the recipe there."""
    found = checkpoints(output)
    if found and not resume:
        raise ValueError(f"{output} holds a run up to {found[-1].name}: add --resume, or set training.output_dir")
    if found and (output / RECIPE).is_file():
        before, now = load_recipe(output / RECIPE).as_dict(), recipe.as_dict()
        changed = [
            f"{name}.{key} ({before[name][key]!r} then, {now[name][key]!r} now)"
            for name in _FIXED_SECTIONS
            for key in now[name]
            if before[name].get(key) != now[name][key]
        ]
        if changed:
            raise ValueError(
                f"the run in {output} was started with another recipe: {'; '.join(changed)}. Put it back, or start a "
                "new run with draft.initialise set to its last checkpoint"
            )
        for key in sorted({*before["training"], *now["training"]}):
            if before["training"].get(key) != now["training"].get(key):
                logger.warning("training.%s was %s, is %s", key, before["training"].get(key), now["training"].get(key))
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / RECIPE, recipe.dump().encode())


def _fingerprint(recipe: Recipe, data: TrainingData) -> str:
    content = {name: recipe.as_dict()[name] for name in ("target", "draft")}
    content["aux"] = list(data.aux_layers) if data.aux_layers is not None else None
    # The vocabulary is counted from the documents: these settle it.
    content["documents"] = hashlib.sha256(repr(list(data.lengths)).encode()).hexdigest()
    content["seed"] = recipe.training.get("seed")
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prepare(recipe: Recipe, data: TrainingData, target: Callable[[], Any], folder: Path) -> None:
    """Write the new draft and what it needs of the target, so that no other process or start has to load the target.

    Args:
        recipe, data: of the run.
        target: gives the loaded target; called only if `folder` isn't there yet for just this recipe and data.
        folder: gets `draft/`, `frozen.safetensors` (`embeddings` `[vocab, Ht]`, `teacher_head` `[Vd, Ht]`) and
            `prepared.json`, written last.
    """
    marker, fingerprint = folder / "prepared.json", _fingerprint(recipe, data)
    if marker.is_file() and json.loads(marker.read_text())["fingerprint"] == fingerprint:
        return
    marker.unlink(missing_ok=True)
    if recipe.objective.kind == "plain":
        _small_model(recipe).save_pretrained(folder / "draft")
        write_whole(marker, json.dumps({"fingerprint": fingerprint}).encode())
        return
    model = target()
    torch.manual_seed(int(recipe.training.get("seed", 42)))
    vocabulary = data.vocabulary() if callable(data.vocabulary) else data.vocabulary
    draft = new_draft(model, recipe.draft, vocabulary, data.aux_layers)
    draft.save_pretrained(folder / "draft")
    rows = draft.draft_to_target(torch.arange(draft.config.draft_vocab_size))
    head = model.get_output_embeddings().weight.detach()
    frozen = {"teacher_head": head[rows.to(head.device)].cpu().contiguous().clone()}
    if not draft.config.own_embeddings:
        # Through the module, not its weight: some families scale their embeddings.
        table = model.get_input_embeddings()
        every = torch.arange(model.config.get_text_config().vocab_size, device=table.weight.device)
        with torch.no_grad():
            frozen["embeddings"] = torch.cat([table(part) for part in every.split(4096)]).cpu().contiguous()
    save_file(frozen, folder / "frozen.safetensors")
    write_whole(marker, json.dumps({"fingerprint": fingerprint}).encode())


def _small_model(recipe: Recipe) -> Any:
    from transformers import AutoModelForCausalLM

    from ..resolve import resolve_model

    assert recipe.draft.model is not None
    return AutoModelForCausalLM.from_pretrained(resolve_model(recipe.draft.model), dtype=torch.float32)


def load_prepared(folder: Path, recipe: Recipe, bf16: bool) -> Any:
    """The module to train, from what [`prepare`] wrote.

    Raises:
        ValueError: nothing there, as on a second machine without a shared `training.output_dir`.
    """
    if not (folder / "prepared.json").is_file():
        raise ValueError(f"{folder} isn't there: training.output_dir must be a folder that all machines share")
    if recipe.objective.kind == "plain":
        from transformers import AutoModelForCausalLM

        small = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
        return PlainTrainingModule(small.train(), recipe.objective.loss, recipe.evaluation.chain)
    draft = Eagle3DraftModel.from_pretrained(folder / "draft", dtype=torch.float32)
    frozen = load_file(folder / "frozen.safetensors")
    head = frozen["teacher_head"].to(torch.bfloat16) if bf16 else frozen["teacher_head"].float()
    return Eagle3TrainingModule(draft.train(), frozen.get("embeddings"), head, objective_options(recipe))


def objective_options(recipe: Recipe) -> dict[str, Any]:
    """Further keywords of the objective."""
    section = recipe.objective
    return {"loss": section.loss, "mass": section.mass, "attention": section.attention}


def _generator(recipe: Recipe, data: TrainingData, target: Callable[[], Any]) -> Callable[[Any], dict[str, float]]:
    """Evaluation by real generation, with a target that is loaded at the first call."""
    from ..target import enable_eagle3
    from .acceptance import generation_acceptance

    section = recipe.evaluation
    prompts = list(data.prompts)[: section.generate_prompts]

    def generate(draft: Any) -> dict[str, float]:
        model = enable_eagle3(target().to(draft.device))
        draft = draft.to(model.dtype)
        return generation_acceptance(model, draft, prompts, section.generate_new_tokens)

    return generate


def finish(trainer: Eagle3Trainer, recipe: Recipe, output: Path) -> RunResult:
    """Save the draft, the numbers and the curves of a run that has ended.

    A run that a signal ended leaves its checkpoint and the curves so far.
    """
    from .card import training_card
    from .plots import plot_training

    state = trainer.state
    numbers: dict[str, Any] = {
        "updates": state.global_step,
        "planned_updates": state.max_steps,
        "tokens": trainer.total_tokens(),
        "hours": trainer.progress.seconds / 3600,
        "processes": trainer.args.world_size,
        "device": trainer.args.device.type,
        "best_tau": state.best_metric,
        "best_update": getattr(state, "best_global_step", None) or None,
        "losses": [
            {"step": e["step"], "loss": e["loss"]} for e in state.log_history if "loss" in e and "learning_rate" in e
        ][-100:],
        "evaluation": next((e for e in reversed(state.log_history) if "eval_tau" in e), None),
        "generation": next((e for e in reversed(state.log_history) if "eval_generate_tau" in e), None),
    }
    stopped = trainer.stop.requested or trainer.stopped_by_peer
    finished = not stopped or state.global_step >= state.max_steps
    sharded = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        write_whole(output / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in state.log_history).encode())
        write_whole(output / NUMBERS, (json.dumps(numbers, indent=1) + "\n").encode())
        try:
            plot_training(state.log_history, output / CURVES)
        except (ImportError, ValueError) as error:
            logger.warning("no curves: %s", error)
        if finished:
            draft = trainer.draft_copy(sharded).to(getattr(torch, recipe.draft.dtype))
            draft.save_pretrained(output / DRAFT)
            write_whole(output / DRAFT / "README.md", training_card(recipe, draft, numbers).encode())
    trainer.accelerator.wait_for_everyone()
    return RunResult(state.global_step, finished, trainer.stop.signal, output / DRAFT if finished else None, numbers)
