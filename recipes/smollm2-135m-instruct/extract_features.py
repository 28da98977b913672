"""Run the target over prompts and answers and store what the draft learns from.

    python recipes/smollm2-135m-instruct/extract_features.py --answers WORK/answers.jsonl --out WORK/features

Writes shards `shard-NNNNN.safetensors`, each of whole documents laid end to end:

    aux        float16 [N, n_aux * Ht]  inputs of the aux decoder layers, low to high
    final      float16 [N, Ht]          last state after the target's final norm
    ids        int32   [N]              token ids
    argmax     int32   [N]              target's first choice for the *next* token; -1 where that is no answer token
    answer     bool    [N]              token is part of the answer
    offsets    int64   [D + 1]          where each document starts
    index      int64   [D]              its `index` in the answers file
    greedy     bool    [D]              its answer was decoded greedily

A shard appears by rename, so it is whole or absent. A new start does only the documents that no shard holds, also when
the answers file has grown since.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eagle3_hf.resolve import resolve_model

logger = logging.getLogger("extract_features")
HALF_MAX = torch.finfo(torch.float16).max


def read_answers(path: Path) -> list[dict]:
    """Records of the answers file; a last line still being written is left out."""
    records = []
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                record = json.loads(line)
                if len(record["answer"]) > 1:
                    records.append(record)
    return records


def batches(records: list[dict], budget: int) -> list[list[int]]:
    """Positions of `records` in batches of similar length, at most `budget` padded tokens each."""
    lengths = [len(record["ids"]) + len(record["answer"]) for record in records]
    out, current = [], []
    for position in sorted(range(len(records)), key=lengths.__getitem__):
        if current and (len(current) + 1) * lengths[position] > budget:
            out.append(current)
            current = []
        current.append(position)
    return [*out, current] if current else out


class Extractor:
    """The target with hooks on the aux layers' inputs."""

    def __init__(self, path: str, layers: list[int] | None, dtype: torch.dtype):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        count = self.model.config.num_hidden_layers
        self.layers = layers or [2, count // 2, count - 3]
        self.seen: dict[int, torch.Tensor] = {}
        for index in self.layers:
            self.model.model.layers[index].register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int):
        def keep(module, args, kwargs):
            self.seen[index] = args[0] if args else kwargs["hidden_states"]

        return keep

    def __call__(self, records: list[dict]) -> list[dict[str, torch.Tensor]]:
        """Each record's tensors, unpadded."""
        lengths = [len(record["ids"]) + len(record["answer"]) for record in records]
        width = max(lengths)
        # Right padding needs no attention mask: causal attention keeps it from real tokens.
        ids = torch.zeros(len(records), width, dtype=torch.long)
        answer = torch.zeros(len(records), width, dtype=torch.bool)
        for row, record in enumerate(records):
            ids[row, : lengths[row]] = torch.tensor(record["ids"] + record["answer"])
            answer[row, len(record["ids"]) : lengths[row]] = True
        final = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        needed = torch.nn.functional.pad(answer[:, 1:], (0, 1))
        argmax = torch.full(ids.shape, -1, dtype=torch.int32)
        # The head costs a quarter of the model and its logits are large: only where they are used, in pieces.
        states = final[needed]
        argmax[needed] = torch.cat([self.model.lm_head(part).argmax(-1).int() for part in states.split(256)])
        aux = torch.cat([self.seen[index] for index in self.layers], dim=-1)
        columns = {
            "aux": aux.clamp(-HALF_MAX, HALF_MAX).half(),
            "final": final.clamp(-HALF_MAX, HALF_MAX).half(),
            "ids": ids.int(),
            "argmax": argmax,
            "answer": answer,
        }
        return [{name: column[row, :n] for name, column in columns.items()} for row, n in enumerate(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--aux-layers", type=int, nargs="+", help="default: 2, L//2, L-3")
    parser.add_argument(
        "--batch-tokens", type=int, default=1024, help="padded tokens a forward pass; more leaves the CPU's caches"
    )
    parser.add_argument("--shard-documents", type=int, default=512)
    parser.add_argument("--max-documents", type=int, default=0, help="stop after this many (0: all)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    args.out.mkdir(parents=True, exist_ok=True)
    shards = sorted(args.out.glob("shard-*.safetensors"))
    present = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            present.update(file.get_tensor("index").tolist())
    records = [record for record in read_answers(args.answers) if record["index"] not in present]
    if args.max_documents:
        records = records[: args.max_documents]
    logger.info("%d documents in %d shards already, %d to do", len(present), len(shards), len(records))
    if not records:
        return
    extractor = Extractor(resolve_model(args.target), args.aux_layers, getattr(torch, args.dtype))
    number = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0
    tokens, start = 0, time.time()
    for at in range(0, len(records), args.shard_documents):
        part = records[at : at + args.shard_documents]
        documents: list[dict[str, torch.Tensor] | None] = [None] * len(part)
        with torch.inference_mode():
            for batch in batches(part, args.batch_tokens):
                for position, columns in zip(batch, extractor([part[i] for i in batch])):
                    documents[position] = columns
        lengths = torch.tensor([0, *(len(document["ids"]) for document in documents)])
        shard = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
        shard["offsets"] = lengths.cumsum(0)
        shard["index"] = torch.tensor([record["index"] for record in part])
        shard["greedy"] = torch.tensor([bool(record["greedy"]) for record in part])
        path = args.out / f"shard-{number:05d}.safetensors"
        scratch = path.with_suffix(".tmp")
        metadata = {"aux_layers": json.dumps(extractor.layers), "target": args.target}
        save_file(shard, scratch, metadata=metadata)
        os.replace(scratch, path)
        number += 1
        tokens += len(shard["ids"])
        done = at + len(part)
        rate = tokens / (time.time() - start)
        logger.info("%s: %d/%d documents, %d tokens, %.0f tokens/s", path.name, done, len(records), tokens, rate)


if __name__ == "__main__":
    main()
