"""Spoils a good input of each kind in many small ways, and looks whether weightsmith takes it or refuses it, in bounds.

    python scripts/fuzz.py                                   # 1,000 files of each kind
    python scripts/fuzz.py --kinds plan recipe --cases 10000 --seed 3
    python scripts/fuzz.py --kinds config --only 4711 --keep /tmp/case     # one case again; its files stay

A mutated file must end in success or in a WeightsmithError whose text is short and printable; within 5 seconds of processor
time (30 by the clock), and with at most 500 MB of resident memory more than before it. Anything else is a failure: another
exception, a dead process, a hang. Cases run in a child process, one after another; a case depends on kind, seed and number
alone. The parent starts another child after one that has died or does not answer. Prints each failure of a new sort, and a line
of numbers for each kind; the status is 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 5.0
"""Of processor time."""
WAITING = 30.0
"""Seconds by the clock: the machine may be busy with other things."""
MEGABYTES = 500
MAX_MESSAGE = 20_000
"""Characters of a message."""
_SPARE = 30.0  # seconds more, after which a child that does not answer is killed
_LIMIT_MEGABYTES = 2 * MEGABYTES  # beyond what a child has at the start: it cannot take the machine with it

Rng = random.Random


class Hang(BaseException):
    """The time of a case is over. No Exception: nobody on the way may catch it."""


# ---- mutators


def odd(rng: Rng) -> str:
    """A JSON value that is seldom expected, as text."""
    choice = rng.random()
    if choice < 0.75:
        return rng.choice(_ODD)
    if choice < 0.85:
        return str(rng.choice((1, -1)) * rng.randrange(1, 10) * 10 ** rng.randrange(0, 30))
    if choice < 0.9:
        depth = rng.choice((5, 40, 70, 500, 5000, 100_000))
        return rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    if choice < 0.95:
        item = rng.choice(_ODD)
        return "[" + ",".join([item] * min(rng.choice((2, 3, 8, 300, 20_000)), 1_000_000 // len(item))) + "]"
    return json.dumps(rng.choice("aé\n\x1b\u202e😀x.*") * rng.choice((1, 100, 5000, 200_000)))


_ODD = (
    *r"""
    null true false 0 -0 1 -1 2 3 4 7 255 65536 2147483648 1099511627776 9223372036854775807 9223372036854775808 1.0
    0.5 -0.0 1e-320 1e308 1e999 -1e999 NaN Infinity -Infinity 1.5 [] {} [[]] [null] [{}] [0] [1,2] [-1] [true] "" "0"
    "1" "2" "gpt2" "nan" "true" "../../etc/passwd" "/dev/zero" "a/b" ".." "." "~" "None" "full_attention"
    "sliding_attention" "linear" "yarn" "default" "F32" "model.layers.0." "(a+)+$" "(.*)*x" "["
    """.split(),
    "9" * 400,
    "9" * 4300,
    "-1" + "0" * 4000,
    "9" * 5000,
    '{"a": 1, "a": 2}',
    '{"rope_type": "yarn", "factor": "x"}',
    '{"0": 1, "1": 2, "2": 3}',
    '{"model_type": [], "num_hidden_layers": 1099511627776, "layer_types": "x"}',
    '"' + "A" * 100_000 + '"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\u001b[2J"',
    '"\\u202e"',
    '"a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?aaaaaaaaaaaaaaaaaaaa"',
    '"\\\\"',
)


def mutate_json(rng: Rng, data: bytes, words: Sequence[str] = ()) -> bytes:
    """JSON with one to five of its values replaced, removed, renamed or added, and perhaps some bytes changed on top.

    words  further keys that the readers know
    """
    value = json.loads(data)
    raw: dict[str, str] = {}

    def put() -> str:
        name = f"@{len(raw)}@"
        raw[name] = odd(rng)
        return name

    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice(keys) if keys else None
            inner = place[key] if key is not None else None
            if not isinstance(inner, dict | list) or rng.random() < 0.25:
                break
            place = inner
        what = rng.random()
        if key is None or what < 0.1:
            new = rng.choice(words) if words and rng.random() < 0.9 else str(rng.choice(("", "a", 0, "x.y")))
            if isinstance(place, dict):
                place[new] = put()
            else:
                place.insert(rng.randrange(len(place) + 1), put())
        elif what < 0.2:
            del place[key]
        elif what < 0.3 and words and isinstance(place, dict):
            place[rng.choice(words)] = put()
        elif what < 0.4:
            other = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
            place[key], place[other] = place[other], place[key]
        elif what < 0.5 and type(inner) is int:
            place[key] = inner + rng.choice((-1, 1, -2, 8, 2**31, -(2**31)))
        else:
            place[key] = put()
    text = json.dumps(value)
    for name, new in raw.items():
        text = text.replace(f'"{name}"', new)
    encoded = text.encode(errors="replace")
    return mutate_bytes(rng, encoded) if rng.random() < 0.1 else encoded


def mutate_bytes(rng: Rng, data: bytes) -> bytes:
    """Some of the bytes changed, removed, doubled, moved or added."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 1, 2, 4, 16, 200)))
        match rng.randrange(7):
            case 0:
                changed[at:end] = rng.randbytes(end - at)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end] * rng.choice((1, 1, 2, 50, 5000))
            case 3:
                changed[at:at] = rng.choice(
                    (b"\0", b"\xff", b"\n", b'"', b"{", b"[", b",", b"9" * 50, b"\x80\x02", b"\xed\xa0\x80")
                )
            case 4:
                del changed[at:]
            case 5 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case _:
                changed[at:end] = rng.choice((b"\xff", b"\0", b"\x7f")) * (end - at)
    return bytes(changed)


def mutate_safetensors(rng: Rng, data: bytes) -> bytes:
    """Another header, a header length that lies, a header of one thing only, or other bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = data[8:start], data[start:]
    choice = rng.random()
    if choice < 0.02:
        piece = rng.choice((b"[]", b"{}", b'"a"', b"0", b'{"a":0}', b"[[]]", b'"\\ud83d\\ude00"'))
        header = b"[" + b",".join([piece] * rng.choice((1000, 100_000, 3_000_000))) + b"]"
    elif choice < 0.8:
        header = mutate_json(rng, header, ("__metadata__", "dtype", "shape", "data_offsets", "w"))
    elif choice < 0.9:
        body = body[: rng.randrange(len(body) + 1)] if rng.random() < 0.5 else body + bytes(rng.randrange(1, 9))
    else:
        return mutate_bytes(rng, data)
    length = len(header) if rng.random() < 0.97 else rng.choice((0, 1, len(header) - 1, len(header) + 1, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + header + body


_QUANTISATION_WORDS = tuple(
    "bits group_size mode version checkpoint_format dynamic quant_method packing_format extra_config data_type "
    "global_quant_config layer_quant_config weight dtype qscheme weight_block_size expert_dtype "
    "config_groups targets strategy num_bits format layers params hidden_size".split()
)


def mutate_quantised(rng: Rng, data: bytes) -> bytes:
    """Another config.json, header or tensor data: the JSON of bitsandbytes and ComfyUI, and GPTQ's indexes, are data."""
    if data.startswith(b"{"):
        return mutate_json(rng, data, _QUANTISATION_WORDS)
    if rng.random() < 0.5:
        return mutate_safetensors(rng, data)
    start = 8 + int.from_bytes(data[:8], "little")
    body = mutate_bytes(rng, data[start:])
    return data[:start] + body[: len(data) - start].ljust(len(data) - start, b"\xff")


def mutate_gguf(rng: Rng, data: bytes) -> bytes:
    """Other bytes of the header, or a number in it that is out of all bounds."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        width = rng.choice((4, 8))
        at = rng.randrange(0, len(changed) - width)
        number = rng.choice((0, 1, 2, 3, 8, 9, 12, 13, 31, 33, 64, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
        number = rng.choice((1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)) if width == 8 else number
        changed[at : at + width] = number.to_bytes(width, "little")
    return bytes(changed)


def mutate_pytorch(rng: Rng, data: bytes) -> bytes:
    """Another pickle in the same archive, or another archive around the same pickle."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("/data.pkl"):
                content = _mutate_pickle(rng, content)
            elif rng.random() < 0.1:
                content = mutate_bytes(rng, content)
            new.writestr(zipfile.ZipInfo(info.filename), content)
    return out.getvalue()


