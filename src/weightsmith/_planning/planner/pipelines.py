"""The parts of a pipeline of diffusers in an output: whose config.json each has, and what models disagree on in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding, MismatchError, WeightsmithError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.subfolders import PIPELINE
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.tokenizers.files import settings_of
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES
from weightsmith._planning.planner.files import output_config
from weightsmith._planning.planner.steps import DTypes
from weightsmith._planning.recipe import ModelRef, Module
from weightsmith._plans import CAST, COPY, Read, Step

SCHEDULER = "scheduler/scheduler_config.json"

_UNCOMPARED = re.compile(r"_(?!class_name)\w+|(torch_)?dtype|transformers_version|quantization_config|architectures")
"""Settings that say where a model comes from and how it is stored."""
_DENOISER = re.compile("UNet|Transformer")
"""Classes of the parts that a scheduler belongs to."""
_SHOWN = 4

Owners = Mapping[str, int]
"""The model whose config.json each part of the output has."""


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


def taken_files(
    inputs: Sequence[Checkpoint], donor: int, taken: Mapping[str, int], owners: Owners
) -> tuple[dict[str, bytes], frozenset[str]]:
    """The files of parts that come from other models, and a model_index.json that names the classes of these and of parts
    with another model's config.json; and the donor's files that they replace.

    taken  see `taken_parts`

    Without config.json of parts with weights: see `part_configs`.
    """
    files: dict[str, bytes] = {}
    removed: set[str] = set()
    index = settings_of(inputs[donor].folder, inputs[donor].files, PIPELINE)
    before = dict(index)
    for part, k in taken.items():
        if k == donor:
            continue
        model, prefix = inputs[k], f"{part}/"
        names = [name for name in model.files if name.startswith(prefix)]
        names = [name for name in names if part not in model.parts or name != f"{prefix}config.json"]
        model.fetch(names)
        files |= {name: read_bounded(model.folder / name, MAX_FILE_BYTES) for name in names}
        removed |= {name for name in inputs[donor].files if name.startswith(prefix)}
    for part, k in {**owners, **taken}.items():
        if k == donor:
            continue
        inputs[k].fetch([PIPELINE])
        stated = settings_of(inputs[k].folder, inputs[k].files, PIPELINE).get(part)
        if isinstance(stated, list):
            index[part] = stated
    if index != before:
        files[PIPELINE] = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return files, frozenset(removed)


def copied_parts(inputs: Sequence[Checkpoint], copied: Mapping[str, int], dtypes: DTypes) -> Iterator[Step]:
    """The tensors of the parts that the donor lacks. copied: see `absent_parts`."""
    for part, owner in copied.items():
        for name, spec in inputs[owner].specs.items():
            if name.startswith(f"{part}/"):
                reads = (Read(owner, name),)
                dtype = dtypes.of(reads) if spec.dtype.floating else spec.dtype
                yield Step(TensorSpec(name, dtype, spec.shape), COPY if dtype == spec.dtype else CAST, reads)


def part_readers(inputs: Sequence[Checkpoint], steps: Sequence[Step]) -> dict[str, list[int]]:
    """For each part of the output, the models whose part of that name is read, in order."""
    readers: dict[str, set[int]] = {part: set() for model in inputs for part in model.parts}
    for step in steps:
        part = step.out.name.partition("/")[0]
        if part in readers:
            readers[part] |= {r.model for r in step.reads if r.model >= 0 and r.tensor.startswith(f"{part}/")}
    return {part: sorted(models) for part, models in readers.items() if models}


def part_owners(inputs: Sequence[Checkpoint], donor: int, readers: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The model whose config.json each part has: the donor if it is read there, else the first that is read and has one."""
    owners: dict[str, int] = {}
    for part, models in readers.items():
        described = [k for k in models if inputs[k].parts.get(part)]
        if described:
            owners[part] = donor if donor in described else described[0]
        elif part in inputs[donor].parts:
            owners[part] = donor
    return owners


def part_configs(
    inputs: Sequence[Checkpoint],
    donor: Checkpoint,
    owners: Owners,
    steps: Sequence[Step],
    structure: Structure,
    asked: DType | None,
) -> dict[str, bytes]:
    """The files config.json of the parts that the donor's do not describe: another model's, another dtype, no quantisation.

    structure  of the donor
    asked      dtype that all tensors were to have
    """
    files: dict[str, bytes] = {}
    for part, owner in owners.items():
        prefix, config = f"{part}/", inputs[owner].parts[part]
        if not config:
            continue
        outs = [step.out for step in steps if step.out.name.startswith(prefix)]
        stored: dict[str, TensorSpec] = {name: s for name, s in inputs[owner].specs.items() if name.startswith(prefix)}
        new, _ = output_config(config, structure, {}, outs, stored=stored, asked=asked, untie=False)
        if new != settings_of(donor.folder, donor.files, f"{prefix}config.json"):
            files[f"{prefix}config.json"] = (json.dumps(new, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def part_differences(
    inputs: Sequence[Checkpoint], labels: Sequence[str], donor: int, readers: Mapping[str, Sequence[int]], owners: Owners
) -> Iterator[Finding]:
    """A warning for each part that is made of models whose config.json differ, and for schedulers.

    donor  the model whose scheduler the output has

    Settings that only one of two files has are not compared: what they are by default depends on the class.
    """
    denoised: dict[int, None] = {}
    for part, owner in owners.items():
        config = inputs[owner].parts[part]
        for k in readers[part]:
            yield from _difference(f"{part}/config.json", config, inputs[k].parts.get(part, {}), labels[owner], labels[k])
        if _DENOISER.search(str(config.get("_class_name"))):
            denoised |= dict.fromkeys(readers[part])
    if SCHEDULER in inputs[donor].files and denoised.keys() - {donor}:
        schedulers = {k: _scheduler(inputs[k]) for k in (donor, *denoised)}
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
