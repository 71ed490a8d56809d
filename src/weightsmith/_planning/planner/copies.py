"""Tensors that a merge leaves out as copies of others of their model, such as a head that config.json ties to the embedding.

A model may store both and have trained them apart. Samples tell: of models on this disk while the recipe is planned, of others
when they can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.errors import MismatchError
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure.vocabulary import names_head

_SAMPLED, _SAMPLED_ELSEWHERE, _SAMPLE_BYTES = 64, 4, 4096


@dataclass(frozen=True, slots=True)
class TakenForCopy:
    """A tensor that is left out, or merged, as a copy of another one of its model.

    label  of the model
    other  the name of the other one
    """

    checkpoint: Checkpoint
    label: str
    tensor: str
    other: str

    @property
    def readable(self) -> bool:
        """Whether its numbers can be read: no file must be downloaded first."""
        return not self.checkpoint.missing

    def problem(self) -> MismatchError | None:
        """The error of a tensor that is no copy; None for one that seems to be. Raises CheckpointError."""
        if not surely_differ(self.checkpoint, self.tensor, self.other):
            return None
        if names_head(self.tensor):
            return trained_head(self.label, self.tensor, self.other)
        what = f"its {self.tensor} differs from {self.other}, and the other models have one tensor for both"
        fix = "merge models that all share an embedding between encoder and decoder, or none"
        return MismatchError(what, where=self.label, fix=fix)


def surely_differ(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors of a model differ in dtype or shape, or in samples, or one of them alone is changed by an adapter.

    The result of another recipe differs in them if one of the models that it merges does. False if nothing is known: they are
    not downloaded yet, or are decoded.
    """
    first, second = checkpoint.specs[one], checkpoint.specs[other]
    if checkpoint.missing:
        return False
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    stored = [checkpoint.location(name) is not None for name in (one, other)]
    if all(stored):
        return _samples_differ(checkpoint, one, other, _SAMPLED)
    if any(stored):
        return True
    from weightsmith._engine.computed import computed_source

    if (computed := computed_source(checkpoint)) is not None:
        pairs = computed.counterparts(one, other)
        return any(surely_differ(source, a, b) for source, a, b in pairs if a != b)
    streamed = all(checkpoint.extents(name, 0, first.nbytes) for name in (one, other))
    return streamed and _samples_differ(checkpoint, one, other, _SAMPLED_ELSEWHERE)


def _samples_differ(checkpoint: Checkpoint, one: str, other: str, count: int) -> bool:
    """Whether two tensors of one dtype and shape differ in one of `count` + 1 samples."""
    nbytes = checkpoint.specs[one].nbytes
    size = min(nbytes, _SAMPLE_BYTES)
    pages = memoryview(bytearray(size)), memoryview(bytearray(size))
    for start in {(nbytes - size) * i // count for i in range(count + 1)}:
        for name, page in zip((one, other), pages, strict=True):
            checkpoint.read_into(name, start, page)
        if pages[0] != pages[1]:
            return True
    return False


def trained_head(model: str, head: str, embedding: str) -> MismatchError:
    """The error of a head that differs from the embedding that config.json ties it to."""
    what = f"its head {head} is stored and differs from {embedding}, and config.json ties the two"
    fix = "set tie_word_embeddings to false in its config.json if the head was trained; if not, remove the head"
    return MismatchError(what, where=model, fix=fix)
