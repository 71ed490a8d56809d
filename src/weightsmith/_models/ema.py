"""The moving average of the weights that a single file of Stable Diffusion may hold beside the weights themselves.

`model.ckpt+ema` is the model with the average in place of its diffusion model, and `model.ckpt+no-ema` the model without it.
Training keeps the average of `model.diffusion_model.out.2.weight` as `model_ema.diffusion_modelout2weight`, without the dots.
"""

from __future__ import annotations

from weightsmith._base.errors import Finding, ShapeError, Unsupported
from weightsmith._base.files import exists, expand_user, show
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.sources.composed import renamed
from weightsmith._models.structure.parts import DIFFUSION, EMA_PREFIX

USE, DROP = "ema", "no-ema"
_STATE = ("decay", "num_updates")
"""What training keeps beside the averages, to go on with them."""


def names_ema(path: str) -> bool:
    """Whether what follows the `+` of a model means its moving average. A folder or file of this name is an adapter.

    >>> names_ema("no-ema"), names_ema("./ema")
    (True, False)
    """
    return path in (USE, DROP) and not exists(expand_user(path))


def choose_ema(model: Checkpoint, choice: str, ref: str) -> Checkpoint:
    """The model with its moving average in place of the weights (`ema`), or without it (`no-ema`).

    choice  one of the two
    ref     the model and the choice, as the user named them

    A tensor of the diffusion model that was not averaged, because it was not trained, stays. No tensor is read. Closing the
    result closes the model. Raises Unsupported for a model without an average, ShapeError for one of another shape.
    """
    averages = {name for name in model.specs if name.startswith(EMA_PREFIX)}
    if not averages:
        what = f"it holds no moving average: no tensor is named {EMA_PREFIX}…"
        raise Unsupported(what, where=model.ref, fix=f"write {model.ref}")
    names = {name: name for name in model.specs if name not in averages}
    notes = [*model.notes]
    if choice == USE:
        chosen = {name: average for name in names if (average := _average_of(name)) in averages}
        if not chosen:
            what = f"none of the {count(len(averages), 'tensor')} under {EMA_PREFIX} is the average of one under {DIFFUSION}"
            raise Unsupported(what, where=model.ref, fix=f"write {model.ref}+{DROP} for the model without them")
        for name, average in chosen.items():
            shape, averaged = model.specs[name].shape, model.specs[average].shape
            if shape != averaged:
                what = f"the moving average has the shape {list(averaged)}, and its weight {list(shape)}"
                raise ShapeError(
                    what, where=f"{model.ref}: {show(name)}", fix=f"write {model.ref}+{DROP} for the model without it"
                )
        names |= chosen
        used = {*chosen.values()}
        unused = sorted(name for name in averages if name not in used and name.removeprefix(EMA_PREFIX) not in _STATE)
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            what = f"{count(len(unused), 'moving average')} of no weight of the diffusion model {verb} left out"
            notes.append(Finding(what, f"{ref}: {show(unused[0])}"))
        kept = [name for name in names if name.startswith(DIFFUSION) and name not in chosen]
        if kept:
            verb = "is" if len(kept) == 1 else "are"
            what = f"{count(len(kept), 'tensor')} of the diffusion model without a moving average {verb} used as stored"
            notes.append(Finding(what, f"{ref}: {show(kept[0])}"))
    source = renamed(model, names, ref)
    return Checkpoint(ref, source, ModelFolder.like(model), metadata=model.metadata, notes=tuple(notes), decoded=model.decoded)


def _average_of(name: str) -> str:
    """The name of a tensor's moving average; "" for one that is not of the diffusion model."""
    return EMA_PREFIX + name.removeprefix("model.").replace(".", "") if name.startswith(DIFFUSION) else ""
