"""llama.cpp's vision halves through ctypes, as a judge.

They are in the extension module of the PyPI package xllamacpp, which `make test` installs. WEIGHTSMITH_LIBMTMD names another
library that has llama.cpp's `mtmd`. It runs in a process of its own (this module as a program): another version of llama.cpp in
the same process (`tests.llama_cpp`) would take the place of some of its functions, and it aborts.
"""

from __future__ import annotations

import ctypes as c
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.readers import installed

LIBRARY = installed("WEIGHTSMITH_LIBMTMD", "xllamacpp", "xllamacpp/xllamacpp.abi3.so")
_IMAGE = 1

needs_mtmd = pytest.mark.skipif(not LIBRARY.is_file(), reason="needs llama.cpp's vision library")


class _Settings(c.Structure):
    """Settings of any kind, with their defaults."""

    _fields_ = [("all", c.c_uint8 * 512)]


class _Text(c.Structure):
    _fields_ = [("text", c.c_char_p), ("add_special", c.c_bool), ("parse_special", c.c_bool), ("more", c.c_uint8 * 64)]


@cache
def _library() -> Any:
    library = c.CDLL(str(LIBRARY))
    library.silent = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda level, text, data: None)
    for name in ("llama_log_set", "mtmd_helper_log_set"):
        getattr(library, name)(library.silent, None)
    library.llama_backend_init()
    return library


def _call(name: str, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """What a function returns. arguments: types and values."""
    function = getattr(_library(), name)
    function.restype, function.argtypes = result, [kind for kind, _ in arguments]
    return function(*(value for _, value in arguments))


def embeddings(model: Path, mmproj: Path, image: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.float32]:
    """What the language model gets for an image [height, width, 3]: float32 [tokens, width]. Of pieces, the last: all of it."""
    with tempfile.TemporaryDirectory() as folder:
        image_file, values_file = Path(folder, "image.npy"), Path(folder, "values.npy")
        np.save(image_file, image)
        command = [sys.executable, "-m", "tests.mtmd", *map(str, (model, mmproj, image_file, width, values_file))]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
        return np.load(values_file)


def _embeddings(model: Path, mmproj: Path, image: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.float32]:
    """What `embeddings` returns, computed in this process."""
    pointer = c.c_void_p
    path = (c.c_char_p, str(model).encode())
    loaded = _call("llama_model_load_from_file", pointer, path, (_Settings, _call("llama_model_default_params", _Settings)))
    assert loaded, f"llama.cpp does not load {model}"
    settings = (_Settings, _call("mtmd_context_params_default", _Settings))
    context = _call("mtmd_init_from_file", pointer, (c.c_char_p, str(mmproj).encode()), (pointer, loaded), settings)
    assert context, f"llama.cpp does not load {mmproj}"
    pixels = np.ascontiguousarray(image)
    sides = [(c.c_uint32, side) for side in (image.shape[1], image.shape[0])]
    bitmaps = (pointer * 1)(_call("mtmd_bitmap_init", pointer, *sides, (pointer, pixels.ctypes.data)))
    chunks, text = _call("mtmd_input_chunks_init", pointer), _Text(_call("mtmd_default_marker", c.c_char_p), False, True)
    inputs = [(pointer, context), (pointer, chunks), (pointer, c.addressof(text)), (pointer, c.addressof(bitmaps))]
    assert _call("mtmd_tokenize", c.c_int32, *inputs, (c.c_size_t, 1)) == 0
    vectors = []
    for i in range(_call("mtmd_input_chunks_size", c.c_size_t, (pointer, chunks))):
        chunk = (pointer, _call("mtmd_input_chunks_get", pointer, (pointer, chunks), (c.c_size_t, i)))
        if _call("mtmd_input_chunk_get_type", c.c_int, chunk) == _IMAGE:
            assert _call("mtmd_encode_chunk", c.c_int32, (pointer, context), chunk) == 0
            tokens = _call("mtmd_input_chunk_get_n_tokens", c.c_size_t, chunk)
            values = _call("mtmd_get_output_embd", c.POINTER(c.c_float), (pointer, context))
            vectors.append(np.ctypeslib.as_array(values, (tokens, width)).copy())
    _call("mtmd_free", None, (pointer, context))
    _call("llama_model_free", None, (pointer, loaded))
    return vectors[-1]


if __name__ == "__main__":
    model, mmproj, image_file, width, values_file = sys.argv[1:]
    np.save(values_file, _embeddings(Path(model), Path(mmproj), np.load(image_file), int(width)))
