"""Eagle3DraftModel: the one-layer draft of EAGLE-3 (arXiv 2503.01840) as a transformers `PreTrainedModel`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import ModelOutput

from .compat import rotary_config
from .configuration_eagle3 import Eagle3Config
from .draft_layers import Eagle3DecoderLayer

DEFAULT_NUM_ASSISTANT_TOKENS = 4


@dataclass
class Eagle3DraftOutput(ModelOutput):
    """Output of [`Eagle3DraftModel`].

    Attributes:
        logits: `[batch, kept, draft_vocab_size]`, over the draft vocabulary.
        last_hidden_state: `[batch, sequence, hidden_size]`, the recurrent state to feed back.
    """

    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


class Eagle3DraftModel(PreTrainedModel):
    """EAGLE-3 draft: `fc` over aux states, decoder layer on `cat(embedding, hidden)`, head over a pruned vocabulary.

    Slot `t` pairs the target feature of token `t` with the embedding of token `t+1` and predicts token `t+2`. The
    *initial* pass reads target features (`n_aux * target_hidden_size`), the *recurrent* pass the draft's own state.

    Buffers:
        d2t: int64 `[draft_vocab_size]`, offsets: draft id `i` is target id `i + d2t[i]`.
        t2d: bool `[vocab_size]`, True for target tokens that the draft vocabulary holds.
    """

    # How the checkpoint was read (`checkpoints.Provenance`); None for a draft that wasn't loaded.
    provenance: Any = None
    config_class = Eagle3Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_attention_backend = True
    _no_split_modules = ["Eagle3DecoderLayer"]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        features = self.feature_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(features, eps=config.rms_norm_eps)
        if config.fc_norm:
            norms = (
                LlamaRMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
                for _ in range(config.num_aux_hidden_states)
            )
            self.fc_norm = nn.ModuleList(norms)
        self.fc = (
            nn.Linear(features, config.hidden_size, bias=config.fc_bias)
            if config.use_aux_hidden_state
            else nn.Identity()
        )
        self.layers = nn.ModuleList(Eagle3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config=rotary_config(config))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        kept = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("t2d", kept)
        # The threshold is set too: transformers 4.57 would fill in 0.4, meant for its own assistants.
        self.generation_config = GenerationConfig(
            num_assistant_tokens=DEFAULT_NUM_ASSISTANT_TOKENS, assistant_confidence_threshold=0.0
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def _supports_logits_to_keep(self) -> bool:
        # The first that transformers' own assisted decoding asks an assistant, and no draft should come that far.
        raise ValueError(
            "an Eagle3DraftModel drafts for targets only: make the model one with enable_eagle3(model), or load it "
            "with AutoEagle3Target.from_pretrained(), and pass the draft itself as assistant_model, not a wrapper "
            "of it (draft.compile() instead of torch.compile(draft))"
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft-vocabulary ids (int64, any shape) to target ids."""
        return draft_ids + self.d2t[draft_ids]

    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Set which target tokens the head's rows stand for.

        Args:
            target_ids: int64 `[draft_vocab_size]`, strictly ascending target ids.

        Raises:
            ValueError: wrong number of ids, ids out of range, or not strictly ascending.
        """
        size = self.config.draft_vocab_size
        if target_ids.shape != (size,):
            raise ValueError(f"{size} token ids are needed (draft_vocab_size), got shape {tuple(target_ids.shape)}")
        if (target_ids[1:] <= target_ids[:-1]).any() or target_ids[0] < 0 or target_ids[-1] >= self.config.vocab_size:
            raise ValueError(f"draft vocabulary must be ascending ids below vocab_size {self.config.vocab_size}")
        target_ids = target_ids.to(self.d2t.device)
        self.d2t.copy_(target_ids - torch.arange(size, device=self.d2t.device))
        self.t2d.zero_()[target_ids] = True

    @property
    def feature_size(self) -> int:
        """Width of the target features: `num_aux_hidden_states * target_hidden_size`."""
        return self.config.num_aux_hidden_states * self.config.target_hidden_size

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features `[..., feature_size]` to draft states `[..., hidden_size]`."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_aux_hidden_states, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        recurrent: bool = False,
        logits_to_keep: int | torch.Tensor | None = 0,
        **kwargs: Any,
    ) -> Eagle3DraftOutput:
        """One pass of the draft.

        Args:
            hidden_states: target features `[batch, sequence, n_aux * target_hidden_size]`, or with `recurrent=True`
                the draft's last state `[batch, sequence, hidden_size]`. The mode is never guessed from the shape.
            input_ids: int64 `[batch, sequence]`, the token **after** each feature's; needs own embeddings.
            inputs_embeds: its embedding `[batch, sequence, hidden_size]` (the target's table), instead.
            position_ids: int64 `[batch, sequence]`, index of the feature; default `0..sequence-1`.
            attention_mask: `[batch, 1, sequence, keys]`, bool (sdpa) or additive (eager); `None` is causal.
            cache: key/value cache, updated in place.
            recurrent: see `hidden_states`.
            logits_to_keep: rows that get logits: 0 all, `n` the last n, an int64 tensor those; `None` no logits.

        Raises:
            ValueError: wrong width for the mode, or no embeddings for `input_ids`.
            TypeError: an argument this model doesn't know.
        """
        if kwargs:
            raise TypeError(f"Eagle3DraftModel.forward() doesn't know {sorted(kwargs)}")
        width = self.config.hidden_size if recurrent else self.feature_size
        if hidden_states.shape[-1] != width:
            mode = "recurrent states" if recurrent else "target features"
            raise ValueError(f"{mode} must be {width} wide, got {hidden_states.shape[-1]}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            if self.get_input_embeddings() is None:
                raise ValueError("this draft has no embeddings of its own: pass inputs_embeds from the target's table")
            inputs_embeds = self.embed_tokens(input_ids)
        hidden = hidden_states if recurrent else self.fuse(hidden_states)
        inputs_embeds = inputs_embeds.to(hidden.dtype)
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        past = cache.get_seq_length() if cache is not None else 0
        # sdpa's own causal mask is right only without a past: it lines up the first query with the first key.
        masked = {None: True, "eager": True, "sdpa": past > 0}.get(self.config._attn_implementation, False)
        if attention_mask is None and hidden.shape[1] > 1 and masked:
            keys = hidden.shape[1] + past
            attention_mask = hidden.new_full((hidden.shape[1], keys), torch.finfo(hidden.dtype).min)
            attention_mask = attention_mask.triu(keys - hidden.shape[1] + 1)[None, None]
        rope = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(inputs_embeds, hidden, rope, attention_mask, cache)
        return self.head(hidden, logits_to_keep)

    def head(self, hidden: torch.Tensor, logits_to_keep: int | torch.Tensor | None = 0) -> Eagle3DraftOutput:
        """Recurrent state and logits of the last layer's output `[batch, sequence, hidden_size]`."""
        normed = self.norm(hidden) if self.config.norm_output else None
        state = hidden if normed is None else normed
        if logits_to_keep is None:
            return Eagle3DraftOutput(last_hidden_state=state)
        kept = hidden if normed is None else normed
        if isinstance(logits_to_keep, torch.Tensor):
            kept = kept[:, logits_to_keep]
        elif logits_to_keep:
            kept = kept[:, -logits_to_keep:]
        return Eagle3DraftOutput(
            logits=self.lm_head(self.norm(kept) if normed is None else kept), last_hidden_state=state
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, target: Any = None, **kwargs: Any
    ):
        """Load a draft of any published layout; `draft.provenance` says which it was and what was done to it.

        Our own layout goes through `PreTrainedModel.from_pretrained`. Missing or unknown weights are an error, never a
        warning.

        Args:
            pretrained_model_name_or_path: folder or Hub id.
            target: the loaded target; needed by drafts that use its head, and it settles what else the checkpoint
                leaves open (depth, padding of the vocabulary).
            kwargs: as for `PreTrainedModel.from_pretrained` (`dtype`, `revision`, `subfolder`, `token`, ...), and
                fields of `Eagle3Config` (`aux_hidden_state_layers=[...]`), which win over the checkpoint's.

        Raises:
            ValueError: an unknown or unsupported kind of checkpoint, or one that is damaged or incomplete.
            OSError: files are missing.
        """
        from .checkpoints.families import is_own
        from .checkpoints.files import HUB_ARGUMENTS, CheckpointFiles
        from .checkpoints.load import check_target_sizes, load_published, own_provenance
        from .checkpoints.own import refuse_incomplete
        from .checkpoints.vocabulary import fit_target_vocabulary

        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        files = CheckpointFiles(os.fspath(pretrained_model_name_or_path), hub)
        wants_info = kwargs.pop("output_loading_info", False)
        if (
            not args
            and not isinstance(kwargs.get("config"), PretrainedConfig)
            and not is_own(content := files.config())
        ):
            rest = {key: value for key, value in kwargs.items() if key not in HUB_ARGUMENTS}
            if rest.pop("config", None) is not None:
                raise ValueError("config= isn't taken for a published draft checkpoint: pass the fields themselves")
            model = load_published(cls, files, content, target, **rest)
            return (model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}) if wants_info else model
        files.check()
        kwargs["ignore_mismatched_sizes"] = True  # reported below by name; the library's own error names none
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        refuse_incomplete(files.source, info)
        with contextlib.suppress(OSError):  # no generation_config.json: the defaults stand
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub)
        model.provenance = own_provenance(files, model)
        if target is not None:
            config = model.config
            check_target_sizes(config.target_hidden_size, config.target_num_hidden_layers, target)
            model.provenance.warnings += fit_target_vocabulary(model, target.config.get_text_config().vocab_size)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`, with the drafting options beside the weights."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self.generation_config.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload with a model card; `target=` and `licence=` are needed, see [`checkpoints.hub.push_draft`]."""
        from .checkpoints.hub import push_draft

        return push_draft(self, repo_id, **kwargs)


AutoModel.register(Eagle3Config, Eagle3DraftModel, exist_ok=True)
