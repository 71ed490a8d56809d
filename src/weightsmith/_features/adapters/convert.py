"""`weightsmith convert-lora`: an adapter as another program reads it.

Factors are copied, cast at most. A scaling that the other form cannot hold is multiplied into B, in float32.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from weightsmith._base.errors import (
    Finding,
    MismatchError,
    PlanError,
    Unsupported,
    WeightsmithError,
    as_plan_error,
    noting,
)
from weightsmith._base.options import named, option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.adapters.built import WEIGHT, BuiltModel
from weightsmith._features.adapters.factors import FactorTarget, Form
from weightsmith._features.adapters.mlx import fill_mlx, follows_base, has_mlx_names, in_transformers_names
from weightsmith._features.adapters.options import ConvertSettings
from weightsmith._features.adapters.placing import AdapterPlaces, norms_name, whole_name
from weightsmith._features.adapters.renaming import DIFFUSERS, FLUX_T5, RenamedModule, renamed
from weightsmith._features.adapters.steps import PLAIN_DTYPES, factor_step, stored_dtype, transposed
from weightsmith._files.containers import DIFFUSERS_LORA, GGUF_ADAPTER, PEFT, Naming
from weightsmith._files.containers import KOHYA as KOHYA_FILE
from weightsmith._files.copied import adapter_metadata
from weightsmith._files.hf_folder import hub_id_of
from weightsmith._models.checkpoint import Checkpoint, HubModel, locate
from weightsmith._models.formats.gguf.about import origin_keys
from weightsmith._models.formats.gguf.adapter_file import A_ENDING, B_ENDING, EMBEDDING, adapter_keys, check_heads
from weightsmith._models.formats.gguf.architectures import architecture_of_config, text_config
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.base.tensors import SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.cuts import CutEncoding, pieces_of
from weightsmith._models.formats.gguf.layout import encode_metadata
from weightsmith._models.formats.gguf.writing import GgufEncoding, Multiplied, from_llama_order
from weightsmith._models.lora import Adapter, find_places, open_adapter
from weightsmith._models.lora.adapter import ExpertParameter, Factors, Stacked
from weightsmith._models.lora.apply import find_experts, find_shapes
from weightsmith._models.lora.config import tied_targets
from weightsmith._models.lora.exact import as_lora, needs_base
from weightsmith._models.lora.experts import ExpertPlace, StackedPlaces
from weightsmith._models.lora.forms import ALPHA, PAIRS, FactorNames, as_matrix
from weightsmith._models.structure import analyse
from weightsmith._models.structure.projections import GATED
from weightsmith._models.structure.vocabulary import is_head, names_head, ties
from weightsmith._planning.planner.inputs import asking, open_models
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import COPY, FILL, JOIN, Block, Gather, PlanDraft, Provenance, Read, Settings, Step, Table
from weightsmith._version import __version__
from weightsmith.abc.stored import ModelOrigin

COMMAND = "convert-lora"
LLAMA_CPP, MLX = "llama.cpp", "mlx"

_SINGLE = {
    "kohya": (KOHYA_FILE, PAIRS[4]),
    "diffusers": (DIFFUSERS_LORA, PAIRS[0]),
    "comfyui": (DIFFUSERS_LORA, PAIRS[0]),
}
"""Program → the container, and how it names factors."""
_BASE_LAYER = ".base_layer."
_ROUNDED = 1e-6
"""Alphas that differ by less, relatively, are one: llama.cpp's is float32."""


