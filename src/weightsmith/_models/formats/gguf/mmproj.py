"""The vision half of a model beside its GGUF file: `mmproj.gguf`, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.files import show
from weightsmith._base.options import named
from weightsmith._base.strict_json import parse_object
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.architectures import find_vision
from weightsmith._models.formats.gguf.base.vision import PROCESSOR, VisionHalf
from weightsmith._models.formats.gguf.layout import encode_metadata
from weightsmith._models.formats.gguf.types import MIXTURES
from weightsmith._models.formats.gguf.writing import PLAIN, TYPES, GgufEncoding
from weightsmith._plans import COPY, PRODUCTS, PlanDraft, Product, ProductSettings, Read, Step, arrays_of, needs_of
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
"""Files that list added tokens."""
UNUSED = "llama.cpp does not use it"
_ROW = "token_row"
_TOKEN = "v.token_embd.img_break"
_REPAIR = "repair it, or download it again"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The contents of `mmproj.gguf`.

    steps     for its tensors, under llama.cpp's names
    products  that they need
    unused    steps for tensors that llama.cpp does not use
    header    its keys, encoded; empty: there is no such file
    """

    steps: Sequence[Step] = ()
    products: Sequence[Product] = ()
    unused: Sequence[Step] = ()
    header: bytes = b""


def vision_half(
    draft: PlanDraft, embedding: Step, steps: Sequence[Step], files: Mapping[str, bytes], mixture: str
) -> ImageFile | None:
    """The vision half of a model; None of a family whose half is not written.

    embedding  the step for the language model's, before it is encoded
    steps      for the tensors that do not belong to the language model
    files      those of `PROCESSOR` and `TOKENIZER` that the model has
    mixture    of the language model: `F32` and `BF16` are the vision half's type too, others leave F16

    Raises FormatError for values of the files that are no numbers, Unsupported for a half that llama.cpp would not load.
    """
    config = draft.config or {}
    half = find_vision(config)
    if half is None:
        return None
    plain = mixture if mixture in PLAIN else "F16"
    number = next(known.number for known in MIXTURES if known.name == plain)
    images = half.images(config, _processor(files))
    keys = half.keys(images, embedding.out.shape[-1], number)
    places = {step.out.name: half.names(step.out.name, images) for step in steps}
    if unknown := [name for name, names in places.items() if names is None]:
        raise Unsupported(f"llama.cpp knows no such tensor in the vision half of {half.model_type}", where=unknown[0])
    known = {name: names for name, names in places.items() if names is not None}
    layers = half.size(images, "block_count")
    _check_layers(layers, {name.split(".")[2] for names in known.values() for name in names if name.startswith("v.blk.")})
    heads = half.size(images, "attention.head_count")
    stored = [_stored(half, step, known[step.out.name], heads, plain) for step in steps if known[step.out.name]]
    products: list[Product] = []
    if half.token:
        product = _row(draft, embedding, _token_id(files, half.token))
        products.append(product)
        stored.append(_copied(product, embedding.settings))
    return ImageFile(stored, products, [step for step in steps if not known[step.out.name]], encode_metadata(keys))


def _check_layers(layers: int, numbers: Collection[str]) -> None:
    """Raise Unsupported unless there are tensors of each layer."""
    if len(numbers) != layers or numbers != {str(i) for i in range(layers)}:
        what = f"its vision_config has {layers:,} layers, and its tensors are of {len(numbers):,}"
        raise Unsupported(what, where="config.json", fix="repair config.json")


