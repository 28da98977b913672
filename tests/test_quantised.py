"""Quantised and half-precision targets: packing leaves their linears alone, and greedy output stays explained.

torchao and bitsandbytes are optional; where they aren't installed their tests are skipped, and a small tensor class of
our own stands for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    CHAIN,
    DYNAMIC,
    SHAPES,
    assert_same_as_plain,
    config_of,
    make_draft,
    make_target,
    oracle,
    prompts,
    texts_of,
)
from torch import nn
from transformers import AutoModelForCausalLM

from eagle3_hf import AutoEagle3Target, enable_eagle3
from eagle3_hf.packing import PackedLinear, pack_linears

pytestmark = pytest.mark.filterwarnings("ignore")


class Rounded(torch.Tensor):
    """Weight-only int8, the way torchao does it: another class inside an ordinary linear, that says it is float32."""

    whole: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        made.scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        made.whole = (weight.detach() / made.scale).round().to(torch.int8)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            weight = args[1]
            return nn.functional.linear(args[0], weight.whole * weight.scale, *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"Rounded has no {func}")


def round_linears(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Rounded(module.weight), requires_grad=False)


@pytest.mark.parametrize("order", ["quantised first", "enabled first"])
def test_weights_of_another_class(order):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    if order == "enabled first":
        enable_eagle3(target)
    round_linears(target)
    enable_eagle3(target)
    target.generation_config.eos_token_id = None
    packed = sum(isinstance(module, PackedLinear) for module in target.modules())
    assert (packed == 0) == (order == "quantised first")
    assert pack_linears(target) == 0
    draft = make_draft(target)
    for batch, shape in ((1, "chain"), (3, "dynamic"), (3, "static")):
        assert assert_same_as_plain(target, draft, prompts(batch, 9), SHAPES[shape]).accepted > 5


def explained(target: Any, draft: Any, bound: float) -> int:
    """Differences from plain greedy output; each must begin where plain's two best logits are within `bound`."""
    differ = 0
    for seed in range(3):
        inputs = prompts(1, 9, seed)
        options = {"do_sample": False, "max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True}
        plain = target.generate(**inputs, **options)
        for shape in (CHAIN, DYNAMIC):
            with oracle(texts_of(plain.sequences, inputs)):
                fast = target.generate(**inputs, **options, assistant_model=draft, **shape)
            assert target.speculation_stats.accepted > 0
            pairs = zip(plain.sequences[0, 9:].tolist(), fast.sequences[0, 9:].tolist(), strict=True)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                best = plain.logits[first][0].float().topk(2).values
                assert best[0] - best[1] <= bound, f"differs at {first} with a margin of {float(best[0] - best[1])}"
                differ += 1
    return differ


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_targets(dtype, draft_dtype):
    target = make_target("llama").to(dtype)
    # Logits here are below 16: a few steps of their own precision.
    explained(target, make_draft(make_target("llama")).to(draft_dtype), bound=24 * torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("how", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "TorchAoConfig"])
def test_torchao(how, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    if how == "TorchAoConfig":
        from transformers import TorchAoConfig

        make_target("llama").save_pretrained(tmp_path)
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
        target = AutoEagle3Target.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
        quantization.quantize_(model, getattr(quantization, how)())
        target = enable_eagle3(model)
    target.generation_config.eos_token_id = None
    assert not isinstance(target.model.layers[0].mlp.up_proj, PackedLinear)
    draft = make_draft(make_target("llama"))
    for batch, shape in ((1, "chain"), (3, "dynamic")):
        assert assert_same_as_plain(target, draft, prompts(batch, 9), SHAPES[shape]).accepted > 5


def test_bitsandbytes_8_bit(tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    make_target("llama").save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True)
    target = AutoEagle3Target.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    target.generation_config.eos_token_id = None
    assert type(target.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    # LLM.int8() takes outlier columns from all rows of a forward together, so a forward over several tokens is off by
    # more than its rounding.
    explained(target, make_draft(make_target("llama")), bound=2.0)
