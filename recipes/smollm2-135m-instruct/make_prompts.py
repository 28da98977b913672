"""Let the target make up prompts: it is given the start of a user's turn, and writes the rest.

    python recipes/smollm2-135m-instruct/make_prompts.py --count 5000 --out WORK/made.jsonl \
        --leave-out ../shared/data/prompts

A chat model has learnt what users ask, so sampling its user turn gives prompts of the kind it is used for, open-ended
prose most of all, which few openly licensed sets have. First words steer it over kinds of requests. Prompts that share
eight words in a row with an evaluation prompt, or most of the words of a short one, are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import resolve_model
from eagle3_hf.training.masks import stop_ids_of
from eagle3_hf.training.regenerate.streams import Job, Streams

logger = logging.getLogger("make_prompts")

FIRST_WORDS = """Write|Explain|What|How|Why|Describe|Compose|Can you|Give me|Imagine|Suppose|Compare|Discuss|Draft
Create|Tell me|If|Is|Do|Which|Who|Pretend|Act as|You are|Summarize|Identify|Given|Extract|Analyze|Provide|Design
Implement|Write a Python|Write a function|Write a short story|Write a poem|Write an email|Write a blog post|Edit|Rewrite
Outline|Evaluate|What are|What is|How do|How can|Some people|Develop|Please|A person|Solve|Could you|Read the|Help me
In a|Find|Start|Argue|Name"""
RUN, SHORT, SHARED = 8, 12, 0.6


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[at : at + RUN]) for at in range(max(1, len(found) - RUN + 1))}


class LeftOut:
    """Prompts that mustn't be trained on, and those that were seen already."""

    def __init__(self, folder: Path | None):
        self.runs: set[tuple[str, ...]] = set()
        self.short: list[set[str]] = []
        self.seen: set[str] = set()
        for file in sorted(folder.glob("*.jsonl")) if folder else []:
            for line in file.read_text().splitlines():
                for turn in json.loads(line)["turns"]:
                    self.runs |= runs(turn)
                    if len(words(turn)) < SHORT:
                        self.short.append(set(words(turn)))

    def __contains__(self, text: str) -> bool:
        mine, key = set(words(text)), " ".join(words(text))
        if key in self.seen or runs(text) & self.runs:
            return True
        self.seen.add(key)
        return any(len(mine & other) > SHARED * len(mine | other) for other in self.short)


def prompts(model: Any, tokenizer: Any, streams: int, temperature: float, seed: int) -> Iterator[str]:
    """Prompts of 15 to 400 characters that the model ended itself, without end."""
    opening = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False).split("@@")[0]
    starts = ["", "", "", *FIRST_WORDS.replace("\n", "|").split("|")]
    jobs = (
        Job(tokenizer(opening + start, add_special_tokens=False).input_ids, 64, temperature, start)
        for start in cycle(starts)
    )
    stop = stop_ids_of(model, tokenizer)
    decoder = Streams(model, streams, 128, stop, torch.Generator().manual_seed(seed))
    while True:
        if len(decoder.free) >= min(16, streams):
            decoder.admit([next(jobs) for _ in decoder.free])
        for job, answer in decoder.step():
            text = (job.owner + tokenizer.decode(answer[:-1])).strip()
            if answer[-1] in stop and 15 <= len(text) <= 400 and "<|" not in text:
                yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--out", type=Path, required=True, help="added to; a new start makes what is missing")
    parser.add_argument("--leave-out", type=Path, help="folder of evaluation prompts, lines {'turns': [...]}")
    parser.add_argument("--streams", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    path = resolve_model(args.target)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # bf16 here only: prompts are no claim of exactness.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    left_out = LeftOut(args.leave_out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    present = args.out.read_text().splitlines() if args.out.exists() else []
    left_out.seen = {" ".join(words(json.loads(line)["prompt"])) for line in present}
    made = len(present)
    with args.out.open("a", buffering=1) as out:
        source = prompts(model, tokenizer, args.streams, args.temperature, args.seed + made)
        while made < args.count:
            text = next(source)
            if text not in left_out:
                out.write(json.dumps({"prompt": text, "source": "made_by_target"}) + "\n")
                made += 1
                if made % 200 == 0:
                    logger.info("%d prompts", made)


if __name__ == "__main__":
    main()
