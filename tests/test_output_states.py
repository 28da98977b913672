"""Hidden states and attention weights that come back are those of plain generation, token by token."""

from __future__ import annotations

import pytest
import torch
from support import PAD, SHAPES, make_draft, make_target, prompts
from test_outputs import both

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WIDTH = 9
ENDS = [3, 7]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_and_attentions(family, shape):
    target = make_target(family)
    target.set_attn_implementation("eager")
    draft = make_draft(target)
    inputs = prompts(3, WIDTH, seed=4)
    pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    assert len(set(pads)) == 3
    options = {"output_hidden_states": True, "output_attentions": True, "eos_token_id": ENDS, "pad_token_id": PAD}
    plain, fast = both(target, draft, inputs, SHAPES[shape], **options)
    answers = plain.sequences[:, WIDTH:].tolist()
    ends = [min((i + 1 for i, token in enumerate(row) if token in ENDS), default=len(row)) for row in answers]
    compared = 0
    for name in ("hidden_states", "attentions"):
        theirs, ours = getattr(plain, name), getattr(fast, name)
        assert len(ours) == len(theirs) == max(ends)
        for step, (a, b) in enumerate(zip(theirs, ours)):
            assert len(a) == len(b) == target.config.num_hidden_layers + (name == "hidden_states")
            for x, y in zip(a, b):
                keys = x.shape[-1]
                if family == "llama":
                    assert x.shape == y.shape
                assert (x.shape[:-1], x.dtype) == (y.shape[:-1], y.dtype)
                for row, (pad, end) in enumerate(zip(pads, ends)):
                    # The first step's entries are the prompt's; what stands at its padding means nothing.
                    real = slice(pad if step == 0 else 0, None)
                    if step >= end:
                        assert not y[row].any()
                        continue
                    torch.testing.assert_close(y[row][..., real, -keys:], x[row][..., real, :], atol=1e-4, rtol=1e-4)
                    # Plain generation drops keys outside of a sliding window; here they are listed, and unseen.
                    assert not y[row][..., real, : y.shape[-1] - keys].any()
                    compared += step > 0
    assert compared > 50
