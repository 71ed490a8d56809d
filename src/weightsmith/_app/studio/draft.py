"""A recipe as controls: what they show of its values, and the edits that the page asks for. Pure functions over its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith import WeightsmithError, goals
from weightsmith._app.studio import edits
from weightsmith._app.studio.edits import Path
from weightsmith.plugin import (
    Input,
    Method,
    Parameter,
    Parameters,
    Recipe,
    Scalar,
    Setting,
    find_method,
    load_recipe,
    numeric,
)

GOALS_SHOWN = {name: goal for name, goal in goals().items() if name != "experts"}
"""Recipes of mixtures have no controls."""
MAX_CURVE_POINTS = 16
"""The most points of a gradient to show as a curve."""
MAX_PARTS = 8
"""The most filters to show as sliders."""
MAX_MODELS = 32
"""The most models to show as strips. Another method for so many takes a second."""
MAX_CHARACTERS = 100_000
"""The longest recipe on the page: reading it takes a second at most."""

NO_MODEL, NO_BASE = "MODEL", "BASE"
"""In a recipe that was begun before they were chosen."""

_WIDE = 2.0
"""Where a slider of a number without an upper bound ends, unless its value is larger."""

_SLICES = ("slices",)

Value = Scalar | tuple[Scalar, ...] | None


@dataclass(frozen=True, slots=True)
class Control:
    """One parameter, of one model or of all.

    path     where its value is in the recipe
    model    the model it is of; "" for all
    value    a scalar, numbers from the first layer to the last, or None: there is none
    parts    in place of `value`: filters of tensor names with a number each, the first that fits counts; "" fits all
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
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RecipeBlock:
    """A slice, which can be moved. place: in the recipe's list."""

    place: int
    words: str


@dataclass(frozen=True, slots=True)
class Draft:
    """What controls show of a recipe.

    models   besides the base, in the recipe's order
    blocks   slices
    held     why controls cannot show the recipe; "" if they can
    """

    method: str = ""
    base: str = ""
    models: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    held: str = ""
    blocks: tuple[RecipeBlock, ...] = ()


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
        method: Method | None = find_method(recipe.merge_method)
    except WeightsmithError:
        method = None
    base = str(recipe.base_model or "")
    base = "" if base in (NO_BASE, NO_MODEL) else base
    if method is None:  # a slip: the models are still chosen
        models = [str(entry.model) for entry in recipe.models if not entry.matched]
        others = tuple(name for name in models if name not in ("", NO_MODEL, base))
        return Draft("", base, others, held=f"There is no method {recipe.merge_method!r}.")
    if not edits.can_edit(text):
        held = "Sliders are for recipes of one document, without aliases. Edit this one as text."
        return Draft(method.name, base, held=held)
    if not recipe.models or recipe.stages or any(entry.matched or not str(entry.model) for entry in recipe.models):
        held = "Sliders are for recipes with a list of models. Edit this one as text."
        return Draft(method.name, base, held=held, blocks=tuple(_blocks(text)))
    if len(recipe.models) > MAX_MODELS:
        return Draft(method.name, base, held=f"Sliders are for up to {MAX_MODELS} models. Edit this one as text.")
    entries = [(i, entry) for i, entry in enumerate(recipe.models) if str(entry.model) != NO_MODEL]
    others = tuple(str(entry.model) for _, entry in entries if str(entry.model) != base)
    mixed = [(i, entry) for i, entry in entries if method.base == "input" or str(entry.model) != base]
    controls = [control for i, entry in mixed for control in _of_model(method, recipe, i, entry)]
    shared = [p for p in method.parameters if p.scope == "tensor" and not p.ignored]
    controls += [_control(p, ("parameters", p.name), "", recipe.parameters, {}) for p in shared]
    return Draft(method.name, base, others, tuple(controls))


def _recipe(text: str) -> Recipe | None:
    loaded = load_recipe(as_text(text)).recipe if len(text) <= MAX_CHARACTERS else None
    return loaded if isinstance(loaded, Recipe) else None


