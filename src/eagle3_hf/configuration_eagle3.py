"""Eagle3Config: shape and variant switches of an EAGLE-3 draft."""

from __future__ import annotations

import math
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from .compat import normalise_rope

_FLAGS = (
    "use_aux_hidden_state", "attention_bias", "mlp_bias", "fc_bias", "qk_norm", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "final_norm", "own_embeddings",
)  # fmt: skip


class Eagle3Config(PretrainedConfig):
    r"""Configuration of an [`Eagle3DraftModel`].

    Args:
        vocab_size: vocabulary of the **target** (what `generate()` compares), not of the draft's head.
        draft_vocab_size: rows of the draft's head; `None` means the full vocabulary.
        hidden_size: width of the draft, `H`.
        target_hidden_size: width of the target, `Ht`; defaults to `hidden_size`.
        target_num_hidden_layers: layers of the target the draft was made for; `None` skips that check.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
        rms_norm_eps, initializer_range, attention_dropout: as in `LlamaConfig`.
        max_position_embeddings: trained length; not a limit, RoPE is computed for any position.
        rope_parameters: RoPE settings as in transformers 5 (`rope_type`, `rope_theta`, ...); the older forms
            `rope_theta` and `rope_scaling` are read too.
        aux_hidden_state_layers: ids of the target states the draft reads; id `i` is the input of decoder layer `i`
            (`hidden_states[i]`), id `L` the input of the final norm. `None`: `(2, L//2, L-3)`.
        num_aux_hidden_states: how many of them, when `aux_hidden_state_layers` is `None`.
        use_aux_hidden_state: `False`: there is no `fc`; the draft reads one target state as it is, the output of the
            final norm unless `aux_hidden_state_layers` names another (NVIDIA's short-context gpt-oss heads).
        attention_bias, mlp_bias, fc_bias: biases of the linear layers.
        qk_norm: RMSNorm on each head's query and key (Qwen3-style drafts).
        norm_before_residual: the residual starts from `hidden_norm(x)` instead of `x`.
        norm_before_fc: one RMSNorm over the concatenated aux states.
        fc_norm: one RMSNorm for each aux state (EAGLE-3.1).
        norm_output: the recurrent state is taken after the final norm (EAGLE-3.1).
        final_norm: there is a norm before the head (some NVIDIA heads have none).
        sliding_window: tokens the draft's attention saw in training; kept for export, full attention is used.
        own_embeddings: the checkpoint brings its own `embed_tokens`; else the target's are used.

    Raises:
        ValueError: sizes that contradict each other, naming both.
    """

    model_type = "eagle3"

    def __init__(
        self,
        vocab_size: int = 32000,
        draft_vocab_size: int | None = None,
        hidden_size: int = 4096,
        target_hidden_size: int | None = None,
        target_num_hidden_layers: int | None = None,
        intermediate_size: int = 14336,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        attention_dropout: float = 0.0,
        max_position_embeddings: int = 2048,
        aux_hidden_state_layers: list[int] | tuple[int, ...] | None = None,
        num_aux_hidden_states: int = 3,
        use_aux_hidden_state: bool = True,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        fc_bias: bool = False,
        qk_norm: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        final_norm: bool = True,
        sliding_window: int | None = None,
        own_embeddings: bool = False,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.hidden_size = hidden_size
        self.target_hidden_size = hidden_size if target_hidden_size is None else target_hidden_size
        self.target_num_hidden_layers = target_num_hidden_layers
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.attention_dropout = attention_dropout
        self.max_position_embeddings = max_position_embeddings
        self.aux_hidden_state_layers = None if aux_hidden_state_layers is None else list(aux_hidden_state_layers)
        self.use_aux_hidden_state = use_aux_hidden_state
        self.num_aux_hidden_states = (
            (num_aux_hidden_states if use_aux_hidden_state else 1)
            if aux_hidden_state_layers is None
            else len(aux_hidden_state_layers)
        )
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.fc_bias = fc_bias
        self.qk_norm = qk_norm
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.final_norm = final_norm
        self.sliding_window = sliding_window
        self.own_embeddings = own_embeddings
        self.rope_parameters = normalise_rope(kwargs)
        self._check()
        # An EAGLE-3 head is never tied: tied flags copied from a target's config would overwrite a trained head.
        kwargs.pop("tie_word_embeddings", None)
        # The target's special tokens, where given: pipelines compare them, and 5.x has no such attributes by default.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, None)
        super().__init__(tie_word_embeddings=False, **kwargs)

    def _check(self) -> None:
        self._check_kinds()
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must be in 1..vocab_size ({self.vocab_size}, the target's)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.norm_output and not self.final_norm:
            raise ValueError("norm_output needs final_norm: there is no norm to take the state after")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from target_hidden_size {self.target_hidden_size}: such a "
                "draft needs own_embeddings=True, the target's embeddings don't fit it"
            )
        if not self.use_aux_hidden_state:
            self._check_single_state()
        if self.num_hidden_layers < 1 or self.num_aux_hidden_states < 1:
            raise ValueError("num_hidden_layers and num_aux_hidden_states must be at least 1")

    def _check_kinds(self) -> None:
        """A file or a caller may give anything; a string for a flag would count as true, a negative eps make NaN."""
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        ids = self.aux_hidden_state_layers
        if ids is not None and not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(f"aux_hidden_state_layers must be whole numbers, got {ids!r}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} isn't known to transformers")
        rope = self.rope_parameters
        if not (math.isfinite(rope["rope_theta"]) and rope["rope_theta"] > 0):
            raise ValueError(f"rope_theta must be above 0, got {rope['rope_theta']!r}")
        if rope["rope_type"] == "default" and rope.get("factor") not in (None, 1, 1.0):
            raise ValueError(f"RoPE has a factor ({rope['factor']!r}) and no type: it would be ignored")
        numbers = {"rms_norm_eps": self.rms_norm_eps, "RoPE's factor": rope.get("factor", 1.0)}
        for name, value in numbers.items():
            least = 0 if name == "rms_norm_eps" else math.ulp(0.0)
            known = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not known or not math.isfinite(value) or value < least:
                raise ValueError(f"{name} must be a number {'of at least' if least == 0 else 'above'} 0, got {value!r}")

    def _check_single_state(self) -> None:
        needs_fc = [name for name in ("norm_before_fc", "fc_norm", "fc_bias") if getattr(self, name)]
        if needs_fc:
            raise ValueError(f"{', '.join(needs_fc)}: a draft with use_aux_hidden_state=False has no fc")
        if self.num_aux_hidden_states != 1:
            raise ValueError(
                f"use_aux_hidden_state=False reads one target state, aux_hidden_state_layers names "
                f"{self.num_aux_hidden_states}: {self.aux_hidden_state_layers}"
            )
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"use_aux_hidden_state=False reads the target's state as it is: hidden_size {self.hidden_size} must be "
                f"target_hidden_size {self.target_hidden_size}"
            )


AutoConfig.register(Eagle3Config.model_type, Eagle3Config, exist_ok=True)
