"""Section `training` of a recipe as `transformers.TrainingArguments`."""

from __future__ import annotations

import logging
from typing import Any

from .recipe import Recipe

logger = logging.getLogger(__name__)

_REFUSED = {
    "per_device_train_batch_size": "batches are cut by tokens: set data.tokens_per_batch",
    "per_device_eval_batch_size": "batches are cut by tokens: set data.tokens_per_batch",
    "auto_find_batch_size": "batches are cut by tokens: set data.tokens_per_batch",
    "group_by_length": "documents are grouped by length already: data.window says among how many",
    "train_sampling_strategy": "the order of documents is the trainer's own, so that resuming finds its place",
    "ignore_data_skip": "resuming would train on other batches than an uninterrupted run",
    "save_only_model": "there would be nothing to resume from",
    "resume_from_checkpoint": "use --resume",
    "label_smoothing_factor": "there are no labels: the draft learns the target's distribution",
    "neftune_noise_alpha": "it hooks into the trained model's embeddings, which a draft hasn't",
    "push_to_hub": "publish the finished draft with draft.push_to_hub()",
    "remove_unused_columns": "batches are the trainer's own",
    "logging_nan_inf_filter": "a loss that isn't finite is an error",
    "use_liger_kernel": "it patches models by class, and knows no drafts",
    "metric_for_best_model": "the best draft is the one of the highest tau",
    "greater_is_better": "the best draft is the one of the highest tau",
    "label_names": "there are no labels",
    "include_for_metrics": "evaluation counts tokens itself",
    "batch_eval_metrics": "evaluation counts tokens itself",
    "eval_accumulation_steps": "evaluation keeps no logits",
    "eval_do_concat_batches": "evaluation keeps no logits",
    "eval_use_gather_object": "evaluation keeps no logits",
    "prediction_loss_only": "evaluation keeps no logits",
    "fp16_full_eval": "evaluation computes as training does",
    "bf16_full_eval": "evaluation computes as training does",
    "dataloader_drop_last": "batches are cut by tokens from one endless stream: there is no last one",
    "length_column_name": "documents are grouped by length already: data.window says among how many",
    "include_num_input_tokens_seen": "tokens are counted and logged always",
    "average_tokens_across_devices": "an update is always the mean over the global batch",
    "do_predict": "a recipe only trains",
    "hub_model_id": "publish the finished draft with draft.push_to_hub()",
    "hub_strategy": "publish the finished draft with draft.push_to_hub()",
    "hub_token": "publish the finished draft with draft.push_to_hub()",
    "hub_private_repo": "publish the finished draft with draft.push_to_hub()",
    "hub_always_push": "publish the finished draft with draft.push_to_hub()",
    "hub_revision": "publish the finished draft with draft.push_to_hub()",
}


def training_arguments(recipe: Recipe) -> Any:
    """Make `TrainingArguments`: the recipe's values over this package's defaults.

    In a process started by `torchrun` or `accelerate launch` this joins the process group.

    Raises:
        ValueError: a key that a draft's training has no use for, with the reason and what to set instead.
    """
    from transformers import HfArgumentParser, TrainingArguments

    values = dict(recipe.training)
    for name, reason in _REFUSED.items():
        if name in values:
            raise ValueError(f"training.{name} isn't supported: {reason}")
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if str(values.get(name)).lower().rpartition(".")[2] in {"epoch", "best"}:
            raise ValueError(f"training.{name}: {values[name]} isn't supported: use steps, or no")
    if "output_dir" not in values:
        raise ValueError("training.output_dir is missing: the folder for checkpoints, curves and the draft")
    if values.get("max_steps", -1) < 1 and "num_train_epochs" not in values:
        raise ValueError("say how long to train: training.max_steps or training.num_train_epochs")
    evaluates = recipe.data.held_out > 0 and bool(values.get("eval_steps"))
    defaults = {
        "report_to": "none",
        "eval_strategy": "steps" if evaluates else "no",
        "save_strategy": "steps",
        "logging_strategy": "steps",
        "disable_tqdm": True,
        # Every weight takes part in every step, and no buffer changes.
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
    }
    values = {**defaults, **values}
    if recipe.evaluation.early_stopping_patience and values["eval_strategy"] == "no":
        raise ValueError("evaluation.early_stopping_patience needs evaluations: set training.eval_steps")
    if values["eval_strategy"] != "no":
        if recipe.data.held_out == 0:
            raise ValueError("training.eval_strategy needs held-out documents: set data.held_out above 0")
        values |= {"metric_for_best_model": "tau", "greater_is_better": True}
    (args,) = HfArgumentParser(TrainingArguments).parse_dict(values)  # type: ignore[arg-type]
    if args.device.type == "cpu":
        if args.fp16:
            raise ValueError("training.fp16 is for GPUs: on a CPU set training.bf16, or neither")
        if recipe.objective.attention == "flex":
            raise ValueError("objective.attention flex can't be trained on a CPU: set auto")
    if args.n_gpu > 1:
        logger.warning("%d GPUs are visible, one is used: start with torchrun or accelerate launch for all", args.n_gpu)
        args._n_gpu = 1
    return args