def _mutate_pickle(rng: Rng, data: bytes) -> bytes:
    """Numbers of the pickle changed in place, instructions doubled, pieces put elsewhere."""
    choice = rng.random()
    if choice < 0.02:
        return b"\x80\x02" + rng.choice((b"]", b"}", b"(", b"N", b"K\x01", b"]q\0h\0", b"NN\x86")) * 1_000_000 + b"."
    if choice < 0.5:
        return mutate_bytes(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        piece = changed[at : min(end, at + 60)]
        place = rng.randrange(len(changed) + 1)
        new = rng.choice(
            (
                piece,
                b"J\xff\xff\xff\xff",
                b"J\xff\xff\xff\x7f",
                b"\x8a\x08" + b"\xff" * 8,
                b"N",
                b"]",
                b")",
                b"t",
                b"R",
                b"(",
                b"2",
            )
        )
        changed[place : place + rng.choice((0, 0, 1, len(new)))] = new
    return bytes(changed)


def mutate_recipe(rng: Rng, data: bytes) -> bytes:
    """Lines removed, moved in or out, doubled, replaced; values replaced; now and then one that is very long."""
    lines = data.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        i = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0 if len(lines) > 1:
                del lines[i]
            case 1:
                lines[i] = "  " + lines[i]
            case 2:
                lines[i] = lines[i].removeprefix("  ")
            case 3:
                lines.insert(rng.randrange(len(lines) + 1), lines[i])
            case 4:
                lines[i] = " " * rng.randrange(8) + rng.choice(("", "- ")) + rng.choice(_RECIPE_KEYS) + ": " + _yaml(rng)
            case 5:
                lines[i] = lines[i] + " " + _yaml(rng)
            case _:
                lines[i] = lines[i].partition(": ")[0].rstrip(":") + ": " + _yaml(rng)
    encoded = "\n".join(lines).encode(errors="replace")
    return mutate_bytes(rng, encoded) if rng.random() < 0.15 else encoded


def _yaml(rng: Rng) -> str:
    choice = rng.random()
    if choice < 0.6:
        return rng.choice(_YAML)
    if choice < 0.97:
        return odd(rng)
    unit = rng.choice(("1:", "9", "0x1", "1_", "a: {", "[", "- ", "*a, ", "!!int ", "? ", "\x1b", "&a ", "'", "x"))
    return unit * rng.choice((100, 5000, 60_000)) + "1"


_YAML = (
    *r"""
    null ~ true yes off 0 1 -1 0.5 1e-4 1e400 .nan .inf -.inf 0x_ 0b2 0o9 1:2 190:20:30 2024-13-45 = << * & ! | > % @
    ` - linear ties slerp dare_ties della passthrough task_arithmetic nuslerp karcher sce model_stock bfloat16 float16
    int8 a b a+lora a+a +lora a@v a+lora@ union base mlp [0] [0,1] [2,1] [0,99] [1e-4,3e-4] [] {} {a} [[]] [a,b] *b &b
    """.split(),
    "{model: a}",
    "{model: {path: a, lora: lora}}",
    "[{filter: mlp, value: 0.5}, {value: 1}]",
    "[{filter: mlp, value: [0, 1, .nan]}]",
    "!!binary x",
    "!!python/object:os.system x",
    '"\\UFFFFFFFF"',
    "/dev/zero",
    "/proc/self/environ",
    "{file: built-in, rows: 2, tokens: 8}",
    "regmean",
    "{tune: [0, 1]}",
    "[{tune: [0, 0.5], start: 0.25}, {tune: [1, .nan]}]",
    "{choice: [ties, dare_ties]}",
    "{choice: [a, b], start: b}",
)
_RECIPE_KEYS = """
    merge_method base_model models model slices sources layer_range parameters weight density t normalize lambda dtype
    out_dtype tokenizer_source tokenizer modules filter value embed_slerp int8_mask experts source_model gate_mode
    positive_prompts prune_experts merge_experts keep groups saliency architecture experts_per_token shared_experts <<
    text file rows tokens prior prior_parameters mu aim tune choice start
""".split()


def mutate_model(rng: Rng, data: bytes) -> bytes:
    """A file of a model with other values: JSON, a card, or weights, whose numbers may be anything."""
    if data.startswith(b"{"):
        return mutate_json(rng, data, (*_CONFIG_WORDS, "vocab", "added_tokens", "content", "chat_template"))
    if data.startswith(b"---"):
        return mutate_recipe(rng, data) if rng.random() < 0.7 else mutate_bytes(rng, data)
    if rng.random() < 0.3:
        return mutate_safetensors(rng, data)
    changed = bytearray(data)
    first = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 3, 100))):
        at = rng.randrange(first, len(changed) - 3, 4)
        changed[at : at + 4] = struct.pack("<f", rng.choice((0.0, -0.0, 1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan)))
    return bytes(changed)


def mutate_checksummed(rng: Rng, data: bytes) -> bytes:
    """A manifest with other values and the checksum that goes with them; or a damaged one."""
    from weightsmith._outputs.checksum import hash_bytes

    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    fields = json.loads(data)
    del fields["checksum"]
    body = mutate_json(rng, json.dumps(fields).encode(), ("weights", "files", "tensors", "bytes", "file", "offset", "plan"))
    body = body[1:] if body.startswith(b"{") else body
    return b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body


def mutate_journal(rng: Rng, data: bytes) -> bytes:
    """Lines with other values and the hash that goes with them; lines lost, doubled, moved; other bytes."""
    import xxhash

    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        i = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                del lines[i]
                lines = lines or [b""]
            case 1:
                lines.insert(rng.randrange(len(lines) + 1), lines[i])
            case 2:
                lines[i] = mutate_bytes(rng, lines[i])
            case _ if b" [" in lines[i]:
                with contextlib.suppress(ValueError, RecursionError):  # it is damaged already
                    body = mutate_json(rng, lines[i].partition(b" ")[2], ()).replace(b"\n", b"")
                    lines[i] = xxhash.xxh3_64_hexdigest(body).encode() + b" " + body
    return b"\n".join(lines)


# ---- kinds


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    make    writes good inputs into an empty folder, which is the current one
    files   those of them that are mutated, one for each case
    mutate  the bytes of such a file -> others
    use     what weightsmith does with the folder (the current one), as calls; gets the name of the mutated file, and the rng.
            Each call ends in success or in a WeightsmithError, whatever the others do
    start   what is done once with the folder before the first case
    ways    how many of the choices of `use` are tried with the good inputs
    """

    make: Callable[[], None]
    files: tuple[str, ...]
    mutate: Callable[[Rng, bytes], bytes]
    use: Callable[[str, Rng], Iterator[Callable[[], Any]]]
    start: Callable[[], None] = lambda: None
    ways: int = 9


LINEAR = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("a", "b")]}
_CONFIG_WORDS = """
    num_hidden_layers n_layer layer_types sliding_window use_sliding_window max_window_layers rope_theta rope_scaling
    rope_parameters partial_rotary_factor no_rope_layers no_rope_layer_interval head_dim num_key_value_heads
    num_attention_heads hidden_size intermediate_size vocab_size tie_word_embeddings model_type architectures dtype
    torch_dtype quantization_config text_config vision_config auto_map attention_types attention_layers block_types
    first_k_dense_replace num_kv_shared_layers sliding_window_pattern full_attention_interval attn_layer_period
    attn_layer_offset decoder_sparse_step mlp_only_layers moe_layer_start_index moe_layer_end_index n_group topk_group
    num_local_experts num_experts n_routed_experts num_experts_per_tok ep_size cross_attention_layers deepstack_layers
    kv_source_layers embedding_multiplier attention_multiplier logits_scaling kv_lora_rank hidden_act id2label
    num_nextn_predict_layers hybrid_override_pattern weight_block_size config_groups window_pattern layer_map
