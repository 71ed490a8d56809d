"""Small quantised checkpoints, made from seeds, each with its plain weights by an independent decoder in numpy.

`oracles.py` gives the same checkpoints to other programs, so this module imports nothing but numpy and ml_dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)]


@dataclass(frozen=True)
class Case:
    """A quantised checkpoint.

    tensors  as stored
    config   config.json
    plain    the decoded weights, float32 [outputs, inputs]
    kept     numpy dtype in which loaders compute
    """

    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any]
    plain: Mapping[str, np.ndarray]
    kept: np.dtype[Any]


def config_of(entry: Mapping[str, Any], dtype: str = "float16", key: str = "quantization_config") -> dict[str, Any]:
    return {"model_type": "llama", "dtype": dtype, key: dict(entry)}


# ---- bitsandbytes


def bnb4(
    shape: tuple[int, int],
    *,
    kind: str = "nf4",
    block: int = 64,
    nested: bool = False,
    dtype: str = "bfloat16",
    storage: Any = np.uint8,
    name: str = "q.weight",
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    n = shape[0] * shape[1]
    codes = rng.integers(0, 16, n + n % 2)
    codes[n:] = 0
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)
    table = np.array(NF4 if kind == "nf4" else [*FP4, *(-v for v in FP4)], np.float32)
    blocks = -(-n // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(shape)}
    tensors = {name: packed.view(storage)[:, None], f"{name}.quant_map": table}
    absmax = rng.uniform(0.01, 0.2, blocks).astype(np.float32)
    if nested:
        eight, width, offset = rng.integers(0, 256, blocks).astype(np.uint8), 256, 0.0625
        tensors[f"{name}.absmax"] = eight
        tensors[f"{name}.nested_quant_map"] = values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        tensors[f"{name}.nested_absmax"] = tops = rng.uniform(0.01, 0.2, -(-blocks // width)).astype(np.float32)
        state |= {"nested_blocksize": width, "nested_dtype": "float32", "nested_offset": offset}
        absmax = values[eight] * np.repeat(tops, width)[:blocks] + np.float32(offset)
    else:
        tensors[f"{name}.absmax"] = absmax
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    plain = (table[codes[:n]] * np.repeat(absmax, block)[:n]).reshape(shape)
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Case(tensors, config_of(entry), {name: plain}, BF16 if dtype == "bfloat16" else np.dtype(dtype))


def bnb8(shape: tuple[int, int], *, seed: int = 0, name: str = "q") -> Case:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    scales = rng.uniform(0.01, 0.2, shape[0]).astype(np.float32)
    tensors = {f"{name}.weight": codes, f"{name}.SCB": scales, f"{name}.weight_format": np.zeros((), np.uint8)}
    plain = codes.astype(np.float32) * scales[:, None] * np.float32(1 / 127)
    entry = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Case(tensors, config_of(entry), {f"{name}.weight": plain}, np.dtype(np.float16))


# ---- GPTQ and AWQ

WEIGHT = (np.random.default_rng(4).standard_normal((64, 96)) * 0.02).astype(BF16).astype(np.float32)
"""A weight to quantise, with rows of zeros, of tiny numbers, and of one sign."""
WEIGHT[3] = 0
WEIGHT[5] *= np.float32(2.0**-16)
WEIGHT[7:9] = np.abs(WEIGHT[7:9]) * np.float32([[1], [-1]])


def rounded(weight: np.ndarray, bits: int, group: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [inputs, outputs], zeros and scales [groups, outputs] of a weight, rounded to nearest."""
    groups, top = weight.reshape(len(weight), -1, group), (1 << bits) - 1
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    extent = np.maximum(-low, high) if symmetric else high - low
    scales = (extent / np.float32(top / 2 if symmetric else top)).astype(BF16).astype(np.float32)
    scales = np.where(scales < 2.0**-17, np.ceil(scales * 2.0**24) * 2.0**-24, scales).astype(np.float32)
    scales[extent == 0] = 2.0**-7
    zeros = np.full(low.shape, 1 << bits - 1) if symmetric else np.clip(np.rint(-low / scales), 0, top)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, top)
    return codes.reshape(weight.shape).T.astype(np.int64), zeros.T.astype(np.int64), scales.T.astype(np.float16)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [..., words]: the codes of the last axis as a stream of bits, the lowest bit of a word first."""
    stream = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    stream = stream.reshape(*codes.shape[:-1], -1)
    padding = [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)]
    return np.ascontiguousarray(np.packbits(np.pad(stream, padding), axis=-1, bitorder="little")).view("<u4")


def gptq(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group_size: int = 32,
    version: str = "gptq",
    symmetric: bool = True,
    desc_act: bool = False,
    indexed: bool = True,
    bias: bool = False,
    dtype: Any = np.float16,
    name: str = "q_proj",
    seed: int = 0,
    weight: np.ndarray | None = None,
    **entry: Any,
) -> Case:
    """shape: [outputs, inputs] of the plain weight; weight: to be rounded, instead of random codes."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    width = inputs if group_size < 0 else group_size
    groups = -(-inputs // width)
    index = np.arange(inputs) // width
    if desc_act:
        rng.shuffle(index)
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = np.full((groups, outputs), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (groups, outputs))
    scales = rng.uniform(0.001, 0.02, (groups, outputs)).astype(dtype)
    if weight is not None:
        codes, zeros, scales = rounded(weight, bits, width, symmetric=symmetric)
    qzeros = pack(zeros, bits)
    if version == "gptq":
        ones = pack(np.ones_like(zeros), bits)
        qzeros = qzeros - ones if bits in (2, 4, 8) else pack((zeros - 1) % (1 << bits), bits)
    tensors = {
        f"{name}.qweight": np.ascontiguousarray(pack(codes.T, bits).T).view(np.int32),
        f"{name}.qzeros": qzeros.view(np.int32),
        f"{name}.scales": scales,
    }
    if indexed:
        tensors[f"{name}.g_idx"] = index.astype(np.int32)
    if bias:
        tensors[f"{name}.bias"] = rng.normal(size=outputs).astype(dtype)
    plain = ((codes - zeros[index]) * scales.astype(np.float64)[index]).T.astype(np.float32)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": symmetric}
    settings |= {"checkpoint_format": version, "pack_dtype": "int32", **entry}
    config = config_of(settings, "bfloat16" if np.dtype(dtype) == BF16 else str(np.dtype(dtype)))
    return Case(tensors, config, {f"{name}.weight": np.ascontiguousarray(plain)}, np.dtype(dtype))


def awq(
    shape: tuple[int, int],
    *,
    group_size: int = 32,
    bias: bool = False,
    name: str = "q_proj",
    seed: int = 0,
    weight: np.ndarray | None = None,
    **entry: Any,
) -> Case:
    """shape: [outputs, inputs] of the plain weight; weight: to be rounded, instead of random codes."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    width = inputs if group_size < 0 else group_size
    groups, index = inputs // width, np.arange(inputs) // width
    codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
    scales = rng.uniform(0.001, 0.02, (groups, outputs)).astype(np.float16)
    if weight is not None:
        codes, zeros, scales = rounded(weight, 4, width, symmetric=False)

    def packed(values: np.ndarray) -> np.ndarray:
        return pack(values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4).view(np.int32)

    tensors = {f"{name}.qweight": packed(codes), f"{name}.qzeros": packed(zeros), f"{name}.scales": scales}
    if bias:
        tensors[f"{name}.bias"] = rng.normal(size=outputs).astype(np.float16)
    plain = ((codes - zeros[index]) * scales.astype(np.float64)[index]).T.astype(np.float32)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm", **entry}
    return Case(tensors, config_of(settings), {f"{name}.weight": np.ascontiguousarray(plain)}, np.dtype(np.float16))


# ---- compressed-tensors' packed integers


def compressed(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    loose: bool = False,
    ordered: bool = True,
    name: str = "q_proj",
    seed: int = 0,
) -> Case:
    """group_size: None for one scale a row; loose: no code is in two words; ordered: False for groups of columns anywhere."""
    rng = np.random.default_rng(seed)
    rows, cols = shape
    width = cols if group_size is None else group_size
    index = np.arange(cols) // width
    if not ordered:
        rng.shuffle(index)
    groups = -(-cols // width)
    codes, scales = rng.integers(0, 1 << bits, shape), rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float32)
    zeros = np.full((rows, groups), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (rows, groups))

    def packed(values: np.ndarray) -> np.ndarray:
        if not loose:
            return pack(values, bits)
        per_word = 32 // bits
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
        shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
        return np.bitwise_or.reduce(padded.reshape(len(values), -1, per_word) << shifts, axis=2)

    tensors = {
        f"{name}.weight_packed": packed(codes).view(np.int32),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": np.array(shape),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = np.ascontiguousarray(packed(zeros.T).T).view(np.int32)
    if not ordered:
        tensors[f"{name}.weight_g_idx"] = index.astype(np.int32)
    plain = (codes - zeros[:, index]).astype(np.float32) * scales[:, index]
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups_of_config = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = config_of({**entry, "config_groups": groups_of_config}, "bfloat16")
    return Case(tensors, config, {f"{name}.weight": plain}, BF16)


# ---- HQQ


def hqq_array(
    shape: tuple[int, int], bits: int, group: int | None, axis: int, rng: Any, dtype: Any
) -> tuple[Any, Any, np.ndarray]:
    """The codes of an array as HQQ packs them; its settings, scales and zeros; and its values."""
    size = shape[0] * shape[1]
    rows, cols = shape if group is None else (size // group, group) if axis == 1 else (group, size // group)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    per_group = (rows, 1) if axis == 1 else (1, cols)
    scale, zero = rng.uniform(0.001, 0.02, per_group).astype(dtype), rng.uniform(0, (1 << bits) - 1, per_group).astype(dtype)
    per_word = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    padded = np.pad(codes, ((0, -rows % per_word), (0, 0))).reshape(per_word, -1, cols).astype(np.int32)
    words = np.bitwise_or.reduce([run << bits * (per_word - 1 - k) for k, run in enumerate(padded)])
    settings = {
        "nbits": bits, "group_size": group, "shape": list(shape), "axis": axis, "view_as_float": False,
        "packing": "3bit_32" if bits == 3 else f"{bits}bit_u8",
        "unpack_view_dtype": "torch.int32" if bits == 3 else "torch.uint8",
    }  # fmt: skip
    values = (codes.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    numbers = {"scale": scale, "zero": zero}
    return words.astype(np.int32 if bits == 3 else np.uint8), {**settings, **numbers}, values.reshape(shape)


def encoded(value: Any) -> np.ndarray:
    """A setting of HQQ's as a tensor."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8).copy()
    if isinstance(value, list):
        return np.array(value, np.int64)
    return np.array(value, np.uint8 if isinstance(value, bool) else np.int32)


def hqq(
    shape: tuple[int, int] = (48, 96),
    *,
    bits: int = 4,
    group: int | None = 32,
    axis: int = 1,
    as_float: bool = False,
    offloaded: bool = False,
    dtype: Any = np.float16,
    name: str = "q_proj",
    seed: int = 0,
) -> Case:
    """as_float: codes under the dtype of floats; offloaded: scales and zeros in one tensor."""
    words, meta, plain = hqq_array(shape, bits, group, axis, np.random.default_rng(seed), dtype)
    compute = "torch.bfloat16" if np.dtype(dtype) == BF16 else f"torch.{np.dtype(dtype)}"
    meta |= {"view_as_float": as_float, "compute_dtype": compute, "quant_scale": False, "quant_zero": False}
    meta |= {"offload_meta": offloaded, "encoded_state_dict": True, "stores_quant_config": True, "channel_wise": True}
    if offloaded:
        meta["zero_scale"] = np.stack([meta.pop("zero"), meta.pop("scale")])
    tensors = {f"{name}.W_q": words.view(np.float16) if as_float else words}
    for key, value in meta.items():
        if value is not None:
            tensors[f"{name}.{key}"] = value if isinstance(value, np.ndarray) else encoded(value)
    weights = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": as_float}
    entry = {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}, "skip_modules": ["lm_head"]}
    return Case(tensors, config_of(entry), {f"{name}.weight": plain}, np.dtype(dtype))


