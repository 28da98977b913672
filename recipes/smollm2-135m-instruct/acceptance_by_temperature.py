"""Measure tau(T): tokens a target forward by temperature, with likeliest and with drawn draft tokens.

python acceptance_by_temperature.py --prompts ../../../shared/data/prompts/mt_bench.jsonl --json acceptance.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, SpeculationStats, resolve_model

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", default=str(Path(__file__).parent / "draft"))
    parser.add_argument("--prompts", required=True, help="JSON lines with 'turns'")
    parser.add_argument("--count", type=int, default=24, help="prompts, spread evenly over the file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("-K", type=int, default=4, help="draft tokens a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", help="write the numbers here")
    args = parser.parse_args()
    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    target = AutoEagle3Target.from_pretrained(path, dtype=torch.float32)
    draft = Eagle3DraftModel.from_pretrained(args.draft)
    turns = [json.loads(line)["turns"][0] for line in Path(args.prompts).read_text().splitlines()]
    turns = turns[:: max(1, len(turns) // args.count)][: args.count]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True)
        for t in turns
    ]
    rows = []
    for temperature in TEMPERATURES:
        sampling = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        for kind in ("greedy", "sample") if temperature else ("greedy",):
            torch.manual_seed(0)
            stats = SpeculationStats()
            for start in range(0, len(prompts), args.batch):
                inputs = tokenizer(
                    prompts[start : start + args.batch], return_tensors="pt", padding=True, add_special_tokens=False
                )
                target.generate(
                    **inputs, **sampling, max_new_tokens=args.new_tokens, assistant_model=draft,
                    num_assistant_tokens=args.K, tree_top_k=1, draft_sampling=kind,
                )  # fmt: skip
                stats.merge(target.speculation_stats)
            rows.append({"temperature": temperature, "draft_sampling": kind, **stats.as_dict()})
            rates = " ".join(f"{rate:.2f}" for rate in stats.conditional_acceptance)
            print(
                f"T={temperature:<4} {kind:<7} tau {stats.tau:.3f}  by position {rates}  ({stats.rounds} rounds)",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
