"""Let the target answer the training prompts (on-policy data), many streams at a time, resumable.

    python recipes/smollm2-135m-instruct/answer_prompts.py --prompts prompts.jsonl --out WORK/answers.jsonl

A stream that ends makes room for the next prompt at once, so the batch stays full. Finished answers are appended a
line each; a new start skips the prompts that have one.
"""

import argparse
import inspect
import json
import logging
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf.decoding.cache import SpeculativeCache
from eagle3_hf.resolve import resolve_model

logger = logging.getLogger("answer_prompts")


class Streams:
    """A fixed number of sequences decoded together; each has its own length in one SpeculativeCache."""

    def __init__(self, model, count, max_length, eos, temperature, generator):
        self.model, self.count, self.max_length, self.eos = model, count, max_length, eos
        self.temperature, self.generator = temperature, generator
        self.cache = SpeculativeCache(model.config.num_hidden_layers)
        self.cache.lengths = [0] * count
        self.cache.capacity_for(max_length)
        self.jobs = [None] * count
        self.next_token = torch.zeros(count, dtype=torch.long)
        names = inspect.signature(model.forward).parameters
        self.cache_kwarg = "cache" if "cache" in names else "past_key_values"

    def forward(self, ids, positions, mask, cache, **kwargs):
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self.cache_kwarg: cache},
            **kwargs,
        )

    def pick(self, logits, greedy):
        token = logits.argmax(-1)
        if not greedy.all():
            # Inverse transform sampling: one uniform a row instead of one exponential a vocabulary entry.
            mass = (logits[~greedy].float() / self.temperature).softmax(-1).cumsum(-1)
            uniform = torch.rand(len(mass), 1, generator=self.generator) * mass[:, -1:]
            token[~greedy] = torch.searchsorted(mass, uniform)[:, 0].clamp(max=logits.shape[-1] - 1)
        return token

    def admit(self, rows, jobs):
        """Prefill `jobs` together (right-padded) and put their keys and values into free `rows`."""
        lengths = [len(job["ids"]) for job in jobs]
        width = max(lengths)
        ids = torch.tensor([job["ids"] + [0] * (width - n) for job, n in zip(jobs, lengths)])
        fresh = SpeculativeCache(self.model.config.num_hidden_layers)
        fresh.begin_write(None, width, batch=len(jobs))
        positions = torch.arange(width)[None].expand(len(jobs), -1)
        hidden = self.model.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{self.cache_kwarg: fresh}
        ).last_hidden_state
        last = hidden[torch.arange(len(jobs)), torch.tensor(lengths) - 1]
        token = self.pick(self.model.lm_head(last), torch.tensor([job["greedy"] for job in jobs]))
        index = torch.tensor(rows)
        for layer, new in zip(self.cache.layers, fresh.layers):
            if not layer.is_initialized:
                blank = new.keys.new_zeros(self.count, *new.keys.shape[1:])
                layer.lazy_initialization(blank, blank)
            layer.keys[index, :, :width] = new.keys[:, :, :width]
            layer.values[index, :, :width] = new.values[:, :, :width]
        self.next_token[index] = token
        for row, job, n, first in zip(rows, jobs, lengths, token.tolist()):
            self.jobs[row] = {**job, "answer": [first]}
            self.cache.lengths[row] = n

    def step(self):
        lengths = torch.tensor(self.cache.lengths)
        self.cache.begin_write(lengths[:, None], 1)
        mask = (torch.arange(self.cache.used)[None] <= lengths[:, None])[:, None, None]
        logits = self.forward(self.next_token[:, None], lengths[:, None], mask, self.cache).logits[:, -1]
        greedy = torch.tensor([job is None or job["greedy"] for job in self.jobs])
        self.next_token = self.pick(logits, greedy)
        done = []
        for row, token in enumerate(self.next_token.tolist()):
            job = self.jobs[row]
            if job is None:
                continue
            self.cache.lengths[row] += 1
            job["answer"].append(token)
            if (
                token == self.eos
                or len(job["answer"]) >= job["budget"]
                or self.cache.lengths[row] >= self.max_length - 1
            ):
                done.append(job)
                self.jobs[row] = None
                self.cache.lengths[row] = 0
        self.cache.set_lengths(self.cache.lengths)
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=200, help="longer prompts are left out")
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--greedy-share", type=float, default=0.6)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=0, help="stop after this many answer tokens (0: all prompts)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    path = resolve_model(args.target)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # bf16 here only: the answers are training text, not a claim of exactness.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(args.seed)
    done_already = set()
    if args.out.exists():
        done_already = {json.loads(line)["index"] for line in args.out.open()}
    prompts = [json.loads(line) for line in args.prompts.open()]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(args.seed)).tolist()
    draws = torch.rand(len(prompts), generator=torch.Generator().manual_seed(args.seed + 1)).tolist()

    def jobs():
        for index in order:
            if index in done_already:
                continue
            chat = [{"role": "user", "content": prompts[index]["prompt"]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if len(ids) <= args.max_prompt:
                yield {"index": index, "ids": ids, "greedy": draws[index] < args.greedy_share, "budget": args.max_new}

    queue = jobs()
    streams = Streams(
        model, args.streams, args.max_prompt + args.max_new + 1, tokenizer.eos_token_id, args.temperature, generator
    )
    written, steps, start = 0, 0, time.time()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    exhausted = False
    with torch.inference_mode(), args.out.open("a") as out:
        while True:
            free = [row for row, job in enumerate(streams.jobs) if job is None]
            if not exhausted and len(free) >= min(16, args.streams):
                batch = [job for job, _ in zip(queue, free)]
                exhausted = len(batch) < len(free)
                if batch:
                    streams.admit(free[: len(batch)], batch)
            if all(job is None for job in streams.jobs):
                break
            for job in streams.step():
                record = {key: job[key] for key in ("index", "greedy", "ids", "answer")}
                out.write(json.dumps(record) + "\n")
                written += len(job["answer"])
            steps += 1
            if steps % 100 == 0:
                out.flush()
                logger.info("%d answer tokens, %.0f tokens/s", written, written / (time.time() - start))
            if args.max_tokens and written >= args.max_tokens:
                break


if __name__ == "__main__":
    main()
