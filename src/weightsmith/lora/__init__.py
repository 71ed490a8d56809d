"""LoRA adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`)."""

from weightsmith.lora.adapter import open_adapter
from weightsmith.lora.apply import apply_adapter, find_places
from weightsmith.lora.records import Adapter

__all__ = ["Adapter", "apply_adapter", "find_places", "open_adapter"]
