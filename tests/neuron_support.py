"""What the Neuron tests share: graphs run without compiling them, and drafts that know the answer."""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import make_draft, make_target, texts_of

from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.backends.base import Backend
from eagle3_hf.neuron.generation import Generation

LENGTH, BUCKETS, DRAFTS = 40, [8, 16], 3


class InProcessBackend(Backend):
    """Runs the graphs' functions as they are: what a compiler is handed, without its minutes."""

    name = "torch-export"
    suffix = "txt"

    def __init__(self):
        self.graphs: dict[str, Any] = {}

    def check_available(self):
        pass

    def compile(self, graph, stored, path):
        path.write_text(graph.name)
        self.graphs[graph.name] = graph
        return {}

    def load(self, path: Path, weights, options):
        graph = self.graphs[path.read_text()]

        def run(inputs, memory):
            with torch.no_grad():
                outputs, new = graph.function(weights, inputs, memory)
            for spec, tensor in zip((*graph.outputs, *graph.memory), (*outputs, *new)):
                spec.check(tensor)
            return [*outputs, *new]

        return run


def make_pair(family="llama", **draft_changes):
    """A tiny target, and a draft for it."""
    changes = {"sliding_window": None, "layer_types": None} if family == "mistral" else {}
    target = make_target(family, **changes)
    return target, make_draft(target, **draft_changes)


def in_process(target, draft, batch=3, **options):
    """An exported model whose graphs run uncompiled."""
    values = {"sequence_length": LENGTH, "context_buckets": BUCKETS, "num_speculative_tokens": DRAFTS} | options
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(target, draft, batch_size=batch, **values)
    backend = InProcessBackend()
    with mock.patch("eagle3_hf.neuron.model.get_backend", return_value=backend):
        return Eagle3NeuronModelForCausalLM.export(target, draft, config, load_weights=True)


@contextmanager
def knowing(answers, rate=0.8, seed=0):
    """Put the known answers (texts without padding) in place of the drafts, each token right with this probability.

    Random drafts are nearly always wrong, which would leave acceptance untested.
    """
    chance = random.Random(seed)

    class Knowing(Generation):
        def plant(self, drafts):
            if drafts is None:
                return None
            drafts = drafts.clone()
            for row, text in enumerate(self.texts):
                known = [answer for answer in answers if answer[: len(text)] == text]
                for place, token in enumerate(known[0][len(text) :][: drafts.shape[1]] if known else []):
                    drafts[row, place] = token if chance.random() < rate else (token + 1) % 16
            return drafts

        def _prefill(self):
            return self.plant(super()._prefill())

        def _round(self, last, drafts):
            return self.plant(super()._round(last, drafts))

    with mock.patch("eagle3_hf.neuron.model.Generation", Knowing):
        yield


def assert_same_as_plain(model, target, inputs, new_tokens, rate=0.8, seed=0, **options):
    """Check greedy output against plain `generate()`; returns what speculation did."""
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, **options)
    with knowing(texts_of(plain, inputs), rate, seed):
        fast = model.generate(**inputs, max_new_tokens=new_tokens, **options)
    assert fast.tolist() == plain.tolist()
    return model.speculation_stats
