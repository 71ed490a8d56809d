"""Reads models with Megatron-Core's names under the Hub's names, if the model's config.json is beside the checkpoint.

decoder.layers.3.self_attention.linear_qkv.weight  [groups · (heads / groups + 2) · head_dim, hidden]: of each group of heads
                                                   its queries, then key and value
decoder.layers.3.mlp.linear_fc1.weight             gate above up
embedding.word_embeddings.weight                   with rows of padding at the end

Distributed checkpoints (torch_dist) have one tensor of all layers, `decoder.layers.self_attention.linear_qkv.weight`, and of
all experts; where layers differ, they are numbered. Norms are inside the linear layer after them, or modules of their own.

config.json says how many heads there are, and which model it is. Without one, or for a model that is not in `_MODELS`, tensors
keep Megatron's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import MAX_STACKED, TensorSpec
from weightsmith._base.text import count
from weightsmith._models.formats.training.megatron import MegatronTensors
from weightsmith._models.sources.composed import PartTensors, TensorPart
from weightsmith._models.structure.configs import whole_number
from weightsmith._models.structure.projections import MIXTRAL
from weightsmith.abc.stored import Config, Specs, Wrapped
from weightsmith.abc.tensors import Tensors

_EMBEDDING, _NORM, _HEAD = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,5})\.)?(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d{1,5})\.|experts\.(?:(\d{1,5})\.)?)?(linear_fc[12])\.weight(\d{1,5})?"
)
_MODELS: Mapping[str, str] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ""),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), "mlp"),
    "mixtral": "block_sparse_moe",
}
"""`model_type` → the module of the router and the experts on the Hub; "" for a model without."""
_WAY_OUT = "Convert it with Megatron-Bridge (AutoBridge.export_ckpt), or take config.json away to read it in Megatron's names."
_MAX_LAYERS = 10_000
_MAX_PARTS = 1 << 18
"""Groups of heads in all layers, and experts in all layers: an empty tensor may claim any number."""
_SHOWN = 8


def is_megatron(specs: Specs) -> bool:
    """Whether tensors have Megatron-Core's names. Looks only at two names."""
    return _EMBEDDING in specs and _NORM in specs


