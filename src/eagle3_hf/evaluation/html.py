"""The report as one HTML page: tables, charts and traces, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from . import svg
from .report import COLUMNS, category_methods, setting_lines, table_row
from .results import Results

_PARTS = ("target", "draft", "rest")


def _bars(tables: dict[str, Any], colours: dict[str, int]) -> list[tuple[str, str]]:
    """Speed-up bars of each dataset, all on one scale."""
    charts = []
    speeds = [e["speedup"] for entries in tables.values() for e in entries.values() if e["speedup"]]
    top = max((speed["high"] or speed["total"] for speed in speeds), default=1.0)
    for dataset, entries in tables.items():
        rows = [
            (name, colours[name], speed["total"], speed["low"], speed["high"])
            for name, entry in entries.items()
            if (speed := entry["speedup"])
        ]
        if rows:
            charts.append((dataset, svg.interval_bars(rows, max(top, 1.0), f"speed-up on {dataset}")))
    return charts


def _until_none(rates: list[float | None]) -> list[float]:
    """Behind a position that never held there is nothing to see, and a method that drafts far would fill the axis."""
    shown: list[float] = []
    for rate in rates:
        if rate is None:
            break
        shown.append(rate)
        if rate == 0:
            break
    return shown


def _positions(entries: dict[str, Any], colours: dict[str, int], which: str) -> str:
    curves = [
        (name, colours[name], list(enumerate(_until_none(entry[which]), start=1)), False)
        for name, entry in entries.items()
        if entry.get(which)
    ]
    return svg.lines(curves, "draft position", "share accepted", y_top=1.0) if curves else ""


def _depths(tables: dict[str, Any], methods: list[dict[str, Any]], colours: dict[str, int]) -> str:
    of_family: dict[str, int] = {}
    for method in methods:
        if method.get("family"):
            of_family.setdefault(method["family"], colours[method["name"]])
    curves = []
    for family, found in tables["depth"].items():
        number = of_family.get(family, 0)
        if "expected" in found:
            curves.append((f"{family}, computed", number, found["expected"], True))
        curves.append((family, number, found["measured"], False))
    return svg.lines(curves, "drafted depth K", "tau", y_from=1.0) if curves else ""


def _times(entries: dict[str, Any]) -> str:
    rows = [(name, entry["milliseconds_per_round"]) for name, entry in entries.items() if "cycle_efficiency" in entry]
    return svg.stacked_bars(rows, _PARTS, "ms a round") if rows else ""


def _categories(tables: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    found = tables["categories"]
    top = max((value for values in found.values() for value in values.values()), default=1.0)
    return {"methods": category_methods(tables, summary), "rows": found, "top": max(top, 1.01)}


def kept_nodes(tree: dict[str, Any], accepted: list[int]) -> list[int]:
    """The nodes of a draft tree that the accepted tokens are, by walking down from its root."""
    node, kept = 0, []
    for token in accepted:
        children = [n for n, parent in enumerate(tree["parents"]) if n and parent == node and tree["ids"][n] == token]
        if not children:
            break
        node = children[0]
        kept.append(node)
    return kept


def _trace(record: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws: for each round its tokens, how many were drafted, and the tree."""
    trace, ids = record["trace"], record["rows"][0]["ids"]
    blocks = record["blocks"] or [[1, 0, 0, 0]] * len(ids)
    rounds, start = [], 0
    for place, (size, accepted, depth, nodes) in enumerate(blocks):
        tree = trace["trees"][place] if place < len(trace["trees"]) else None
        drawn = None
        if tree is not None:
            kept = kept_nodes(tree, ids[start : start + accepted])
            drawn = {"pieces": tree["pieces"], "parents": tree["parents"], "kept": kept}
        rounds.append(
            {
                "pieces": trace["pieces"][start : start + size],
                "accepted": accepted,
                "drafted": nodes,
                "depth": depth,
                "tree": drawn,
            }
        )
        start += size
    return {"rounds": rounds, "tokens": len(ids), "seconds": record["seconds"]}


def traces(results: Results, methods: list[str]) -> list[dict[str, Any]]:
    """Traced turns, each with all methods."""
    found: dict[str, dict[str, Any]] = {}
    for record in results.records:
        if record["kind"] != "result" or "trace" not in record:
            continue
        row = record["rows"][0]
        title = f"{record['dataset']}, prompt {row['id']}, turn {record['turn'] + 1}"
        if row["category"]:
            title += f" ({row['category']})"
        unit = found.setdefault(
            record["unit"], {"title": title, "prompt": record["trace"]["prompt"], "methods": {}}
        )  # fmt: skip
        unit["methods"][record["method"]] = _trace(record)
    for unit in found.values():
        unit["methods"] = {name: unit["methods"][name] for name in methods if name in unit["methods"]}
    return list(found.values())


def page(summary: dict[str, Any], results: Results) -> str:
    """The whole page as text."""
    import jinja2

    names = [method["name"] for method in summary["methods"]]
    colours = {name: place for place, name in enumerate(names)}
    sections = []
    for batch, tables in summary["batches"].items():
        overall = next(iter(tables["datasets"].values()))
        sections.append(
            {
                "batch": batch,
                "tables": {
                    dataset: [(name, colours[name], table_row(entry)) for name, entry in entries.items()]
                    for dataset, entries in tables["datasets"].items()
                },
                "answers": {
                    dataset: max(entry["answers"] for entry in entries.values())
                    for dataset, entries in tables["datasets"].items()
                },
                "bars": _bars(tables["datasets"], colours),
                "conditional": _positions(overall, colours, "conditional_acceptance"),
                "unconditional": _positions(overall, colours, "unconditional_acceptance"),
                "depths": _depths(tables, summary["methods"], colours),
                "times": _times(overall),
                "categories": _categories(tables, summary),
            }
        )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text("utf-8"))
    # Inside a script element only "</" and "<!--" end what should be data.
    data = json.dumps(traces(results, names), ensure_ascii=False).replace("<", "\\u003c")
    return template.render(
        columns=COLUMNS,
        settings=setting_lines(summary),
        sections=sections,
        methods=list(colours.items()),
        parts=list(enumerate(_PARTS)),
        traces=data,
    )
