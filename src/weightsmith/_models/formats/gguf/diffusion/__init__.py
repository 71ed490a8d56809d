"""GGUF files of diffusion models for ComfyUI, as ComfyUI-GGUF's tools write them. `writing.py` above has their encodings.

families.py  the models that ComfyUI-GGUF loads, by the names of their tensors; the type of each tensor
plan.py      the plan of a file
reading.py   files that are read
text_encoder.py  the encoders of T5 and UMT5, written and read; the tokenizer of UMT5

The rules are those of https://github.com/city96/ComfyUI-GGUF at 795e451: `tools/convert.py`, which makes a file of plain
numbers, and `tools/lcpp.patch`, with which llama-quantize makes blocks of them. Here both are one step.
"""
