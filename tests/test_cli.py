"""The command line: help, one-line errors, and each command on a tiny random model."""

import json
import subprocess
import sys

import pytest
import torch
from support import error_line
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from eagle3_hf import Eagle3Config, Eagle3DraftModel
from eagle3_hf.cli import build_app
from eagle3_hf.cli.common import find_draft, project_root, thread_count
from eagle3_hf.cli.measure import Sample, first_difference, read_prompts, summarise
from eagle3_hf.cli.options import drafting_options, parse_tree, sampling_options
from eagle3_hf.cli.text import TextStream

_TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
_SPECIALS = ("<eos>", "<user>", "<end>", "<bot>")


def _byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*_SPECIALS, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIALS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return _byte_tokenizer()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Paths of a tiny target and of a draft for it."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = len(tokenizer)
    # Wide weights: clear margins between tokens, so that rounding can't make greedy outputs differ.
    config = LlamaConfig(vocab_size=size, num_hidden_layers=6, eos_token_id=0, initializer_range=0.3, **shape)
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    made_for = {"vocab_size": size, "target_num_hidden_layers": 6, "aux_hidden_state_layers": [1, 3, 5]}
    Eagle3DraftModel(Eagle3Config(draft_vocab_size=100, **made_for, **shape)).save_pretrained(place / "draft")
    return str(place / "target"), str(place / "draft")


@pytest.fixture
def run():
    runner, app = CliRunner(), build_app()

    def invoke(*arguments, **kwargs):
        # Two threads on a busy machine make tiny models ten times as slow.
        with thread_count(1):
            return runner.invoke(app, [str(a) for a in arguments], **kwargs)

    return invoke


@pytest.mark.parametrize("command", [[], ["demo"], ["generate"], ["bench"]])
def test_help(run, command):
    result = run(*command, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    wanted = ("--target", "--draft", "--max-new-tokens", "-K") if command else ("demo", "generate", "bench")
    assert all(word in result.output for word in wanted)


def test_no_arguments_shows_the_help(run):
    assert "Usage" in run().output


def test_version(run):
    import eagle3_hf

    assert run("--version").output.strip() == eagle3_hf.__version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "-K", "0"], ["-K", "demo --help"]),
        (["demo", "-K", "2", "--tree", "2:2:4"], ["--tree", "-K"]),
        (["bench", "--tree", "3:4"], ["K:topk:total", "'3:4'"]),
        (["bench", "--tree", "3:0:4"], ["at least 1"]),
        (["bench", "--prompts", "/no/such/file.jsonl"], ["/no/such/file.jsonl", "--prompts"]),
        (["bench", "--json", "/no/such/folder/out.json"], ["/no/such/folder"]),
        (["generate", "hi", "--no-draft", "-K", "3"], ["--no-draft"]),
        (["generate", "hi", "--dtype", "int8"], ["--dtype", "int8"]),
        (["generate", "hi", "--device", "nonsense"], ["--device nonsense"]),
        (["generate", "hi", "--target", ""], ["no target folder at ''"]),
        (["demo", "--target", "/no/such/model"], ["no target folder", "/no/such/model"]),
        (["generate", "--frobnicate"], ["--frobnicate", "generate --help"]),
        (["no-such-command"], ["no-such-command"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_wrong_options_are_one_line(run, arguments, words):
    line = error_line(run(*arguments, input=""))
    assert all(word in line for word in words), line


def test_bad_draft_paths(run, folders, tmp_path):
    target, _ = folders
    missing = tmp_path / "nowhere"
    assert str(missing) in error_line(run("demo", "--target", target, "--draft", missing))
    assert "config.json" in error_line(run("demo", "--target", target, "--draft", tmp_path))
    assert "pass --draft" in error_line(run("demo", "--target", target))


def test_draft_of_another_target_names_both_sizes(run, folders, tmp_path, tokenizer):
    config = Eagle3Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=4,
        target_num_hidden_layers=6,
    )
    Eagle3DraftModel(config).save_pretrained(tmp_path)
    line = error_line(run("generate", "hi", "--target", folders[0], "--draft", tmp_path, "--max-new-tokens", "4"))
    assert "48" in line
    assert "32" in line


def test_debug_shows_the_error_itself(run):
    result = run("--debug", "bench", "--prompts", "/no/such/file.jsonl")
    assert isinstance(result.exception, ValueError)


def test_no_prompt(run):
    assert "no prompt" in error_line(run("generate", input=""))


def test_generate_prints_text_and_nothing_else(run, folders):
    target, draft = folders
    common = ("--target", target, "--max-new-tokens", "24")
    plain = run("generate", "Hello", *common, "--no-draft")
    assert plain.exit_code == 0, plain.output
    assert plain.stderr == ""
    fast = run("generate", "Hello", *common, "--draft", draft, "-K", "3", "--stats")
    assert fast.stdout == plain.stdout
    assert "tau" in fast.stderr
    piped = run("generate", *common, "--draft", draft, "--tree", "3:2:6", input="Hello\n")
    assert piped.stdout == plain.stdout
    raw = run("generate", "Hello", *common, "--draft", draft, "--raw")
    assert raw.exit_code == 0
    assert raw.stdout != plain.stdout
    sampled = [
        run("generate", "Hello", *common, "--draft", draft, "--temperature", "0.8", "--top-k", "9") for _ in "ab"
    ]
    assert sampled[0].stdout == sampled[1].stdout


def test_demo_says_identical(run, folders):
    target, draft = folders
    result = run("demo", "--target", target, "--draft", draft, "--max-new-tokens", "16", "-K", "2")
    assert result.exit_code == 0, result.output
    assert "identical: all 16 tokens" in result.stdout
    assert "tau" in result.stdout
    assert "plain" in result.stdout


def test_bench_table_and_json(run, folders, tmp_path):
    target, draft = folders
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"question_id": 7, "turns": ["One?", "Two?"]}\n\n{"prompt": "Three é?"}\n{"prompt": "left out"}\n'
    )
    report = tmp_path / "out.json"
    result = run(
        *("bench", "--target", target, "--draft", draft, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 12),
        *("-K", 2, "-K", 3, "--tree", "2:2:4", "--repeats", 2, "--threads", 1, "--profile", "--json", report),
    )
    assert result.exit_code == 0, result.output
    assert "tree 2:2:4" in result.stdout
    data = json.loads(report.read_text())
    assert data["environment"]["threads"] == 1
    assert data["settings"]["draft_path"] == draft
    assert {"plain", "K=2", "K=3", "tree 2:2:4"} <= set(data["methods"])
    assert data["methods"]["plain"]["ratio_to_plain"] == {"median": 1.0, "total": 1.0}
    chain = data["methods"]["K=3"]
    assert chain["identical_to_plain"] == 1.0
    assert chain["speculation"]["tau"] >= 1.0
    assert len(chain["speculation"]["conditional_acceptance"]) == 3
    assert [record["id"] for record in data["prompts"]] == [7, 2]
    first = data["prompts"][0]["runs"]["K=2"]
    assert first["tokens"] == 12
    assert first["first_difference_from_plain"] is None