def prepare_conversion(adapter: str | os.PathLike[str], settings: ConvertSettings) -> Prepared:
    """Plan the conversion of an adapter: a folder, a file of factors, or a Hub id.

    Raises PlanError with all problems: what is no adapter, and what the other program does not read.
    """
    refs = [parse_reference(os.fspath(adapter), "ADAPTER")]
    if settings.base is not None:
        refs.append(parse_reference(os.fspath(settings.base), named("base")))
    if problems := [ref for ref in refs if not isinstance(ref, ModelRef)]:
        raise PlanError(problems)
    known = [ref for ref in refs if isinstance(ref, ModelRef)]
    if known[0].lora is not None:
        what, fix = "this is a model with an adapter", f"name the adapter alone: {known[0].lora}"
        raise PlanError([Unsupported(what, where=f"ADAPTER: {known[0]}", fix=fix)])
    with ExitStack() as stack, as_plan_error():
        opened = open_adapter(known[0].path, revision=known[0].revision or None)
        stack.callback(opened.checkpoint.close)
        base_ref = known[1] if len(known) > 1 else _named_base(opened)
        needed = settings.layout == LLAMA_CPP or bool(opened.turned) or settings.base is not None or needs_base(opened)
        needed |= settings.layout == MLX and follows_base(opened)
        needed |= settings.layout == PEFT and has_mlx_names(opened)
        with ExitStack() as bases:
            base = _open_base(base_ref, bases) if needed else None
            if base is not None:
                check_heads(opened, base.config)
            shapes = asking(base, partial(find_shapes, base, opened)) if base is not None and needs_base(opened) else {}
            with suppress(Unsupported):  # `_check` says what to do
                opened = as_lora(opened, shapes)
            opened = _without_copies(opened, base)
            _check(opened, settings)
            draft = _draft(opened, settings, base, base_ref)
        draft.recipe = _command(str(adapter), settings)
        stack.pop_all()
        return Prepared(draft, (opened.checkpoint,), analyse((), None)).finish()


def _check(adapter: Adapter, settings: ConvertSettings) -> None:
    """Raise Unsupported for what factors alone cannot hold, or the other program does not read."""
    where, merged = adapter.checkpoint.ref, f"weightsmith dequantize BASE+{adapter.checkpoint.ref} OUT"
    if settings.layout == LLAMA_CPP:
        merged = f"weightsmith quantize BASE+{adapter.checkpoint.ref} OUT --format gguf-q8_0"
    extracted = f"weightsmith extract-lora BASE+{adapter.checkpoint.ref} BASE OUT"
    if adapter.others:
        what = f"it is {adapter.title}: only factors of LoRA are converted"
        raise Unsupported(what, where=where, fix=f"make a LoRA of it first: {extracted}; or merge it: {merged}")
    normed = [module for module, factors in adapter.updates.items() if factors.magnitude]
    if normed and settings.layout not in (PEFT, MLX):
        what = f"it is DoRA, and {settings.layout} has no norms of rows: {normed[0]}"
        raise Unsupported(what, where=where, fix=f"make a LoRA of it first: {extracted}; or merge it: {merged}")
    if other := next((module for module in adapter.updates if normed and module not in normed), ""):
        what = f"{normed[0]} is DoRA and {other} is LoRA, and {settings.layout} has one kind for all"
        raise Unsupported(what, where=where, fix=f"merge it: {merged}")
    if adapter.replacements:
        names = [*adapter.replacements][:3]
        what = f"it saves {len(adapter.replacements):,} tensors whole, and a LoRA of {settings.layout} has factors alone"
        raise Unsupported(what, where=where, details=names, fix=f"merge it: {merged}")
    if adapter.stacked and settings.layout != LLAMA_CPP:
        what = f"factors of all experts of a parameter: {next(iter(adapter.stacked))}"
        raise Unsupported(what, where=where, fix=f"merge it: {merged}")
    if not adapter.updates and not adapter.stacked:
        raise MismatchError("the adapter has no factors", where=where, fix="name another adapter")


def _without_copies(adapter: Adapter, base: Checkpoint | None) -> Adapter:
    """The adapter without the embedding and head of its base, which PEFT saves beside their factors. A note says so.

    Those of another size hold tokens that were added: they stay.
    """
    if base is None:
        return adapter
    specs = adapter.checkpoint.specs
    copies = {
        name: stored
        for name, stored in adapter.replacements.items()
        if _BASE_LAYER in stored and name in base.specs and base.specs[name].shape == specs[stored].shape
    }
    if not copies:
        return adapter
    what = f"the base's own weights beside factors are left out: {', '.join(copies)}"
    adapter.checkpoint.notes = (*adapter.checkpoint.notes, Finding(what, adapter.checkpoint.ref))
    kept = {name: stored for name, stored in adapter.replacements.items() if name not in copies}
    return replace(adapter, replacements=kept)


