"""Subfolders with weights of their own: an output has those of its donor, whose files say what the weights are for.

Their tensors are merged by name, as all others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightsmith._base.errors import Finding
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._files.containers import Naming
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import Dropped, PlanDraft

_ABSENT = "its subfolder is not in the output"


def without_foreign(
    specs: Sequence[Mapping[str, TensorSpec]], inputs: Sequence[Checkpoint], donor: Checkpoint
) -> list[Mapping[str, TensorSpec]]:
    """The tensors of each model, without those in subfolders that the donor does not have."""
    found: list[Mapping[str, TensorSpec]] = []
    for own, checkpoint in zip(specs, inputs, strict=True):
        names = set(_foreign(checkpoint, donor))
        found.append({name: spec for name, spec in own.items() if name not in names} if names else own)
    return found


def foreign(inputs: Iterable[Checkpoint], donor: Checkpoint) -> list[Dropped]:
    """The tensors that `without_foreign` leaves out."""
    return [Dropped(i, name, _ABSENT) for i, each in enumerate(inputs) for name in _foreign(each, donor)]


def foreign_findings(inputs: Sequence[Checkpoint], labels: Sequence[str], donor: int) -> Iterator[Finding]:
    """Warnings of subfolders with weights that the donor does not have."""
    for label, checkpoint in zip(labels, inputs, strict=True):
        if inner := [folder for folder in checkpoint.subfolders if folder not in inputs[donor].subfolders]:
            what = f"left out with its weights: {', '.join(inner)}, which {labels[donor]} does not have"
            yield Finding(
                what, label, fix="merge models with the same modules, or list first the one whose modules the output has"
            )


def drop_subfolders(draft: PlanDraft, reader: str) -> None:
    """Leave the weights of subfolders out of the output, with a warning. reader: of the output, which reads none."""
    naming = draft.naming
    if not naming.folders:
        return
    inner = [step for step in draft.steps if naming.folder_of(step.out.name)]
    draft.steps = [step for step in draft.steps if not naming.folder_of(step.out.name)]
    draft.dropped += [Dropped(r.model, r.tensor, _ABSENT) for step in inner for r in step.reads if r.model >= 0]
    draft.naming = Naming(naming.stem, naming.metadata)
    listed = ", ".join(naming.folders)
    what = f"left out, {count(len(inner), 'tensor')}: {reader} computes what comes out of the transformer, without {listed}"
    draft.warn(what, listed, "apply these modules to its output yourself, or choose another format")


def _foreign(checkpoint: Checkpoint, donor: Checkpoint) -> list[str]:
    others = Naming(folders=tuple(folder for folder in checkpoint.subfolders if folder not in donor.subfolders))
    return [name for name in checkpoint.specs if others.folder_of(name)] if others.folders else []