""".split()


def _make_models(*, layers: int = 3) -> None:
    """`a` and `b`, dense; `x` with experts, `q` with FP8 weights; `lora`, an adapter of a."""
    import ml_dtypes
    import numpy as np

    from tests.mini import write_checkpoint

    rng = np.random.default_rng(0)

    def tensors(inside: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
        shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in inside.items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    common = {
        **{"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "rope_theta": 10000.0},
        **{"num_hidden_layers": layers, "intermediate_size": 12, "head_dim": 4, "tie_word_embeddings": False},
        **{"dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": [1, 2]},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8},
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    }
    attention = {
        **{f"{norm}_layernorm.weight": (8,) for norm in ("input", "post_attention")},
        **{"self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8)},
        "self_attn.o_proj.weight": (8, 8),
    }
    dense = {**attention, "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12)}
    experts = {"block_sparse_moe.gate.weight": (4, 8)}
    for e in range(4):
        experts |= {
            f"block_sparse_moe.experts.{e}.{w}.weight": s for w, s in (("w1", (12, 8)), ("w2", (8, 12)), ("w3", (12, 8)))
        }
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common}
    for name in "ab":
        write_checkpoint(Path(name), tensors(dense), llama)
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    write_checkpoint(Path("x"), tensors({**attention, **experts}), {**mixtral, **common})
    quantised = tensors(dense)
    for name in [n for n in quantised if ".mlp." in n]:
        quantised[name] = quantised[name].astype(ml_dtypes.float8_e4m3fn)
        quantised[name + "_scale_inv"] = np.ones((1, 1), np.float32)
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    write_checkpoint(Path("q"), quantised, {**llama, **fp8})
    factors = {}
    for module, (rows, cols) in {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.1.mlp.down_proj": (8, 12)}.items():
        factors[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((4, cols)).astype(np.float32)
        factors[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((rows, 4)).astype(np.float32)
    write_checkpoint(Path("lora"), factors)
    Path("lora/model.safetensors").rename("lora/adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "use_rslora": False}
    patterns = {"rank_pattern": {r"^model\.layers\.[0-9]+\.self_attn\.(q|k)_proj": 4, "down_proj": 4}}
    adapter |= {
        **patterns,
        "alpha_pattern": {"layers.0.*q_proj": 2.5},
        "base_model_name_or_path": "a",
        "init_lora_weights": True,
    }
    Path("lora/adapter_config.json").write_text(json.dumps(adapter))
    Path("a/tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "n": [1]})
    )
    Path("a/tokenization_x.py").write_text("from .helper import y\nfrom . import z, w\n")
    Path("a/helper.py").write_text("")


def _merge(recipe: Any, **options: Any) -> Any:
    import weightsmith

    return weightsmith.merge(recipe, "out", threads=1, fsync=False, **options)


def _use_config(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from weightsmith._features.mixture import layouts
    from weightsmith._features.mixture.build import prepare_moe
    from weightsmith._planning.options import RecipeOptions

    def moe(recipe: dict[str, Any]) -> None:
        prepare_moe(recipe, RecipeOptions()).close()

    name = file[0]
    other = name if name in "xq" else "b"
    both = {"merge_method": "linear", "models": [{"model": n, "parameters": {"weight": 0.5}} for n in (name, other)]}
    stack = [
        {"sources": [{"model": name, "layer_range": r}]}
        for r in rng.choice(([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 3]]))
    ]
    yield lambda: weightsmith.plan(both)
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "slices": stack})
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{name}+lora"}]})
    layout = rng.choice(layouts.NAMES)
    shared = {"shared_experts": [{"source_model": name, "residual_scale": 0.1}]} if rng.random() < 0.5 else {}
    experts = [{"source_model": n} for n in (name, other)]
    yield lambda: moe({"base_model": name, "experts": experts, "gate_mode": "random", "architecture": layout, **shared})
    yield lambda: moe({"base_model": name, "experts": experts, "gate_mode": "random"})
    yield lambda: moe({"model": name, "prune_experts": {"keep": [0, 2]}})
    if rng.random() < 0.2:
        yield lambda: _merge(both)
        yield lambda: _merge(both, quantize="fp8-dynamic")


def _use_checkpoint(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    def read() -> None:
        from weightsmith import open_checkpoint

        with open_checkpoint(Path(file).parent) as checkpoint:
            for name in checkpoint.specs:
                checkpoint.read(name)

    yield read
    if rng.random() < 0.2:
        yield lambda: _merge(LINEAR)


def _use_adapter(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "a+lora"}]}
    yield lambda: weightsmith.plan(recipe)
    if rng.random() < 0.2:
        yield lambda: _merge(recipe)


def _use_recipe(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._features.any_recipe import prepare_any
    from weightsmith._features.quantisation.options import QuantizeSettings
    from weightsmith._planning.options import RecipeOptions
    from weightsmith._planning.recipe import read_template

    lenient = rng.random() < 0.5
    yield lambda: prepare_any(file, RecipeOptions(lenient=lenient), QuantizeSettings()).close()

    def fill() -> None:
        template = read_template(file, lenient=lenient)
        prepare_any(template.fill(template.start), RecipeOptions(lenient=lenient), QuantizeSettings()).close()

    yield fill


def _use_manifest(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from weightsmith._outputs.local.target import check_vacant
    from weightsmith._outputs.local.unfinished import find_folders

    yield lambda: weightsmith.verify("made")
    yield lambda: weightsmith.inspect("made")
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "made"}]})
    yield lambda: find_folders(Path())
    yield lambda: check_vacant(Path("made").absolute(), overwrite=True)
    if rng.random() < 0.2:
        yield lambda: weightsmith.merge(LINEAR, "made", threads=1, fsync=False, overwrite=True)


def _use_plan(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    yield lambda: weightsmith.run(file, "out", threads=1, fsync=False)


def _use_products(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations import given

    object.__setattr__(given.KIND, "compute", lambda bench: bench.create())  # as if whoever runs the plan had the arrays
    yield from _use_plan(file, rng)


def _use_journal(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._outputs.local.unfinished import find_folders

    yield lambda: find_folders(Path())
    yield lambda: _merge(LINEAR)


def _unfinished_upload() -> Any:
    """A bucket in memory with the unfinished work of a small checkpoint, the same each time."""
    from tests.bucket_help import MemoryBucket
    from tests.output_help import NAMES, layout, open_staging, put
    from weightsmith._outputs.bucket import backend, parts

    MemoryBucket.stores.clear()
    backend.open_bucket = MemoryBucket.open  # type: ignore[assignment]
    parts.PART_BYTES = 200

    def build(names: Sequence[str], *, publish: bool) -> None:
        with open_staging("s3://bkt/models/out", layout(), "plan", facts={"seed": "1"}) as opened:
            put(opened, names)
            if publish:
                opened.publish({})
            else:
                opened.backend.weights.drain()

    build(NAMES[:4], publish=False)
    return MemoryBucket("bkt"), lambda: build(NAMES, publish=True)


_UPLOAD_JOURNAL = "models/.out.weightsmith-staging/journal"


def _make_bucket_journal() -> None:
    bucket, _ = _unfinished_upload()
    Path("bucket-journal").write_bytes(bucket.objects[_UPLOAD_JOURNAL][0])


def _use_bucket_journal(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    def run() -> None:
        from tests.output_help import BY_NAME, data, layout

        bucket, finish = _unfinished_upload()
        bucket.put(_UPLOAD_JOURNAL, Path(file).read_bytes())
        finish()
        found = bucket.contents("models/out")
        for name in BY_NAME:
            shard, offset, nbytes = layout().places[name]
            assert found[layout().shards[shard].name][offset : offset + nbytes] == data(name).tobytes(), name

    yield run


def _make_index() -> None:
    from tests.mini import write_checkpoint
    from weightsmith import open_checkpoint

    _make_models()
    with open_checkpoint("a") as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
        config = checkpoint.config
    shutil.rmtree("a")
    write_checkpoint(Path("a"), tensors, config, max_shard_bytes=1500)


def _make_pytorch() -> None:
    import torch

    _make_models()
    weights = {f"model.layers.{i}.w.weight": torch.arange(12.0).reshape(3, 4).t() for i in range(2)}
    weights |= {"half": torch.ones(3, dtype=torch.float16), "view": weights["model.layers.0.w.weight"][1:]}
    Path("p").mkdir()
    torch.save(weights, "p/pytorch_model.bin")
    Path("p/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


_EXL2 = "exl2"
_QUANTISED = (
    *("gptq-3", "gptq-4-act-order", "awq-4", "autoround-6-asymmetric", "bnb-nf4-nested", "bnb-int8", "exl3-3-3inst", "mlx-3"),
    "mlx-nvfp4",
)
_SCALED = ("DeepSeek V4 experts", "stacked experts", "Quark INT8", "Quark MXFP4", "AutoRound NVFP4")
_COMFYUI = ("comfyui-old", "comfyui", "comfyui-metadata")
_GROUPS = ("mixed-groups", "mlx-modules")
"""Models whose modules have settings of their own, which config.json names by patterns, or under other names."""
_STORED = (*_QUANTISED, *_SCALED, *_COMFYUI, *_GROUPS, _EXL2)


def _make_quantised() -> None:
    from tests.mini import write_checkpoint
    from tests.models.formats.exl2.test_reading import write
    from tests.models.formats.quantised import CASES
    from tests.models.formats.test_scaled import CASES as SCALED

    write(Path(_EXL2), 0, 96)
    for name in _QUANTISED:
        case = CASES[name]()
        write_checkpoint(Path(name), case.tensors, case.config)
    for name in _SCALED:
        entry, tensors, _ = SCALED[name]
        write_checkpoint(Path(name), tensors, {"model_type": "llama", "quantization_config": entry})
    _make_comfyui()
    _make_groups()


def _make_comfyui() -> None:
    from tests.mini import write_checkpoint
    from tests.models.formats.test_comfyui import INT8, OLD, ONE, text, write_file

    stored, scales, _ = OLD["groups of musubi-tuner"]
    old = {"q.weight": stored, "q.scale_weight": scales, "q.scale_input": ONE, "scaled_fp8": stored[0, :2]}
    settings = {"format": "int8_blockwise", "group_size": 64, "orig_dtype": "torch.float16", "params": {}}
    new = {"q.weight": INT8, "q.weight_scale": ONE.repeat(8).reshape(2, 4)}
    for name, tensors in zip(_COMFYUI, (old, {**new, "q.comfy_quant": text(settings)}, new), strict=True):
        write_checkpoint(Path(name), tensors, {"model_type": "flux", "dtype": "bfloat16"})
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"q": settings}})}
    write_file(Path(_COMFYUI[2]) / "model.safetensors", new, metadata)


def _make_groups() -> None:
    import numpy as np

    from tests.mini import write_checkpoint
    from tests.models.formats.compressed_tensors import test_groups as groups
    from tests.models.formats.test_mlx_settings import EIGHT, eight, four, model

    four_bits, _ = groups.weight(groups.MLP, 4, 256, (32, 256), np.int32)
    eight_bits, _ = groups.weight(groups.ATTENTION, 8, 128, (32, 128), np.int64)
    settings = [groups.group(4, None, ["re:.*mlp.*", "Linear"]), groups.group(8, None, [groups.ATTENTION])]
    groups.write(Path(_GROUPS[0]), settings, {**four_bits, **eight_bits})
    own = {"language_model.model.layers.0.mlp.up_proj": EIGHT}
    case = model(four("model.layers.0.mlp.gate_proj"), eight("model.layers.0.mlp.up_proj"), own=own, hidden_size=128)
    write_checkpoint(Path(_GROUPS[1]), case.tensors, case.config)


def _use_quantised(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    yield next(_use_checkpoint(file, rng))


def _make_gguf() -> None:
    """A model of one layer, whose header is most of the file."""
    import numpy as np

    from weightsmith._base.tensors import BLOCKS, DTYPES, TensorSpec
    from weightsmith._models.formats.gguf.layout import Value, encode_metadata, make_layout

    f32, q8_0 = DTYPES["F32"], BLOCKS["Q8_0"]
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<|x|>"]
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    keys = {"general.architecture": Value("str", "llama")} | {f"llama.{k}": Value("u32", n) for k, n in sizes.items()}
    keys |= {
        "llama.attention.layer_norm_rms_epsilon": Value("f32", 1e-5),
        "tokenizer.ggml.model": Value("str", "llama"),
        "tokenizer.ggml.tokens": Value("str", tokens),
        "tokenizer.ggml.scores": Value("f32", [-float(i) for i in range(10)]),
        "tokenizer.ggml.token_type": Value("i32", [2, 3, 3, 1, 1, 1, 1, 1, 1, 3]),
        "tokenizer.ggml.eos_token_id": Value("u32", 2),
    }
    specs = [TensorSpec("token_embd.weight", q8_0, (10, 32)), TensorSpec("output_norm.weight", f32, (32,))]
    specs += [TensorSpec(f"blk.0.{name}.weight", f32, (32,)) for name in ("attn_norm", "ffn_norm")]
    specs += [TensorSpec("blk.0.attn_q.weight", q8_0, (32, 32)), TensorSpec("rope_freqs.weight", f32, (8,))]
    ones = np.ones(1, "<f4").tobytes()
    Path("g").mkdir()
    (shard,) = make_layout(specs, 10**9, encode_metadata(keys)).shards
    Path("g/model.gguf").write_bytes(shard.header + ones * ((shard.nbytes - len(shard.header)) // 4))


def _use_gguf(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    yield next(_use_checkpoint(file, rng))


def _make_imatrix() -> None:
    """`m`, a model, and the importances of its columns in both forms of a file."""
    import numpy as np

    from tests.calibration_help import save_model
    from weightsmith._base.tensors import DTYPES, TensorSpec
    from weightsmith._models.formats.gguf.imatrix import imatrix_bytes
    from weightsmith._models.formats.gguf.layout import encode_metadata, make_layout

    save_model(Path("m"))
    widths = {f"blk.{i}.{name}.weight": 64 for i in range(2) for name in ("attn_q", "attn_output", "ffn_up")}
    widths |= {"blk.0.ffn_down.weight": 96}
    Path("imatrix.dat").write_bytes(imatrix_bytes({name: np.ones(n, np.float32) for name, n in widths.items()}))
    listed = [(f"{name}.{end}", size) for name, n in widths.items() for end, size in (("in_sum2", n), ("counts", 1))]
    layout = make_layout([TensorSpec(name, DTYPES["F32"], (1, n)) for name, n in listed], 10**9, encode_metadata({}))
    (shard,) = layout.shards
    body = shard.nbytes - len(shard.header)
    Path("imatrix.gguf").write_bytes(shard.header + np.ones(1, "<f4").tobytes() * (body // 4))


def _use_imatrix(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    kind = rng.choice(("gguf-q4_0", "gguf-iq4_nl", "gguf-q5_1"))
    yield lambda: weightsmith.plan(recipe, quantize=kind, imatrix=file)
    if rng.random() < 0.2:
        plan = {"quantize": kind, "imatrix": file}
        yield lambda: weightsmith.merge(recipe, "out.gguf", threads=1, fsync=False, **plan)


def mutate_imatrix(rng: Rng, data: bytes) -> bytes:
    """Numbers of the header, names and lengths; or values that are no importances."""
    if rng.random() < 0.7:
        return mutate_gguf(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 100))):
        at = rng.randrange(len(changed) // 2, len(changed) - 3) & ~3
        changed[at : at + 4] = struct.pack("<f", rng.choice((0.0, -0.0, -1.0, 1e-45, 3e38, math.inf, math.nan)))
    return bytes(changed)


def _make_measurement() -> None:
    """`m`, a model, and the measurement of its blocks."""
    import weightsmith
    from tests.features.quantisation.test_exl2_format import write
    from weightsmith._features.quantisation.exl2.format import prepare_model
    from weightsmith._features.quantisation.exl2.measurement import Measured, measurement_json

    write(Path("m"))
    blocks = prepare_model(weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "m"}]})).blocks
    measured = [(block, [Measured(each, 0.5 / (i + 1)) for i, each in enumerate(block.options)]) for block in blocks]
    Path("measurement.json").write_text(json.dumps(measurement_json(measured)))


def _use_measurement(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    yield lambda: weightsmith.plan(recipe, quantize="exl2", bits=4.5, measurement=file, calibration="none")


def _make_adapters(*, fresh: bool = True) -> None:
    """`lora` and `lora2`, adapters of the same modules with different ranks."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    if fresh:
        _make_models()
    shutil.copytree("lora", "lora2")
    name = "lora2/adapter_model.safetensors"
    save_file({key: np.concatenate([x, x], 0 if "lora_A" in key else 1) for key, x in load_file(name).items()}, name)
    config = json.loads(Path("lora2/adapter_config.json").read_text())
    Path("lora2/adapter_config.json").write_text(json.dumps(config | {"r": 8, "rank_pattern": {}, "use_rslora": True}))


