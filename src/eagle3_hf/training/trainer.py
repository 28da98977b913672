"""`Eagle3Trainer`: a `transformers.Trainer` for drafts.

The loop, devices, mixed precision, data parallelism, logging and callbacks are the `Trainer`'s. What is changed:

* batches come from one endless stream that depends on the data and the seed alone (`batches.py`);
* an update is the mean over its whole global batch, for any split over processes and micro-batches;
* checkpoints are whole or don't count (`checkpointing.py`), and resuming continues the same loss curve;
* evaluation measures acceptance length instead of loss alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from .acceptance import AcceptanceCounts
from .batches import BatchPlan, CountingCollator, StreamSampler, pack_by_length
from .checkpointing import is_complete, last_checkpoint, load_weights, mark_complete, rotate, unmark
from .interrupt import StopRequest
from .progress import DivergedError, Progress, diverged

__all__ = ["DivergedError", "Eagle3Trainer"]

logger = logging.getLogger(__name__)

STATE = "eagle3_state.json"


class _StopWhenAsked(TrainerCallback):
    """Ends training after an update, with a checkpoint, once a signal or another process asked for it."""

    def __init__(self, trainer: Eagle3Trainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.trainer.stop_asked():
            control.should_save = control.should_training_stop = True
        return control


class Eagle3Trainer(Trainer):
    """Trains an [`Eagle3TrainingModule`] (or a module of the same interface).

    Args:
        module: what is trained.
        args: see [`check_arguments`]; `max_steps` must be set.
        plan: the batches.
        train_dataset: item `i` is document `i` of the plan, a dict with `input_ids`.
        collate: documents to a batch.
        held_out: documents to evaluate on, or `None`.
        step_weights: one a step.
        measure_every: updates between two looks at the training accuracy.
        chain: draft tokens a round in the simulated acceptance length.
        complete_batch: called with each batch on its device (online features); `None`: batches are complete.
        generate: `generate(draft) -> metrics`, on the main process; see `generate_every`.
        generate_every: updates between two calls of `generate`, 0 for never.
    """

    def __init__(
        self,
        module: Any,
        args: TrainingArguments,
        plan: BatchPlan,
        train_dataset: Dataset,
        collate: Callable[[list], dict[str, torch.Tensor]],
        held_out: Dataset | None = None,
        *,
        step_weights: Sequence[float],
        measure_every: int = 5,
        chain: int = 4,
        complete_batch: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        generate: Callable[[Any], dict[str, float]] | None = None,
        generate_every: int = 0,
        callbacks: list[TrainerCallback] | None = None,
    ):
        if args.max_steps < 1:
            raise ValueError("max_steps must be set: use plan_updates(args, plan)")
        args.logging_nan_inf_filter = False  # it would hide what check_finite looks for
        args.remove_unused_columns = False
        super().__init__(
            model=module, args=args, train_dataset=train_dataset, eval_dataset=held_out, callbacks=callbacks
        )
        self.plan, self.collate = plan, CountingCollator(collate)
        self.step_weights = torch.tensor(list(step_weights), dtype=torch.float32)
        self.measure_every, self.chain = measure_every, chain
        self.complete_batch, self.generate, self.generate_every = complete_batch, generate, generate_every
        self.stop = StopRequest()
        self._stop_flag: torch.Tensor | None = None
        self._stop_event: Any = None
        self.progress = Progress(len(self.step_weights), self._sum_over_processes)
        # Our loss is scaled for accumulation already; both of transformers' lines then leave it as it is.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.can_return_loss = True
        self.add_callback(_StopWhenAsked(self))

    # Batches

    @property
    def batches_per_update(self) -> int:
        """Batches of the plan that one update takes, over all processes."""
        return self.args.gradient_accumulation_steps * self.args.world_size

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate: the sampler gives each process its own batches."""
        sampler = StreamSampler(
            self.plan,
            self.args.max_steps * self.args.gradient_accumulation_steps,
            self.args.process_index,
            self.args.world_size,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The micro-batches of an update, and how many slots each step trains on in all of them, on all processes."""
        batches, slots = [], []
        for batch in epoch_iterator:
            self.progress.tokens += int(batch.pop("tokens"))
            if self.complete_batch is not None:
                batch = self.complete_batch(self._prepare_input(batch))
            slots.append(self._unwrapped().count_slots(batch, len(self.step_weights)).cpu())
            batches.append(batch)
            if len(batches) == num_batches:
                break
        if not batches:
            return [], torch.zeros(len(self.step_weights), device=device)
        # The wish to stop travels with the counts, so that all processes stop after the same update.
        counts = torch.cat([torch.stack(slots).sum(0), torch.tensor([float(self.stop.requested)])])
        counts = self._sum_over_processes(counts.to(device))
        self._stop_flag = counts[-1:].to("cpu", non_blocking=True)
        if counts.is_cuda:
            self._stop_event = torch.cuda.Event()
            self._stop_event.record()
        return batches, counts[:-1]

    def stop_asked(self) -> bool:
        """Whether any process was asked to stop; the same answer on all of them."""
        if self.args.world_size == 1:
            return self.stop.requested
        if self._stop_event is not None:
            self._stop_event.synchronize()  # recorded before the forward: long reached
        return self._stop_flag is not None and bool(self._stop_flag.item())

    @property
    def stopped_by_peer(self) -> bool:
        """Whether the run ended because some process was asked to stop."""
        return self.args.world_size > 1 and self._stop_flag is not None and bool(self._stop_flag.item())

    def total_tokens(self) -> int:
        """Real tokens trained on so far, by all processes and in all starts; a collective call."""
        return self.progress.gather()[1]

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device of `tensor`; the sum itself is made where the backend wants it."""
        if self.args.world_size == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.args.device), "sum").to(tensor.device)

    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # Loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """This micro-batch's share of the update's loss, times the number of processes (which averaging divides by)."""
        # Averaging over processes divides by their number, so each divides by that much less.
        denominators = None
        if num_items_in_batch is not None:
            denominators = num_items_in_batch.clamp(min=1) / self.args.world_size
        measure = self.state.global_step % self.measure_every == 0
        outputs = model(inputs, self.step_weights.to(inputs["input_ids"].device), denominators, measure)
        self.progress.add(loss=outputs["sums"], slots=outputs["slots"])
        if measure:
            self.progress.add(scored=outputs["scored"], correct=outputs["correct"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch. On a CPU a loss that isn't finite is an error at once, elsewhere when it is next logged."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.device.type == "cpu":
            self._check_finite(float(loss), "the loss")
        return loss

    def _check_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise diverged(value, what, self.state.global_step, last_checkpoint(self.args.output_dir))

    # Logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds loss and accuracy of each step, tokens, tokens/s and the true epoch to what the `Trainer` logs."""
        if self.state.epoch is not None:  # the `Trainer` sees one endless epoch
            self.state.epoch = self.plan.epochs_after(self.state.global_step * self.batches_per_update)
        if "loss" in logs and "learning_rate" in logs:
            line = self.progress.log_line(self.step_weights)
            self._check_finite(line["loss"], "the loss")
            logs.update(line)
        super().log(logs, start_time)

    # Evaluation

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Held-out loss, accuracy of each step and simulated acceptance length, and at times real `generate()`.

        Raises:
            ValueError: nothing is held out.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None or not len(dataset):
            raise ValueError("nothing is held out to evaluate on: set data.held_out, or training.eval_strategy: no")
        running = self.progress.pause()
        counts = self._count_acceptance(dataset)
        metrics = counts.metrics()
        if not metrics:
            raise ValueError("no held-out document has an answer token to evaluate on")
        if self.generate is not None and self.generate_every and self.state.global_step % self.generate_every == 0:
            metrics |= self._generate()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if running:
            self.progress.start()
        return metrics

    def _count_acceptance(self, dataset: Any) -> AcceptanceCounts:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        model = self.model_wrapped if sharded else self._unwrapped()
        training = model.training
        model.eval()
        lengths = [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        batches = pack_by_length(order, lengths, self.plan.budget)
        rank, world = self.args.process_index, self.args.world_size
        counts = AcceptanceCounts(torch.zeros(6, self.chain, dtype=torch.float64))
        for at in range(0, len(batches), world):
            # All processes make the same number of forwards, as sharded models need; surplus ones don't count.
            mine = batches[at + rank] if at + rank < len(batches) else batches[0]
            batch = self.collate([dataset[i] for i in mine])
            batch.pop("tokens")
            batch = self._prepare_input(batch)
            if self.complete_batch is not None:
                batch = self.complete_batch(batch)
            with self.accelerator.autocast():
                out = model(batch, torch.ones(self.chain, device=self.args.device), None, True, True)
            if at + rank < len(batches):
                names = ("scored", "correct", "reached", "right", "slots", "sums")
                counts.add(torch.stack([out[name].cpu().double() for name in names]))
        model.train(training)
        counts.table = self._sum_over_processes(counts.table)
        return counts

    def _generate(self) -> dict[str, float]:
        """Real generation with a copy of the draft on the main process; the others wait."""
        state = self.accelerator.get_state_dict(self.model_wrapped) if self.is_fsdp_enabled else None
        metrics: dict[str, float] = {}
        if self.is_world_process_zero():
            # Generation leaves the random numbers of training alone.
            with torch.random.fork_rng(enabled=True):
                metrics = self.generate(self.draft_copy(state))  # type: ignore[misc]
        self.accelerator.wait_for_everyone()
        return metrics

    def draft_copy(self, state: dict[str, torch.Tensor] | None = None) -> Any:
        """The draft as it is now, its own weights, in eval mode. `state`: of a sharded module, gathered."""
        draft = self._unwrapped().draft
        fresh = type(draft)(draft.config).to(draft.dtype)
        source = draft.state_dict() if state is None else {k.removeprefix("draft."): v for k, v in state.items()}
        fresh.load_state_dict(source)
        fresh.generation_config = draft.generation_config
        return fresh.to(self.args.device).eval()

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`. SIGINT and SIGTERM end it after the update that runs, with a checkpoint.

        Args:
            resume_from_checkpoint: a folder; or True for the newest complete one in `output_dir`, from the start if
                there is none.

        Raises:
            ValueError: the checkpoint isn't whole, or of other data or another number of batches an update.
            DivergedError: the loss isn't finite any more.
        """
        if resume_from_checkpoint is True:
            found = last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = None if found is None else str(found)
        if resume_from_checkpoint:
            self._restore(Path(resume_from_checkpoint))
        self.stop = StopRequest()
        with self.stop:
            self.progress.start()
            try:
                return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)
            finally:
                self.progress.pause()

    def _restore(self, folder: Path) -> None:
        if not is_complete(folder):
            raise ValueError(f"{folder} is no complete checkpoint: a process may have ended while it wrote it")
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
        mine = {"plan": self.plan.fingerprint, "batches_per_update": self.batches_per_update}
        for name, value in mine.items():
            if record[name] != value:
                what = {
                    "plan": "the training documents, data.tokens_per_batch, data.window or the seed",
                    "batches_per_update": "processes x gradient_accumulation_steps",
                }[name]
                raise ValueError(
                    f"{folder} can't be continued exactly: {what} changed ({record[name]} then, {value} now). Put it "
                    "back, or start a new run with draft.initialise set to this folder"
                )
        self.progress.restore(record["progress"], lead=self.args.process_index == 0)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint that counts only once all of it is there."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self._check_finite(self._weights_norm(), "the norm of the draft's weights")
        if self.args.should_save:
            unmark(folder)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        progress = self.progress.record()
        self.accelerator.wait_for_everyone()  # every process has written its random state
        if self.args.should_save:
            record = {
                "plan": self.plan.fingerprint,
                "batches_per_update": self.batches_per_update,
                "progress": progress,
            }
            (folder / STATE).write_text(json.dumps(record), encoding="utf-8")
            mark_complete(folder)
            rotate(self.args.output_dir, limit, self.state.best_model_checkpoint)

    def _weights_norm(self) -> float:
        """Finite only if all weights of this process are."""
        sums = [p.detach().float().abs().amax() for p in self.model.parameters() if p.requires_grad and p.numel()]
        return float(torch.stack([getattr(s, "to_local", lambda s=s: s)() for s in sums]).sum()) if sums else 0.0

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.args.should_save:
            return
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        self._unwrapped().save_pretrained(folder, state_dict=state_dict)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_weights(self._unwrapped().draft, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.device.type != "cpu":
            return super()._load_optimizer_and_scheduler(checkpoint)
        # transformers 4.57 loads to `cpu:0` in several processes on CPUs, a place that torch doesn't know.
        for name, part in (("optimizer.pt", self.optimizer), ("scheduler.pt", self.lr_scheduler)):
            part.load_state_dict(torch.load(os.path.join(checkpoint, name), map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_best_model()
        logger.info("best: %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted."""
        return 0
