"""llama.cpp through ctypes, as a judge: the libraries that the npm package @node-llama-cpp/linux-x64 contains.

`make test` installs them. WEIGHTSMITH_LIBLLAMA names another folder with libllama and libggml.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.readers import installed

FOLDER = installed("WEIGHTSMITH_LIBLLAMA", "llama.cpp", "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64")

needs_llama_cpp = pytest.mark.skipif(not any(FOLDER.glob("libllama*.so")), reason="needs llama.cpp's library")


class _Quantize(c.Structure):
    """llama_model_quantize_params, up to what is used, and space for what follows."""

    _fields_ = [
        *((name, c.c_int) for name in ("threads", "ftype", "output_type", "embedding_type")),
        *((name, c.c_bool) for name in ("requantize", "quantize_output", "only_copy", "pure", "keep_split", "dry_run")),
        *((name, c.c_void_p) for name in ("imatrix", "overrides", "types", "prune")),
        ("more", c.c_uint8 * 64),
    ]  # fmt: skip


class _Importance(c.Structure):
    _fields_ = [("name", c.c_char_p), ("data", c.c_void_p), ("size", c.c_size_t)]


@cache
def library() -> Any:
    """libllama, with its processors loaded and its log silent."""

    def load(pattern: str) -> c.CDLL:
        return c.CDLL(str(next(iter(sorted(FOLDER.glob(pattern))))), mode=c.RTLD_GLOBAL)

    load("libggml-base*.so")
    ggml, llama = load("libggml.*so"), load("libllama.*so")
    ggml.ggml_backend_load_all_from_path.argtypes = [c.c_char_p]
    ggml.ggml_backend_load_all_from_path(str(FOLDER).encode())
    llama.silent = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(_log)
    llama.llama_log_set(llama.silent, None)
    llama.llama_backend_init()
    llama.llama_model_quantize_default_params.restype = _Quantize
    llama.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(_Quantize)]
    llama.llama_model_quantize.restype = c.c_uint32
    return llama


def _log(level: int, text: bytes, data: object) -> None:
    if level == 4 and os.environ.get("LLAMA_LOG"):
        print(text.decode(errors="replace"), end="")


def quantize(source: Path, out: Path, ftype: int, importances: Mapping[str, npt.NDArray[np.float32]] | None = None) -> bool:
    """What llama-quantize does. Returns whether it succeeded."""
    llama = library()
    settings = llama.llama_model_quantize_default_params()
    settings.threads, settings.ftype = 2, ftype
    listed = [(name.encode(), np.ascontiguousarray(values, np.float32)) for name, values in (importances or {}).items()]
    records = (_Importance * (len(listed) + 1))(*[_Importance(name, a.ctypes.data, a.size) for name, a in listed])
    if listed:
        settings.imatrix = c.cast(records, c.c_void_p).value
    return llama.llama_model_quantize(str(source).encode(), str(out).encode(), c.byref(settings)) == 0


class _Model(c.Structure):
    _fields_ = [("all", c.c_uint8 * 512)]


class _Context(c.Structure):
    _fields_ = [*((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch")), ("more", c.c_uint8 * 500)]


class _Batch(c.Structure):
    _fields_ = [
        ("n", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embedding", c.c_void_p),
        ("position", c.POINTER(c.c_int32)),
        ("n_sequences", c.POINTER(c.c_int32)),
        ("sequences", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


class Judge:
    """A model that llama.cpp has loaded; a context manager."""

    def __init__(self, path: Path) -> None:
        def call(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library(), name)
            function.restype, function.argtypes = result, arguments
            return function

        self._call = call
        load = call("llama_model_load_from_file", c.c_void_p, c.c_char_p, _Model)
        self._model = load(str(path).encode(), call("llama_model_default_params", _Model)())
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = call("llama_model_get_vocab", c.c_void_p, c.c_void_p)(self._model)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self._call("llama_model_free", None, c.c_void_p)(self._model)

    def tokens(self, text: str, *, around: bool = False) -> list[int]:
        """Of a text, with special ones that are found in it. around: with those that are put before and behind it."""
        data, call = text.encode(), self._call
        out = (c.c_int32 * (len(data) + 16))()
        arguments = c.c_void_p, c.c_char_p, c.c_int32, c.c_void_p, c.c_int32, c.c_bool, c.c_bool
        count = call("llama_tokenize", c.c_int32, *arguments)(self._vocab, data, len(data), out, len(out), around, True)
        assert count >= 0
        return list(out[:count])

    def stops_at(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(self._call("llama_vocab_is_eog", c.c_bool, c.c_void_p, c.c_int32)(self._vocab, token))

    def logits(self, tokens: Sequence[int], adapter: Path | None = None) -> npt.NDArray[np.float32]:
        """What follows each of some tokens: float32 [tokens, vocabulary]. adapter: a GGUF file that is added."""
        size = self._call("llama_vocab_n_tokens", c.c_int32, c.c_void_p)(self._vocab)
        with self._computed(tokens, adapter=adapter) as context:
            pointer = self._call("llama_get_logits", c.POINTER(c.c_float), c.c_void_p)(context)
            return np.ctypeslib.as_array(pointer, (len(tokens), size)).copy()

    def vectors(self, tokens: Sequence[int], *, encodes: bool = False) -> npt.NDArray[np.float32]:
        """The vector of each of some tokens, of a model that does not pool them: float32 [tokens, width].

        encodes  it is the encoder of a model that also has a decoder, or once had one
        """
        width = self._call("llama_model_n_embd", c.c_int32, c.c_void_p)(self._model)
        with self._computed(tokens, vectors=True, encodes=encodes) as context:
            assert self._call("llama_pooling_type", c.c_int, c.c_void_p)(context) == 0
            pointer = self._call("llama_get_embeddings", c.POINTER(c.c_float), c.c_void_p)(context)
            return np.ctypeslib.as_array(pointer, (len(tokens), width)).copy()

    def pooled(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The vector of a text, or its scores, as the file says that tokens are pooled: float32 [width or labels]."""
        call = self._call
        with self._computed(tokens, vectors=True) as context:
            pooling = call("llama_pooling_type", c.c_int, c.c_void_p)(context)
            assert pooling > 0
            size = "llama_model_n_cls_out" if pooling == 4 else "llama_model_n_embd_out"
            count = call(size, c.c_int32, c.c_void_p)(self._model)
            pointer = call("llama_get_embeddings_seq", c.POINTER(c.c_float), c.c_void_p, c.c_int32)(context, 0)
            return np.ctypeslib.as_array(pointer, (count,)).copy()

    @contextmanager
    def _computed(
        self, tokens: Sequence[int], *, vectors: bool = False, adapter: Path | None = None, encodes: bool = False
    ) -> Iterator[Any]:
        """A context in which the model has read some tokens."""
        call, n = self._call, max(64, len(tokens))
        settings = call("llama_context_default_params", _Context)()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = n
        context = call("llama_init_from_model", c.c_void_p, c.c_void_p, _Context)(self._model, settings)
        assert context
        call("llama_set_embeddings", None, c.c_void_p, c.c_bool)(context, vectors)
        if adapter is not None:
            lora = call("llama_adapter_lora_init", c.c_void_p, c.c_void_p, c.c_char_p)(self._model, str(adapter).encode())
            assert lora, f"llama.cpp does not load {adapter}"
            adapters, scales = (c.c_void_p * 1)(lora), (c.c_float * 1)(1)
            arguments = c.c_void_p, c.POINTER(c.c_void_p), c.c_size_t, c.POINTER(c.c_float)
            assert call("llama_set_adapters_lora", c.c_int32, *arguments)(context, adapters, 1, scales) == 0
        # Its threads wait for each other by spinning: beside other workers several take a hundred times as long as one.
        call("llama_set_n_threads", None, c.c_void_p, c.c_int32, c.c_int32)(context, 1, 1)
        batch = call("llama_batch_init", _Batch, c.c_int32, c.c_int32, c.c_int32)(len(tokens), 0, 1)
        batch.n = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.position[i], batch.n_sequences[i], batch.logits[i] = token, i, 1, 1
            batch.sequences[i][0] = 0
        assert call("llama_encode" if encodes else "llama_decode", c.c_int32, c.c_void_p, _Batch)(context, batch) == 0
        yield context
        call("llama_batch_free", None, _Batch)(batch)
        call("llama_free", None, c.c_void_p)(context)
