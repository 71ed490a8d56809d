"""Writes adapters for mlx-lm, in the form of `_models/lora/mlx_and_gguf`, and renames those of mlx-lm for PEFT.

All modules have one rank and one scale there: smaller ranks are filled with zeros, and other scalings are multiplied into B.
`keys` lists the modules in full, so mlx-lm gives factors to no others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._base.options import option_error
from weightsmith._base.tensors import TensorSpec
from weightsmith._features.adapters.built import WEIGHT, built_of, unchecked
from weightsmith._features.adapters.options import ConvertSettings
from weightsmith._features.adapters.steps import PLAIN_DTYPES, factor_step, stored_dtype, transposed
from weightsmith._files.containers import MLX_ADAPTER
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.formats.mlx import STACK
from weightsmith._models.lora import Adapter
from weightsmith._models.lora.adapter import Factors
from weightsmith._models.lora.mlx_and_gguf import is_of_mlx
from weightsmith._models.structure.projections import UNMIXTRAL
from weightsmith._models.structure.vocabulary import is_head, ties, vocabulary_modules
from weightsmith._plans import JOIN, PlanDraft, Read, Step

_BY_BASE = re.compile(r".+\.(kv_b_proj|shared_mlp\.(?:input|output)_linear|feed_forward\.w[123])")
"""Modules that MLX stores differently in some models."""
_PLAIN_MLA = ("deepseek_v2", "minicpm3", "youtu_llm")
"""Models whose `kv_b_proj` is one matrix in MLX. In others it is two, in another order."""
_EXPERT = re.compile(r"(.+\.)experts\.(\d+)\.(\w+)")
_MLX_NAMES = re.compile(
    r"model\.(?:h\.\d+\..+|embed_in|embed_out)|.+\.feed_forward\.(?:experts\.\d+\.)?(?:gate|up|down)_proj|language_model\.model\..+"
)
"""Modules that transformers names differently, at least in some models."""
_GPT_NEOX = re.compile(r"^gpt_neox\.(layers\.)?")
_IN_BOTH = ("gemma3n", "muse_spark")
"""Models whose decoder has the same place in mlx-lm as in transformers, `model.language_model`."""
_TEXT = ("model.language_model.", "language_model.model.")
"""The decoder of other models for images: in transformers, and in MLX."""
_ROUNDED = 1e-9
"""Scales that differ by less, relatively, are one."""


@dataclass(frozen=True, slots=True)
class _MlxDraft:
    """Fills the draft.

    rank, scale  of all modules
    """

    adapter: Adapter
    settings: ConvertSettings
    draft: PlanDraft
    rank: int
    scale: float

    def put_module(self, module: str) -> None:
        """The steps of a module: A and B, transposed, and norms of DoRA."""
        for step, ending in zip(self._steps(module), ("lora_a", "lora_b"), strict=True):
            self.draft.steps.append(transposed(step, f"{module}.{ending}", stored_dtype(step.out, self.settings)))
        if norms := self.adapter.updates[module].magnitude:
            spec = self.adapter.checkpoint.specs[norms]
            out = TensorSpec(f"{module}.m", stored_dtype(spec, self.settings), (spec.size,))
            self.draft.steps.append(Step.copy(out, Read(0, norms), spec.dtype))

    def put_experts(self, module: str, experts: Mapping[int, str]) -> None:
        """The steps of the experts of a layer, as two tensors."""
        pairs = [self._steps(experts[number]) for number in range(len(experts))]
        for ending, pieces in zip(("lora_a", "lora_b"), zip(*pairs, strict=True), strict=True):
            dtype = stored_dtype(pieces[0].out, self.settings)
            whole = TensorSpec(f"{module}.{ending}", dtype, (len(pieces), *pieces[0].out.shape))
            self.draft.steps.append(Step(whole, JOIN, (), pieces=tuple(piece.cast(dtype) for piece in pieces)))

    def _steps(self, module: str) -> tuple[Step, Step]:
        """The steps of A and B, as PEFT has them: with the rank and the scale of all modules."""
        factors, specs = self.adapter.updates[module], self.adapter.checkpoint.specs
        a, b = specs[factors.a], specs[factors.b]
        ratio = factors.scaling / self.scale
        ratio = 1.0 if abs(ratio - 1) <= _ROUNDED else ratio
        order = None
        if a.shape[0] < self.rank:
            order = np.full(self.rank, -1)
            order[: a.shape[0]] = np.arange(a.shape[0])
        steps = []
        for spec, name, factor, axis in ((a, f"{module}.lora_a", 1.0, 0), (b, f"{module}.lora_b", ratio, 1)):
            step = factor_step(self.draft, name, spec, factor, order, axis)
            shape = (self.rank, spec.shape[1]) if axis == 0 else (spec.shape[0], self.rank)
            steps.append(replace(step, out=replace(step.out, shape=shape)))
        return steps[0], steps[1]


def fill_mlx(adapter: Adapter, settings: ConvertSettings, base: Checkpoint | None, draft: PlanDraft, base_name: str) -> None:
    """The draft of a folder that mlx-lm loads. Raises Unsupported for what it cannot hold."""
    where, specs = adapter.checkpoint.ref, adapter.checkpoint.specs
    merged = f"merge it into its base: weightsmith quantize BASE+{where} OUT --format mlx-4bit"
    if settings.out_dtype is not None and settings.out_dtype.name not in PLAIN_DTYPES:
        raise option_error("out_dtype", f"mlx-lm reads no {settings.out_dtype.torch}", "choose float32, float16 or bfloat16")
    if adapter.file is not None:
        what = "its names are those of a single file, and MLX's are names of modules in the model"
        raise Unsupported(what, where=where, fix=merged)
    if adapter.turned:
        what = "its rows of q and k are in llama.cpp's order"
        raise Unsupported(
            what, where=where, fix=f"convert it first: weightsmith convert-lora {where} OUT --for peft --base BASE"
        )
    if kernel := next((module for module, factors in adapter.updates.items() if len(specs[factors.a].shape) > 2), ""):
        raise Unsupported(f"factors of a convolution, which mlx-lm does not have: {kernel}", where=where, fix=merged)
    if adapter.transposed:
        raise Unsupported("its weights are stored [inputs, outputs] (fan_in_fan_out)", where=where, fix=merged)
    if normed := next((module for module, factors in adapter.updates.items() if factors.columns), ""):
        raise Unsupported(f"DoRA of an embedding, with norms of its columns: {normed}", where=where, fix=merged)
    adapter = _with_one_vocabulary(adapter, base, merged)
    adapter = _renamed(adapter, {} if base is None else base.config or {}, merged)
    modules, experts = _experts(adapter, merged)
    dora = any(factors.magnitude for factors in adapter.updates.values())
    if dora and experts:
        raise Unsupported("it is DoRA of experts, which mlx-lm does not have", where=where, fix=merged)
    rank = max(specs[factors.b].shape[1] for factors in adapter.updates.values())
    scale = next((scale for scale, _ in _scales(adapter) if scale), 1.0)
    filling = _MlxDraft(adapter, settings, draft, rank, scale)
    for module in modules:
        filling.put_module(module)
    for module, of_module in experts.items():
        filling.put_experts(module, of_module)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": [*modules, *experts]}
    kind = "dora" if dora else "lora"
    draft.config = {"model": base_name, "fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}
    draft.container = MLX_ADAPTER


def _scales(adapter: Adapter) -> list[tuple[float, int]]:
    return Counter(factors.scaling for factors in adapter.updates.values()).most_common()


def follows_base(adapter: Adapter) -> bool:
    """Whether the base decides how MLX names an adapter's modules, or whether they train one tensor or two."""
    by_base = (_BY_BASE.fullmatch(module) or module.startswith(_TEXT[0]) for module in adapter.updates)
    return any(vocabulary_modules(adapter.updates)) or any(by_base)