# ---- Quark's integers


def quark(
    shape: tuple[int, int] = (48, 96),
    dtype: str = "int4",
    qscheme: str = "per_group",
    *,
    group: int = 32,
    symmetric: bool = False,
    method: str = "reorder",
    zeros: bool = True,
    name: str = "q_proj",
    seed: int = 0,
    **weights: Any,
) -> Case:
    """zeros: whether they are stored."""
    rng = np.random.default_rng(seed)
    rows, cols = shape
    bits, signed = int(dtype[-1]), not dtype.startswith("u")
    low = -(1 << bits - 1) if signed else 0
    grid = {"per_group": (rows, cols // group), "per_channel": (rows, 1), "per_tensor": (1, 1)}[qscheme]
    codes, scales = rng.integers(low, low + (1 << bits), shape), rng.uniform(0.001, 0.02, grid).astype(np.float32)
    zero = np.zeros(grid, int) if symmetric or not zeros else rng.integers(low, low + (1 << bits), grid)
    spread = [a.repeat(rows // grid[0], 0).repeat(cols // grid[1], 1) for a in (zero, scales)]
    plain = (codes - spread[0]).astype(np.float32) * spread[1]
    order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "reorder" else range(8)

    def packed(values: np.ndarray) -> np.ndarray:
        if bits == 8:
            return values.astype(np.int8 if signed else np.uint8)
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))
        return pack((padded & 15).reshape(len(values), -1, 8)[..., list(order)].reshape(padded.shape), 4).view(np.int32)

    if qscheme == "per_group":
        stored, scale, zero_codes = packed(codes.T), scales.T, packed(zero.T)
    elif qscheme == "per_channel":
        stored, scale, zero_codes = packed(codes), scales[:, 0], packed(zero.T)[0]
    else:
        stored, scale = packed(codes), scales[0, 0]
        zero_codes = zero[0, 0].astype(np.int32 if bits == 4 else np.int8 if signed else np.uint8)
    arrays = {"weight": stored, "weight_scale": scale, "weight_zero_point": zero_codes}
    tensors = {f"{name}.{key}": np.array(a, order="C") for key, a in arrays.items() if zeros or key != "weight_zero_point"}
    observer = f"Per{qscheme.removeprefix('per_').title()}MinMaxObserver"
    settings = {"dtype": dtype, "qscheme": qscheme, "symmetric": symmetric, "is_dynamic": False, **weights}
    settings |= {"round_method": "half_even", "scale_type": "float", "observer_cls": observer}
    settings |= {
        "ch_axis": {"per_group": -1, "per_channel": 0}.get(qscheme),
        "group_size": group if qscheme == "per_group" else None,
    }
    layers = {"weight": settings, "input_tensors": None}
    entry = {"quant_method": "quark", "global_quant_config": layers, "layer_quant_config": {}}
    entry["export"] = {"weight_format": "real_quantized", "pack_method": method}
    return Case(tensors, config_of(entry, "bfloat16"), {f"{name}.weight": plain}, BF16)


# ---- AutoRound


def autoround(make: Callable[..., Case], packing: str, **settings: Any) -> Case:
    """A weight in the layout of `gptq` or `awq`."""
    entry = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
    return make((64, 96), **settings, **entry)


# ---- EXL3


def exl3(
    shape: tuple[int, int],
    *,
    bits: float = 4,
    codebook: str = "mul1",
    signs: bool = False,
    name: str = "q_proj",
    seed: int = 0,
    **config: Any,
) -> Case:
    """shape: [outputs, inputs] of the plain weight; config: sizes in config.json, by which padding is recognised."""
    rng = np.random.default_rng(seed)
    outputs, inputs = (-(-n // 128) * 128 for n in shape)
    trellis = rng.integers(-32768, 32768, (inputs // 16, outputs // 16, int(16 * bits))).astype(np.int16)
    su, sv = rng.normal(size=inputs).astype(np.float16), rng.normal(size=outputs).astype(np.float16)
    tensors = {f"{name}.trellis": trellis}
    if signs:
        for key, n in (("su", inputs), ("sv", outputs)):
            tensors[f"{name}.{key}"] = rng.integers(-32768, 32768, n // 16).astype(np.int16)
        bits_of = [np.unpackbits(tensors[f"{name}.{key}"].view(np.uint8), bitorder="little") for key in ("su", "sv")]
        su, sv = (1 - 2 * bits.astype(np.float16) for bits in bits_of)
    else:
        tensors |= {f"{name}.suh": su, f"{name}.svh": sv}
    if codebook != "3inst":
        multiplier = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook]
        tensors[f"{name}.{codebook}"] = np.array(multiplier, np.uint32).view(np.int32)
    rotated = _butterflies(_butterflies(_tiles(trellis, codebook)).swapaxes(2, 3))  # [inputs / 128, outputs / 128, o, i]
    scaled = rotated * su.astype(np.float32).reshape(-1, 1, 1, 128) * sv.astype(np.float32).reshape(1, -1, 128, 1)
    plain = (scaled / np.float32(128)).transpose(1, 2, 0, 3).reshape(outputs, inputs)[: shape[0], : shape[1]]
    entry = {"quant_method": "exl3", "version": "1.6.5", "bits": float(bits), "head_bits": 6, "codebook": codebook}
    full = {**config_of(entry), **config}
    return Case(tensors, full, {f"{name}.weight": np.ascontiguousarray(plain)}, np.dtype(np.float16))


def _tiles(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """float32 [inputs / 128, outputs / 128, 128 inputs, 128 outputs]: the codes' values, bit by bit."""
    rows, cols, _ = trellis.shape
    tiles = exl3_tiles(trellis, codebook).reshape(rows, 16, cols, 16)
    return tiles.reshape(rows // 8, 128, cols // 8, 128).transpose(0, 2, 1, 3)


def exl3_tiles(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """float32 [inputs / 16, 16, outputs]: a trellis's values, bit by bit. Of half a bit, odd weights have one bit more."""
    rows, cols, width = trellis.shape
    words = trellis.view(np.uint16).reshape(rows, cols, -1, 2)[..., ::-1].reshape(rows, cols, width)
    stream = (words[..., None] >> np.arange(15, -1, -1, dtype=np.uint16) & 1).reshape(rows, cols, -1)
    t = np.arange(256)
    ends = (t + 1) * (width // 16) + (t + 1) // 2 * (width % 16 // 8)
    window = (ends[:, None] - 16 + np.arange(16)) % (16 * width)
    states = (stream[..., window].astype(np.uint32) << np.arange(15, -1, -1, dtype=np.uint32)).sum(-1)
    i, o = t // 8 % 4 * 2 + np.array([0, 1, 8, 9])[t % 4], t // 32 + t % 8 // 4 * 8
    tiles = np.empty((rows, cols, 16, 16), np.float32)
    tiles[..., i, o] = codebook_values(codebook)[states]
    return tiles.transpose(0, 2, 1, 3).reshape(rows, 16, 16 * cols)


def exl3_codes(case: Case) -> np.ndarray:
    """float32 [inputs, outputs]: the values of an EXL3 case's codes, not rotated."""
    (trellis,) = (a for name, a in case.tensors.items() if name.endswith(".trellis"))
    tiles = _tiles(trellis, next((book for book in ("mcg", "mul1") if f"q_proj.{book}" in case.tensors), "3inst"))
    return tiles.transpose(0, 2, 1, 3).reshape(16 * trellis.shape[0], 16 * trellis.shape[1])


@cache
def codebook_values(codebook: str) -> np.ndarray:
    """float32 [65536], of float16 values."""
    states = [s * {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D, "3inst": 89226354}[codebook] for s in range(1 << 16)]
    if codebook == "mul1":
        sums = np.array([sum((s & 0xFFFFFFFF).to_bytes(4, "little")) + 0x6400 for s in states], np.uint16)
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return (sums.view(np.float16) * factor + offset).astype(np.float16).astype(np.float32)
    x = np.array([s + (64248484 if codebook == "3inst" else 0) & 0xFFFFFFFF for s in states], np.uint32)
    halves = ((x & 0x8FFF8FFF) ^ 0x3B603B60).view(np.float16).reshape(-1, 2)
    return (halves[:, 0] + halves[:, 1]).astype(np.float32)


def _butterflies(blocks: np.ndarray) -> np.ndarray:
    """float32 [..., 128, 128]: the Hadamard matrix (without its factor) times each, in stages of 1, 2, 4, … 64."""
    for half in (1, 2, 4, 8, 16, 32, 64):
        pairs = blocks.reshape(*blocks.shape[:-2], 64 // half, 2, half, 128)
        a, b = pairs[..., 0, :, :], pairs[..., 1, :, :]
        blocks = np.stack([a + b, a - b], axis=-3).reshape(blocks.shape)
    return blocks


# ---- MLX


def mlx(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group_size: int = 64,
    mode: str = "affine",
    dtype: Any = BF16,
    name: str = "q_proj",
    seed: int = 0,
    **entry: Any,
) -> Case:
    """shape: [outputs, inputs] of the plain weight."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    groups = (outputs, inputs // group_size)
    codes = rng.integers(0, 1 << bits, shape)
    tensors = {f"{name}.weight": pack(codes, bits)}
    if mode == "affine":
        scales, biases = rng.uniform(-0.02, 0.02, groups).astype(dtype), rng.uniform(-0.1, 0.1, groups).astype(dtype)
        tensors |= {f"{name}.scales": scales, f"{name}.biases": biases}
        steps = codes.astype(np.float32) * np.repeat(scales.astype(np.float32), group_size, 1)
        plain = steps + np.repeat(biases.astype(np.float32), group_size, 1)
    else:
        raw = rng.integers(96, 127, groups).astype(np.uint8)
        tensors[f"{name}.scales"] = raw
        scales = raw.view(E4M3).astype(np.float32) if mode == "nvfp4" else 2.0 ** (raw.astype(np.float32) - 127)
        codes = np.where((bits == 8) & (codes & 127 == 127), 0, codes)  # no NaN
        tensors[f"{name}.weight"] = pack(codes, bits)
        float4 = np.array([*(0, 0.5, 1, 1.5, 2, 3, 4, 6), *(0, -0.5, -1, -1.5, -2, -3, -4, -6)], np.float32)
        values = codes.astype(np.uint8).view(E4M3).astype(np.float32) if bits == 8 else float4[codes]
        plain = (values * np.repeat(scales, group_size, 1)).astype(np.float32)
    settings = {"group_size": group_size, "bits": bits, "mode": mode, **entry}
    names = {BF16: "bfloat16"}
    config = config_of(settings, names.get(np.dtype(dtype), str(np.dtype(dtype))), key="quantization")
    return Case(tensors, {**config, "quantization_config": settings}, {f"{name}.weight": plain}, np.dtype(dtype))


# ---- ModelOpt


def modelopt(shape: tuple[int, int], *, algorithm: str = "NVFP4", name: str = "q_proj", seed: int = 0) -> Case:
    """shape: [outputs, inputs] of the plain weight."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    factor = np.array(0.0371, np.float32)
    tensors = {f"{name}.input_scale": np.ones((), np.float32)}
    if algorithm == "FP8":
        codes = rng.integers(0, 126, shape).astype(np.uint8).view(E4M3)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": factor}
        plain = codes.astype(np.float32) * factor
    elif "NVFP4" not in algorithm:
        codes = rng.integers(0, 126, shape).astype(np.uint8).view(E4M3)
        high, wide = {"FP8_PER_CHANNEL_PER_TOKEN": (1, inputs), "MXFP8": (1, 32)}.get(algorithm, (128, 128))
        grid = -(-outputs // high), -(-inputs // wide)
        exponents = rng.integers(110, 130, grid).astype(np.uint8)
        values = rng.uniform(0.001, 0.01, grid).astype(np.float32)
        spread = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127) if algorithm == "MXFP8" else values
        stored = {"MXFP8": exponents, "FP8_PER_CHANNEL_PER_TOKEN": values[:, 0]}.get(algorithm, values[:, None, :, None])
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": stored}
        plain = codes.astype(np.float32) * spread.repeat(high, 0)[:outputs].repeat(wide, 1)[:, :inputs]
    else:
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        scales = rng.integers(1, 126, (outputs, inputs // 16)).astype(np.uint8).view(E4M3)
        tensors |= {f"{name}.weight": codes[:, ::2] | codes[:, 1::2] << 4, f"{name}.weight_scale": scales}
        tensors[f"{name}.weight_scale_2"] = factor
        float4 = np.array([*(0, 0.5, 1, 1.5, 2, 3, 4, 6), *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6)], np.float32)
        plain = float4[codes] * np.repeat(scales.astype(np.float32) * factor, 16, 1)
    entry = {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": {}}
    return Case(tensors, config_of(entry, "bfloat16"), {f"{name}.weight": plain.astype(np.float32)}, BF16)


def torchao(
    shape: tuple[int, int],
    kind: str = "Int8Tensor",
    *,
    grid: tuple[int, int] = (1, 1),
    bits: int = 8,
    zeros: bool = True,
    name: str = "q_proj",
    seed: int = 0,
) -> Case:
    """A matrix of torchao, in safetensors. grid: its blocks; scales are F32, but BF16 of IntxUnpackedToInt8Tensor."""
    rng = np.random.default_rng(seed)
    high, wide = shape[0] // grid[0], shape[1] // grid[1]
    scales = rng.uniform(0.001, 0.01, grid).astype(BF16 if kind.startswith("Intx") else np.float32)
    prefix = f"{name}._weight_"
    if kind == "Float8Tensor":
        codes = (rng.standard_normal(shape) * 100).astype(E4M3)
        zero = np.zeros(grid, np.int8)
    else:
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).astype(np.int8)
        zero = (rng.integers(-3, 4, grid) * zeros).astype(np.int8)
    stored = {f"{prefix}qdata": codes, f"{prefix}scale": scales}
    if kind != "Float8Tensor":
        stored[f"{prefix}zero_point"] = zero
    spread = [np.repeat(np.repeat(a.astype(np.float32), high, 0), wide, 1) for a in (zero, scales)]
    plain = (codes.astype(np.float32) - spread[0]) * spread[1]
    entry = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}
    return Case(stored, config_of(entry, "bfloat16"), {f"{name}.weight": plain}, BF16)


def bitnet(shape: tuple[int, int], kind: str = "bitlinear", *, name: str = "q_proj", seed: int = 0) -> Case:
    """A ternary matrix of BitNet. kind: `linear_class`."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, shape).astype(np.uint8)
    parts = codes.reshape(4, shape[0] // 4, shape[1])
    scale = rng.uniform(0.5, 40, 1).astype(BF16)
    plain = codes.astype(np.float32) - 1
    plain = plain / scale.astype(np.float32) if kind == "bitlinear" else plain * scale.astype(np.float32)
    tensors = {f"{name}.weight": parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6, f"{name}.weight_scale": scale}
    entry = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    return Case(tensors, config_of(entry, "bfloat16"), {f"{name}.weight": plain}, BF16)


_EXL3 = [*((k, "mul1") for k in range(1, 9)), (2, "mcg"), (5, "mcg"), (3, "3inst"), (4, "3inst")]

CASES: dict[str, Callable[[], Case]] = {
    "bnb-nf4": lambda: bnb4((48, 64)),
    "bnb-nf4-odd": lambda: bnb4((7, 33), dtype="float32"),
    "bnb-nf4-nested": lambda: bnb4((300, 128), nested=True),
    "bnb-nf4-stored-as-bf16": lambda: bnb4((48, 64), storage=BF16, dtype="float16"),
    "bnb-fp4": lambda: bnb4((48, 64), kind="fp4"),
    "bnb-int8": lambda: bnb8((40, 72)),
    "gptq-4": lambda: gptq((64, 96), bias=True),
    "gptq-4-asymmetric": lambda: gptq((64, 96), symmetric=False),
    "gptq-4-act-order": lambda: gptq((64, 96), symmetric=False, desc_act=True),
    "gptq-v2-4": lambda: gptq((64, 96), symmetric=False, version="gptq_v2"),
    "gptq-4-one-group": lambda: gptq((64, 96), group_size=-1, symmetric=False),
    "gptq-2": lambda: gptq((64, 96), bits=2, symmetric=False),
    "gptq-3": lambda: gptq((64, 96), bits=3, symmetric=False, desc_act=True),
    "gptq-v2-3": lambda: gptq((64, 96), bits=3, symmetric=False, version="gptq_v2"),
    "gptq-8": lambda: gptq((64, 96), bits=8, symmetric=False, dtype=BF16),
    "awq-4": lambda: awq((64, 96), bias=True),
    "compressed-4-act-order": lambda: compressed((40, 96), ordered=False),
    "compressed-8-act-order": lambda: compressed((40, 96), bits=8, ordered=False, symmetric=False),
    "compressed-3-loose": lambda: compressed((40, 96), bits=3, loose=True, symmetric=False),
    "compressed-5-loose": lambda: compressed((37, 99), bits=5, loose=True, group_size=None, symmetric=False),
    "compressed-4-odd": lambda: compressed((37, 99), group_size=None),
    **{
        f"hqq-{bits}-axis-{axis}": partial(hqq, bits=bits, axis=axis, dtype=np.float32)
        for bits in (8, 4, 3, 2, 1)
        for axis in (0, 1)
    },
    "hqq-4-as-float": lambda: hqq(as_float=True, dtype=np.float32),
    "hqq-4-offloaded": lambda: hqq(offloaded=True, axis=0, dtype=np.float32),
    **{
        f"quark-{dtype}-{qscheme}": partial(quark, dtype=dtype, qscheme=qscheme)
        for dtype in ("int4", "uint4", "int8", "uint8")
        for qscheme in ("per_group", "per_channel", "per_tensor")
    },
    "quark-int4-order": lambda: quark(method="order"),
    "quark-int4-symmetric": lambda: quark(symmetric=True),
    "autoround-4": lambda: autoround(gptq, "auto_round:auto_gptq", indexed=False, bias=True),
    "autoround-3": lambda: autoround(gptq, "auto_round:auto_gptq", bits=3, indexed=False),
    "autoround-2-asymmetric": lambda: autoround(gptq, "auto_round", bits=2, indexed=False, symmetric=False, version="gptq_v2"),
    "autoround-6-asymmetric": lambda: autoround(gptq, "auto_round", bits=6, indexed=False, symmetric=False, version="gptq_v2"),
    "autoround-8-gptqmodel": lambda: autoround(gptq, "auto_round:gptqmodel", bits=8, version="gptq_v2"),
    "autoround-awq": lambda: autoround(awq, "auto_round:auto_awq"),
    **{f"exl3-{k}-{book}": partial(exl3, (128, 256), bits=k, codebook=book) for k, book in _EXL3},
    **{f"mlx-{bits}": partial(mlx, (48, 128), bits=bits, dtype=np.float32) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx-4-bf16": lambda: mlx((48, 128), group_size=32),
    "mlx-8-f16": lambda: mlx((48, 128), bits=8, group_size=128, dtype=np.float16),
    "mlx-mxfp4": lambda: mlx((48, 128), mode="mxfp4", group_size=32),
    "mlx-mxfp8": lambda: mlx((48, 128), mode="mxfp8", bits=8, group_size=32),
    "mlx-nvfp4": lambda: mlx((48, 128), mode="nvfp4", group_size=16),
    "bitnet-divided": lambda: bitnet((48, 64)),
    "bitnet-multiplied": lambda: bitnet((48, 64), "autobitlinear"),
    "torchao-int8-row": lambda: torchao((48, 64), grid=(48, 1)),
    "torchao-int8-tensor": lambda: torchao((48, 64)),
    "torchao-int4-group": lambda: torchao((48, 64), "IntxUnpackedToInt8Tensor", grid=(48, 2), bits=4),
    "torchao-float8-row": lambda: torchao((48, 64), "Float8Tensor", grid=(48, 1)),
    "torchao-float8-block": lambda: torchao((48, 64), "Float8Tensor", grid=(3, 2)),
    "awq-4-one-group": lambda: awq((64, 96), group_size=-1),
    "gptq-8-rounded": lambda: gptq((64, 96), bits=8, weight=WEIGHT),
    "gptq-4-rounded": lambda: gptq((64, 96), weight=WEIGHT),
    "awq-4-rounded": lambda: awq((64, 96), weight=WEIGHT),
}
"""One of each layout; `oracles.json` holds what other programs decode them to."""
