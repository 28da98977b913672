"""The report of a results file: markdown, JSON, or an HTML page."""

from __future__ import annotations

import json
from typing import Any

from .results import Results
from .summary import summarise

FORMATS = ("html", "markdown", "json")

# Heading, and what it means; the same words in both kinds of table.
COLUMNS = (
    ("tokens/s", "all tokens over all seconds, prefill included"),
    ("speed-up", "tokens/s over plain's, with a 95 % bootstrap interval over prompts"),
    ("median", "median of the speed-ups prompt by prompt"),
    ("tau", "tokens a target forward after the prefill, bonus token included"),
    ("tokens/forward", "all tokens over all target forwards, prefill included"),
    ("accepted", "accepted of drafted tokens"),
    ("efficiency", "time inside target and draft forwards over wall time, after the prefill"),
    ("identical", "prompts with exactly the tokens of plain greedy generation"),
)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _with_interval(speed: dict[str, float] | None) -> str:
    if speed is None:
        return "-"
    if speed["low"] is None:
        return _number(speed["total"])
    return f"{speed['total']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}]"


def table_row(entry: dict[str, Any]) -> list[str]:
    """The cells of one method, in the order of `COLUMNS`."""
    speed = entry["speedup"]
    return [
        _number(entry["tokens_per_second"], 1),
        _with_interval(speed),
        "-" if speed is None else _number(speed["median"]),
        _number(entry["tau"]),
        _number(entry["tokens_per_forward"]),
        _percent(entry.get("acceptance_rate")),
        _number(entry.get("cycle_efficiency")),
        _percent(entry["lossless"]),
    ]


def setting_lines(summary: dict[str, Any]) -> list[str]:
    """What was run, on what: without these the numbers say little."""
    settings, machine = summary["settings"], summary["environment"]
    temperature = settings.get("temperature")
    how = "greedy" if not temperature else f"temperature {temperature:g}, seed {settings.get('seed')}"
    how_told = {True: "chat template", False: "no chat template"}
    known = [how_told.get(settings.get("chat_template")), settings.get("dtype")]  # own scripts may keep less
    lines = [
        f"target {settings.get('target')}, draft {settings.get('draft') or 'none'}"
        + (f", assistant {settings['assistant']}" if settings.get("assistant") else ""),
        ", ".join([f"{settings.get('max_new_tokens')} new tokens at most, {how}", *filter(None, known)]),
    ]
    if machine:
        lines.append(
            f"{machine.get('gpu') or machine.get('cpu')}, {machine.get('threads')} threads, "
            f"torch {machine.get('torch')}, transformers {machine.get('transformers')}, "
            f"eagle3_hf {machine.get('eagle3_hf')}"
        )
    if summary["sessions"] > 1:
        lines.append(f"run in {summary['sessions']} sessions; the machine is as in the first")
    if summary["skipped"]:
        lines.append(f"{len(summary['skipped'])} later turns skipped, the first: {summary['skipped'][0]}")
    return lines


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in [headings, *rows]]
    marks = "|".join(["---", *["---:"] * (len(headings) - 1)])
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], f"|{marks}|", *lines[1:], ""]


def _positions(entry: dict[str, Any], depth: int) -> list[str]:
    pairs = list(zip(entry["conditional_acceptance"], entry["unconditional_acceptance"]))
    return [f"{_number(given)} / {_number(of_all)}" for given, of_all in pairs] + ["-"] * (depth - len(pairs))


def category_methods(tables: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Methods that a table by category has a column for, in their usual order."""
    found = {name for values in tables["categories"].values() for name in values}
    return [method["name"] for method in summary["methods"] if method["name"] in found]


def markdown(summary: dict[str, Any]) -> str:
    """The tables as markdown."""
    lines = ["# Evaluation", "", *(f"- {line}" for line in setting_lines(summary)), ""]
    for batch, tables in summary["batches"].items():
        for dataset, entries in tables["datasets"].items():
            answers = max(entry["answers"] for entry in entries.values())
            lines += [f"## {dataset}, batch {batch} ({answers} answers)", ""]
            rows = [[name, *table_row(entry)] for name, entry in entries.items()]
            lines += _table(["method", *(heading for heading, _ in COLUMNS)], rows)
        overall = next(iter(tables["datasets"].values()))
        counted = {name: entry for name, entry in overall.items() if entry.get("conditional_acceptance")}
        if counted:
            depth = max(len(entry["conditional_acceptance"]) for entry in counted.values())
            lines += ["Acceptance by position, given all earlier ones / of all rounds that drafted it:", ""]
            rows = [[name, *_positions(entry, depth)] for name, entry in counted.items()]
            lines += _table(["method", *map(str, range(1, depth + 1))], rows)
        if tables["categories"]:
            names = category_methods(tables, summary)
            if names:
                lines += ["tau by category:", ""]
                rows = [[c, *(_number(f.get(n)) for n in names)] for c, f in tables["categories"].items()]
                lines += _table(["category", *names], rows)
    lines += ["What the columns mean:", "", *(f"- {heading}: {meaning}" for heading, meaning in COLUMNS)]
    return "\n".join(lines)


def render(results: Results, kind: str) -> str:
    """A report.

    Args:
        kind: `html`, `markdown` or `json`.

    Raises:
        ValueError: no results, or no such kind.
        ImportError: HTML, and jinja2 isn't installed.
    """
    if kind not in FORMATS:
        raise ValueError(f"a report is {', '.join(FORMATS)}; got {kind!r}")
    summary = summarise(results)
    if kind == "json":
        return json.dumps(summary, indent=2)
    if kind == "markdown":
        return markdown(summary)
    from .html import page

    return page(summary, results)
