"""`evaluate` module: acceptance length and rates of speculative decoding."""

from typing import Any

import datasets
import evaluate

from eagle3_hf.evaluation import metrics

_INPUTS = """
Each prediction is one round (a target forward after the prefill):
    tokens: the ids it gave. accepted: how many of them, from the first on, were drafted.
    depth: draft positions. nodes: draft tokens verified (for a chain the same as depth, or None).
Returns acceptance_length (bonus included), acceptance_rate, conditional_acceptance and unconditional_acceptance.
"""


class SpeculationAcceptance(evaluate.Metric):
    """Rounds in, acceptance out."""

    def _info(self) -> evaluate.MetricInfo:
        round_features = {
            "tokens": datasets.Sequence(datasets.Value("int64")),
            "accepted": datasets.Value("int64"),
            "depth": datasets.Value("int64"),
            "nodes": datasets.Value("int64"),
        }
        return evaluate.MetricInfo(
            description="Acceptance of drafted tokens in speculative decoding.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": round_features}),
        )

    def _compute(self, predictions: list[dict[str, Any]]) -> dict[str, Any]:
        blocks = [metrics.Block(tuple(p["tokens"]), p["accepted"], p["depth"], p["nodes"]) for p in predictions]
        return {
            "acceptance_length": metrics.acceptance_length(blocks),
            "acceptance_rate": metrics.acceptance_rate(blocks),
            "conditional_acceptance": metrics.conditional_acceptance(blocks),
            "unconditional_acceptance": metrics.unconditional_acceptance(blocks),
        }
