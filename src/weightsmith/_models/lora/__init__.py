"""LoRA adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`).

keys.py      what each key of adapter_config.json means, and each kind of adapter
layouts.py   the order of experts in factors, where shapes do not tell it
forms.py     how files name factors, and what shows that something else was trained: the tables
files.py     adapters in single files without a config
networks.py  which network of a pipeline a name is of, and where its modules are in a model
opening.py   opens an adapter of any form
inside.py    models that hold an adapter which was never merged
"""

from weightsmith._models.lora.adapter import Adapter
from weightsmith._models.lora.apply import Names, apply_adapter, find_places
from weightsmith._models.lora.inside import with_inner_adapter
from weightsmith._models.lora.opening import open_adapter

__all__ = ["Adapter", "Names", "apply_adapter", "find_places", "open_adapter", "with_inner_adapter"]