def mutate_adapter(rng: Rng, data: bytes) -> bytes:
    """Another configuration, or other weights."""
    return mutate_json(rng, data, _ADAPTER_WORDS) if data.startswith(b"{") else mutate_safetensors(rng, data)


def _use_adapters(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    method = rng.choice(("linear", "ties", "dare_ties", "della"))
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in ("lora", "lora2")]
    recipe = {"merge_method": method, "models": models}
    yield lambda: weightsmith.plan(recipe)
    if rng.random() < 0.2:
        yield lambda: _merge(recipe, adapter_rank=rng.choice((None, 2)))


def _make_factor_files() -> None:
    """`one` and `two`, files of LoRA factors in kohya's names and in diffusers', and `model`, which has the modules."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(4)
    save_file({"blocks.0.q.weight": rng.standard_normal((6, 8), np.float32)}, "model.safetensors")
    stated = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})}
    for name, rank in (("one", 2), ("two", 3)):
        factors = {"lora_down.weight": (rank, 8), "lora_up.weight": (6, rank), "alpha": (1,)}
        for beginning, own in (("lora_unet_blocks_0_q", name), ("transformer.blocks.0.q", f"{name}-dotted")):
            tensors = {f"{beginning}.{end}": rng.standard_normal(shape, np.float32) for end, shape in factors.items()}
            save_file(tensors, f"{own}.safetensors", metadata=stated if "." in beginning and rank == 2 else None)


def _use_factor_files(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    other = file.replace("one", "two")
    recipe = {"merge_method": rng.choice(("linear", "ties")), "models": [{"model": file}, {"model": other}]}
    for each in recipe["models"]:
        each["parameters"] = {"weight": 0.5}
    yield lambda: weightsmith.plan(recipe)
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"model.safetensors+{file}"}]})
    yield lambda: weightsmith.inspect(file)
    if rng.random() < 0.2:
        yield lambda: _merge(recipe)


def _make_texts() -> None:
    """Calibration texts, and a tokenizer for them. Parquet only where pyarrow is installed."""
    Path("m").mkdir()
    vocab = {character: i for i, character in enumerate("?abcdefghijklmnopqrstuvwxyz")}
    model = {"type": "BPE", "vocab": vocab | {"th": 27, "the": 28}, "merges": [["t", "h"], ["th", "e"]], "unk_token": "?"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
    Path("m/tokenizer.json").write_text(json.dumps(tokenizer))
    lines = [f"the quick brown fox {i} jumps over the lazy dog" for i in range(20)]
    Path("t.txt").write_text("\n".join(lines))
    rows = [{"text": line, "source": "x", "n": [1]} if i % 2 else {"a": line, "b": 1} for i, line in enumerate(lines)]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if _PARQUET:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pydict({"text": lines, "n": list(range(20))}), "t.parquet")


def mutate_text(rng: Rng, data: bytes) -> bytes:
    """A tokenizer with other values, a line with another value, or other bytes."""
    if data.startswith(b'{"version"'):
        return mutate_json(rng, data, ("vocab", "merges", "type", "unk_token", "normalizer", "pre_tokenizer", "pattern"))
    lines = data.split(b"\n")
    if data.startswith(b"{") and rng.random() < 0.7:
        i = rng.randrange(len(lines))
        lines[i] = mutate_json(rng, lines[i], ("text",)).replace(b"\n", b"")
        return b"\n".join(lines)
    return mutate_bytes(rng, data)


def _use_texts(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations.rows import rows_of, text_source

    text = file if file.startswith("t") else rng.choice(_TEXTS)
    yield lambda: rows_of(text_source(text, rng.choice((None, 2)), 16, 0), Path("m"), 64, 1)


def _make_conversations() -> None:
    """Chat-formatted texts and a chat template, with the tokenizer of `_make_texts`."""
    _make_texts()
    talk = [{"role": role, "content": f"{role} says the fox"} for role in ("system", "user", "assistant", "user", "assistant")]
    lines = [json.dumps({"messages": talk[i % 2 :], "source": "x"}) for i in range(6)]
    Path("talks.jsonl").write_text("\n".join(lines))
    Path("template.jinja").write_text(_TEMPLATE)


_TEMPLATE = """{%- macro turn(role) %}{{ bos_token ~ role | upper }}{{ "\\n" }}{% endmacro -%}
{%- if messages[0].role == "system" %}{{ messages[0].content | trim }}{% endif -%}
{%- for message in messages if message.role != "system" -%}
{{ turn(message.role) + message["content"] }}{% if message.content %}{{ eos_token }}{% endif %}
{%- endfor -%}
{%- set ns = namespace(n=0) -%}
{%- if add_generation_prompt %}{{ turn("assistant") }}{% endif -%}
"""
_JINJA = """
    {{ {% %} }} {%- -%} {# #} for in range(10**9) range(99999999) endfor if else endif set namespace macro endmacro messages
    message.role message.content loop.index loop.last raise_exception("no") strftime_now("%Y") tojson trim upper | ~ * 10**10
    "x" * 10**10 ().__class__.__mro__ self cycler joiner include "/etc/passwd" import extends block raw endraw none true
    bos_token eos_token add_generation_prompt tools documents generation endgeneration [] {} [0] [::-1] .format(1) break
""".split()


def mutate_conversations(rng: Rng, data: bytes) -> bytes:
    """A line with other messages, or a template with other expressions; or other bytes."""
    if data.startswith(b"{%-") and rng.random() < 0.8:
        text = data.decode(errors="replace")
        for _ in range(rng.randint(1, 4)):
            first, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 3, 10, 40))
            words = " ".join(rng.choice(_JINJA) for _ in range(rng.randint(0, 3)))
            text = text[:first] + rng.choice((words, "{{ " + words + " }}", "{% " + words + " %}")) + text[first + length :]
        return text.encode()
    lines = data.split(b"\n")
    if data.startswith(b'{"') and rng.random() < 0.8:
        i = rng.randrange(len(lines))
        lines[i] = mutate_json(rng, lines[i], ("messages", "role", "content", "assistant", "user", "tool_calls")).replace(
            b"\n", b""
        )
        return b"\n".join(lines)
    return mutate_bytes(rng, data)


def _use_conversations(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._activations import conversations
    from weightsmith._activations.rows import load_tokenizer, text_source
    from weightsmith._activations.scored_rows import Cutter

    conversations.RENDERING_SECONDS = 2  # a template may loop for as long as it is let
    names = {"bos_token": "a", "eos_token": "b"}

    def rows() -> Any:
        template = Path("template.jinja").read_text(errors="replace")
        cutter = Cutter(load_tokenizer(Path("m/tokenizer.json")), "m", 64, template, names)
        return cutter.rows(text_source("talks.jsonl", None, rng.choice((60, 200)), 0), 8)

    yield rows


def _make_statistics() -> None:
    """`m-stats`, statistics of the model `m` on the text of `settings`; `m2`, its copy."""
    import weightsmith
    from tests.calibration_help import save_model, settings

    if not Path("m").is_dir():
        save_model(Path("m"))
        settings(Path())
    shutil.copytree("m", "m2")
    weightsmith.statistics("m", "text.txt", "m-stats", kind=["second_moments"], rows=2, tokens=8, progress=False)


def _use_statistics(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from weightsmith._activations.stored import read_stored

    if file.endswith("statistics.json"):
        _fit_manifest(Path("m-stats"))
    text = {"model": "m", "text": "m-stats"}
    yield lambda: read_stored("m-stats")
    yield lambda: weightsmith.plan({"merge_method": "regmean", "base_model": "m2", "models": [text]})


def _fit_manifest(folder: Path) -> None:
    """Give a manifest the checksum of a record that was mutated, and its own."""
    from weightsmith._activations.stored import RECORD
    from weightsmith._outputs.checksum import hash_bytes

    path, data = folder / "weightsmith.json", (folder / RECORD).read_bytes()
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    fields["files"][RECORD] = {"bytes": len(data), "xxh3_128": hash_bytes(data)}
    body = json.dumps(fields).encode()[1:]
    path.write_bytes(b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body)


def mutate_statistics(rng: Rng, data: bytes) -> bytes:
    """A record with other values, which the manifest fits; or a manifest with others."""
    if b'"checksum"' in data[:20]:
        return mutate_checksummed(rng, data)
    return mutate_json(rng, data, ("model", "text", "kinds", "rows", "tokens", "source", "sha256", "weights", "seed"))


_PARQUET = find_spec("pyarrow") is not None
_TEXTS = ("t.txt", "t.jsonl", *(["t.parquet"] if _PARQUET else []))
_ADAPTER_WORDS = ("r", "rank_pattern", "alpha_pattern", "use_dora", "modules_to_save", "q_proj", "base_model_name_or_path")


def _make_tokenizers() -> None:
    """`a` and `b` with tokenizer.json, `s` with SentencePiece's tokenizer.model, `t` with tekken.json."""
    _make_models()
    for name in "st":
        shutil.copytree("a", name, dirs_exist_ok=True)
    pieces = ["<unk>", "a", "b", "ab", "\u0120ab", "c"]
    for name, special in (("a", ["<s>", "</s>"]), ("b", ["</s>", "<|im|>", "<think>"])):
        added = [{"id": 6 + i, "content": t, "special": True, "normalized": False} for i, t in enumerate(special)]
        model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [["a", "b"]]}
        tokenizer = {"truncation": None, "added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}, "model": model}
        Path(f"{name}/tokenizer.json").write_text(json.dumps(tokenizer))
        listed = {
            "added_tokens_decoder": {str(6 + len(special)): {"content": "<pad>", "special": True}},
            "chat_template": "{{ x }}",
        }
        Path(f"{name}/tokenizer_config.json").write_text(json.dumps(listed))
        Path(f"{name}/generation_config.json").write_text('{"eos_token_id": [6, 7], "bos_token_id": 6}')
    Path("b/added_tokens.json").write_text('{"<pad>": 9, "<x>": 10}')
    Path("b/special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>", "lstrip": false}, "eos_token": "</s>"}')
    proto = b""
    for i, piece in enumerate(["<unk>", "<s>", "\u2581a", "b"]):
        text = piece.encode()
        message = b"\x0a" + bytes([len(text)]) + text + b"\x15\x00\x00\x80\xbf" + b"\x18" + bytes([3 if i == 1 else 1])
        proto += b"\x0a" + bytes([len(message)]) + message
    Path("s/tokenizer.model").write_bytes(proto + b"\x12\x02\x18\x02")
    ranks = [{"rank": i, "token_bytes": text, "token_str": None} for i, text in enumerate(("YQ==", "Yg==", "YWI="))]
    config = {"default_vocab_size": 5, "default_num_special_tokens": 2}
    tekken = {"config": config, "vocab": ranks, "special_tokens": [{"rank": 0, "token_str": "<s>"}]}
    Path("t/tekken.json").write_text(json.dumps(tekken))


