"""Falcon, whose queries, keys and values are one tensor, and Falcon-H1, whose layers attend and have Mamba 2 side by side."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey, head_dim
from weightsmith._models.formats.gguf.base.mamba import INNER, MAMBA_SHAPES, mamba_bare, mamba_flat, mamba_layer, need_no_limit
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, LAYER_SHAPES, LAYERS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.formats.gguf.cuts import HeadOrder

if TYPE_CHECKING:
    from weightsmith._models.formats.gguf.writing import Multiplied

_INNER, _HEADS = "mamba_d_ssm", "mamba_n_heads"
_MLP, _MAMBA = "mlp_multipliers", "ssm_multipliers"


def _inner(config: GgufConfig) -> int:
    return config.count(_INNER)


def _several(config: GgufConfig, name: str, count: int) -> list[float]:
    """A list of multipliers. Raises FormatError."""
    numbers = config.numbers(name, {name: config.get(name, [1.0] * count)}).tolist()
    if len(numbers) != count:
        raise config.wrong(name, config.get(name), f"not {count} numbers")
    return [float(number) for number in config.get(name, numbers)]


class FalconH1(GgufArchitecture):
    """Falcon-H1."""

    name = "falcon-h1"
    class_name = "FalconH1ForCausalLM"
    model_types = ("falcon_h1",)
    layer = {
        **{**ATTENTION, **mamba_layer("mamba")},
        **{f"ffn_{role}": f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
    }
    bare: ClassVar[Mapping[str, str]] = {**mamba_bare("mamba"), "ffn_norm": "pre_ff_layernorm.weight"}
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    shapes = {**LAYER_SHAPES, **MAMBA_SHAPES}
    setting_names: ClassVar[Mapping[str, str]] = {INNER: _INNER}
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("ssm.conv_kernel", "mamba_d_conv"),
        GgufKey("ssm.state_size", "mamba_d_state"),
        GgufKey("ssm.group_count", "mamba_n_groups"),
        GgufKey("ssm.time_step_rank", _HEADS),
        GgufKey(INNER, _INNER),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        **{"attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False},
        "mamba_conv_bias": True,
    }
    multipliers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{"token_embd": ("embedding_multiplier",), "output": ("lm_head_multiplier",)},
        **{"attn_q": ("attention_in_multiplier",), "attn_k": ("key_multiplier", "attention_in_multiplier")},
        **{"attn_v": ("attention_in_multiplier",), "attn_output": ("attention_out_multiplier",)},
        **{"ssm_in": ("ssm_in_multiplier",), "ssm_out": ("ssm_out_multiplier",)},
    }
    flat = mamba_flat(_inner, "mamba_n_groups")

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The width of Mamba follows from that of the model where config.json has null for it."""
        expand, width = config.get("mamba_expand", 2), config.get("hidden_size")
        if config.get(_INNER, 0) is not None or not isinstance(expand, int) or not isinstance(width, int):
            return config
        return {**config, _INNER: expand * width}

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_no_limit(config)
        if config.get("mamba_rms_norm", False):
            config.need("mamba_norm_before_gate", config.get("mamba_norm_before_gate", True), False)
        if config.get("mamba_d_head", "auto") != "auto":
            config.need(f"{_HEADS} * mamba_d_head", config.count(_HEADS) * config.count("mamba_d_head"), _inner(config))
        if config.get("tie_word_embeddings"):  # the head has the multiplier of the embedding then
            embedding, head = (config.number(name, 1.0) for name in ("embedding_multiplier", "lm_head_multiplier"))
            config.need("lm_head_multiplier", head, embedding)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32("vocab_size", config.count("vocab_size"))

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        inner, heads = config[_INNER], config[_HEADS]
        if inner % heads:
            raise values.wrong(INNER, inner, f"not a multiple of {heads:,} heads")
        config["mamba_d_head"] = inner // heads
        config["mamba_rms_norm"], config["mamba_norm_before_gate"] = "blk.0.ssm_norm.weight" in contents.shapes, False
        config |= {name: 1.0 for names in self.multipliers.values() for name in names}  # the weights have them
        config |= {_MLP: [1.0] * 2, _MAMBA: [1.0] * 5}

    # ---- tensors

    def times(self, name: str, config: GgufConfig) -> tuple[Multiplied, ...]:
        """As in `GgufArchitecture`.

        >>> multipliers = {"ssm_in_multiplier": 0.5, "ssm_multipliers": [1.0, 0.5, 0.25, 2.0, 4.0]}
        >>> sizes = {"mamba_d_ssm": 32, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_n_heads": 2}
        >>> FalconH1().times("blk.0.ssm_in.weight", GgufConfig({**multipliers, **sizes}))
        (((0, 0.5),), ((32, 1.0), (32, 0.5), (4, 0.25), (4, 2.0), (2, 4.0)))
        """
        module = name.removesuffix(".weight").rpartition(".")[2]
        bands: Multiplied = ()
        if module in ("ffn_gate", "ffn_down"):
            bands = ((0, _several(config, _MLP, 2)[module == "ffn_down"]),)
        elif module == "ssm_in":
            inner, states = _inner(config), config.count("mamba_n_groups") * config.count("mamba_d_state")
            bands = tuple(zip((inner, inner, states, states, config.count(_HEADS)), _several(config, _MAMBA, 5), strict=True))
        return (*super().times(name, config), *([bands] if any(by != 1 for _, by in bands) else ()))