def _named_base(adapter: Adapter) -> ModelRef | None:
    """The base that the adapter names, if it is there."""
    name = (adapter.checkpoint.config or {}).get("base_model_name_or_path")
    ref = parse_reference(name, "base_model_name_or_path") if isinstance(name, str) and name else None
    return ref if isinstance(ref, ModelRef) else None


def _open_base(ref: ModelRef | None, stack: ExitStack) -> Checkpoint:
    fix = f"name the model that the adapter was trained on: {named('base')}"
    if ref is None:
        raise option_error("base", "names, shapes and the order of rows depend on the base, and the adapter names none", fix)
    (opened,), problems = open_models([ref], stack)
    if problems:
        raise PlanError([*problems, option_error("base", f"the base {ref} is needed", fix)])
    assert opened is not None
    return opened


def _draft(adapter: Adapter, settings: ConvertSettings, base: Checkpoint | None, base_ref: ModelRef | None) -> PlanDraft:
    title = f"Converted for {settings.layout} with weightsmith {__version__}."
    draft = PlanDraft(
        Provenance(COMMAND, title, relation="adapter"), models=[model_input(adapter.checkpoint)], settings=[Settings({}, ())]
    )
    places: Mapping[str, str] = {}
    if base is not None:
        places = asking(base, partial(find_places, base, adapter))
    if settings.layout == LLAMA_CPP:
        assert base is not None
        stacked = asking(base, partial(find_experts, base, adapter)) if adapter.stacked else StackedPlaces([])
        _GgufAdapterDraft(adapter, settings, base, places, stacked, draft).fill(_base_name(base_ref))
    elif settings.layout == MLX:
        fill_mlx(adapter, settings, base, draft, _base_name(base_ref))
    elif settings.layout in _SINGLE:
        _fill_single(adapter, settings, draft)
    else:
        if base is not None and has_mlx_names(adapter):
            adapter = in_transformers_names(adapter, base, places)
        _fill_peft(adapter, settings, base, draft, _base_name(base_ref))
    draft.warnings += adapter.checkpoint.notes
    draft.follows_recipe = False
    return draft


def _base_name(ref: ModelRef | None) -> str:
    """The base as configs name it."""
    return "" if ref is None else hub_id_of(ref.path) or ref.path


def _command(adapter: str, settings: ConvertSettings) -> str:
    """The settings, for the card."""
    chosen = {"adapter": adapter, "for": settings.layout}
    chosen |= {"base": str(settings.base)} if settings.base is not None else {}
    return yaml.safe_dump({COMMAND: chosen}, sort_keys=False, allow_unicode=True)


# ---- PEFT's folders


