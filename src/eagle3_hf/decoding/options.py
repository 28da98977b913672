"""Drafting options: where they come from and what they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig


@dataclass
class DraftingOptions:
    """How a draft proposes. Given per call to `generate()`, else read from `draft.generation_config`.

    Attributes:
        num_assistant_tokens: depth of the draft: tokens of a chain, levels of a tree.
        assistant_confidence_threshold: drop draft tokens whose cumulative draft probability is below this, in `[0, 1)`.
            They aren't verified where the draft runs on the CPU; elsewhere they are, without being accepted, because
            the host would have to wait for their number.
        tree_top_k: children a node may get in a dynamic tree, and width of its beam; 1 is a chain.
        tree_total_tokens: draft nodes verified in one target forward (root not counted); default
            `tree_top_k * num_assistant_tokens`.
        tree_paths: a static tree as child-rank paths, e.g. `[(0,), (1,), (0, 0)]`; excludes the three above but the
            threshold.
        draft_sampling: "greedy" drafts the likeliest tokens; "sample" draws each from the draft's distribution, after
            the same processors as the target's, when `generate()` samples. Both are exact. "sample" is for chains.
        exact: "margin" has tokens whose two best logits are nearly equal decided again by a single-token forward, as
            plain `generate()` decides them (greedy only; for bfloat16, float16 and quantised targets).
        exact_margin: what counts as nearly equal there, in logits; default: two steps of the target's precision at the
            best logit.
    """

    num_assistant_tokens: int = 4
    assistant_confidence_threshold: float = 0.0
    tree_top_k: int = 1
    tree_total_tokens: int | None = None
    tree_paths: Sequence[Sequence[int]] | None = None
    draft_sampling: str = "greedy"
    exact: str | None = None
    exact_margin: float | None = None

    @staticmethod
    def shared_names() -> tuple[str, ...]:
        """Options that transformers' own generation config has too."""
        return ("num_assistant_tokens", "assistant_confidence_threshold")

    @classmethod
    def own_names(cls) -> tuple[str, ...]:
        """Options that only this package knows."""
        return tuple(field.name for field in fields(cls) if field.name not in cls.shared_names())

    @classmethod
    def collect(cls, per_call: dict[str, Any], draft_config: Any) -> DraftingOptions:
        """Per-call values first, then the draft's generation config, then the defaults; checked."""
        values = {}
        for field in fields(cls):
            value = per_call.get(field.name)
            if value is None:
                value = getattr(draft_config, field.name, None)
            if value is not None:
                values[field.name] = value
        shapes = ("num_assistant_tokens", "tree_top_k", "tree_total_tokens")
        both = [name for name in shapes if per_call.get(name) is not None]
        if both and per_call.get("tree_paths") is not None:
            raise ValueError(f"tree_paths gives the whole tree: leave out {', '.join(both)}, or tree_paths")
        if both and values.get("tree_paths") is not None:
            values["tree_paths"] = None  # the draft's default gives way to a shape asked for in the call
        options = cls(**values)
        options.check()
        return options

    @classmethod
    def set_on(cls, config: GenerationConfig) -> dict[str, Any]:
        """Options that a `generation_config` given to `generate()` carries.

        transformers 4.57 fills in defaults of its own, meant for other assistants: a value equal to them isn't seen.
        """
        default = GenerationConfig()
        values = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        return {k: v for k, v in values.items() if v is not None and v != getattr(default, k, None)}

    def check(self) -> None:
        """Raise `ValueError` on a value that can't be meant."""
        if self.draft_sampling not in ("greedy", "sample"):
            raise ValueError(f"draft_sampling must be 'greedy' or 'sample', got {self.draft_sampling!r}")
        if self.draft_sampling == "sample" and not self.is_chain:
            raise ValueError("draft_sampling='sample' drafts chains: set tree_top_k=1 and no tree_paths, or 'greedy'")
        if self.exact not in (None, "margin"):
            raise ValueError(f"exact must be 'margin' or None, got {self.exact!r}")
        if self.exact_margin is not None:
            if self.exact is None:
                raise ValueError("exact_margin is the bound of exact='margin': give that too")
            if isinstance(self.exact_margin, bool) or not isinstance(self.exact_margin, Real):
                raise ValueError(f"exact_margin must be a number of logits, got {self.exact_margin!r}")
            if not self.exact_margin >= 0:
                raise ValueError(f"exact_margin must be at least 0, got {self.exact_margin}")
        for name in ("num_assistant_tokens", "tree_top_k", "tree_total_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.num_assistant_tokens < 1:
            raise ValueError(f"num_assistant_tokens must be at least 1, got {self.num_assistant_tokens}")
        if self.tree_top_k < 1:
            raise ValueError(f"tree_top_k must be at least 1, got {self.tree_top_k}")
        if not 0.0 <= self.assistant_confidence_threshold < 1.0:
            raise ValueError(
                f"assistant_confidence_threshold must be in [0, 1), got {self.assistant_confidence_threshold}"
            )
        if self.tree_total_tokens is not None and self.tree_total_tokens < 1:
            raise ValueError(f"tree_total_tokens must be at least 1, got {self.tree_total_tokens}")

    @property
    def is_chain(self) -> bool:
        """Whether at most one token is drafted at each depth."""
        return self.tree_top_k == 1 and self.tree_paths is None

    @property
    def max_nodes(self) -> int:
        """Most draft nodes in one verification, root not counted."""
        if self.tree_paths is not None:
            return len(self.tree_paths)
        if self.is_chain:
            return self.num_assistant_tokens
        return self.tree_total_tokens or self.tree_top_k * self.num_assistant_tokens
