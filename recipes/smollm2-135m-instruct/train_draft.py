"""Train an EAGLE-3 draft on stored features, on the CPU, resumable.

    python recipes/smollm2-135m-instruct/train_draft.py --features WORK/features --out WORK/run --max-minutes 120

`--out` gets `checkpoint.pt` (fp32 weights, optimiser, position), `draft/` (bf16, ready for `from_pretrained`) and
`metrics.jsonl`. The same command continues where the checkpoint was written; SIGTERM writes one and ends.
"""

import argparse
import copy
import json
import logging
import math
import os
import shutil
import signal
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eagle3_hf.configuration_eagle3 import Eagle3Config
from eagle3_hf.modeling_eagle3 import Eagle3DraftModel
from eagle3_hf.resolve import resolve_model
from eagle3_hf.training.objective import TrainingTimeTest, shift, training_time_test

logger = logging.getLogger("train_draft")
MEASURE_EVERY = 5  # updates whose training accuracy is looked at
CHAIN = 4  # drafted tokens a round in the simulated acceptance length


class Documents:
    """All shards of a feature folder; tensors are memory-mapped, so only the pages in use take memory."""

    def __init__(self, folder: Path, held_out: float):
        paths = sorted(folder.glob("shard-*.safetensors"))
        if not paths:
            raise SystemExit(f"no shard-*.safetensors in {folder}: run extract_features.py first")
        with safe_open(paths[0], "pt") as file:
            self.aux_layers = json.loads(file.metadata()["aux_layers"])
        self.shards = [load_file(path) for path in paths]
        self.places: list[tuple[int, int, int]] = []
        self.train: list[int] = []
        self.held_out: list[int] = []
        self.greedy: list[bool] = []
        for number, shard in enumerate(self.shards):
            offsets = shard["offsets"].tolist()
            for row, index in enumerate(shard["index"].tolist()):
                # By a hash of the prompt's index: a document stays held out when the data grows.
                share = (index * 2654435761 % 2**32) / 2**32
                (self.held_out if share < held_out else self.train).append(len(self.places))
                self.places.append((number, offsets[row], offsets[row + 1]))
                self.greedy.append(bool(shard["greedy"][row]))

    def length(self, document: int) -> int:
        _, start, end = self.places[document]
        return end - start

    def column(self, document: int, name: str) -> torch.Tensor:
        number, start, end = self.places[document]
        return self.shards[number][name][start:end]

    def batch(self, documents: list[int]) -> dict[str, torch.Tensor]:
        """Right-padded tensors of `documents`; features in bf16, whose range their outliers need no scaling for."""
        width = max(self.length(document) for document in documents)

        def pad(name: str, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            parts = [self.column(document, name) for document in documents]
            out = torch.full((len(parts), width, *parts[0].shape[1:]), fill, dtype=dtype)
            for row, part in enumerate(parts):
                out[row, : len(part)] = part
            return out

        return {
            "features": pad("aux", torch.bfloat16),
            "teacher_hidden": pad("final", torch.bfloat16),
            "input_ids": pad("ids", torch.long),
            "teacher_argmax": pad("argmax", torch.long, -1),
            "loss_mask": pad("answer", torch.bool),
        }

    def plan(self, epoch: int, seed: int, budget: int, window: int = 256) -> list[list[int]]:
        """The batches of an epoch, a function of its arguments only, so that a resumed run can find its place."""
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = [self.train[i] for i in torch.randperm(len(self.train), generator=generator).tolist()]
        batches = []
        for at in range(0, len(order), window):
            current: list[int] = []
            for document in sorted(order[at : at + window], key=self.length):
                now, then = len(current) * self.length(current[-1]) if current else 0, self.length(document)
                if current and (len(current) + 1) * then - budget > budget - now:
                    batches.append(current)
                    current = []
                current.append(document)
            if current:
                batches.append(current)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def choose_vocabulary(
    data: Documents, answers: Path | None, size: int, vocab_size: int, always: list[int]
) -> torch.Tensor:
    """The `size` most frequent answer tokens, `always` included, ascending.

    Counted in the training documents, or in the whole answers file where it is given: a run that starts before all
    features are there then has the vocabulary it would have had with them.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    if answers is not None:
        for line in answers.open():
            if line.endswith("\n"):
                counts += torch.bincount(torch.tensor(json.loads(line)["answer"]), minlength=vocab_size)
    else:
        for document in data.train:
            ids, answer = data.column(document, "ids"), data.column(document, "answer")
            counts += torch.bincount(ids[answer].long(), minlength=vocab_size)
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    # Stable: where counts are equal (also none at all) the lower id, the earlier merge of the tokenizer, goes first.
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    covered = counts[chosen].sum() / counts.sum()
    seen = int((counts > 0).sum())
    logger.info("draft vocabulary: %d of %d seen tokens, %.2f %% of answer tokens", size, seen, 100 * covered)
    return chosen


def new_draft(target: torch.nn.Module, aux_layers: list[int], vocabulary: torch.Tensor, fc_noise: float):
    """A draft that starts as the target's last layer and head, fed with the highest aux state."""
    source = target.config
    config = Eagle3Config(
        vocab_size=source.vocab_size,
        draft_vocab_size=len(vocabulary),
        hidden_size=source.hidden_size,
        target_num_hidden_layers=source.num_hidden_layers,
        intermediate_size=source.intermediate_size,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None),
        hidden_act=source.hidden_act,
        rms_norm_eps=source.rms_norm_eps,
        max_position_embeddings=source.max_position_embeddings,
        aux_hidden_state_layers=aux_layers,
        rope_theta=(getattr(source, "rope_parameters", None) or {}).get("rope_theta") or source.rope_theta,
    )
    draft = Eagle3DraftModel(config)
    draft.set_draft_vocabulary(vocabulary)
    size, last = source.hidden_size, target.model.layers[-1]
    layer = draft.layers[0]
    with torch.no_grad():
        draft.fc.weight.normal_(std=fc_noise)
        draft.fc.weight[:, -size:] += torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            # First half reads the embedding, for which the target has no counterpart; second half the hidden state.
            weight = getattr(layer.self_attn, name).weight
            weight[:, :size].normal_(std=0.02)
            weight[:, size:] = getattr(last.self_attn, name).weight
        layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        layer.mlp.load_state_dict(last.mlp.state_dict())
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary])
    return draft


