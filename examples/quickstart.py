"""The shortest way: load a target and its draft, generate, look at what speculation did.

    python examples/quickstart.py [TARGET DRAFT]

TARGET is `smollm2`, a model folder or a Hub id; DRAFT an EAGLE-3 draft made for it.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model

DRAFT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"


def main(target_name: str = "smollm2", draft_path: str = str(DRAFT), max_new_tokens: int = 64) -> None:
    path = resolve_model(target_name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoEagle3Target.from_pretrained(path).eval()
    draft = Eagle3DraftModel.from_pretrained(draft_path).eval()

    inputs = tokenizer("The sky is blue because", return_tensors="pt")
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    fast = target.generate(**inputs, **options, assistant_model=draft)
    print(tokenizer.decode(fast[0], skip_special_tokens=True))

    stats = target.speculation_stats
    print(f"\n{stats.generated} tokens in {stats.rounds} target forwards, {stats.tau:.2f} a forward")
    plain = target.generate(**inputs, **options)  # without assistant_model: transformers' own generate()
    print("same tokens as plain generate():", fast.tolist() == plain.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
