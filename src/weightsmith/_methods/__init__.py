"""The merge methods: one file each, with a function of its name. Adding one is adding the file, and its name to `NAMES`.

`method.py` is the record of a method, and makes it of a function and its typed parameters; `family.py` and
`linears.py` are what the task-vector methods and those of whole matrices share, `steps.py` what may follow any method with a
base, `user.py` methods of the user's own. What the engine runs is in `jobs`. Imports `_base` to `_plans`, and `abc`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from weightsmith._base.errors import MethodError, UnknownMethod, nearest, nearest_names
from weightsmith._methods.method import Method, Parameter
from weightsmith._methods.steps import with_steps
from weightsmith._plans import OwnCode

NAMES = (
    "linear", "task_arithmetic", "nan",
    "slerp", "nuslerp", "multislerp", "karcher", "model_stock", "geometric_median",
    "ties", "dare_linear", "dare_ties", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties", "task_vectors",
    "localize_and_stitch", "cabs", "magmax", "consensus_ta", "sce", "ram", "ramplus_tl", "ramplus", "nearswap", "arcee_fusion",
    "train_difference", "extract_rows", "smooth_add", "similarity_add", "cosine", "splice", "crossover",
    "distribution_crossover",
    "tsv_m", "svc", "wudi", "star", "iso_c", "iso_cts", "resmerge", "cart", "rotate",
    "regmean", "fisher", "core_step",
    "passthrough", "add_noise",
)  # fmt: skip


def get(name: str) -> Method:
    """The method of this name: weightsmith's, an installed package's, or one of the user's own that is loaded.

    Raises UnknownMethod with the nearest one, and MethodError for one of a package that does not work.

    >>> get("ties").base
    'required'
    """
    return _built_in(name) if name in NAMES else _from_elsewhere(name)


def find(name: str, folder: Path, *, allow_code: bool) -> Method:
    """What `merge_method` in a recipe means: as `get`, or a file of the user's own, which is run if `allow_code`.

    folder  that the file's path starts from
    """
    if name in NAMES:
        return _built_in(name)
    from weightsmith._methods import user

    return user.load_file(name, folder, allow_code=allow_code) if user.names_file(name) else get(name)


def code_of(name: str) -> OwnCode | None:
    """Where the code of a method comes from, which is loaded; None for one of weightsmith's."""
    if name in NAMES:
        return None
    from weightsmith._methods import user

    loaded = user.loaded(name)
    return None if loaded is None else loaded.code


def _from_elsewhere(name: str) -> Method:
    from weightsmith._methods import user

    if (loaded := user.loaded(name)) is not None:
        return loaded.method
    if name in user.METHODS:
        return user.load_installed(name)
    if user.names_file(name):
        raise UnknownMethod(f"{name} is code of your own, which only a recipe names", fix="give the function itself in Python")
    if called := user.function_of(name):
        raise UnknownMethod(
            f"merge_method {name} was a function of another Python process, which a recipe cannot name",
            fix=f"pass the function itself in Python, or write it into a file: merge_method: ./my_method.py:{called}",
        )
    if name in _MIXTURES:
        raise UnknownMethod(f"'{name}' is no merge method: a mixture of experts has a recipe of its own", fix=TO_MOE)
    known = (*NAMES, *user.METHODS.names)
    close = nearest_names(name, known)
    listed = f"`weightsmith methods` lists all {len(known)}"
    fix = f"write '{close[0]}'; {listed}" if close else f"write linear, ties or another; {listed}"
    raise UnknownMethod(f"no merge method is called '{name}'{nearest(name, known)}", fix=fix)


_MIXTURES = frozenset({"moe", "mixtral", "mixture", "mixture_of_experts", "experts"})
TO_MOE = "Write a recipe with base_model and experts, without merge_method and models, and run `weightsmith moe`."


@cache
def _built_in(name: str) -> Method:
    method: Method = getattr(import_module(f"weightsmith._methods.{name}"), name)
    return with_steps(method)


def all_methods() -> tuple[Method, ...]:
    """Every method of weightsmith's, in the order of the docs."""
    return tuple(get(name) for name in NAMES)


def installed_methods() -> tuple[tuple[Method, ...], tuple[MethodError, ...]]:
    """The methods that installed packages bring, under the names that recipes give them; and why others do not work."""
    from weightsmith._methods import user

    methods, errors = [], []
    for name in user.METHODS.names:
        if name in NAMES:
            continue  # weightsmith's own come first
        try:
            methods.append(replace(user.load_installed(name), name=name))
        except MethodError as error:
            errors.append(error)
    return tuple(methods), tuple(errors)


def any_method() -> Method:
    """Stands for a method that does not exist, so that the rest of its recipe can be checked; its name is "".

    Its parameters are those of all methods. Each accepts the values that one of them accepts.
    """
    named: dict[str, list[Parameter]] = {}
    for method in (*all_methods(), *installed_methods()[0]):
        for parameter in method.parameters:
            named.setdefault(parameter.name, []).append(parameter)
    return replace(
        get("linear"), name="", parameters=tuple(_widest(alike) for alike in named.values()), base="input", min_models=0
    )


def _widest(alike: Iterable[Parameter]) -> Parameter:
    """A parameter of the same name as these, for the values that one of them accepts."""
    first, *others = alike
    kinds = {parameter.kind for parameter in (first, *others)}
    minima, maxima = ([getattr(parameter, bound) for parameter in (first, *others)] for bound in ("minimum", "maximum"))
    choices = [parameter.choices for parameter in (first, *others)]
    return replace(
        first,
        kind=first.kind if len(kinds) == 1 else "str",
        scope="model" if any(parameter.scope == "model" for parameter in (first, *others)) else "tensor",
        minimum=None if None in minima else min(minima),
        maximum=None if None in maxima else max(maxima),
        choices=tuple(dict.fromkeys(c for parameter in choices for c in parameter)) if all(choices) and len(kinds) == 1 else (),
        optional=True,
        ignored="",
    )


def find_method(name: str) -> Method:
    """The merge method of this name, weightsmith's or an installed package's. Raises UnknownMethod, MethodError."""
    return get(name)


def methods() -> tuple[Method, ...]:
    """The merge methods: weightsmith's, in the order of the docs, then those of installed packages that work.

    >>> [method.name for method in methods()][:2]
    ['linear', 'task_arithmetic']
    """
    return (*all_methods(), *installed_methods()[0])