def as_text(text: str) -> str:
    """A text that is never taken for the path of a file: it ends with a newline."""
    return text if text.endswith("\n") else f"{text}\n"


def _of_model(method: Method, recipe: Recipe, i: int, entry: Input) -> Iterator[Control]:
    for p in method.parameters:
        if p.scope == "model" and not p.ignored:
            path = ("models", i, "parameters", p.name)
            yield _control(p, path, str(entry.model), entry.parameters, recipe.parameters)


def _control(p: Parameter, path: Path, model: str, of_model: Parameters, shared: Parameters) -> Control:
    setting = of_model.get(p.name) or shared.get(p.name)
    parts = _parts(p, setting)
    value, held = (p.default, "") if setting is None or parts else _shown(p, setting)
    every = value if isinstance(value, tuple) else (value, *(number for _, number in parts))
    numbers = [float(item) for item in every if isinstance(item, int | float)]
    low = p.minimum if p.minimum is not None else min([0.0, *numbers])
    high = p.maximum if p.maximum is not None else max([_WIDE, *numbers])
    main = bool(p.scope == "model" or p.required or setting is not None or p.name == "lambda")
    return Control(path, model, p.name, p.kind, p.doc, value, low, high, p.choices, held, main, parts)


def _parts(p: Parameter, setting: Setting | None) -> tuple[tuple[str, float], ...]:
    """The numbers of a setting by filter; () if it is none, or has others too."""
    if setting is None or setting.reported or p.kind != "float" or len(setting.entries) > MAX_PARTS:
        return ()
    if len(setting.entries) == 1 and setting.entries[0].filter in (None, "*"):
        return ()
    pairs = [
        (entry.filter or "", numeric(entry.value)) for entry in setting.entries if isinstance(entry.value, str | int | float)
    ]
    numbers = tuple((name, float(number)) for name, number in pairs if number is not None)
    return numbers if len(numbers) == len(setting.entries) else ()


def _blocks(text: str) -> Iterator[RecipeBlock]:
    """The slices of a recipe."""
    slices = edits.at(edits.parsed(as_text(text)), _SLICES)
    for i, entry in enumerate(slices if isinstance(slices, list) else []):
        sources = edits.at(entry, ("sources",))
        words = []
        for source in sources if isinstance(sources, list) else []:
            layers = edits.at(source, ("layer_range",))
            span = f" layers {layers[0]} to {layers[1]}" if isinstance(layers, list) and len(layers) == 2 else ""
            words.append(f"{edits.at(source, ('model',))}{span}")
        yield RecipeBlock(i, ", ".join(words) or "no source")


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


# ---- edits


def begin(goal: str, base: str, models: Sequence[str]) -> str:
    """The recipe of a goal for some models, perhaps too few of them. Raises KeyError for a goal that does not exist."""
    chosen = GOALS_SHOWN[goal]
    every = list(models) if chosen.base == "needed" or not base else [base, *models]
    every = every[: chosen.most] if chosen.most else every
    missing = [NO_MODEL] * max(0, chosen.least - len(every))
    return chosen.recipe([*every, *missing], base or (NO_BASE if chosen.base == "needed" else ""))


def edited(text: str, edit: Mapping[str, Any], on_base: Callable[[str, str], str] = lambda model, base: model) -> str:
    """The recipe after one edit; all that the edit does not concern stays as it was written.

    edit     from a browser: `kind` and its arguments. text (base, text), set (path, model, value), goal (name), method (name),
             base (name), add (name), remove (name), move (name, before or after), and of a slice move (place, words, count,
             end) and drop (place, words, count). An edit that no control makes, or of something that the recipe no longer
             has, changes nothing
    on_base  how the recipe names a model on a base: an adapter is applied to it

    >>> recipe = "merge_method: slerp # of two\\nmodels: [{model: a}]\\nparameters: {t: 0.5} # middle"
    >>> print(edited(recipe, {"kind": "set", "path": ["parameters", "t"], "model": "", "value": 0.25}))
    merge_method: slerp # of two
    models: [{model: a}]
    parameters: {t: 0.25} # middle
    <BLANKLINE>
    """
    kind, name = edit.get("kind"), edit.get("name")
    if kind == "text":
        base, mine = edit.get("base"), edit.get("text")
        return edits.merged(base, text, mine) if isinstance(base, str) and isinstance(mine, str) else text
    if kind == "goal" and name in GOALS_SHOWN:
        now = read(text)
        return begin(str(name), now.base, now.models)
    if not edits.can_edit(text) if text.strip() else kind in ("set", "move", "drop"):
        return text
    if kind == "set":
        return _set(as_text(text), edit)
    if kind in ("move", "drop"):
        return _rearranged(as_text(text), edit)
    if not isinstance(name, str) or not 0 < len(name) <= 1000 or not name.isprintable():
        return text
    if not text.strip():
        text = begin("combine", "", [])
    recipe = _recipe(text)
    if recipe is None or len(recipe.models) > MAX_MODELS or kind not in _STRUCTURE:
        return text
    return _STRUCTURE[str(kind)](as_text(text), name, on_base)


