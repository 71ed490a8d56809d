"""EXL2, EXL3 and GPTQ: models of several architectures, run on a GPU by ExLlamaV2 and exllamav3.

Their logits are those of transformers, in float32, with the weights that weightsmith reads. What is left is the rounding of
float16.

WEIGHTSMITH_EXLLAMA_MODELS names a folder in which the models are kept for the next run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

import weightsmith
from tests import tokenizer_help
from tests.models.formats.readers.loaders import GENERATED, SHORT, STEPS

pytestmark = pytest.mark.reader

ROOT = Path(__file__).parents[4]

BOUND = 0.005
"""Limit for the median token: the RMS error of its logits, divided by the standard deviation of all logits."""

TOKENIZER = tokenizer_help.trained()
TEXT = tokenizer_help.TEXT + tokenizer_help.OTHER_TEXT
VOCABULARY = 328
"""A multiple of neither 32 nor 128: both programs pad the head."""

SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    **{"bos_token_id": 320, "eos_token_id": 321, "pad_token_id": None, "tie_word_embeddings": False},
}
HEADS = {**SIZES, "head_dim": 64}
MOE = {**HEADS, "num_hidden_layers": 2, "num_experts_per_tok": 2, "intermediate_size": 256}
PLAIN, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 256}},
    ),
    # no multiples of 128, and an intermediate size that is none of 64. exllamav3 does not run the hidden size
    "mistral": (
        "MistralConfig",
        {**SIZES, "hidden_size": 192, "intermediate_size": 352, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"head_dim": 64, "sliding_window": None},
    ),
    "mistral-wide": (
        "MistralConfig",
        {**SIZES, "intermediate_size": 352, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"head_dim": 64, "sliding_window": None},
    ),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma2": ("Gemma2Config", {**HEADS, "sliding_window": 512, "query_pre_attn_scalar": 96, "tie_word_embeddings": True}),
    # the text is longer than the window
    "gemma2-window": ("Gemma2Config", {**HEADS, "sliding_window": 64, "query_pre_attn_scalar": 96}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 512, "query_pre_attn_scalar": 96}),
    # every third layer has full attention, with a rope of its own
    "gemma3-deep": (
        "Gemma3TextConfig",
        {**HEADS, "num_hidden_layers": 6, "sliding_window": 64, "query_pre_attn_scalar": 96}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e5},
                "sliding_attention": {**PLAIN, "rope_theta": 3e4},
            }
        },
    ),
    "phi3": ("Phi3Config", SIZES),
    "mixtral": ("MixtralConfig", {**MOE, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}),
}


class Case(NamedTuple):
    """A model in a format, and the program that loads it."""

    program: str
    model: str
    format: str
    options: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        return "-".join([self.format, *map(str, self.options.values()), self.model])


CASES = (
    Case("exllamav2", "llama", "exl2", {"bits": 4.25}),
    Case("exllamav2", "mistral", "exl2", {"bits": 3.0, "head_bits": 8}),
    Case("exllamav2", "qwen2", "exl2", {"bits": 5.0, "head_bits": 4}),
    Case("exllamav2", "qwen3", "exl2", {"bits": 6.0}),
    Case("exllamav2", "gemma2", "exl2", {"bits": 4.0}),
    Case("exllamav2", "gemma3", "exl2", {"bits": 4.5, "head_bits": 16}),
    Case("exllamav2", "phi3", "exl2", {"bits": 2.6}),
    Case("exllamav2", "mixtral", "exl2", {"bits": 4.0}),
    Case("exllamav2", "qwen3-moe", "exl2", {"bits": 4.0}),
    *(Case("exllamav2", model, "gptq-4bit") for model in ("llama", "qwen2", "qwen3", "gemma2", "mixtral")),
    Case("exllamav3", "llama", "exl3", {"bits": 4}),
    Case("exllamav3", "mistral-wide", "exl3", {"bits": 3, "head_bits": 8}),
    Case("exllamav3", "qwen2", "exl3", {"bits": 3.5}),
    Case("exllamav3", "qwen3", "exl3", {"bits": 4.5}),
    Case("exllamav3", "gemma2", "exl3", {"bits": 4}),
    Case("exllamav3", "gemma2-window", "exl3", {"bits": 5, "head_bits": 16}),
    Case("exllamav3", "phi3", "exl3", {"bits": 4}),
    Case("exllamav3", "mixtral", "exl3", {"bits": 4}),
    Case("exllamav3", "qwen3-moe", "exl3", {"bits": 4}),
)


def make(folder: Path, model: str) -> Path:
    """A model with random weights, saved as transformers saves it, and its tokenizer.

    Scales of rows and columns differ, and blocks add about as much as they get, so that a wrong order or scale shows.
    """
    import torch
    import transformers

    name, settings = MODELS[model]
    config = getattr(transformers, name)(**settings, attn_implementation="eager")
    built = transformers.AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(0)
    gemma = model.startswith("gemma")
    with torch.no_grad():
        for key, tensor in built.named_parameters():
            values = torch.randn(tensor.shape, generator=random)
            if tensor.ndim == 1:
                norm = key.endswith("norm.weight")
                tensor[:] = 0.2 * values + (norm and not gemma)
                continue
            size = 2.5 if key.startswith("lm_head") or (gemma and "embed" in key) else 3 if ".gate.weight" in key else 1
            *stack, n, k = tensor.shape
            spread = ((*stack, n, 1), (*stack, 1, k))
            rows, columns = (torch.exp(0.3 * torch.randn(shape, generator=random)) for shape in spread)
            fan = 1 if "embed" in key and not gemma else k
            tensor[:] = size * fan**-0.5 * values * rows * columns
    built.to(torch.float16).save_pretrained(folder)
    tokenizer_help.write(folder, tokenizer_help.files(TOKENIZER, bos_token="<s>", eos_token="</s>"))
    return folder


def logits(folder: Path, tokens: np.ndarray, *, change: Callable[[Any], None] | None = None) -> np.ndarray:
    """What transformers computes in float32: [tokens, vocabulary]. change: the model, before it runs."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if change is not None:
        change(model)
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(tokens)[None]).logits[0].numpy())


