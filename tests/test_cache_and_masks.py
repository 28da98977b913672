"""Cache, masks, trees and the walk down them, each against a slow and plain version of itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import LAYERS, WINDOW, config_of, make_target, prompts
from transformers import DynamicCache

from eagle3_hf import SpeculativeCache
from eagle3_hf.decoding.masks import TargetMasks, finish, visibility
from eagle3_hf.decoding.static_tree import static_shape
from eagle3_hf.decoding.tree import DraftTree, best_nodes, chain, from_parents
from eagle3_hf.decoding.verification import accept

HEADS, DIM = 2, 3


def rows_of(values: list[list[int]]) -> torch.Tensor:
    """Keys `[batch, HEADS, n, DIM]` that hold `values` and tell heads and places apart."""
    base = torch.tensor(values, dtype=torch.float32)[:, None, :, None]
    return base + torch.arange(HEADS)[None, :, None, None] * 1000 + torch.arange(DIM) * 0.1


def write(cache: SpeculativeCache, values: list[list[int]], slots: torch.Tensor | None, **where: Any) -> Any:
    cache.begin_write(slots, len(values[0]), **where)
    keys = rows_of(values)
    return [cache.update(keys + layer, -keys - layer, layer) for layer in range(len(cache.layers))]


def stored(cache: SpeculativeCache, row: int, layer: int = 0) -> list[int]:
    keys = cache.layers[layer].keys[row, :, : cache.lengths[row]]
    values = cache.layers[layer].values[row, :, : cache.lengths[row]]
    assert torch.equal(keys, -values)
    assert torch.equal(keys, rows_of([(keys[0, :, 0] - layer).tolist()])[0] + layer)
    return (keys[0, :, 0] - layer).long().tolist()


def test_rows_grow_apart_and_commits_move_accepted_nodes():
    cache = SpeculativeCache(2)
    keys, values = write(cache, [[1, 2, 3], [11, 12, 99]], None, batch=2)[1]
    assert keys.shape == (2, HEADS, 3, DIM)
    cache.set_lengths([3, 2])
    assert (cache.get_seq_length(), cache.longest, cache.used) == (3, 3, 3)
    slots = torch.tensor([[3, 4, 5], [2, 3, 4]])
    keys, values = write(cache, [[4, 5, 6], [13, 14, 15]], slots)[0]
    assert keys.shape[2] == values.shape[2] == 6
    # The last node of the first row, and the last two of the second.
    cache.commit([5, 5], torch.tensor([[3, 5, 5], [2, 3, 4]]), torch.tensor([[3, 4, 5], [2, 3, 4]]))
    cache.set_lengths([5, 5])
    for layer in range(2):
        assert stored(cache, 0, layer) == [1, 2, 3, 4, 6]
        assert stored(cache, 1, layer) == [11, 12, 13, 14, 15]
    # Scratch is overwritten.
    write(cache, [[7], [16]], None)
    cache.set_lengths([6, 6])
    assert stored(cache, 0) == [1, 2, 3, 4, 6, 7]


def test_moves_that_overlap():
    cache = SpeculativeCache(1)
    write(cache, [list(range(8))], None, batch=1)
    cache.commit([6], torch.tensor([[3, 2, 4, 7]]), torch.tensor([[2, 3, 4, 5]]))
    assert stored(cache, 0) == [0, 1, 3, 2, 4, 7]


def test_offset_writes_behind_scratch():
    cache = SpeculativeCache(1)
    write(cache, [[1, 2]], None, batch=1)
    cache.set_lengths([2])
    write(cache, [[50, 51]], None)
    write(cache, [[60]], None, offset=2)
    assert cache.used == 5
    cache.set_lengths([5])
    assert stored(cache, 0) == [1, 2, 50, 51, 60]


def test_random_histories_against_lists():
    source = random.Random(0)
    for trial in range(30):
        batch = source.randint(1, 4)
        cache = SpeculativeCache(1)
        width = source.randint(1, 5)
        texts = [[source.randint(0, 99) for _ in range(width)] for _ in range(batch)]
        write(cache, texts, None, batch=batch)
        for _ in range(60 if trial == 0 else 8):
            nodes = source.randint(1, 9)
            new = [[source.randint(0, 99) for _ in range(nodes)] for _ in texts]
            start = torch.tensor([len(text) for text in texts])[:, None]
            write(cache, new, start + torch.arange(nodes))
            paths = [sorted(source.sample(range(nodes), source.randint(1, nodes))) for _ in texts]
            deepest = max(map(len, paths))
            path = torch.tensor([path + [path[-1]] * (deepest - len(path)) for path in paths])
            texts = [text + [line[i] for i in path] for text, line, path in zip(texts, new, paths)]
            cache.commit([len(text) for text in texts], start + path, start + torch.arange(deepest))
            assert [stored(cache, row) for row in range(len(texts))] == texts
            if len(texts) > 1 and source.random() < 0.1:
                kept = sorted(source.sample(range(len(texts)), len(texts) - 1))
                cache.select_rows(kept)
                texts = [texts[row] for row in kept]


def test_growth_keeps_what_is_there_and_honours_the_limit():
    cache = SpeculativeCache(1, max_length=700)
    text = list(range(200))
    write(cache, [text], None, batch=1)
    cache.set_lengths([200])
    sizes = {cache.layers[0].keys.shape[2]}
    while len(text) < 696:
        write(cache, [[len(text)] * 4], None)
        text += [len(text)] * 4
        cache.set_lengths([len(text)])
        sizes.add(cache.layers[0].keys.shape[2])
    assert stored(cache, 0) == text
    assert len(sizes) <= 3
    assert max(sizes) == 700
    with pytest.raises(ValueError, match="701 cache slots are needed, 700 are allowed"):
        cache.begin_write(None, 5)
    cache.begin_write(None, 4)


def test_select_rows_frees_and_keeps_order():
    cache = SpeculativeCache(2)
    write(cache, [[1, 2], [3, 4], [5, 6]], None, batch=3)
    cache.set_lengths([2, 1, 2])
    before = cache.nbytes()
    cache.select_rows([2, 1])
    assert (stored(cache, 0), stored(cache, 1, layer=1)) == ([5, 6], [3])
    assert cache.nbytes() * 3 == before * 2
    cache.batch_select_indices(torch.tensor([1]))
    assert stored(cache, 0) == [3]


def test_wrong_use_is_an_error():
    with pytest.raises(ValueError, match="batch size"):
        SpeculativeCache(1).begin_write(None, 1)
    cache = SpeculativeCache(1)
    write(cache, [[1, 2], [3, 4]], None, batch=2)
    cache.set_lengths([2, 1])
    with pytest.raises(ValueError, match="different lengths"):
        cache.begin_write(None, 1)
    with pytest.raises(RuntimeError, match="set_lengths"):
        cache.layers[0].crop(1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_on_it_gives_what_it_gives_on_a_dynamic_cache(family):
    target = make_target(family)
    ids = prompts(2, 12, ragged=False)["input_ids"]
    name = "cache" if "cache" in type(target).forward.__signature__.parameters else "past_key_values"
    theirs = DynamicCache()
    ours = SpeculativeCache(LAYERS)
    for start, end in ((0, 7), (7, 8), (8, 9)):
        ours.begin_write(None, end - start, batch=2)
        a = target(ids[:, start:end], use_cache=True, **{name: theirs}).logits
        b = target(ids[:, start:end], use_cache=True, **{name: ours}).logits
        ours.set_lengths([end, end])
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def random_tree(source: random.Random, batch: int, size: int, vocab: int = 5) -> tuple[Any, ...]:
    """Tokens (siblings differ), parents and depths of random trees whose deepest levels differ by row."""
    tokens, parents, depths = [], [], []
    for _ in range(batch):
        row_tokens, row_parents, row_depths = [source.randrange(vocab)], [0], [0]
        taken: dict[int, set[int]] = {}
        while len(row_tokens) < size:
            parent = source.randrange(len(row_tokens))
            free = set(range(vocab)) - taken.setdefault(parent, set())
            if not free:
                continue
            token = source.choice(sorted(free))
            taken[parent].add(token)
            row_tokens.append(token)
            row_parents.append(parent)
            row_depths.append(row_depths[parent] + 1)
        tokens.append(row_tokens)
        parents.append(row_parents)
        depths.append(row_depths)
    return torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths)


def ancestry(parents: list[int], node: int) -> list[int]:
    """The path from the root to `node`, both included."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def trees(count: int) -> list[DraftTree]:
    source = random.Random(7)
    made = []
    for _ in range(count):
        batch, size = source.randint(1, 3), source.randint(1, 14)
        tokens, parents, depths = random_tree(source, batch, size)
        made.append(from_parents(tokens, parents, depths, int(depths.max()) + source.randint(0, 2)))
    return made


