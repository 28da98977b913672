"""Speed and memory of the training-time test: ours against the straightforward implementation, in one run.

    python benchmarks/ttt_speed.py --lengths 256 1024 2048 --steps 4 7 --json ttt.json

Each measurement is a process of its own (so that memory is its own), the implementations take turns, and both get the
same draft, batch and teacher. A step is forward and backward; the optimiser is left out. Straightforward means what
`eagle3_hf.training.reference` does: full masks, keys of all steps concatenated, all logits at once in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

SIZES = {
    # The draft of SmolLM2-135M-Instruct, and one for Llama-3.1-8B.
    "small": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "large": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCABULARY = {"small": 8192, "large": 32000}
IMPLEMENTATIONS = ("ours", "straightforward")


def peak(device: torch.device, reset: bool = False) -> int:
    """Bytes at the highest point since the last reset: of the process on a CPU (Linux), else of the allocator."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def make_case(args: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor]]:
    from eagle3_hf import Eagle3Config, Eagle3DraftModel

    torch.manual_seed(0)
    device, size, vocabulary = torch.device(args.device), SIZES[args.size], args.vocabulary or VOCABULARY[args.size]
    draft = Eagle3DraftModel(Eagle3Config(vocab_size=vocabulary, **size)).to(device).train()
    shape, width = (args.batch, args.length), size["hidden_size"]
    dtype = getattr(torch, args.dtype)
    batch = {
        "features": torch.randn(*shape, 3 * width, device=device, dtype=dtype),
        "embeddings": torch.randn(*shape, width, device=device, dtype=dtype),
        "input_ids": torch.randint(0, vocabulary, shape, device=device),
        "loss_mask": (torch.arange(args.length, device=device) >= args.length * args.prompt).expand(shape),
        "teacher_hidden": torch.randn(*shape, width, device=device, dtype=dtype),
        "teacher_head": torch.randn(vocabulary, width, device=device, dtype=dtype) / 8,
        "teacher_argmax": torch.randint(0, vocabulary, shape, device=device),
    }
    return draft, batch


def step(implementation: str, draft: Any, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> torch.Tensor:
    """One forward and backward; the loss."""
    from eagle3_hf.training.objective import training_time_test
    from eagle3_hf.training.reference import reference_losses

    draft.zero_grad(set_to_none=True)
    low = args.dtype != "float32"
    with torch.autocast(args.device, getattr(torch, args.dtype) if low else torch.bfloat16, enabled=low):
        if implementation == "ours":
            options = {"attention": args.attention, "checkpoint": args.checkpoint, "measure": False}
            loss = training_time_test(draft, **batch, steps=args.depth, **options).loss
        else:
            logits = torch.nn.functional.linear(batch["teacher_hidden"], batch["teacher_head"])
            names = ("features", "loss_mask", "teacher_argmax")
            losses, _ = reference_losses(
                draft,
                embeds=batch["embeddings"],
                teacher_logits=logits,
                steps=args.depth,
                **{name: batch[name] for name in names},
            )
            loss = (losses * torch.tensor([0.8**k for k in range(args.depth)], device=losses.device)).sum()
    loss.backward()
    return loss.detach()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """In the child: warm up, time, and the highest memory of the timed steps beyond what lay there before any."""
    draft, batch = make_case(args)
    device = torch.device(args.device)
    before = peak(device, reset=True)
    step(args.only, draft, batch, args)
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        loss = float(step(args.only, draft, batch, args))  # reading it waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = args.batch * args.length
    return {
        "implementation": args.only,
        "length": args.length,
        "steps": args.depth,
        "loss": loss,
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "extra_bytes": peak(device) - before,
    }


def child(implementation: str, length: int, depth: int, argv: list[str]) -> dict[str, Any]:
    own = ["--only", implementation, "--length", str(length), "--depth", str(depth)]
    done = subprocess.run([sys.executable, __file__, *argv, *own], capture_output=True, text=True)
    if done.returncode:
        # The straightforward one may simply not fit.
        return {"implementation": implementation, "length": length, "steps": depth, "error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def describe(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error'].strip().splitlines()[-1] if result['error'].strip() else 'killed'}"
    return (
        f"{result['tokens_per_second']:9.0f} tokens/s  {result['extra_bytes'] / 2**20:9.0f} MiB  "
        f"loss {result['loss']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 5, 6, 7])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", choices=SIZES, default="large" if torch.cuda.is_available() else "small")
    parser.add_argument("--vocabulary", type=int, default=0, help="rows of the head; 0: 8192 (small), 32000 (large)")
    parser.add_argument("--prompt", type=float, default=0.25, help="share of each row that isn't answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", default="auto", help="backend of ours")
    parser.add_argument("--checkpoint", action="store_true", help="ours: run layers again in the backward pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        sys.stdout.write(json.dumps(measure(args)) + "\n")
        return
    results = []
    for length in args.lengths:
        for depth in args.steps:
            pair = [child(name, length, depth, sys.argv[1:]) for name in IMPLEMENTATIONS]
            for result in pair:
                sys.stdout.write(f"T {length:5d}  N {depth}  {result['implementation']:16s} {describe(result)}\n")
            if not any("error" in result for result in pair):
                faster = pair[0]["tokens_per_second"] / pair[1]["tokens_per_second"]
                smaller = pair[1]["extra_bytes"] / max(pair[0]["extra_bytes"], 1)
                sys.stdout.write(
                    f"T {length:5d}  N {depth}  {faster:.2f} times the speed, 1/{smaller:.1f} the memory\n"
                )
                sys.stdout.flush()
            results += pair
    if args.json:
        settings = {
            name: value for name, value in vars(args).items() if name not in ("json", "only", "length", "depth")
        }
        args.json.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
