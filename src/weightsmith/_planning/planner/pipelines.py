"""The parts of a pipeline of diffusers in an output, and other subfolders with weights: which model gives each, and whose
config.json it has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsmith._base.errors import Finding, MismatchError, WeightsmithError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._base.text import count
from weightsmith._files.containers import Naming
from weightsmith._files.subfolders import PIPELINE, model_parts
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.tokenizers.files import json_bytes, settings_of
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES
from weightsmith._planning.planner.files import output_config
from weightsmith._planning.planner.steps import DTypes
from weightsmith._planning.recipe import ModelRef, Module
from weightsmith._plans import Dropped, PlanDraft, Read, Step

SCHEDULER = "scheduler/scheduler_config.json"

_UNCOMPARED = re.compile(r"_(?!class_name)\w+|(torch_)?dtype|transformers_version|quantization_config|architectures")
"""Settings that say where a model comes from and how it is stored."""
_DENOISER = re.compile("UNet|Transformer")
"""Classes of the parts that a scheduler belongs to."""
_SHOWN = 4

_ABSENT = "its subfolder is not in the output"


def taken_parts(
    modules: Sequence[Module], models: Mapping[ModelRef, int], inputs: Sequence[Checkpoint], labels: Sequence[str], donor: int
) -> tuple[dict[str, int], list[WeightsmithError]]:
    """The parts of a pipeline that the recipe takes from one model, since the donor has no weights of them; and problems.

    modules  of the recipe. Those that are no part of any model are left to others

    A scheduler or a tokenizer has no weights in any model. Returns the index of the model that gives each.
    """
    taken: dict[str, int] = {}
    problems: list[WeightsmithError] = []
    for module in modules if inputs[donor].parts else ():
        owners = [k for k, model in enumerate(inputs) if module.name in _folders(model)]
        if module.name in inputs[donor].parts or not owners:
            continue
        listed = [models[entry.model] for entry in module.models]
        if len(listed) != 1:
            what = f"{labels[donor]} has no weights of the part '{module.name}': it is taken from one model as it is"
            problems.append(MismatchError(what, where=module.where, fix="write models: and one model, without slices"))
        elif listed[0] not in owners:
            what = f"{labels[listed[0]]} has no part '{module.name}'"
            fix = f"name {' or '.join(labels[k] for k in owners)}"
            problems.append(MismatchError(what, where=module.models[0].model.where, fix=fix))
        taken[module.name] = listed[0] if listed else donor
    return taken, problems


def _folders(model: Checkpoint) -> set[str]:
    """The parts of a pipeline, those without weights too."""
    return {*model.parts, *(name.partition("/")[0] for name in model.files if "/" in name)} if model.parts else set()


class Pipeline:
    """The parts of the output of a merge, once it is known which tensors it has. Models that are no pipelines have none.

    taken   the model that gives a part which the recipe takes whole: see `taken_parts`
    copied  the same for all parts with weights that the donor lacks
    """

    def __init__(self, inputs: Sequence[Checkpoint], labels: Sequence[str], donor: int, taken: Mapping[str, int]) -> None:
        """donor: index of the model that gives all else."""
        self.taken = taken
        self._inputs, self._labels, self._number, self._donor = inputs, labels, donor, inputs[donor]
        owners = {part: [k for k, model in enumerate(inputs) if part in model.parts] for part in _lacked_parts(self._donor)}
        named = {part: models[0] for part, models in owners.items() if models}
        self.copied = {**named, **{part: k for part, k in taken.items() if part in inputs[k].parts}}
        self._readers: dict[str, list[int]] = {}
        self._owners: dict[str, int] = {}

    def copies(self, dtypes: DTypes) -> Iterator[Step]:
        """The tensors of the parts that the donor lacks."""
        for part, owner in self.copied.items():
            for name, spec in self._inputs[owner].specs.items():
                if name.startswith(f"{part}/"):
                    read = Read(owner, name)
                    dtype = dtypes.of([read]) if spec.dtype.floating else spec.dtype
                    yield Step.copy(TensorSpec(name, dtype, spec.shape), read, spec.dtype)

    def settle(self, steps: Sequence[Step]) -> None:
        """Choose the model whose config.json each part has: the donor if it is read there, else the first that is read and has
        one. steps: of the output; what follows needs the choice.
        """
        readers: dict[str, set[int]] = {part: set() for model in self._inputs for part in model.parts}
        for step in steps:
            part = step.out.name.partition("/")[0]
            if part in readers:
                readers[part] |= {r.model for r in step.reads if r.model >= 0 and r.tensor.startswith(f"{part}/")}
        self._readers = {part: sorted(models) for part, models in readers.items() if models}
        for part, models in self._readers.items():
            described = [k for k in models if self._inputs[k].parts.get(part)]
            if described:
                self._owners[part] = self._number if self._number in described else described[0]
            elif part in self._donor.parts:
                self._owners[part] = self._number

    def naming(self) -> Naming:
        """The names of the output's files."""
        naming = self._donor.naming
        stems = {part: self._inputs[owner].naming.parts[part] for part, owner in self._owners.items()}
        return replace(naming, folders=(*naming.folders, *self.copied), parts={**naming.parts, **stems})

    def configs(self, steps: Sequence[Step], structure: Structure, asked: DType | None) -> dict[str, bytes]:
        """The files config.json of the parts that the donor's do not describe: another model's, another dtype, no
        quantisation.

        structure  of the donor
        asked      dtype that all tensors were to have
        """
        files: dict[str, bytes] = {}
        for part, owner in self._owners.items():
            name, config = f"{part}/config.json", self._inputs[owner].parts[part]
            if not config:
                continue
            outs = [step.out for step in steps if step.out.name.startswith(f"{part}/")]
            stored = {n: spec for n, spec in self._inputs[owner].specs.items() if n.startswith(f"{part}/")}
            new, _ = output_config(config, structure, {}, outs, stored=stored, asked=asked, untie=False)
            if new != settings_of(self._donor.folder, self._donor.files, name):
                files[name] = json_bytes(new)
        return files

    def files(self) -> tuple[dict[str, bytes], frozenset[str]]:
        """The files of parts that come from other models, and a model_index.json that names the classes of these and of parts
        with another model's config.json; and the donor's files that they replace.

        Without config.json of parts with weights: see `configs`.
        """
        files: dict[str, bytes] = {}
        removed: set[str] = set()
        index = settings_of(self._donor.folder, self._donor.files, PIPELINE)
        before = dict(index)
        for part, k in self.taken.items():
            if k == self._number:
                continue
            model, prefix = self._inputs[k], f"{part}/"
            names = [name for name in model.files if name.startswith(prefix)]
            names = [name for name in names if part not in model.parts or name != f"{prefix}config.json"]
            model.fetch(names)
            files |= {name: read_bounded(model.folder / name, MAX_FILE_BYTES) for name in names}
            removed |= {name for name in self._donor.files if name.startswith(prefix)}
        for part, k in {**self._owners, **self.taken}.items():
            if k == self._number:
                continue
            self._inputs[k].fetch([PIPELINE])
            stated = settings_of(self._inputs[k].folder, self._inputs[k].files, PIPELINE).get(part)
            if isinstance(stated, list):
                index[part] = stated
        if index != before:
            files[PIPELINE] = json_bytes(index)
        return files, frozenset(removed)

    def dropped(self) -> list[Dropped]:
        """The tensors that `without_foreign` leaves out, but for those that are copied."""
        return [
            Dropped(i, name, _ABSENT if part not in self.copied else "its part is copied from another model")
            for i, checkpoint in enumerate(self._inputs)
            for name in _foreign(checkpoint, self._donor)
            if self.copied.get(part := name.partition("/")[0]) != i
        ]

    def findings(self) -> Iterator[Finding]:
        """Warnings of parts whose models differ, of those that are copied or missing, and of subfolders that are left out."""
        yield from self._differences()
        yield from self._copies_and_gaps()
        for label, checkpoint in zip(self._labels, self._inputs, strict=True):
            lacked = [folder for folder in checkpoint.subfolders if folder not in self._donor.subfolders]
            if inner := [folder for folder in lacked if folder not in self.copied]:
                what = f"left out with its weights: {', '.join(inner)}, which {self._labels[self._number]} does not have"
                fix = "merge models with the same modules, or list first the one whose modules the output has"
                yield Finding(what, label, fix=fix)

    def _copies_and_gaps(self) -> Iterator[Finding]:
        """Warnings of the parts that the donor's model_index.json names, and that it lacks."""
        donor, label = self._donor, self._labels[self._number]
        for part, owner in self.copied.items():
            if part not in self.taken:
                giver = self._labels[owner]
                what = f"the part {part} is copied from {giver}: model_index.json of {label} names it, without weights"
                yield Finding(what, label, fix="list a model that has all parts first, to merge it")
        for part in _lacked_parts(donor):
            if part not in self.copied and not any(name.startswith(f"{part}/") for name in donor.files):
                what = f"no model has the part {part}, which {PIPELINE} names: diffusers may refuse the output"
                yield Finding(what, label, fix=f"download its folder, or write [null, null] for it in {PIPELINE}")

    def _differences(self) -> Iterator[Finding]:
        """A warning for each part that is made of models whose config.json differ, and for schedulers.

        Settings that only one of two files has are not compared: what they are by default depends on the class.
        """
        labels, denoised = self._labels, dict[int, None]()
        for part, owner in self._owners.items():
            config = self._inputs[owner].parts[part]
            for k in self._readers[part]:
                other = self._inputs[k].parts.get(part, {})
                yield from _difference(f"{part}/config.json", config, other, labels[owner], labels[k])
            if _DENOISER.search(str(config.get("_class_name"))):
                denoised |= dict.fromkeys(self._readers[part])
        donor = self.taken.get("scheduler", self._number)
        if SCHEDULER in self._inputs[donor].files and denoised.keys() - {donor}:
            schedulers = {k: _scheduler(self._inputs[k]) for k in (donor, *denoised)}
            for k in denoised:
                yield from _difference(SCHEDULER, schedulers[donor], schedulers[k], labels[donor], labels[k])