def _use_tokenizer(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    first, second = rng.choice((("a", "b"), ("b", "a"), (file[0], "a")))
    models = [{"model": name, "parameters": {"weight": 1}} for name in dict.fromkeys((first, second))]
    recipe = {"merge_method": "linear", "models": models, "chat_template": "auto"}
    source = rng.choice(("union", "base", first, second))
    tokens = {"<s>": {"source": first, "force": True}, "<n>": {"source": {"kind": "zero"}}}
    yield lambda: weightsmith.plan({**recipe, "tokenizer_source": source})
    yield lambda: weightsmith.plan({**recipe, "tokenizer": {"source": source, "tokens": tokens, "pad_to_multiple_of": 8}})
    yield lambda: _merge({**recipe, "tokenizer_source": source})


def _make_looked_at() -> None:
    _make_tokenizers()
    card = "license: apache-2.0\nbase_model:\n- org/base\n- org/other\ntags: [merge, 'x y']\nlanguage: [fr, de]"
    Path("a/README.md").write_text(f"---\n{card}\n---\n\n# A model\n")


def _use_looks(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    def look(result: Any) -> None:
        json.dumps(result.to_json(), allow_nan=False)
        result.report().to_html().encode()

    ties = {"merge_method": "ties", "base_model": "b", "models": [{"model": "a"}, {"model": "a+lora"}]}
    ties["parameters"] = {"weight": 1, "density": 0.5}
    alone: dict[str, Any] = {"threads": 1, "progress": False}
    yield lambda: look(weightsmith.inspect("a", stats=True, **alone))
    yield lambda: look(weightsmith.diff("b", "a", **alone))
    yield lambda: look(weightsmith.diff("a", rng.choice(("b", "a+lora", "q", "x")), **alone))
    yield lambda: look(weightsmith.diff("b", "a+lora", base="a", **alone))
    yield lambda: look(weightsmith.preview(ties, **alone))
    yield lambda: look(weightsmith.preview(ties, full=True, **alone))


def _make_recipes() -> None:
    _make_models()
    for name, text in _RECIPES.items():
        Path(name).write_text(text)
    Path("saliency.json").write_text(json.dumps({str(i): [0.1, 0.4, 0.2, 0.3] for i in range(3)}))


_RECIPES = {
    "linear.yml": "merge_method: linear\nmodels:\n  - &m\n    model: a\n    parameters:\n      weight: [0.2, 0.5, 1]\n"
    "  - <<: *m\n    model: b\ndtype: bfloat16\n",
    "ties.yml": "merge_method: ties\nbase_model: a\nmodels:\n  - model: b\n    parameters:\n      density: 0.5\n      weight:\n"
    "        - filter: mlp\n          value: 0.3\n        - value: 1\nparameters:\n  normalize: true\nout_dtype: bfloat16\n",
    "stack.yml": "merge_method: passthrough\nslices:\n  - sources:\n      - model: a\n        layer_range: [0, 2]\n"
    "  - sources:\n      - model: a+lora\n        layer_range: [1, 3]\n        parameters:\n          scale: 0.5\n",
    "moe.yml": "base_model: a\ngate_mode: random\nexperts:\n  - source_model: a\n    noise_scale: 0.01\n  - source_model: b\n"
    "shared_experts:\n  - source_model: b\n    residual_scale: 0.1\nexperts_per_token: 1\n",
    "stages.yml": "name: one\nmerge_method: linear\nmodels:\n  - model: a\nparameters: {weight: 0.5}\n---\n"
    "merge_method: ties\nbase_model: a\nmodels:\n  - model: one\n  - model:\n      merge_method: slerp\n      base_model: one\n"
    "      models:\n        - model: b\n      parameters: {t: 0.5}\nparameters: {weight: 1}\n",
    "tune.yml": "merge_method: {choice: [ties, dare_ties]}\nbase_model: a\nx-w: &w {tune: [0, 1]}\nmodels:\n  - model: b\n"
    "    parameters:\n      density: [{tune: [0.1, 1]}, 0.5]\n      weight: *w\nparameters:\n  lambda:\n    tune: [0, 2]\n",
    "prune.yml": "model: x\nprune_experts:\n  saliency: saliency.json\n  experts: 2\n",
    "groups.yml": "model: x\nmerge_experts:\n  groups: [[0, 1], [2, 3]]\n  weights: [[1, 2], [1, 1]]\n",
}


def _make_manifest() -> None:
    _make_models()
    from weightsmith import merge

    merge(LINEAR, "made", threads=1, fsync=False)


def _make_plan() -> None:
    import weightsmith

    _make_tokenizers()
    with contextlib.suppress(FileExistsError):
        Path("plans").mkdir()
    recipes = {
        "linear": LINEAR,
        "stack": {"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}]}]},
        "union": {**LINEAR, "tokenizer_source": "union"},
        "stages": {"merge_method": "slerp", "base_model": "a", "models": [{"model": LINEAR}], "parameters": {"t": 0.5}},
    }
    for name, recipe in recipes.items():
        Path(f"plans/{name}.json").write_text(json.dumps(weightsmith.plan(recipe).to_json()))
    from weightsmith._features.mixture.build import prepare_moe
    from weightsmith._planning.options import RecipeOptions

    with prepare_moe(
        {"base_model": "a", "experts": [{"source_model": n} for n in "ab"], "gate_mode": "random"}, RecipeOptions()
    ) as made:
        Path("plans/moe.json").write_text(json.dumps(made.plan.to_json()))


PRODUCTS = {
    "scope": ("thresholds",),
    "active": ("activity",),
    "largest": ("magnitudes",),
    "routed": ("router",),
    "matched": ("neuron_order",),
    "extracted": ("factors", "changes"),
    "adapters": ("cores", "merged_factors"),
    "combined": ("combination",),
    "transplanted": ("transplanted_rows",),
    "looks": ("differences", "statistics", "alignments", "survival"),
    "calibrated": ("embedding", "quantised_layer", "quantised_states", "largest_state", "largest_states"),
    "scaled": ("activation_scales",),
    "losses": ("states", "gradients", "measured_layer"),
    "sized": ("scored_layer", "scored_vocabulary"),
    "errors": ("measured_blocks",),
    "importances": ("statistic",),
    "evaluated": ("given", "embedded_rows", "losses", "sampled_states"),
    "stored": ("stored_statistic",),
    "images": ("token_row",),
}
"""The plans that are mutated, and the kinds of products that each of them is there for; together all of `products.KINDS`."""


def _make_products() -> None:
    """`products/NAME.json` for each of `PRODUCTS`; `m`, a model that transformers builds."""
    import weightsmith
    from tests import vision_zoo
    from tests.calibration_help import save_model, settings
    from weightsmith._activations.model import input_of
    from weightsmith._activations.scored_rows import ScoredRows
    from weightsmith._activations.scoring import scored
    from weightsmith._features.adapters.extract import prepare_extraction
    from weightsmith._features.adapters.options import ExtractSettings
    from weightsmith._features.mixture.build import prepare_moe
    from weightsmith._features.transplant.options import TransplantSettings
    from weightsmith._features.transplant.plan import prepare_transplant
    from weightsmith._planning.options import RecipeOptions
    from weightsmith._planning.planner import Prepared, prepare
    from weightsmith._plans import COPY, Plan, Read, Step
    from weightsmith._reports.evaluate.layers import with_samples
    from weightsmith._reports.look.comparison import alignments
    from weightsmith._reports.look.differences import differences
    from weightsmith._reports.look.inspect import statistics_product
    from weightsmith._reports.look.sampling import survivals

    _make_tokenizers()
    save_model(Path("m"))
    _make_adapters(fresh=False)
    merge = {"base_model": "a", "models": [{"model": "b", "parameters": {"weight": 1}}]}
    ties = {"merge_method": "ties", **merge, "parameters": {"density": 0.5, "scope": "model"}}
    copy = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    lora = [{"model": name, "parameters": {"weight": 0.5}} for name in ("lora", "lora2")]
    experts = [{"source_model": "m", "positive_prompts": [text]} for text in ("a b", "c d")]
    calibration = {"calibration": "text.txt", "calibration_rows": 2, "calibration_tokens": 8}
    settings(Path())

    def plan_of(prepared: Prepared) -> Plan:
        with prepared:
            return prepared.plan

    def looks() -> Plan:
        """Products of looks, which have no plans with steps otherwise."""
        shutil.copytree("a", "c")
        more = [*LINEAR["models"], {"model": "c", "parameters": {"weight": 0.5}}]
        two, three = (weightsmith.plan({**LINEAR, "models": models}) for models in (LINEAR["models"], more))
        copies = [Step(step.out, COPY, (Read(0, step.out.name),)) for step in two.steps]
        pairs = [dataclasses.replace(step, settings=step.settings + len(three.settings)) for step in two.steps]
        plan = dataclasses.replace(three, settings=(*three.settings, *two.settings))
        made = {"d": differences, "s": statistics_product, "a": alignments, "v": survivals}
        steps = {"d": pairs, "s": copies, "a": three.steps, "v": three.steps}
        products = tuple(make(name, steps[name]) for name, make in made.items())
        return dataclasses.replace(plan, products=products)

    def evaluated() -> Plan:
        """An evaluation, which is part of no plan that is written."""
        import numpy as np

        with prepare(copy) as prepared:
            rows = ScoredRows(*np.ones((2, 2, 8), np.int32))
            products = with_samples(scored(input_of(prepared.inputs, 0), rows))
            return dataclasses.replace(prepared.plan, products=products)

    def stored() -> Plan:
        """A merge that reads statistics from a folder."""
        _make_statistics()
        text = {"model": "m", "text": "m-stats"}
        return weightsmith.plan({"merge_method": "regmean", "base_model": "m2", "models": [text]})

    def images() -> Plan:
        """A vision half that has a row of the embedding."""
        vision_zoo.save("pixtral", Path("pixtral"))
        return weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "pixtral"}]}, quantize="gguf-q8_0")

    makers: dict[str, Callable[[], Plan]] = {
        "scope": lambda: weightsmith.plan(ties),
        "active": lambda: weightsmith.plan({"merge_method": "ramplus", "base_model": "a", "models": [{"model": "b"}]}),
        "largest": lambda: weightsmith.plan(copy, quantize="nvfp4a16"),
        "routed": lambda: plan_of(prepare_moe({"base_model": "m", "gate_mode": "hidden", "experts": experts}, RecipeOptions())),
        "matched": lambda: plan_of(
            prepare_moe({"model": "x", "merge_experts": {"groups": [[0, 1], [2, 3]], "match": True}}, RecipeOptions())
        ),
        "extracted": lambda: plan_of(prepare_extraction("b", "a", ExtractSettings(max_rank=2))),
        "adapters": lambda: weightsmith.plan({"merge_method": "linear", "models": lora}, adapter_rank=2),
        "combined": lambda: weightsmith.plan({"merge_method": "peft_ties_svd", "models": lora, "parameters": {"density": 0.5}}),
        "transplanted": lambda: plan_of(prepare_transplant("b", "a", TransplantSettings(k=2))),
        "looks": looks,
        "calibrated": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, uniform=True, **calibration),
        "scaled": lambda: weightsmith.plan(copy, quantize="fp8-static", **calibration),
        "losses": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, **calibration),
        "sized": lambda: weightsmith.plan(copy, quantize="gguf-q4_k_m", size_bytes=10**9, **calibration),
        "errors": lambda: weightsmith.plan(copy, quantize="exl2", bits=4.1, measure="full", **calibration),
        "importances": lambda: weightsmith.plan(copy, quantize="gguf-q4_k_m", **calibration),
        "evaluated": evaluated,
        "stored": stored,
        "images": images,
    }
    Path("products").mkdir()
    for name, ops in PRODUCTS.items():
        plan = makers[name]()
        if missing := set(ops).difference(product.op for product in plan.products):
            raise RuntimeError(f"the plan {name} has no product {missing}")
        Path(f"products/{name}.json").write_text(json.dumps(plan.to_json()))


