"""What the draft is fed and what it proposes, against the bare models run by hand.

Output is right with any draft, so a draft that gets wrong features or masks shows in no other test, only in speed.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support import BOS, CHAIN, DYNAMIC, LAYERS, SHAPES, OracleGenerator, make_draft, oracle, prompts, texts_of
from transformers import DynamicCache

from eagle3_hf import Eagle3CandidateGenerator
from eagle3_hf.decoding.options import DraftingOptions

AUX = [0, 2, LAYERS]


@pytest.fixture(scope="module")
def models(targets: Any) -> tuple[Any, Any]:
    target = targets("llama")
    return target, attentive(make_draft(target, num_hidden_layers=2, aux_hidden_state_layers=AUX))


def attentive(draft: Any) -> Any:
    """Let much depend on what is attended to, and beams branch, so that a wrong mask shows in the tokens."""
    with torch.no_grad():
        draft.lm_head.weight.mul_(0.3)
        for layer in draft.layers:
            for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                linear.weight.mul_(4)
    return draft


class ByHand:
    """The draft on a text of its own, one row and one token at a time, with transformers' cache."""

    def __init__(self, draft: Any, embeddings: Any, features: torch.Tensor, following: torch.Tensor):
        self.draft, self.embeddings, self.length = draft, embeddings, features.shape[1]
        self.features, self.following = features, following

    def after(self, drafted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Target ids by rank and their log-probabilities, after these drafted tokens."""
        cache = DynamicCache()
        out = self.draft(self.features, inputs_embeds=self.embeddings(self.following), cache=cache)
        for step, token in enumerate(drafted):
            out = self.draft(
                out.last_hidden_state[:, -1:],
                inputs_embeds=self.embeddings(torch.tensor([[token]])),
                # The last slot of the text is position `length - 1`, and each recurrent step goes one further.
                position_ids=torch.tensor([[self.length + step]]),
                cache=cache,
                recurrent=True,
            )
        values, ids = out.logits[0, -1].log_softmax(-1).sort(descending=True)
        return self.draft.draft_to_target(ids), values


def proposals(models: tuple[Any, Any], options: dict[str, Any], depth: int, seed: int = 0) -> tuple[Any, list[ByHand]]:
    """A tree for two rows of different lengths, built up in three uneven steps, and the same rows by hand."""
    target, draft = models
    embeddings = target.get_input_embeddings()
    ids = prompts(2, 9, seed, ragged=False)["input_ids"]
    features = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(seed))
    generator = Eagle3CandidateGenerator(draft, embeddings, DraftingOptions(**options))
    done = [0, 0]
    for counts in ([4, 3], [3, 1], [2, 2]):
        width = max(counts)
        cut = [torch.arange(start, start + width).clamp(max=8) for start in done]
        generator.extend(
            torch.stack([features[row, at] for row, at in enumerate(cut)]),
            torch.stack([ids[row, at] for row, at in enumerate(cut)]),
            counts,
        )
        done = [start + count for start, count in zip(done, counts)]
        roots = torch.stack([ids[row, end - 1] for row, end in enumerate(done)])
        tree = generator.propose(roots, depth)  # its scratch must leave no trace
    assert generator.cache.lengths == done == [9, 6]
    rows = [ByHand(draft, embeddings, features[r : r + 1, :end], ids[r : r + 1, :end]) for r, end in enumerate(done)]
    return tree, rows


def path_of(tree: Any, row: int, node: int) -> list[int]:
    path = []
    while node:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path


@pytest.mark.parametrize("changes", [{}, {"norm_output": True}, {"final_norm": False}, {"num_hidden_layers": 1}])
@torch.no_grad()
def test_chains(models, changes):
    draft = attentive(make_draft(models[0], **({"aux_hidden_state_layers": AUX, "num_hidden_layers": 2} | changes)))
    for parameter in draft.norm.parameters() if draft.config.final_norm else ():
        parameter.copy_(1 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
    for seed in range(5):
        tree, rows = proposals((models[0], draft), {"num_assistant_tokens": 5}, 5, seed)
        for row, hand in enumerate(rows):
            drafted: list[int] = []
            for _ in range(5):
                drafted.append(int(hand.after(drafted)[0][0]))
            assert tree.tokens[row, 1:].tolist() == drafted


@torch.no_grad()
def test_static_trees(models):
    paths = [(0,), (2,), (1,), (0, 0), (0, 3), (2, 1), (0, 3, 0), (2, 1, 1), (2, 1, 0), (2, 1, 1, 0)]
    for seed, depth in ((0, 4), (1, 4), (2, 2)):
        tree, rows = proposals(models, {"tree_paths": paths}, depth, seed)
        for row, hand in enumerate(rows):
            expected = set()
            for path in paths:
                drafted: list[int] = []
                for rank in path[:depth]:
                    drafted.append(int(hand.after(drafted)[0][rank]))
                expected.add(tuple(drafted))
            assert {tuple(path_of(tree, row, node)) for node in range(1, tree.size)} == expected


@pytest.mark.parametrize(("top_k", "total", "depth"), [(3, 10, 4), (2, 3, 3), (4, 100, 2), (3, 12, 1), (5, 30, 4)])
@torch.no_grad()
def test_dynamic_trees(models, top_k, total, depth):
    options = {"num_assistant_tokens": depth, "tree_top_k": top_k, "tree_total_tokens": total}
    tree, rows = proposals(models, options, depth, seed=top_k)
    for row, hand in enumerate(rows):
        # EAGLE-2: a beam by cumulative log-probability, each of its nodes expanded, then the best of all.
        pool: dict[tuple[int, ...], float] = {}
        beam: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(depth):
            level = {}
            for path, score in beam.items():
                ids, values = hand.after(list(path))
                level |= {(*path, int(ids[i])): score + float(values[i]) for i in range(top_k)}
            pool |= level
            beam = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
        best = sorted(pool, key=lambda path: -pool[path])[:total]
        assert {tuple(path_of(tree, row, node)) for node in range(1, tree.size)} == set(best)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("threshold", [0.3, 0.04, 0.015])
@torch.no_grad()
def test_thresholds_cut_by_cumulative_probability(models, threshold, static):
    options: dict[str, Any] = {"num_assistant_tokens": 4, "tree_top_k": 3, "tree_total_tokens": 40}
    if static:
        options = {"tree_paths": [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]}
    sizes = set()
    for seed in range(4):
        whole, rows = proposals(models, options, 4, seed)
        tree, _ = proposals(models, options | {"assistant_confidence_threshold": threshold}, 4, seed)
        scores = [{tuple(path): score_of(hand, path) for path in paths_of(whole, row)} for row, hand in enumerate(rows)]
        above = [sum(score >= math.log(threshold) for score in row.values()) for row in scores]
        assert tree.size == 1 + max(above)
        sizes.add(tree.size)
        for row, known in enumerate(scores):
            best = sorted(known, key=lambda path: -known[path])[: max(above)]
            assert set(map(tuple, paths_of(tree, row))) == set(best)
            assert [len(path) for path in paths_of(tree, row)] == tree.depths[row, 1:].tolist()
        assert tree.max_depth == tree.depths.max()
    assert threshold > 0.1 or 1 < min(sizes) < max(sizes)
    assert min(sizes) < whole.size


def paths_of(tree: Any, row: int) -> list[list[int]]:
    return [path_of(tree, row, node) for node in range(1, tree.size)]


def score_of(hand: ByHand, path: list[int]) -> float:
    total = 0.0
    for depth, token in enumerate(path):
        ids, values = hand.after(path[:depth])
        total += float(values[ids == token][0])
    return total


class ContextChecker(OracleGenerator):
    """Compares the draft's state before each proposal with one pass over the whole text's true features."""

    target: Any
    checked: list[int]

    def propose(self, roots: torch.Tensor, depth: int) -> Any:
        assert self._root_state is not None
        for row, text in enumerate(self._texts):
            ids = torch.tensor([[BOS, *text]])
            with self.target.capture_aux_hidden_states(AUX) as capture:
                self.target(ids)
            features = torch.cat(capture.take(), dim=-1)[:, :-1]
            whole = self.draft(features, inputs_embeds=self.embeddings(ids[:, 1:]))
            torch.testing.assert_close(self._root_state[row, -1], whole.last_hidden_state[0, -1], atol=1e-3, rtol=1e-3)
            self.checked.append(len(text))
        return super().propose(roots, depth)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 4])
def test_each_round_starts_from_the_true_features_of_the_text(models, shape, batch):
    target, draft = models
    inputs = prompts(batch, 9)
    first = inputs["attention_mask"].argmax(dim=1, keepdim=True)
    inputs["input_ids"].scatter_(1, first, BOS)  # the checker knows all but a text's first token
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": 15, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    with oracle(texts_of(plain, inputs), base=ContextChecker, target=target, checked=[]) as double:
        fast = target.generate(**inputs, **options, assistant_model=draft, **SHAPES[shape])
    assert fast.tolist() == plain.tolist()
    assert len(set(double.checked)) > 4
    assert target.speculation_stats.accepted > 4


def test_transformers_own_interface(models):
    """`get_candidates` is for chains, as `CandidateGenerator` has it."""
    target, draft = models
    ids = prompts(1, 6)["input_ids"]
    generator = Eagle3CandidateGenerator(draft, target.get_input_embeddings(), DraftingOptions(**CHAIN))
    assert generator.get_candidates(ids, is_first_iteration=True)[0].tolist() == ids.tolist()
    with pytest.raises(RuntimeError, match="extend"):
        generator.propose(ids[:, -1], 2)
    with torch.no_grad():
        generator.extend(torch.zeros(1, 5, 96), ids[:, 1:], [5])
        candidates, logits = generator.get_candidates(ids)
        assert logits is None
        assert candidates.shape == (1, 10)
        assert candidates[0, :6].tolist() == ids[0].tolist()
        assert candidates[0, 5:].tolist() == generator.propose(ids[:, -1], 4).tokens[0].tolist()
    trees = Eagle3CandidateGenerator(draft, target.get_input_embeddings(), DraftingOptions(**DYNAMIC))
    with torch.no_grad():
        trees.extend(torch.zeros(1, 5, 96), ids[:, 1:], [5])
    with pytest.raises(ValueError, match="tree_top_k=1"):
        trees.get_candidates(ids)
