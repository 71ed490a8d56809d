"""Adapters of other programs, read as those of PEFT: MLX's folders, and llama.cpp's GGUF files.

mlx-lm and mlx-vlm write a folder with adapters.safetensors and adapter_config.json:

X.lora_a  [inputs, rank]   of a linear layer: PEFT's A, transposed; of an embedding [tokens, rank]
X.lora_b  [rank, outputs]  PEFT's B, transposed
X.m       [outputs]        DoRA's norms of the rows
lora_a    [experts, rank, inputs], or [experts · rank, inputs], of the experts of a layer, and lora_b [experts, outputs, rank]:
          PEFT's A and B of each expert, not transposed

The update is `scale` · (lora_a @ lora_b)ᵀ: `scale` takes the place of alpha / r. All modules have the same scale and rank.
Factors of an embedding that is also the head change both.

mlx-lm names experts after the class that computes them, which is `switch_mlp` in most models; on the Hub, each expert has a
matrix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported, WeightsmithError
from weightsmith._base.files import exists, show
from weightsmith._base.tensors import MAX_STACKED, TensorSpec
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.lora.adapter import CONFIG_NAME, PREFIX, Adapter, sort_tensors
from weightsmith._models.sources.composed import PartTensors, TensorPart
from weightsmith._models.structure.configs import finite_number, whole_number
from weightsmith._models.structure.projections import MIXTRAL
from weightsmith._models.structure.vocabulary import names_embedding

MLX_NAME = "adapters.safetensors"

_REPAIR = "Repair it, or download the adapter again."
_FUSE = "fuse it with the program that trained it (mlx_lm.fuse), and use that model"
_PART = re.compile(r"(.+)\.(lora_a|lora_b|m)")
_EXPERTS = re.compile(r"(.+\.)(switch_mlp|experts\.switch_glu|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)")
_UNGATED = {"fc1": "up_proj", "fc2": "down_proj"}
"""Projections of experts without a gate → their names on the Hub."""
_PARAMETERS = frozenset({"rank", "scale", "dropout", "keys"})
_NORMS = ".lora_magnitude_vector"
_SHOWN = 8
_MAX_PARTS = 1 << 19
"""Factors of single experts: a model of 60 layers with 512 experts has 184,320, and a file of a few MB may claim any number."""


def is_mlx(path: Path) -> bool:
    """Whether a file has a name of mlx-lm, which also saves `0000100_adapters.safetensors`, and a config beside it."""
    return path.name.endswith(MLX_NAME) and exists(path.parent / CONFIG_NAME)


def is_of_mlx(adapter: Adapter) -> bool:
    """Whether MLX has named an adapter's modules."""
    return any(map(is_mlx, adapter.checkpoint.paths))


def sort_mlx(stored: Checkpoint, config: Mapping[str, Any], where: str) -> Adapter:
    """The adapter in a file of mlx-lm. stored: the file's tensors; config: its adapter_config.json; where: the config's path.

    Raises FormatError for values and shapes that do not fit, Unsupported for what is no B @ A, or whose scale is not known.
    """
    settings = _settings(config, where)
    problems, parts, embeddings = list[str](), dict[str, TensorPart](), False
    for module, specs in _modules(stored).items():
        of_embedding = names_embedding(f"{module}.weight")
        if problem := _problem(module, specs, settings, embedding=of_embedding):
            problems.append(problem)
        elif len(specs["lora_b"].shape) == 3:
            parts |= dict(_of_experts(module, specs))
            if len(parts) > _MAX_PARTS:
                raise FormatError(f"more than {_MAX_PARTS:,} factors of experts", where=str(stored.paths[0]), fix=_REPAIR)
        else:
            embeddings |= of_embedding
            parts |= dict(_of_module(module, specs, embedding=of_embedding))
    if problems:
        shown = [*problems[:_SHOWN], *([f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])]
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        raise FormatError(what, where=str(stored.paths[0]), details=shown, fix=_REPAIR)
    model = config.get("model")
    as_peft: dict[str, Any] = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.scale * settings.rank}
    as_peft |= {"use_dora": any(name.endswith(_NORMS) for name in parts)}
    as_peft |= {"base_model_name_or_path": model} if isinstance(model, str) else {}
    source = PartTensors(stored.source, parts, stored.ref)
    folder = ModelFolder.like(stored, config=as_peft)
    checkpoint = Checkpoint(stored.ref, source, folder, metadata=stored.metadata, notes=stored.notes)
    return replace(sort_tensors(checkpoint, as_peft), as_one=embeddings)