def mutate_products(rng: Rng, data: bytes) -> bytes:
    """A plan in which its products are mutated, what follows from them, or anything."""
    plan = json.loads(data)
    choice = rng.random()
    if choice < 0.15:
        return mutate_json(rng, data, _PRODUCT_WORDS)
    part = {"then": plan.pop("then")} if "then" in plan and choice < 0.3 else {"products": plan.pop("products")}
    if "products" in part and choice < 0.8:  # one of them, whose steps are most of it, and for all that is shorter
        i = rng.randrange(len(part["products"]))
        product = part["products"][i]
        keys = rng.choice(
            (["settings"], ["settings"], ["outs", "needs", "models", "files", "transient"], ["steps"], [*product])
        )
        own = {key: product.pop(key, False) for key in keys}
        changed = mutate_json(rng, json.dumps(own).encode(), _PRODUCT_WORDS)
        head, tail = json.dumps(part["products"][:i])[:-1], json.dumps(part["products"][i + 1 :])[1:]
        between = json.dumps(product)[:-1].encode() + (b", " if product else b"") + changed[1:]
        text = (
            b'{"products": ' + head.encode() + (b", " if i else b"") + between + (b", " if tail != "]" else b"") + tail.encode()
        )
        return json.dumps(plan)[:-1].encode() + b", " + text[1:] + b"}"
    return json.dumps(plan)[:-1].encode() + b", " + mutate_json(rng, json.dumps(part).encode(), _PRODUCT_WORDS)[1:]