def _with_one_vocabulary(adapter: Adapter, base: Checkpoint | None, merged: str) -> Adapter:
    """The adapter without factors of a head that is the embedding. Raises Unsupported if only one of the two was trained.

    mlx-lm has one module for both, whose factors change both.
    """
    where = adapter.checkpoint.ref
    embeddings, heads = vocabulary_modules(adapter.updates)
    if not embeddings and not heads:
        return adapter
    assert base is not None  # the caller has asked `follows_base`
    if not ties(base.config, stores_head=any(map(is_head, base.specs.values()))):
        return adapter
    if not adapter.as_one or not embeddings:
        what = (
            f"factors of {(embeddings or heads)[0]} alone, where the base ties embedding and head: mlx-lm changes both at once"
        )
        raise Unsupported(what, where=where, fix=merged)
    kept = {module: factors for module, factors in adapter.updates.items() if module not in heads}
    return replace(adapter, updates=kept)


def _renamed(adapter: Adapter, config: Mapping[str, Any], merged: str) -> Adapter:
    """The adapter with the names of MLX's modules. config: the base's. Raises Unsupported for modules that MLX splits."""
    model_type, updates = config.get("model_type"), dict[str, Factors]()
    for module, factors in adapter.updates.items():
        match, name = _BY_BASE.fullmatch(module), _GPT_NEOX.sub(_in_gpt_neox, module)
        if match and match[1].startswith("feed_forward"):
            head, _, last = module.rpartition(".")
            name = f"{head}.{UNMIXTRAL[last]}" if model_type == "lfm2_moe" else module
        elif match and not (model_type in _PLAIN_MLA if match[1] == "kv_b_proj" else config.get("num_local_experts")):
            raise Unsupported(f"mlx-lm has no module {module}: it splits the matrix", where=adapter.checkpoint.ref, fix=merged)
        elif module == "embed_out" and model_type == "gpt_neox":
            name = f"model.{module}"
        if model_type not in _IN_BOTH and name.startswith(_TEXT[0]):
            name = _TEXT[1] + name.removeprefix(_TEXT[0])
        elif model_type not in _IN_BOTH and name == "lm_head" and "text_config" in config:
            name = f"language_model.{name}"
        updates[name] = factors
    return replace(adapter, updates=updates)


