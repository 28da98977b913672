"""What a loader did to a checkpoint: kept on `draft.provenance`, printed by `eagle3-hf inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class AuxIds:
    """Which target states the draft reads, and how that is known.

    Attributes:
        ids: on this package's axis (id `i` is the input of layer `i`); `None` is the default `(2, L//2, L-3)`.
        source: key of the config they were read from, `default`, or `caller`.
        written: the numbers as they stand there.
        convention: what a number means there.
    """

    ids: tuple[int, ...] | None
    source: str
    written: tuple[int, ...] | None
    convention: str

    def __str__(self) -> str:
        if self.ids is None:
            return f"default (2, L//2, L-3): {self.convention}"
        text = f"{list(self.ids)} from {self.source}"
        if self.written is not None:
            text += f" = {list(self.written)}"
        return f"{text} ({self.convention})"


@dataclass(frozen=True)
class Override:
    """A config value that the weights contradicted; the weights won."""

    name: str
    config: Any
    weights: Any

    def __str__(self) -> str:
        return f"{self.name}: config says {self.config}, weights say {self.weights}"


@dataclass
class Provenance:
    """Where a draft came from and how it was read.

    Attributes:
        source: folder or Hub id.
        family: the published layout.
        evidence: what it was recognised by.
        files: names of the weight files.
        renamed: tensor names, file to model, where they differ.
        dropped: tensors that aren't weights of a draft, with the reason.
        added: tensors that the file left out and that are known (zeros of a bias, the target's head), with the reason.
        aux: see [`AuxIds`].
        overridden: see [`Override`].
        vocabulary: how the draft's token ids map to the target's.
        warnings: everything else that deserves a look.
    """

    source: str
    family: str
    evidence: str
    files: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    aux: AuxIds = field(default_factory=lambda: AuxIds(None, "default", None, "no ids in the config"))
    overridden: list[Override] = field(default_factory=list)
    vocabulary: str = ""
    warnings: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, for a table."""
        rows = [
            ("source", self.source),
            ("family", f"{self.family} ({self.evidence})"),
            ("files", ", ".join(self.files)),
            ("aux hidden states", str(self.aux)),
            ("vocabulary", self.vocabulary),
        ]
        rows += [("renamed", f"{old} -> {new}") for old, new in self.renamed.items()]
        rows += [("dropped", f"{name}: {reason}") for name, reason in self.dropped.items()]
        rows += [("added", f"{name}: {reason}") for name, reason in self.added.items()]
        rows += [("overridden", str(override)) for override in self.overridden]
        rows += [("warning", text) for text in self.warnings]
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
