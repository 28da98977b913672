"""Speculative decoding from scratch: the rule, the proof by counting, and the tree mask. Runs in seconds on a CPU.

    python examples/speculative_decoding_from_scratch.py

Two tiny tables play the models: a *target* whose distribution we want, and a *draft* that guesses it. No weights are
needed, and everything can be counted.
"""

from __future__ import annotations

import torch

from eagle3_hf import speculative_decode
from eagle3_hf.decoding.theory import acceptance_probability, expected_tokens
from eagle3_hf.decoding.tree import DraftTree, from_parents
from eagle3_hf.decoding.verification import accept

WORDS = ["the", "cat", "dog", "sat", "ran", "."]
V = len(WORDS)


class Model:
    """Next-token logits that depend on the last token alone."""

    def __init__(self, logits: torch.Tensor):
        self.logits, self.forwards = logits, 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:  # [1, n] -> [1, n, V]
        self.forwards += 1
        return self.logits[tokens]


def make_models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    logits = 2 * torch.randn(V, V)
    return Model(logits), Model(logits + 0.6 * torch.randn(V, V))


def one_position(target: Model, draft: Model) -> None:
    """The rule at one position, in numbers.

    The draft draws x from q. Keeping x with probability min(1, p/q) alone would give min(p, q): too little wherever
    p > q. The residual (p - q)+ is exactly what is missing, so drawing from it after a rejection fills it up to p.
    """
    p, q = target.logits[0].softmax(-1), draft.logits[0].softmax(-1)
    kept = torch.minimum(p, q)
    missing = (p - q).clamp(min=0)
    print("1. One position: after 'the'\n")
    print(f"   {'word':<6}{'p':>8}{'q':>8}{'kept':>8}{'residual':>10}{'sum':>8}")
    for i, word in enumerate(WORDS):
        total = kept[i] + missing[i]
        print(f"   {word:<6}{p[i]:8.3f}{q[i]:8.3f}{kept[i]:8.3f}{missing[i]:10.3f}{total:8.3f}")
    print(
        f"\n   the sum is p; a draft token is kept {acceptance_probability(p, q):.0%} of the time (sum of min(p, q))\n"
    )


def whole_texts(target: Model, draft: Model) -> None:
    """Many tokens: fewer target forwards, the same distribution."""
    prompt, new, texts = torch.tensor([[0]]), 3, 4000
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(V)
    target.forwards = 0
    for _ in range(texts):
        counts[speculative_decode(target, draft, prompt, 2, 1.0, new, generator=generator)[0, -1]] += 1
    step = target.logits.softmax(-1)
    exact = step[0] @ step @ step  # the third token's distribution, summed over all texts
    print(f"2. {texts} texts of {new} tokens with {target.forwards} target forwards ({texts * new} without a draft)\n")
    print("   third token   " + "".join(f"{word:>7}" for word in WORDS))
    print("   measured      " + "".join(f"{count / texts:7.3f}" for count in counts))
    print("   exact         " + "".join(f"{chance:7.3f}" for chance in exact) + "\n")


def greedy_texts(target: Model, draft: Model) -> None:
    """At temperature 0 the text is the target's own, token by token."""
    plain = [0]
    for _ in range(12):
        plain.append(int(target.logits[plain[-1]].argmax()))
    fast = speculative_decode(target, draft, torch.tensor([[0]]), 4, 0.0, 12)[0].tolist()
    print(f"3. Greedy: {' '.join(WORDS[i] for i in fast)}\n   identical: {plain == fast}\n")


def tree_mask(target: Model, draft: Model) -> None:
    """Several guesses for the same place, verified in one forward.

    The nodes are flattened into one sequence. A node may see the text and its own ancestors, never its siblings, so
    every node gets the logits that it would have had as the end of an ordinary text. The target then draws one token at
    every node, and we walk from the root as long as the drawn token is one of the children.
    """
    q = draft.logits
    first = q[0].topk(2).indices
    second = torch.cat([q[token].topk(2).indices for token in first])
    tokens = torch.cat((torch.tensor([0]), first, second))[None]
    tree = from_parents(tokens, torch.tensor([[0, 0, 0, 1, 1, 2, 2]]), torch.tensor([[0, 1, 1, 2, 2, 2, 2]]), 2)
    print("4. A tree of two guesses, with two guesses after each. Rows see columns marked x\n")
    print_mask(tree)
    torch.manual_seed(1)
    selected = torch.multinomial(target.logits[tokens[0]].softmax(-1), 1).T  # one draw at every node
    outcome = accept(tree, selected)
    new = outcome.tokens[0, : int(outcome.counts) + 1]
    print(f"\n   drawn at the nodes: {' '.join(WORDS[i] for i in selected[0])}")
    print(f"   accepted drafts: {int(outcome.counts)}, new tokens: {' '.join(WORDS[i] for i in new)}\n")


def print_mask(tree: DraftTree) -> None:
    names = [WORDS[i] for i in tree.tokens[0]]
    print("   " + " " * 14 + "".join(f"{name:>5}" for name in names))
    for n, name in enumerate(names):
        indent = "  " * int(tree.depths[0, n])
        row = "".join(f"{'x' if seen else '.':>5}" for seen in tree.ancestors[0, n].tolist())
        print(f"   {indent + name:<14}{row}")


def what_it_gains() -> None:
    print("5. Mean tokens a target forward, by acceptance rate a and drafted tokens K: (1 - a^(K+1)) / (1 - a)\n")
    print("   a \\ K" + "".join(f"{drafted:>7}" for drafted in (1, 2, 4, 8)))
    for acceptance in (0.5, 0.7, 0.9):
        row = (expected_tokens(acceptance, drafted) for drafted in (1, 2, 4, 8))
        print(f"   {acceptance:<5}" + "".join(f"{value:7.2f}" for value in row))


def main() -> None:
    target, draft = make_models()
    one_position(target, draft)
    whole_texts(target, draft)
    greedy_texts(target, draft)
    tree_mask(target, draft)
    what_it_gains()


if __name__ == "__main__":
    main()
