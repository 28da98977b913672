"""From single results to tables: what the report, its markdown and its JSON show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..decoding.statistics import SpeculationStats
from . import metrics
from .methods import PLAIN
from .results import Results

ALL = "all sets"
_Record = dict[str, Any]
_Times = tuple[tuple[int, float], tuple[int, float]]


def _counts(record: _Record) -> SpeculationStats | None:
    """Counts of one call: from its blocks without the first (the prefill's), else from the loop's own statistics."""
    if record["stats"] is not None:
        return SpeculationStats(**record["stats"])
    if record["blocks"] is None:
        return None
    counts = SpeculationStats()
    for tokens, accepted, depth, nodes in record["blocks"][1:]:
        counts.count_round(depth, nodes, accepted, tokens)
    return counts


def _tokens(record: _Record) -> int:
    return sum(len(row["ids"]) for row in record["rows"])


def _forwards(record: _Record, counts: SpeculationStats | None) -> int:
    """Target forwards of all rows, prefill included."""
    if counts is None:
        return _tokens(record)
    return len(record["rows"]) + counts.rounds


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None  # of nothing there is no share, 0 would be read as "never accepted"


def _speed_up(pairs: list[tuple[_Record, _Record]]) -> dict[str, float | None]:
    times = [((_tokens(mine), mine["seconds"]), (_tokens(base), base["seconds"])) for mine, base in pairs]
    ratios = [metrics.speed_ratio([time]) for time in times]
    # The turns of a conversation aren't independent: whole conversations are resampled.
    conversations: dict[str, list[_Times]] = {}
    for (mine, _), time in zip(pairs, times):
        conversations.setdefault(mine["unit"].rpartition("/")[0], []).append(time)

    def ratio(drawn: Sequence[list[_Times]]) -> float:
        return metrics.speed_ratio([time for group in drawn for time in group])

    low, high = None, None
    if len(conversations) > 1:  # one alone can't be resampled: an interval of no width would look certain
        low, high = metrics.bootstrap_interval(list(conversations.values()), ratio)
    return {
        "total": metrics.speed_ratio(times),
        "low": low,
        "high": high,
        "median": statistics.median(ratios),
        "mean": statistics.mean(ratios),
    }


def _milliseconds(stats: SpeculationStats) -> dict[str, float]:
    rounds = max(stats.rounds, 1)
    total = stats.total_seconds - stats.prefill_seconds
    rest = total - stats.target_seconds - stats.draft_seconds
    parts = {"target": stats.target_seconds, "draft": stats.draft_seconds, "rest": rest, "total": total}
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def _merged(records: Iterable[_Record]) -> SpeculationStats | None:
    merged: SpeculationStats | None = None
    for record in records:
        counts = _counts(record)
        if counts is not None:
            merged = merged or SpeculationStats()
            merged.merge(counts)
    return merged


def _entry(records: list[_Record], plain: dict[str, _Record], greedy: bool) -> dict[str, Any]:
    """One method on one set of units."""
    tokens, seconds = sum(map(_tokens, records)), sum(record["seconds"] for record in records)
    # A text of no tokens can't be: the end token is one. A unit whose plain run is still missing has no pair.
    pairs = [(record, plain[record["unit"]]) for record in records if record["unit"] in plain]
    entry: dict[str, Any] = {
        "calls": len(records),
        "answers": sum(len(record["rows"]) for record in records),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": _speed_up(pairs) if pairs else None,
        "lossless": None,
        "tokens_per_forward": None,
        "tau": None,
    }
    if greedy and pairs:
        mine = [row["ids"] for record, _ in pairs for row in record["rows"]]
        base = [row["ids"] for _, record in pairs for row in record["rows"]]
        entry["lossless"] = metrics.losslessness(mine, base)
    counts = _merged(records)
    # What a batch of a method without counts did isn't known, but plain generation gives a token a forward.
    if counts is not None:
        forwards = sum(_forwards(record, _counts(record)) for record in records)
        entry |= {
            "tokens_per_forward": metrics.tokens_per_forward(tokens, forwards),
            "tau": _share(counts.generated, counts.rounds),
            "rounds": counts.rounds,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "acceptance_rate": _share(counts.accepted, counts.drafted),
            "conditional_acceptance": list(map(_share, counts.accepted_at, counts.reached)),
            "unconditional_acceptance": list(map(_share, counts.accepted_at, counts.speculated)),
        }
        if counts.rounds and counts.total_seconds > 0:
            entry["cycle_efficiency"] = counts.cycle_efficiency
            entry["milliseconds_per_round"] = _milliseconds(counts)
    return entry


def _depth_curves(entries: dict[str, Any], methods: dict[str, Any]) -> dict[str, Any]:
    """tau against the drafted depth: measured, and what the longest chain's rates promise for shorter ones."""
    curves: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        family, depth = methods.get(name, {}).get("family"), methods.get(name, {}).get("depth")
        if family is not None and depth is not None and entry["tau"] is not None:
            curves.setdefault(family, {"measured": []})["measured"].append([depth, entry["tau"]])
            if family == "chain" and depth == max(point[0] for point in curves[family]["measured"]):
                # Behind a position that was never reached nothing was accepted either.
                rates = [rate or 0.0 for rate in entry["conditional_acceptance"]]
                expected = metrics.expected_length_by_depth(rates)
                curves[family]["expected"] = [[place, tau] for place, tau in enumerate(expected, start=1)]
    for curve in curves.values():
        curve["measured"].sort()
    return curves


def _by(records: Sequence[_Record], name: str) -> dict[str, list[_Record]]:
    found: dict[str, list[_Record]] = {}
    for record in records:
        found.setdefault(record[name], []).append(record)
    return found


def _category(record: _Record) -> str:
    category = record["rows"][0]["category"]
    return f"{record['dataset']}: {category}" if category else record["dataset"]


def summarise(results: Results) -> dict[str, Any]:
    """All tables, as plain numbers.

    Returns:
        `settings`, `environment` (of the first session), `sessions`, `skipped`, `methods`, and `batches`: for each
        batch size `datasets` (the entry of each method, first for all sets together where there are several, then for
        each), `categories` (tau of each method by category) and `depth` (tau against the drafted depth). A share of
        nothing is `None`: tau without a round, the acceptance at a position that was never reached.

    Raises:
        ValueError: no results.
    """
    records = [record for record in results.records if record["kind"] == "result"]
    if not records:
        raise ValueError("no results to report")
    methods = results.methods()
    order = {name: place for place, name in enumerate(methods)}
    greedy = not results.settings.get("temperature")
    batches: dict[str, Any] = {}
    for batch in sorted({record["batch"] for record in records}):
        here = [record for record in records if record["batch"] == batch]
        plain = {record["unit"]: record for record in here if record["method"] == PLAIN}
        datasets = _by(here, "dataset")
        if len(datasets) > 1:
            datasets = {ALL: here, **datasets}
        tables = {}
        for dataset, rows in datasets.items():
            by_method = sorted(_by(rows, "method").items(), key=lambda item: order.get(item[0], len(order)))
            tables[dataset] = {name: _entry(runs, plain, greedy) for name, runs in by_method}
        categories: dict[str, dict[str, float]] = {}
        if batch == 1:
            for record in here:
                categories.setdefault(_category(record), {})
            for category, found in categories.items():
                of_category = [record for record in here if _category(record) == category]
                for name, runs in sorted(_by(of_category, "method").items(), key=lambda item: order.get(item[0], 0)):
                    counts = _merged(runs)
                    if counts is not None and counts.rounds:
                        found[name] = counts.tau
        overall = next(iter(tables.values()))
        batches[str(batch)] = {
            "datasets": tables,
            "categories": categories,
            "depth": _depth_curves(overall, methods),
        }
    return {
        "settings": results.settings,
        "environment": results.sessions[0].get("environment", {}) if results.sessions else {},
        "sessions": len(results.sessions),
        "skipped": [record["reason"] for record in results.records if record["kind"] == "skipped"],
        "methods": list(methods.values()),
        "batches": batches,
    }
