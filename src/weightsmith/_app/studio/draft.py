"""A recipe as controls: what they show, and what they write. Pure functions over the text of a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from weightsmith import _methods as methods
from weightsmith._app.goals import GOALS, Goal, quoted
from weightsmith._base.errors import WeightsmithError
from weightsmith._methods.base import Method, Parameter
from weightsmith._methods.describe import doc
from weightsmith._planning.recipe import Input, Parameters, Recipe, Scalar, Setting, load, numeric

GOALS_SHOWN: Mapping[str, Goal] = {name: goal for name, goal in GOALS.items() if name != "experts"}
"""Recipes of mixtures have no controls."""
MAX_CURVE_POINTS = 16
"""The most points of a gradient to show as a curve."""
MAX_CHARACTERS = 100_000
"""The longest recipe on the page: reading it takes a second at most."""

NO_MODEL, NO_BASE = "MODEL", "BASE"
"""In a recipe that was begun before they were chosen."""

_WIDE = 2.0
"""Where a slider of a number without an upper bound ends, unless its value is larger."""

Path = tuple[str | int, ...]
Value = Scalar | tuple[Scalar, ...] | None


@dataclass(frozen=True, slots=True)
class Control:
    """One parameter, of one model or of all.

    path     where its value is in the recipe
    model    the model it is of; "" for all
    value    a scalar, numbers from the first layer to the last, or None: there is none
    low, high  of the slider of a number
    held     why the control cannot show the value; "" if it can
    main     shown at once
    """

    path: Path
    model: str
    name: str
    kind: str
    doc: str
    value: Value
    low: float
    high: float
    choices: tuple[str, ...] = ()
    held: str = ""
    main: bool = True

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Draft:
    """What controls show of a recipe.

    models   besides the base, in the recipe's order
    held     why controls cannot show the recipe; "" if they can
    """

    method: str = ""
    base: str = ""
    models: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    held: str = ""


def read(text: str) -> Draft:
    """What controls show of a recipe.

    >>> draft = read("merge_method: slerp\\nbase_model: a\\nmodels: [{model: b}]\\nparameters: {t: [0, 1]}\\n")
    >>> draft.models, draft.controls[0].name, draft.controls[0].value
    (('b',), 't', (0, 1))
    """
    recipe = _recipe(text)
    if recipe is None:
        return Draft(held="The recipe cannot be read yet.")
    try:
        method = methods.get(recipe.merge_method)
    except WeightsmithError:
        return Draft(held=f"There is no method {recipe.merge_method!r}.")
    base = str(recipe.base_model or "")
    base = "" if base in (NO_BASE, NO_MODEL) else base
    if not recipe.models or recipe.stages or any(entry.matched or not str(entry.model) for entry in recipe.models):
        return Draft(method.name, base, held="Controls are for recipes with a list of models; this one is edited as text.")
    entries = [(i, entry) for i, entry in enumerate(recipe.models) if str(entry.model) != NO_MODEL]
    others = tuple(str(entry.model) for _, entry in entries if str(entry.model) != base)
    own = [(i, entry) for i, entry in entries if method.base == "input" or str(entry.model) != base]
    controls = [control for i, entry in own for control in _of_model(method, recipe, i, entry)]
    shared = [p for p in method.parameters if p.scope == "tensor" and not p.ignored]
    controls += [_control(p, ("parameters", p.name), "", recipe.parameters, {}) for p in shared]
    return Draft(method.name, base, others, tuple(controls))


def _recipe(text: str) -> Recipe | None:
    loaded = load(as_text(text)).recipe if len(text) <= MAX_CHARACTERS else None
    return loaded if isinstance(loaded, Recipe) else None


def as_text(text: str) -> str:
    """A text that is never taken for the path of a file: it ends with a newline."""
    return text if text.endswith("\n") else f"{text}\n"


def _of_model(method: Method, recipe: Recipe, i: int, entry: Input) -> Iterator[Control]:
    for p in method.parameters:
        if p.scope == "model" and not p.ignored:
            path = ("models", i, "parameters", p.name)
            yield _control(p, path, str(entry.model), entry.parameters, recipe.parameters)


def _control(p: Parameter, path: Path, model: str, own: Parameters, shared: Parameters) -> Control:
    setting = own.get(p.name) or shared.get(p.name)
    value, held = (p.default, "") if setting is None else _shown(p, setting)
    every = value if isinstance(value, tuple) else (value,)
    numbers = [float(each) for each in every if isinstance(each, int | float)]
    low = p.minimum if p.minimum is not None else min([0.0, *numbers])
    high = p.maximum if p.maximum is not None else max([_WIDE, *numbers])
    main = bool(p.scope == "model" or p.required or setting is not None or p.name == "lambda")
    return Control(path, model, p.name, p.kind, doc(p), value, low, high, p.choices, held, main)


def _shown(p: Parameter, setting: Setting) -> tuple[Value, str]:
    """The value that a recipe gives a parameter; None and why a control cannot show it."""
    if setting.reported:
        return None, "wrong in the recipe"
    entry, *others = setting.entries
    value = entry.value
    if others or entry.filter not in (None, "*"):
        return None, "set by filters in the recipe"
    if isinstance(value, tuple) and p.kind == "float" and 1 < len(value) <= MAX_CURVE_POINTS:
        numbers = tuple(map(numeric, value))
        return (None, "wrong in the recipe") if None in numbers else (tuple(n for n in numbers if n is not None), "")
    if not isinstance(value, str | int | float):
        return None, "set in the recipe"
    if p.kind in ("float", "int"):
        number = numeric(value)
        return number, "wrong in the recipe" if number is None else ""
    return value, ""


# ---- what controls write


def begin(goal: str, base: str, models: Sequence[str]) -> str:
    """The recipe of a goal for some models, perhaps too few of them. Raises KeyError for a goal that does not exist."""
    chosen = GOALS_SHOWN[goal]
    every = list(models) if chosen.base == "needed" or not base else [base, *models]
    every = every[: chosen.most] if chosen.most else every
    missing = [NO_MODEL] * max(0, chosen.least - len(every))
    return chosen.recipe([*every, *missing], base or (NO_BASE if chosen.base == "needed" else ""))


def rebuilt(text: str, method: str, base: str, models: Sequence[str]) -> str:
    """The recipe with another method, base or models. What models and method still have stays as it is.

    A model that is new gets the values of the first. Raises UnknownMethod.
    """
    kind = methods.get(method)
    old: Mapping[str, Any] = yaml.safe_load(as_text(text)) if _recipe(text) is not None else {}
    entries = old.get("models") or []
    before = {_name(entry): entry.get("parameters") or {} for entry in entries if isinstance(entry, dict)}
    shared = {name: value for name, value in (old.get("parameters") or {}).items() if name in _names(kind)}
    every = [base, *models] if kind.base == "input" and base else list(models)
    lines = [f"merge_method: {method}"]
    if base:
        lines.append(f"base_model: {quoted(base)}")
    lines.append("models:" if every else "models: []")
    first = next((before[name] for name in before if name != base), {})
    for model in dict.fromkeys(every):
        values = {k: v for k, v in before.get(model, first).items() if k in _names(kind, "model")}
        for p in kind.parameters:
            if p.scope == "model" and p.required and p.name not in shared:
                values.setdefault(p.name, _first_value(p))
        lines.append(f"  - model: {quoted(model)}")
        if values and not (model == base and kind.base != "input"):
            lines.append(f"    parameters: {_flow(values)}")
    for p in kind.parameters:
        if p.scope == "tensor" and p.required:
            shared.setdefault(p.name, _first_value(p))
    if shared:
        lines += ["parameters:", *(f"  {name}: {_flow(value)}" for name, value in shared.items())]
    for key, value in old.items():
        if key not in ("merge_method", "base_model", "models", "parameters", "slices", "modules"):
            lines.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True).rstrip())
    if not old:
        lines.append("dtype: bfloat16")
    return "\n".join(lines) + "\n"


def _name(entry: Mapping[str, Any]) -> str:
    model = entry.get("model")
    return model if isinstance(model, str) else ""


def _names(method: Method, scope: str = "") -> set[str]:
    return {p.name for p in method.parameters if not scope or p.scope == scope}


def _first_value(p: Parameter) -> Any:
    """The first value of a required parameter: the middle of its bounds, else 1 for a weight and 0.5 for a share."""
    if p.kind == "str":
        return p.choices[0] if p.choices else ""
    return 1.0 if p.name == "weight" else 0.5


def changed(text: str, values: Mapping[Path, Any]) -> str:
    """The recipe with some values set, all else as it was written: comments, order, spaces.

    values  by path: of controls of this recipe, others are left out. A value that the recipe has already changes nothing

    >>> recipe = "merge_method: slerp # of two\\nmodels: [{model: a}]\\nparameters: {t: 0.5} # middle"
    >>> print(changed(recipe, {("parameters", "t"): 0.25}))
    merge_method: slerp # of two
    models: [{model: a}]
    parameters: {t: 0.25} # middle
    """
    text = as_text(text)
    known = {control.path for control in read(text).controls}
    for path, value in values.items():
        if path not in known or not _is_value(value):
            continue
        before = yaml.safe_load(text)
        if _at(before, path) != value:
            wanted = _put(before, path, value)
            text = _spliced(text, path, value, wanted) or yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)
    return text


def _is_value(value: object) -> bool:
    """What a control can write: a scalar, or numbers."""
    if isinstance(value, list):
        return 1 < len(value) <= MAX_CURVE_POINTS and all(isinstance(n, int | float) and math.isfinite(n) for n in value)
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _at(tree: Any, path: Path) -> Any:
    for step in path:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    """A copy of a tree with one value set."""
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        return [_put(each, tuple(rest), value) if i == step else each for i, each in enumerate(tree)]
    inner = dict(tree or {})
    return inner | {step: _put(inner.get(step), tuple(rest), value)}


def _spliced(text: str, path: Path, value: Any, wanted: Any) -> str | None:
    """The text with the characters of one value replaced or added; None if the result would not have that value."""
    try:
        new = _splice(text, path, _flow(value))
        return new if new is not None and yaml.safe_load(new) == wanted else None
    except yaml.YAMLError:
        return None


def _splice(text: str, path: Path, written: str) -> str | None:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for i, step in enumerate(path):
        inner = _child(node, step)
        if inner is None:
            return _added(text, node, path[i:], written)
        node = inner
    return text[: node.start_mark.index] + written + text[_end(text, node) :]


def _child(node: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return node.value[step] if isinstance(node, yaml.SequenceNode) and step < len(node.value) else None
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == step), None)


def _end(text: str, node: Any) -> int:
    """Where a value ends. A block collection's mark is at what follows it, behind line ends and comments."""
    while not isinstance(node, yaml.ScalarNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    index: int = node.end_mark.index
    return index


def _added(text: str, node: Any, path: Path, written: str) -> str | None:
    """The text with a key added to a mapping."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    key, *rest = path
    for step in reversed(rest):
        written = f"{{{step}: {written}}}"
    if node.flow_style:
        at = node.end_mark.index - 1
        return f"{text[:at].rstrip()}, {key}: {written}{text[at:]}"
    end = text.find("\n", _end(text, node))
    indent = " " * node.value[0][0].start_mark.column
    return f"{text[:end]}\n{indent}{key}: {written}{text[end:]}"


def _flow(value: Any) -> str:
    """A value on one line.

    >>> _flow([0.1 + 0.2, 1.0, True]), _flow({"weight": 0.5})
    ('[0.3, 1.0, true]', '{weight: 0.5}')
    """
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(k)}: {_flow(v)}' for k, v in value.items())}}}"
    return quoted(value) if isinstance(value, str) else json.dumps(value)