def _set(text: str, edit: Mapping[str, Any]) -> str:
    path, model, value = edit.get("path"), edit.get("model"), edit.get("value")
    if not isinstance(path, list) or not all(isinstance(step, str | int) for step in path) or not _is_value(value):
        return text
    controls = read(text).controls
    control = next((one for one in controls if one.path == tuple(path) and one.model == model), None)
    # The models may have been moved since, in another tab.
    control = control or next((one for one in controls if one.model == model and path and one.name == path[-1]), None)
    return text if control is None else edits.put(text, control.path, value)


def control_at(text: str, path: object, model: object) -> Control | None:
    """The control of a recipe that is at a path; None if there is none."""
    return next((one for one in read(text).controls if list(one.path) == path and one.model == model), None)


def _rearranged(text: str, edit: Mapping[str, Any]) -> str:
    """Models are moved by name, next to another; slices by place, if the place still has what the page shows there.

    So an edit that is made twice, before the page shows the first, changes nothing more.
    """
    if edit["kind"] == "move" and "name" in edit:
        return _moved_model(text, edit)
    blocks, place, end = read(text).blocks, edit.get("place"), edit.get("end")
    if type(place) is not int or not 0 <= place < len(blocks) or edit.get("count") != len(blocks):
        return text
    if blocks[place].words != edit.get("words"):
        return text
    if edit["kind"] == "drop":
        return edits.removed(text, (*_SLICES, place))
    return edits.moved(text, _SLICES, place, end) if type(end) is int else text


def _moved_model(text: str, edit: Mapping[str, Any]) -> str:
    names = [_name(entry) for entry in edits.parsed(text).get("models") or []]
    name, other = edit["name"], edit.get("before", edit.get("after"))
    if name not in names or other not in names or name == other:
        return text
    start, neighbour = names.index(name), names.index(other)
    end = neighbour + ("after" in edit) - (start < neighbour)
    return edits.moved(text, ("models",), start, end)


def _with_method(text: str, name: str, on_base: Callable[[str, str], str]) -> str:
    """Another method; parameters that both have keep their values, others go, required ones are added."""
    try:
        kind = find_method(name)
    except WeightsmithError:
        return text
    text = edits.put(text, ("merge_method",), name)
    recipe = edits.parsed(text)
    entries = recipe.get("models") or []
    base = recipe.get("base_model")
    for i, entry in enumerate(entries):
        parameters = edits.at(entry, ("parameters",))
        known = _names(kind, "model") if kind.base == "input" or _name(entry) != base else set()
        for key in parameters if isinstance(parameters, Mapping) else ():
            if key not in known:
                text = edits.removed(text, ("models", i, "parameters", key))
    shared = recipe.get("parameters")
    for key in shared if isinstance(shared, Mapping) else ():
        if key not in _names(kind):
            text = edits.removed(text, ("parameters", key))
    return _completed(text, kind)


