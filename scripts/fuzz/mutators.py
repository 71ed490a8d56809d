"""Good bytes into others: JSON, safetensors, GGUF, YAML, journals, and any bytes."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Sequence

from scripts.fuzz.kind import Rng


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
        return mutate_json(rng, data, (*CONFIG_WORDS, "vocab", "added_tokens", "content", "chat_template"))
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


CONFIG_WORDS = """
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
