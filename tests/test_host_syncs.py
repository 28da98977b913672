"""A round of speculation waits for its device once: everything the host needs comes in one transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from support import SHAPES, make_draft, make_target, oracle, prompts, texts_of
from test_devices import Elsewhere, TwoDevices, move_elsewhere, two_devices
from torch.utils._pytree import tree_flatten

from eagle3_hf.decoding.loop import _Session

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

aten = torch.ops.aten
# Their results, or the shapes of them, are known on the host only after the device has run.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal}
COPIES = {aten._to_copy, aten.copy_}


class Waits:
    """Counts, round by round, how often the host asks the other device for values."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.counting = False
        self.where: list[str] = []

    def note(self, what: str) -> None:
        if self.counting:
            self.rounds[-1] += 1
            self.where.append(what)

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> None:
        there = any(isinstance(t, Elsewhere) for t in tree_flatten((args, kwargs))[0])
        packet = func.overloadpacket
        if not there:
            return
        if packet in COPIES:
            to = kwargs.get("device") if packet is aten._to_copy else args[0].device
            if to is not None and torch.device(to).type == "cpu":
                self.note(str(func))
        elif packet in WAITS:
            self.note(str(func))
        elif packet in (aten.index, aten.index_put, aten.index_put_):
            self.counting and [self.note("mask") for i in args[1] if i is not None and i.dtype is torch.bool]


@contextmanager
def counted() -> Iterator[Waits]:
    waits, dispatch, read, a_round = Waits(), TwoDevices.__torch_dispatch__, Elsewhere.tolist, _Session._round

    def watch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits.dispatched(func, args, kwargs or {})
        return dispatch(self, func, types, args, kwargs)

    def tolist(self: Any) -> Any:
        waits.note("tolist")
        return read(self)

    def counting(self: Any) -> None:
        waits.rounds.append(0)
        waits.counting = True
        a_round(self)
        waits.counting = False

    with (
        mock.patch.object(TwoDevices, "__torch_dispatch__", watch),
        mock.patch.object(Elsewhere, "tolist", tolist),
        mock.patch.object(_Session, "_round", counting),
        # Rotary embeddings of 4.57 switch it off, which this made-up device doesn't know.
        mock.patch("torch.autocast", return_value=nullcontext()),
        two_devices(),
    ):
        yield waits


def elsewhere(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: Elsewhere(value) for name, value in inputs.items()}


def test_the_counter_counts():
    with counted() as waits:
        there = torch.arange(4, device="meta")
        waits.rounds.append(0)
        waits.counting = True
        there.tolist(), there[0].item(), bool((there > 2).any()), there.cpu(), there[there > 1], there.nonzero()
        assert waits.rounds == [6]
        (
            torch.cat((there, there)).sum(),
            torch.tensor([1, 2]).to("meta"),
            there.to(torch.float32),
            there[torch.tensor(1)],
        )
        assert waits.rounds == [6]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "threshold": {"assistant_confidence_threshold": 0.2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 9},
    # Not no_repeat_ngram_size: on 4.57 its own code reads every text.
    "prefixes": {"repetition_penalty": 1.2},
    "kept memory": {"return_dict_in_generate": True},
    "drawn": {"do_sample": True, "draft_sampling": "sample", "assistant_confidence_threshold": 0.1},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("shape", "case"), [(s, c) for s in SHAPES for c in CASES if s == "chain" or c not in ("drawn", "kept memory")]
)
def test_one_wait_a_round(shape, case, batch):
    target = make_target("llama")
    draft = make_draft(target)
    inputs = prompts(batch, 9)
    options = {
        "do_sample": False,
        "max_new_tokens": 14,
        "eos_token_id": [3, 7][: batch - 1] or None,
        "pad_token_id": 0,
    } | CASES[case]
    options |= SHAPES[shape] | {"assistant_model": draft}
    torch.manual_seed(0)
    expected = target.generate(**inputs, **options)  # the look at a new target is no part of a round
    for module in (target, draft):
        move_elsewhere(module)
    with counted() as waits:
        out = target.generate(**elsewhere(inputs), **options)
    if not options["do_sample"]:
        assert getattr(out, "sequences", out).tolist() == getattr(expected, "sequences", expected).tolist()
    # How many nodes of a dynamic tree stand at which depth is known to the device only, and processors that look at
    # prefixes are called for one length at a time.
    most = 2 if (shape, case) == ("dynamic", "prefixes") else 1
    assert len(waits.rounds) > 2
    assert max(waits.rounds) <= most, waits.where


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_below_the_threshold_do_not_count_on_a_device(shape):
    target = make_target("llama")
    draft = make_draft(target)
    inputs = prompts(3, 9)
    options = {"do_sample": False, "max_new_tokens": 20, "assistant_model": draft, **SHAPES[shape]}
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    accepted = {}
    with oracle(texts_of(plain, inputs)) as double:
        # As on a device: nothing is read while drafting.
        settle = double.__init__

        def on_a_device(self: Any, *args: Any) -> None:
            settle(self, *args)
            self._prunes = False

        with mock.patch.object(double, "__init__", on_a_device):
            for threshold in (0.0, 0.3, 0.999):
                fast = target.generate(**inputs, **options, assistant_confidence_threshold=threshold)
                assert fast.tolist() == plain.tolist()
                accepted[threshold] = target.speculation_stats.accepted
                assert target.speculation_stats.candidates_per_round == (
                    5 if shape == "chain" else 10 + (shape == "dynamic")
                )
    assert accepted[0.0] > accepted[0.3] > accepted[0.999] == 0
