"""Eagle3NeuronModelForCausalLM: export, load and run a compiled target and draft pair."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from ..decoding.statistics import SpeculationStats
from . import artefact
from .backends import get_backend
from .config import CONFIG_FILE, Eagle3NeuronConfig, full_dtype
from .families import check_family, load_pair, take_apart
from .generation import Generation, HostSampling, stop_rule, unpad
from .options import end_and_padding, new_tokens, prepare
from .runtime import GraphRuntime
from .specs import GraphTable
from .split import fit

logger = logging.getLogger(__name__)

_MOST_DEFAULT_LENGTH = 2048


class Eagle3NeuronModelForCausalLM:
    """A target and draft pair as static graphs, with optimum-neuron's way of exporting, loading and generating.

    Made by `export` or `from_pretrained`. It doesn't inherit from optimum-neuron's classes, which can't be imported
    with transformers 5 nor, for the most part, without the AWS runtime.

    Attributes:
        neuron_config: what the graphs were compiled for.
        generation_config: defaults of `generate()`, the target's own.
        speculation_stats: counts of the last call of `generate()`.
    """

    def __init__(self, folder: Path, manifest: artefact.Manifest, keep: Any = None):
        self._folder, self._manifest, self._keep = folder, manifest, keep
        self.neuron_config = manifest.compiled
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self._vocab_size = int(self.config.vocab_size)
        self.runtime: GraphRuntime | None = None
        self.speculation_stats: SpeculationStats | None = None

    @classmethod
    def get_neuron_config(
        cls,
        model_id: Any,
        draft_model_id: Any = None,
        config: Any = None,
        token: str | None = None,
        revision: str | None = None,
        instance_type: str | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        tensor_parallel_size: int | None = None,
        **options: Any,
    ) -> Eagle3NeuronConfig:
        """A configuration for a pair, with defaults that follow from the target.

        Args:
            model_id, draft_model_id: folder, Hub id, or the loaded model.
            config: the target's config, where it is loaded already.
            tensor_parallel_size: cores to split both models over; default: 1.
            sequence_length: default: the target's positions, at most 2048.
            options: further fields of [`Eagle3NeuronConfig`].

        Raises:
            ValueError: the target's family isn't supported, or values contradict each other.
        """
        if config is None:
            loaded = isinstance(model_id, torch.nn.Module)
            config = model_id.config if loaded else AutoConfig.from_pretrained(model_id, token=token, revision=revision)
        check_family(config)
        if sequence_length is None:
            sequence_length = min(
                getattr(config, "max_position_embeddings", _MOST_DEFAULT_LENGTH), _MOST_DEFAULT_LENGTH
            )
        return Eagle3NeuronConfig(
            batch_size=1 if batch_size is None else batch_size,
            sequence_length=sequence_length,
            tensor_parallel_size=1 if tensor_parallel_size is None else tensor_parallel_size,
            instance_type=instance_type,
            model_id=_name(model_id),
            draft_model_id=_name(draft_model_id),
            **options,
        )

    @classmethod
    def export(
        cls,
        model_id: Any,
        draft_model_id: Any,
        neuron_config: Eagle3NeuronConfig,
        token: str | None = None,
        revision: str | None = None,
        load_weights: bool = False,
        output: str | os.PathLike | None = None,
        **loading: Any,
    ) -> Eagle3NeuronModelForCausalLM:
        """Compile a pair.

        Args:
            model_id, draft_model_id: folder, Hub id, or the loaded model.
            neuron_config: what to compile for.
            token, revision: for the Hub; the revision is the target's.
            load_weights: load the result and warm it up, so that it can `generate()`.
            output: folder to write, empty or new. Default: a temporary one, for `save_pretrained`.
            loading: as for `from_pretrained`.

        Raises:
            ImportError: the backend's packages are missing.
            ValueError: the pair can't be exported, or the folder isn't empty or can't be written.
        """
        backend = get_backend(neuron_config.backend, neuron_config.instance_type)
        if output is not None:
            artefact.check_place(Path(os.fspath(output)))
        keep = tempfile.TemporaryDirectory(prefix="eagle3-neuron-") if output is None else None
        folder = Path(keep.name if keep else os.fspath(output))  # type: ignore[arg-type]
        target, draft = load_pair(model_id, draft_model_id, neuron_config.dtype, token=token, revision=revision)
        models = fit(take_apart(target, draft), neuron_config, backend.group(neuron_config.tensor_parallel_size))
        graphs = GraphTable(models, neuron_config).all()
        logger.info("compiling %d graphs into %s", len(graphs), folder)
        artefact.write(folder, models, neuron_config, graphs, backend)
        made = cls(folder, artefact.read_manifest(folder), keep)
        if load_weights:
            made.load(**loading)
        return made

    @classmethod
    def from_pretrained(
        cls,
        model_id: Any,
        draft_model: Any = None,
        export: bool = False,
        num_cores: int | None = None,
        auto_cast_type: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> Eagle3NeuronModelForCausalLM:
        """Load an exported folder; or with `export=True` compile a pair first.

        Args:
            model_id: the folder; with `export=True` the target.
            draft_model: with `export=True`, the draft.
            num_cores: older name of `tensor_parallel_size`.
            auto_cast_type: older name of `torch_dtype`: `fp32`, `bf16` or `fp16`.
            options: fields of [`Eagle3NeuronConfig`]; of a folder they must be what it was compiled for. And loading
                options, see `load`.

        Raises:
            ValueError: not an exported folder, a damaged or changed one, or one compiled for other values; two names
                of an option that say different things.
            TypeError: an option that nothing here knows.
            ImportError: the backend's packages are missing.
        """
        loading = {name: options.pop(name) for name in ("torch_compile", "warm_up") if name in options}
        if num_cores is not None:
            _one_of("num_cores", num_cores, "tensor_parallel_size", options)
        if auto_cast_type is not None:
            _one_of("auto_cast_type", auto_cast_type, "torch_dtype", options)
        if export:
            if draft_model is None:
                raise ValueError("export=True needs draft_model, the EAGLE-3 draft")
            config = cls.get_neuron_config(model_id, draft_model, token=token, revision=revision, **options)
            return cls.export(model_id, draft_model, config, token, revision, load_weights=True, **loading)
        if isinstance(model_id, torch.nn.Module):
            raise ValueError("a loaded model isn't an exported folder: pass export=True to compile it")
        folder = Path(os.fspath(model_id))
        if draft_model is not None:
            raise ValueError(
                f"draft_model goes with export=True: {folder}, an exported folder, holds its draft already"
            )
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(
                f"{folder} holds no exported model: it has no {CONFIG_FILE}. To compile a pair, pass export=True and "
                "draft_model"
            )
        manifest = artefact.read_manifest(folder)
        artefact.check_unchanged(Eagle3NeuronConfig.from_pretrained(folder), manifest, str(folder / CONFIG_FILE))
        unknown = sorted(set(options) - set(manifest.compiled.to_dict()))
        if unknown:
            raise TypeError(f"from_pretrained() of an exported folder doesn't know {unknown}")
        if options:
            asked = Eagle3NeuronConfig.from_dict({**manifest.compiled.to_dict(), **options})
            artefact.check_unchanged(asked, manifest, "what from_pretrained() was asked for")
        artefact.check_files(folder, manifest)
        made = cls(folder, manifest)
        made.load(**loading)
        return made

    def load(self, warm_up: bool = True, torch_compile: Any = None) -> None:
        """Load weights and graphs.

        Args:
            warm_up: run every graph, so that nothing is left to compile while serving; afterwards that is an error.
            torch_compile: `torch-export` only: compile the programs with this `torch.compile` backend.
        """
        if torch_compile is not None and self.neuron_config.backend != "torch-export":
            raise ValueError(f"torch_compile is for backend 'torch-export', not {self.neuron_config.backend!r}")
        backend = get_backend(self.neuron_config.backend)
        self.runtime = GraphRuntime(self._folder, self._manifest, backend, {"torch_compile": torch_compile})
        if warm_up:
            self.runtime.warm_up()

    @property
    def graphs(self) -> Mapping[str, artefact.Entry]:
        """The manifest's entries of the compiled graphs, by name."""
        return self._manifest.graphs

    @property
    def config(self) -> Any:
        """The target's config."""
        return AutoConfig.from_pretrained(self._folder)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Copy everything into `save_directory`, which must be empty or new.

        Raises:
            ValueError: it isn't empty or can't be written.
        """
        artefact.copy(self._folder, Path(os.fspath(save_directory)))

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Generate as transformers does; greedy output is token-identical to plain `generate()` in float32.

        Args:
            input_ids: int64 `[batch, prompt]`, padded on the left; up to `batch_size` rows.
            attention_mask: `[batch, prompt]`, zero on padding. `None`: as transformers sees it, the pad token is
                padding where the generation config names one that isn't an EOS as well.
            generation_config: for this call; what it leaves open comes from the target's own.
            stopping_criteria: each is asked after every token of every row, with that row's text alone, unpadded.
            options: `max_new_tokens`, `max_length`, `eos_token_id`, `pad_token_id`, `do_sample`, `temperature`, ...;
                without a length, rows may fill `sequence_length`.

        Returns:
            int64 `[batch, prompt + longest answer]`, shorter answers padded on the right.

        Raises:
            ValueError: more than was compiled for, or an option that compiled graphs can't follow.
            RuntimeError: exported with `load_weights=False`.
        """
        if self.runtime is None:
            raise RuntimeError("the weights aren't loaded: call load(), or save_pretrained() and from_pretrained()")
        compiled = self.neuron_config
        config = prepare(self.generation_config, generation_config, options, compiled)
        sampling = None
        if compiled.do_sample:
            heat = 1.0 if config.temperature is None else float(config.temperature)
            sampling = HostSampling(heat if config.do_sample else 0.0)
        eos, pad = end_and_padding(config)
        prompts = unpad(input_ids, attention_mask, None if pad in eos else pad, self._vocab_size)
        length = new_tokens(config, options, input_ids.shape[1])
        run = Generation(self.runtime, prompts, length, sampling, stop_rule(set(eos), stopping_criteria or ()))
        answers = [text[len(prompt) :] for text, prompt in zip(run.run(), prompts)]
        self.speculation_stats = run.stats
        longest = max(map(len, answers))
        filler = pad if pad is not None else (eos or [0])[0]
        padded = [answer + [filler] * (longest - len(answer)) for answer in answers]
        made = torch.tensor(padded, dtype=torch.long, device=input_ids.device)
        return torch.cat((input_ids.long(), made.view(len(answers), longest)), dim=1)


def _one_of(old: str, value: Any, name: str, options: dict[str, Any]) -> None:
    """Put `value`, given under an older name, where it belongs; ValueError where that says something else."""
    if name in options and full_dtype(options[name]) != full_dtype(value):
        raise ValueError(f"{old} {value!r} and {name} {options[name]!r} say different things: pass one of them")
    options[name] = value


def _name(model: Any) -> str | None:
    if isinstance(model, torch.nn.Module):
        return getattr(getattr(model, "config", None), "_name_or_path", None) or None
    return None if model is None else os.fspath(model)
