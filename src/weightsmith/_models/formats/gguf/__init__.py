"""GGUF, the format of llama.cpp: files that hold all of a model, in ggml's types of blocks.

layout.py       the bytes of a file, and the layout of new ones
header.py       the header of a file, parsed and checked
architecture.py what a kind of model has in both formats: tensors, keys from config.json, config.json from the keys
architectures/  a file for each
vision.py       the same of vision halves
prepare.py      plans of GGUF files: `FORMATS`, as users ask for them
mmproj.py       the file of a vision half
types.py        which type llama.cpp gives each tensor
about.py        keys that come from the files beside the weights
tensors.py      names that architectures share, and tensors that llama.cpp stores in parts
rope.py         RoPE whose frequencies are scaled
sizes.py        shapes of tensors that follow from the keys
tokenizer.py    the tokenizer's files from the keys, and the keys from the tokenizer's files
chat.py        chat templates, tokens that end a generation
values.py       values of config.json and of the keys, checked
imatrix.py      llama.cpp's importance matrices
reading.py      the tensors of files
single_files.py files of ComfyUI that are read: diffusion models and T5 text encoders
diffusion/      files of ComfyUI that are written: diffusion models
ollama.py       files that Ollama has pulled, by their manifests
cuts.py        tensors that llama.cpp stores in parts, or with rows or columns in another order
adapter_file.py LoRA adapters
writing.py      the encodings: ggml's blocks of numbers, and llama.cpp's order of rows
"""

from __future__ import annotations

from importlib import import_module

from weightsmith._models.formats.gguf import ollama
from weightsmith._models.formats.gguf.cuts import find_cut
from weightsmith._models.formats.gguf.diffusion.encoding import find_diffusion
from weightsmith._models.formats.gguf.reading import KIND
from weightsmith._models.formats.gguf.writing import find
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat(
    "gguf",
    "GGUF",
    files=(ollama.KIND, KIND),
    models=lambda: tuple(import_module("weightsmith._models.formats.gguf.prepare").FORMATS),
    parse=lambda name: find(name) or find_cut(name) or find_diffusion(name),
)
