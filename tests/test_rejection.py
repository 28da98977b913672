"""Rejection samplers: against a plain loop for the same random numbers, as one compiled graph, and their edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3_hf import SpeculationMetadata
from eagle3_hf.decoding.invariant import invariant_noise
from eagle3_hf.decoding.rejection import (
    Draws,
    greedy_rejection,
    pad_flat,
    rejection_sample,
    rejection_sample_flat,
    warp_rows,
)
from eagle3_hf.decoding.rejection_tree import accept_children, children_of, select_sampled
from eagle3_hf.decoding.tree import DraftTree, chain, from_parents
from eagle3_hf.decoding.verification import accept

BATCH, DRAFTS, VOCAB = 64, 4, 7


def random_chains(seed: int, agree: float = 0.9) -> dict[str, Any]:
    """Scores, sampled drafts of different numbers, their q, and draws; drafts are often right."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(BATCH, DRAFTS + 1, VOCAB, generator=generator)
    q = (scores[:, :-1] + torch.randn(BATCH, DRAFTS, VOCAB, generator=generator)).softmax(-1)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(BATCH, DRAFTS)
    best = torch.rand(drafts.shape, generator=generator) < agree
    greedy_drafts = torch.where(best, scores[:, :-1].argmax(-1), drafts)
    counts = torch.randint(0, DRAFTS + 1, (BATCH,), generator=generator)
    gone = torch.arange(DRAFTS) >= counts[:, None]
    return {
        "scores": scores,
        "q": q,
        "drafts": drafts.masked_fill(gone, -1),
        "greedy_drafts": greedy_drafts.masked_fill(gone, -1),
        "counts": counts,
        "draws": Draws.make(BATCH, DRAFTS, VOCAB, generator=generator),
    }


def loop_sampler(
    drafts: torch.Tensor,
    scores: torch.Tensor,
    q: torch.Tensor | None,
    greedy: list[bool],
    draws: Draws,
) -> list[list[int]]:
    """The published rule, row by row and token by token."""
    result = []
    for row in range(drafts.shape[0]):
        out: list[int] = []
        tokens = [t for t in drafts[row].tolist() if t >= 0]
        for k in range(len(tokens) + 1):
            p = scores[row, k].softmax(-1)
            if greedy[row]:
                p = torch.zeros_like(p).index_fill_(0, p.argmax(), 1.0)
            if k < len(tokens):
                token = tokens[k]
                own = torch.zeros_like(p).index_fill_(0, torch.tensor(token), 1.0)
                offered = own if q is None else q[row, k]
                if draws.uniforms[row, k] * offered[token] < p[token]:
                    out.append(token)
                    continue
                p = (p * (1 - own)) if q is None else (p - offered).clamp(min=0)
            out.append(int((p / draws.exponentials[row]).argmax()))
            break
        result.append(out + [-1] * (drafts.shape[1] + 1 - len(out)))
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("greedy", ["none", "mixed", "all"])
def test_padded_sampler_is_the_rule(seed: int, with_q: bool, greedy: str) -> None:
    made = random_chains(seed)
    q = made["q"] if with_q else None
    rows = {"none": [False] * BATCH, "all": [True] * BATCH, "mixed": [i % 3 == 0 for i in range(BATCH)]}[greedy]
    flag: Any = {"none": False, "all": True, "mixed": torch.tensor(rows)}[greedy]
    drafts = made["greedy_drafts"]
    out = rejection_sample(drafts, made["scores"], q, flag, made["draws"])
    assert out.tolist() == loop_sampler(drafts, made["scores"], q, rows, made["draws"])
    lengths = (out >= 0).sum(1)
    assert lengths.min() >= 1
    assert lengths.unique().numel() == DRAFTS + 1  # every number of accepted tokens came up