def test_bench_sampled_says_nothing_about_identity(run, folders, tmp_path):
    target, draft = folders
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "One?"}\n')
    result = run(
        *("bench", "--target", target, "--draft", draft, "--prompts", prompts, "--max-new-tokens", 8),
        *("--temperature", 1, "--warmup", 0, "--json", report),
    )
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    assert {entry["identical_to_plain"] for entry in data["methods"].values()} == {None}


def test_missing_typer_is_one_line():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['eagle3-hf', 'demo'];"
        "from eagle3_hf.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["error: the command line needs typer: pip install 'eagle3-hf[demo]'"]


@pytest.mark.parametrize("text", ["a  b\n\nc ", "naïve — 日本語 🙂 end", "x\ufffdy"])
def test_text_stream_gives_the_whole_text_without_broken_characters(tokenizer, text):
    ids = tokenizer(text).input_ids
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_stream_shows_an_unfinished_character_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer("ok 🙂").input_ids[:-1]) == "ok "
    assert stream.finish().startswith("\ufffd")
    assert stream.finish() == ""


def test_find_draft_default_is_the_recipe_of_the_target(tmp_path, monkeypatch):
    recipe = tmp_path / "recipes" / "tiny-model" / "draft"
    recipe.mkdir(parents=True)
    monkeypatch.setattr("eagle3_hf.cli.common.project_root", lambda: tmp_path)
    with pytest.raises(ValueError, match="pass --draft"):
        find_draft(None, "owner/Tiny-Model")
    (recipe / "config.json").write_text("{}")
    assert find_draft(None, "owner/Tiny-Model") == str(recipe)
    assert find_draft("owner/name", "owner/Tiny-Model") == "owner/name"
    monkeypatch.setattr("eagle3_hf.cli.common.project_root", lambda: None)
    with pytest.raises(ValueError, match="pass --draft"):
        find_draft(None, "owner/Tiny-Model")


@pytest.mark.skipif(project_root() is None, reason="installed without its source checkout")
def test_project_root_is_the_checkout():
    assert (project_root() / "src" / "eagle3_hf").is_dir()


@pytest.mark.parametrize("line", ["[1]", "{}", '{"turns": []}', '{"prompt": 3}', "nonsense"])
def test_bad_prompt_lines_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path, 5)


def test_empty_prompt_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(path, 5)


def test_options_become_keywords():
    assert parse_tree("5:4:16") == (5, 4, 16)
    assert drafting_options(3) == {"num_assistant_tokens": 3, "tree_top_k": 1}
    assert drafting_options(None) == {}
    assert sampling_options(0.0, top_k=5) == {"do_sample": False}
    assert sampling_options(0.5, top_p=0.9) == {"do_sample": True, "temperature": 0.5, "top_p": 0.9}


def test_ratios_are_paired_medians():
    from eagle3_hf.cli.measure import Method

    methods = [Method("plain", "plain"), Method("fast", "plain")]
    times = [(1.0, 0.5), (2.0, 1.0), (10.0, 20.0)]
    results = [{"plain": Sample(10, a, [1, 2], None), "fast": Sample(10, b, [1, 2 + (b > 10)], None)} for a, b in times]
    fast = summarise(methods, results, greedy=True)["fast"]
    assert fast["ratio_to_plain"] == {"median": 2.0, "total": pytest.approx(13 / 21.5)}
    assert fast["ratio_to_packed"] is None
    assert fast["identical_to_plain"] == pytest.approx(2 / 3)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