def _fill_peft(adapter: Adapter, settings: ConvertSettings, base: Checkpoint | None, draft: PlanDraft, base_name: str) -> None:
    """The draft of a folder that PEFT loads."""
    specs, stated = adapter.checkpoint.specs, adapter.checkpoint.config or {}
    if adapter.file is not None:
        what = "its names are those of a single file, and PEFT's are names of modules in the model"
        fix = f"merge it into its base: weightsmith dequantize BASE+{adapter.checkpoint.ref} OUT"
        raise Unsupported(what, where=adapter.checkpoint.ref, fix=fix)
    forms: dict[str, Form] = {
        module: "embedding" if factors.embedding else "linear" for module, factors in adapter.updates.items()
    }
    ranks = {module: specs[factors.b].shape[1] for module, factors in adapter.updates.items()}
    tensors = {f"{module}{WEIGHT}": () for module in forms}
    places = AdapterPlaces(BuiltModel.of_names(forms, tensors))
    for module, form in forms.items():
        places.modules[module] = FactorTarget(module, form, ranks[module], exact=True)
    for module, factors in adapter.updates.items():
        for part, name in zip("AB", places.factors(module), strict=True):
            spec = specs[factors.a if part == "A" else factors.b]
            view = None
            if spec.name in adapter.turned:
                assert base is not None
                view = _hub_rows(spec.shape[0], _heads(base)[adapter.turned[spec.name]], spec.name)
            draft.steps.append(factor_step(draft, name, spec, 1, view).cast(stored_dtype(spec, settings)))
        if factors.magnitude:
            spec = specs[factors.magnitude]
            draft.steps.append(factor_step(draft, norms_name(module), spec, 1).cast(stored_dtype(spec, settings)))
    config = places.config(
        base_name,
        "",
        ranks,
        sorted(forms),
        transposed=adapter.transposed,
        causal=stated.get("task_type", "CAUSAL_LM") == "CAUSAL_LM",
        dora=any(factors.magnitude for factors in adapter.updates.values()),
    )
    if adapter.as_one:
        config |= {"ensure_weight_tying": True, "target_modules": tied_targets(config["target_modules"])}
    alphas = {module: factors.scaling * ranks[module] for module, factors in adapter.updates.items()}
    usual = Counter(alphas.values()).most_common(1)[0][0]
    config["lora_alpha"] = usual
    config["alpha_pattern"] = {whole_name(module): alpha for module, alpha in alphas.items() if alpha != usual}
    draft.config, draft.container = config, PEFT


# ---- single files of kohya's scripts, diffusers and ComfyUI


def _fill_single(adapter: Adapter, settings: ConvertSettings, draft: PlanDraft) -> None:
    """The draft of a single file. Raises Unsupported for names that are not known."""
    specs, where = adapter.checkpoint.specs, adapter.checkpoint.ref
    if adapter.file is None:
        what = f"an adapter of a language model, or in PEFT's format, which {settings.layout} does not name"
        raise Unsupported(what, where=where, fix="write --for peft or --for llama.cpp")
    shapes = {}
    for name, factors in adapter.updates.items():
        shapes[name] = specs[factors.b].shape[0], as_matrix(specs[factors.a].shape)[1]
    container, names = _SINGLE[settings.layout]
    modules = renamed(shapes, settings.layout, where, flat=adapter.file.flat)
    if settings.layout == DIFFUSERS and any(module.name.startswith(FLUX_T5) for module in modules):
        fix = "load them in ComfyUI, or merge them into the text encoder"
        draft.warnings += (Finding("diffusers does not load factors of Flux's T5: it leaves them out", where, fix=fix),)
    ranks, alphas = set[int](), set[float]()
    for module in modules:
        if len(module.parts) == 1:
            rank, scaling = _put_module(adapter, settings, draft, module, names)
        else:
            rank, scaling = _put_fused(adapter, settings, draft, module, names), 1.0
        ranks.add(rank)
        alphas.add(float(rank if settings.layout == DIFFUSERS else scaling * rank))
        if settings.layout != DIFFUSERS:
            alpha = TensorSpec(f"{module.name}{ALPHA}", DTYPES["F32"], ())
            draft.steps.append(Step(alpha, FILL, (), settings=draft.add_settings(Settings({"value": scaling * rank}, ()))))
    draft.container = container
    draft.naming = Naming(metadata=adapter_metadata(adapter.checkpoint.metadata, ranks, alphas))


def _put_module(
    adapter: Adapter, settings: ConvertSettings, draft: PlanDraft, module: RenamedModule, names: FactorNames
) -> tuple[int, float]:
    """The steps of a module that is one of the input, or rows of one. Returns its rank, and what multiplies its factors."""
    factors, specs = adapter.updates[module.parts[0]], adapter.checkpoint.specs
    a, b = specs[factors.a], specs[factors.b]
    folded = factors.scaling if settings.layout == DIFFUSERS else 1.0
    read = Read(0, b.name)
    if module.rows:
        first, count = module.rows
        read = Read(0, b.name, Block(first * b.shape[1], count, b.shape[1], b.shape[1]))
        b = replace(b, shape=(count, b.shape[1]))
    draft.steps.append(factor_step(draft, f"{module.name}{names.a}", a, 1.0).cast(stored_dtype(a, settings)))
    step = replace(factor_step(draft, f"{module.name}{names.b}", b, folded), inputs=(read,))
    draft.steps.append(step.cast(stored_dtype(b, settings)))
    return a.shape[0], factors.scaling


