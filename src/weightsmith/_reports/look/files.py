"""What the files of two models around the weights differ in: config.json, tokenizer, chat template, generation settings."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._files.copied import is_tokenizer
from weightsmith._models.card import CARD_NAME, read_card
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers.files import settings_of, template_of
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary
from weightsmith._plans.summary import ConfigChange, config_changes

GENERATION = "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")

NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of config.json that say nothing about what a model computes."""


@dataclass(frozen=True, slots=True)
class TokenizerDifference:
    """What two tokenizers differ in.

    sizes    tokens of each; 0 for a model without a tokenizer that can be read
    moved    tokens of both with different ids
    removed  tokens that only the first has, and `added` those that only the second has
    """

    sizes: tuple[int, int]
    moved: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Every token has the same id in both."""
        return self.sizes[0] == self.sizes[1] and not (self.moved or self.removed or self.added)


@dataclass(frozen=True, slots=True)
class FileDifference:
    """What the files of two models differ in.

    config       keys of config.json
    generation   keys of generation_config.json
    tokenizer    None if neither has one
    templates    the chat templates, "" for none; None if they are equal
    """

    config: tuple[ConfigChange, ...]
    generation: tuple[ConfigChange, ...]
    tokenizer: TokenizerDifference | None
    templates: tuple[str, str] | None


def fetch_small(model: Checkpoint) -> None:
    """Download the files of a Hub model that are read here."""
    wanted = [name for name in model.files if is_tokenizer(name) or name in (GENERATION, CARD_NAME, *TEMPLATES)]
    model.fetch([*wanted, CARD_NAME])


def compare_files(a: Checkpoint, b: Checkpoint, vocabularies: tuple[Vocabulary | None, Vocabulary | None]) -> FileDifference:
    """See `FileDifference`. Raises FormatError for a damaged tokenizer."""
    templates = template_of(a.folder, a.files), template_of(b.folder, b.files)
    before, after = (settings_of(model.folder, model.files, GENERATION) for model in (a, b))
    return FileDifference(
        tuple(config_changes(a.config or {}, b.config or {})),
        tuple(config_changes(before, after)),
        _compare_tokenizers(*vocabularies),
        None if templates[0] == templates[1] else templates,
    )


def vocabulary_of(model: Checkpoint, seen: dict[str, Vocabulary]) -> Vocabulary | None:
    """The tokens of a model; None where there is no tokenizer that can be read."""
    return read_vocabulary(model.ref, model.folder, model.files, seen)


def _compare_tokenizers(a: Vocabulary | None, b: Vocabulary | None) -> TokenizerDifference | None:
    if a is None and b is None:
        return None
    mine, theirs = (a.ids if a is not None else {}), (b.ids if b is not None else {})
    if a is not None and b is not None and a.digest == b.digest:
        return TokenizerDifference((len(mine), len(theirs)), 0, (), ())
    return TokenizerDifference(
        (len(mine), len(theirs)),
        sum(number != theirs.get(token, number) for token, number in mine.items()),
        tuple(token for token in mine if token not in theirs),
        tuple(token for token in theirs if token not in mine),
    )


def lineage(model: Checkpoint) -> tuple[str, ...]:
    """The models that a model was made from, as its card says."""
    named = read_card(model.folder).get("base_model") if not model.alone else None
    found = named if isinstance(named, list) else [named]
    return tuple(name for name in found if isinstance(name, str) and name)


def licence(model: Checkpoint) -> str:
    """The licence that a model's card names; "" if none."""
    card = {} if model.alone else read_card(model.folder)
    found = card.get("license_name") or card.get("license")
    return found if isinstance(found, str) else ""


def is_merge(model: Checkpoint) -> bool:
    """Whether the card says that the model was merged: by the Hub's relation, or by the tags that merging programs write."""
    card = {} if model.alone else read_card(model.folder)
    tags = card.get("tags")
    return card.get("base_model_relation") == "merge" or (
        isinstance(tags, list) and not {"merge", "mergekit"}.isdisjoint(map(str, tags))
    )
