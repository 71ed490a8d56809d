"""Merges of adapters in single files: all must name their modules in one way, and the result is named as they are.

The factors of a module are named as in the first file that has it. kohya's files have an alpha for each module: it is the rank,
so that B @ A is what is added. Without an alpha, all readers take 1 for the scaling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightsmith._base.errors import Finding, MismatchError
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._features.adapters.cores import Adapted
from weightsmith._files.containers import DIFFUSERS_LORA, KOHYA
from weightsmith._models.lora import Adapter
from weightsmith._models.lora.adapter import FileNames
from weightsmith._models.lora.forms import ALPHA
from weightsmith._models.lora.networks import DENOISER, Network, network_of
from weightsmith._plans import CAST, COPY, FILL, PRODUCTS, PlanDraft, Read, Settings, Step

_FLAT_LAYER = re.compile(r"(.*?_\d+)_")

_ORIGINAL = ("input_blocks", "middle_block", "output_blocks", "double_blocks", "single_blocks", "joint_blocks")
_DIFFUSERS = ("down_blocks", "mid_block", "up_blocks", "transformer_blocks", "single_transformer_blocks")
"""What the modules of a diffusion model begin with: in the model's first implementation, and in diffusers."""

_CONVERT = "convert one of them first, such as with the scripts of kohya or diffusers"


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


class SingleFile:
    """What a merge of single files writes, in place of a folder for PEFT."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        self.container = KOHYA if _names(adapters[0]).flat else DIFFUSERS_LORA

    def steps(self, draft: PlanDraft, module: Adapted, rank: int, dtype: DType) -> Iterator[Step]:
        """Steps of the factors of a module, and of its alpha."""
        adapter = self._adapters[module.owners[0]]
        names, factors, specs = _names(adapter).pairs[module.name], adapter.updates[module.name], adapter.checkpoint.specs
        kernels = specs[factors.a].shape[2:], specs[factors.b].shape[2:]
        for spec, ending, kernel in zip(module.factor_specs(rank), (names.a, names.b), kernels, strict=True):
            rows, cols = spec.shape
            shape = (rows, cols // math.prod(kernel), *kernel)
            reads = (Read(PRODUCTS, spec.name),)
            yield Step(TensorSpec(f"{module.name}{ending}", dtype, shape), COPY if dtype.name == "F32" else CAST, reads)
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
