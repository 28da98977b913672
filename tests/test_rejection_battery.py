"""The samplers against exact distributions, and the same battery against samplers that are wrong on purpose."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from rejection_tables import (
    METHODS,
    PROCESSORS,
    SAMPLED,
    TEMPERATURES,
    Tables,
    battery,
    make_tables,
    process,
    processors,
)

from eagle3_hf.decoding import rejection, rejection_tree

SHORT, LONG = 16_000, 208_000  # draws; multiples of 16


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("method", METHODS)
def test_distribution(method: str, name: str) -> None:
    for temperature in TEMPERATURES:
        tables, _, _ = make_tables(name, temperature)
        fits = battery(METHODS[method], tables, tables.target, SHORT, 16)
        assert all(one.ok for one in fits), (temperature, fits)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("method", METHODS)
def test_distribution_long(method: str, name: str, temperature: float, batch: int) -> None:
    tables, _, _ = make_tables(name, temperature)
    fits = battery(METHODS[method], tables, tables.target, LONG, batch)
    assert all(one.ok for one in fits), fits


def must_fail(method: str, tables: Tables, truth: torch.Tensor) -> None:
    fits = battery(METHODS[method], tables, truth, SHORT // 4, 16)
    assert not all(one.ok for one in fits), fits
    assert all(one.tv > 1.5 * one.tv_bound for one in fits), fits  # not by a hair


# Selection draws whole tokens and has no residual to get wrong.
@pytest.mark.parametrize("method", [name for name in METHODS if "selection" not in name])
def test_the_battery_sees_p_in_place_of_the_residual(method: str) -> None:
    tables, _, _ = make_tables("none", 1.0)
    wrong = {"residual": lambda p, q: p, "remove_token": lambda p, tokens: p}
    with mock.patch.multiple(rejection, **wrong), mock.patch.multiple(rejection_tree, **wrong):
        must_fail(method, tables, tables.target)


@pytest.mark.parametrize("method", SAMPLED)
@pytest.mark.parametrize("name", ["none", "top_k", "repetition"])
def test_the_battery_sees_q_of_unprocessed_logits(method: str, name: str) -> None:
    tables, _, raw_draft = make_tables(name, 0.5)
    must_fail(method, Tables(tables.target, tables.drawn, raw_draft.softmax(-1)), tables.target)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "repetition"])
def test_the_battery_sees_a_dropped_processor(method: str, name: str) -> None:
    tables, raw, _ = make_tables(name, 1.0)
    dropped = process(raw, processors("none", 1.0))
    must_fail(method, Tables(dropped, tables.drawn, tables.told), tables.target)


@pytest.mark.parametrize("method", METHODS)
def test_the_battery_sees_a_dropped_temperature(method: str) -> None:
    tables, raw, _ = make_tables("none", 1.5)
    must_fail(method, Tables(raw, tables.drawn, tables.told), tables.target)
