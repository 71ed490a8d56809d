"""The vision half of a model beside its GGUF file: `mmproj.gguf`, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.strict_json import parse_object
from weightsmith._features.quantisation.gguf_types import MIXTURES
from weightsmith._models.formats.gguf.layout import encode_metadata
from weightsmith._models.formats.gguf.projectors import (
    PROCESSOR,
    Images,
    Projector,
    find_projector,
    images_of,
    vision_keys,
    vision_name,
    vision_type,
)
from weightsmith._models.formats.gguf.writing import PLAIN, TYPES, GgufEncoding
from weightsmith._plans import Step

UNUSED = "llama.cpp does not use it"


@dataclass(frozen=True, slots=True)
class VisionHalf:
    """What a `mmproj.gguf` is made of.

    steps   for its tensors, under llama.cpp's names
    unused  steps for tensors that llama.cpp does not use
    header  its keys, encoded; empty: there is no such file
    """

    steps: list[Step] = field(default_factory=list)
    unused: list[Step] = field(default_factory=list)
    header: bytes = b""


def vision_half(
    config: Mapping[str, Any], width: int, steps: Sequence[Step], files: Mapping[str, bytes], mixture: str
) -> VisionHalf | None:
    """The vision half of a model; None of a family whose half is not written.

    config   all of config.json
    width    of the language model
    steps    for the tensors that do not belong to the language model
    files    those of `PROCESSOR` that the model has
    mixture  of the language model: `F32` and `BF16` are the vision half's type too, others leave F16

    Raises FormatError for values of the files that are no numbers, Unsupported for a half that llama.cpp would not load.
    """
    projector = find_projector(config)
    if projector is None or not steps:
        return None
    plain = mixture if mixture in PLAIN else "F16"
    processor = _processor(files)
    images = images_of(config, projector, processor)
    number = next(each.number for each in MIXTURES if each.name == plain)
    keys = vision_keys(images, projector, width, number)
    named = {step.out.name: vision_name(projector, step.out.name) for step in steps}
    if unknown := [name for name, there in named.items() if there is None]:
        raise Unsupported(f"llama.cpp knows no such tensor in the vision half of {projector.model_type}", where=unknown[0])
    layers, found = (
        images.vision.count("num_hidden_layers"),
        {there.split(".")[2] for there in named.values() if there and there.startswith("v.blk.")},
    )
    if found != {str(i) for i in range(layers)}:
        what = f"vision_config.num_hidden_layers is {layers:,}, and its tensors are of {len(found):,} layers"
        raise Unsupported(what, where="config.json")
    made = [_stored(projector, images, step, name, plain) for step in steps if (name := named[step.out.name])]
    return VisionHalf(made, [step for step in steps if not named[step.out.name]], encode_metadata(keys))


def _processor(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The files that say how images are prepared, as one. Raises FormatError for one that is no JSON object."""
    whole: dict[str, Any] = {}
    for name in PROCESSOR:
        own = parse_object(files[name], name, name, "repair it", unique=False) if name in files else {}
        inner = own.get("image_processor")
        whole |= own | (inner if isinstance(inner, dict) else {})
    return whole


def _stored(projector: Projector, images: Images, step: Step, name: str, plain: str) -> Step:
    """The step, encoded for the file. Raises Unsupported for a tensor that cannot be."""
    turned = projector.rotated and name.split(".")[-2] in ("attn_q", "attn_k")
    head_rows = step.out.shape[0] // images.vision.count("num_attention_heads") if turned else 0
    kind = vision_type(projector, name, len(step.out.shape), plain)
    encoding = GgufEncoding(TYPES[kind], head_rows, 1.0 if name in projector.shifted else 0.0)
    stored = tuple(replace(out, name=name) for out in encoding.outs(step.out))
    return replace(step, encoding=encoding.name, stored=stored)


def left_out(error: Unsupported, tensors: int) -> Finding:
    """The warning for a half that cannot be written."""
    what = f"{tensors:,} tensors for images are left out: {error.finding.what}"
    return Finding(
        what, error.finding.where, fix=error.finding.fix or "make mmproj.gguf with another program, or write --no-mmproj"
    )