def flat(made: dict[str, Any]) -> tuple[SpeculationMetadata, torch.Tensor, torch.Tensor]:
    """The same batch laid out flat: metadata, scores at its logits indices, and q."""
    counts = made["counts"].tolist()
    ids, ends = [], []
    for row, count in enumerate(counts):
        ids += [row % VOCAB, *made["drafts"][row, :count].tolist()]
        ends.append(len(ids))
    scores = torch.cat([made["scores"][row, : count + 1] for row, count in enumerate(counts)])
    q = torch.cat([made["q"][row, :count] for row, count in enumerate(counts)])
    return SpeculationMetadata.build(ends, counts, torch.tensor(ids), max_spec_len=DRAFTS), scores, q


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("with_q", [False, True])
def test_flat_sampler_is_the_padded_one(greedy: bool, with_q: bool) -> None:
    made = random_chains(3)
    metadata, scores, q = flat(made)
    padded = rejection_sample(made["drafts"], made["scores"], made["q"] if with_q else None, greedy, made["draws"])
    assert rejection_sample_flat(metadata, scores, q if with_q else None, greedy, made["draws"]).equal(padded)
    metadata.draft_token_ids = None
    with pytest.raises(ValueError, match="draft tokens are needed"):
        rejection_sample_flat(metadata, scores)


def test_no_drafts_at_all() -> None:
    scores = torch.randn(3, 1, VOCAB)
    empty = torch.zeros(3, 0, dtype=torch.long)
    assert rejection_sample(empty, scores, greedy=True).equal(scores.argmax(-1))
    for q in (None, torch.zeros(3, 0, VOCAB)):
        assert rejection_sample(empty, scores, q).shape == (3, 1)
    metadata = SpeculationMetadata.build([1, 2, 3], [0, 0, 0], torch.zeros(3, dtype=torch.long))
    assert rejection_sample_flat(metadata, scores[:, 0], greedy=True).equal(scores.argmax(-1))


def test_impossible_tokens_never_pass() -> None:
    # A uniform of exactly zero must not keep a token of probability zero.
    scores = torch.tensor([[[0.0, float("-inf"), 0.0]] * 2])
    draws = Draws(torch.zeros(1, 1), torch.ones(1, 3))
    for q in (None, torch.tensor([[[0.0, 1.0, 0.0]]])):
        assert rejection_sample(torch.tensor([[1]]), scores, q, draws=draws)[0, 0] != 1


def test_tokens_that_q_never_gives_are_no_drafts() -> None:
    # p/0 would keep them always; then the text would follow the draft. With the token refused, all of p is left.
    draws = Draws(torch.zeros(1, 1), torch.tensor([[1.0, 1.0, 0.01]]))
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    scores = torch.tensor([0.2, 0.3, 0.5]).log().expand(1, 2, -1)
    assert rejection_sample(torch.tensor([[2]]), scores, q, draws=draws).tolist() == [[2, -1]]
    draws.exponentials = torch.tensor([[0.01, 1.0, 1.0]])
    assert rejection_sample(torch.tensor([[2]]), scores, q, draws=draws).tolist() == [[0, -1]]
    # More children than q has tokens: the third can't have been drawn.
    token, taken = accept_children(
        scores[:, 0].exp(), torch.tensor([[0, 1, 2]]), q[:, 0], torch.full((1, 3), 0.99), torch.ones(1, 3)
    )
    assert (token.tolist(), taken.tolist()) == ([2], [-1])


def test_equal_distributions_accept_everything() -> None:
    made = random_chains(0)
    full = made["drafts"].clamp(min=0)
    q = made["scores"][:, :-1].softmax(-1)
    assert (rejection_sample(full, made["scores"], q, draws=made["draws"])[:, :-1] == full).all()
    # Rounding alone may still reject: then the residual is empty and p stands in.
    draws = Draws(torch.full((1, 1), 1 - 2**-24), torch.ones(1, 3))
    scores = torch.tensor([[[0.0, 1.0, float("-inf")]] * 2])
    out = rejection_sample(torch.tensor([[0]]), scores, scores[:, :1].softmax(-1) * (1 + 1e-6), draws=draws)
    assert out.tolist() == [[1, -1]]


