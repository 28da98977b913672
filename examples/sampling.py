"""Sampling: temperature and top-p as always; the texts differ from plain generate()'s, their distribution doesn't.

python examples/sampling.py [TARGET DRAFT]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, DrafterInvariantSampling, Eagle3DraftModel, resolve_model

DRAFT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"


def main(target_name: str = "smollm2", draft_path: str = str(DRAFT), max_new_tokens: int = 40) -> None:
    path = resolve_model(target_name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoEagle3Target.from_pretrained(path).eval()
    draft = Eagle3DraftModel.from_pretrained(draft_path).eval()
    inputs = tokenizer("Once upon a time there was", return_tensors="pt")
    options = {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": 0.7, "top_p": 0.9}

    for seed in (0, 1):
        torch.manual_seed(seed)
        # A tree offers the sampled token more chances to be among those drafted.
        out = target.generate(
            **inputs, **options, assistant_model=draft, num_assistant_tokens=4, tree_top_k=3, tree_total_tokens=12
        )
        print(f"seed {seed}: {tokenizer.decode(out[0], skip_special_tokens=True)}")
        print(f"        {target.speculation_stats.tau:.2f} tokens a target forward\n")

    # Usually a draft changes which random numbers are used for which token, so the same seed gives another text than
    # without one. With this processor the text is a function of its seed alone.
    noise = {"logits_processor": [DrafterInvariantSampling(seed=7)]}
    with_draft = target.generate(**inputs, **options, **noise, assistant_model=draft)
    without = target.generate(**inputs, **options, **noise)
    print("the same sampled text with a draft and without:", with_draft.tolist() == without.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