def as_exllamav2(folder: Path) -> Callable[[Any], None]:
    """Makes a model compute what ExLlamaV2 0.3.2 does, where that differs: see docs/exl2.md. folder: as EXL2 or GPTQ."""

    def change(model: Any) -> None:
        subtract_means(model)
        leave_unactivated(model, safetensors.numpy.load_file(folder / "model.safetensors"))

    return change


def subtract_means(model: Any) -> None:
    """ExLlamaV2 subtracts the mean in the norms of queries and keys of Qwen3."""
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.register_forward_pre_hook(lambda _, inputs: inputs[0] - inputs[0].mean(-1, keepdim=True))


def leave_unactivated(model: Any, stored: Mapping[str, np.ndarray]) -> None:
    """ExLlamaV2 activates pairs of blocks of 32 features, and of a last single block leaves the gate as it is."""
    for name, module in model.named_modules():
        width = getattr(module, "intermediate_size", 0)
        if not name.endswith(".mlp") or width % 64 == 0:
            continue
        # gate and up are computed in the order in which down_proj is stored
        order = np.argsort(stored[f"{name}.down_proj.q_invperm"].astype(np.int64))
        last = order[width // 64 * 64 :]
        module.gate_proj.register_forward_hook(lambda module, _, output: setattr(module, "found", output))

        def without(module: Any, inputs: Any, last: np.ndarray = last, gate: Any = module.gate_proj) -> Any:
            changed = inputs[0].clone()
            changed[..., last] = gate.found[..., last]
            return changed

        module.down_proj.register_forward_pre_hook(without)


def errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each token: RMS difference of its logits, by the standard deviation of all expected ones."""
    return np.asarray(np.sqrt(np.square(actual - expected).mean(-1)) / expected.std())


def quantised(folder: Path, case: Case) -> Path:
    """The model of a case in its format; beside it, in `plain`, with the weights that weightsmith reads. Made if missing."""
    out, plain = folder / "quantised", folder / "plain"
    if not (out / "config.json").exists():
        settings = {**case.options, "calibration": "none"} if case.options else {}
        weightsmith.quantize(make(folder / "made", case.model), out, case.format, progress=False, **settings)
    if not (plain / "config.json").exists():
        weightsmith.dequantize(out, plain, progress=False)
    return out


def run(program: str, text: Path, folders: list[Path]) -> None:
    """Run a program on models; again, in a new process, on those after one that has ended the process."""
    # float16 activations for single tokens too, in place of int8
    environment = {**os.environ, "EXL3_INT8_GEMV": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for folder in folders:
        for ending in ("npz", "error"):
            (folder / f"{program}.{ending}").unlink(missing_ok=True)
    while folders:
        command = [sys.executable, "-m", "tests.models.formats.readers.loaders", program, str(text), *map(str, folders)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        waiting = [folder for folder in folders if not (folder / f"{program}.npz").exists()]
        if len(waiting) == len(folders):
            (waiting.pop(0) / f"{program}.error").write_text(ended.stderr[-5000:])
        folders = waiting


@cache
def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def programs() -> set[str]:
    return {name for name in ("exllamav2", "exllamav3") if importlib.util.find_spec(name) and has_gpu()}


needs = {
    name: pytest.mark.skipif(name not in programs(), reason=f"needs an NVIDIA GPU: and {name}")
    for name in ("exllamav2", "exllamav3")
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The folder of a case, after its program has run."""
    kept = os.environ.get("WEIGHTSMITH_EXLLAMA_MODELS")
    root = Path(kept) if kept else tmp_path_factory.mktemp("loaders")
    root.mkdir(parents=True, exist_ok=True)
    (root / "text.txt").write_text(TEXT)
    available = sorted(programs())
    for case in CASES:
        if case.program in available:
            quantised(root / case.name, case)
    with ThreadPoolExecutor() as pool:
        cases = [[root / case.name / "quantised" for case in CASES if case.program == program] for program in available]
        list(pool.map(run, available, [root / "text.txt"] * len(available), cases))
    return lambda case: root / case.name


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs[case.program], id=case.name) for case in CASES])
def test_a_program_computes_what_transformers_does(case: Case, outputs: Callable[[Case], Path]) -> None:
    check(outputs(case), case)


