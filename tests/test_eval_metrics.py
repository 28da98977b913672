"""The measures against cases worked out by hand."""

import numpy as np
import pytest

from eagle3_hf import SpeculationStats
from eagle3_hf.decoding.theory import expected_tokens_at
from eagle3_hf.evaluation import metrics
from eagle3_hf.evaluation.metrics import Block
from eagle3_hf.evaluation.modules import NAMES, module_path

EOS = 9

# A chain of 3: the first round accepts nothing, the second all, the third one.
CHAIN = [
    Block((5,), accepted=0, depth=3),
    Block((1, 2, 3, 4), accepted=3, depth=3),
    Block((6, 7), accepted=1, depth=3),
]


def test_a_chain_by_hand():
    assert metrics.acceptance_length(CHAIN) == 7 / 3
    assert metrics.acceptance_rate(CHAIN) == 4 / 9
    # Position 1: tried 3 times, kept twice. Position 2: reached twice, kept once. Position 3: reached and kept once.
    assert metrics.conditional_acceptance(CHAIN) == [2 / 3, 1 / 2, 1.0]
    assert metrics.unconditional_acceptance(CHAIN) == [2 / 3, 1 / 3, 1 / 3]


def test_only_a_first_round_that_accepts_nothing():
    rounds = CHAIN[:1]
    assert metrics.acceptance_length(rounds) == 1.0
    assert metrics.acceptance_rate(rounds) == 0.0
    # Nobody got to positions 2 and 3, but they were drafted.
    assert metrics.conditional_acceptance(rounds) == [0.0, 0.0, 0.0]
    assert metrics.unconditional_acceptance(rounds) == [0.0, 0.0, 0.0]


def test_a_tree_counts_all_its_nodes():
    tree = [Block((1, 2, 3), accepted=2, depth=4, nodes=16), Block((4,), accepted=0, depth=4, nodes=16)]
    assert metrics.acceptance_length(tree) == 2.0
    assert metrics.acceptance_rate(tree) == 2 / 32
    assert metrics.unconditional_acceptance(tree) == [0.5, 0.5, 0.0, 0.0]


def test_rounds_of_different_depth():
    rounds = [Block((1, 2), accepted=1, depth=1), Block((3, 4), accepted=1, depth=2), Block((5,))]
    assert metrics.position_counts(rounds) == ([2, 1], [2, 1], [2, 0])
    assert metrics.acceptance_length(rounds) == 5 / 3
    assert metrics.acceptance_rate(rounds) == 2 / 3


def test_eos_inside_a_block_cuts_it_before_it_is_counted():
    rounds = [Block((1, 2), accepted=1, depth=3), Block((3, EOS, 4, 5), accepted=3, depth=3), Block((6,), depth=3)]
    cut = metrics.cut_blocks(rounds, {EOS})
    assert cut == [rounds[0], Block((3, EOS), accepted=2, depth=3)]
    assert metrics.acceptance_length(cut) == 2.0
    assert metrics.acceptance_rate(cut) == 3 / 6
    assert metrics.conditional_acceptance(cut) == [1.0, 1 / 2, 0.0]


def test_eos_as_the_bonus_token_costs_nothing():
    rounds = [Block((3, 4, EOS), accepted=2, depth=2)]
    assert metrics.cut_blocks(rounds, {EOS}) == rounds


def test_eos_as_the_first_token_of_a_block():
    assert metrics.cut_blocks([Block((EOS, 3, 4), accepted=2, depth=2)], {EOS}) == [Block((EOS,), 1, 2)]


@pytest.mark.parametrize(("limit", "sizes"), [(0, []), (1, [1]), (3, [1, 2]), (5, [1, 4]), (6, [1, 4, 1]), (99, None)])
def test_the_length_limit_cuts_too(limit, sizes):
    cut = metrics.cut_blocks(CHAIN, (), limit)
    assert [len(block.tokens) for block in cut] == (sizes if sizes is not None else [1, 4, 2])
    if limit == 3:
        assert cut[1] == Block((1, 2), accepted=2, depth=3)


def test_the_same_rates_as_the_decoding_loop_counts():
    stats = SpeculationStats()
    for block in CHAIN:
        stats.count_round(block.depth, block.verified, block.accepted, len(block.tokens))
    assert metrics.acceptance_length(CHAIN) == stats.tau
    assert metrics.acceptance_rate(CHAIN) == stats.acceptance_rate
    assert metrics.conditional_acceptance(CHAIN) == stats.conditional_acceptance
    assert metrics.unconditional_acceptance(CHAIN) == stats.unconditional_acceptance


def test_no_rounds_at_all():
    assert metrics.acceptance_length([]) == metrics.acceptance_rate([]) == 0.0
    assert metrics.conditional_acceptance([]) == metrics.unconditional_acceptance([]) == []
    assert metrics.cut_blocks([], {EOS}, 5) == []