def test_ancestors_and_node_at_depth():
    for tree in trees(40):
        found = tree.node_at_depth()
        for row in range(tree.tokens.shape[0]):
            parents = tree.parents[row].tolist()
            for node in range(tree.size):
                path = ancestry(parents, node)
                assert tree.ancestors[row, node].nonzero()[:, 0].tolist() == sorted(path)
                filled = path + [node] * (tree.max_depth + 1 - len(path))
                assert found[row, node].tolist() == filled


def test_chain_is_a_tree():
    tokens = torch.tensor([[3, 1, 2, 4], [0, 0, 1, 1]])
    made = chain(tokens)
    parents = torch.tensor([[0, 0, 1, 2]] * 2)
    same = from_parents(tokens, parents, torch.tensor([[0, 1, 2, 3]] * 2), 3)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(made, name), getattr(same, name)), name
    assert (made.max_depth, made.is_chain, same.is_chain) == (same.max_depth, True, False)
    assert torch.equal(made.node_at_depth(), same.node_at_depth())
    for seed in range(20):
        selected = torch.randint(0, 5, (2, 4), generator=torch.Generator().manual_seed(seed))
        a, b = accept(made, selected), accept(same, selected)
        assert a.counts.tolist() == b.counts.tolist()
        for row, count in enumerate(a.counts.tolist()):
            assert a.tokens[row, : count + 1].tolist() == b.tokens[row, : count + 1].tolist()
            assert a.path[row, : count + 1].tolist() == b.path[row, : count + 1].tolist()


