"""The plan of a GGUF file for ComfyUI: which tensors it has, under which names, and in which types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightsmith._base.errors import Finding, PlanError, Unsupported, WeightsmithError, noting
from weightsmith._base.options import option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import count
from weightsmith._files.containers import GGUF
from weightsmith._files.copied import BUILDING_KEYS, is_read
from weightsmith._models.formats.gguf.about import Stated, with_stated
from weightsmith._models.formats.gguf.diffusion.families import (
    MIXTURES,
    DiffusionFamily,
    family_of,
    find_family,
    folded,
    prefix_of,
    types_of,
)
from weightsmith._models.formats.gguf.diffusion.text_encoder import (
    SPIECE,
    SPIECE_FILES,
    UMT5_TOKENS,
    is_t5,
    spiece_keys,
    t5_keys,
    t5_names,
    t5_types,
)
from weightsmith._models.formats.gguf.layout import ALIGNMENT, Value, encode_metadata
from weightsmith._models.formats.gguf.types import Chosen, Mixture
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES, PLAIN, PREFIX, TYPES, DiffusionEncoding, libgguf
from weightsmith._models.structure.diffusers_names import CLASSES, TABLES, SingleFileTensor, single_file_tensors
from weightsmith._plans import CAST, COPY, JOIN, PlanDraft, Step
from weightsmith.abc.stored import ModelFiles

DENOISERS = ("unet", "transformer", "transformer_2")
"""Parts of pipelines that are diffusion models."""
CLASS = "_class_name"
"""The key of config.json in a folder of diffusers that names the class."""
_NOT_DIFFUSION = "ComfyUI reads VAEs and text encoders from files of their own"
_NOT_LOADED = "ComfyUI-GGUF does not load it"
_DOUBLE = "it is a second copy of the embedding"
_IN_KEYS = "the tokenizer is in the keys of the file"
_SCALAR = (1,)
"""The shape of a single number in a GGUF file."""
_NAMES = "names are those of single files: double_blocks.0.img_attn.qkv.weight"
_T5_NAMES = "names are llama.cpp's: enc.blk.0.attn_q.weight, enc.blk.0.ffn_down.weight, token_embd.weight"


def is_diffusion(config: Mapping[str, Any] | None) -> bool:
    """Whether a model may be a diffusion model: a single file, or a folder of diffusers."""
    return not config or (CLASS in config and config.get("model_type") is None)


def prepare_diffusion(draft: PlanDraft, companions: ModelFiles, mixture: Mixture, chosen: Chosen, stated: Stated) -> None:
    """Turn a draft of plain tensors into that of a GGUF file for ComfyUI. Raises PlanError, Unsupported, FormatError."""
    if mixture.name not in MIXTURES:
        known = ", ".join(f"{PREFIX}{name.lower()}" for name in sorted(MIXTURES))
        what = f"ComfyUI-GGUF has no rules for diffusion models in {PREFIX}{mixture.name.lower()}"
        raise Unsupported(what, fix=f"choose one of {known}")
    text = is_t5({step.out.name for step in draft.steps})
    contents = _text_encoder(draft, companions, mixture, chosen) if text else _diffusion_model(draft, mixture, chosen)
    specs = [tensor.step.out for tensor in contents.tensors]
    problems: list[WeightsmithError] = [
        option_error("tensor_types", f"no tensor of this model has a name that matches {pattern.pattern}", contents.names)
        for pattern, _ in chosen
        if not any(pattern.search(spec.name) for spec in specs)
    ]
    problems += [
        option_error("tensor_types", f"{kind} needs importances, and diffusion models have none", "choose another type")
        for kind in dict.fromkeys(contents.types)
        if kind in NEEDS_IMPORTANCES
    ]
    _need_library(contents.types)
    steps = list[Step]()
    for tensor, kind in zip(contents.tensors, contents.types, strict=True):
        if kind not in NEEDS_IMPORTANCES:
            with noting(problems):
                steps.append(_encoded(tensor, kind))
    if problems:
        raise PlanError(problems)
    draft.steps, draft.container = steps, GGUF
    draft.header = encode_metadata(with_stated(contents.keys, stated))
    draft.max_shard_bytes = sum(out.nbytes + ALIGNMENT for step in steps for out in step.stored)  # ComfyUI reads no parts
    draft.warnings += [*contents.warnings, *_fallen_back(mixture, steps)]
    _keep_files(draft, companions)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A step under the name that its tensor has in the file.

    shape    in the file, if it is folded or a single number
    swapped  see `SingleFileTensor`
    """

    step: Step
    shape: tuple[int, ...] = ()
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file holds.

    types  those of the tensors, in order
    names  what their names look like, for messages
    """

    tensors: Sequence[_Tensor]
    types: Sequence[str]
    keys: Mapping[str, Value]
    names: str
    warnings: Sequence[Finding] = ()


def _diffusion_model(draft: PlanDraft, mixture: Mixture, chosen: Chosen) -> _Contents:
    tensors, family, lacking = _tensors(draft)
    specs = [tensor.step.out for tensor in tensors]
    shapes = {spec.name: shape for spec in specs if (shape := folded(family, spec.shape)) != spec.shape}
    keys = {
        "general.architecture": Value("str", family.name),
        "general.quantization_version": Value("u32", 2),
        "general.file_type": Value("u32", mixture.number),
        **{f"comfy.gguf.orig_shape.{spec.name}": Value("i32", spec.shape) for spec in specs if spec.name in shapes},
    }
    stored_shapes = {spec.name: shapes.get(spec.name, () if spec.shape else _SCALAR) for spec in specs}
    tensors = [replace(tensor, shape=stored_shapes[tensor.step.out.name]) for tensor in tensors]
    warnings = [*_left_out(lacking), *_unsaid(draft.naming.metadata)]
    return _Contents(tensors, types_of(mixture, family, specs, chosen), keys, _NAMES, warnings)


def _text_encoder(draft: PlanDraft, companions: ModelFiles, mixture: Mixture, chosen: Chosen) -> _Contents:
    where = draft.models[draft.donor].ref
    draft.leave_out([step for step in draft.steps if step.out.name == SPIECE], _IN_KEYS)
    placed = t5_names([step.out.name for step in draft.steps], where)
    draft.leave_out([step for step in draft.steps if step.out.name not in placed], _DOUBLE)
    tensors = [_Tensor(_named(_wide(step), placed[step.out.name])) for step in draft.steps]
    specs = [tensor.step.out for tensor in tensors]
    keys = t5_keys({spec.name: spec for spec in specs}, mixture, where)
    keys |= _tokenizer(companions, next(spec.shape[0] for spec in specs if spec.name == "token_embd.weight"), where)
    return _Contents(tensors, t5_types(mixture, specs, keys, chosen), keys, _T5_NAMES)


def _tokenizer(companions: ModelFiles, rows: int, where: str) -> dict[str, Value]:
    """The keys of UMT5's tokenizer; none for other T5 models. rows: of the embedding. Raises Unsupported, FormatError."""
    if rows != UMT5_TOKENS:
        return {}
    data = companions.tensor(SPIECE)
    for name in SPIECE_FILES:
        data = companions.donor(name) if data is None else data
    if data is None:
        what = f"ComfyUI reads the tokenizer of UMT5 from the same file, and the model has no {SPIECE_FILES[0]}"
        fix = f"copy {SPIECE_FILES[0]} from the model's folder tokenizer to the weights, or use a file with the tensor {SPIECE}"
        raise Unsupported(what, where=where, fix=fix)
    return spiece_keys(data, rows, where)