def check(folder: Path, case: Case) -> None:
    """Compare what a program has computed."""
    error = folder / "quantised" / f"{case.program}.error"
    assert not error.exists(), error.read_text()
    computed = np.load(folder / "quantised" / f"{case.program}.npz")
    tokens = computed["tokens"]
    np.testing.assert_array_equal(tokens, TOKENIZER.encode(TEXT).ids)
    differs = case.program == "exllamav2" and case.model in ("mistral", "qwen3", "qwen3-moe")
    change = as_exllamav2(folder / "quantised") if differs else None
    expected = logits(folder / "plain", tokens, change=change)
    parts = {"whole": expected, "short": expected[:SHORT], "steps": expected[-STEPS:]}
    if case.program == "exllamav3":
        parts["wide"] = expected
    medians = {}
    for name, part in parts.items():
        assert computed[name].shape == part.shape, name
        token_errors, same = errors(computed[name], part), (computed[name].argmax(-1) == part.argmax(-1)).mean()
        medians[name] = float(np.median(token_errors))
        kl = divergence(computed[name], part)
        largest = np.abs(computed[name] - part).max() / expected.std()
        print(
            f"{case.program} {case.name} {name}: error {medians[name]:.5f} (worst token {token_errors.max():.5f}, worst logit "
            f"{largest:.5f}), same top token {same:.3f}, KL {kl:.2e}"
        )
    assert max(medians.values()) <= BOUND, medians
    if differs:
        plain = float(np.median(errors(computed["whole"], logits(folder / "plain", tokens))))
        print(f"{case.program} {case.name} against transformers unchanged: error {plain:.5f}")
        assert plain > BOUND
    generated = computed["generated"]
    assert len(generated) == GENERATED
    continued = np.concatenate([tokens[:SHORT], generated])
    # both programs choose among the tokens of the tokenizer, which are fewer than those of the head
    after = logits(folder / "plain", continued, change=change)[SHORT - 1 : -1, : TOKENIZER.get_vocab_size()]
    behind = after.max(-1) - np.take_along_axis(after, generated[:, None], -1)[:, 0]
    print(f"{case.program} {case.name} generated {TOKENIZER.decode(generated.tolist())!r}, behind {behind.max():.4f}")
    assert behind.max() <= 5 * BOUND * after.std(), behind


def divergence(actual: np.ndarray, expected: np.ndarray) -> float:
    """Mean KL divergence of the predictions, in nats."""
    import torch

    theirs, ours = (torch.from_numpy(a).double().log_softmax(-1) for a in (actual, expected))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


V_PROJ = "model.layers.1.self_attn.v_proj"


def swap(array: np.ndarray) -> None:
    """Exchange two of the first axis."""
    array[[3, 100]] = array[[100, 3]]


def double(array: np.ndarray) -> None:
    array[1] *= 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray]]:
    """A llama in a format, and its logits of `TEXT`: made once, to be read."""
    tokens = np.array(TOKENIZER.encode(TEXT).ids)

    @cache
    def model_and_logits(format_: str) -> tuple[Path, np.ndarray]:
        folder = tmp_path_factory.mktemp(format_)
        return quantised(folder, Case("", "llama", format_, OPTIONS[format_])), logits(folder / "plain", tokens)

    return model_and_logits


OPTIONS: dict[str, dict[str, Any]] = {"exl2": {"bits": 4.25}, "exl3": {"bits": 4}, "gptq-4bit": {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_", "part", "damage"),
    [
        ("exl2", "q_invperm", swap),
        ("exl2", "q_scale_max", double),
        ("exl3", "suh", swap),
        ("exl3", "svh", double),
        ("gptq-4bit", "scales", double),
    ],
)
def test_one_wrong_number_exceeds_the_bound(
    format_: str,
    part: str,
    damage: Callable[[np.ndarray], None],
    sound: Callable[[str], tuple[Path, np.ndarray]],
    tmp_path: Path,
) -> None:
    """The order of two inputs, or the scale of one output or one group of inputs, of one of fourteen matrices."""
    out, expected = sound(format_)
    file = shutil.copytree(out, tmp_path / "out") / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    damage(tensors[f"{V_PROJ}.{part}"])
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    weightsmith.dequantize(file.parent, tmp_path / "damaged", progress=False)
    tokens = np.array(TOKENIZER.encode(TEXT).ids)
    error = float(np.median(errors(logits(tmp_path / "damaged", tokens), expected)))
    print(f"{format_} {part}: error {error:.4f}")
    assert error > BOUND
