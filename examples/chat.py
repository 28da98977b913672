"""A conversation: what was said before is kept, only what is new is run; the text is streamed as blocks arrive.

python examples/chat.py [TARGET DRAFT]
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, SpeculationStats, SpeculationStreamer, resolve_model

DRAFT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"
TURNS = ["What is the capital of France?", "And of Italy?", "Which of the two is older?"]


def main(target_name: str = "smollm2", draft_path: str = str(DRAFT), max_new_tokens: int = 48) -> None:
    path = resolve_model(target_name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoEagle3Target.from_pretrained(path).eval()
    draft = Eagle3DraftModel.from_pretrained(draft_path).eval()

    def show(ids: list[int], accepted: int) -> None:
        # [brackets] around what the draft has written. A character may need several tokens: see `cli/text.py` for a
        # way to print whole ones.
        drafted, own = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:accepted], ids[accepted:]))
        print((f"[{drafted}]" if drafted else "") + own, end="", flush=True)

    history, total, past = [], SpeculationStats(), None
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        print(f"user: {turn}\nmodel: ", end="")
        if past is not None:
            # An answer may be tokenised otherwise than it was generated: what is the same is kept.
            past.trim_to(**inputs)
        out = target.generate(
            **inputs,
            past_key_values=past,
            return_dict_in_generate=True,
            assistant_model=draft,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=SpeculationStreamer(show),
        )
        answer = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        past = out.past_key_values
        history.append({"role": "assistant", "content": answer})
        total.merge(target.speculation_stats)
        print("\n")
    print(f"{len(history)} messages; {total.tau:.2f} tokens a target forward over all turns")


if __name__ == "__main__":
    main(*sys.argv[1:])