def _tensors(draft: PlanDraft) -> tuple[list[_Tensor], DiffusionFamily, list[str]]:
    """The tensors of the diffusion model, its family, and the names of VAEs and text encoders, which leave the draft."""
    by_name = {step.out.name: step for step in draft.steps}
    where = draft.models[draft.donor].ref
    kind = (draft.config or {}).get(CLASS)
    if isinstance(kind, str):
        table = CLASSES.get(kind)
        renamed = [] if table is None else list(single_file_tensors(table, list(by_name), where))
        family = family_of({tensor.name for tensor in renamed}, where, kind)
        return [_joined(tensor, by_name) for tensor in renamed], family, []
    prefix = prefix_of(by_name)
    inside = {name.removeprefix(prefix): step for name, step in by_name.items() if name.startswith(prefix)}
    renamed = _of_diffusers(inside, where)
    names = {tensor.name for tensor in renamed}
    family = family_of(names, where)
    ignored = [tensor for tensor in renamed if any(part in tensor.name for part in family.ignored)]
    markers = [name for name in family.markers if name in by_name and name not in inside]
    others = [name for name in by_name if not name.startswith(prefix) and name not in markers]
    draft.leave_out([by_name[name] for name in others], _NOT_DIFFUSION)
    draft.leave_out([inside[part] for tensor in ignored for part in tensor.parts], _NOT_LOADED)
    tensors = [_joined(tensor, inside) for tensor in renamed if tensor not in ignored]
    return [*tensors, *(_Tensor(_wide(by_name[name])) for name in markers)], family, others


def _of_diffusers(inside: Mapping[str, Step], where: str) -> list[SingleFileTensor]:
    """The tensors of a file without config.json, whichever names it has: of single files, or of diffusers."""
    plain = [SingleFileTensor(name, (name,)) for name in inside]
    if find_family(inside) is not None:
        return plain
    for table in TABLES:
        try:
            renamed = list(single_file_tensors(table, list(inside), where))
        except Unsupported:
            continue
        if find_family({tensor.name for tensor in renamed}) is not None:
            return renamed
    return plain