def _put_fused(adapter: Adapter, settings: ConvertSettings, draft: PlanDraft, module: RenamedModule, names: FactorNames) -> int:
    """The steps of a module that is several of the input, one below the other. Returns the sum of their ranks.

    A has the rows of every A. B has each B in the rows of its part and the columns of its A, and zeros elsewhere.
    """
    specs = adapter.checkpoint.specs
    ranks = [specs[adapter.updates[part].b].shape[1] if part else 0 for part in module.parts]
    total = sum(ranks)
    downs: list[Step] = []
    ups: list[Step] = []
    for i, (part, rows) in enumerate(zip(module.parts, module.rows, strict=True)):
        spec = TensorSpec(f"{module.name}{names.b}.{i}", DTYPES["F32"], (rows, total))
        if not part:
            ups.append(Step(spec, FILL, (), settings=draft.add_settings(Settings({"value": 0.0}, ()))))
            continue
        factors = adapter.updates[part]
        a, b = specs[factors.a], specs[factors.b]
        columns = np.full(total, -1)
        columns[sum(ranks[:i]) : sum(ranks[: i + 1])] = np.arange(ranks[i])
        table = draft.add_table(Table.of(columns))
        read = Read(0, b.name, Gather(table, Block(0, rows, ranks[i], ranks[i]), 1))
        weight = draft.add_settings(Settings({"normalize": False}, ({"weight": factors.scaling},)))
        ups.append(Step(spec, "linear", (read,), settings=weight))
        downs.append(factor_step(draft, f"{module.name}{names.a}.{i}", a, 1))
    dtype = stored_dtype(specs[adapter.updates[next(filter(None, module.parts))].b], settings)
    for ending, pieces in ((names.a, downs), (names.b, ups)):
        shape = sum(piece.out.shape[0] for piece in pieces), pieces[0].out.shape[1]
        cast = tuple(piece.cast(dtype) for piece in pieces)
        whole = TensorSpec(f"{module.name}{ending}", dtype, shape)
        draft.steps.append(Step(whole, JOIN, (), pieces=cast) if len(cast) > 1 else replace(cast[0], out=whole))
    return total


def _heads(base: Checkpoint) -> dict[str, int]:
    """The heads of q and of k, under llama.cpp's names."""
    config = GgufConfig(text_config(base.config))
    heads = config.count("num_attention_heads")
    return {"attn_q": heads, "attn_k": config.count("num_key_value_heads", heads)}


