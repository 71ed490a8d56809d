"""What the architectures of GGUF files are made of.

architecture.py  `GgufArchitecture`: tensors, keys from config.json, config.json from the keys
encoder.py   `Encoder`, its base for models that make vectors or scores of a text
vision.py    `VisionHalf`: the same of vision halves
tensors.py   names that architectures share, tensors that llama.cpp stores in parts, shapes that follow from the keys
rope.py      RoPE whose frequencies are scaled
values.py    values of config.json and of the keys, checked
"""
