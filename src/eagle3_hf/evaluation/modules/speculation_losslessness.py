"""`evaluate` module: the share of answers that are token for token those of plain greedy generation."""

import datasets
import evaluate

from eagle3_hf.evaluation import metrics


class SpeculationLosslessness(evaluate.Metric):
    """Token ids of a method (predictions) and of plain greedy generation (references) in, a share out."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Share of prompts with exactly the tokens of plain greedy generation.",
            citation="",
            inputs_description="predictions, references: for each prompt a list of new token ids.",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        return {"losslessness": metrics.losslessness(predictions, references)}