# ---- adapter_config.json


@dataclass(frozen=True, slots=True)
class _MlxSettings:
    """What the config says. dora: whether there are norms of rows; None if it does not say"""

    scale: float
    rank: int
    dora: bool | None


def _settings(config: Mapping[str, Any], where: str) -> _MlxSettings:
    """Raises FormatError and Unsupported."""
    kind, parameters = config.get("fine_tune_type"), config.get("lora_parameters")
    if kind == "full":
        what = "a full fine-tune of MLX: whole weights of some layers, which MLX stores otherwise than the Hub"
        raise Unsupported(what, where=where, fix=_FUSE)
    if kind not in (None, "lora", "dora"):
        raise Unsupported(f"fine_tune_type is {show(kind)}, neither lora nor dora", where=where, fix=_FUSE)
    if not isinstance(parameters, Mapping):
        if parameters is None and "rank" in config:
            what = "an adapter of mlx-vlm before it had lora_parameters: its versions differ in the scale of the factors"
            raise Unsupported(what, where=where, fix=_FUSE)
        raise FormatError(f"lora_parameters is {show(parameters)}, not an object", where=where, fix=_REPAIR)
    if parameters.get("alpha") is not None:
        what = "lora_parameters has alpha: mlx-lm before 0.21 multiplies scale with alpha / rank, and later versions ignore it"
        fix = "remove alpha from adapter_config.json; if mlx-lm was that old, multiply scale with alpha / rank first"
        raise Unsupported(what, where=where, fix=fix)
    if unknown := [f"{show(key)}: {show(value)}" for key, value in parameters.items() if value and key not in _PARAMETERS]:
        what = "keys of lora_parameters that weightsmith does not know may change what the factors mean"
        raise Unsupported(what, where=where, details=unknown[:_SHOWN], fix=f"{_FUSE}; or remove those that change no weights")
    rank, scale = whole_number(parameters.get("rank")), finite_number(parameters.get("scale"))
    if rank is None or not 0 < rank < 2**31:
        what = f"rank is {show(parameters.get('rank'))}; a rank must be a positive integer"
        raise FormatError(what, where=where, fix=_REPAIR)
    if scale is None:
        raise FormatError(f"scale is {show(parameters.get('scale'))}, not a finite number", where=where, fix=_REPAIR)
    return _MlxSettings(float(scale), rank, None if kind is None else kind == "dora")


# ---- tensors


def _modules(stored: Checkpoint) -> dict[str, dict[str, TensorSpec]]:
    """Module → its lora_a, lora_b and m. Raises Unsupported for other tensors."""
    modules: dict[str, dict[str, TensorSpec]] = {}
    strange = list[str]()
    for name, spec in stored.specs.items():
        if match := _PART.fullmatch(name):
            modules.setdefault(match[1], {})[match[2]] = spec
        else:
            strange.append(name)
    if strange:
        what = f"{count(len(strange), 'tensor')} of it are neither factors nor norms, and would be lost"
        raise Unsupported(what, where=str(stored.paths[0]), details=[show(name) for name in strange[:_SHOWN]], fix=_FUSE)
    return modules


