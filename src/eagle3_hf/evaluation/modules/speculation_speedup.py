"""`evaluate` module: walltime speed-up over plain generation, with a bootstrap interval."""

from typing import Any

import datasets
import evaluate

from eagle3_hf.evaluation import metrics


class SpeculationSpeedup(evaluate.Metric):
    """For each prompt, tokens and seconds of a method (predictions) and of the baseline (references)."""

    def _info(self) -> evaluate.MetricInfo:
        run = {"tokens": datasets.Value("int64"), "seconds": datasets.Value("float64")}
        return evaluate.MetricInfo(
            description="Tokens/s over the baseline's, all tokens over all seconds, prompts resampled.",
            citation="",
            inputs_description=(
                "predictions, references: for each prompt {tokens, seconds} of one whole generation. Returns speedup, "
                "low and high; for a single prompt there is no interval, low and high are None."
            ),
            features=datasets.Features({"predictions": run, "references": run}),
        )

    def _compute(
        self,
        predictions: list[dict[str, Any]],
        references: list[dict[str, Any]],
        confidence: float = 0.95,
        seed: int = 0,
    ) -> dict[str, float | None]:
        pairs = [
            ((mine["tokens"], mine["seconds"]), (base["tokens"], base["seconds"]))
            for mine, base in zip(predictions, references)
        ]
        speedup = metrics.speed_ratio(pairs)
        low, high = None, None
        if len(pairs) > 1:  # one alone can't be resampled: an interval of no width would look certain
            low, high = metrics.bootstrap_interval(pairs, metrics.speed_ratio, confidence, seed=seed)
        return {"speedup": speedup, "low": low, "high": high}