_PRODUCT_WORDS = ("transient", "needs", "files", "models", "format", "settings", "encoding", "layer", "candidates", "targets")


def _interrupt() -> None:
    class Stop(Exception):
        pass

    def stop(now: Any) -> None:
        if now.tensors > 5:
            raise Stop

    with contextlib.suppress(Stop):
        _merge(LINEAR, progress=stop)


_JOURNAL = ".out.weightsmith-staging/journal"
KINDS: dict[str, Kind] = {
    "config": Kind(
        _make_models,
        ("a/config.json", "x/config.json", "q/config.json"),
        lambda rng, data: mutate_json(rng, data, _CONFIG_WORDS),
        _use_config,
    ),
    "safetensors": Kind(_make_models, ("a/model.safetensors", "q/model.safetensors"), mutate_safetensors, _use_checkpoint),
    "index": Kind(
        _make_index,
        ("a/model.safetensors.index.json",),
        lambda rng, data: mutate_json(rng, data, ("weight_map", "metadata", "total_size")),
        _use_checkpoint,
    ),
    "quantised": Kind(
        _make_quantised,
        tuple(f"{name}/{file}" for name in _STORED for file in ("config.json", "model.safetensors")),
        mutate_quantised,
        _use_quantised,
    ),
    "pytorch": Kind(_make_pytorch, ("p/pytorch_model.bin",), mutate_pytorch, _use_checkpoint),
    "gguf": Kind(_make_gguf, ("g/model.gguf",), mutate_gguf, _use_gguf),
    "adapter-config": Kind(
        _make_models,
        ("lora/adapter_config.json",),
        lambda rng, data: mutate_json(rng, data, _ADAPTER_WORDS),
        _use_adapter,
    ),
    "adapter-weights": Kind(_make_models, ("lora/adapter_model.safetensors",), mutate_safetensors, _use_adapter),
    "adapters": Kind(
        _make_adapters, ("lora2/adapter_config.json", "lora2/adapter_model.safetensors"), mutate_adapter, _use_adapters
    ),
    "factor-files": Kind(
        _make_factor_files, ("one.safetensors", "one-dotted.safetensors"), mutate_safetensors, _use_factor_files
    ),
    "imatrix": Kind(_make_imatrix, ("imatrix.dat", "imatrix.gguf"), mutate_imatrix, _use_imatrix),
    "measurement": Kind(
        _make_measurement,
        ("measurement.json",),
        lambda rng, data: mutate_json(rng, data, ("accuracy", "total_bits", "bits", "bits_prop", "group_size", "scale_bits")),
        _use_measurement,
    ),
    "calibration": Kind(_make_texts, ("m/tokenizer.json", *_TEXTS), mutate_text, _use_texts),
    "conversations": Kind(_make_conversations, ("talks.jsonl", "template.jinja"), mutate_conversations, _use_conversations),
    "statistics": Kind(
        _make_statistics, ("m-stats/statistics.json", "m-stats/weightsmith.json"), mutate_statistics, _use_statistics
    ),
    "settings": Kind(
        _make_models,
        ("a/tokenizer_config.json",),
        lambda rng, data: mutate_json(rng, data, ("auto_map", "AutoTokenizer")),
        _use_checkpoint,
    ),
    "tokenizer": Kind(
        _make_tokenizers,
        (
            *("a/tokenizer.json", "b/tokenizer.json", "b/tokenizer_config.json", "a/generation_config.json", "t/tekken.json"),
            *("b/added_tokens.json", "b/special_tokens_map.json"),
        ),
        lambda rng, data: mutate_json(rng, data, ("vocab", "added_tokens", "id", "content", "special", "merges", "type")),
        _use_tokenizer,
    ),
    "look": Kind(
        _make_looked_at,
        ("a/config.json", "a/model.safetensors", "a/tokenizer.json", "a/tokenizer_config.json", "a/README.md"),
        mutate_model,
        _use_looks,
    ),
    "sentencepiece": Kind(_make_tokenizers, ("s/tokenizer.model",), mutate_bytes, _use_tokenizer),
    "recipe": Kind(_make_recipes, tuple(_RECIPES), mutate_recipe, _use_recipe),
    "saliency": Kind(_make_recipes, ("saliency.json",), mutate_json, lambda file, rng: _use_recipe("prune.yml", rng)),
    "manifest": Kind(_make_manifest, ("made/weightsmith.json",), mutate_checksummed, _use_manifest),
    "plan": Kind(
        _make_plan,
        ("plans/linear.json", "plans/stack.json", "plans/union.json", "plans/moe.json", "plans/stages.json"),
        lambda rng, data: mutate_json(rng, data, ("pieces", "needs", "stored", "encoding", "layer", "role", "op", "shape")),
        _use_plan,
    ),
    "products": Kind(
        _make_products, tuple(f"products/{name}.json" for name in PRODUCTS), mutate_products, _use_products, ways=1
    ),
    "journal": Kind(_make_models, (_JOURNAL,), mutate_journal, _use_journal, _interrupt),
    "bucket-journal": Kind(_make_bucket_journal, ("bucket-journal",), mutate_journal, _use_bucket_journal),
}


