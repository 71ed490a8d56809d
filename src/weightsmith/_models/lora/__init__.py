"""LoRA adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`).

keys.py      what each key of adapter_config.json means, and each kind of adapter
layouts.py   the order of experts in factors, where shapes do not tell it
forms.py     how files name factors, and what shows that something else was trained: the tables
files.py     adapters in single files without a config
networks.py  which network of a pipeline a name is of, and where its modules are in a model
opening.py   opens an adapter of any form
inside.py    models that hold an adapter which was never merged

`__init__.pyi` lists the names that others import from here. A module is imported when its name is first used: most models have
no adapter.
"""

from __future__ import annotations

from weightsmith._base.exports import public_names

__all__, __getattr__ = public_names(__name__, __file__, globals())