def test_accept_against_a_walk():
    source, deep = random.Random(3), 0
    for tree in trees(150):
        batch = tree.tokens.shape[0]
        selected = torch.tensor([[source.randrange(5) for _ in range(tree.size)] for _ in range(batch)])
        outcome = accept(tree, selected)
        for row in range(batch):
            node, path, tokens = 0, [0], []
            while True:
                token = int(selected[row, node])
                tokens.append(token)
                children = [n for n in range(1, tree.size) if int(tree.parents[row, n]) == node]
                following = [n for n in children if int(tree.tokens[row, n]) == token]
                if not following:
                    break
                node = following[0]
                path.append(node)
            count = int(outcome.counts[row])
            assert count == len(path) - 1
            assert outcome.path[row, : count + 1].tolist() == path
            assert outcome.tokens[row, : count + 1].tolist() == tokens
            assert set(outcome.path[row, count:].tolist()) == {path[-1]}
            deep += count > 1
    assert deep > 20


@pytest.mark.parametrize("kind", ["distinct", "ties", "all equal"])
def test_best_nodes_keeps_the_best_and_their_ancestors(kind):
    source = random.Random(kind)
    for _ in range(60):
        batch, size = source.randint(1, 3), source.randint(2, 25)
        tokens, parents, depths = random_tree(source, batch, size, vocab=9)
        drops = {"distinct": [0.1, 0.5, 1.1], "ties": [0.0, 0.5], "all equal": [0.0]}[kind]
        scores = torch.zeros(batch, size)
        for row in range(batch):
            for node in range(1, size):
                noise = source.random() * 1e-3 if kind == "distinct" else 0.0
                scores[row, node] = scores[row, parents[row, node]] - source.choice(drops) - noise
        keep = source.randint(1, size + 2)
        pool = (tokens[:, 1:], parents[:, 1:] - 1, depths[:, 1:], scores[:, 1:])
        kept_tokens, kept_parents, kept_depths, kept_scores = best_nodes(*pool, keep)
        assert kept_tokens.shape == (batch, min(keep, size - 1))
        for row in range(batch):
            ranked = sorted(scores[row, 1:].tolist(), reverse=True)[: kept_scores.shape[1]]
            assert sorted(kept_scores[row].tolist(), reverse=True) == ranked
            originals = {tuple(tokens[row][ancestry(parents[row].tolist(), n)][1:].tolist()) for n in range(1, size)}
            seen = set()
            numbers = [0, *kept_parents[row].tolist()]
            for place in range(1, len(numbers)):
                assert numbers[place] < place  # parents come first, none is missing
                path = ancestry(numbers, place)
                seen.add(tuple(int(kept_tokens[row, n - 1]) for n in path[1:]))
                assert int(kept_depths[row, place - 1]) == len(path) - 1
            assert len(seen) == kept_tokens.shape[1]
            assert seen <= originals


