"""Attention of the test steps: every backend against all scores written out, values and gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from eagle3_hf.training import attention as module
from eagle3_hf.training.attention import StepLayout, dense_step_attention, step_attention
from eagle3_hf.training.slots import document_starts

HEADS, KV_HEADS, DIM = 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [2] * 2 + [3] * 6, [7] * 13 + [7] * 1 + [8] * 5])


def tensors(layout: StepLayout, steps: int, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS):
    generator = torch.Generator().manual_seed(0)
    count = layout.length - layout.first

    def draw(heads: int, slots: int) -> torch.Tensor:
        return torch.randn(2, heads, slots, DIM, generator=generator, dtype=dtype).requires_grad_()

    keys = [draw(kv_heads, layout.length), *(draw(kv_heads, count) for _ in range(steps - 1))]
    values = [draw(kv_heads, layout.length), *(draw(kv_heads, count) for _ in range(steps - 1))]
    return draw(HEADS, count), keys, values


def written_out(layout: StepLayout, scale: float, query, keys, values):
    """The definition, slot by slot."""
    out = torch.zeros_like(query)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            kv = h // (query.shape[1] // keys[0].shape[1])
            for i in range(query.shape[2]):
                slot = layout.first + i
                low = 0 if layout.starts is None else int(layout.starts[b, slot])
                seen_k = torch.cat([keys[0][b, kv, low : slot + 1], *(k[b, kv, i : i + 1] for k in keys[1:])])
                seen_v = torch.cat([values[0][b, kv, low : slot + 1], *(v[b, kv, i : i + 1] for v in values[1:])])
                out[b, h, i] = (seen_k @ query[b, h, i] * scale).softmax(0) @ seen_v
    return out


def layouts():
    starts = document_starts(DOCUMENTS)
    return {
        "whole rows": StepLayout(19),
        "later slots": StepLayout(19, 7),
        "last slot": StepLayout(19, 18),
        "documents": StepLayout(19, 0, starts),
        "documents, later slots": StepLayout(19, 6, starts),
    }


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", layouts())
@torch.no_grad()
def test_dense_follows_the_definition(name, steps):
    layout = layouts()[name]
    inputs = tensors(layout, steps)
    torch.testing.assert_close(dense_step_attention(layout, 0.3, *inputs), written_out(layout, 0.3, *inputs))


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("backend", ["flash", "blocks"])
def test_backends_equal_dense(backend, name, steps, kv_heads, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5)  # several blocks, the last one short
    layout = layouts()[name]
    query, keys, values = tensors(layout, steps, kv_heads=kv_heads)
    out = step_attention(layout, 0.3, query, keys, values, backend)
    expected = dense_step_attention(layout, 0.3, query, keys, values)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    inputs = [query, *keys, *values]
    for ours, theirs in zip(torch.autograd.grad(out, inputs, weight), torch.autograd.grad(expected, inputs, weight)):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("backend", ["flash", "blocks"])
def test_gradcheck(backend, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    layout = StepLayout(6, 2, document_starts(DOCUMENTS[:, 2:8]))
    query, keys, values = tensors(layout, 3)
    assert torch.autograd.gradcheck(
        lambda q, *kv: step_attention(layout, 0.3, q, list(kv[:3]), list(kv[3:]), backend), (query, *keys, *values)
    )


@pytest.mark.parametrize("name", layouts())
def test_flex_equals_dense(name):
    """Flex-attention refuses gradients on a CPU by a device check; its formulas run there."""
    layout = layouts()[name]
    query, keys, values = tensors(layout, 3, torch.float32)
    inputs = [query, *keys, *values]
    with mock.patch("torch.nn.attention.flex_attention._validate_device"):
        out = step_attention(layout, 0.3, query, keys, values, "flex")
        grads = torch.autograd.grad(out.square().sum(), inputs)
    expected = dense_step_attention(layout, 0.3, query, keys, values)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), inputs)):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "blocks"])
@pytest.mark.parametrize("documents", [False, True])
def test_on_a_gpu(backend, documents):
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    starts = (torch.arange(512, device=device) // 200 * 200).expand(2, -1) if documents else None
    layout = StepLayout(512, 100, starts)

    def draw(heads: int, slots: int) -> torch.Tensor:
        return torch.randn(2, heads, slots, 64, generator=generator, device=device).requires_grad_()

    query, keys, values = draw(8, 412), [draw(2, 512), draw(2, 412)], [draw(2, 512), draw(2, 412)]
    inputs = [query, *keys, *values]
    expected = dense_step_attention(layout, 0.125, query, keys, values)
    out = step_attention(layout, 0.125, query, keys, values, backend)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=0)
    theirs = torch.autograd.grad(expected.square().sum(), inputs)
    for ours, other in zip(torch.autograd.grad(out.square().sum(), inputs), theirs):
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["flash", "blocks"])
def test_bfloat16_keeps_scores_in_float32(backend):
    layout = StepLayout(19, 3)
    query, keys, values = tensors(layout, 3, torch.float32)
    low = [x.detach().bfloat16() for x in (query, *keys, *values)]
    exact = [x.double() for x in low]
    out = step_attention(layout, 0.3, low[0], low[1:4], low[4:], backend)
    assert out.dtype == torch.bfloat16
    expected = dense_step_attention(layout, 0.3, exact[0], exact[1:4], exact[4:])
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


def largest_tensor(run) -> int:
    """Most elements any result of an ATen call has while `run` runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.numel())
            return out

    with Watch() as watch:
        run()
    return watch.largest


@pytest.mark.parametrize("backend", ["flash", "blocks"])
def test_nothing_of_square_size(backend):
    length = 1024
    layout = StepLayout(length)
    query, keys, values = tensors(layout, 4, torch.float32)

    def run(backend: str) -> None:
        step_attention(layout, 0.3, query, keys, values, backend).sum().backward()

    square = 2 * HEADS * length * length
    assert largest_tensor(lambda: run("dense")) >= square  # the yardstick sees it
    assert largest_tensor(lambda: run(backend)) <= square // (1 if backend == "flash" else 4)
    if backend == "flash":
        assert largest_tensor(lambda: run(backend)) <= 2 * HEADS * length * DIM * 4


@torch.no_grad()
def test_dropout_and_refusals():
    layout = StepLayout(19)
    query, keys, values = tensors(layout, 2)
    with pytest.raises(ValueError, match="'flesh'"):
        step_attention(layout, 0.3, query, keys, values, "flesh")
    with pytest.raises(ValueError, match=r"attention_dropout 0\.5"):
        step_attention(layout, 0.3, query, keys, values, "flash", dropout=0.5)
    torch.manual_seed(0)
    runs = [step_attention(layout, 0.3, query, keys, values, dropout=0.5) for _ in range(400)]
    assert not torch.equal(runs[0], runs[1])
    # Dropout keeps the mean.
    expected = dense_step_attention(layout, 0.3, query, keys, values)
    assert (torch.stack(runs).mean(0) - expected).abs().max() < 0.5


def test_document_starts():
    ids = torch.tensor([[3, 3, 5, 5, 5, 3, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0]])
    assert document_starts(ids).tolist() == [[0, 0, 2, 2, 2, 5, 6, 6], [0] * 8]
