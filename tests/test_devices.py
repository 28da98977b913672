"""Draft and target on different devices, and targets that accelerate's hooks spread or offload."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import SHAPES, assert_same_as_plain, config_of, make_draft, make_target, prompts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import AutoModelForCausalLM

from eagle3_hf import enable_eagle3
from eagle3_hf.compat import IS_V5
from eagle3_hf.packing import PackedLinear

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

OTHER = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, and keeps its values on the CPU."""

    inner: torch.Tensor

    def tolist(self) -> Any:
        return self.inner.tolist()

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=OTHER,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of TwoDevices")


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class TwoDevices(TorchDispatchMode):
    """Runs everything on the CPU, and fails where tensors of two devices meet, as a real second device would."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if func in _INDEXED and isinstance(args[0], Elsewhere):
            tensors = [args[0], *args[2:3]]  # as on real devices: indices may come from the CPU
        there = any(isinstance(t, Elsewhere) for t in tensors)
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        # As on real devices: scalars may come from the CPU.
        here = any(not isinstance(t, Elsewhere) and t.dim() > 0 for t in tensors)
        assert copies or not (there and here), f"{func} got tensors of two devices"
        out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if func._schema.name.endswith("_") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        elsewhere = there if wanted is None else torch.device(wanted) == OTHER
        self.moved += copies and elsewhere != there
        return tree_map(lambda t: Elsewhere(t) if elsewhere and type(t) is torch.Tensor else t, out)


def _inside(value: Any) -> Any:
    return value.inner if isinstance(value, Elsewhere) else value


def move_elsewhere(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = Elsewhere(value.detach())
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = Elsewhere(value)


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    made = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        # The only constructor that no dispatch mode sees.
        return made(*args, **kwargs) if device is None else made(*args, **kwargs).to(device)

    with mock.patch("torch.tensor", tensor), TwoDevices() as devices:
        yield devices


def test_the_double_finds_what_it_is_for():
    with two_devices():
        there = torch.arange(3, device=OTHER)
        assert isinstance(there, Elsewhere) and there.device == OTHER
        assert (there + 1).tolist() == [1, 2, 3]
        with pytest.raises(AssertionError, match="two devices"):
            there + torch.arange(3)


@pytest.mark.skipif(not IS_V5, reason="4.57 asks autocast about the stand-in's device, which torch refuses")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, "drawn"])
def test_a_draft_on_another_device(shape, batch):
    target = make_target("llama")
    draft = make_draft(target)
    inputs = prompts(batch, 9)
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": [3, 7], "pad_token_id": 0}
    drafting = SHAPES.get(shape, {"num_assistant_tokens": 4, "draft_sampling": "sample"})
    options |= drafting | {"do_sample": shape == "drawn", "assistant_model": draft}
    torch.manual_seed(0)
    expected = target.generate(**inputs, **options)
    same_device = target.speculation_stats.accepted_at
    move_elsewhere(draft)
    assert draft.device == OTHER
    torch.manual_seed(0)
    with two_devices() as devices:
        found = target.generate(**inputs, **options)
    assert found.tolist() == expected.tolist()
    assert devices.moved > 0
    assert target.speculation_stats.accepted_at == same_device


def accelerated(how: str, folder: Path) -> Any:
    """A tiny target under accelerate's hooks."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    model.generation_config.eos_token_id = None
    if how == "all in memory":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if how == "all on disk":
        return accelerate.disk_offload(model, str(folder), execution_device="cpu")
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys([*names, *(f"model.layers.{i}" for i in range(4))], "cpu")
    if how == "on disk":
        places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    return accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True, offload_dir=str(folder))


@pytest.mark.parametrize("how", ["dispatched", "on disk", "all in memory", "all on disk"])
def test_targets_under_accelerates_hooks(how, tmp_path):
    target = enable_eagle3(accelerated(how, tmp_path))
    assert any(hasattr(module, "_hf_hook") for module in target.modules())
    # Offloaded weights aren't here between forwards, and a packed copy would keep them.
    packed = [isinstance(layer.mlp.up_proj, PackedLinear) for layer in target.model.layers]
    kept = {"dispatched": [True] * 4, "on disk": [True, False, False, True]}
    assert packed == kept.get(how, [False] * 4)
    draft = make_draft(make_target("llama"))
    for batch, shape in ((1, "chain"), (3, "dynamic")):
        assert assert_same_as_plain(target, draft, prompts(batch, 9), SHAPES[shape]).accepted > 5
    if how != "dispatched":
        assert target.model.layers[1].mlp.up_proj.weight.device.type == "meta"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_folder_loaded_by_device_map(family, tmp_path):
    pytest.importorskip("accelerate")
    make_target(family).save_pretrained(tmp_path)
    places = {"": "cpu"}
    target = enable_eagle3(AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, dtype=torch.float32))
    target.generation_config.eos_token_id = None
    assert assert_same_as_plain(target, make_draft(target), prompts(3, 9), SHAPES["static"]).accepted > 5


@pytest.mark.gpu
@pytest.mark.parametrize("places", ["draft elsewhere", "target elsewhere", "target spread"])
def test_two_real_devices(places):
    if not torch.cuda.is_available():
        pytest.fail("marked gpu, and there is no CUDA device")
    target = make_target("llama").to(torch.float64)  # the two devices round differently in float32
    draft = make_draft(target)
    inputs = prompts(3, 9)
    if places == "draft elsewhere":
        draft = copy.deepcopy(draft).to("cuda")
    elif places == "target elsewhere":
        target.to("cuda")
        inputs = {name: value.to("cuda") for name, value in inputs.items()}
    else:
        from accelerate import dispatch_model

        names = {"model.embed_tokens": "cpu", "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
        dispatch_model(
            target, names | {f"model.layers.{i}": "cpu" if i < 2 else 0 for i in range(4)}, main_device="cpu"
        )
    for shape in SHAPES.values():
        assert assert_same_as_plain(target, draft, inputs, shape).accepted > 5
