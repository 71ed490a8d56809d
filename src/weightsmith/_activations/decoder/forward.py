"""The hidden states of a decoder, with one layer's weights in memory at a time.

transformers builds the module from config.json without allocating weights. A first forward pass records the arguments (masks,
positions) of each layer. Then each layer in turn is loaded, runs on all prompts, and frees its memory for the next. Arithmetic
is float32 on every device, whatever dtype the weights have: few CPUs have fast 16-bit arithmetic. With `Base.arithmetic`
bfloat16, the weights of a layer's linear layers and what enters them are rounded to it where they are multiplied; sums are
float32, and rounded to it once.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weightsmith._activations.decoder import Arithmetic, Base, Features, WeightSource
from weightsmith._activations.decoder.channels import scalable
from weightsmith._activations.decoder.unfused import put_back, unfuse
from weightsmith._base.errors import ShapeError, Unsupported, WeightsmithError, first_line
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.fused_experts import names_in_files
from weightsmith._models.structure.configs import decoded_floats
from weightsmith._models.structure.projections import role_of

BATCH_TOKENS = 2048
"""Per batch, including padding: enough to keep a processor busy while attention masks stay small."""


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's inputs for each prompt: float32 [tokens, hidden], prompts in the caller's order, no padding.

    index      of the layer
    entering   the residual stream before the layer (transformers' hidden_states[index])
    mlp_input  the input of the layer's MLP, after attention and its norm; a router in its place receives the same
    """

    index: int
    entering: Sequence[Tensor]
    mlp_input: Sequence[Tensor]