def _broken(misbehave: Callable[[], Any]) -> Kind:
    """A kind whose mutated files make it misbehave, to see that this is noticed."""

    def use(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
        yield (lambda: None) if Path(file).read_bytes() == b"good" else misbehave

    return Kind(lambda: Path("x").write_bytes(b"good") and None, ("x",), lambda rng, data: data[::-1], use)


def _hang() -> None:
    while True:
        with contextlib.suppress(Exception):
            pass


def _long_message() -> None:
    from weightsmith._base.errors import PlanError, StoreError

    raise PlanError([StoreError("x" * 900, details=["y" * 900] * 40)])


BROKEN = {
    "traceback": _broken(lambda: {}["x"]),
    "hang": _broken(_hang),
    "memory": _broken(lambda: bytearray(b"x") * ((MEGABYTES + 100) << 20)),
    "death": _broken(lambda: os._exit(3)),
    "message": _broken(_long_message),
}
"""Not among the kinds that are run: each is a failure."""


# ---- one case


def run_case(kind: str, seed: int, case: int, folder: Path) -> Iterator[Callable[[], Any]]:
    """Put the mutated file of a case in place; the calls to make. folder: of the good inputs, the current one."""
    found, rng = (KINDS | BROKEN)[kind], Rng(f"{kind} {seed} {case}")
    file = rng.choice(found.files)
    (folder / file).write_bytes(found.mutate(rng, (folder / file).read_bytes()))
    return found.use(file, rng)


def problem_of(error: BaseException) -> str:
    """What is wrong with an exception as the end of a call; "" if it is a good one."""
    from weightsmith._base.errors import WeightsmithError

    if not isinstance(error, WeightsmithError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = str(error)
    if len(text) > MAX_MESSAGE:
        return f"a message of {len(text):,} characters: {text[:100]!r}"
    strange = [c for c in text if not c.isprintable() and c not in "\n\t"]  # a line of a recipe keeps its tabs
    return f"a message with {strange[0]!r}: {text[:200]!r}" if strange else ""


def work(kind: str, seed: int, cases: Sequence[int], good: Path, limit: float) -> None:
    """Run cases one after another in this process; lines of JSON to stdout. good: a folder with the good inputs."""
    from weightsmith._base.errors import WeightsmithError
    from weightsmith._planning.planner import loading

    loading.installed = lambda: False  # transformers is not what is tested, and takes seconds for each stack
    signal.signal(signal.SIGALRM, lambda *_: _too_late("by the clock"))
    signal.signal(signal.SIGPROF, lambda *_: _too_late("of processor time"))
    place, pristine = good.parent / f"work-{os.getpid()}", good.parent / f"pristine-{os.getpid()}"
    os.chdir(shutil.copytree(good, place))
    (KINDS | BROKEN)[kind].start()
    shutil.copytree(place, pristine)
    for file in (KINDS | BROKEN)[kind].files:  # what is good must be good; this also compiles and imports what the cases use
        calls = [call for n in range((KINDS | BROKEN)[kind].ways) for call in (KINDS | BROKEN)[kind].use(file, _Always(n))]
        taken = 0
        for call in calls:
            with contextlib.suppress(WeightsmithError):  # a layout or a method that is not for these models
                call()
                taken += 1
            _restore(place, pristine)
        if not taken:
            raise RuntimeError(f"{file} is refused as it is")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + (_LIMIT_MEGABYTES << 20), resource.RLIM_INFINITY))
    for case in cases:
        print(json.dumps({"begin": case}), flush=True)
        problems, refused, before, began = [], 0, _reset_peak(), time.process_time()
        for call in run_case(kind, seed, case, place):
            _set_limits(limit, WAITING)
            try:
                call()
            except BaseException as error:
                _set_limits(0, 0)
                refused += 1
                if problem := problem_of(error):
                    problems.append((problem, _where(error), traceback.format_exc()[-3000:]))
            finally:
                _set_limits(0, 0)
        seconds, megabytes = time.process_time() - began, (_status("VmHWM") - before) / (1 << 20)
        if megabytes > MEGABYTES:
            problems.append((f"{megabytes:.0f} MB", "memory", ""))
        fact = {"end": case, "refused": refused > 0, "problems": problems, "seconds": seconds, "megabytes": megabytes}
        print(json.dumps(fact), flush=True)
        _restore(place, pristine)
    os.chdir(good.parent)


class _Always(random.Random):
    """Chooses as others do, but makes every call that is only sometimes made."""

    def random(self) -> float:
        return 0.0


def _restore(place: Path, pristine: Path) -> None:
    """Undo what a case did. Files keep their inodes: work that was begun is of these very files."""
    for entry in list(place.iterdir()):
        if entry.name.startswith(".") or not (pristine / entry.name).exists():
            shutil.rmtree(entry)
            if (pristine / entry.name).exists():
                shutil.copytree(pristine / entry.name, entry)
    for entry in pristine.glob(".*"):
        if not (place / entry.name).exists():
            shutil.copytree(entry, place / entry.name)
    for path in [path for pattern in ("*", "[!.]*/*") for path in pristine.glob(pattern) if path.is_file()]:
        own = place / path.relative_to(pristine)
        if not own.is_file() or own.read_bytes() != path.read_bytes():
            own.write_bytes(path.read_bytes())


def _set_limits(seconds: float, waiting: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting)


def _too_late(how: str) -> None:
    raise Hang(f"too long {how}")


def _where(error: BaseException) -> str:
    """The last place in weightsmith where an error came by."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "weightsmith/" in f.filename and "site-packages" not in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def _status(key: str) -> int:
    """A number of bytes that the kernel knows of this process; 0 where it does not."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10  # type: ignore[index]
    return 0


def _reset_peak() -> int:
    """Bytes that are resident now; the peak counts from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


# ---- all cases


@dataclass
class Result:
    """What came of the cases of one kind. problems: (what, where) -> numbers of the cases, and one traceback."""

    cases: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.problems: dict[tuple[str, str], tuple[list[int], str]] = {}

    def add(self, what: str, where: str, trace: str, case: int) -> None:
        """A failure. Those that differ in numbers and names alone are of one sort."""
        sort = (re.sub(r"\d+|'[^']*'", "…", what)[:80], where)
        self.problems.setdefault(sort, ([], f"{what}\n{trace}"))[0].append(case)


def fuzz(kind: str, seed: int, cases: Sequence[int], good: Path, limit: float) -> Result:
    """Run cases in children. good: a folder with the good inputs. limit: of a case, seconds of processor time."""
    result, left = Result(), list(cases)
    while left:
        own = ["--child", str(good), "--kinds", kind, "--seed", str(seed), "--seconds", str(limit)]
        command = [sys.executable, __file__, *own]
        child = subprocess.Popen([*command, "--only", *map(str, left[:1000])], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        running: int | None = None
        errors = b""
        assert child.stdout is not None
        assert child.stderr is not None
        os.set_blocking(child.stderr.fileno(), False)
        answered = True
        while answered:
            answered = bool(select.select([child.stdout], [], [], 8 * WAITING + _SPARE)[0])
            line = child.stdout.readline() if answered else b""
            errors = (errors + (child.stderr.read() or b""))[-2000:]
            if not line:
                break
            fact = json.loads(line)
            if "begin" in fact:
                running = fact["begin"]
                continue
            running = None
            left.remove(fact["end"])
            result.cases += 1
            result.refused += fact["refused"]
            result.slowest = max(result.slowest, fact["seconds"])
            result.largest = max(result.largest, fact["megabytes"])
            for what, where, trace in fact["problems"]:
                result.add(what, where, trace, fact["end"])
        child.kill()
        status = child.wait()
        child.stdout.close()
        errors = (errors + (child.stderr.read() or b""))[-2000:]
        child.stderr.close()
        if running is not None:
            what = f"the process died with status {status}" if answered else "the process did not answer"
            result.add(what, "process", errors.decode(errors="replace"), running)
            result.cases += 1
            left.remove(running)
        elif status not in (0, -signal.SIGKILL) and errors:
            raise RuntimeError(f"{kind}: no case could be run:\n{errors.decode(errors='replace')}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz every kind of input.", epilog=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS | BROKEN, default=list(KINDS), metavar="KIND")
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of processor time for each case")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--keep", type=Path, help="copy the files of the first case of --only here, and run nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    cases = given.only or range(given.cases)
    if given.child:
        work(given.kinds[0], given.seed, cases, given.child, given.seconds)
        return 0
    failures = 0
    for kind in given.kinds:
        with tempfile.TemporaryDirectory(prefix="weightsmith-fuzz-") as folder:
            good = Path(folder, "good")
            good.mkdir()
            with contextlib.chdir(good):
                (KINDS | BROKEN)[kind].make()
            if given.keep:
                shutil.copytree(good, given.keep)
                with contextlib.chdir(given.keep):
                    run_case(kind, given.seed, cases[0], given.keep.absolute())
                continue
            began = time.monotonic()
            result = fuzz(kind, given.seed, cases, good, given.seconds)
        failures += len(result.problems)
        print(
            f"{kind:16} {result.cases:7,} files, {result.refused:7,} refused, {time.monotonic() - began:6.0f} s, "
            f"slowest {result.slowest:5.2f} s, at most {result.largest:4.0f} MB, "
            f"{sum(len(cases) for cases, _ in result.problems.values()):,} failures of {len(result.problems)} sorts",
            flush=True,
        )
        for (what, where), (numbers, trace) in result.problems.items():
            print(f"  {what} ({where}): {len(numbers)} times, cases {', '.join(map(str, numbers[:5]))}\n{trace}", flush=True)
    return 1 if failures else 0


sys.path[:0] = [str(ROOT)]
if __name__ == "__main__":
    sys.exit(main())
