"""Making a model of yours a target, and beginning a draft for it.

    python examples/adding_a_target.py [TARGET FOLDER]

Any decoder-only model of transformers is a target already. What may need a hand is said here; the draft that this
writes into FOLDER is untrained, so nothing it drafts is accepted until it has been.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import Eagle3Config, Eagle3DraftModel, disable_eagle3, enable_eagle3, resolve_model


def begin_draft(target, draft_vocab_size: int | None = None) -> Eagle3DraftModel:
    """An untrained draft: sizes that must be the target's, and a few that may be chosen."""
    text = target.config.get_text_config()
    vocabulary = draft_vocab_size or text.vocab_size
    config = Eagle3Config(
        vocab_size=text.vocab_size,
        draft_vocab_size=vocabulary,  # the draft only writes its most frequent tokens; fewer make it faster
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        target_hidden_size=text.hidden_size,
        target_num_hidden_layers=text.num_hidden_layers,
        aux_hidden_state_layers=list(target.get_eagle3_aux_hidden_state_layers()),
    )
    draft = Eagle3DraftModel(config).eval()
    if vocabulary < text.vocab_size:
        draft.set_draft_vocabulary(torch.arange(vocabulary))  # in earnest: the most frequent in your texts
    return draft


def main(target_name: str = "smollm2", folder: str | None = None, max_new_tokens: int = 24) -> None:
    path = resolve_model(target_name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()

    # The decoder layers are found by their usual names. Of a model that names them otherwise, say where they are.
    target = enable_eagle3(model, layers_attribute="model.layers")
    print("target:", type(target).__name__)
    # Which layers' inputs the draft reads. Low, middle and high is the usual choice; a trained draft brings its own.
    print("aux hidden states:", target.get_eagle3_aux_hidden_state_layers())

    draft = begin_draft(target)
    inputs = tokenizer("One, two, three,", return_tensors="pt")
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    fast = target.generate(**inputs, **options, assistant_model=draft)
    print(f"tokens a target forward, untrained: {target.speculation_stats.tau:.2f}")

    # The check that counts: whatever a draft writes, the output is the model's own.
    plain = disable_eagle3(target).generate(**inputs, **options)
    print("same tokens as plain generate():", fast.tolist() == plain.tolist())

    if folder is not None:
        draft.save_pretrained(folder)
        print(f"wrote {folder}: train it, then pass it as assistant_model")


if __name__ == "__main__":
    main(*sys.argv[1:])