class Decoder:
    """A transformers module without weights, and the model that has them. Created by `build`."""

    def __init__(
        self,
        base: Base,
        specs: Mapping[str, TensorSpec],
        whole: Any,
        body: Any,
        layers: nn.ModuleList,
        embedding: str,
    ) -> None:
        """Use `build`."""
        self._base = base
        self._specs = specs
        self._whole = whole
        self._body = body
        self._layers = layers
        self._embedding = embedding
        self._owner, self._stack = _place(base)
        self.head_weights = self._find_head_weights()

    @property
    def max_tokens(self) -> int:
        """The model's maximum number of positions."""
        return int(getattr(self._body.config, "max_position_embeddings", None) or 1 << 30)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self._specs[self._name(self._embedding)].shape[0]

    @property
    def logit_cap(self) -> float | None:
        """c, where logits are c · tanh(x / c); None where they are not. transformers' default if config.json does not say."""
        return getattr(self._body.config, "final_logit_softcapping", None)

    @property
    def layer_bytes(self) -> list[int]:
        """Stored size of each layer's weights."""
        names = [[f"{self._base.prefix}{i}.{n}" for n, _ in layer.named_parameters()] for i, layer in enumerate(self._layers)]
        return [sum(self._specs[name].nbytes for name in layer_names) for layer_names in names]

    def embeddings(self, source: WeightSource, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The stored embeddings of the tokens of each prompt: float32 [tokens, hidden]."""
        table, place = self._rows(source, prompts)
        return [table[[place[token] for token in ids]] for ids in prompts]

    def states(
        self, source: WeightSource, prompts: Sequence[Sequence[int]], *, device: str = "cpu", batch_tokens: int = BATCH_TOKENS
    ) -> Iterator[LayerStates]:
        """Yield each layer's inputs for the prompts.

        source   supplies the weights
        prompts  token ids, not empty
        device   a torch device name
        batch_tokens  tokens per batch, including padding; affects the states only by float rounding

        Memory: one layer in float32 (on the CPU, and on the device if different), and five times [all tokens, hidden]
        float32.
        """
        self._check_tokens(max(map(len, prompts)))
        with torch.inference_mode():
            batches = [_Batch(prompts, chosen, device) for chosen in _batches(prompts, batch_tokens)]
            self._begin(source, batches, prompts, device)
            memory = _Memory(source, device)
            for i, layer in enumerate(self._layers):
                weights = {name: f"{self._base.prefix}{i}.{name}" for name, _ in layer.named_parameters()}
                with _loaded(layer, weights, memory):
                    yield self._run(i, layer, batches, len(prompts))

    def embedded(self, source: WeightSource, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """What enters the first layer, for rows of token ids without padding: float32 [tokens, hidden] each."""
        with torch.no_grad():
            place = self._embed(source, rows, "cpu")
            for ids in rows:
                tokens = torch.tensor([[place[token] for token in ids]])
                yield record(self._body, self._layers, input_ids=tokens)[0][0]

    def pull_embedded(
        self, source: WeightSource, rows: Sequence[Sequence[int]], leaving: Tensor, vocabulary: int
    ) -> dict[str, Tensor]:
        """Return the gradients of the embedding, and of other weights before the first layer, by stored name.

        leaving     gradients of the output of `embedded`: float32 [rows, tokens, hidden]
        vocabulary  rows of the embedding
        """
        with torch.no_grad():
            place = self._embed(source, rows, "cpu")
        weights = {name: parameter for name, parameter in self._body.named_parameters() if not parameter.is_meta}
        for parameter in weights.values():
            parameter.requires_grad_(True)
        try:
            sums = [torch.zeros_like(parameter) for parameter in weights.values()]
            for ids, gradient in zip(rows, leaving.cpu(), strict=True):
                with torch.enable_grad():
                    tokens = torch.tensor([[place[token] for token in ids]])
                    entering = record(self._body, self._layers, input_ids=tokens)[0]
                    for total, part in zip(sums, gradients_at(entering, [*weights.values()], gradient[None]), strict=True):
                        total += part
        finally:
            for parameter in weights.values():
                parameter.requires_grad_(False)
        named = {self._name(name): total for name, total in zip(weights, sums, strict=True)}
        table = self._name(self._embedding)
        full = torch.zeros(vocabulary, named[table].shape[1])
        full[torch.tensor(list(place))] = named[table]
        return {**named, table: full}

    @contextmanager
    def layer(
        self, i: int, source: WeightSource, tokens: int, device: str = "cpu", overrides: Mapping[str, Tensor] | None = None
    ) -> Iterator[Layer]:
        """Layer i with its weights, for rows of so many tokens.

        source  supplies weights; matrices that transformers fuses may be stored one by one
        overrides  weights to use instead of the source's, by name

        Raises ShapeError if its tensors are not those of the module.
        """
        overrides = overrides or {}
        layer = self._layers[i]
        self._check_tokens(tokens)
        shapes = {name: spec.shape for name, spec in source.specs.items()}
        narrowing = source.specs.values() if self._base.arithmetic == "bfloat16" else ()
        narrow = {spec.name for spec in narrowing if role_of(spec) == "linear"}
        names, replaced = self._unfuse(i, shapes)
        try:
            self._check_shapes(_shapes_in(layer, names), shapes)
            self._to(device)
            with torch.no_grad():
                hidden = torch.zeros(1, tokens, self._base.hidden, device=device)
                call = record(self._body, self._layers, inputs_embeds=hidden)[1][i]
                with _loaded(
                    layer, {name: stored for name, stored in names.items() if stored not in overrides}, _Memory(source, device)
                ):
                    for name, stored in names.items():
                        if stored in overrides:
                            _register(layer, name, overrides[stored].to(device))
                    linear = {names[f"{n}.weight"]: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
                    weights = {stored: layer.get_parameter(name) for name, stored in names.items()}
                    for stored in narrow & linear.keys():
                        linear[stored].forward = _Bfloat16(linear[stored])
                    yield Layer(layer, linear, weights, *call, self._base.instead)
        finally:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.__dict__.pop("forward", None)
            put_back(layer, replaced)

    def check(self, shapes: Mapping[str, tuple[int, ...]], tokens: int) -> None:
        """Raise an error if rows of so many tokens cannot run through the layers. It needs no weights.

        shapes  of all the model's tensors, by name

        Raises ShapeError if the tensors are not those of the modules; Unsupported as `layer`.
        """
        self._check_tokens(tokens)
        with torch.no_grad():
            hidden = torch.zeros(1, tokens, self._base.hidden)
            entering = record(self._body, self._layers, inputs_embeds=hidden)[0]
        if entering.shape != hidden.shape:
            what = f"layers of '{self._body.config.model_type}' get several states of each token, and here they get one"
            raise Unsupported(what, where=self._base.label, fix=f"choose what needs no text{self._base.instead}")
        for i, layer in enumerate(self._layers):
            names, replaced = self._unfuse(i, shapes)
            expected = _shapes_in(layer, names)
            put_back(layer, replaced)
            self._check_shapes(expected, shapes)

    def scalable(self, i: int, shapes: Mapping[str, tuple[int, ...]]) -> list[Features]:
        """The features of layer i that can be scaled. It needs no weights. shapes: of all the model's tensors, by name."""
        layer = self._layers[i]
        names, replaced = self._unfuse(i, shapes)
        try:
            for name, parameter in list(layer.named_parameters()):
                if not parameter.is_meta:
                    _register(layer, name, parameter.to("meta"))
            of_layer = {id(parameter) for parameter in layer.parameters()}
            whole = [id(parameter) for _, parameter in self._whole.named_parameters(remove_duplicate=False)]
            if any(count > 1 for parameter, count in Counter(whole).items() if parameter in of_layer):
                return []  # another layer uses them as well
            with torch.no_grad():
                hidden = torch.zeros(1, 3, self._base.hidden)
                call = record(self._body, self._layers, inputs_embeds=hidden)[1][i]
            return scalable(layer, names, call, self._base.hidden)
        finally:
            put_back(layer, replaced)

    @contextmanager
    def head(
        self,
        source: WeightSource,
        device: str = "cpu",
        overrides: Mapping[str, Tensor] | None = None,
        arithmetic: Arithmetic = "float32",
        *,
        reuse: bool = False,
    ) -> Iterator[Callable[..., Tensor]]:
        """The norm and the head: states, float32 [tokens, hidden] → logits, float32 [tokens, vocabulary]. Thread-safe.

        source  supplies weights, all that the head has
        overrides  `head_weights` to use instead of the source's, by stored name
        arithmetic  dtype in which the head multiplies, whatever that of the layers. In bfloat16 it has no gradients. A second
                    argument of what this gives, int64 [tokens], then names the token of each state whose logit is found in
                    float32: the one whose loss is wanted. The others' rounding averages out in a softmax
        reuse    whether logits are gone when the same thread asks for more: their memory is then used again. The system takes
                 16 ms to clear 25 MB, where the product of 128 tokens with a head of 49,152 takes 86

        transformers' own module runs without its layers, so norms, scales, biases and caps are the model's.

        Raises ShapeError if the tensors are not those of the module.
        """
        names, ready = self.head_weights, overrides or {}
        shapes = {name: tuple(tensor.shape) for name, tensor in ready.items()}
        if overrides is None:
            shapes = {name: spec.shape for name, spec in source.specs.items()}
        self._check_shapes(_shapes_in(self._whole, names), shapes)
        self._to(device)
        with torch.no_grad(), _loaded(self._whole, names if overrides is None else {}, _Memory(source, device)):
            for name, stored in names.items() if overrides is not None else ():
                _register(self._whole, name, ready[stored].to(device))
            linear = self._whole.get_output_embeddings()
            with (
                _skipped(self._layers) as leave,
                _multiplying(linear, arithmetic) as exact,
                _reusing(linear) if reuse and arithmetic == "float32" and device == "cpu" else nullcontext(),
            ):

                def logits(states: Tensor, tokens: Tensor | None = None) -> Tensor:
                    exact(tokens)
                    with leave(states[None]):
                        scores: Tensor = self._whole(inputs_embeds=states[None], use_cache=False).logits[0]
                    return scores.float()

                yield logits

    @contextmanager
    def generating(self, source: WeightSource, device: str = "cpu", turns: Turns | None = None) -> Iterator[Any]:
        """transformers' whole module, for its own `generate`.

        source  supplies weights; matrices that transformers fuses may be stored one by one
        turns   the threads that generate: each layer is loaded when they reach it. None: all layers are in memory

        Memory: what is outside the layers in float32, with all layers or one.

        Raises ShapeError if the tensors are not those of the module.
        """
        table, shapes = self._name(self._embedding), {name: spec.shape for name, spec in source.specs.items()}
        body = _body_name(self._whole, self._owner, self._stack)
        outside = {**self.head_weights, f"{body}.{self._embedding}".removeprefix("."): table}
        memory = _Memory(source, device)
        expected = _shapes_in(self._whole, outside)
        layers: list[tuple[nn.Module, dict[str, str]]] = []
        with torch.no_grad(), ExitStack() as stack:
            for i, layer in enumerate(self._layers):
                names, replaced = self._unfuse(i, shapes)
                stack.callback(put_back, layer, replaced)
                expected |= _shapes_in(layer, names)
                layers.append((layer, names))
            self._check_shapes(expected, shapes)
            self._to(device)
            stack.enter_context(_loaded(self._whole, outside, memory))
            if turns is None:
                for layer, names in layers:
                    _assign(layer, names, memory)
            else:
                stack.enter_context(turns.of([partial(_loaded, layer, names, memory) for layer, names in layers]))
                for i, (layer, _) in enumerate(layers):
                    stack.callback(layer.__dict__.pop, "forward")
                    layer.forward = turns.within(i, layer.forward)
            yield self._whole

    def _unfuse(self, i: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], dict[str, nn.Module]]:
        """`unfuse` of layer i. shapes: of all the model's tensors, by name."""
        with _Weightless():
            return unfuse(self._layers[i], f"{self._base.prefix}{i}.", shapes, names_in_files(self._body.config.model_type))

    def _check_shapes(self, by_config: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ShapeError, unless a model has the tensors that the module needs. Both: shapes by stored name."""
        if wrong := _wrong_shapes(by_config, stored):
            fix = f"check its config.json{self._base.instead}"
            raise ShapeError(_MISMATCH, where=self._base.label, details=wrong, fix=fix)

    def _check_tokens(self, tokens: int) -> None:
        """Raise Unsupported for rows of so many tokens, if layers would need the tokens that an earlier one has chosen."""
        config = self._body.config
        most = getattr(config, "index_topk", tokens)
        if tokens > most and "shared" in (getattr(config, "indexer_types", None) or ()):
            what = f"some of its layers attend to {most:,} tokens that another one chose ('shared' in indexer_types)"
            what += f", and layers run one by one here: rows may have {most:,} tokens, not {tokens:,}"
            raise Unsupported(what, where=self._base.label, fix=f"use rows of {most:,} tokens{self._base.instead}")

    @property
    def head_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Within `head`: its parameters, with the stored names of their weights. Tied ones are there twice."""
        return [(stored, self._whole.get_parameter(name)) for name, stored in self.head_weights.items()]

    def _find_head_weights(self) -> dict[str, str]:
        """The parameters outside the layers that logits depend on: names in transformers' module → the model's names."""
        table, head = self._body.get_input_embeddings(), self._whole.get_output_embeddings()
        layers, embedding = (self._name(name) for name in (f"{self._stack}.", self._embedding))
        names = {}
        body = _body_name(self._whole, *_place(self._base))
        beside = f"{body.rpartition('.')[0]}." if "." in body else ""  # what the text model is in: towers, projectors
        for name, parameter in self._whole.named_parameters(remove_duplicate=False):
            stored = self._stored(name)
            if stored.startswith(layers) or stored == embedding:
                continue
            if beside and name.startswith(beside) and not name.startswith(f"{body}."):
                continue
            is_tied = parameter is table.weight or (head is not None and parameter is head.weight and self._is_tied)
            names[name] = embedding if is_tied else stored
        return names

    def _stored(self, name: str) -> str:
        """The model's name for a parameter of transformers' module."""
        body = f"{_body_name(self._whole, self._owner, self._stack)}."
        if self._owner and name.startswith(body):
            return self._name(name.removeprefix(body))
        name = _IN_FILES.get((self._body.config.model_type, name), name)
        outer = self._owner.removesuffix(".model")  # the head of Llava: language_model.lm_head
        return f"{outer}.{name}" if outer != self._owner else name

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self._whole.config, "tie_word_embeddings", False))

    @contextmanager
    def final_norm(self, source: WeightSource, device: str = "cpu") -> Iterator[Any]:
        """The norm after the last layer, whose output enters the head: a module, with its weights."""
        norm_name = next(name for name in _LAST_NORMS if hasattr(self._body, name))
        norm = self._body.get_submodule(norm_name)
        names = {name: self._name(f"{norm_name}.{name}") for name, _ in norm.named_parameters()}
        with _loaded(norm, names, _Memory(source, device)):
            yield norm

    def _rows(self, source: WeightSource, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, dict[int, int]]:
        """The embedding rows of all tokens in the prompts, and the row index of each token."""
        used = sorted({token for ids in prompts for token in ids})
        rows = torch.from_numpy(source.rows(self._name(self._embedding), used))
        return rows, {token: i for i, token in enumerate(used)}

    def _name(self, parameter: str) -> str:
        """The model's name for a parameter of the body."""
        return f"{self._owner}.{parameter}" if self._owner else parameter

    def _begin(self, source: WeightSource, batches: Sequence[_Batch], prompts: Sequence[Sequence[int]], device: str) -> None:
        """Embed every batch and record the arguments of every layer, by running the body without its layers."""
        place = self._embed(source, prompts, device)
        for batch in batches:
            batch.record(self._body, self._layers, place)

    def _embed(self, source: WeightSource, prompts: Sequence[Sequence[int]], device: str) -> dict[int, int]:
        """Give the body the embedding rows of these tokens, and all else it needs outside its layers. Returns token → row."""
        table, place = self._rows(source, prompts)
        module = self._body.get_submodule(self._embedding.removesuffix(".weight"))
        module.padding_idx = None  # rows are renumbered
        module.weight = nn.Parameter(table.to(device), requires_grad=False)
        rest = {n: self._name(n) for n, p in self._body.named_parameters() if p.is_meta and not n.startswith(f"{self._stack}.")}
        _assign(self._body, rest, _Memory(source, device))
        self._to(device)
        return place

    def _to(self, device: str) -> None:
        """Move the buffers: positions, scales."""
        for name, buffer in self._body.named_buffers():
            owner, _, leaf = name.rpartition(".")
            self._body.get_submodule(owner)._buffers[leaf] = buffer.to(device)

    def _run(self, i: int, layer: nn.Module, batches: Sequence[_Batch], count: int) -> LayerStates:
        entering: list[Any] = [None] * count
        mlp_input: list[Any] = [None] * count
        seen: list[Tensor] = []
        mlp: Any = layer.mlp
        hook = mlp.register_forward_pre_hook(lambda _module, args, kwargs: seen.append(_first(args, kwargs)), with_kwargs=True)
        try:
            for batch in batches:
                before, after = batch.through(i, layer)
                for row, (prompt, tokens) in enumerate(zip(batch.chosen, batch.lengths, strict=True)):
                    entering[prompt] = before[row, :tokens]
                    mlp_input[prompt] = seen[-1].view(after.shape)[row, :tokens].clone()
                seen.clear()
        finally:
            hook.remove()
        return LayerStates(i, entering, mlp_input)


