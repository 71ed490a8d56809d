"""A model with a LoRA adapter applied: which of the base's tensors everything in the adapter belongs to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from weightsmith._base.errors import Finding, FormatError, ShapeError, Unsupported, nearest
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.lora.adapter import Adapter, Factors, OtherParts
from weightsmith._models.lora.beside import Beside
from weightsmith._models.lora.experts import StackedPlaces, match_stacked, names_of
from weightsmith._models.lora.forms import as_matrix
from weightsmith._models.lora.kinds import KINDS
from weightsmith._models.lora.mlx_and_gguf import in_hub_order, is_of_mlx
from weightsmith._models.lora.networks import find_places as find_modules
from weightsmith._models.sources.adapted import Adapted, AdaptedTensor, RowChange, Update
from weightsmith._models.structure import analyse
from weightsmith._models.structure.configs import replace_value
from weightsmith._models.structure.projections import MIXTRAL, TRANSPOSED_MODELS, UNMIXTRAL, SubMatrix, fused_names, fused_parts
from weightsmith._models.structure.vocabulary import (
    class_of,
    is_embedding,
    is_head,
    is_other_head,
    is_task_head,
    is_vocabulary,
    labels_matrix,
    names_embedding,
    names_head,
    set_class,
    tie_flag,
    untie,
)
from weightsmith.abc.adapter import AdapterModule

_SHOWN = 8  # problems that a message lists
_BEGINNINGS = 100  # of names that are tried; models have up to ten

_VOCABULARY_OF_MLX = {"model.embed_in.weight": "gpt_neox.embed_in.weight", "model.embed_out.weight": "embed_out.weight"}
"""MLX's names of GPT-NeoX's embedding and head → the Hub's. The layers have another prefix."""
_RENAMED_BY_MLX = re.compile(r"(\.feed_forward\.(?:experts\.\d+\.)?)(gate_proj|up_proj|down_proj)(?=\.weight$)")
_LISTED_EXPERT = re.compile(r"(.+\.experts\.(?:gate_up_proj|down_proj))s\.(\d{1,6})\.weight")
"""gpt-oss's experts as Unsloth loads them in 4 bits: a linear layer for each, in a list."""
_UNMIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])(?=\.weight$)")

Shape = tuple[int, ...]


_LM_HEADS = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")
"""Causal language models of another name, whose head is `lm_head` too."""
_OTHER_HEADS_OF = re.compile(r"For(?:MaskedLM|ConditionalGeneration|PreTraining)$")
"""Classes whose heads have many names: some of them."""
_HEADS = ("lm_head.weight", "proj_out.weight", "predictions.decoder.weight", "predictions.decoder.bias")
_NO_PARTS = OtherParts("", {}, {})

Names = Callable[[], Mapping[str, str]]
"""Asks transformers: tensor of the base → tensor of the model that it builds; {} if that is not known."""


def apply_adapter(base: Checkpoint, adapter: Adapter, ref: str, names: Names = dict) -> Checkpoint:
    """A base model with an adapter; config, files and folder are the base's. Closing it closes base and adapter.

    Where embedding and head are one tensor and the adapter changes one of them, the head becomes a tensor of its own, as it was
    while the adapter was trained.

    names  is called if the base has no place for something: PEFT has names of the model that transformers builds

    Raises ShapeError with everything in the adapter that the base has no place for.
    """
    adapter = in_hub_order(adapter, base.config)
    match, adapter_checkpoint = _matched(base, adapter, ref, names), adapter.checkpoint
    notes = [*base.notes, *adapter_checkpoint.notes, *match.notes, *_unused(adapter)]
    folder = ModelFolder.like(
        base,
        revision=f"{base.revision}+{adapter_checkpoint.revision}" if adapter_checkpoint.revision else base.revision,
        config=match.config or base.config,
        repositories=(*base.repositories, *adapter_checkpoint.repositories),
    )
    beside = Beside(base, adapter_checkpoint, ref)
    kept, (folder, findings) = folder, beside.apply(folder, grown=match.grown, trains_tokens=match.trains_tokens)
    notes += findings
    source = Adapted(base, adapter_checkpoint, match.origins(), ref)
    adapted = Checkpoint(
        ref, source, folder, metadata=base.metadata, notes=tuple(notes), untied=match.untied, decoded=base.decoded
    )
    if base.verbatim is not None:
        header = base.verbatim.header if folder is kept else {}  # it says what the base's tokenizer is
        stored_as = partial(source.stored_as, base.verbatim.stored_as)
        adapted.verbatim = replace(base.verbatim, stored_as=stored_as, header=header)
    return adapted


