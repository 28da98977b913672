"""What comes back beside the tokens: scores, logits, streams, statistics, drafts on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import CHAIN, EOS, PAD, SHAPES, VOCAB, assert_same_as_plain, make_draft, oracle, prompts, texts_of
from test_stopping import tiny_tokenizer
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from eagle3_hf import Eagle3DraftModel, SpeculationStats, SpeculationStreamer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def both(target: Any, draft: Any, inputs: dict[str, torch.Tensor], drafting: dict[str, Any], **options: Any) -> Any:
    """Plain and speculative output of one call, as dictionaries."""
    options = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True} | options
    plain = target.generate(**inputs, **options)
    with oracle(texts_of(plain.sequences, inputs)):
        fast = target.generate(**inputs, **options, assistant_model=draft, **drafting)
    assert fast.sequences.tolist() == plain.sequences.tolist()
    assert fast.speculation_stats is target.speculation_stats
    assert fast.speculation_stats.accepted > 4
    return plain, fast


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_and_logits(llama, llama_draft, batch, shape):
    options = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    options |= {"eos_token_id": [EOS, 7, 12], "pad_token_id": PAD}
    inputs = prompts(batch, 9, seed=4)
    plain, fast = both(llama, llama_draft, inputs, SHAPES[shape], **options)
    ends = []
    for row in plain.sequences[:, 9:].tolist():
        found = [place for place, token in enumerate(row) if token in (EOS, 7, 12)]
        ends.append(found[0] + 1 if found else len(row))
    for name in ("scores", "logits"):
        theirs, ours = getattr(plain, name), getattr(fast, name)
        assert isinstance(ours, tuple)
        assert len(ours) == len(theirs)
        for step, (a, b) in enumerate(zip(theirs, ours)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            for row, end in enumerate(ends):
                if step < end:
                    torch.testing.assert_close(b[row], a[row], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(torch.stack(fast.scores), torch.stack(fast.logits))
    transitions = [llama.compute_transition_scores(out.sequences, out.scores) for out in (plain, fast)]
    for row, end in enumerate(ends):
        torch.testing.assert_close(transitions[0][row, :end], transitions[1][row, :end], atol=1e-4, rtol=1e-5)


def test_only_what_was_asked_for(llama, llama_draft):
    plain, fast = both(llama, llama_draft, prompts(2, 7), CHAIN)
    assert (fast.scores, fast.logits) == (None, None)
    assert set(fast) - set(plain) == {"speculation_stats"}
    out = llama.generate(**prompts(2, 7), assistant_model=llama_draft, output_scores=True, do_sample=False)
    assert isinstance(out, torch.Tensor)


class Pieces(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_streamer_gets_the_output_in_pieces(llama, llama_draft, shape):
    inputs = prompts(1, 9)
    plain = llama.generate(**inputs, do_sample=False, max_new_tokens=17)
    streamer = Pieces()
    with oracle(texts_of(plain, inputs)):
        out = llama.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=17,
            assistant_model=llama_draft,
            streamer=streamer,
            **SHAPES[shape],
        )
    assert streamer.ends == 1
    assert streamer.pieces[0] == inputs["input_ids"][0].tolist()
    assert [token for piece in streamer.pieces for token in piece] == out[0].tolist() == plain[0].tolist()
    assert len(streamer.pieces) == 2 + llama.speculation_stats.rounds


def test_a_text_streamer(llama, llama_draft):
    tokenizer, inputs = tiny_tokenizer(), prompts(1, 9)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = llama.generate(**inputs, do_sample=False, max_new_tokens=17, assistant_model=llama_draft, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, 9:])


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_say_what_was_drafted(llama, llama_draft, shape):
    inputs, blocks, ended = prompts(1, 9), [], []
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": 14, "pad_token_id": PAD}
    plain = llama.generate(**inputs, **options)
    streamer = SpeculationStreamer(lambda ids, accepted: blocks.append((ids, accepted)), lambda: ended.append(1))
    for _ in range(2):  # a streamer may be used again
        blocks.clear()
        with oracle(texts_of(plain, inputs)):
            llama.generate(**inputs, **options, assistant_model=llama_draft, streamer=streamer, **SHAPES[shape])
        assert [token for ids, _ in blocks for token in ids] == plain[0, 9:].tolist()
        stats = llama.speculation_stats
        assert blocks[0] == (plain[0, 9:10].tolist(), 0)
        assert len(blocks) == stats.rounds + 1
        assert sum(accepted for _, accepted in blocks) == stats.accepted
        assert all(len(ids) == accepted + 1 for ids, accepted in blocks[:-1])
        assert blocks[-1][1] <= len(blocks[-1][0]) <= blocks[-1][1] + 1
    assert ended == [1, 1]
    # Without a draft each token is a block that nobody drafted.
    blocks.clear()
    llama.generate(**inputs, **options, streamer=streamer)
    assert blocks == [([token], 0) for token in plain[0, 9:].tolist()]


def by_hand(planned: Sequence[Sequence[int]]) -> Any:
    """A draft generator that proposes `planned[i]` in round `i`, whatever its draft says."""
    from eagle3_hf import Eagle3CandidateGenerator
    from eagle3_hf.decoding.tree import chain

    rounds = iter(planned)

    class Planned(Eagle3CandidateGenerator):
        def propose(self, roots: torch.Tensor, depth: int) -> Any:
            tokens = list(next(rounds))[:depth]
            return chain(torch.tensor([[int(roots[0]), *tokens]]))

    return Planned


def test_counts_of_a_hand_made_run(llama, llama_draft, monkeypatch):
    inputs = prompts(1, 9)
    answer = llama.generate(**inputs, do_sample=False, max_new_tokens=14)[0, 9:].tolist()
    wrong = [(token + 1) % VOCAB for token in answer]
    planned = [
        [wrong[1], answer[2], answer[3]],  # nothing accepted: one token (2 of 14 there)
        [answer[2], answer[3], wrong[4]],  # two accepted: three tokens (5)
        [answer[5], answer[6], answer[7]],  # all three: four tokens (9)
        [answer[9], wrong[10], answer[11]],  # one: two tokens (11)
        [answer[11], answer[12], answer[13]],  # room for two only: both and the bonus (14)
    ]
    monkeypatch.setattr("eagle3_hf.decoding.loop.Eagle3CandidateGenerator", by_hand(planned))
    out = llama.generate(
        **inputs, do_sample=False, max_new_tokens=14, assistant_model=llama_draft, num_assistant_tokens=3
    )
    assert out[0, 9:].tolist() == answer
    stats = llama.speculation_stats
    assert (stats.rounds, stats.generated, stats.accepted, stats.drafted) == (5, 13, 8, 14)
    assert stats.tau == pytest.approx(13 / 5)
    assert stats.acceptance_rate == pytest.approx(8 / 14)
    assert stats.speculated == [5, 5, 4]
    assert stats.reached == [5, 4, 2]
    assert stats.accepted_at == [4, 3, 1]
    assert stats.conditional_acceptance == [4 / 5, 3 / 4, 1 / 2]
    assert stats.unconditional_acceptance == [4 / 5, 3 / 5, 1 / 4]
    assert stats.candidates_per_round == 4


def test_counts_are_cut_at_an_eos_in_the_middle_of_a_block(llama, llama_draft, monkeypatch):
    inputs = prompts(1, 9)
    answer = llama.generate(**inputs, do_sample=False, max_new_tokens=14)[0, 9:].tolist()
    assert answer[5] not in answer[:5]
    # Six are right, but the fourth of them is the end: four tokens count, all drafted, no bonus.
    planned = [[(answer[1] + 1) % VOCAB] * 6, answer[2:8]]
    monkeypatch.setattr("eagle3_hf.decoding.loop.Eagle3CandidateGenerator", by_hand(planned))
    options = {"max_new_tokens": 14, "eos_token_id": answer[5], "pad_token_id": PAD}
    out = llama.generate(**inputs, do_sample=False, assistant_model=llama_draft, num_assistant_tokens=6, **options)
    assert out[0, 9:].tolist() == answer[:6]
    stats = llama.speculation_stats
    assert (stats.rounds, stats.generated, stats.accepted, stats.drafted) == (2, 5, 4, 12)
    assert stats.accepted_at == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_identities(llama, llama_draft, shape, batch):
    inputs = prompts(batch, 9)
    stats = assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], max_new_tokens=21)
    assert stats.generated == batch * 20
    cuts = stats.accepted + stats.rounds - stats.generated
    assert 0 <= cuts <= batch
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.speculated[0] <= stats.rounds
    assert all(a <= r <= s for a, r, s in zip(stats.accepted_at, stats.reached, stats.speculated))
    assert all(reached <= accepted for reached, accepted in zip(stats.reached[1:], stats.accepted_at))
    assert stats.accepted <= stats.drafted <= stats.rounds * (stats.candidates_per_round - 1)
    assert stats.tau == stats.generated / stats.rounds
    parts = stats.prefill_seconds + stats.target_seconds + stats.draft_seconds
    assert 0 < parts <= stats.total_seconds
    assert 0 < stats.cycle_efficiency <= 1
    as_dict = stats.as_dict()
    assert as_dict["tau"] == stats.tau
    assert as_dict["accepted"] == stats.accepted


def test_merged_counts():
    first, second = SpeculationStats(), SpeculationStats()
    first.count_round(2, 2, 1, 2)
    second.count_round(3, 5, 3, 4)
    second.count_round(0, 0, 0, 1)
    second.total_seconds = 2.0
    first.merge(second)
    assert (first.rounds, first.generated, first.drafted, first.accepted) == (3, 7, 7, 4)
    assert first.speculated == [2, 2, 1]
    assert first.reached == [2, 2, 1]
    assert first.accepted_at == [2, 1, 1]
    assert first.total_seconds == 2.0
    assert second.rounds == 2
    empty = SpeculationStats()
    assert (empty.tau, empty.acceptance_rate, empty.cycle_efficiency, empty.conditional_acceptance) == (0, 0, 0, [])


def test_confidence_threshold_drafts_less(llama):
    draft = make_draft(llama)
    drafted = {}
    for threshold in (0.0, 0.3, 0.6, 0.999):
        for name, shape in SHAPES.items():
            shape = shape | {"assistant_confidence_threshold": threshold}
            stats = assert_same_as_plain(llama, draft, prompts(2, 9), shape, rate=0.5)
            drafted[name, threshold] = stats.drafted / stats.rounds
    for name in ("chain", "dynamic"):
        assert drafted[name, 0.0] > drafted[name, 0.3] >= drafted[name, 0.6] > drafted[name, 0.999]
    # Levels that were dropped aren't counted as drafted.
    options = {
        "do_sample": False,
        "max_new_tokens": 9,
        "assistant_model": draft,
        "assistant_confidence_threshold": 0.999,
    }
    llama.generate(**prompts(1, 9), **options, **SHAPES["dynamic"])
    assert sum(llama.speculation_stats.speculated) == llama.speculation_stats.drafted == 0


def test_options_live_on_the_draft_and_on_disk(llama, tmp_path):
    draft = make_draft(llama)
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.tree_top_k = 3
    draft.generation_config.tree_total_tokens = 5
    draft.save_pretrained(tmp_path)
    again = Eagle3DraftModel.from_pretrained(tmp_path)
    inputs = prompts(1, 8)
    llama.generate(**inputs, assistant_model=again, max_new_tokens=9)
    assert llama.speculation_stats.candidates_per_round == 6
    assert len(llama.speculation_stats.speculated) == 2
    # What is given per call wins.
    llama.generate(**inputs, assistant_model=again, max_new_tokens=9, num_assistant_tokens=3, tree_top_k=1)
    assert llama.speculation_stats.candidates_per_round == 4
    assert len(llama.speculation_stats.speculated) == 3
