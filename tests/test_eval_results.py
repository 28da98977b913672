"""The results file: kept as it comes, read back, one writer at a time, refused where it doesn't fit."""

import errno
import os
import subprocess
import sys

import pytest

from eagle3_hf.evaluation.results import ResultsWriter, read_results


def _record(key):
    return {"kind": "result", "key": key, "method": "plain", "value": 0.1 + 0.2}


def test_results_are_kept_and_found_again(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsWriter(path, {"seed": 0, "sizes": (1, 2)}) as writer:
        writer.add_session({"methods": [{"name": "plain"}]})
        writer.add(_record("a"))
    with ResultsWriter(path, {"seed": 0, "sizes": (1, 2)}) as writer:
        assert writer.find("a") == _record("a")
        assert writer.find("b") is None
        writer.add(_record("b"))
    found = read_results(path)
    assert [record["key"] for record in found.records] == ["a", "b"]
    assert found.settings == {"seed": 0, "sizes": [1, 2]}
    assert list(found.methods()) == ["plain"]


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsWriter(path, {}) as writer:
        writer.add(_record("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "result", "key": "b", "val')
    assert [record["key"] for record in read_results(path).records] == ["a"]
    with ResultsWriter(path, {}) as writer:
        assert path.read_bytes() == whole
        writer.add(_record("c"))
    assert [record["key"] for record in read_results(path).records] == ["a", "c"]


def test_killed_within_the_first_line(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind": "sett')
    with pytest.raises(ValueError, match="another --out"):
        ResultsWriter(path, {})


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "r.jsonl"
    ResultsWriter(path, {"seed": 0, "dtype": "float32"}).close()
    with pytest.raises(ValueError, match="seed 0, now it is 1"):
        ResultsWriter(path, {"seed": 1, "dtype": "float32"})


def test_what_a_run_does_not_use_goes_with_any_value(tmp_path):
    path = tmp_path / "r.jsonl"
    steps = [
        ({"draft": None, "seed": 0}, {"draft": None, "seed": 0}),
        ({"draft": "d", "seed": 0}, {"draft": "d", "seed": 0}),
        ({"draft": None, "seed": 0, "new": 1}, {"draft": "d", "seed": 0, "new": 1}),
    ]
    for given, kept in steps:
        with ResultsWriter(path, given) as writer:
            assert writer.results.settings == kept
            writer.add(_record(str(given)))
        assert read_results(path).settings == kept
    with pytest.raises(ValueError, match="draft 'd', now it is 'e'"):
        ResultsWriter(path, {"draft": "e", "seed": 0})
    assert len(read_results(path).records) == len(steps)


def test_another_method_of_a_known_name_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    one, other = ({"methods": [{"name": "shy", "options": {"tokens": n, "paths": [(0,), (1,)]}}]} for n in (2, 3))
    for _ in range(2):
        with ResultsWriter(path, {}) as writer:
            writer.add_session(one)
    with ResultsWriter(path, {}) as writer, pytest.raises(ValueError, match=r"'shy' with .*'tokens': 2.*'tokens': 3"):
        writer.add_session(other)
    assert len(read_results(path).sessions) == 2


def test_one_writer_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "r.jsonl"
    with ResultsWriter(path, {}) as writer:
        writer.add(_record("a"))
        before = path.read_bytes()
        with pytest.raises(ValueError, match="another run is writing"):
            ResultsWriter(path, {})
        assert path.read_bytes() == before
    ResultsWriter(path, {"seed": 1}).close()
    with pytest.raises(ValueError, match="seed 1, now it is 2") as caught:
        ResultsWriter(path, {"seed": 2})
    ResultsWriter(path, {"seed": 1}).close()  # the refused one holds nothing, though its traceback is still about
    assert caught.traceback


@pytest.mark.parametrize("content", ["not json\n", "[1]\n", '{"a": 1}\n', '{"kind": "result", "key": "a"}\n', "text",
    '{"kind": "settings", "format": 1}\n', '{"kind": "settings", "format": 1, "settings": {}}\n{"kind": "result"}\n',
    '{"kind": "settings", "format": 1, "settings": {}}\n{"kind": "what"}\n',
])  # fmt: skip
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"r\.jsonl"):
        ResultsWriter(path, {})
    assert path.read_text() == content


def test_no_space_left_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    with ResultsWriter(path, {}) as writer:
        writer.add(_record("a"))
        before, write = path.read_bytes(), os.write
        calls = []

        def full(file, data):
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[:10])  # the disk takes a little, then no more

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space left on the disk; the 1 results before are kept"):
            writer.add(_record("b"))
        assert len(calls) == 2
        assert path.read_bytes() == before
        monkeypatch.undo()
        writer.add(_record("b"))
    assert [record["key"] for record in read_results(path).records] == ["a", "b"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE and its signal as Linux has them")
def test_a_real_limit_of_the_file_size(tmp_path):
    path = tmp_path / "r.jsonl"
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from eagle3_hf.evaluation.results import ResultsWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "writer = ResultsWriter(Path(sys.argv[1]), {})\n"
        "try:\n"
        "    for i in range(99): writer.add({'kind': 'result', 'key': str(i), 'text': 'x' * 100})\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    kept = len(read_results(path).records)
    assert 5 < kept < 20
    assert f"the {kept} results before are kept" in done.stdout
    assert path.read_bytes().endswith(b"\n")
