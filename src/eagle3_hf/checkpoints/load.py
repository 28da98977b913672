"""From a published checkpoint to an `Eagle3DraftModel`: weights first, config second, everything on record."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..aux_layers import FINAL_STATE, text_config
from ..compat import IS_V5, rotary_config
from ..configuration_eagle3 import Eagle3Config
from ..modeling_eagle3 import Eagle3DraftModel
from .aux_ids import resolve_aux_ids, written_ids
from .derive import derive_config, is_single_state
from .families import detect
from .files import CheckpointFiles
from .names import normalise_names
from .provenance import AuxIds, Override, Provenance
from .refusals import refuse_unsupported
from .values import check_structure, check_values
from .vocabulary import fit_target_vocabulary, settle_vocabulary, unfilled_map

logger = logging.getLogger(__name__)

# Known to `from_pretrained` and without meaning here, where no weight is ever initialised or offloaded.
_IGNORED = ("low_cpu_mem_usage", "_from_auto", "_commit_hash", "trust_remote_code", "use_safetensors")


@dataclass
class Prepared:
    """A checkpoint read and understood, before a model is made of it.

    Attributes:
        values: keywords for `Eagle3Config`.
        weights: tensors by this package's names, `d2t` and `t2d` included.
        provenance: what was done.
        num_assistant_tokens: how many tokens its publisher drafts, if the config says.
    """

    values: dict[str, Any]
    weights: dict[str, torch.Tensor]
    provenance: Provenance
    num_assistant_tokens: int | None = None


def prepare(
    files: CheckpointFiles,
    config: dict[str, Any] | None = None,
    target: Any = None,
    aux_hidden_state_layers: Any = None,
) -> Prepared:
    """Read a checkpoint of any layout but our own.

    Args:
        files: where it is.
        config: its `config.json`, where it has been read already.
        target: the loaded target; gives its depth, and its head to a draft that has none.
        aux_hidden_state_layers: ids on this package's axis, instead of the config's.

    Raises:
        ValueError: everything that would make the draft wrong; see `refusals` and `vocabulary`.
        OSError: files are missing.
    """
    config = files.config() if config is None else config
    check_structure(config)
    raw, names = files.read()
    layout, evidence = detect(config, raw)
    fields, warnings = layout.fields(config)
    check_values(fields)
    weights, renamed, dropped = normalise_names(raw)
    origin = {new: old for old, new in renamed.items()}
    warnings += refuse_unsupported(config, fields, weights)
    record = Provenance(files.source, layout.name, evidence, names, renamed, dropped)
    _check_dtypes(weights, origin)
    warnings += _check_finite(weights, origin)
    _settle_head(fields, weights, target, record)
    vocabulary = settle_vocabulary(fields, weights)
    weights |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    listed = next(iter(written_ids(config).values()), None)
    made = derive_config(fields, weights, None if listed is None else len(listed))
    depth = fields.get("target_num_hidden_layers")
    if target is not None:
        depth = check_target_sizes(made.values["target_hidden_size"], depth, target)
    single = is_single_state(fields, weights)
    record.aux, found = resolve_aux_ids(
        config, made.values["num_aux_hidden_states"], depth, aux_hidden_state_layers, single
    )
    record.added |= made.added
    record.vocabulary = vocabulary.summary
    record.overridden = vocabulary.overridden + made.overridden
    record.warnings = [*warnings, *vocabulary.warnings, *made.warnings, *found]
    values = made.values | {
        "vocab_size": vocabulary.target_size,
        "draft_vocab_size": vocabulary.draft_size,
        "aux_hidden_state_layers": None if record.aux.ids == (FINAL_STATE,) else record.aux.ids,
        "target_num_hidden_layers": depth,
    }
    scale = fields.get("logit_scale")
    if scale not in (None, 1, 1.0):
        weights["lm_head.weight"] = weights["lm_head.weight"] * scale
        record.warnings.append(f"logit_scale {scale} was multiplied into lm_head")
    return Prepared(values, weights, record, fields.get("num_assistant_tokens"))


def load_published(
    cls: type[Eagle3DraftModel],
    files: CheckpointFiles,
    config: dict[str, Any],
    target: Any = None,
    **kwargs: Any,
) -> Eagle3DraftModel:
    """What `Eagle3DraftModel.from_pretrained` does for layouts other than our own.

    Args:
        cls: the class to make.
        files, config, target: see [`prepare`].
        kwargs: `dtype` (or `torch_dtype`), `attn_implementation`, `device_map` (one device), and any field of
            `Eagle3Config`, which then wins over the checkpoint.

    Raises:
        ValueError: see [`prepare`]; also tensors that the model lacks or doesn't know, and keywords without meaning.
    """
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
    device = _single_device(kwargs.pop("device_map", None))
    attention = {name: kwargs.pop(name) for name in ("attn_implementation",) if name in kwargs}
    for name in _IGNORED:
        kwargs.pop(name, None)
    known = set(Eagle3Config().to_dict()) - set(PretrainedConfig().to_dict())
    unknown = sorted(set(kwargs) - known)  # `config` among them: the checkpoint's own is what is read
    if unknown:
        raise ValueError(f"from_pretrained() doesn't know {', '.join(unknown)} for a published draft checkpoint")
    prepared = prepare(files, config, target, kwargs.pop("aux_hidden_state_layers", None))
    record = prepared.provenance
    for name, value in kwargs.items():
        if prepared.values.get(name) != value:
            record.overridden.append(Override(name, prepared.values.get(name), f"{value} (by the caller)"))
    made = Eagle3Config(**(prepared.values | kwargs))
    with torch.device("meta"):
        model = cls._from_config(made, **attention)
    _check_names(model, prepared)
    kind = _dtype(dtype, prepared.weights["layers.0.self_attn.q_proj.weight"].dtype)
    ready = {
        name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in prepared.weights.items()
    }
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        record.warnings += _rounded(prepared.weights, kind)
    model.load_state_dict(ready, strict=True, assign=True)
    # RoPE tables aren't in a file: they were made on the meta device with the rest, and are made again here.
    model.rotary_emb = LlamaRotaryEmbedding(config=rotary_config(made))
    if prepared.num_assistant_tokens:
        model.generation_config.num_assistant_tokens = int(prepared.num_assistant_tokens)
    if target is not None:
        record.warnings += fit_target_vocabulary(model, text_config(target).vocab_size)
    model.config.name_or_path = files.source
    model.provenance = record
    for text in [*map(str, record.overridden), *record.warnings]:
        logger.warning("%s: %s", files.source, text)
    return model.to(device).eval() if device is not None else model.eval()


def check_target_sizes(width: int, depth: int | None, target: Any) -> int:
    """Check that a draft can be this target's: no message of a later stage could name the cause as well.

    Args:
        width: the target's hidden size, as the draft's weights show it.
        depth: the target's number of layers, if the checkpoint says.
        target: the loaded target.

    Returns:
        The target's number of layers.

    Raises:
        ValueError: one of them differs; names both values.
        TypeError: the target isn't a loaded model.
    """
    if not hasattr(getattr(target, "config", None), "get_text_config"):
        raise TypeError(f"target must be the loaded target model, got {target!r}")
    text = text_config(target)
    pairs = (("hidden size", width, text.hidden_size), ("number of layers", depth, text.num_hidden_layers))
    for what, made_for, has in pairs:
        if made_for is not None and made_for != has:
            raise ValueError(
                f"this draft isn't one for {type(target).__name__}: it was made for a target with {what} {made_for}, "
                f"the target's {what} is {has}"
            )
    layers: int = text.num_hidden_layers
    return layers


def own_provenance(files: CheckpointFiles, model: Eagle3DraftModel) -> Provenance:
    """The record of a draft in our own layout, after checking what `PreTrainedModel` doesn't check.

    Raises:
        ValueError: weights that aren't finite, or a broken vocabulary map.
    """
    state = model.state_dict()
    warnings = _check_finite(state, {})
    size, vocab = model.config.draft_vocab_size, model.config.vocab_size
    ids = torch.arange(size, device=model.d2t.device) + model.d2t
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(
            f"d2t is broken: target ids reach from {int(ids.min())} to {int(ids.max())}, not 0..{vocab - 1}"
        )
    if ids.unique().numel() != size:
        raise ValueError(f"d2t is broken: {size - ids.unique().numel()} target ids occur twice")
    unfilled_map(model.d2t, vocab, model.t2d)
    record = Provenance(files.source, "transformers", "model_type eagle3", [file.name for file in files.weight_files()])
    record.warnings = warnings
    for text in warnings:
        logger.warning("%s: %s", files.source, text)
    record.vocabulary = f"{size} of {vocab} tokens, map by offsets" if size < vocab else f"all {vocab} tokens"
    t2d = torch.zeros_like(model.t2d)
    t2d[ids] = True
    if not torch.equal(t2d, model.t2d):
        record.warnings.append(f"t2d contradicts d2t at {int((t2d != model.t2d).sum())} tokens: rebuilt from d2t")
        logger.warning("%s: %s", files.source, record.warnings[-1])
        model.t2d.copy_(t2d)
    layers = model.config.aux_hidden_state_layers
    if layers is None and not model.config.use_aux_hidden_state:
        record.aux, _ = resolve_aux_ids({}, 1, single=True)
    if layers is not None:
        written = tuple(layers)
        record.aux = AuxIds(written, "aux_hidden_state_layers", written, "number i is the input of layer i")
    return record


def _dtype(wanted: Any, stored: torch.dtype) -> torch.dtype:
    """As `PreTrainedModel` decides: 4.57 loads in float32 unless told otherwise, 5.x in what the file holds."""
    if wanted is None:
        return stored if IS_V5 else torch.float32
    if isinstance(wanted, str) and wanted == "auto":
        return stored
    found = wanted if isinstance(wanted, torch.dtype) else getattr(torch, str(wanted), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype, its name or 'auto', got {wanted!r}")
    return found


def _rounded(weights: dict[str, torch.Tensor], kind: torch.dtype) -> list[str]:
    """A model has one dtype; a file may hold several, and the finer ones lose bits."""
    finer = [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and torch.promote_types(tensor.dtype, kind) != kind
    ]
    if not finer:
        return []
    some = ", ".join(finer[:3]) + (", ..." if len(finer) > 3 else "")
    return [
        f"{len(finer)} tensors are stored finer than the draft's {str(kind).removeprefix('torch.')} and are rounded to "
        f"it: {some}. Load with dtype=torch.float32 to keep them"
    ]


def _single_device(device_map: Any) -> Any:
    if isinstance(device_map, dict):
        devices = set(map(str, device_map.values()))
        if len(devices) != 1:
            raise ValueError(f"a draft goes on one device, device_map names {sorted(devices)}")
        return next(iter(device_map.values()))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device_map


def _check_dtypes(weights: dict[str, torch.Tensor], origin: dict[str, str]) -> None:
    odd = {
        name: tensor.dtype
        for name, tensor in weights.items()
        if name not in {"d2t", "t2d"} and not tensor.is_floating_point()
    }
    if odd:
        listed = ", ".join(f"{origin.get(name, name)} ({dtype})" for name, dtype in odd.items())
        raise ValueError(f"weights that aren't floating-point numbers: {listed}")


def _check_finite(weights: dict[str, torch.Tensor], origin: dict[str, str]) -> list[str]:
    """Refuse NaN and infinity, and zeros that blot out all that comes in; other zeros are returned as a warning."""
    bad = {
        name: int((~tensor.isfinite()).sum())
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    }
    if bad:
        listed = ", ".join(f"{origin.get(name, name)} ({count} values)" for name, count in bad.items())
        raise ValueError(f"weights that are NaN or infinite: {listed}. The checkpoint is damaged")
    zero = [
        name
        for name, tensor in weights.items()
        if name.endswith(".weight") and tensor.is_floating_point() and not tensor.any()
    ]
    # Beside a residual a block of zeros only does nothing, as some trainers start it; the rest has no way around it.
    dead = [origin.get(name, name) for name in zero if not name.endswith("_proj.weight")]
    if dead:
        raise ValueError(
            f"weights that are all zero: {', '.join(dead)}. They were never written: such a draft says the same token "
            "always. The checkpoint is damaged"
        )
    idle = ", ".join(origin.get(name, name) for name in zero)
    return [f"weights that are all zero: {idle}. That part of the draft does nothing"] if zero else []


def _settle_head(fields: dict[str, Any], weights: dict[str, torch.Tensor], target: Any, record: Provenance) -> None:
    if "lm_head.weight" in weights:
        return
    rows, size = fields.get("draft_vocab_size"), fields.get("vocab_size")
    if "d2t" in weights or (rows is not None and rows != size):
        count = weights["d2t"].shape[0] if "d2t" in weights else rows
        raise ValueError(
            f"lm_head.weight is missing, and the draft vocabulary is pruned ({count} tokens): no other head fits it. "
            "A random one would never be right"
        )
    if target is None:
        raise ValueError(
            "lm_head.weight is missing: this draft uses its target's. Pass target=<the loaded target>, --target T on "
            "the command line"
        )
    head = target.get_output_embeddings()
    gate = weights.get("layers.0.mlp.gate_proj.weight")  # a plain name for the draft's width and dtype
    if gate is None or gate.dim() != 2:
        raise ValueError("lm_head.weight and layers.0.mlp.gate_proj.weight are missing from the checkpoint")
    if head is None or head.weight.shape[1] != gate.shape[1]:
        has = "none" if head is None else f"one that is {head.weight.shape[1]} wide"
        raise ValueError(
            f"lm_head.weight is missing, and the target's head can't stand in: it has {has}, the draft is "
            f"{gate.shape[1]} wide"
        )
    weights["lm_head.weight"] = head.weight.detach().to(gate.dtype).cpu().clone()
    record.added["lm_head.weight"] = "a copy of the target's"


def _check_names(model: Eagle3DraftModel, prepared: Prepared) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in prepared.weights.items()}
    faults = {
        "missing": sorted(set(expected) - set(given)),
        "unknown": sorted(set(given) - set(expected)),
        "of the wrong shape": [
            f"{name} {list(given[name])}, not {list(expected[name])}"
            for name in sorted(set(given) & set(expected))
            if given[name] != expected[name]
        ],
    }
    said = [f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names]
    if said:
        record = prepared.provenance
        raise ValueError(
            f"{record.source} ({record.family} layout) is not a complete EAGLE-3 draft; tensors {'; '.join(said)}"
        )