def transformers_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration object of a config.json, whatever it raises."""
    from transformers import AutoConfig

    settings = decoded_floats(dict(config))
    return AutoConfig.for_model(settings.pop("model_type", ""), **settings)


def build(base: Base, specs: Mapping[str, TensorSpec]) -> Decoder | WeightsmithError:
    """The module of a model, without weights; an error if transformers cannot build it or its tensors do not match.

    specs  of all the model's tensors, by name; {} leaves the check to `Decoder.layer`

    Works for any transformers class that calls its layers in sequence.
    """
    model_type = base.config.get("model_type", "")
    try:
        config = transformers_config(base.config)
        with _Weightless():
            whole = _class_of(config).from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        owner, stack = _place(base)
        body = whole.get_submodule(_body_name(whole, owner, stack))
        layers = body.get_submodule(stack)
        table = body.get_input_embeddings().weight
    except Exception as error:  # a bad config can raise anything in transformers
        what = f"transformers cannot build a model of type '{model_type}': {first_line(error)}"
        return Unsupported(what, where=base.label, fix=f"check its config.json{base.instead}")
    text = whole.config.get_text_config()
    for key, received in _FROM_ELSEWHERE.items():
        if number := getattr(text, key, None):
            what = f"layers of '{model_type}' with {key} {number} also get {received}, and here they run one by one"
            return Unsupported(what, where=base.label, fix=f"choose what needs no text{base.instead}")
    embedding = next(name for name, parameter in body.named_parameters() if parameter is table)
    shapes_by_config = {f"{owner}.{name}" if owner else name: tuple(p.shape) for name, p in body.named_parameters()}
    stored = {name: spec.shape for name, spec in specs.items()}
    wrong = _wrong_shapes(shapes_by_config, stored) if specs else []
    if wrong or not isinstance(layers, nn.ModuleList) or len(layers) != base.layers:
        return ShapeError(_MISMATCH, where=base.label, details=wrong, fix=f"check its config.json{base.instead}")
    return Decoder(base, specs, whole, body, layers, embedding)


_FROM_ELSEWHERE = {
    "hidden_size_per_layer_input": "an embedding of each token of their own",
    "num_kv_shared_layers": "keys and values of an earlier layer",
}
"""Keys of config.json (Gemma 3n, Gemma 4), and what layers then get besides hidden states, masks and positions."""


class _Bfloat16:
    """The forward pass of a linear layer in bfloat16, with results in the dtype of x. Thread-safe.

    The rounded weight is kept until the weight changes, except where gradients of the weight are wanted: those pass through
    the rounding. Rounding takes as long as multiplying about 40 tokens.
    """

    def __init__(self, linear: nn.Linear) -> None:
        # A reference that counts would be a cycle: a model would stay in memory until Python collects garbage.
        self._linear = weakref.ref(linear)
        self._kept: tuple[Any, int, Tensor] = (None, 0, torch.empty(0))

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._linear()
        assert linear is not None
        weight, bias = linear.weight, linear.bias
        product = nn.functional.linear(x.bfloat16(), self._rounded(weight)).to(x.dtype)
        return product if bias is None else product + bias

    def _rounded(self, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            return weight.bfloat16()
        of, version, rounded = self._kept
        if of is not weight or version != weight._version:
            rounded = weight.bfloat16()
            self._kept = weight, weight._version, rounded
        return rounded


@contextmanager
def _multiplying(head: Any, arithmetic: Arithmetic) -> Iterator[Callable[[Tensor | None], None]]:
    """Let a head multiply in a dtype; a module that is no linear layer is left alone.

    Gives a function that takes the tokens, int64 [tokens], whose logits are found in float32 on this thread, each for its
    state; None: of no tokens.
    """
    thread = threading.local()

    def exact(tokens: Tensor | None) -> None:
        thread.tokens = tokens

    if arithmetic == "float32" or not isinstance(head, nn.Linear):
        yield exact
        return
    multiply = _Bfloat16(head)

    def forward(x: Tensor) -> Tensor:
        product, tokens = multiply(x), getattr(thread, "tokens", None)
        if tokens is not None:
            products = (x * head.weight[tokens]).sum(-1)
            product[..., torch.arange(len(tokens)), tokens] = products if head.bias is None else products + head.bias[tokens]
        return product

    head.forward = forward
    try:
        yield exact
    finally:
        del head.forward


@contextmanager
def _reusing(head: Any) -> Iterator[None]:
    """Let a head without gradients write its logits into one block of memory for each thread; a module that is no linear layer
    is left alone.
    """
    if not isinstance(head, nn.Linear):
        yield
        return
    thread = threading.local()

    def forward(x: Tensor) -> Tensor:
        rows, weight, bias = x.reshape(-1, x.shape[-1]), head.weight.T, head.bias
        logits = getattr(thread, "logits", None)
        if logits is None or len(logits) < len(rows):
            logits = thread.logits = torch.empty(len(rows), weight.shape[1])
        part = logits[: len(rows)]
        if bias is None:
            torch.mm(rows, weight, out=part)
        else:
            torch.addmm(bias, rows, weight, out=part)
        return part.view(*x.shape[:-1], -1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def narrow_linears(model: nn.Module, head: nn.Module | None) -> None:
    """Let all linear layers of a model but its head multiply in bfloat16, with results in the dtype of what enters them.

    Their weights are rounded in place. Logits that are rounded would be too coarse to draw tokens from.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
            module.forward = _Bfloat16(module)  # type: ignore[method-assign,unused-ignore]


