"""Adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`).

config.py       what adapter_config.json says: its keys, its patterns, the order of experts in factors
forms.py        how files name factors, and what shows that something else was trained: the tables
networks.py     which network of a pipeline a name is of, and where its modules are in a model
kinds/          kinds of adapters besides LoRA and DoRA, one file each; peft_folder.py reads them
exact.py        kinds that are a LoRA of some rank, as one
beside.py       the tokenizer beside an adapter
experts.py      factors of parameters that hold several experts
peft_folder.py  opens PEFT's folders
other_programs.py  reads MLX's folders, and opens llama.cpp's files
opening.py      opens an adapter of any form: PEFT's folders, single files, models that hold one which was never merged

`__init__.pyi` lists the names that others import from here. A module is imported when its name is first used: most models have
no adapter.
"""

from __future__ import annotations

from weightsmith._base.plugins import public_names

__all__, __getattr__ = public_names(__name__, __file__, globals())