def _unused(adapter: Adapter) -> Iterator[Finding]:
    """A warning for an adapter that changes nothing: every A or B is zeros, as before the first step of a training.

    Of one on this disk alone. Cost: reads factors up to the first that are not zeros.
    """
    checkpoint = adapter.checkpoint
    pairs = [(factors.a, factors.b) for factors in adapter.updates.values() if factors.scaling]
    pairs += [(level.a, level.b) for levels in adapter.stacked.values() for level in levels]
    modules = len(adapter.updates) + len(adapter.stacked)
    dora = any(factors.magnitude for factors in adapter.updates.values())
    if checkpoint.repositories or adapter.replacements or adapter.others or dora:
        return
    if not any(checkpoint.read(b).any() and checkpoint.read(a).any() for a, b in pairs):
        what = f"the adapter changes nothing: B @ A of its {count(modules, 'module')} is all zeros"
        fix = "check that it was trained, and that its trained weights were saved"
        yield Finding(what, checkpoint.ref, fix=fix)


def find_places(base: Checkpoint, adapter: Adapter, names: Names = dict) -> dict[str, str]:
    """Modules with factors, and tensors that are saved whole → the tensors of the base, but for those that are parts of others.

    Raises ShapeError as `apply_adapter` does.
    """
    return _matched(base, adapter, adapter.checkpoint.ref, names).places


def find_shapes(base: Checkpoint, adapter: Adapter, names: Names = dict) -> dict[str, Shape]:
    """Modules that an adapter of another kind than LoRA changes → the shapes of their weights [outputs, inputs].

    Raises ShapeError as `apply_adapter` does.
    """
    return _matched(base, adapter, adapter.checkpoint.ref, names).shapes


def find_experts(base: Checkpoint, adapter: Adapter, names: Names = dict) -> StackedPlaces:
    """The parameters of experts that an adapter has factors of. Raises ShapeError as `apply_adapter` does."""
    return _matched(base, adapter, adapter.checkpoint.ref, names).stacked


def _matched(base: Checkpoint, adapter: Adapter, ref: str, names: Names) -> _Match:
    """The places in the base, by its own names; if these do not fit, by those of the model that transformers builds."""
    try:
        return _Match(base, adapter, ref)
    except ShapeError:
        sources = grouped((key, name) for name, key in names().items())
        if all(tensors == [key] for key, tensors in sources.items()):
            raise  # they are the same
        return _Match(base, adapter, ref, sources)