def _scheduler(model: Checkpoint) -> Mapping[str, Any]:
    if SCHEDULER in model.files:
        model.fetch([SCHEDULER])
    return settings_of(model.folder, model.files, SCHEDULER)


def _difference(name: str, config: Mapping[str, Any], other: Mapping[str, Any], owner: str, label: str) -> Iterator[Finding]:
    keys = [key for key in config if key in other and config[key] != other[key] and not _UNCOMPARED.fullmatch(key)]
    if not keys:
        return
    listed = ", ".join(show(key)[1:-1] for key in keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN))
    details = [f"{key}: {show(config[key])} in {owner}, {show(other[key])} in {label}" for key in keys[:_SHOWN]]
    fix = "test the result: weights were trained for the value of their own model"
    yield Finding(f"the models differ in {listed}; the output has the values of {owner}", name, tuple(details), fix)


# ---- subfolders with weights of their own


def without_foreign(
    specs: Sequence[Mapping[str, TensorSpec]], inputs: Sequence[Checkpoint], donor: Checkpoint
) -> list[Mapping[str, TensorSpec]]:
    """The tensors of each model, without those in subfolders that the donor does not have."""
    kept: list[Mapping[str, TensorSpec]] = []
    for tensors, checkpoint in zip(specs, inputs, strict=True):
        names = set(_foreign(checkpoint, donor))
        kept.append({name: spec for name, spec in tensors.items() if name not in names} if names else tensors)
    return kept


