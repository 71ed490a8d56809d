"""Where everything of an adapter goes in the model that PEFT wraps: names of modules, of parameters, and of tensors.

PEFT has three places. Factors of modules (`target_modules`), or of parameters (`target_parameters`): experts, and modules whose
names PEFT takes for those of experts. Copies of modules (`modules_to_save`). And the model's own tensors, which a tensor in the
file replaces if it has their names in the wrapped model, as PEFT does for biases and for embeddings that grew. What the first
two cannot hold goes there: biases of modules with factors, parameters of modules with others inside, tensors that several
modules share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from weightsmith._base.errors import Finding, MismatchError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._features.adapters.built import WEIGHT, BuiltModel, matched
from weightsmith._features.adapters.cores import AdaptedModule
from weightsmith._features.adapters.factors import FactorTarget, Form
from weightsmith._files.containers import DIFFUSERS_LORA, KOHYA
from weightsmith._models.lora import Adapter
from weightsmith._models.lora.adapter import PREFIX, FileNames
from weightsmith._models.lora.config import KNOWS_ORDER
from weightsmith._models.lora.forms import ALPHA
from weightsmith._models.lora.networks import DENOISER, Network, network_of
from weightsmith._plans import FILL, PRODUCTS, PlanDraft, Read, Settings, Step

# ---- Merges of adapters in single files: all must name their modules in one way, and the result is named as they are


_FLAT_LAYER = re.compile(r"(.*?_\d+)_")

_ORIGINAL = ("input_blocks", "middle_block", "output_blocks", "double_blocks", "single_blocks", "joint_blocks")
_DIFFUSERS = ("down_blocks", "mid_block", "up_blocks", "transformer_blocks", "single_transformer_blocks")
"""What the modules of a diffusion model begin with: in the model's first implementation, and in diffusers."""

_CONVERT = "convert one of them first: weightsmith convert-lora ADAPTER OUT --for diffusers, or --for kohya"


def check_files(adapters: Sequence[Adapter]) -> None:
    """Raise MismatchError unless all adapters name modules in one way. Under two names, one module would be two."""
    first, *others = adapters
    for other in others:
        if (usual := _form(first)) != (form := _form(other)):
            details = [f"{first.checkpoint.ref}: {usual}", f"{other.checkpoint.ref}: {form}"]
            what = "adapters that name their modules in different ways: none of them would be merged"
            raise MismatchError(what, where=other.checkpoint.ref, details=details, fix=_CONVERT)
    every = ((network, (written, adapter)) for adapter in adapters for network, written in _written(adapter).items())
    for network, used in grouped(every).items():
        (known, owner), *rest = used
        for written, adapter in rest:
            if written.beginning != known.beginning or (written.blocks and known.blocks and written.blocks != known.blocks):
                details = [f"{owner.checkpoint.ref}: {known}", f"{adapter.checkpoint.ref}: {written}"]
                what = f"adapters that name the modules of {network.title} in different ways: none of them would be merged"
                raise MismatchError(what, where=adapter.checkpoint.ref, details=details, fix=_CONVERT)


def strangers(adapters: Sequence[Adapter]) -> Iterator[Finding]:
    """A warning for each file that has no module of a network in common with the first one that has the network."""
    first: dict[Network, tuple[Adapter, set[str]]] = {}
    for adapter in adapters if adapters[0].file is not None else ():
        named = ((network_of(module, flat=_names(adapter).flat)[0], module) for module in adapter.updates)
        for network, modules in grouped(named).items():
            owner, known = first.setdefault(network, (adapter, set(modules)))
            if known.isdisjoint(modules):
                what = f"it has no module of {network.title} in common with {owner.checkpoint.ref}, such as {show(modules[0])}"
                yield Finding(what, adapter.checkpoint.ref, fix="check that both name the modules of the model in one way")


def _form(adapter: Adapter) -> str:
    if adapter.file is None:
        return "PEFT's folders"
    return "names with _, as kohya's scripts have them" if adapter.file.flat else "names with dots, as diffusers has them"