def _in_gpt_neox(match: re.Match[str]) -> str:
    return "model.h." if match[1] else "model."


def _experts(adapter: Adapter, merged: str) -> tuple[list[str], dict[str, dict[int, str]]]:
    """The modules outside experts; and MLX's module of experts → number of an expert → its module. Raises Unsupported."""
    modules, experts = list[str](), dict[str, dict[int, str]]()
    for module in adapter.updates:
        if match := _EXPERT.fullmatch(module):
            name = f"{match[1]}{STACK}.{UNMIXTRAL.get(match[3], match[3])}"
            experts.setdefault(name, {})[int(match[2])] = module
        else:
            modules.append(module)
    for name, of_module in experts.items():
        if sorted(of_module) != list(range(len(of_module))):
            what = f"factors of some experts of {name}, and mlx-lm has those of all in one tensor"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix=merged)
    return modules, experts


# ---- adapters of MLX for PEFT


def has_mlx_names(adapter: Adapter) -> bool:
    """Whether an adapter is MLX's, with modules that transformers may name otherwise."""
    return is_of_mlx(adapter) and any(map(_MLX_NAMES.fullmatch, adapter.updates))


def in_transformers_names(adapter: Adapter, base: Checkpoint, places: Mapping[str, str]) -> Adapter:
    """An adapter of MLX with the names of the modules that transformers builds of its base, which PEFT looks for.

    places: module → tensor of the base. Matrices that transformers fuses get the names that the base has on disk,
    and so do all where transformers is missing or does not know the model: a warning says so.

    Raises Unsupported for experts of a model in which PEFT finds none of these names.
    """
    built, updates, where = built_of(base), dict[str, Factors](), adapter.checkpoint.ref
    for module, factors in adapter.updates.items():
        stored = places.get(module, f"{module}{WEIGHT}")
        key = built.key(stored)
        if built.fused(key) and stored.removesuffix(WEIGHT).rpartition(".")[2] not in built.experts:
            what = f"PEFT would ignore factors of single experts, which transformers joins in {key}: {module}"
            raise Unsupported(
                what, where=where, fix=f"make factors of the whole: weightsmith extract-lora BASE+{where} BASE OUT"
            )
        name = key if key.endswith(WEIGHT) and key not in built.operations else stored
        updates[name.removesuffix(WEIGHT)] = factors
    if built.unknown:
        adapter.checkpoint.notes = (*adapter.checkpoint.notes, unchecked(built.unknown))
    return replace(adapter, updates=updates)
