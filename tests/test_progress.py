"""Progress where no bar can be drawn."""

from __future__ import annotations

import io

from rich.console import Console

from eagle3_hf.cli.progress import ProgressLines


def lines_of(terminal: bool, done: int, total: int | None) -> list[str]:
    """What is written when an item takes half a minute, four items long, going on behind `done`."""
    now, out = [0.0], io.StringIO()
    say = ProgressLines(Console(file=out, force_terminal=terminal), done, clock=lambda: now[0])
    for item in range(1, 5):
        now[0] += 30
        say(done + item, total, "measuring [tau]")
    return out.getvalue().splitlines()


def test_a_line_a_minute():
    assert lines_of(False, 0, 8) == ["measuring [tau]: 2 of 8, 3 min left", "measuring [tau]: 4 of 8, 2 min left"]


def test_what_was_there_at_the_start_does_not_count_for_the_time_left():
    assert lines_of(False, 90, 98) == ["measuring [tau]: 92 of 98, 3 min left", "measuring [tau]: 94 of 98, 2 min left"]


def test_without_a_total():
    assert lines_of(False, 0, None) == ["measuring [tau]: 2", "measuring [tau]: 4"]


def test_a_terminal_has_the_bar():
    assert lines_of(True, 0, 8) == []