def test_a_block_that_cannot_be():
    with pytest.raises(ValueError, match="2 accepted"):
        Block((1,), accepted=2, depth=3)
    with pytest.raises(ValueError, match="drafted 0 deep"):
        Block((1, 2), accepted=1)
    with pytest.raises(ValueError, match="1 draft tokens can't be 2 deep"):
        Block((1, 2), accepted=1, depth=2, nodes=1)


def test_tokens_per_forward_counts_the_prefill():
    # A prefill and three rounds gave 1 + 7 tokens.
    assert metrics.tokens_per_forward(8, 4) == 2.0
    assert metrics.tokens_per_forward(0, 0) == 0.0


def test_cycle_efficiency():
    assert metrics.cycle_efficiency(3.0, 1.0, 5.0) == 0.8
    assert metrics.cycle_efficiency(0.0, 0.0, 0.0) == 0.0


def test_losslessness():
    assert metrics.losslessness([[1, 2], [3], []], [[1, 2], [4], []]) == 2 / 3
    assert metrics.losslessness([[1, 2]], [[1, 2, 3]]) == 0.0
    assert metrics.losslessness(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]])) == 0.5
    with pytest.raises(ValueError, match="1 outputs against 2"):
        metrics.losslessness([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="no outputs"):
        metrics.losslessness([], [])


def test_speed_ratio_is_of_the_totals():
    # 30 tokens in 3 s against 30 in 6 s; the ratios prompt by prompt are 1 and 5/2.
    assert metrics.speed_ratio([((10, 1.0), (10, 1.0)), ((20, 2.0), (20, 5.0))]) == 2.0
    for bad in ([], [((1, 0.0), (1, 1.0))], [((0, 1.0), (1, 1.0))]):
        with pytest.raises(ValueError, match="compare"):
            metrics.speed_ratio(bad)


def test_bootstrap_interval():
    def mean(values):
        return sum(values) / len(values)

    assert metrics.bootstrap_interval([2.0] * 5, mean) == (2.0, 2.0)
    values = [float(i % 10) for i in range(100)]  # mean 4.5, standard error of the mean 0.287
    low, high = metrics.bootstrap_interval(values, mean)
    assert low == pytest.approx(4.5 - 1.96 * 0.287, abs=0.1)
    assert high == pytest.approx(4.5 + 1.96 * 0.287, abs=0.1)
    assert metrics.bootstrap_interval(values, mean) == (low, high)
    assert metrics.bootstrap_interval(values, mean, seed=1) != (low, high)
    narrow = metrics.bootstrap_interval(values, mean, confidence=0.5)
    assert low < narrow[0] < 4.5 < narrow[1] < high
    with pytest.raises(ValueError, match="no items"):
        metrics.bootstrap_interval([], mean)
    with pytest.raises(ValueError, match=r"1\.5"):
        metrics.bootstrap_interval(values, mean, confidence=1.5)
    with pytest.raises(ValueError, match="one draw, got 0"):
        metrics.bootstrap_interval(values, mean, resamples=0)


def test_expected_length_by_depth():
    lengths = metrics.expected_length_by_depth([0.5, 0.5, 1.0])
    assert lengths == [1.5, 1.75, 2.0]
    assert lengths[-1] == expected_tokens_at([0.5, 0.5, 1.0])


def test_module_path_names_what_there_is():
    with pytest.raises(ValueError, match="speculation_speedup"):
        module_path("bleu")


def test_evaluate_loads_the_modules(tmp_path, monkeypatch):
    evaluate = pytest.importorskip("evaluate", reason="evaluate isn't installed")
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    loaded = {name: evaluate.load(module_path(name), cache_dir=str(tmp_path)) for name in NAMES}
    rounds = [{"tokens": list(b.tokens), "accepted": b.accepted, "depth": b.depth, "nodes": b.verified} for b in CHAIN]
    found = loaded["speculation_acceptance"].compute(predictions=rounds)
    assert found["acceptance_length"] == 7 / 3
    assert found["conditional_acceptance"] == [2 / 3, 1 / 2, 1.0]
    same = loaded["speculation_losslessness"].compute(predictions=[[1, 2], [3]], references=[[1, 2], [4]])
    assert same == {"losslessness": 0.5}
    slow, fast = {"tokens": 10, "seconds": 4.0}, {"tokens": 10, "seconds": 2.0}
    speed = loaded["speculation_speedup"].compute(predictions=[fast, fast], references=[slow, slow])
    assert speed == {"speedup": 2.0, "low": 2.0, "high": 2.0}
    alone = loaded["speculation_speedup"].compute(predictions=[fast], references=[slow])
    assert alone == {"speedup": 2.0, "low": None, "high": None}