def test_wrong_shapes_are_named() -> None:
    drafts = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"need scores \[2, 4, vocab\], got \[2, 3, 5\]"):
        rejection_sample(drafts, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"draft_probs must be \[2, 3, 5\], got \[2, 2, 5\]"):
        rejection_sample(drafts, torch.zeros(2, 4, 5), torch.zeros(2, 2, 5))
    with pytest.raises(ValueError, match=r"got \[3\] and \[2, 4, 5\]"):
        rejection_sample(drafts[0], torch.zeros(2, 4, 5))
    for greedy in (torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(2, 1, dtype=torch.bool), [True, False]):
        with pytest.raises(ValueError, match="greedy must be"):
            rejection_sample(drafts, torch.zeros(2, 4, 5), greedy=greedy)  # type: ignore[arg-type]
    for name, wrong in (("temperature", [1.0]), ("top_k", [2.0, 2.0]), ("top_p", [0.5, 0.5, 0.5])):
        given = {"temperature": torch.ones(2), name: torch.tensor(wrong)}
        with pytest.raises(ValueError, match=f"{name} must be"):
            warp_rows(torch.zeros(2, 5), **given)


@pytest.mark.parametrize(("batch", "drafts", "vocab"), [(1, 3, 5), (2, 1, 5), (2, 3, 1)])
def test_random_numbers_are_never_shared_by_broadcasting(batch: int, drafts: int, vocab: int) -> None:
    tokens, scores = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, 5)
    draws = Draws.make(batch, drafts, vocab)
    with pytest.raises(ValueError, match="must be"):
        rejection_sample(tokens, scores, draws=draws)
    with pytest.raises(ValueError, match="must be"):
        accept_children(scores[:, 0].softmax(-1), tokens, None, draws.uniforms, draws.exponentials)


@pytest.mark.parametrize("wrong", ["draft_tokens", "scores", "more scores", "draft_probs", "vocabulary"])
def test_flat_batches_that_are_not_the_metadatas(wrong: str) -> None:
    # Its rows are found by index: other lengths would read another row's logits.
    metadata, scores, q = flat(random_chains(3))
    tokens = metadata.draft_token_ids
    assert tokens is not None
    if wrong == "draft_tokens":
        tokens = tokens[:-1]
    elif wrong == "scores":
        scores = scores[:-1]
    elif wrong == "more scores":
        scores = torch.cat((scores, scores[:1]))
    else:
        q = q[:-1] if wrong == "draft_probs" else q[:, :-1]
    with pytest.raises(ValueError, match="must be"):
        rejection_sample_flat(metadata, scores, q, draft_tokens=tokens)


def test_rows_are_warped_as_transformers_does() -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 3, 50).round(decimals=1)  # ties
    temperature = torch.tensor([0.5, 1.0, 1.5, 0.0])
    top_k, top_p = torch.tensor([0, 5, 50, 3]), torch.tensor([1.0, 0.8, 0.3, 0.9])
    warped = warp_rows(scores, temperature, top_k, top_p)
    for row in range(4):
        expected = scores[row]
        if temperature[row] > 0:
            expected = TemperatureLogitsWarper(float(temperature[row]))(None, expected)
        if top_k[row] > 0:
            expected = TopKLogitsWarper(int(top_k[row]))(None, expected)
        if top_p[row] < 1:
            expected = TopPLogitsWarper(float(top_p[row]))(None, expected)
        torch.testing.assert_close(warped[row], expected)


