"""Eagle3CandidateGenerator: runs the draft and proposes chains, dynamic trees or static trees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.generation.candidate_generator import CandidateGenerator

from ..modeling_eagle3 import Eagle3DraftModel
from . import masks
from .cache import SpeculativeCache
from .options import DraftingOptions
from .static_tree import static_levels, static_nodes, static_shape
from .tree import DraftTree, best_nodes, chain, under_roots


class Eagle3CandidateGenerator(CandidateGenerator):
    """Proposes draft tokens for every row of a batch.

    The draft's own memory holds only rows made from true target features: each round [`extend`] appends those of the
    accepted tokens, and what [`propose`] writes past them is scratch. Keeping drafted rows instead costs 8-15 % of
    the acceptance length (vllm#14649).

    Args:
        draft: the draft model, in eval mode.
        embeddings: the target's input embedding module, used unless the draft has its own.
        options: how to draft.
    """

    requires_model_outputs = True

    def __init__(self, draft: Eagle3DraftModel, embeddings: nn.Module, options: DraftingOptions):
        self.draft = draft
        self.embeddings = draft.get_input_embeddings() or embeddings
        self.options = options
        self.cache = SpeculativeCache(draft.config.num_hidden_layers)
        self.shape = None if options.tree_paths is None else static_shape(options.tree_paths)
        most, size = max(map(max, self.shape.ranks)) if self.shape else 0, draft.config.draft_vocab_size
        if most >= size:
            raise ValueError(
                f"tree_paths asks for child rank {most}, the draft's vocabulary has {size} tokens (0-based)"
            )
        # Tokens at the start of each row that this memory doesn't hold: 0, or int64 `[rows]`.
        self.position_offset: int | torch.Tensor = 0
        # Chooses chain tokens instead of the argmax: from draft logits over the target's vocabulary `[batch, vocab]`
        # and what was drafted before `[batch, n]`, tokens `[batch]` and what they were drawn from, if they were.
        self.draw: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self._root_state: torch.Tensor | None = None
        self._root_logits: torch.Tensor | None = None
        # Where the draft runs on the host there is nothing to wait for, and a threshold makes trees smaller. On a
        # device the host would have to ask for the size of each tree, so there nodes are only left out of the count.
        self._prunes = draft.device.type == "cpu"
        self._constants: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time: index tensors that are the same in every round."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    @property
    def depth(self) -> int:
        """Deepest level this generator drafts."""
        return self.options.num_assistant_tokens if self.shape is None else len(self.shape.ranks)

    def resume(self, cache: SpeculativeCache, offsets: list[int]) -> None:
        """Go on from the memory of an earlier call, which starts at position `offsets[row]` of each row's text."""
        self.cache = cache
        if any(offsets):
            self.position_offset = torch.tensor(offsets, device=self.draft.device)

    def select_rows(self, rows: list[int], park: bool = False) -> None:
        """Go on with these rows only; with `park`, the memory of the others stays in `cache` for a later call."""
        if park:
            self.cache.park(rows)
        else:
            self.cache.select_rows(rows)
        at = torch.tensor(rows, dtype=torch.long, device=self.draft.device)
        if isinstance(self.position_offset, torch.Tensor):
            self.position_offset = self.position_offset[at]
        if self._root_state is not None:
            self._root_state = self._root_state[at]
        if self._root_logits is not None:
            self._root_logits = self._root_logits[at]

    def _positions(self, slots: torch.Tensor) -> torch.Tensor:
        return slots + self.position_offset

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = getattr(self.embeddings, "weight", None)
        # An offloaded table is on the meta device until accelerate's hook fetches it, to where the hook says.
        device = tokens.device if weight is None or weight.device.type == "meta" else weight.device
        return self.embeddings(tokens.to(device)).to(self.draft.device, self.draft.dtype)

    def extend(self, features: torch.Tensor, next_tokens: torch.Tensor, counts: list[int]) -> None:
        """Context pass: append true target features to the draft's memory.

        Args:
            features: `[batch, width, n_aux * target_hidden_size]`, in text order.
            next_tokens: int64 `[batch, width]`, the token after each feature's.
            counts: how many of the `width` entries of each row are real (the first ones). A row without any goes on
                from where it was.
        """
        batch, width = next_tokens.shape
        device = self.draft.device
        lengths = self.cache.lengths or [0] * batch
        start = self.cache.lengths_on(device) if self.cache.lengths else torch.zeros_like(next_tokens[:, 0]).to(device)
        steps = torch.arange(width, device=device)
        slots = start[:, None] + steps
        level = min(lengths) == max(lengths)
        self.cache.begin_write(None if level else slots, width, batch=batch)
        mask = None
        flash = "flash" in (self.draft.config._attn_implementation or "")
        if max(lengths) > 0 and not (flash and level):
            visible = torch.arange(self.cache.used, device=device)[None, None, :] <= slots[:, :, None]
            mask = masks.finish(visible, self.draft.config._attn_implementation, self.draft.dtype)
        out = self.draft(
            hidden_states=features.to(device, self.draft.dtype),
            inputs_embeds=self._embed(next_tokens),
            position_ids=self._positions(start)[:, None] + steps,
            attention_mask=mask,
            cache=self.cache,
            logits_to_keep=None,
        )
        self.cache.set_lengths((np.array(lengths) + counts).tolist())
        last = torch.tensor(counts, device=device) - 1
        roots = out.last_hidden_state[torch.arange(batch, device=device), last][:, None]
        if self._root_state is not None and 0 in counts:
            roots = torch.where((last < 0)[:, None, None], self._root_state, roots)
        self._root_state, self._root_logits = roots, None

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        """Draft logits of recurrent states (the final norm is already in them for `norm_output` drafts)."""
        return self.draft.lm_head(states if self.draft.config.norm_output else self.draft.norm(states))

    def _step(
        self, states: torch.Tensor, tokens: torch.Tensor, depth: int, offset: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One recurrent pass for drafted `tokens` `[batch, n]` at `depth`: draft logits and new states.

        The root's slot is at position `length - 1`, so depth `d` goes on at `length - 1 + d`, as in training.
        """
        device = states.device
        n = tokens.shape[1]
        start = self.cache.lengths_on(device)
        level = min(self.cache.lengths) == self.cache.longest
        slots = None if level else start[:, None] + offset + torch.arange(n, device=device)
        self.cache.begin_write(slots, n, offset=offset)
        out = self.draft(
            hidden_states=states,
            inputs_embeds=self._embed(tokens),
            position_ids=(self._positions(start) + depth - 1)[:, None].expand(-1, n),
            attention_mask=mask,
            cache=self.cache,
            recurrent=True,
        )
        return out.logits, out.last_hidden_state

    def propose(self, roots: torch.Tensor, depth: int) -> DraftTree:
        """Draft after the last committed tokens.

        Args:
            roots: int64 `[batch]`, the last committed token of each row.
            depth: levels to draft, at least 1 and at most [`depth`].
        """
        if self._root_state is None:
            raise RuntimeError("propose() before extend(): the draft has no context yet")
        if self._root_logits is None:
            self._root_logits = self._head(self._root_state)
        if self.shape is not None:
            return self._static(roots, depth)
        if self.options.tree_top_k == 1:
            return self._chain(roots, depth)
        return self._dynamic(roots, depth)

    def _chain(self, roots: torch.Tensor, depth: int) -> DraftTree:
        if self.draw is not None:
            return self._drawn_chain(roots, depth)
        threshold = self.options.assistant_confidence_threshold
        logits, states = self._root_logits, self._root_state
        assert logits is not None and states is not None
        tokens = [roots[:, None]]
        confidences: list[torch.Tensor] = []
        for level in range(1, depth + 1):
            best = logits[:, -1:].argmax(dim=-1)
            if threshold > 0:
                probability = logits[:, -1:].float().softmax(dim=-1).gather(-1, best[..., None])[..., 0]
                confidences.append(probability * confidences[-1] if confidences else probability)
                # The batch stops together, so it goes on while any row is confident.
                if self._prunes and bool((confidences[-1] < threshold).all()):
                    break
            tokens.append(self.draft.draft_to_target(best).to(roots.device))
            if level < depth:
                mask = self._chain_mask(level)
                logits, states = self._step(states, tokens[-1], level, level - 1, mask)
        tree = chain(torch.cat(tokens, dim=1))
        if threshold > 0 and not self._prunes:
            tree.counted = self._with_true_root(torch.cat(confidences, dim=1) >= threshold, roots)
        return tree

    @staticmethod
    def _with_true_root(counted: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(counted, (1, 0), value=True).to(roots.device)

    def _drawn_chain(self, roots: torch.Tensor, depth: int) -> DraftTree:
        """A chain whose tokens `draw` chooses."""
        logits, states = self._root_logits, self._root_state
        assert logits is not None and states is not None and self.draw is not None
        ids = torch.arange(logits.shape[-1], device=logits.device)
        kept = self._once("kept", lambda: self.draft.draft_to_target(ids))
        threshold = self.options.assistant_confidence_threshold
        tokens, probs = [roots[:, None]], []
        confidence = torch.ones(len(roots), 1, device=roots.device)
        for level in range(1, depth + 1):
            whole = logits.new_full((len(roots), self.draft.config.vocab_size), float("-inf"), dtype=torch.float32)
            whole[:, kept] = logits[:, -1].float()
            drafted, q = self.draw(whole, torch.cat(tokens, dim=1)[:, 1:])
            tokens.append(drafted[:, None].to(roots.device))
            if q is not None:
                # Stop behind an unlikely token, never in its place: dropping tokens by what was drawn is a bias.
                probs.append(q if self._prunes or threshold == 0 else torch.where(confidence >= threshold, q, 0.0))
                confidence = confidence * q.gather(1, drafted[:, None])
                if threshold > 0 and self._prunes and bool((confidence < threshold).all()):
                    break
            if level < depth:
                logits, states = self._step(states, tokens[-1], level, level - 1, self._chain_mask(level))
        tree = chain(torch.cat(tokens, dim=1))
        if probs:
            tree.draft_probs = torch.stack([*probs, torch.zeros_like(probs[0])], dim=1)
        return tree

    def _chain_mask(self, level: int) -> torch.Tensor | None:
        lengths = self.cache.lengths
        if min(lengths) == max(lengths):
            return None  # one query that sees every key
        start = self.cache.lengths_on(self.draft.device)
        used = max(lengths) + level
        visible = torch.arange(used, device=start.device)[None, None, :] < (start + level)[:, None, None]
        return masks.finish(visible, self.draft.config._attn_implementation, self.draft.dtype)

    def _tree_step(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        depth: int,
        written: int,
        ancestry: torch.Tensor,
        level_depths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Recurrent pass for one tree level; `ancestry` is bool `[batch, n, written + n]` over scratch nodes."""
        start = self.cache.lengths_on(states.device)
        used = self.cache.longest + written + tokens.shape[1]
        visible, _ = masks.visibility(start, used, level_depths, ancestry, is_chain=False)
        mask = masks.finish(visible, self.draft.config._attn_implementation, self.draft.dtype)
        return self._step(states, tokens, depth, written, mask)

    def _dynamic(self, roots: torch.Tensor, depth: int) -> DraftTree:
        """EAGLE-2's tree: a beam by cumulative log-probability, then the best nodes of all levels."""
        device, batch = self.draft.device, roots.shape[0]
        width = min(self.options.tree_top_k, self.draft.config.draft_vocab_size)
        assert self._root_logits is not None and self._root_state is not None
        values, ids = self._root_logits[:, -1].float().log_softmax(-1).topk(width, dim=-1)
        beam_scores, beam_tokens = values, self.draft.draft_to_target(ids)
        beam_states = self._root_state.expand(-1, width, -1)
        place, own, levels = self._once(
            "beam",
            lambda: (
                torch.arange(width, device=device),
                torch.eye(width, dtype=torch.bool, device=device),
                torch.arange(1, self.depth + 1, device=device).repeat_interleave(width),
            ),
        )
        beam_index = place.expand(batch, -1)
        parent = self._once("parent", lambda: place.repeat_interleave(width)).expand(batch, -1)
        pool_tokens, pool_scores = [beam_tokens], [beam_scores]
        pool_parents = [torch.full_like(beam_tokens, -1)]
        pool_depths = [torch.ones_like(beam_tokens)]
        ancestry = torch.zeros(batch, width, 0, dtype=torch.bool, device=device)
        listed, written = width, 0
        own = own.expand(batch, -1, -1)
        for level in range(1, depth):
            ancestry = torch.cat((ancestry, own), dim=2)
            depths = levels[: level * width].expand(batch, -1) - 1
            logits, states = self._tree_step(beam_states, beam_tokens, level, written, ancestry, depths)
            written += width
            values, ids = logits.float().log_softmax(-1).topk(width, dim=-1)
            scores = (beam_scores[:, :, None] + values).flatten(1)
            tokens = self.draft.draft_to_target(ids).flatten(1)
            pool_tokens.append(tokens)
            pool_scores.append(scores)
            pool_parents.append(beam_index.gather(1, parent))
            pool_depths.append(torch.full_like(tokens, level + 1))
            beam_scores, best = scores.topk(width, dim=-1)
            beam_tokens, beam_index = tokens.gather(1, best), listed + best
            from_beam = parent.gather(1, best)
            beam_states = states.gather(1, from_beam[..., None].expand(-1, -1, states.shape[-1]))
            ancestry = ancestry.gather(1, from_beam[..., None].expand(-1, -1, ancestry.shape[-1]))
            listed += width * width
        tokens, parents, depths, scores = best_nodes(
            torch.cat(pool_tokens, 1),
            torch.cat(pool_parents, 1),
            torch.cat(pool_depths, 1),
            torch.cat(pool_scores, 1),
            self.options.max_nodes,
        )
        return self._with_root(roots, tokens, parents, depths, scores, depth)

    def _with_root(
        self,
        roots: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        scores: torch.Tensor,
        max_depth: int,
    ) -> DraftTree:
        threshold, counted = self.options.assistant_confidence_threshold, None
        if threshold > 0 and self._prunes:
            # Rows keep as many nodes as the row with most above the threshold: dropping by place instead would leave
            # nodes of other rows without their parents, which stand at other places there.
            keep = int((scores >= math.log(threshold)).sum(dim=1).max())
            tokens, parents, depths, scores = best_nodes(tokens, parents - 1, depths, scores, keep)
            max_depth = int(depths.max()) if keep else 0
        elif threshold > 0:
            counted = self._with_true_root(scores >= math.log(threshold), roots)
        tree = under_roots(roots, tokens, parents, depths, max_depth)
        tree.counted = counted
        return tree

    def _static(self, roots: torch.Tensor, depth: int) -> DraftTree:
        """A fixed shape: node `rank` of a parent is the draft's `rank`-th best token there."""
        assert self.shape is not None and self._root_logits is not None and self._root_state is not None
        shape, device, batch = self.shape, self.draft.device, roots.shape[0]
        logits, states = self._root_logits, self._root_state
        weighed = self.options.assistant_confidence_threshold > 0
        tokens, scores = [], [torch.zeros(batch, 1, device=device)]
        written = 0
        levels = self._once("levels", lambda: static_levels(shape, device))[:depth]
        for at, level in enumerate(levels, start=1):
            ranked = (logits.float().log_softmax(-1) if weighed else logits).topk(level.width, dim=-1)
            ids = ranked.indices[:, level.source, level.rank]
            tokens.append(self.draft.draft_to_target(ids))
            if weighed:
                scores.append(scores[-1][:, level.parent] + ranked.values[:, level.source, level.rank])
            if at == len(levels) or not len(level.expanded):
                continue
            logits, states = self._tree_step(
                states[:, level.source[level.expanded]],
                tokens[-1][:, level.expanded],
                at,
                written,
                level.ancestry.expand(batch, -1, -1),
                level.scratch_depths.expand(batch, -1),
            )
            written += len(level.expanded)
        flat, device = torch.cat(tokens, 1), roots.device
        parents, depths, ancestors, listed = self._once(("shape", depth), lambda: static_nodes(shape, depth, device))
        if weighed:
            parents, depths = (line.expand(batch, -1).to(flat.device) for line in (parents[1:], depths[1:]))
            return self._with_root(roots, flat, parents, depths, torch.cat(scores[1:], 1), len(tokens))
        return DraftTree(
            torch.cat((roots[:, None], flat.to(device)), 1),
            parents.expand(batch, -1),
            depths.expand(batch, -1),
            ancestors.expand(batch, -1, -1),
            len(tokens),
            depth_list=listed,
        )

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
    ) -> tuple[torch.Tensor, None]:
        """transformers' interface, for chains: the text with drafted tokens behind it, and no candidate logits.

        Needs [`extend`] to have been called with the features up to the last token's predecessor.
        """
        if is_first_iteration or self._root_state is None:
            return input_ids, None
        if not self.options.is_chain:
            raise ValueError("transformers' own assisted decoding takes chains only: set tree_top_k=1")
        tree = self.propose(input_ids[:, -1], self.depth)
        return torch.cat((input_ids[:, :-1], tree.tokens), dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Constant schedule: nothing to update."""