def _problem(module: str, specs: Mapping[str, TensorSpec], settings: _MlxSettings, *, embedding: bool) -> str:
    """What is wrong with the tensors of a module; "". Raises Unsupported for norms that are not applied."""
    if missing := [part for part in ("lora_a", "lora_b") if part not in specs]:
        return f"{module} has no {' and no '.join(missing)}"
    a, b, norms = specs["lora_a"], specs["lora_b"], specs.get("m")
    shapes = f"{module}: lora_a {list(a.shape)} and lora_b {list(b.shape)}"
    if not all(spec.dtype.floating for spec in specs.values()):
        return f"{shapes} are {a.dtype} and {b.dtype}, no floating numbers"
    if settings.dora is not None and settings.dora != (norms is not None):
        has, kind = "no norms" if norms is None else "norms", "dora" if settings.dora else "lora"
        return f"{module} has {has}, and fine_tune_type is {kind}"
    if len(b.shape) == 3:
        experts, _, rank = b.shape
        flat = (experts * rank, a.shape[-1]) if a.shape else ()
        if a.shape not in ((experts, rank, a.shape[-1] if a.shape else 0), flat) or rank != settings.rank or norms is not None:
            return f"{shapes} are no factors of experts of rank {settings.rank}"
        if not 0 < experts <= MAX_STACKED or 0 in a.shape or 0 in b.shape:
            return f"{shapes} are of {experts:,} experts, and 1 to {MAX_STACKED:,} are read"
        return "" if _EXPERTS.fullmatch(module) else f"{shapes} are of experts, and where {module} has these is not known"
    if not len(a.shape) == len(b.shape) == 2 or {a.shape[1], b.shape[0]} != {settings.rank} or 0 in (*a.shape, *b.shape):
        return f"{shapes} are no factors of rank {settings.rank}"
    if norms is not None and embedding:
        raise Unsupported(f"DoRA of an embedding is not applied: {module}", where=norms.name, fix=_FUSE)
    return (
        "" if norms is None or norms.shape == b.shape[1:] else f"{norms} has not one number for each of {b.shape[1]:,} outputs"
    )


def _of_module(module: str, specs: Mapping[str, TensorSpec], *, embedding: bool) -> Iterator[tuple[str, TensorPart]]:
    """PEFT's names of the tensors of a module, and where they are."""
    for part, stored in (("A", "lora_a"), ("B", "lora_b")):
        ending = f"lora_embedding_{part}" if embedding else f"lora_{part}.weight"
        yield f"{PREFIX}{module}.{ending}", TensorPart(specs[stored].name, specs[stored].shape, transposed=True)
    if "m" in specs:
        yield f"{PREFIX}{module}{_NORMS}", TensorPart(specs["m"].name, specs["m"].shape)


def _of_experts(module: str, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, TensorPart]]:
    """PEFT's names of the factors of each expert, and where they are."""
    match = _EXPERTS.fullmatch(module)
    assert match is not None  # `_problem` has looked
    projection = _UNGATED.get(match[3], match[3])
    if match[1].endswith("block_sparse_moe."):
        projection = MIXTRAL.get(projection, projection)
    a, b = specs["lora_a"], specs["lora_b"]
    experts, outputs, rank = b.shape
    for expert in range(experts):
        name = f"{PREFIX}{match[1]}experts.{expert}.{projection}"
        inputs = a.shape[-1]
        yield f"{name}.lora_A.weight", TensorPart(a.name, (rank, inputs), ((expert * rank * inputs, rank * inputs),))
        yield f"{name}.lora_B.weight", TensorPart(b.name, (outputs, rank), ((expert * outputs * rank, outputs * rank),))


# ---- GGUF files, as llama.cpp has them


SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file: by the end of its name, or as one of Ollama's blobs. Looks only at names."""
    if path.name.lower().endswith(SUFFIX):
        return True
    if not path.name.startswith("sha256-"):
        return False
    from weightsmith._models.formats.gguf.ollama import is_blob

    return is_blob(path)


def is_gguf_adapter(path: Path) -> bool:
    """Whether a file is a GGUF file of an adapter. False for one that cannot be read: opening it says why."""
    if not is_gguf(path):
        return False
    from weightsmith._models.formats.gguf.header import is_adapter_header

    try:
        return is_adapter_header(path)
    except (OSError, WeightsmithError):
        return False


def in_hub_order(adapter: Adapter, config: Mapping[str, Any] | None) -> Adapter:
    """The adapter with the rows of q and k in the Hub's order. Raises as `adapter_file.in_hub_order`."""
    if adapter.heads is None and not adapter.turned:
        return adapter
    from weightsmith._models.formats.gguf import adapter_file

    return adapter_file.in_hub_order(adapter, config)