@pytest.mark.parametrize("chained", [True, False])
def test_visibility_against_a_loop(chained):
    source = random.Random(1)
    for _ in range(40):
        batch, size = source.randint(1, 3), source.randint(1, 7)
        tree = chain(torch.zeros(batch, size, dtype=torch.long)) if chained else None
        tree = tree or from_parents(*random_tree(source, batch, size), size)
        lengths = [source.randint(0, 6) for _ in range(batch)]
        used = max(lengths) + size
        seen, positions = visibility(torch.tensor(lengths), used, tree.depths, tree.ancestors, tree.is_chain)
        assert seen.shape == (batch, size, used)
        for row, length in enumerate(lengths):
            for slot in range(used):
                node = slot - length
                inside = 0 <= node < size
                if inside:
                    assert positions[row, slot] == length + tree.depths[row, node]
                elif node < 0:
                    assert positions[row, slot] == slot
                for query in range(size):
                    expected = slot < length or (inside and bool(tree.ancestors[row, query, node]))
                    assert bool(seen[row, query, slot]) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "llama4"])
def test_target_masks_by_layer_kind(family):
    if family == "llama4":
        from transformers import Llama4TextConfig

        config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=WINDOW, hidden_size=32, head_dim=8)
    else:
        config = config_of(family)
    config._attn_implementation = "sdpa"
    masks = TargetMasks(config, torch.float32)
    lengths, depths = torch.tensor([13]), torch.tensor([[0, 1, 1, 2]])
    tree = from_parents(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 0, 0, 1]]), depths, 2)
    seen, positions = visibility(lengths, 17, depths, tree.ancestors, is_chain=False)
    built = masks.build(seen, lengths[:, None] + depths, positions)
    kinds = {"llama": ["full_attention"], "mistral": ["sliding_attention"]}.get(family)
    if kinds is None:
        assert set(built) == set(config.layer_types)
        assert len(built) == 2
    else:
        built = {kinds[0]: built}
    assert masks.full_only == (family == "llama")
    for kind, mask in built.items():
        for query in range(4):
            place = 13 + int(depths[0, query])
            for slot in range(17):
                key = int(positions[0, slot])
                near = {
                    "full_attention": True,
                    "sliding_attention": place - key < WINDOW,
                    "chunked_attention": place // WINDOW == key // WINDOW,
                }[kind]
                assert bool(mask[0, 0, query, slot]) == (bool(seen[0, query, slot]) and near)


def test_masks_in_the_form_each_implementation_takes():
    seen = torch.tensor([[[True, False], [True, True]]])
    assert finish(seen, "sdpa", torch.float16)[0, 0].tolist() == seen[0].tolist()
    additive = finish(seen, "eager", torch.float16)
    assert additive.dtype == torch.float16
    assert additive[0, 0].tolist() == [[0.0, torch.finfo(torch.float16).min], [0.0, 0.0]]
    config = config_of("llama")
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        TargetMasks(config, torch.float32)


def test_static_shapes():
    shape = static_shape([(1, 0), (0,), (1,), (0, 2), (0, 2, 1)])
    assert shape.ranks == [[0, 1], [2, 0], [1]]
    assert shape.parents == [[0, 0], [0, 1], [0]]
    assert shape.expanded == [[0, 1], [0], []]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "at least one"),
        ([()], "empty"),
        ([(0,), (0,)], "twice"),
        ([(0,), (-1,)], "negative"),
        ([(0,), (1, 0)], r"\(1, 0\) but not its parent \(1,\)"),
    ],
)
def test_bad_static_shapes(paths, words):
    with pytest.raises(ValueError, match=words):
        static_shape(paths)
