"""Files of tokenizers, which are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng, merge
from scripts.fuzz.models import make_models
from scripts.fuzz.mutators import mutate_bytes, mutate_json


def make_tokenizers() -> None:
    """`a` and `b` with tokenizer.json, `s` with SentencePiece's tokenizer.model, `t` with tekken.json."""
    make_models()
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
    yield lambda: merge({**recipe, "tokenizer_source": source})


KINDS = {
    "tokenizer": Kind(
        make_tokenizers,
        (
            *("a/tokenizer.json", "b/tokenizer.json", "b/tokenizer_config.json", "a/generation_config.json", "t/tekken.json"),
            *("b/added_tokens.json", "b/special_tokens_map.json"),
        ),
        lambda rng, data: mutate_json(rng, data, ("vocab", "added_tokens", "id", "content", "special", "merges", "type")),
        _use_tokenizer,
    ),
    "sentencepiece": Kind(make_tokenizers, ("s/tokenizer.model",), mutate_bytes, _use_tokenizer),
}