def _joined(tensor: SingleFileTensor, steps: Mapping[str, Step]) -> _Tensor:
    """The step of a tensor of a single file. Raises Unsupported for parts that do not fit together."""
    parts = [_wide(steps[name]) for name in tensor.parts]
    first = parts[0].out
    if len(parts) == 1:
        return _Tensor(_named(parts[0], tensor.name), swapped=tensor.swapped)
    if len({(part.out.shape[1:], part.out.dtype) for part in parts}) > 1:
        what = f"its parts differ in columns or dtype: {', '.join(str(part.out) for part in parts)}"
        raise Unsupported(what, where=tensor.name, fix="choose a dtype: --out-dtype bfloat16 (out_dtype)")
    spec = TensorSpec(tensor.name, first.dtype, (sum(part.out.shape[0] for part in parts), *first.shape[1:]))
    leaves = tuple(leaf for part in parts for leaf in part.leaves)
    return _Tensor(Step(spec, JOIN, (), pieces=leaves, role=parts[0].role, layer=parts[0].layer))


def _named(step: Step, name: str) -> Step:
    return replace(step, out=replace(step.out, name=name))


def _wide(step: Step) -> Step:
    """The step, with numbers of 16 bits or more: F16 has all 8-bit floats."""
    if step.out.dtype.itemsize > 1 or not step.out.dtype.floating or any(leaf.merges for leaf in step.leaves):
        return step
    wide = replace(step, out=replace(step.out, dtype=DTYPES["F16"]))
    return wide.with_leaves(
        lambda leaf: replace(leaf, out=replace(leaf.out, dtype=DTYPES["F16"]), op=CAST if leaf.op == COPY else leaf.op)
    )


def _encoded(tensor: _Tensor, kind: str) -> Step:
    """The step of a tensor that is stored as a type. Raises Unsupported."""
    step = tensor.step
    encoding = DiffusionEncoding(TYPES[kind], folded=bool(tensor.shape), swapped=tensor.swapped)
    if encoding.folded:
        step = Step(replace(step.out, shape=tensor.shape), JOIN, (), pieces=step.leaves, role=step.role, layer=step.layer)
    try:
        return replace(step, encoding=encoding.name, stored=encoding.outs(step.out))
    except Unsupported as error:
        raise Unsupported(error.finding.what, where=step.out.name, fix="remove the tensor from the model's file") from error


def _need_library(types: Sequence[str]) -> None:
    from weightsmith._kernels.ggml import ENCODED

    if not ENCODED.issuperset({*types} - {*PLAIN}):
        libgguf()


def _keep_files(draft: PlanDraft, companions: ModelFiles) -> None:
    """Leave out config.json: ComfyUI takes the sizes from the tensors."""
    copied = [name for name in draft.carried if not is_read(name) and not name.endswith(".py") and "/" not in name]
    companions.held({*copied, "config.json"})
    draft.carried, draft.files, draft.config = copied, {}, None


def _left_out(names: Sequence[str]) -> list[Finding]:
    if not names:
        return []
    are_left_out = f"{count(len(names), 'tensor')} {'is' if len(names) == 1 else 'are'} left out"
    what = f"{are_left_out}: the file holds only the diffusion model"
    return [Finding(what, names[0], fix="load the VAE and the text encoders from the input file, or from files of their own")]


def _unsaid(metadata: Mapping[str, str]) -> list[Finding]:
    """Metadata of the input that ComfyUI builds a model from. ComfyUI-GGUF passes on only the tensors."""
    keys = [key for key in BUILDING_KEYS if key in metadata]
    if not keys:
        return []
    what = f"the input's metadata has settings of the model ({', '.join(keys)}), which ComfyUI-GGUF does not pass on to ComfyUI"
    return [
        Finding(
            what, fix="choose another format, such as comfyui-fp8, if the model needs other settings than ComfyUI's defaults"
        )
    ]


def _fallen_back(mixture: Mixture, steps: Sequence[Step]) -> list[Finding]:
    """Matrices whose rows have no whole blocks of the format's types."""
    block = TYPES[mixture.default].block
    outs = [out for step in steps for out in step.stored if len(out.shape) == 2 and out.dtype.name == "F16"]
    fallen = [out for out in outs if out.shape[-1] % block]
    if not fallen:
        return []
    widths = ", ".join(f"{width:,}" for width in sorted({out.shape[-1] for out in fallen})[:4])
    matrices = "1 matrix is" if len(fallen) == 1 else f"{len(fallen):,} matrices are"
    what = f"{matrices} stored as F16: {widths} columns are no multiple of {block}"
    fix = "choose a format whose blocks are shorter, such as gguf-q8_0, or use the larger file as it is"
    if block == TYPES["Q8_0"].block:
        fix = "use the file as it is: it is larger"
    return [Finding(what, fallen[0].name, fix=fix)]