class _Match:
    """Finds the base's tensor for everything in the adapter.

    config  the base's, with the vocabulary and the tying that the result has
    notes   what the user should know
    untied  the one of them on an embedding and a head that were one tensor
    places  see `find_places`
    shapes  see `find_shapes`
    stacked  the parameters of experts that have factors
    grown   whether there are more tokens than in the base

    sources  tensor of the model that transformers builds → tensors of the base; {}: names are the base's
    """

    def __init__(
        self, base: Checkpoint, adapter: Adapter, ref: str, sources: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        self._sources = sources
        self.base, self.adapter, self.ref = base, adapter, ref
        self.config: dict[str, Any] = copy.deepcopy(base.config or {})
        self.notes: list[Finding] = []
        self.untied: Finding | None = None
        self.places: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.stacked = StackedPlaces([])
        self.grown = False
        self._base_names = {name: name for name in base.specs}  # tensor → the base's that it stands for
        self._updates: dict[str, Factors] = {}
        self._parts: dict[str, list[Update]] = {}  # of tensors with several matrices
        self._changes: dict[str, list[RowChange]] = {}  # by adapters of other kinds than LoRA
        self._replaced: dict[str, str] = {}
        self._located: Mapping[str, tuple[str, SubMatrix]] = {}  # parts of tensors that a file names as matrices
        self._shared = False
        self._problems: list[str] = []
        if adapter.as_one and (tied := self._tied_embedding()):
            self.adapter, self._shared = self._with_one_vocabulary(tied), True
        self._match()

    @property
    def trains_tokens(self) -> bool:
        """Whether the adapter changes or replaces the token embedding."""
        return any(map(names_embedding, (*self._replaced, *self._updates, *self._changes)))

    def origins(self) -> dict[str, AdaptedTensor]:
        """What each tensor of the result is made from."""
        return {
            name: AdaptedTensor(
                base_name, self._replaced.get(name, ""), tuple(self._updates_of(name)), tuple(self._changes.get(name, ()))
            )
            for name, base_name in self._base_names.items()
        }

    def _match(self) -> None:
        located, head = self._locate(), self._take_task_head()
        replacements = {name: source for name, source in self.adapter.replacements.items() if name not in head}
        rename = self._names(replacements, located)
        tied = "" if head else self._tied_embedding()
        self._place_replacements(replacements, rename, tied)
        self._place_factors(rename, tied)
        self._place_others(rename, tied)
        self._place_stacked(rename)
        if not self._problems:
            self._problems += self._check_rows()
        if self._problems:
            raise self._unfit()
        if tied and not self._shared:
            self._untie(tied)
        self._note_lost_biases()
        self._note_tied_head()

    def _names(self, replacements: Iterable[str], located: Callable[[str], str] | None) -> Callable[[str], str]:
        """From the adapter's names of tensors to the base's. located: the same, for the modules of a single file."""
        adapter = self.adapter
        stacked = [
            name
            for module, parameters in adapter.parameters.items()
            for parameter in parameters
            for name in names_of(module, parameter.name)
        ]
        targets = [*(f"{m}.weight" for m in (*adapter.updates, *adapter.others)), *replacements, *stacked]
        vocabulary = {there: here for there, here in _VOCABULARY_OF_MLX.items() if here in self.base.specs}
        renaming = located or (
            self._stored if self._sources else self._renaming([name for name in targets if name not in vocabulary])
        )
        return lambda name: vocabulary.get(name) or self._respelled(renaming(name))

    def _place_replacements(self, replacements: Mapping[str, str], rename: Callable[[str], str], tied: str) -> None:
        """Tensors that are saved whole. tied: the embedding that is also the head."""
        for stored_name, source in replacements.items():
            name = rename(stored_name)
            if name in self._base_names or (tied and is_head(replace(self.adapter.checkpoint.specs[source], name=name))):
                self._base_names.setdefault(name, tied)
                self._replaced[name] = source
                self.places[stored_name] = self._base_names[name]
                self._refuse(self._replacement_problem(name))
            else:
                self._refuse_unplaced(name)

    def _place_factors(self, rename: Callable[[str], str], tied: str) -> None:
        for module, factors in self.adapter.updates.items():
            name = self._own_head(rename(f"{module}.weight"), tied)
            if name in self._updates:
                self._refuse(f"{name}: the adapter has factors for it under several names, {module} is one of them")
            elif name in self._base_names:
                self._refuse(self._shape_problem(name, factors))
                self._updates[name] = factors
                self.places[module] = self._base_names[name]
            elif part := self._part_of(name):
                self._refuse(self._add_part(name, factors, *part))
            elif expert := self._listed_expert(name):
                self._refuse(self._add_listed_expert(name, factors, *expert))
            else:
                self._refuse_unplaced(name)

    def _place_others(self, rename: Callable[[str], str], tied: str) -> None:
        """Changes of other kinds than LoRA."""
        for module, parts in self.adapter.others.items():
            self._problems += self._change(module, self._own_head(rename(f"{module}.weight"), tied), parts)

    def _place_stacked(self, rename: Callable[[str], str]) -> None:
        """Factors of experts."""
        modules = {module: rename(f"{module}.x")[:-2] for module in self.adapter.stacked}
        self.stacked = match_stacked(self.adapter, self.base, modules, self._sources)
        self._problems += self.stacked.problems
        for name, updates in self.stacked.updates(self.base.specs).items():
            self._parts.setdefault(name, []).extend(updates)
        twice = [name for name, updates in self._parts.items() if name in self._updates or _overlap(updates)]
        self._problems += [f"{name}: the adapter has factors for it under several names" for name in twice]

    def _own_head(self, name: str, tied: str) -> str:
        """The name of a weight; a head that is the embedding in the base becomes a tensor of its own."""
        if tied and is_head(replace(self.base.specs[tied], name=name)):
            self._base_names.setdefault(name, tied)
        return name

    def _refuse(self, problem: str) -> None:
        if problem:
            self._problems.append(problem)

    def _refuse_unplaced(self, name: str) -> None:
        self._problems.append(self._no_place(name) if len(self._problems) < _SHOWN else name)

    def _unfit(self) -> ShapeError:
        """The error of an adapter that is for another base."""
        shown, hidden = self._problems[:_SHOWN], len(self._problems) - _SHOWN
        what = f"the adapter does not fit {self.base.ref}: {len(self._problems)} of its targets have no place there"
        fix = "name the base model that the adapter was trained on"
        if self.adapter.file is None:
            stated = (self.adapter.checkpoint.config or {}).get("base_model_name_or_path")
            fix += f"; its adapter_config.json says {show(stated)}"
        if self._of_mlx:
            fix += ". If it was trained on this one, MLX renames or splits these modules: fuse it with mlx_lm.fuse"
        details = [*shown, *([f"and {hidden} more"] if hidden > 0 else [])]
        return ShapeError(what, where=self.adapter.checkpoint.ref, details=details, fix=fix)

    def _note_lost_biases(self) -> None:
        """A warning where biases were trained and not saved, as PEFT did for a while with `bias: lora_only`."""
        trained = (self.adapter.checkpoint.config or {}).get("bias") not in (None, "none")
        biases = [f"{module}.bias" for module in (*self.places, *self.adapter.others)]
        lost = [name for name in biases if name in self.base.specs] if trained else []
        if lost and not any(name.endswith(".bias") for name in self.adapter.replacements):
            what = f"biases were trained, and the adapter has none: those of the base stay, such as {lost[0]}"
            self.notes.append(Finding(what, self.ref, fix="save it again with a current version of peft"))

    def _note_tied_head(self) -> None:
        """A warning where an embedding changes that is also a head of another name, which the training left alone."""
        config, specs = self.base.config or {}, self.base.specs.values()
        architectures = config.get("architectures")
        names = [*map(str, architectures)] if isinstance(architectures, list) else []
        head = next((name for name in names if _OTHER_HEADS_OF.search(name)), "")
        if not head or tie_flag(config) is False or any(map(is_head, specs)):
            return
        if tied := next((spec.name for spec in specs if is_embedding(spec) and self._has_trained(spec.name)), ""):
            what = f"{tied} is also the head of {head}: both change here, and the adapter was trained on the embedding alone"
            self.notes.append(Finding(what, self.ref, fix="compare the result with that of peft's merge_and_unload"))

    def _take_task_head(self) -> set[str]:
        """The tensors of a classifier's head that the adapter has and the base has not: the result is of that class, then.

        The base's own head is left out. Nothing changes if the class, or the form of the head, is not known.
        """
        replacements, config = self.adapter.replacements, self.adapter.checkpoint.config or {}
        head = {name: source for name, source in replacements.items() if is_task_head(name) and name not in self.base.specs}
        mapping = config.get("auto_mapping")
        trained = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        name, matrix = class_of(self.config, config.get("task_type"), trained), labels_matrix(head)
        spec = self.adapter.checkpoint.specs[head[matrix]] if matrix else None
        if not name or spec is None or len(spec.shape) != 2 or not self.base.config or self._is_unloadable(name):
            return set()
        left_out = [tensor for tensor in self.base.specs if is_other_head(tensor)]
        like = next(tensor for tensor, base_spec in self.base.specs.items() if base_spec.dtype.floating)
        self._base_names = {tensor: tensor for tensor in self.base.specs if tensor not in left_out} | dict.fromkeys(head, like)
        self._replaced |= head
        set_class(self.config, name, spec.shape[0])
        what = f"the adapter has the head of a classifier: the output is {name}, with {count(spec.shape[0], 'label')}"
        self.notes.append(Finding(f"{what}, and without {', '.join(left_out)}" if left_out else what, self.ref))
        return set(head)

    def _is_unloadable(self, name: str) -> bool:
        """Whether a class has other names for layers than the base: Llama's for answers has `transformer.` for `model.`."""
        modules = {module.partition(".")[0] for module in (*self.adapter.updates, *self.adapter.others)}
        return name.endswith("ForQuestionAnswering") and not modules & {tensor.partition(".")[0] for tensor in self.base.specs}

    def _respelled(self, name: str) -> str:
        """The base's name of a matrix that MLX renames: in MLX, LFM2-MoE's `w1` is `gate_proj`."""
        spelling = _RENAMED_BY_MLX.sub(lambda match: f"{match[1]}{MIXTRAL[match[2]]}", name)
        return spelling if name not in self.base.specs and spelling in self.base.specs else name

    def _stored(self, name: str) -> str:
        """The base's name of a tensor of the model that transformers builds, unless it is made of several."""
        sources = self._sources.get(name, ())
        return sources[0] if len(sources) == 1 else name

    def _renaming(self, targets: Iterable[str]) -> Callable[[str], str]:
        """From the adapter's names to the base's, which may begin with other modules (`model.`, `language_model.model.`).

        Only a way that no other way does as well as: `layers.0` of a language model is not to be taken for a vision tower's.
        """
        names, tensors = list(targets), self.base.specs
        parts = [name.split(".") for name in tensors]
        every = dict.fromkeys(".".join(p[:k]) + "." for k in (1, 2) for p in parts if len(p) > k)
        beginnings = list(every)[:_BEGINNINGS]
        ways = {(drop, b): [b + name.split(".", drop)[-1] for name in names] for drop in (0, 1, 2) for b in ("", *beginnings)}
        fits = {way: sum(name in tensors for name in renamed) for way, renamed in ways.items()}
        best = [way for way, n in fits.items() if n == max(fits.values())]
        if (0, "") in best or len({tuple(ways[way]) for way in best}) > 1:
            return lambda name: name
        drop, beginning = best[0]
        return lambda name: beginning + name.split(".", drop)[-1]

    def _locate(self) -> Callable[[str], str] | None:
        """Find the places of a single file's modules; from its names to the base's. None for PEFT's adapters.

        Networks that the base does not have are left out of `adapter`.
        """
        adapter, base = self.adapter, self.base
        if adapter.file is None:
            return None
        shapes = ((module, self._shapes(factors)) for module, factors in adapter.updates.items())
        modules = {module: self._shape_of_other(parts) for module, parts in adapter.others.items()}
        modules |= {module: (b[0], a[1]) for module, (a, b) in shapes}
        places = find_modules(modules, base.specs, adapter.checkpoint.ref, base.ref, flat=adapter.file.flat)
        if places.names:
            placed = {module: factors for module, factors in adapter.updates.items() if module in places.names}
            others = {module: parts for module, parts in adapter.others.items() if module in places.names}
            self.adapter = replace(adapter, updates=placed, others=others)
            self.notes += places.notes
            self._located = places.parts
        return lambda name: places.names.get(name.removesuffix(".weight"), name)

    def _shape_of_other(self, parts: OtherParts) -> tuple[int, int]:
        """Outputs and inputs of a module of LoHa, to tell networks apart; zeros if the factors do not show them."""
        shapes = {part: self.adapter.checkpoint.specs[name].shape for part, name in parts.parts.items()}
        rows, cols = shapes.get("hada_w1_a", ()), shapes.get("hada_w1_b", ())
        if len(difference := as_matrix(shapes.get("diff", ()))) == 2:
            return difference[0], difference[1]
        return (rows[0], cols[1]) if len(rows) == len(cols) == 2 and "hada_t1" not in shapes else (0, 0)

    def _part_of(self, name: str) -> tuple[str, SubMatrix] | None:
        """The base's tensor that a matrix is part of, and the part."""
        if name in self._located:
            return self._located[name]
        for spelling in (name, _UNMIXTRAL.sub(lambda match: f"{match[1]}{UNMIXTRAL[match[2]]}", name)):
            if spelling in self._fused:
                return self._fused[spelling]
        return None

    @cached_property
    def _fused(self) -> dict[str, tuple[str, SubMatrix]]:
        """The matrices in tensors of the base that hold several: name → the tensor, and which part of it."""
        specs = self.base.specs
        structure = analyse(specs.values(), self.base.config)
        parts = ((spec.name, part) for spec in specs.values() for part in fused_parts(spec, specs, structure, self.base.config))
        return {part.name: (name, part) for name, part in parts}

    def _add_part(self, name: str, factors: Factors, tensor: str, part: SubMatrix) -> str:
        """Add the factors of a matrix that is part of a tensor; the problem with that, or ""."""
        a, b = self._shapes(factors)
        if factors.magnitude:
            return f"{name}: DoRA of a part of {tensor}"
        if part.shape != (b[0], a[1]):
            return f"{name}: {list(part.shape)} in {tensor} of the base, and the adapter is for {[b[0], a[1]]}"
        rows = part.offset // part.shape[1], part.shape[0]
        self._parts.setdefault(tensor, []).append(Update(factors.a, factors.b, factors.scaling, transposed=False, rows=rows))
        return ""

    def _listed_expert(self, name: str) -> tuple[str, int] | None:
        """The base's tensor [experts, inputs, outputs] of an expert that the adapter's model has in a list, and its number."""
        match = _LISTED_EXPERT.fullmatch(name) if (self.base.config or {}).get("model_type") == "gpt_oss" else None
        spec = self.base.specs.get(match[1]) if match else None
        return (spec.name, int(match[2])) if match and spec and len(spec.shape) == 3 and spec.dtype.floating else None

    def _add_listed_expert(self, name: str, factors: Factors, tensor: str, expert: int) -> str:
        """Add the factors of an expert, transposed, as Unsloth merges them; the problem with that, or ""."""
        (a, b), (experts, inputs, outputs) = self._shapes(factors), self.base.specs[tensor].shape
        if factors.magnitude:
            return f"{name}: DoRA of a part of {tensor}"
        if expert >= experts or (a[1], b[0]) != (inputs, outputs):
            there = f"{experts} of {[inputs, outputs]} in {tensor} of the base"
            return f"{name}: {there}, and the adapter is for expert {expert} of {[a[1], b[0]]}"
        rows = expert * inputs, inputs
        self._parts.setdefault(tensor, []).append(Update(factors.a, factors.b, factors.scaling, transposed=True, rows=rows))
        return ""

    def _change(self, module: str, name: str, parts: OtherParts) -> list[str]:
        """Add the change of a module's weight, and of its bias; the problems with that."""
        tensor, rows = name, None
        if name in self._base_names:
            shape = self._source_spec(name).shape
            self.places[module] = self._base_names[name]
        elif part := self._part_of(name):
            tensor, (first, shape) = part[0], (part[1].offset // part[1].shape[1], part[1].shape)
            rows = first, shape[0]
        else:
            return [self._no_place(name)]
        kind, specs = KINDS.get(parts.kind), self.adapter.checkpoint.specs
        dimensions = 1 if kind.vectors and rows is None else 2
        if not self.base.specs[self._base_names[tensor]].dtype.floating or len(shape) < dimensions or 0 in shape:
            return [f"{name}: {list(shape)} in the base, and {self.adapter.title} changes weights of layers"]
        changed = not kind.of_biases.issuperset(parts.parts)
        if changed and (tensor in self._updates or tensor in self._parts):
            return [f"{name}: the adapter has two changes for it"]
        if changed and any(change.rows is None or change.rows == rows for change in self._changes.get(tensor, ())):
            return [f"{name}: the adapter changes it under several names, {module} is one of them"]
        transposed = self._inputs_first and len(shape) == 2 and rows is None and parts.kind != "trainable_tokens"
        turned = shape[::-1] if transposed else shape
        self.shapes[module] = turned
        described = AdapterModule(module, turned, {part: specs[stored] for part, stored in parts.parts.items()}, parts.settings)
        if problems := list(kind.problems(described)):
            return [f"{name}: {problem}" for problem in problems]
        code = KINDS.identity(parts.kind)
        if changed:
            self._changes.setdefault(tensor, []).append(RowChange(kind, described, transposed, rows, code))
        bias = f"{tensor.removesuffix('weight')}bias"
        if bias not in self._base_names and (extra := kind.of_biases.intersection(parts.parts)):
            return [f"{name}: the adapter has {min(extra)}, and the base has no {bias}"]
        if bias in self._changes and any(change.rows in (None, rows) for change in self._changes[bias]):
            return [f"{bias}: the adapter changes it under several names, {module} is one of them"]
        if bias in self._base_names and kind.biases(described):
            self._changes.setdefault(bias, []).append(RowChange(kind, kind.of_bias(described), rows=rows, code=code))
        return []

    def _no_place(self, name: str) -> str:
        architectures = (self.base.config or {}).get("architectures")
        listed = architectures if isinstance(architectures, list) else []
        if name.endswith(_HEADS) and any(_OTHER_HEADS_OF.search(str(architecture)) for architecture in listed):
            return f"{name}: a head that is one tensor with the embedding in the base. Merge it with peft (merge_and_unload)"
        fused = next((fused for fused in fused_names(name) if fused in self.base.specs), "")
        if fused:
            return f"{name}: the base keeps it inside {fused}, in an order that is not known"
        similar = "" if self._of_mlx else nearest(name, self.base.specs)
        return f"{name}: the base has no such tensor{similar}"

    @cached_property
    def _of_mlx(self) -> bool:
        """Whether MLX named the modules: names that the base lacks are not misspelt then, and similar ones are no help."""
        return is_of_mlx(self.adapter)

    def _replacement_problem(self, name: str) -> str:
        replacement = self.adapter.checkpoint.specs[self._replaced[name]]
        base = self.base.specs[name] if name in self.base.specs else replacement
        grown = is_vocabulary(replace(replacement, name=name)) and replacement.shape[1:] == base.shape[1:]
        if replacement.shape != base.shape and not grown:
            return f"{name}: {list(base.shape)} in the base, and {list(replacement.shape)} is to take its place"
        if replacement.dtype.floating != base.dtype.floating:
            return f"{name}: {base.dtype} in the base, and {replacement.dtype} is to take its place"
        return ""

    def _check_rows(self) -> list[str]:
        """Tokens that the adapter adds must be in embedding and head alike; config.json says how many there are then."""
        vocabulary = [name for name in self._base_names if is_vocabulary(self._source_spec(name))]
        rows = {name: self._source_spec(name).shape[0] for name in vocabulary}
        grown = {self.base.specs[n].shape[0]: rows[n] for n in vocabulary if n in self._replaced and n in self.base.specs}
        grown = {old: new for old, new in grown.items() if old != new}
        if grown and len(set(rows.values())) > 1:
            return [f"{name}: would have {n} rows, and embedding and head need as many" for name, n in rows.items()]
        self.grown = any(new > old for old, new in grown.items())
        for old, new in grown.items():
            replace_value(self.config, "vocab_size", old, new)
        return []

    def _shape_problem(self, name: str, factors: Factors) -> str:
        spec = self._source_spec(name)
        a, b = self._shapes(factors)
        single = self.adapter.file is not None
        upright = single and not factors.embedding
        fitting = ((b[0], a[1]),) if upright else ((b[0], a[1]), (a[1], b[0]))
        kernel = self.adapter.checkpoint.specs[factors.a].shape[2:]
        stored = as_matrix(spec.shape) if single or (kernel and kernel == spec.shape[2:]) else spec.shape
        if not spec.dtype.floating or stored not in fitting:
            return f"{name}: {list(spec.shape)} {spec.dtype} in the base, and the adapter is for {[b[0], a[1]]}"
        return ""

    def _shapes(self, factors: Factors) -> tuple[Shape, Shape]:
        """The shapes of A and B; those of a convolution as matrices."""
        specs = self.adapter.checkpoint.specs
        return as_matrix(specs[factors.a].shape), as_matrix(specs[factors.b].shape)

    def _tied_embedding(self) -> str:
        """The base's embedding where it is also the head, and no file holds a head; else ""."""
        config = self.base.config or {}
        architectures = config.get("architectures")
        names = [*map(str, architectures)] if isinstance(architectures, list) else []
        specs = self.base.specs.values()
        if tie_flag(config) is False or any(map(is_head, specs)):
            return ""
        embedding = next((spec.name for spec in specs if is_embedding(spec)), "")
        if any("CausalLM" in name for name in names):
            return embedding
        return embedding if any(name in _LM_HEADS for name in names) and self._has_trained(embedding) else ""

    def _has_trained(self, tensor: str) -> bool:
        """Whether the adapter has factors of a tensor's module, or saves the module; a tensor put in place does not count."""
        adapter = self.adapter
        return any(
            f".{tensor}".endswith(f".{module}.weight")
            for module in (*adapter.updates, *adapter.others, *adapter.saved)
            if adapter.others.get(module, _NO_PARTS).kind != "trainable_tokens"
        )

    def _with_one_vocabulary(self, embedding: str) -> Adapter:
        """The adapter without what it has of the head, where the base ties it and PEFT tied both in training.

        PEFT saves what they share twice: factors under both names, those of the head transposed. What is there for the head
        alone is the embedding's. Raises FormatError for factors that differ: one tensor cannot have both.
        """
        adapter = self.adapter
        updates = {module: factors for module, factors in adapter.updates.items() if not names_head(f"{module}.weight")}
        heads = [module for module in adapter.updates if module not in updates]
        trained = next((factors for factors in updates.values() if factors.embedding), None)
        if normed := next((module for module in (*heads, *updates) if self._is_normed_vocabulary(module)), ""):
            what = f"DoRA of {normed}, where ensure_weight_tying is true: one tensor cannot have the norms of both"
            fix = "set ensure_weight_tying to false in adapter_config.json: embedding and head are two tensors then"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix=fix)
        for module in heads:
            factors = adapter.updates[module]
            if trained is None:
                updates[embedding.removesuffix(".weight")] = factors
            elif not adapter.ties_factors(trained, factors):
                what = f"ensure_weight_tying is true, and {module} has other factors than the embedding"
                fix = "set ensure_weight_tying to false in adapter_config.json: embedding and head are two tensors then"
                raise FormatError(what, where=adapter.checkpoint.ref, fix=fix)
        replacements = {name: source for name, source in adapter.replacements.items() if not names_head(name)}
        of_embedding = (replace(adapter.checkpoint.specs[source], name=name) for name, source in replacements.items())
        if not any(map(is_embedding, of_embedding)) and (saved := [*filter(names_head, adapter.replacements)]):
            replacements[embedding] = adapter.replacements[saved[0]]
        return replace(adapter, updates=updates, replacements=replacements)

    def _is_normed_vocabulary(self, module: str) -> bool:
        """Whether an adapter has norms of DoRA for an embedding or a head."""
        weight = f"{module}.weight"
        return bool(self.adapter.updates[module].magnitude) and (names_embedding(weight) or names_head(weight))

    def _untie(self, embedding: str) -> None:
        """Give the head numbers of its own, where the adapter changes it or the embedding alone."""
        heads = [name for name in self._base_names if is_head(self._source_spec(name))]
        turned = [change for change in self._changes.get(embedding, ()) if change.kind is not KINDS.get("trainable_tokens")]
        changed = embedding in self._updates or embedding in self._replaced or bool(turned)
        if not heads and changed and self._source_spec(embedding).shape == self.base.specs[embedding].shape:
            heads = ["lm_head.weight"]
            self._base_names[heads[0]] = embedding
        if heads:
            untie(self.config)
            what = f"the adapter was trained on the {'embedding' if changed else 'head'}, which the base ties to its "
            what += f"{'head' if changed else 'embedding'}: they are two tensors now"
            self.untied = Finding(what, self.ref, fix="merge it with peft's merge_and_unload, which changes both at once")
            self.notes.append(self.untied)

    # --- tensors -------------------------------------------------------------------------------------------------------------

    def _source_spec(self, name: str) -> TensorSpec:
        """What a tensor starts from, before the update, under the tensor's name."""
        replaced = self._replaced.get(name)
        spec = self.base.specs[self._base_names[name]] if replaced is None else self.adapter.checkpoint.specs[replaced]
        return replace(spec, name=name)

    def _updates_of(self, name: str) -> list[Update]:
        """What the adapter adds to a tensor."""
        factors = self._updates.get(name)
        if factors is None:
            return sorted(self._parts.get(name, ()), key=lambda update: update.rows or (0, 0))
        transposed = self._transposed(factors, self._source_spec(name).shape)
        columns = factors.columns or (transposed and bool(factors.magnitude))  # norms belong to outputs, which are columns here
        return [Update(factors.a, factors.b, factors.scaling, transposed, factors.magnitude, columns=columns)]

    def _transposed(self, factors: Factors, shape: Shape) -> bool:
        """Whether the weight is (B @ A)ᵀ, as in embeddings and GPT-2. The shape tells; if it is square, the base does."""
        a, b = self._shapes(factors)
        if b[0] == a[1]:
            return factors.embedding or self._inputs_first
        return shape == (a[1], b[0])

    @cached_property
    def _inputs_first(self) -> bool:
        """Whether the base's layers store [inputs, outputs].

        PEFT goes by the class of a layer: trainings on quantised bases have left `fan_in_fan_out: true` in configs of models
        that store [outputs, inputs].
        """
        model_type = (self.base.config or {}).get("model_type")
        joined = (spec.shape for name, spec in self.base.specs.items() if name.endswith("attn.c_attn.weight"))
        if model_type in TRANSPOSED_MODELS or any(shape[1:] == (3 * shape[0],) for shape in joined):
            return True
        return self.adapter.transposed and not isinstance(model_type, str)


def _overlap(updates: Sequence[Update]) -> bool:
    """Whether two updates of a tensor are of the same rows."""
    rows = sorted(update.rows or (0, 0) for update in updates)
    whole = any(update.rows is None for update in updates)
    return len(rows) > 1 and (whole or any(first + n > after for (first, n), (after, _) in pairwise(rows)))