def fast_arithmetic(device: str) -> Arithmetic:
    """The dtype in which linear layers multiply fastest: bfloat16 on a CPU that has instructions for it."""
    return "bfloat16" if device == "cpu" and _has_bfloat16() else "float32"


def _has_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 matrices, as far as torch says: AVX512-BF16 or AMX."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


_MISMATCH = "the tensors do not match the model that transformers builds from config.json"


def _shapes_in(module: nn.Module, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by stored name. names: the module's → stored."""
    return {stored: tuple(module.get_parameter(name).shape) for name, stored in names.items()}


def _wrong_shapes(by_config: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The first five tensors that are missing or have another shape."""
    wrong = [
        f"{name}: {list(shape)} by its config.json, {list(stored[name]) if name in stored else 'missing'} in its files"
        for name, shape in by_config.items()
        if stored.get(name) != shape
    ]
    return wrong[:5]


def _place(base: Base) -> tuple[str, str]:
    """The names of the module that has the layers and of its list of layers: `model` and `layers`."""
    owner, _, stack = base.prefix.removesuffix(".").rpartition(".")
    return owner, stack


def _body_name(whole: nn.Module, owner: str, stack: str) -> str:
    """transformers' name of the module that has the layers.

    owner, stack  the checkpoint's names, which may be others: `backbone` (Nemotron-H), `language_model.model` (Gemma 3)
    """
    names = dict(whole.named_modules())
    if f"{owner}.{stack}".removeprefix(".") in names:
        return owner
    decoder = whole.get_decoder()
    return next(name for name, module in names.items() if module is decoder)


def _class_of(config: Any) -> Any:
    """The class of transformers that gives logits of text, also for a model with images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind, classes = type(config), (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((auto for auto in classes if kind in auto._model_mapping), AutoModelForCausalLM)


_IN_FILES = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}
"""Type, and transformers' name of a parameter outside the layers → what files call it."""

_LAST_NORMS = ("norm", "norm_f", "final_layernorm", "final_layer_norm", "ln_f")
"""Names of the norm after the last layer."""


class _Weightless(TorchFunctionMode):  # type: ignore[misc,unused-ignore]  # torch has no types for it
    """Makes `torch.empty`, which torch layers use for their weights, allocate no memory. Buffers are not affected."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **where})


class _Recorded(Exception):
    """The last layer has been called; stops the forward pass."""


Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a layer is called with, besides hidden states: masks and positions."""


def record(body: Any, layers: nn.ModuleList, **inputs: Tensor) -> tuple[Tensor, list[Call]]:
    """Run the body without its layers: what enters the first, and what each is called with."""
    calls: list[Call] = []
    entering: list[Tensor] = []

    def note(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        hidden = _first(args, kwargs)
        entering.append(hidden)
        calls.append((args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}))
        if len(calls) == len(layers):
            raise _Recorded
        return _leaving(hidden, kwargs)

    for layer in layers:
        layer.forward = note
    try:
        with contextlib.suppress(_Recorded):
            body(**inputs, use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    assert len(calls) == len(layers)
    return entering[0], calls


_CHOSEN = "prev_topk_indices"
"""An argument of the layers of GLM-5, which also give the next layer the tokens that each token attends to."""


def _leaving(states: Tensor, kwargs: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """What a layer that does not run gives the body, for states [rows, tokens, hidden]: where it chooses tokens, all of them.

    kwargs  that it is called with
    """
    if _CHOSEN not in kwargs:
        return states
    rows, tokens, _ = states.shape
    return states, torch.arange(tokens, dtype=torch.int32, device=states.device).expand(rows, tokens, tokens)


@contextmanager
def _skipped(layers: nn.ModuleList) -> Iterator[Callable[[Tensor], contextlib.AbstractContextManager[None]]]:
    """Let a body run without its layers. Gives (what leaves the last layer, on this thread) → a context to run the body in."""
    thread = threading.local()

    @contextmanager
    def leave(states: Tensor) -> Iterator[None]:
        thread.states = states
        try:
            yield
        finally:
            del thread.states

    try:
        for layer in layers:
            layer.forward = lambda *_args, **kwargs: _leaving(thread.states, kwargs)
        yield leave
    finally:
        for layer in layers:
            del layer.forward


class Turns:
    """Lets threads run through layers one of which is in memory at a time.

    A layer is loaded when all threads that have not ended wait for one: so it is loaded once for all, whatever their speed.
    """

    def __init__(self, threads: int) -> None:
        """threads: that run through the layers, each as often as it likes, until it calls `end`."""
        self._running, self._inside, self._layer = threads, 0, -1
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self._layers: Sequence[Callable[[], contextlib.AbstractContextManager[None]]] = ()
        self._open = ExitStack()
        self._error: BaseException | None = None

    @contextmanager
    def of(self, layers: Sequence[Callable[[], contextlib.AbstractContextManager[None]]]) -> Iterator[None]:
        """The layers: contexts in which one is in memory."""
        self._layers = layers
        with self._open:
            yield

    def within(self, i: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of layer i, in its turn."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._changed:
                self._waiting.append(i)
                self._advance()
                self._changed.wait_for(lambda: self._error is not None or self._layer == i)
                self._waiting.remove(i)
                if self._error is not None:
                    raise self._error
                self._inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                with self._changed:
                    self._inside -= 1
                    self._advance()

        return run

    def end(self, error: BaseException | None = None) -> None:
        """A thread has ended. error: that it failed with, and with which the others end at their next layer."""
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()
            self._advance()

    def _advance(self) -> None:
        """Load another layer, if all wait for it. The caller has the lock."""
        if self._error is not None or self._inside or not self._waiting or len(self._waiting) < self._running:
            return
        if self._layer in self._waiting:
            return
        try:
            self._open.close()
            self._layer = self._waiting[0]
            self._open.enter_context(self._layers[self._layer]())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._changed.notify_all()


_BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm")
"""Names of `Layer.before_mlp`: the first that a layer has."""

_CACHES = ("cache", "past_key_values", "past_key_value")
"""Names of the argument of a layer that takes a cache, in releases of transformers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its weights.

    module        transformers'
    linears       its linear layers, by the stored name of their weights
    weights       its parameters, by stored name
    args, kwargs  what it is called with, besides hidden states
    instead       as `Base.instead`
    """

    module: Any
    linears: Mapping[str, nn.Linear]
    weights: Mapping[str, nn.Parameter]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    instead: str = ""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run one row, float32 [tokens, hidden]. Thread-safe."""
        after = self.module(hidden[None], *self.args, **self.kwargs)
        return (after if isinstance(after, Tensor) else after[0])[0]

    def batch(self, hidden: Tensor) -> Tensor:
        """Run some rows, float32 [rows, tokens, hidden], without gradients. Thread-safe."""
        with torch.no_grad():
            after = self.module(hidden, *self.args, **self.kwargs)
        return after if isinstance(after, Tensor) else after[0]

    def pull(self, hidden: Tensor, leaving: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of the layer's input, [rows, tokens, hidden], and of its `weights`. Thread-safe.

        leaving  gradients of the layer's output, [rows, tokens, hidden]
        """
        with torch.enable_grad():
            entering = hidden.detach().requires_grad_()
            after = self.module(entering, *self.args, **self.kwargs)
            gradients = gradients_at(
                after if isinstance(after, Tensor) else after[0], [entering, *self.weights.values()], leaving
            )
        return gradients[0], dict(zip(self.weights, gradients[1:], strict=True))

    def with_cache(self, cache: Any) -> Layer:
        """The same layer, which gives its keys and values to a cache: to `cache.update`, which returns what attention uses.

        Raises Unsupported if it takes no cache.
        """
        name = next((name for name in _CACHES if name in self.kwargs), "")
        if not name:
            what = "its layers take no cache of keys and values"
            raise Unsupported(what, fix=f"leave out the scales of the cache{self.instead}")
        return replace(self, kwargs={**self.kwargs, name: cache})

    def linear(self, weight: str) -> nn.Linear:
        """A linear layer, by the stored name of its weight. Raises Unsupported if there is none."""
        if weight not in self.linears:
            raise Unsupported(
                "transformers has no linear layer of this name", where=weight, fix=f"check its config.json{self.instead}"
            )
        return self.linears[weight]

    @property
    def before_mlp(self) -> nn.Module:
        """The norm that gets the residual stream between attention and MLP."""
        return next(getattr(self.module, name) for name in _BEFORE_MLP if hasattr(self.module, name))


class _Batch:
    """Right-padded prompts; between layers, their hidden states [prompts, tokens, hidden]."""

    def __init__(self, prompts: Sequence[Sequence[int]], chosen: Sequence[int], device: str) -> None:
        self.chosen = chosen
        self.lengths = [len(prompts[k]) for k in chosen]
        self._ids = [list(prompts[k]) for k in chosen]
        self._device = device
        self._hidden: Tensor = torch.empty(0)
        self._calls: list[Call] = []

    def record(self, body: Any, layers: nn.ModuleList, place: Mapping[int, int]) -> None:
        """Run the body with layers that record their arguments. place: token → row of the embedding."""
        width = max(self.lengths)
        ids = torch.zeros(len(self._ids), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, row_ids in enumerate(self._ids):
            ids[row, : len(row_ids)] = torch.tensor([place[token] for token in row_ids])
            mask[row, : len(row_ids)] = 1

        ids, mask = ids.to(self._device), mask.to(self._device)
        self._hidden, self._calls = record(body, layers, input_ids=ids, attention_mask=mask)

    def through(self, i: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Run the batch through layer i. Returns hidden states before the layer and inputs of its MLP."""
        before = self._hidden
        args, kwargs = self._calls[i]
        after = layer(before, *args, **kwargs)
        self._hidden = after if isinstance(after, Tensor) else after[0]
        return before, self._hidden


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def _batches(prompts: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts, grouped by similar length into batches."""
    batch: list[int] = []
    for k in sorted(range(len(prompts)), key=lambda k: (len(prompts[k]), k)):
        if batch and (len(batch) + 1) * len(prompts[k]) > batch_tokens:
            yield batch
            batch = []
        batch.append(k)
    if batch:
        yield batch


class _Memory:
    """Buffers for weights, reused for the next layer: freeing and allocating takes longer than filling them."""

    def __init__(self, source: WeightSource, device: str) -> None:
        self._source = source
        self._device = "cpu" if torch.device(device).type == "cpu" else device
        self._free: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}

    def filled(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The model's tensors in float32 on the device. shapes: by name."""
        staged = {name: self._take("cpu", shape) for name, shape in shapes.items()}
        self._source.fill({name: tensor.numpy() for name, tensor in staged.items()})
        if self._device == "cpu":
            return staged
        moved = {name: self._take(self._device, shape).copy_(staged[name]) for name, shape in shapes.items()}
        self.free(staged.values())
        return moved

    def free(self, tensors: Iterable[Tensor]) -> None:
        """Release tensors for reuse."""
        for tensor in tensors:
            where = "cpu" if tensor.device.type == "cpu" else self._device
            self._free.setdefault((where, tuple(tensor.shape)), []).append(tensor)

    def _take(self, device: str, shape: tuple[int, ...]) -> Tensor:
        free = self._free.get((device, shape))
        return free.pop() if free else torch.empty(shape, dtype=torch.float32, device=device)


@contextmanager
def _loaded(layer: nn.Module, names: Mapping[str, str], memory: _Memory) -> Iterator[None]:
    """Load the layer's weights; release them on exit."""
    try:
        _assign(layer, names, memory)
        yield
    finally:
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta:
                    module.register_parameter(name, nn.Parameter(parameter.to("meta"), requires_grad=False))
                    memory.free([parameter.data])


def _assign(module: nn.Module, names: Mapping[str, str], memory: _Memory) -> None:
    """Load parameters in float32. names: the module's parameters → the model's tensors."""
    tensors = memory.filled({stored: tuple(module.get_parameter(name).shape) for name, stored in names.items()})
    for name, stored in names.items():
        _register(module, name, tensors[stored])


def gradients_at(of: Tensor, at: Sequence[Tensor], leaving: Tensor | None = None) -> list[Tensor]:
    """The gradients at some tensors; zeros at those that `of` does not depend on."""
    gradients = torch.autograd.grad(of, at, leaving, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(at, gradients, strict=True)]


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
