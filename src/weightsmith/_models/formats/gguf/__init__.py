"""GGUF, the format of llama.cpp: files that hold all of a model, in ggml's types of blocks.

base/           what architectures are made of: tensors, keys from config.json, config.json from the keys, vision halves
architectures/  a file for each
tokenizer/      the tokenizer's files from the keys, and the keys from the tokenizer's files
diffusion/      files of ComfyUI: diffusion models and T5 text encoders

Reading:
layout.py       the bytes of a file, and the layout of new ones
header.py       the header of a file, parsed and checked
reading.py      the tensors of files
ollama.py       files that Ollama has pulled, by their manifests
adapter_file.py LoRA adapters

Writing:
prepare.py      plans of GGUF files: `FORMATS`, as users ask for them
mmproj.py       the file of a vision half
about.py        keys that come from the files beside the weights
pooling.py      how a model makes one vector or one score of a text
types.py        which type llama.cpp gives each tensor
imatrix.py      llama.cpp's importance matrices
writing.py      the encodings: ggml's blocks of numbers, and llama.cpp's order of rows
cuts.py         tensors that llama.cpp stores in parts, or with rows or columns in another order
"""

from __future__ import annotations

from importlib import import_module

from weightsmith._models.formats.gguf import ollama
from weightsmith._models.formats.gguf.cuts import find_cut
from weightsmith._models.formats.gguf.reading import KIND
from weightsmith._models.formats.gguf.writing import find, find_diffusion
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat(
    "gguf",
    "GGUF",
    files=(ollama.KIND, KIND),
    models=lambda: tuple(import_module("weightsmith._models.formats.gguf.prepare").FORMATS),
    parse=lambda name: find(name) or find_cut(name) or find_diffusion(name),
)