def chain_acceptance(result: TrainingTimeTest, answer: torch.Tensor) -> tuple[list[int], list[int]]:
    """Over slots where generation drafts: how often step k was reached (all before right), and then right."""
    # Generation has sampled token t+1 when it drafts from slot t.
    alive = shift(answer, 1)
    reached, right = [], []
    for scored, correct in zip(result.scored, result.correct):
        alive = alive & scored
        reached.append(int(alive.sum()))
        alive = alive & correct
        right.append(int(alive.sum()))
    return reached, right


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.stop = False
        self.data = Documents(args.features, args.held_out)
        target = AutoModelForCausalLM.from_pretrained(resolve_model(args.target), dtype=torch.float32).eval()
        self.embeddings = target.get_input_embeddings().requires_grad_(False)
        self.update = self.tokens = self.epoch = self.batch = 0
        self.minutes = 0.0
        args.out.mkdir(parents=True, exist_ok=True)
        self.path = args.out / "checkpoint.pt"
        state = torch.load(self.path, map_location="cpu", weights_only=True) if self.path.exists() else None
        if state is None:
            torch.manual_seed(args.seed)
            eos = target.generation_config.eos_token_id
            always = eos if isinstance(eos, list) else [eos]
            vocabulary = choose_vocabulary(self.data, args.answers, args.draft_vocab, target.config.vocab_size, always)
        else:
            vocabulary = state["vocabulary"]
        self.draft = new_draft(target, self.data.aux_layers, vocabulary, args.fc_noise).train()
        self.vocabulary = vocabulary
        self.teacher_head = target.get_output_embeddings().weight.detach()[vocabulary].to(torch.bfloat16)
        del target
        matrices = [p for p in self.draft.parameters() if p.ndim > 1]
        norms = [p for p in self.draft.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        if state is not None:
            self._restore(state)
        greedy = [document for document in self.data.held_out if self.data.greedy[document]]
        # Greedy answers only: there the real tokens are the teacher's choices, so a chain of them is a real draft.
        self.evaluation = sorted(greedy[: args.eval_documents], key=self.data.length)
        logger.info(
            "%d training and %d held-out documents, %d evaluated, %.1fM parameters",
            len(self.data.train),
            len(self.data.held_out),
            len(self.evaluation),
            sum(p.numel() for p in self.draft.parameters()) / 1e6,
        )

    def _restore(self, state: dict) -> None:
        self.draft.load_state_dict(state["draft"])
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])
        self.update, self.tokens, self.minutes = state["update"], state["tokens"], state["minutes"]
        self.epoch, self.batch = state["epoch"], state["batch"]
        if state["documents"] != len(self.data.train):
            logger.warning(
                "training documents: %d before, %d now; starting a new epoch", state["documents"], len(self.data.train)
            )
            self.epoch, self.batch = self.epoch + 1, 0
        logger.info("continuing at update %d, epoch %d, %.1f minutes trained", self.update, self.epoch, self.minutes)

    def save(self) -> None:
        state = {
            "draft": self.draft.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "vocabulary": self.vocabulary,
            "documents": len(self.data.train),
            **{name: getattr(self, name) for name in ("update", "tokens", "minutes", "epoch", "batch")},
        }
        scratch = self.path.with_suffix(".tmp")
        torch.save(state, scratch)
        os.replace(scratch, self.path)
        # A folder can't be replaced in one step; the checkpoint above is what counts.
        folder, fresh, old = (self.args.out / name for name in ("draft", "draft.tmp", "draft.old"))
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        copy.deepcopy(self.draft).eval().to(torch.bfloat16).save_pretrained(fresh)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        logger.info("saved at update %d", self.update)

    def note(self, **values) -> None:
        with (self.args.out / "metrics.jsonl").open("a") as out:
            out.write(
                json.dumps({"update": self.update, "tokens": self.tokens, "minutes": self.minutes, **values}) + "\n"
            )

    def objective(self, batch: dict[str, torch.Tensor], steps: int, measure: bool = True) -> TrainingTimeTest:
        with torch.autocast("cpu", torch.bfloat16):
            return training_time_test(
                self.draft,
                batch["features"],
                self.embeddings,
                batch["input_ids"],
                batch["loss_mask"],
                teacher_hidden=batch["teacher_hidden"],
                teacher_head=self.teacher_head,
                teacher_argmax=batch["teacher_argmax"],
                steps=steps,
                step_weights=[self.args.step_decay**k for k in range(steps)],
                measure=measure,
            )

    @torch.no_grad()
    def evaluate(self) -> None:
        if not self.evaluation:
            logger.warning("no greedy held-out document to evaluate on")
            return
        self.draft.eval()
        right, scored, loss = [0] * CHAIN, [0] * CHAIN, 0.0
        chain_right, chain_reached = [0] * CHAIN, [0] * CHAIN
        for at in range(0, len(self.evaluation), 4):
            batch = self.data.batch(self.evaluation[at : at + 4])
            result = self.objective(batch, CHAIN)
            reached, kept = chain_acceptance(result, batch["loss_mask"])
            for k in range(CHAIN):
                right[k] += int(result.correct[k].sum())
                scored[k] += int(result.scored[k].sum())
                chain_reached[k] += reached[k]
                chain_right[k] += kept[k]
            loss += float(result.losses[0]) * int(result.scored[0].sum())
        self.draft.train()
        accuracy = [a / max(b, 1) for a, b in zip(right, scored)]
        conditional = [a / max(b, 1) for a, b in zip(chain_right, chain_reached)]
        tau = 1 + sum(math.prod(conditional[: k + 1]) for k in range(CHAIN))
        loss /= max(scored[0], 1)
        logger.info(
            "held-out: loss %.3f, accuracy %s, conditional %s, simulated tau %.3f",
            loss,
            " ".join(f"{a:.3f}" for a in accuracy),
            " ".join(f"{a:.3f}" for a in conditional),
            tau,
        )
        self.note(kind="eval", loss=loss, accuracy=accuracy, conditional=conditional, tau=tau)

    def fraction(self) -> float:
        """Share of the budget used, 0..1."""
        shares = [0.0]
        if self.args.max_minutes:
            shares.append(self.minutes / self.args.max_minutes)
        if self.args.max_steps:
            shares.append(self.update / self.args.max_steps)
        return min(max(shares), 1.0)

    def learning_rate(self) -> float:
        args, done = self.args, self.fraction()
        # Not from zero: with a budget in minutes the first update is at fraction zero exactly.
        warm = min(done / args.warmup, 1.0) if args.warmup else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * max(done - args.warmup, 0) / (1 - args.warmup)))
        return args.lr * max(warm, 0.01) * (0.05 + 0.95 * cosine)

    def train_batch(self, documents: list[int]) -> tuple[TrainingTimeTest, float, float]:
        batch = self.data.batch(documents)
        rate = self.learning_rate()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        result = self.objective(batch, self.args.steps, measure=self.update % MEASURE_EVERY == 0)
        self.optimiser.zero_grad(set_to_none=True)
        result.loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.args.clip))
        if math.isfinite(norm):
            self.optimiser.step()
        else:
            logger.warning("update %d left out: gradient norm %s", self.update, norm)
        self.tokens += sum(self.data.length(document) for document in documents)
        self.update += 1
        return result, rate, norm

    def run(self) -> None:
        args = self.args
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        if self.update == 0:
            self.evaluate()
        spent, start = self.minutes, time.time()
        saved, logged, logged_tokens = time.time(), time.time(), self.tokens
        losses, accuracies, norms = [], [], []
        plan = self.data.plan(self.epoch, args.seed, args.tokens_per_update)
        while self.fraction() < 1 and not self.stop:
            if self.batch >= len(plan):
                self.epoch, self.batch = self.epoch + 1, 0
                plan = self.data.plan(self.epoch, args.seed, args.tokens_per_update)
                logger.info("epoch %d, %d updates", self.epoch, len(plan))
            documents = plan[self.batch]
            self.batch += 1
            result, rate, norm = self.train_batch(documents)
            self.minutes = spent + (time.time() - start) / 60
            losses.append([float(loss) for loss in result.losses])
            if result.correct:
                accuracies.append(result.accuracy)
            norms.append(norm)
            if self.update % args.log_every == 0:
                now = time.time()
                speed = (self.tokens - logged_tokens) / (now - logged)
                loss, accuracy = ([sum(x) / len(x) for x in zip(*table)] for table in (losses, accuracies))
                logger.info(
                    "update %d (%.1f %%), lr %.2e, loss %s, accuracy %s, gradient %.2f, %.0f tokens/s",
                    self.update,
                    100 * self.fraction(),
                    rate,
                    " ".join(f"{x:.2f}" for x in loss),
                    " ".join(f"{x:.3f}" for x in accuracy),
                    sum(norms) / len(norms),
                    speed,
                )
                gradient = sum(norms) / len(norms)
                self.note(
                    kind="train", lr=rate, loss=loss, accuracy=accuracy, gradient=gradient, tokens_per_second=speed
                )
                losses, accuracies, norms = [], [], []
                logged, logged_tokens = now, self.tokens
            if self.update % args.eval_every == 0:
                self.evaluate()
                logged, logged_tokens = time.time(), self.tokens
            if time.time() - saved > args.save_minutes * 60:
                self.save()
                saved = logged = time.time()
                logged_tokens = self.tokens
        self.save()
        if not self.stop:
            self.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--features", type=Path, required=True, help="folder written by extract_features.py")
    parser.add_argument("--answers", type=Path, help="count the draft vocabulary here instead of in the features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4, help="steps of the training-time test")
    parser.add_argument("--step-decay", type=float, default=0.8, help="step k weighs this to the power of k")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=float, default=0.02, help="share of the budget")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--fc-noise", type=float, default=1e-3, help="standard deviation around fc's identity")
    parser.add_argument("--tokens-per-update", type=int, default=512, help="padded tokens, prompt included")
    parser.add_argument("--max-minutes", type=float, default=0.0, help="training time over all starts")
    parser.add_argument("--max-steps", type=int, default=0, help="updates over all starts")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the documents")
    parser.add_argument("--eval-documents", type=int, default=48)
    parser.add_argument("--eval-every", type=int, default=250, help="updates")
    parser.add_argument("--log-every", type=int, default=25, help="updates")
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.max_minutes and not args.max_steps:
        parser.error("set a budget: --max-minutes or --max-steps")
    Trainer(args).run()


if __name__ == "__main__":
    main()