def _processor(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The files that say how images are prepared, as one. Raises FormatError for one that is no JSON object."""
    whole: dict[str, Any] = {}
    for name in PROCESSOR:
        settings = _object(files, name)
        inner = settings.get("image_processor")
        whole |= settings | (inner if isinstance(inner, dict) else {})
    return whole


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_object(files[name], name, name, _REPAIR, unique=False, max_memory=1 << 30) if name in files else {}


def _stored(half: VisionHalf, step: Step, names: Sequence[str], heads: int, plain: str) -> Step:
    """The step, encoded for the file. Raises Unsupported for a tensor that cannot be."""
    shape, name = step.out.shape, names[0]
    turned = half.rotated and name.split(".")[-2] in ("attn_q", "attn_k")
    if turned and shape[0] % (2 * heads):
        raise Unsupported(f"its {shape[0]:,} rows are not {heads:,} heads", where=step.out.name, fix="repair config.json")
    encoding = GgufEncoding(
        TYPES[half.type_of(name, len(shape), plain)],
        head_rows=shape[0] // heads if turned else 0,
        shift=1.0 if name in half.shifted else 0.0,
        pieces=len(names),
        axis=2 if len(names) > 1 and len(shape) == 5 else 0,  # frames of [channels, colours, frames, height, width]
    )
    stored = tuple(replace(out, name=name) for out, name in zip(encoding.outs(step.out), names, strict=True))
    return replace(step, encoding=encoding.name, stored=stored)


# ---- the row of a token


@dataclass(frozen=True, slots=True)
class TokenRow(ProductSettings):
    """The settings of the product `token_row`: one row of the embedding, as the output has it.

    row  its number
    """

    row: int

    def product(self, name: str, embedding: Step, needs: tuple[str, ...]) -> Product:
        """The product. needs: the products of the embedding. Its array, float32 [columns], has its name."""
        outs = (TensorSpec(name, DTYPES["F32"], embedding.out.shape[1:]),)
        return Product(name, _ROW, outs, self.to_json(), (embedding,), needs=needs)

    def made_of(self, name: str, embedding: Step, draft: PlanDraft) -> Product:
        """The product, of a step of a draft."""
        return self.product(name, embedding, tuple(sorted(needs_of(embedding, arrays_of(draft.products)))))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if len(shapes) != 1:
            return "it is of one tensor"
        [shape] = shapes.values()
        if len(shape) != 2 or not 0 <= self.row < shape[0]:
            return f"there is no row {self.row:,}"
        fits = [(out.dtype.name, out.shape) for out in product.outs] == [("F32", shape[1:])]
        return "" if fits else "its array is not a row of its tensor"


def _compute(context: ProductContext) -> Arrays:
    [embedding] = context.product.steps
    return [context.rows(embedding.out.name, [TokenRow.of(context.product).row])[0]]


KIND = ProductKind("reading the row of a token", compute=_compute, check=TokenRow.check)


def _row(draft: PlanDraft, embedding: Step, row: int) -> Product:
    """The product of a row of the embedding. Raises Unsupported if it has none."""
    if row >= embedding.out.shape[0]:
        what = f"the embedding has {embedding.out.shape[0]:,} rows, and none for token {row:,}"
        raise Unsupported(what, where=embedding.out.name, fix="repair the tokenizer's files")
    return TokenRow(row).made_of(_TOKEN, embedding, draft)


def _copied(product: Product, settings: int) -> Step:
    spec = TensorSpec(_TOKEN, DTYPES["F32"], product.outs[0].shape)
    encoding = GgufEncoding(spec.dtype).name
    return Step(spec, COPY, (Read(PRODUCTS, product.outs[0].name),), settings=settings, encoding=encoding, stored=(spec,))


def _token_id(files: Mapping[str, bytes], token: str) -> int:
    """The number of an added token. Raises Unsupported if there is none."""
    for number, name in _added(files):
        if name == token:
            return number
    what, fix = (
        f"no token {show(token)}, which ends each row of an image",
        "add the tokenizer's files of the model to its folder",
    )
    raise Unsupported(what, where=TOKENIZER[-1], fix=fix)


def _added(files: Mapping[str, bytes]) -> Iterator[tuple[int, object]]:
    """Numbers and texts of added tokens, of tokenizer_config.json first."""
    listed = _object(files, TOKENIZER[0]).get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isdecimal() and len(number) < 10 and isinstance(entry, dict):
            yield int(number), entry.get("content")
    entries = _object(files, TOKENIZER[1]).get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and type(entry.get("id")) is int and entry["id"] >= 0:
            yield entry["id"], entry.get("content")


def left_out(error: Unsupported, tensors: int) -> Finding:
    """The warning for a half that cannot be written."""
    what = f"{tensors:,} tensors for images are left out: {error.finding.what}"
    return Finding(what, error.finding.where, fix=error.finding.fix or f"leave them out with {named('mmproj')}")
