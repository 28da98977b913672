"""Several prompts of different lengths in one call: each row advances by as many tokens as it accepts.

python examples/batch.py [TARGET DRAFT]
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model

DRAFT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"
QUESTIONS = ["What is 2 + 2?", "Name three colours.", "Write a sentence about a dog that is afraid of cats."]


def main(target_name: str = "smollm2", draft_path: str = str(DRAFT), max_new_tokens: int = 48) -> None:
    path = resolve_model(target_name)
    # As for every batch with transformers: padding stands in front, so that all rows go on at their end.
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    target = AutoEagle3Target.from_pretrained(path).eval()
    draft = Eagle3DraftModel.from_pretrained(draft_path).eval()

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    out = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=4)

    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for question, answer in zip(QUESTIONS, answers):
        print(f"Q: {question}\nA: {answer}\n")
    # Counts are sums over the rows: a round is one row's part of a target forward.
    print(f"{target.speculation_stats.tau:.2f} tokens a round and row")
    print("same tokens as plain generate():", out.tolist() == target.generate(**inputs, **options).tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