def drop_subfolders(draft: PlanDraft, reader: str, kept: Collection[str] = ()) -> None:
    """Leave the weights of subfolders out of the output, with a warning.

    reader  of the output, which reads none but those that are kept
    """
    naming = replace(draft.naming, folders=tuple(folder for folder in draft.naming.folders if folder not in kept))
    if not naming.folders:
        return
    inner = [step for step in draft.steps if naming.folder_of(step.out.name)]
    draft.steps = [step for step in draft.steps if not naming.folder_of(step.out.name)]
    draft.dropped += [Dropped(r.model, r.tensor, _ABSENT) for step in inner for r in step.reads if r.model >= 0]
    draft.naming = replace(naming, folders=tuple(folder for folder in draft.naming.folders if folder in kept))
    listed = ", ".join(naming.folders)
    what = f"left out, {count(len(inner), 'tensor')}: {reader} computes what comes out of the transformer, without {listed}"
    draft.warn(what, listed, "apply these modules to its output yourself, or choose another format")


def _lacked_parts(donor: Checkpoint) -> list[str]:
    """The parts with weights that the donor's model_index.json names and that it lacks."""
    named = model_parts(donor.folder) if donor.parts and PIPELINE in donor.files else ()
    return [part for part in named if part not in donor.subfolders]


def _foreign(checkpoint: Checkpoint, donor: Checkpoint) -> list[str]:
    others = Naming(folders=tuple(folder for folder in checkpoint.subfolders if folder not in donor.subfolders))
    return [name for name in checkpoint.specs if others.folder_of(name)] if others.folders else []