def random_tree(batch: int = 8, seed: int = 0) -> DraftTree:
    """Root, three children, and grandchildren; siblings differ."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([0, 0, 0, 0, 1, 1, 2, 4])
    depths = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3])
    tokens = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(batch)])
    tokens = torch.cat((tokens, tokens[:, :1]), 1)
    return from_parents(tokens, parents.expand(batch, -1), depths.expand(batch, -1), 3)


def test_children_of() -> None:
    tree = random_tree()
    table = children_of(tree, 3)
    for row in range(8):
        for node in range(tree.size):
            own = [int(tree.tokens[row, n]) for n in range(1, tree.size) if tree.parents[row, n] == node]
            assert table[row, node].tolist() == own + [-1] * (3 - len(own))
    assert children_of(tree, 1).equal(table[..., :1])


def test_sampled_selection_on_a_chain_is_the_padded_sampler() -> None:
    # Same draws: the node selection, walked, must give what the chain sampler gives.
    made = random_chains(1)
    drafts = made["drafts"].clamp(min=0)
    root = torch.zeros(BATCH, 1, dtype=torch.long)
    q = torch.cat((made["q"], torch.zeros(BATCH, 1, VOCAB)), 1)
    tree = chain(torch.cat((root, drafts), 1))
    uniforms = torch.cat((made["draws"].uniforms, torch.zeros(BATCH, 1)), 1)[..., None]
    exponentials = made["draws"].exponentials[:, None].expand(-1, DRAFTS + 1, -1)
    selected = select_sampled(tree, made["scores"].softmax(-1), q, 1, uniforms, exponentials)
    outcome = accept(tree, selected)
    place = torch.arange(DRAFTS + 1)
    walked = torch.where(place <= outcome.counts[:, None], outcome.tokens, -1)
    assert walked.equal(rejection_sample(drafts, made["scores"], made["q"], draws=made["draws"]))


def tensor_samplers() -> dict[str, tuple[Any, tuple]]:
    """Every sampler made of tensor operations only, with inputs."""
    made = random_chains(2)
    metadata, scores, q = flat(made)
    tree = random_tree()
    probs = torch.randn(8, tree.size, VOCAB).softmax(-1)
    offered = torch.randn(8, tree.size, VOCAB).softmax(-1)
    uniforms, exponentials = torch.rand(8, tree.size, 3), torch.rand(8, tree.size, VOCAB)
    greedy = torch.arange(BATCH) % 2 == 0
    d, s, draws = made["drafts"], made["scores"], made["draws"]
    u, e = draws.uniforms, draws.exponentials
    starts = metadata.cu_num_draft_tokens - metadata.num_draft_tokens
    table = children_of(tree, 3)
    temperature, top_k, top_p = torch.rand(BATCH), torch.arange(BATCH) % 5, torch.rand(BATCH)

    def whole(d: Any, s: Any, q: Any, t: Any, k: Any, p: Any, u: Any, e: Any) -> Any:
        """Rows with own parameters, greedy ones among them, in one graph."""
        return rejection_sample(d, warp_rows(s, t, k, p), q, t < 0.3, Draws(u, e))

    def walk(t: Any, parents: Any, depths: Any, ancestors: Any, p: Any, q: Any, u: Any, e: Any) -> Any:
        return select_sampled(DraftTree(t, parents, depths, ancestors, 3), p, q, 3, u, e)

    cu, num = metadata.cu_num_draft_tokens, metadata.num_draft_tokens
    ids = metadata.draft_token_ids

    def given(cu: Any, num: Any, ids: Any) -> SpeculationMetadata:
        needed, targets, bonus = metadata.logits_indices, metadata.target_logits_indices, metadata.bonus_logits_indices
        return SpeculationMetadata(num, cu, needed, targets, bonus, DRAFTS, ids)

    def over_flat(cu: Any, num: Any, ids: Any, s: Any, q: Any, u: Any, e: Any) -> Any:
        return rejection_sample_flat(given(cu, num, ids), s, q, False, Draws(u, e))

    def greedy_flat(cu: Any, num: Any, ids: Any, s: Any) -> Any:
        return rejection_sample_flat(given(cu, num, ids), s, greedy=True)

    return {
        "greedy": (greedy_rejection, (d, s.argmax(-1))),
        "greedy, scores": (lambda d, s: rejection_sample(d, s, greedy=True), (d, s)),
        "greedy, flat": (greedy_flat, (cu, num, ids, scores)),
        "one-hot q": (lambda d, s, u, e: rejection_sample(d, s, None, False, Draws(u, e)), (d, s, u, e)),
        "real q": (lambda d, s, q, u, e: rejection_sample(d, s, q, False, Draws(u, e)), (d, s, made["q"], u, e)),
        "mixed": (lambda d, s, q, g, u, e: rejection_sample(d, s, q, g, Draws(u, e)), (d, s, made["q"], greedy, u, e)),
        "own parameters": (whole, (d, s, made["q"], temperature, top_k, top_p, u, e)),
        "flat": (over_flat, (cu, num, ids, scores, q, u, e)),
        "pad": (lambda v, s, c: pad_flat(v, s, c, DRAFTS, -1), (ids, starts, num)),
        "children": (lambda *a: accept_children(*a)[0], (probs, table, offered, uniforms, exponentials)),
        "children, replacement": (
            lambda *a: accept_children(*a, replacement=True)[0],
            (probs, table, offered, uniforms, exponentials),
        ),
        "children, one-hot": (
            lambda p, t, u, e: accept_children(p, t, None, u, e)[0],
            (probs, table, uniforms, exponentials),
        ),
        "sampled tree": (
            walk,
            (tree.tokens, tree.parents, tree.depths, tree.ancestors, probs, offered, uniforms, exponentials),
        ),
        "invariant noise": (lambda s, p: invariant_noise(s, p, VOCAB), (torch.arange(5), torch.arange(5))),
    }


SAMPLERS = tensor_samplers()


@pytest.mark.parametrize("name", SAMPLERS)
def test_compiles_as_one_graph(name: str) -> None:
    sampler, inputs = SAMPLERS[name]
    torch._dynamo.reset()
    compiled = torch.compile(sampler, fullgraph=True, dynamic=False, backend="aot_eager")
    assert compiled(*inputs).equal(sampler(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_compiles_with_inductor(name: str) -> None:
    sampler, inputs = SAMPLERS[name]
    torch._dynamo.reset()
    out, expected = torch.compile(sampler, fullgraph=True, dynamic=False)(*inputs), sampler(*inputs)
    if out.is_floating_point():
        torch.testing.assert_close(out, expected)
    else:
        # Fused code may round a quotient differently: a tie within rounding may fall the other way, hardly ever here.
        assert (out != expected).sum() == 0


# What XLA for accelerators can't lower, or only with shapes that depend on values.
FORBIDDEN = ("cumprod", "nonzero", "masked_select", "_local_scalar_dense", "item", "unique", "repeat_interleave")


def operations(sampler: Any, inputs: tuple) -> tuple[set[str], list[torch.dtype]]:
    """Names of the aten operations that a sampler consists of, and the types that it indexes with."""
    names, indices = set(), []
    for node in make_fx(sampler)(*inputs).graph.nodes:
        if node.op == "call_function":
            names.add(node.target.__name__ if "." not in str(node.target) else str(node.target).split(".")[1])
            if str(node.target).startswith(("aten.index.", "aten.index_put")):
                indices += [arg.meta["val"].dtype if "val" in arg.meta else None for arg in node.args[1] if arg]
    return names, indices


@pytest.mark.parametrize("name", SAMPLERS)
def test_lowers_to_plain_tensor_operations(name: str) -> None:
    names, indices = operations(*SAMPLERS[name])
    assert names.isdisjoint(FORBIDDEN)
    assert torch.bool not in indices


def test_the_check_of_operations_sees_forbidden_ones() -> None:
    names, _ = operations(lambda x: (x > 0).long().cumprod(0), (torch.ones(3),))
    assert "cumprod" in names
    data = torch.tensor([True, False])
    with torch.no_grad():
        _, indices = operations(lambda x, m: x[m], (torch.ones(2), data))
    names, _ = operations(lambda x, m: x[m], (torch.ones(2), data))
    assert torch.bool in indices or not names.isdisjoint(FORBIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_of_any_float_type(dtype: torch.dtype, batch: int) -> None:
    scores = torch.randn(batch, 3, VOCAB).to(dtype)
    drafts = torch.randint(0, VOCAB, (batch, 2))
    q = torch.rand(batch, 2, VOCAB).softmax(-1)
    for probs in (None, q):
        out = rejection_sample(drafts, scores, probs)
        assert out.dtype == torch.long
        assert ((out[:, 0] >= 0) & (out < VOCAB).all(1)).all()