_KV, _NEW, _NORMS = "num_kv_heads", "new_decoder_architecture", "num_ln_in_parallel_attn"
_SECOND_NORM = "attn_norm_2"


def _norms(config: Mapping[str, Any]) -> int:
    """The norms of a layer."""
    norms = config.get(_NORMS)
    return (2 if config.get(_NEW) else 1) if norms is None or not config.get(_NEW) else norms


class Falcon(GgufArchitecture):
    """Falcon 7B and 11B, of one norm a layer."""

    name = "falcon"
    class_name = "FalconForCausalLM"
    model_types = ("falcon",)
    square = True
    layer: ClassVar[Mapping[str, str]] = {
        **{"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        **{"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h", "attn_norm": "input_layernorm"},
    }
    prefixes = (("transformer.h.", LAYERS), ("transformer.", "model."))
    ends = {"token_embd": "model.word_embeddings", "output_norm": "model.ln_f", "output": "lm_head"}
    sizes = {
        **GgufArchitecture.sizes,
        **{"feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": _KV},
    }
    eps = ("attention.layer_norm_epsilon", "layer_norm_epsilon")
    fixed: ClassVar[Mapping[str, Any]] = {"alibi": False, "bias": False, "activation": "gelu"}
    norms: ClassVar[int] = 1

    def fits(self, config: Mapping[str, Any]) -> bool:
        return _norms(config) == self.norms

    def holds(self, tensors: Container[str]) -> bool:
        return (f"blk.0.{_SECOND_NORM}.weight" in tensors) == (self.norms == 2)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The width of MLPs and the heads of keys, which follow from other settings as in transformers."""
        width, heads = config.get("hidden_size", 4544), config.get("num_attention_heads", 71)
        shared = not config.get(_NEW) and config.get("multi_query", True)
        kv_heads = 1 if shared else config.get(_KV, heads) if config.get(_NEW) else heads
        wide = config.get("ffn_hidden_size")
        return {**config, _KV: kv_heads, "ffn_hidden_size": 4 * width if wide is None and isinstance(width, int) else wide}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        if not config.get(_NEW, False):
            config.need("parallel_attn", config.get("parallel_attn", True), True)
        heads, kv_heads = config.count("num_attention_heads"), config.count(_KV)
        if heads % kv_heads:
            raise config.wrong("num_attention_heads", heads, f"not a multiple of {_KV}, {kv_heads:,}")

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put("tensor_data_layout", "str", "jploski")

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default  # config.json does not say it

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config[_NEW] = self.norms == 2 or config[_KV] > 1
        config["multi_query"] = True
        if config[_NEW]:
            config[_NORMS] = self.norms

    def order(self, name: str, config: GgufConfig) -> HeadOrder | None:
        """The Hub has the queries of the first key head, this key and its value first; llama.cpp has all queries first.

        >>> config = GgufConfig({"num_attention_heads": 4, "num_kv_heads": 2, "hidden_size": 4})
        >>> Falcon().order("blk.0.attn_qkv.weight", config).places.tolist()
        [0, 1, 4, 5, 2, 6, 3, 7]
        """
        if ".attn_qkv." not in name or config.count(_KV) == 1:
            return None
        heads, kv_heads = config.count("num_attention_heads"), config.count(_KV)
        parts, settings, together = "heads of q, k and v", f"num_attention_heads and {_KV}", heads // kv_heads
        return HeadOrder(0, 0, kv_heads, heads + 2 * kv_heads, head_dim(config), parts, settings, together)


class Falcon40B(Falcon):
    """Falcon 40B and 180B, whose attention and MLP have a norm each."""

    layer = {**Falcon.layer, "attn_norm": "ln_mlp", _SECOND_NORM: "ln_attn"}
    norms = 2


FAMILY = GgufFamily((FalconH1(), Falcon40B(), Falcon()))
