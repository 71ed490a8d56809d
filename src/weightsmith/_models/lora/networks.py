"""The networks of a pipeline, in files of LoRA factors and in models: a text encoder is not given the update of another one.

Files begin the names of modules with the network: `lora_te2_` in kohya's, `text_encoder_2.` in diffusers'. A model may be one
of the networks, in a folder of its own, or hold several in one file, whose names then begin with it too.

A network that the model does not have is left out, with a warning, as other loaders of such files do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._models.structure.projections import SubMatrix

Specs = Mapping[str, TensorSpec]
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Network:
    """One network: how names begin that are of it.

    title   for messages
    flat    in kohya's files, whose names of modules have `_` for each dot
    dotted  in files of diffusers, ComfyUI and others
    stored  in files of models that hold several networks, and of a pipeline: the folder
    folder  of a diffusers pipeline that holds it
    """

    title: str
    flat: tuple[str, ...] = ()
    dotted: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    folder: str = ""


DENOISER = Network(
    "the diffusion model",
    ("lora_unet_", "lora_transformer_", "lora_prior_", "lycoris_"),
    ("unet.", "transformer.", "prior.", "diffusion_model.", "model.diffusion_model."),
    ("model.diffusion_model.", "unet/", "transformer/", "prior/"),
)
NETWORKS = (
    DENOISER,
    Network("the second diffusion model", (), ("transformer_2.", "unet_2."), ("transformer_2/", "unet_2/"), "transformer_2"),
    Network(
        "text encoder 1",
        ("lora_te_", "lora_te1_"),
        ("text_encoder.", "text_encoders.clip_l.transformer."),
        (
            "cond_stage_model.transformer.",
            "cond_stage_model.model.",
            "conditioner.embedders.0.transformer.",
            "text_encoders.clip_l.transformer.",
            "text_encoder/",
        ),
        "text_encoder",
    ),
    Network(
        "text encoder 2",
        ("lora_te2_",),
        ("text_encoder_2.", "text_encoders.clip_g.transformer."),
        (
            "conditioner.embedders.1.model.",
            "conditioner.embedders.1.transformer.",
            "text_encoders.clip_g.transformer.",
            "text_encoder_2/",
        ),
        "text_encoder_2",
    ),
    Network(
        "text encoder 3",
        ("lora_te3_",),
        ("text_encoder_3.", "text_encoders.t5xxl.transformer."),
        ("text_encoders.t5xxl.transformer.", "text_encoder_3/"),
        "text_encoder_3",
    ),
)
TEXT_ENCODER_2, T5 = NETWORKS[3:]
_T5_BLOCKS = ("encoder.block.", "encoder_block_")
DENOISER_BLOCKS = re.compile(
    r"(?:(?:single_)?transformer|double|single|joint)_blocks[._]\d|blocks[._]\d+[._](?:(?:self|cross)_attn|attn[12]|ffn)[._]"
)
"""How names of modules in blocks of a diffusion transformer begin, without the network."""
PUT_PREFIX = "begin names with transformer. (diffusers) or diffusion_model. (ComfyUI)"
UNKNOWN = Network("the model", ("lora_llm_", "lora_"))
"""What a name is of that begins with no network."""


def network_of(module: str, *, flat: bool) -> tuple[Network, str]:
    """The network of a module in a file of factors, and its name there.

    >>> [each[1] for each in map(lambda name: network_of(name, flat=True), ("lora_te1_text_model_q", "lora_llm_layers_0_q"))]
    ['text_model_q', 'layers_0_q']
    """
    for network in (*NETWORKS, UNKNOWN):
        for beginning in network.flat if flat else network.dotted:
            if module.startswith(beginning):
                inner = module.removeprefix(beginning)
                return _by_names(network, inner), inner
    return UNKNOWN, module


def _by_names(network: Network, inner: str) -> Network:
    """The network by its modules' names, too: Flux's T5 is `text_encoder_2` in diffusers, and the third one elsewhere."""
    return T5 if network is TEXT_ENCODER_2 and inner.startswith(_T5_BLOCKS) else network


@dataclass(frozen=True, slots=True)
class NetworkPlaces:
    """Where the modules of a file are in a model.

    names  module → the tensor of its weight; or a name that the model does not have
    parts  of those names, the ones of matrices in a tensor that holds several → the tensor, and which part of it
    notes  networks that are left out
    """

    names: Mapping[str, str]
    parts: Mapping[str, tuple[str, SubMatrix]]
    notes: tuple[Finding, ...]


def find_places(modules: Mapping[str, Shape], base: Specs, ref: str, name: str, *, flat: bool) -> NetworkPlaces:
    """Find the modules of a file in a model.

    modules    → outputs and inputs, of convolutions with their kernel
    ref, name  of the file and of the model, as the user named them

    Raises Unsupported where two networks of the file fit one of the model.
    """
    inside = {module: network_of(module, flat=flat) for module in modules}
    modules_of_network = grouped((network, module) for module, (network, _) in inside.items())
    stored = _stored(base)
    pools = {network: _Pool(base, tensors, flat=flat) for network, tensors in stored.items()}
    if not stored:
        pool = _Pool(base, {tensor: tensor for tensor in base}, flat=flat)
        chosen = _choose(modules, inside, modules_of_network, pool, ref, name)
        pools = {chosen: pool}
    elif UNKNOWN in modules_of_network:
        pools[UNKNOWN] = _Pool(base, {tensor: tensor for tensor in base}, flat=flat)
    missing = [network for network in modules_of_network if network not in pools]
    notes = tuple(_left_out(network, len(modules_of_network[network]), ref, name) for network in missing)
    names, parts = {}, dict[str, tuple[str, SubMatrix]]()
    for module, (network, tensors) in inside.items():
        if network in pools:
            names[module] = pools[network].find(tensors) or f"{tensors}.weight"
            parts |= pools[network].part(names[module])
    return NetworkPlaces(names, parts, notes)


def _left_out(network: Network, modules: int, ref: str, name: str) -> Finding:
    what = f"its updates of {count(modules, 'module')} of {network.title} are left out: {name} does not hold that"
    return Finding(what, ref, fix=f"merge it into the model of {network.title} as well")


def _stored(base: Specs) -> dict[Network, dict[str, str]]:
    """The tensors of each network of a model that holds several, by their names in the network; else {}."""
    tensors_of_network: dict[Network, dict[str, str]] = {}
    beginnings = [(beginning, network) for network in NETWORKS for beginning in network.stored]
    for tensor in base:
        for beginning, network in beginnings:
            if tensor.startswith(beginning):
                inner = tensor.removeprefix(beginning)
                tensors_of_network.setdefault(_by_names(network, inner), {})[inner] = tensor
    return tensors_of_network


def _choose(
    modules: Mapping[str, Shape],
    inside: Mapping[str, tuple[Network, str]],
    modules_of_network: Mapping[Network, Sequence[str]],
    pool: _Pool,
    ref: str,
    name: str,
) -> Network:
    """Which network of a file the model is: the only one with such names and shapes, or that which its folder is named for."""
    known = {network: [m for m in named if pool.find(inside[m][1])] for network, named in modules_of_network.items()}
    fitting = [network for network, named in known.items() if named]
    if len(fitting) < 2:
        return (fitting or list(modules_of_network))[0]
    whole = [n for n in fitting if all(pool.shape(inside[m][1]) == modules[m] for m in modules_of_network[n])]
    if len(whole) == 1:
        return whole[0]
    folder = PurePath(name).name
    if by_name := [network for network in whole or fitting if network.folder == folder]:
        return by_name[0]
    titles = " and ".join(network.title for network in fitting)
    what = f"it has updates of {titles}, and {name} may be any of them"
    fix = "name the folder of the network as diffusers does: text_encoder, text_encoder_2 or text_encoder_3"
    raise Unsupported(what, where=ref, fix=fix)


_INNER = 4  # components of a name that may be missing in a file


class _Pool:
    """The matrices of one network, by the names that files have for them."""

    def __init__(self, base: Specs, tensors: Mapping[str, str], *, flat: bool) -> None:
        """tensors: name in the network → tensor of the model."""
        self._flat, self._base = flat, base
        self._parts: dict[str, tuple[str, SubMatrix]] = {}
        known = {module.removesuffix(".weight"): tensor for module, tensor in tensors.items()}
        known |= self._open_clip(tensors)
        self._whole = {self._written(module): tensor for module, tensor in known.items()}
        ends = ((self._written(end), tensor) for module, tensor in known.items() for end in _ends(module))
        self._ends = {end: fitting[0] for end, fitting in grouped(ends).items() if len(fitting) == 1}

    def find(self, module: str) -> str:
        """The tensor of a module's weight, or the name of a part of one; "" for none, and for a name that fits several."""
        names = [module, module.removeprefix("text_model_")] if self._flat else _spellings(module)
        for name in names:
            if tensor := self._whole.get(name) or self._ends.get(name):
                return tensor
        return ""

    def shape(self, module: str) -> Shape:
        """Rows, and all else, of the weight of a module; zeros if there is none."""
        name = self.find(module)
        if name in self._parts:
            rows, cols = self._parts[name][1].shape
            return rows, cols
        spec = self._base.get(name)
        return (spec.shape[0], spec.size // spec.shape[0]) if spec is not None and spec.size else (0, 0)

    def part(self, name: str) -> dict[str, tuple[str, SubMatrix]]:
        """The part of a tensor that a name stands for, under it; {} for a whole tensor."""
        return {name: self._parts[name]} if name in self._parts else {}

    def _written(self, name: str) -> str:
        return name.replace(".", "_") if self._flat else name

    def _open_clip(self, tensors: Mapping[str, str]) -> dict[str, str]:
        """The matrices of OpenCLIP's text encoder, by the names that transformers has for them, as files of factors do."""
        tensor_of_module: dict[str, str] = {}
        for stored_name, tensor in tensors.items():
            before, block, rest = stored_name.partition(".resblocks." if ".resblocks." in stored_name else "resblocks.")
            layer, _, inner = rest.partition(".")
            if not block or not layer.isdigit() or before not in ("", "transformer", "text_model.transformer"):
                continue
            home, spec = f"text_model.encoder.layers.{layer}", self._base[tensor]
            if inner in _OPEN_CLIP:
                tensor_of_module[f"{home}.{_OPEN_CLIP[inner]}"] = tensor
            elif inner == "attn.in_proj_weight" and len(spec.shape) == 2 and spec.shape[0] % 3 == 0:
                rows, cols = spec.shape[0] // 3, spec.shape[1]
                for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
                    name = f"{tensor}[{part}]"
                    self._parts[name] = tensor, SubMatrix(name, i * rows * cols, (rows, cols))
                    tensor_of_module[f"{home}.self_attn.{part}"] = name
        return tensor_of_module


_OPEN_CLIP = {
    "attn.out_proj.weight": "self_attn.out_proj",
    "mlp.c_fc.weight": "mlp.fc1",
    "mlp.c_proj.weight": "mlp.fc2",
}
"""Matrix of a layer of OpenCLIP's text encoder → what transformers calls the module."""

_ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
"""What diffusers called the projections of text encoders until 2023 → their names in transformers."""


def _ends(name: str) -> Iterator[str]:
    """What is left of a name without the first components."""
    for _ in range(_INNER):
        _, dot, name = name.partition(".")
        if not dot:
            return
        yield name


def _spellings(module: str) -> Iterable[str]:
    """What a module with dots in its name may be called in a model: diffusers named projections otherwise until 2023.

    transformers saves text encoders of CLIP without `text_model` since version 5.
    """
    plain = module.replace(".processor.", ".")
    home, dot, last = plain.rpartition(".")
    yield module
    yield plain
    if last == "to_out":
        yield f"{plain}.0"
    if last in _ATTENTION:
        yield f"{home}{dot}{_ATTENTION[last]}"
    if plain.startswith("text_model."):
        yield from _spellings(plain.removeprefix("text_model."))