@dataclass(frozen=True, slots=True)
class _Written:
    """How an adapter names the modules of a network: their beginning, and a name of blocks that shows whose names they are."""

    beginning: str
    blocks: str

    def __str__(self) -> str:
        return f"{self.beginning}{self.blocks}…"


def _written(adapter: Adapter) -> dict[Network, _Written]:
    """How an adapter names each network that it has factors of."""
    written: dict[Network, _Written] = {}
    for module in adapter.updates if adapter.file is not None else ():
        network, inner = network_of(module, flat=_names(adapter).flat)
        if not (network in written and written[network].blocks):
            whose = next((style[0] for style in (_ORIGINAL, _DIFFUSERS) if inner.startswith(style)), "")
            written[network] = _Written(module.removesuffix(inner), whose if network is DENOISER else "")
    return written


def _names(adapter: Adapter) -> FileNames:
    assert adapter.file is not None
    return adapter.file


def as_kernels(adapters: Sequence[Adapter], module: AdaptedModule, rank: int) -> Iterator[TensorSpec]:
    """The factors of a merged module, and DoRA's norms: those of a convolution as kernels, as its adapters have them."""
    factors = None if module.experts else adapters[module.owners[0]].updates[module.name]
    specs = adapters[module.owners[0]].checkpoint.specs
    kernels = [specs[name].shape[2:] for name in (factors.a, factors.b)] if factors is not None else []
    for spec, kernel in zip_longest(module.factor_specs(rank), kernels, fillvalue=()):
        assert isinstance(spec, TensorSpec)
        yield replace(spec, shape=(spec.shape[0], spec.shape[1] // math.prod(kernel), *kernel)) if kernel else spec


class SingleFile:
    """What a merge of single files writes, in place of a folder for PEFT."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        self.container = KOHYA if _names(adapters[0]).flat else DIFFUSERS_LORA

    def steps(self, draft: PlanDraft, module: AdaptedModule, rank: int, dtype: DType) -> Iterator[Step]:
        """Steps of the factors of a module, and of its alpha."""
        names = _names(self._adapters[module.owners[0]]).pairs[module.name]
        for spec, ending in zip(as_kernels(self._adapters, module, rank), (names.a, names.b), strict=True):
            out = TensorSpec(f"{module.name}{ending}", dtype, spec.shape)
            yield Step.copy(out, Read(PRODUCTS, spec.name), spec.dtype)
        if self.container == KOHYA or any(module.name in _names(self._adapters[i]).alphas for i in module.owners):
            alpha = TensorSpec(f"{module.name}{ALPHA}", DTYPES["F32"], ())
            yield Step(alpha, FILL, (), settings=draft.add_settings(Settings({"value": float(rank)}, ())))


def layer_of(module: str) -> str:
    """The layer of a module whose name has `_` for each dot, by the first number in it; "" without one.

    >>> layer_of("lora_te1_text_model_encoder_layers_11_mlp_fc1"), layer_of("lora_unet_conv_in")
    ('lora_te1_text_model_encoder_layers_11', '')
    """
    match = _FLAT_LAYER.match(module)
    return match[1] if match else ""


# ---- What PEFT calls the tensors of an adapter, and its adapter_config.json.


def factor_names(module: str, form: Form) -> tuple[str, str]:
    """The names of A and B of a module.

    >>> factor_names("lm_head", "linear")
    ('base_model.model.lm_head.lora_A.weight', 'base_model.model.lm_head.lora_B.weight')
    """
    inner = "lora_embedding_{}" if form == "embedding" else "lora_{}.weight"
    a, b = (f"{PREFIX}{module}.{inner.format(part)}" for part in "AB")
    return a, b


def norms_name(module: str) -> str:
    """The name of DoRA's norms of a module."""
    return f"{PREFIX}{module}.lora_magnitude_vector"


def whole_name(module: str) -> str:
    """The key of a module in PEFT's patterns, which are regular expressions of the ends of names: `^` takes the whole name.

    >>> whole_name("layers.0.q_proj"), whole_name("a+b")
    ('^layers.0.q_proj', '^a\\\\+b')
    """
    return "^" + re.sub(r"[^\w.-]", lambda character: re.escape(character[0]), module)


def targets(chosen: Collection[str], modules: Collection[str]) -> list[str]:
    """Names for `target_modules`, which match the ends of the names of modules: the last component where that is enough.

    >>> targets(["l.0.q", "l.1.q", "l.0.up"], ["l.0.q", "l.1.q", "l.0.up", "l.1.up"])
    ['l.0.up', 'q']
    """
    with_factors, last = set(chosen), {module: module.rpartition(".")[2] for module in modules}
    shared = {last[module] for module in modules if module not in with_factors and module in last}
    return sorted({module if (end := module.rpartition(".")[2]) in shared else end for module in with_factors})


_LAYER = ".base_layer"


@dataclass
class AdapterPlaces:
    """Where everything goes.

    modules     with factors: name → the target
    parameters  with factors: name → the target
    whole       modules that are saved: name → their tensors
    in_place    tensors of the model that are replaced
    """

    built: BuiltModel
    modules: dict[str, FactorTarget] = field(default_factory=dict)
    parameters: dict[str, FactorTarget] = field(default_factory=dict)
    whole: dict[str, tuple[str, ...]] = field(default_factory=dict)
    in_place: list[str] = field(default_factory=list)
    _of_module: dict[str, list[str]] = field(default_factory=dict)  # module → its parameters with factors

    def add_factors(self, target: FactorTarget) -> bool:
        """Find the place of factors; False if the model has none for them."""
        built = self.built
        if target.experts:
            key, module = target.module, target.module.rpartition(".")[0]
            swapped = "transposed" if module in built.rows else "linear"
            if built.unknown == "" and (key not in built.tensors or target.form != swapped):
                return False
            self.put_parameter(key, target)
            return True
        key = built.key(f"{target.module}{WEIGHT}")
        module, kind = key.removesuffix(WEIGHT), built.modules.get(key.removesuffix(WEIGHT))
        if not key.endswith(WEIGHT) or len(built.group(key)) > 2:
            return False
        if kind != target.form and (built.unknown == "" or kind == "other"):
            return False
        last = module.rpartition(".")[2]
        if last in built.refused or (last in built.redirected and kind != "linear"):
            return False
        if last in built.redirected:
            self.put_parameter(key, target)
        else:
            self.modules[module] = target
        return True

    def put_parameter(self, key: str, target: FactorTarget) -> None:
        """Give a parameter factors."""
        self.parameters[key] = target
        self._of_module.setdefault(key.rpartition(".")[0], []).append(key)

    def add_whole(self, differing: Iterable[str], known: Iterable[str], shared: Set[str] = frozenset()) -> None:
        """Find the places of tensors. Call it when all factors are placed.

        differing  tensors of the model that differ
        known   all that the fine-tune has
        shared  those of `differing` that other modules have too
        """
        built, has = self.built, set(known)
        taken = set[str]()
        for key in differing:
            module = key.rpartition(".")[0]
            if key in taken:
                continue
            tensors = built.inside.get(module, ())
            alone = module and module not in built.parents and self._wrapped(module) == module and has.issuperset(tensors)
            if alone and shared.isdisjoint(tensors) and self._only(module):
                self.whole[module] = tensors
                taken.update(tensors)
            else:
                self.in_place.append(key)
                taken.add(key)

    def put_whole(self, keys: Iterable[str], saved: Set[str]) -> None:
        """Save the tensors in modules of `saved` with these, and put the others in place."""
        for key in keys:
            parts = key.split(".")
            parents = (".".join(parts[:n]) for n in range(1, len(parts)))
            module = next((parent for parent in parents if parent in saved), "")
            if module:
                self.whole[module] = (*self.whole.get(module, ()), key)
            else:
                self.in_place.append(key)

    def _only(self, module: str) -> bool:
        """PEFT takes no other module for one to save: it compares the ends of names."""
        return sum(name.endswith(module) for name in self.built.modules) == 1

    def config(
        self,
        base: str,
        revision: str,
        ranks: Mapping[str, int],
        modules: Sequence[str],
        *,
        transposed: bool,
        causal: bool,
        rank: int | None = None,
        dora: bool = False,
    ) -> dict[str, Any]:
        """adapter_config.json. Every scaling is 1: alpha is the rank. `peft_version` tells the layout of experts.

        base        name of the base model, `revision` of it on the Hub
        ranks       of each module and parameter with factors
        modules     names for the modules with factors (`targets`)
        transposed  weights are [inputs, outputs]
        causal      the base is a causal language model
        rank        `r`, if not the largest
        dora        factors come with norms
        """
        largest = rank or max(ranks.values(), default=1)
        others = {module: rank for module, rank in ranks.items() if rank != largest}
        # PEFT looks for the rank of a parameter, readers of the factors of a matrix for that of its module.
        others |= {name.removesuffix(WEIGHT): rank for name, rank in others.items() if name in self.parameters}
        patterns = {whole_name(module): rank for module, rank in others.items()}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if causal else None,
            "base_model_name_or_path": base,
            "revision": revision or None,
            "inference_mode": True,
            "r": largest,
            "lora_alpha": largest,
            "rank_pattern": patterns,
            "alpha_pattern": patterns,
            "target_modules": list(modules),
            **({"target_parameters": list(self.parameters), "peft_version": KNOWS_ORDER} if self.parameters else {}),
            "modules_to_save": list(self.whole) or None,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": transposed,
            "use_rslora": False,
            "use_dora": dora,
            "init_lora_weights": True,
        }

    # ---- names in the file

    def name_of(self, module: str) -> str:
        """What factors of a module are of: the module, or its parameter `weight`."""
        return f"{module}{WEIGHT}" if f"{module}{WEIGHT}" in self.parameters else module

    def factors(self, name: str) -> tuple[str, str]:
        """The names of A and B of a module, or of a parameter.

        PEFT wraps a module once for each parameter, in their order: the first is the innermost.
        """
        if name in self.modules:
            return factor_names(self._wrapped(name, outer=True), self.modules[name].form)
        module = name.rpartition(".")[0]
        order = [key for key in self.built.inside[module] if key in self._of_module[module]]
        inner = len(order) - 1 - order.index(name)
        return factor_names(f"{self._wrapped(module, outer=True)}{_LAYER * inner}", "linear")

    def saved(self, key: str) -> str:
        """The name of a tensor that is saved whole."""
        module, dot, tensor = key.rpartition(".")
        if module in self.whole:
            return f"{PREFIX}{self._wrapped(module, outer=True)}.{tensor}"
        return f"{PREFIX}{self._wrapped(module)}{dot}{tensor}"

    def _wrapped(self, module: str, *, outer: bool = False) -> str:
        """The name of a module once PEFT has wrapped others. outer: of its outermost wrapper, not of the module in it."""
        parts, wrapped = module.split("."), ""
        for i, part in enumerate(parts):
            wrapped += f".{part}" if i else part
            name = ".".join(parts[: i + 1])
            if name != module or not outer:
                wrapped += _LAYER * (int(name in self.modules) + len(self._of_module.get(name, ())))
        return wrapped

    def target_modules(self) -> list[str]:
        """Names that no other module has. Raises Unsupported if there are none."""
        names = targets([*self.modules], [*self.built.modules])
        others = matched([*self.built.modules], names) - set(self.modules)
        if others:
            what = f"PEFT would take {min(others)} for a module with factors: its name ends like that of another"
            raise Unsupported(what, fix="leave one of them out with --exclude")
        return names
