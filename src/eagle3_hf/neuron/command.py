"""The export command: one parser behind `eagle3-hf export-neuron` and `optimum-cli export eagle3-neuron`.

Written with argparse, which is what optimum's command line is made of. Importing it costs no torch.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DESCRIPTION = "Export an EAGLE-3 target and draft pair to static-shape graphs for AWS Neuron."


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between, like 64,128,256; got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options; names are optimum-neuron's where it has them."""
    parser.add_argument("-m", "--model", required=True, help="Target: `smollm2`, a model folder or a Hub id.")
    parser.add_argument("--draft_model", required=True, help="EAGLE-3 draft: folder or Hub id.")
    parser.add_argument(
        "--backend",
        default="neuron",
        help="`neuron` (default); `torch-export`, which runs on any CPU; `xla`, which writes HLO.",
    )
    parser.add_argument("--batch_size", type=int, default=1, help="Rows of every graph.")
    parser.add_argument("--sequence_length", type=int, help="Slots of the key/value memory. Default: up to 2048.")
    parser.add_argument("--num_speculative_tokens", type=int, default=4, help="Tokens drafted a round (K).")
    parser.add_argument("--tensor_parallel_size", "--num_cores", type=int, default=1, help="Cores to split over.")
    parser.add_argument("--context_buckets", type=_whole_numbers, metavar="64,128", help="Prompt lengths to compile.")
    parser.add_argument("--kv_buckets", type=_whole_numbers, metavar="128,256", help="Memory lengths to compile.")
    parser.add_argument("--padded_hidden_size", type=int, help="Width to pad states to, like 3072 for 2880.")
    parser.add_argument("--torch_dtype", help="`float32` (default), `bfloat16` or `float16`.")
    parser.add_argument("--auto_cast_type", help="Older name of --torch_dtype: `fp32`, `bf16` or `fp16`.")
    parser.add_argument("--do_sample", action="store_true", help="Compile sampling in; greedy still works.")
    parser.add_argument("--no_fuse_draft_loop", action="store_true", help="One graph call for each drafted token.")
    parser.add_argument("--fuse_step", action="store_true", help="Verify and draft in one graph.")
    parser.add_argument("--instance_type", help="AWS instance to compile for: inf2, trn1, trn2 (backend `neuron`).")
    parser.add_argument("--revision", help="Revision of the target on the Hub.")
    parser.add_argument(
        "--disable-validation", action="store_true", help="Don't load the result and compare it with the models."
    )
    parser.add_argument("output", type=Path, help="Folder to write, empty or new.")


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (see {self.prog} --help)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Carry out the command.

    Returns:
        `output`, `graphs` (names), `validated`: tokens compared with plain `generate()`, `None` if nothing was.

    Raises:
        ImportError: the backend's packages are missing.
        ValueError: wrong options, a pair that can't be exported, or a result that differs from the models.
    """
    from ..resolve import resolve_model
    from .artefact import check_place
    from .backends import get_backend
    from .config import full_dtype
    from .families import load_pair
    from .model import Eagle3NeuronModelForCausalLM

    get_backend(args.backend)  # before anything is loaded
    check_place(args.output)
    dtypes = {full_dtype(each) for each in (args.torch_dtype, args.auto_cast_type) if each is not None}
    if len(dtypes) > 1:
        raise ValueError(
            f"--torch_dtype {args.torch_dtype} and --auto_cast_type {args.auto_cast_type} say different things: pass "
            "one of them"
        )
    path = resolve_model(args.model)
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(
        path,
        args.draft_model,
        revision=args.revision,
        instance_type=args.instance_type,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        tensor_parallel_size=args.tensor_parallel_size,
        num_speculative_tokens=args.num_speculative_tokens,
        context_buckets=args.context_buckets,
        kv_buckets=args.kv_buckets,
        padded_hidden_size=args.padded_hidden_size,
        torch_dtype=dtypes.pop() if dtypes else "float32",
        do_sample=args.do_sample,
        fuse_draft_loop=not args.no_fuse_draft_loop,
        fuse_step=args.fuse_step,
        backend=args.backend,
    )
    target, draft = load_pair(path, args.draft_model, config.dtype, revision=args.revision)
    made = Eagle3NeuronModelForCausalLM.export(target, draft, config, output=args.output)
    validated = None
    # Only float32 can be compared token by token, a compiled device model only where there is a device, and a split one
    # only by as many processes.
    alone = args.backend != "neuron" and config.tensor_parallel_size == 1
    if not args.disable_validation and config.torch_dtype == "float32" and alone:
        from .validation import compare

        validated = compare(Eagle3NeuronModelForCausalLM.from_pretrained(args.output), target)
    return {"output": args.output, "graphs": list(made.graphs), "validated": validated}


def report(result: dict[str, Any]) -> str:
    """What `run` did, in a line."""
    checked = result["validated"]
    note = "not validated" if checked is None else f"{checked} tokens identical to plain generate()"
    return f"{len(result['graphs'])} graphs in {result['output']}, {note}"