def in_hub_names(source: Tensors, config: Config | None, where: str) -> Wrapped:
    """The tensors under the Hub's names, if config.json is that of a known model; else as they are stored, with a warning.

    Raises FormatError for shapes that do not fit config.json, Unsupported for tensors whose place in the model is not known.
    """
    model_type = (config or {}).get("model_type")
    if config is None or model_type not in _MODELS:
        if config is None:
            return Wrapped(source, config)
        what = f"the names are Megatron's, and how a model of the type {show(model_type)} is named on the Hub is not known"
        return Wrapped(source, config, (Finding(f"{what}: they stay", where),))
    if isinstance(source, MegatronTensors) and source.unlike_hub:
        what = f"the run had {' and '.join(source.unlike_hub)}, with which Megatron stores other numbers than the Hub's models"
        raise Unsupported(what, where=where, fix=_WAY_OUT)
    parts, strange = dict[str, TensorPart](), list[str]()
    converter = _Converter(source.specs, config, where)
    for name, spec in source.specs.items():
        named = list(converter.named(name, spec))
        if not named and not name.startswith("rotary_pos_emb."):
            strange.append(name)
        for hub_name, part in named:
            if hub_name in parts:
                what = f"two tensors are {show(hub_name)}: {show(parts[hub_name].stored)} and {show(name)}"
                raise FormatError(what, where=where, fix=_WAY_OUT)
            parts[hub_name] = part
    if strange:
        what = (
            f"{count(len(strange), 'tensor')} with Megatron's names that a model of the type {show(model_type)} does not have"
        )
        raise Unsupported(what, where=where, details=[show(name) for name in strange[:_SHOWN]], fix=_WAY_OUT)
    converter.check_layers()
    note = Finding("the tensors are read under the Hub's names: config.json says which model Megatron has trained", where)
    return Wrapped(PartTensors(source, parts, where), config, (note,))


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of one layer or one expert inside a stored tensor. first: index of its first element"""

    stored: str
    shape: tuple[int, ...]
    first: int = 0

    @property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    def whole(self) -> TensorPart:
        return TensorPart(self.stored, self.shape, ((self.first, math.prod(self.shape)),))

    def rows(self, blocks: list[tuple[int, int]]) -> TensorPart:
        """Runs of rows. blocks: (first row, number of rows) of each"""
        shape = (sum(n for _, n in blocks), *self.shape[1:])
        return TensorPart(self.stored, shape, tuple((self.first + first * self.row, n * self.row) for first, n in blocks))


Named = Iterator[tuple[str, TensorPart]]


class _Converter:
    """Names tensors as the Hub does."""

    def __init__(self, specs: Specs, config: Config, where: str) -> None:
        self._where, self._config = where, config
        self._model_type = str(config["model_type"])
        self._experts = _MODELS[self._model_type]
        self._layers = self._count("num_hidden_layers")
        if self._layers > _MAX_LAYERS:
            raise FormatError(f"num_hidden_layers is {self._layers:,}", where=where, fix="Repair config.json.")
        heads = self._count("num_attention_heads")
        self._groups = self._count("num_key_value_heads", heads)
        if heads % self._groups or self._layers * self._groups > _MAX_PARTS:
            what = f"num_attention_heads is {heads:,}, and num_key_value_heads {self._groups:,}"
            raise FormatError(what, where=where, fix="Repair config.json.")
        self._head_dim = self._count("head_dim", self._count("hidden_size") // heads)
        self._queries = heads // self._groups
        self._vocabulary = self._count("vocab_size")
        self._seen: set[int] = set()

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        number = whole_number(default if value is None else value)
        if number is None or number < 1:
            raise FormatError(f"{key} is {show(value)}, not a positive integer", where=self._where, fix="Repair config.json.")
        return number

    def check_layers(self) -> None:
        """Raise FormatError unless there are tensors of every layer."""
        if self._seen != set(range(self._layers)):
            what = f"tensors of {len(self._seen):,} layers, and num_hidden_layers is {self._layers:,}"
            raise FormatError(what, where=self._where, fix="Name the folder of the whole model, with its own config.json.")

    def named(self, name: str, spec: TensorSpec) -> Named:
        """The tensors of the Hub's model in a stored one; none if that is not known."""
        if name in (_EMBEDDING, _HEAD) and len(spec.shape) == 2:
            if spec.shape[0] < self._vocabulary:
                self._refuse(name, spec, f"vocab_size is {self._vocabulary:,}")
            hub_name = "model.embed_tokens.weight" if name == _EMBEDDING else "lm_head.weight"
            yield hub_name, _Slot(name, spec.shape).rows([(0, self._vocabulary)])  # padding follows
        elif name == _NORM:
            yield "model.norm.weight", _Slot(name, spec.shape).whole()
        elif match := _LAYER.fullmatch(name):
            for layer, slot in self._slots(name, spec.shape, match[1]):
                self._seen.add(layer)
                yield from self._of_layer(f"model.layers.{layer}", match[2], slot)

    def _slots(self, name: str, shape: tuple[int, ...], number: str | None) -> Iterator[tuple[int, _Slot]]:
        """The layers that a tensor has: the one that its name numbers, or all. number: the one in its name"""
        if number is not None:
            yield int(number), _Slot(name, shape)
            return
        if not shape or shape[0] != self._layers:
            what = f"tensor {show(name)} is {list(shape)}, and num_hidden_layers is {self._layers:,}"
            raise FormatError(what, where=self._where, fix=_WAY_OUT)
        size = math.prod(shape[1:])
        yield from ((layer, _Slot(name, shape[1:], layer * size)) for layer in range(self._layers))

    def _of_layer(self, layer: str, rest: str, slot: _Slot) -> Named:
        plain: Mapping[str, str] = {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "mlp.linear_fc2.bias": "mlp.down_proj.bias",
        }
        if self._experts:
            shared = "mlp.shared_expert"
            plain = {
                **plain,
                "mlp.router.weight": f"{self._experts}.gate.weight",
                "mlp.shared_experts.linear_fc2.weight": f"{shared}.down_proj.weight",
                "mlp.shared_experts.gate_weight": f"{shared}_gate.weight",
            }
        halves = {"mlp.linear_fc1.weight": ("mlp", "weight"), "mlp.linear_fc1.bias": ("mlp", "bias")}
        if self._experts:
            halves["mlp.shared_experts.linear_fc1.weight"] = ("mlp.shared_expert", "weight")
        if rest in plain:
            yield f"{layer}.{plain[rest]}", slot.whole()
        elif rest in halves:
            module, leaf = halves[rest]
            key = "shared_expert_intermediate_size" if module.endswith("shared_expert") else "intermediate_size"
            yield from self._gate_and_up(lambda part: f"{layer}.{module}.{part}.{leaf}", slot, key)
        elif rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            yield from self._attention(f"{layer}.self_attn", rest.rpartition(".")[2], slot)
        elif self._experts and (match := _EXPERT.fullmatch(rest)):
            yield from self._of_experts(f"{layer}.{self._experts}.experts", match, slot)

    def _attention(self, module: str, leaf: str, slot: _Slot) -> Named:
        """Query, key and value, which are stored group by group."""
        band = (self._queries + 2) * self._head_dim
        if slot.shape[:1] != (self._groups * band,) or len(slot.shape) != (2 if leaf == "weight" else 1):
            what = (
                f"tensor {show(slot.stored)} is {list(slot.shape)} in each layer, and config.json says {self._groups:,} groups"
            )
            raise FormatError(f"{what} of {band:,} rows", where=self._where, fix="Name the config.json of this model.")
        sizes = (self._queries * self._head_dim, self._head_dim, self._head_dim)
        first = 0
        for part, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            yield f"{module}.{part}.{leaf}", slot.rows([(group * band + first, size) for group in range(self._groups)])
            first += size

    def _gate_and_up(self, name: Callable[[str], str], slot: _Slot, *keys: str) -> Named:
        """keys: of config.json; the first that it has gives the number of rows of gate, and of up"""
        half = self._count(next((key for key in keys if self._config.get(key) is not None), keys[-1]))
        if slot.shape[:1] != (2 * half,):
            what = f"tensor {show(slot.stored)} is {list(slot.shape)} in each layer, not a gate and an up of {half:,} rows each"
            raise FormatError(what, where=self._where, fix=_WAY_OUT)
        for i, part in enumerate(("gate_proj", "up_proj")):
            yield name(part), slot.rows([(i * half, half)])

    def _of_experts(self, module: str, match: re.Match[str], slot: _Slot) -> Named:
        """The matrices of an expert, or of all in one tensor [experts, rows, columns]."""
        number = match[1] or match[2] or match[4]
        experts = [(int(number), slot)] if number else []
        if not number:
            if len(slot.shape) != 3 or not 0 < slot.shape[0] <= min(MAX_STACKED, _MAX_PARTS // self._layers):
                what = f"tensor {show(slot.stored)} is {list(slot.shape)} in each layer, not matrices of experts"
                raise FormatError(what, where=self._where, fix=_WAY_OUT)
            size = math.prod(slot.shape[1:])
            experts = [(e, _Slot(slot.stored, slot.shape[1:], slot.first + e * size)) for e in range(slot.shape[0])]
        names = MIXTRAL if self._model_type == "mixtral" else {}
        for expert, matrix in experts:
            ends = {part: f"{module}.{expert}.{names.get(part, part)}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
            if match[3] == "linear_fc1":
                yield from self._gate_and_up(ends.__getitem__, matrix, "moe_intermediate_size", "intermediate_size")
            else:
                yield ends["down_proj"], matrix.whole()

    def _refuse(self, name: str, spec: TensorSpec, why: str) -> None:
        what = f"tensor {show(name)} is {list(spec.shape)}, and {why}"
        raise FormatError(what, where=self._where, fix="Name the config.json of this model.")