def _completed(text: str, kind: Method) -> str:
    """The recipe with first values for the parameters that the method requires."""
    recipe = edits.parsed(text)
    entries, shared = recipe.get("models") or [], recipe.get("parameters") or {}
    for p in kind.parameters:
        if not p.required or p.name in shared:
            continue
        if p.scope == "tensor":
            text = edits.put(text, ("parameters", p.name), _first_value(p))
            continue
        for i, entry in enumerate(entries):
            of_base = _name(entry) == recipe.get("base_model") and kind.base != "input"
            if isinstance(entry, Mapping) and p.name not in (entry.get("parameters") or {}) and not of_base:
                text = edits.put(text, ("models", i, "parameters", p.name), _first_value(p))
    return text


def _with_base(text: str, name: str, on_base: Callable[[str, str], str]) -> str:
    recipe = edits.parsed(text)
    old = recipe.get("base_model")
    text = edits.put(text, ("base_model",), name)
    for i, entry in enumerate(recipe.get("models") or []):
        model = _name(entry)
        bare = model.removeprefix(f"{old}+") if isinstance(old, str) else model
        is_input = _known(recipe) and find_method(recipe["merge_method"]).base == "input"
        new = name if model == old and is_input else on_base(bare, name)
        if model != NO_MODEL and new != model:
            text = edits.put(text, ("models", i, "model"), new)
    return text


def _with_model(text: str, name: str, on_base: Callable[[str, str], str]) -> str:
    """One more model, with the values of the last; in place of a model that was not chosen yet."""
    recipe = edits.parsed(text)
    entries, base = recipe.get("models") or [], recipe.get("base_model")
    named = on_base(name, base if isinstance(base, str) and base != NO_BASE else "")
    if any(_name(entry) == named for entry in entries):
        return text
    free = next((i for i, entry in enumerate(entries) if _name(entry) == NO_MODEL), None)
    if free is not None:
        return edits.put(text, ("models", free, "model"), named)
    item: dict[str, Any] = {"model": named}
    last: Any = next((entry for entry in reversed(entries) if _name(entry) != base), {})
    if isinstance(last, Mapping) and last.get("parameters"):
        item["parameters"] = last["parameters"]
    text = edits.inserted(text, ("models",), item)
    return _completed(text, find_method(recipe["merge_method"])) if _known(recipe) else text


def _without_model(text: str, name: str, on_base: Callable[[str, str], str]) -> str:
    entries = edits.parsed(text).get("models") or []
    place = next((i for i, entry in enumerate(entries) if _name(entry) == name), None)
    if place is None:
        return text
    return edits.put(text, ("models", 0), {"model": NO_MODEL}) if len(entries) == 1 else edits.removed(text, ("models", place))


_STRUCTURE: Mapping[str, Callable[[str, str, Callable[[str, str], str]], str]] = {
    "method": _with_method,
    "base": _with_base,
    "add": _with_model,
    "remove": _without_model,
}


def _known(recipe: Mapping[str, Any]) -> bool:
    name = recipe.get("merge_method")
    try:
        return isinstance(name, str) and find_method(name) is not None
    except WeightsmithError:
        return False


def _name(entry: object) -> str:
    model = entry.get("model") if isinstance(entry, Mapping) else entry
    return model if isinstance(model, str) else ""


def _names(method: Method, scope: str = "") -> set[str]:
    return {p.name for p in method.parameters if not scope or p.scope == scope}


def _first_value(p: Parameter) -> Any:
    """The first value of a required parameter: 1 for a weight and 0.5 for a share."""
    if p.kind == "str":
        return p.choices[0] if p.choices else ""
    return 1.0 if p.name == "weight" else 0.5


def _is_value(value: object) -> bool:
    """What a control can write: a scalar, numbers, or numbers by filter."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return len(value) <= MAX_PARTS and all(map(_is_part, value))
    if isinstance(value, list):
        return 1 < len(value) <= MAX_CURVE_POINTS and all(isinstance(n, int | float) and math.isfinite(n) for n in value)
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _is_part(part: Mapping[str, Any]) -> bool:
    name, number = part.get("filter", ""), part.get("value")
    if not set(part) <= {"filter", "value"} or not isinstance(name, str) or len(name) > 200:
        return False
    return isinstance(number, int | float) and math.isfinite(number)
