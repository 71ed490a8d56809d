"""Values of config.json and of a GGUF file's keys, checked as they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.layout import Value, ValueType
from weightsmith._models.structure.configs import rope_settings

Floats = npt.NDArray[np.float32]

_MOST, _U32_END = 1 << 31, 1 << 32
_OTHER = "llama.cpp would compute something else. Store the model in another format, such as fp8-dynamic."


class GgufValues:
    """Values of one file, checked as they are taken: of config.json, or the keys that begin with `prefix`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", fix: str = "repair it", prefix: str = "") -> None:
        self._values, self.where, self._fix, self.prefix = values, where, fix, prefix
        self._missing = "add it to config.json, as the model was trained" if where == "config.json" else fix

    def get(self, name: str, default: Any = None, within: Mapping[str, Any] | None = None) -> Any:
        """A value, if it is not null; `within` another mapping."""
        value = (self._values if within is None else within).get(self.prefix + name)
        return default if value is None else value

    def elsewhere(self, key: str) -> Any:
        """The value of a key with another prefix; None if there is none."""
        return self._values.get(key)

    def wrong(self, name: str, value: object, expected: str) -> FormatError:
        """The error of a value that is not `expected`, or missing."""
        if value is None:
            return FormatError(f"{self.prefix}{name} is missing", where=self.where, fix=self._missing)
        return FormatError(f"{self.prefix}{name} is {show(value)}, {expected}", where=self.where, fix=self._fix)

    def count(self, name: str, default: float | None = None, within: Mapping[str, Any] | None = None, *, least: int = 1) -> int:
        """A number from `least` to 2^31."""
        value = self.get(name, default, within)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one for each layer, and all are equal
        if type(value) is not int or not least <= value <= _MOST:
            raise self.wrong(
                name, value, "not a positive whole number" if least == 1 else f"not a whole number from {least:,} on"
            )
        return value

    def number(self, name: str, default: float | None = None, within: Mapping[str, Any] | None = None) -> float:
        """A number above 0 that float32 holds."""
        value = self.get(name, default, within)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
            raise self.wrong(name, value, "not a positive number")
        return float(value)

    def float32(self, name: str, default: float | None = None) -> float:
        """As `number`, with the fewest digits that give the same float32."""
        return float(str(np.float32(self.number(name, default))))

    def by_layer(self, name: str, layers: int) -> list[int]:
        """A number from 1 to 2^31 for each layer, where the file has one for each or one for all."""
        value = self.get(name)
        if not isinstance(value, np.ndarray):
            return [self.count(name)] * layers
        if value.shape != (layers,):
            raise self.wrong(name, value, f"not a whole number for each of {layers:,} layers")
        return [self.count(name, within={self.prefix + name: number}) for number in value.tolist()]

    def numbers_by_layer(self, name: str, layers: int) -> list[float]:
        """A number for each layer, of any sign, where the file has one for each or one for all."""
        value = self.get(name)
        numbers = np.full(layers, value) if isinstance(value, float) else value
        if not isinstance(numbers, np.ndarray) or numbers.shape != (layers,) or numbers.dtype.kind != "f":
            raise self.wrong(name, value, f"not a number for each of {layers:,} layers")
        if not np.isfinite(numbers).all():
            raise self.wrong(name, value, "and one of them is not finite")
        return [float(number) for number in numbers]

    def equals(self, name: str, number: int) -> bool:
        """Whether a value is this whole number."""
        value = self.get(name)
        return type(value) is int and value == number

    def truth(self, name: str, default: float | None = None) -> bool:
        """True or false."""
        value = self.get(name, None if default is None else bool(default))
        if type(value) is not bool:
            raise self.wrong(name, value, "not true or false")
        return value

    def __contains__(self, name: str) -> bool:
        value = self.get(name, 0)
        return isinstance(value, np.ndarray) or value != 0


class GgufConfig(GgufValues):
    """config.json of one model."""

    def numbers(self, name: str, within: Mapping[str, Any]) -> Floats:
        """A list of positive numbers: float32."""
        values = within.get(name)
        if not isinstance(values, list) or not values:
            raise self.wrong(name, values, "not a list of numbers")
        return np.array([self.number(name, within={name: value}) for value in values], np.float32)

    def rope(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of RoPE in layers that attend to everything, and in those that slide, in one form."""
        settings = rope_settings(self._values, self.where)
        full = settings.get("full_attention", settings if "sliding_attention" not in settings else {})
        slides = settings.get("sliding_attention", {})
        for kind, stated in (("full_attention", full), ("sliding_attention", slides)):
            if stated is not None and not isinstance(stated, dict):
                raise self.wrong(kind, stated, "not an object")
        full, slides = dict(full or {}), dict(slides or {})
        full.setdefault("rope_theta", self._values.get("rope_theta"))
        full["rope_type"] = full.get("rope_type") or full.get("type") or "default"
        slides.setdefault("rope_theta", self._values.get("rope_local_base_freq"))
        return full, slides

    def need(self, name: str, stated: object, expected: object) -> None:
        """Raise Unsupported if a setting is not what llama.cpp takes for granted."""
        if stated != expected:
            what = f"{name} is {show(stated)}, and llama.cpp takes {show(expected)} for granted"
            raise Unsupported(what, where="config.json", fix=_OTHER)

    def need_all(self, fixed: Mapping[str, Any]) -> None:
        """`need` of several, where config.json states them."""
        for name, value in fixed.items():
            self.need(name, self.get(name, value), value)


class GgufKeys:
    """Keys of a GGUF file that is written, in their order, and tensors that exist in GGUF files alone.

    Names are without the architecture.
    """

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, Floats] = {}

    def put(self, name: str, kind: ValueType, value: Any) -> None:
        """Set a key, or set it anew in its place. Raises FormatError for a whole number that the file cannot hold."""
        if kind == "u32" and value >= _U32_END:
            what = f"{name} would be {value:,} in the GGUF file, which holds numbers up to {_U32_END - 1:,}"
            raise FormatError(what, where="config.json", fix="repair it")
        self.values[name] = Value(kind, value)

    def u32(self, name: str, value: int) -> None:
        """Set a whole number."""
        self.put(name, "u32", value)

    def f32(self, name: str, value: float) -> None:
        """Set a number."""
        self.put(name, "f32", value)


def token_id(keys: Mapping[str, Any], name: str, tokens: int, where: str) -> int | None:
    """The number of a token of special meaning, one of `tokens`; None if there is none. Raises FormatError."""
    value = keys.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < tokens:
        what = f"tokenizer.ggml.{name}_token_id is {show(value)}, and there are {tokens:,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    return value