def _hub_rows(rows: int, heads: int, name: str) -> Any:
    """int64 [rows]: where each row of the Hub's is in llama.cpp's order."""
    if rows % (2 * heads):
        raise MismatchError(f"it has {rows:,} rows for {heads:,} heads", where=name, fix="name the base of the adapter")
    return from_llama_order(np.arange(rows), rows // heads, 1)


# ---- llama.cpp's file


@dataclass(slots=True)
class _Placed:
    """The factors of a tensor of the GGUF file, or of one expert of it.

    factor  that B is multiplied with
    """

    module: str
    name: str
    factors: Factors
    factor: float = 1.0


@dataclass(slots=True)
class _GgufAdapterDraft:
    """Fills the draft of a GGUF file."""

    adapter: Adapter
    settings: ConvertSettings
    base: Checkpoint
    places: Mapping[str, str]
    stacked: StackedPlaces
    draft: PlanDraft
    problems: list[WeightsmithError] = field(default_factory=list)

    def fill(self, base_name: str) -> None:
        """Raises PlanError with everything that llama.cpp does not read."""
        if self.settings.out_dtype is not None and self.settings.out_dtype.name not in PLAIN_DTYPES:
            fix = "choose float32, float16 or bfloat16"
            raise option_error("out_dtype", f"llama.cpp reads no {self.settings.out_dtype.torch}", fix)
        config = text_config(self.base.config)
        architecture = architecture_of_config(config)
        alpha = self._alpha()
        experts: dict[str, dict[int, _Placed]] = {}
        for module, factors in self.adapter.updates.items():
            ratio = factors.scaling * self._rank(factors) / alpha
            ratio = 1.0 if abs(ratio - 1) <= _ROUNDED else ratio
            placed = _Placed(module, self.places.get(module, f"{module}{WEIGHT}"), factors, ratio)
            with noting(self.problems):
                self._check_vocabulary(placed)
                place = architecture.place(placed.name)
                if split := architecture.split_of(placed.name):
                    self._add_parts(placed, architecture, *split)
                elif place is None:
                    what = f"llama.cpp knows no such tensor in a model of the type {architecture.model_types[0]}"
                    raise Unsupported(what, where=placed.name, fix=self._merge())
                elif place.expert >= 0:
                    experts.setdefault(place.name, {})[place.expert] = placed
                else:
                    self._add(placed, place.name, architecture)
        for name, members in experts.items():
            with noting(self.problems):
                self._add_experts(name, members, architecture, config)
        for parameter_place, parameter, level in self.stacked.assigned:
            with noting(self.problems):
                ratio = parameter.scaling * parameter.rank / alpha
                self._add_stacked(parameter_place, parameter, level, architecture, ratio)
        if self.problems:
            raise PlanError(self.problems)
        keys = adapter_keys(architecture, config, alpha, base_name if _on_hub(base_name) else Path(base_name).name)
        origin = origin_keys([ModelOrigin(self.adapter.checkpoint.folder.absolute().name, self.adapter.checkpoint.card)])
        said = {key: value for key, value in origin.items() if not key.startswith("general.base_model.")}
        self.draft.header, self.draft.container = encode_metadata(keys | said), GGUF_ADAPTER

    def _merge(self) -> str:
        return f"merge it: weightsmith quantize BASE+{self.adapter.checkpoint.ref} OUT --format gguf-q8_0"

    def _rank(self, factors: Factors) -> int:
        return self.adapter.checkpoint.specs[factors.b].shape[1]

    def _alpha(self) -> float:
        """The one alpha of the file: that of most modules. 0 would mean a scale of 1."""
        alphas = Counter(factors.scaling * self._rank(factors) for factors in self.adapter.updates.values())
        alphas.update(parameter.scaling * parameter.rank for _, parameter, _ in self.stacked.assigned)
        with np.errstate(over="ignore"):
            usual = [float(np.float32(alpha)) for alpha, _ in alphas.most_common()]
        return next((alpha for alpha in usual if alpha and np.isfinite(alpha)), 1.0)

    def _check_vocabulary(self, placed: _Placed) -> None:
        """Raise Unsupported for factors of an embedding that is also the head: llama.cpp has one tensor for both."""
        specs = self.base.specs.values()
        if not ties(self.base.config, stores_head=any(map(is_head, specs))):
            return
        if placed.factors.embedding or names_head(placed.name) or placed.module.endswith("lm_head"):
            kind = "embedding" if placed.factors.embedding else "head"
            what = f"factors of the {kind}, which the base ties: llama.cpp has one tensor for embedding and head"
            raise Unsupported(what, where=placed.module, fix=self._merge())

    def _add(self, placed: _Placed, name: str, architecture: GgufArchitecture) -> None:
        """The factors of a tensor of its own."""
        config, specs = GgufConfig(text_config(self.base.config)), self.adapter.checkpoint.specs
        a, b = specs[placed.factors.a], specs[placed.factors.b]
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise Unsupported(f"factors {list(a.shape)} of a convolution", where=placed.module, fix=self._merge())
        order = architecture.order(name, config)
        heads = config.count("num_attention_heads")
        turned = architecture.rotated_heads(name, heads, config.count("num_key_value_heads", heads))
        head_rows = b.shape[0] // turned if turned and b.name not in self.adapter.turned else 0
        on_a = placed.factor if order is not None and order.axis == 0 else 1.0
        on_b = placed.factor if on_a == 1.0 else 1.0
        column_order = order.places if order is not None and order.axis == 1 else None
        row_order = order.places if order is not None and order.axis == 0 else None
        if name == EMBEDDING:
            down = factor_step(self.draft, f"{name}{A_ENDING}", a, 1.0)
            self.draft.steps.append(transposed(down, down.out.name, stored_dtype(a, self.settings)))
        else:
            self._put(factor_step(self.draft, f"{name}{A_ENDING}", a, on_a, column_order, axis=1), a)
        self._put(
            factor_step(self.draft, f"{name}{B_ENDING}", b, on_b, row_order), b, head_rows, architecture.times(name, config)
        )

    def _put(self, step: Step, spec: TensorSpec, head_rows: int = 0, times: tuple[Multiplied, ...] = ()) -> None:
        encoding = GgufEncoding(stored_dtype(spec, self.settings), head_rows, times=times)
        (out,) = encoding.outs(step.out)
        self.draft.steps.append(replace(step, encoding=encoding.name, stored=(replace(out, name=step.out.name),)))

    def _add_parts(self, placed: _Placed, architecture: GgufArchitecture, split: SplitTensor, layer: str) -> None:
        """The factors of a tensor that llama.cpp stores in parts: each has its rows of B, and all of A."""
        config, specs = GgufConfig(text_config(self.base.config)), self.adapter.checkpoint.specs
        a, b = specs[placed.factors.a], specs[placed.factors.b]
        height, parts = pieces_of(split, config, (b.shape[0], a.shape[1]))
        names = [f"blk.{layer}.{part.name}" for part in split.parts]
        plain = not split.columns and not any(piece.transposed or piece.step > 1 for pieces in parts for piece in pieces)
        if not plain or (height != b.shape[0] and not split.flat):
            what = f"llama.cpp stores it as {' and '.join(names)}, which are no products of two factors"
            raise Unsupported(what, where=placed.module, fix=self._merge())
        for name in names:
            self._put(factor_step(self.draft, f"{name}{A_ENDING}", a, 1.0), a)
        step = factor_step(self.draft, f"{split.name}{layer}{B_ENDING}", b, placed.factor)
        encoding = CutEncoding(height, tuple((stored_dtype(b, self.settings), pieces) for pieces in parts), split.flat)
        outs = [replace(out, name=f"{name}{B_ENDING}") for out, name in zip(encoding.outs(step.out), names, strict=True)]
        self.draft.steps.append(replace(step, encoding=encoding.name, stored=tuple(outs)))

    def _add_experts(
        self, name: str, members: Mapping[int, _Placed], architecture: GgufArchitecture, config: Mapping[str, Any]
    ) -> None:
        """The factors of the experts of a layer, as two tensors. Those of several dtypes become float32."""
        specs, count = self.adapter.checkpoint.specs, len(members)
        ordered = [members[i] for i in sorted(members)]
        shapes = {(specs[one.factors.a].shape, specs[one.factors.b].shape) for one in ordered}
        values = GgufConfig(config)
        total = values.count(architecture.experts, values.get("num_local_experts", values.get("num_experts")))
        if sorted(members) != list(range(total)) or len(shapes) > 1:
            what = f"factors of {count:,} of {total:,} experts" if count != total else "factors of experts of several ranks"
            raise Unsupported(f"{what}: llama.cpp has those of all in one tensor", where=ordered[0].module, fix=self._merge())
        for ending in (A_ENDING, B_ENDING):
            spec_names = [one.factors.a if ending == A_ENDING else one.factors.b for one in ordered]
            factors = [one.factor if ending == B_ENDING else 1.0 for one in ordered]
            mixed = len({specs[spec_name].dtype for spec_name in spec_names}) > 1
            widened = mixed or any(factor != 1 for factor in factors)
            pieces = []
            for i, (spec_name, factor) in enumerate(zip(spec_names, factors, strict=True)):
                piece = factor_step(self.draft, f"{name}{ending}.{i}", specs[spec_name], factor)
                pieces.append(piece.cast(DTYPES["F32"]) if widened else piece)
            whole = TensorSpec(f"{name}{ending}", pieces[0].out.dtype, (count, *pieces[0].out.shape))
            self._put(Step(whole, JOIN, (), pieces=tuple(pieces)), whole if mixed else specs[spec_names[0]])

    def _add_stacked(
        self, place: ExpertPlace, parameter: ExpertParameter, level: Stacked, architecture: GgufArchitecture, ratio: float
    ) -> None:
        """The factors of all experts of a parameter. If it has gate and up, each gets its rows of B and all of A."""
        if self.stacked.transposed:
            what = "factors of experts that are stored [inputs, outputs]: llama.cpp has them the other way round"
            raise Unsupported(what, where=place.name, fix=self._merge())
        specs, rank, count = self.adapter.checkpoint.specs, parameter.rank, place.experts
        a, b = specs[level.a], specs[level.b]
        halves = self._halves(place, parameter, architecture)
        factor = 1.0 if abs(ratio - 1) <= _ROUNDED else ratio
        for name, first, rows in halves:
            downs, ups = [], []
            for e in range(count):
                block = Block(e * rank * place.cols, rank, place.cols, place.cols)
                down = TensorSpec(f"{name}{A_ENDING}.{e}", a.dtype, (rank, place.cols))
                downs.append(Step(down, COPY, (Read(0, a.name, block),)))
                chosen = np.arange(e * rank, (e + 1) * rank) if parameter.grouped else np.arange(rank) * count + e
                width = b.shape[1]
                gather = Gather(self.draft.add_table(Table.of(chosen)), Block(first * width, rows, width, width), 1)
                up = factor_step(self.draft, f"{name}{B_ENDING}.{e}", replace(b, shape=(rows, rank)), factor)
                ups.append(replace(up, inputs=(Read(0, b.name, gather),)))
            for ending, pieces, spec in ((A_ENDING, downs, a), (B_ENDING, ups, b)):
                whole = TensorSpec(f"{name}{ending}", pieces[0].out.dtype, (count, *pieces[0].out.shape))
                self._put(Step(whole, JOIN, (), pieces=tuple(pieces)), spec)

    def _halves(
        self, place: ExpertPlace, parameter: ExpertParameter, architecture: GgufArchitecture
    ) -> list[tuple[str, int, int]]:
        """Name in the GGUF file, first row and rows of each matrix that a parameter has of an expert."""
        *parts, _ = GATED.get(parameter.name, (parameter.name, ""))
        module = place.name.removesuffix(f".{parameter.name}")
        rows = place.rows // len(parts)
        firsts = [[(f"{module}.{e}.{part}{WEIGHT}", i * rows) for i, part in enumerate(parts)] for e in range(place.experts)]
        halves: list[tuple[str, int, int]] = []
        for k in range(len(parts)):
            names = [(place.tensors or firsts)[e][k] for e in range(place.experts)]
            places = [architecture.place(name) for name, _ in names]
            known = [there for there in places if there is not None]
            if len({there.name for there in known}) != 1 or [there.expert for there in known] != list(range(place.experts)):
                what = "llama.cpp has no tensor of all experts for it, or in another order"
                raise Unsupported(what, where=place.name, fix=self._merge())
            if architecture.order(known[0].name, GgufConfig(text_config(self.base.config))) is not None:
                raise Unsupported("llama.cpp has its rows in another order", where=place.name, fix=self._merge())
            halves.append((known[0].name, names[0][1], rows))
        return halves


def _on_hub(name: str) -> bool:
    try:
        return bool(name) and isinstance(locate(name, None), HubModel)
    except WeightsmithError:
        return name.count("/") == 1 and not name.startswith((".", "/", "~"))
