"""Router weights: each mode against its definition, and recipes that give none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import weightsmith
from tests.activations.test_decoder import save_model
from tests.plan_help import prepare_moe
from tests.zoo import SIZES
from weightsmith._base.errors import PlanError
from weightsmith._base.installation import install
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.products import find_kind
from weightsmith._engine.resources import Resources, Workload
from weightsmith._features.mixture.gates import MODES, PromptSample
from weightsmith._features.mixture.prompt_gates import average, discriminant, last, summed
from weightsmith._features.mixture.prompts import MAX_BYTES, ExpertTexts, Tokens, paragraphs
from weightsmith._features.mixture.router import RoutingReport
from weightsmith._planning.recipe import GATE_MODES

WORDS = [f"w{i}" for i in range(60)]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def some(*lengths: int, seed: int = 0, shift: Any = 0.0, width: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=generator) + torch.as_tensor(shift) for n in lengths]


# ---- modes


def test_every_mode_of_the_grammar_is_there() -> None:
    assert set(MODES) == set(GATE_MODES)
    assert all(callable(mode.function) for mode in MODES.values())


def test_hidden_is_the_mean_of_the_last_tokens_less_that_of_the_negative_prompts() -> None:
    positive, negative = some(3, 7, 1, seed=1), some(2, 5, seed=2)
    rows = last([PromptSample(positive, negative), PromptSample(positive, [])], 2).numpy()
    mean = np.mean([p[-1].double().numpy() for p in positive], 0)
    other = np.mean([p[-1].double().numpy() for p in negative], 0)
    np.testing.assert_allclose(rows, unit(np.stack([mean - other, mean])), rtol=1e-12)


def test_hidden_avg_counts_each_prompt_once_and_no_padding() -> None:
    positive = some(3, 7, 1, seed=1)
    rows = average([PromptSample(positive, [])], 1).numpy()
    expected = unit(np.mean([p.double().numpy().mean(0) for p in positive], 0))
    np.testing.assert_allclose(rows[0], expected, rtol=1e-12)


def test_cheap_embed_normalises_before_and_after_the_negative_prompts() -> None:
    positive, negative = some(3, 7, seed=1), some(2, 5, seed=2)
    rows = summed([PromptSample(positive, negative), PromptSample(positive, [])], 2).numpy()
    a, b = (unit(torch.cat(p).double().sum(0).numpy()) for p in (positive, negative))
    np.testing.assert_allclose(rows, np.stack([unit(a - b), a]), rtol=1e-12)


def overlapping(apart: float, seed: int = 0) -> list[PromptSample]:
    """Three experts, 8 prompts each, told apart in two of 16 directions; all of them share a long common vector."""
    common = torch.zeros(16)
    common[0] = 20.0
    samples = []
    for e in range(3):
        shift = common.clone()
        shift[1 + e] += apart
        tokens = some(*[25] * 8, seed=10 * seed + e, shift=shift, width=16)
        for prompt in tokens:
            prompt[:, 7:9] *= 30  # loud directions that say nothing
        samples.append(PromptSample(tokens, []))
    return samples


def right(rows: torch.Tensor, samples: list[PromptSample]) -> float:
    """Share of tokens whose expert has the largest logit."""
    hits = [(torch.cat(list(s.positive)).double() @ rows.T).argmax(1) == e for e, s in enumerate(samples)]
    return torch.cat(hits).double().mean().item()


def test_router_input_finds_the_quiet_directions_that_tell_experts_apart() -> None:
    samples, fresh = overlapping(2.5), overlapping(2.5, seed=1)
    rows = discriminant(samples, 3)
    means = torch.stack([torch.cat(list(s.positive)).double().mean(0) for s in samples])
    plain = right(means - means.mean(0), fresh)
    assert right(rows, fresh) > 0.85
    assert right(rows, fresh) > plain + 0.2  # the loud directions drown the difference of means
    torch.testing.assert_close(rows.sum(0), torch.zeros(16, dtype=torch.float64), rtol=0, atol=1e-9 * rows.abs().max().item())


def test_router_input_is_a_ridge_regression_on_whose_token_it_is() -> None:
    samples = overlapping(2.5)
    x = torch.cat([p for s in samples for p in s.positive]).double().numpy()
    targets = np.repeat(np.eye(3) - 1 / 3, len(x) // 3, axis=0)
    rows = discriminant(samples, 3).numpy()
    second = x.T @ x / len(x)
    solutions = []
    for shrinkage in (0.001, 0.01, 0.1, 0.5):
        ridge = (1 - shrinkage) * second + shrinkage * np.trace(second) / 16 * np.eye(16)
        solutions.append(np.linalg.solve(ridge, x.T @ targets / len(x)).T)
    assert any(np.allclose(unit(rows), unit(one), atol=1e-5) for one in solutions)
    ratio = [np.linalg.norm(rows) / np.linalg.norm(one) for one in solutions]
    assert min(ratio) > 0


def test_router_input_is_as_sure_as_it_is_right() -> None:
    """The mean probability of the right expert on fresh text is near the share of tokens that are right."""
    for apart in (1.0, 2.5, 5.0):
        rows, fresh = discriminant(overlapping(apart), 3), overlapping(apart, seed=1)
        logits = [torch.cat(list(s.positive)).double() @ rows.T for s in fresh]
        sure = torch.cat([part.softmax(1).max(1).values for part in logits]).mean().item()
        assert abs(sure - right(rows, fresh)) < 0.06, apart


def test_router_input_turns_away_from_negative_prompts() -> None:
    samples = overlapping(2.5)
    against = PromptSample(samples[0].positive, samples[1].positive)
    plain, turned = discriminant(samples, 3), discriminant([against, *samples[1:]], 3)
    token = torch.cat(list(samples[1].positive)).double().mean(0)
    assert unit(turned.numpy())[0] @ token.numpy() < unit(plain.numpy())[0] @ token.numpy()


def test_router_input_rows_sum_to_zero_also_with_negative_prompts() -> None:
    """What all experts' rows have in common adds the same to all logits, and routes nothing."""
    samples = overlapping(2.5)
    against = PromptSample(samples[0].positive, samples[1].positive)
    rows = discriminant([against, *samples[1:]], 3)
    assert float(rows.sum(0).abs().max()) < 1e-9 * float(rows.abs().max())


def test_a_shared_expert_does_not_change_the_routed_ones_and_without_prompts_it_is_zero() -> None:
    samples = overlapping(2.5)
    rows = discriminant([*samples, PromptSample([], [])], 3)
    torch.testing.assert_close(rows[:3], discriminant(samples, 3))
    assert not rows[3].any()


def test_one_short_prompt_for_each_expert_will_do() -> None:
    rows = discriminant([PromptSample(some(n, seed=n, shift=n), []) for n in (1, 2, 3)], 3)
    assert torch.isfinite(rows).all()


# ---- prompts


def tokenizer() -> Any:
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    word_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    word_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    word_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    kinds = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, **kinds)


def test_what_stands_before_every_text_is_known_and_not_counted() -> None:
    texts = ExpertTexts(positive=("w0 w1",), negative=("w2",), whole={"positive": "w3 w4 w5", "held_out": "w6"})
    tokens = Tokens(tokenizer(), plain=False)
    rows = tokens.rows(texts, 2)
    assert (rows.positive, tokens.start) == (((1, 4, 5), (1, 7, 8), (1, 9)), 1)
    assert (*rows.negative, *rows.held_out) == ((1, 6), (1, 10))


def test_as_in_mergekit_an_empty_prompt_is_the_first_token_alone() -> None:
    texts = ExpertTexts(positive=("", "w0"), negative=("",))
    rows = Tokens(tokenizer(), plain=True).rows(texts, None)
    assert (rows.positive, rows.negative) == (((1,), (1, 4)), ((1,),))
    rows = Tokens(tokenizer(), plain=False).rows(texts, None)
    assert (rows.positive, rows.negative) == (((1, 4),), ())


def test_a_tokenizer_without_a_prefix_of_its_own_gets_none() -> None:
    def other(text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*([] if add_special_tokens else [0]), *map(ord, text)]}

    other.bos_token_id, other.bos_token = 1, "<s>"  # type: ignore[attr-defined]
    tokens = Tokens(other, plain=False)
    assert (tokens.rows(ExpertTexts(positive=("b",)), None).positive, tokens.start) == (((0, 98),), 0)


def test_paragraphs_are_between_blank_lines() -> None:
    assert paragraphs("a\n b\n\n \nc\n\n\n") == ["a\n b", "c"]


# ---- recipes


def text_of(kind: int, n: int = 10, seed: int = 0) -> str:
    rng = random.Random(100 * kind + seed)
    return " ".join(rng.choice(WORDS[20 * kind : 20 * kind + 20]) for _ in range(n))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    for seed, name in enumerate("ab"):
        save_model(folder / name, transformers.LlamaConfig(**SIZES), seed=seed)
        tokenizer().save_pretrained(folder / name)
    return folder


def recipe_of(models: Path, experts: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    listed = [{"source_model": str(models / "ab"[i % 2]), **expert} for i, expert in enumerate(experts)]
    return {"base_model": str(models / "a"), "experts": listed, **options}


def told(*kinds: int) -> list[dict[str, Any]]:
    return [{"positive_prompts": [text_of(kind, seed=s) for s in range(4)]} for kind in kinds]


def made_router(recipe: dict[str, Any], **options: Any) -> tuple[dict[str, np.ndarray], RoutingReport | None]:
    """The router weights of a recipe, by name, and where they send the prompts."""
    with prepare_moe(recipe) as prepared:
        plan, folders = prepared.plan, [model.folder for model in prepared.inputs]
        (product,) = plan.products
        workload = Workload(steps=(), folders=folders)
        results = run(plan, prepared.inputs, DiscardedOutput(), Resources(**options), workload).results
        arrays = {out.name: results.array(out.name) for out in product.outs}
        return arrays, find_kind("router").report(product, list(arrays.values()))  # type: ignore[return-value]


@pytest.mark.long
def test_rows_reach_the_plan_and_a_scale_scales_them(models: Path) -> None:
    def rows(**options: Any) -> np.ndarray:
        arrays, report = made_router(recipe_of(models, told(0, 1), dtype="float32", **options))
        assert report is not None
        assert report.routing.of_own_expert(report.routing.first).mean() > 0.8
        return arrays["model.layers.0.block_sparse_moe.gate.weight"]

    np.testing.assert_allclose(rows(router_scale=3), 3 * rows(), rtol=1e-6)


@pytest.mark.long
def test_a_shared_expert_has_prompts_of_its_own_or_none(models: Path) -> None:
    def gate(**keys: Any) -> np.ndarray:
        shared = [{"source_model": str(models / "a"), **keys}]
        arrays, _ = made_router(recipe_of(models, told(0, 1), architecture="qwen2_moe", shared_experts=shared))
        return next(array for name, array in arrays.items() if name.startswith("model.layers.0.") and "shared" in name)

    assert gate(**told(2)[0]).any()
    assert not gate().any()


def problems_of(recipe: dict[str, Any], *, fill: bool = False) -> list[str]:
    with pytest.raises(PlanError) as caught:
        made_router(recipe) if fill else prepare_moe(recipe).close()
    return [str(problem) for problem in caught.value.problems]


def test_all_that_is_wrong_with_prompts_is_told_at_once(models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_bytes(b"a" * (MAX_BYTES + 1))
    same = {"positive_prompts": ["w1"]}
    files = [{"prompts_file": str(tmp_path / f"{name}.txt")} for name in ("empty", "latin", "long", "none")]
    messages = problems_of(recipe_of(models, [{}, *files, same, same]))
    for part in (
        "requires prompts",
        "is empty",
        "is not UTF-8: byte 0xe9 at offset 3",
        f"at most {MAX_BYTES:,} are read",
        "no such file",
        "5 and 6 have the same",
    ):
        assert sum(part in problem for problem in messages) == 1, (part, messages)
    assert len(messages) == 6


def test_a_mode_that_does_not_exist_has_a_near_one(models: Path) -> None:
    (message,) = problems_of(recipe_of(models, told(0, 1), gate_mode="hiden"))
    assert "did you mean 'hidden'" in message


def test_random_gates_need_no_prompts(models: Path) -> None:
    assert made_router(recipe_of(models, [{}, {}], gate_mode="random"))[1] is None


def test_a_base_without_a_tokenizer_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        save_model(tmp_path / name, transformers.LlamaConfig(**SIZES), seed=seed)
    (message,) = problems_of(recipe_of(tmp_path, told(0, 1)), fill=True)
    assert "the tokenizer of the base cannot be loaded" in message


def test_prompts_that_look_the_same_to_the_model_are_one_error(models: Path) -> None:
    experts = [{"positive_prompts": ["zzz"]}, {"positive_prompts": ["yyy"]}]  # both unknown words: the same token
    (message,) = problems_of(recipe_of(models, experts, gate_mode="hidden"), fill=True)
    assert "experts 0 and 1 have the same router weights in layers 0, 1" in message


def test_a_prompt_longer_than_the_model_takes_names_the_way_out(models: Path) -> None:
    experts = [*told(0), {"positive_prompts": [text_of(1, 80)]}]
    (message,) = problems_of(recipe_of(models, experts), fill=True)
    assert "has 81 tokens, but the base supports at most 64" in message
    assert "prompt_tokens: 512" in message


def test_a_base_that_transformers_cannot_build_is_one_error(models: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, transformers.LlamaConfig(**SIZES))
    tokenizer().save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "small"}))
    recipe = recipe_of(models, told(0, 1)) | {"base_model": str(base)}
    (message,) = problems_of(recipe, fill=True)
    assert "transformers cannot build a model of type 'llama'" in message


def test_a_device_that_is_not_there_is_one_error(models: Path) -> None:
    with pytest.raises(PlanError, match="the device 'warp'"):
        made_router(recipe_of(models, told(0, 1)), device="warp")


# ---- prompts that cannot tell experts apart

SAME_END = [{"positive_prompts": ["w0 w1 w5"]}, {"positive_prompts": ["w2 w3 w5"]}]


def test_prompts_that_end_in_the_same_token_are_advised_another_mode(models: Path) -> None:
    (message,) = problems_of(recipe_of(models, SAME_END, gate_mode="hidden"), fill=True)
    assert "experts 0 and 1 have the same router weights in layer 0: their prompts end in the same token" in message
    assert "Write gate_mode: router_input or hidden_avg" in message
    negative = [SAME_END[0] | {"negative_prompts": ["w7 w5"]}, SAME_END[1] | {"negative_prompts": ["w8 w5"]}]
    first, second = problems_of(recipe_of(models, negative, gate_mode="hidden"), fill=True)
    assert "the router weights of expert 0" in first
    assert "are zero in layer 0: their prompts end in the same token" in first
    assert "Write gate_mode: router_input or hidden_avg" in second


@pytest.mark.slow
def test_leniently_rows_of_zeros_are_written_with_a_warning(models: Path, tmp_path: Path) -> None:
    negative = [SAME_END[0] | {"negative_prompts": ["w7 w5"]}, SAME_END[1] | {"negative_prompts": ["w8 w5"]}]
    recipe = recipe_of(models, negative, gate_mode="hidden")
    for options in ({"routing_report": False}, {"routing_report": True}):
        mixture = weightsmith.moe(recipe, tmp_path / f"out{options['routing_report']}", lenient=True, fsync=False, **options)
        said = [finding.what for finding in mixture.warnings]
        assert sum("are zero in layer 0" in what for what in said) == 2, said
        with weightsmith.open_checkpoint(mixture.out) as out:
            router = next(name for name in out.specs if "layers.0." in name and name.endswith("gate.weight"))
            assert not out.read(router).astype("f4").any()


@pytest.mark.long
def test_an_empty_prompt_is_the_bos_token_as_in_mergekit(models: Path, tmp_path: Path) -> None:
    experts = [{"positive_prompts": [""]}, *told(1)]
    mixture = weightsmith.moe(recipe_of(models, experts, gate_mode="hidden"), tmp_path / "out", fsync=False)
    assert mixture.out.is_dir()
    (message,) = problems_of(recipe_of(models, experts), fill=True)  # router_input counts no bos token
    assert "contain no token" in message
    with pytest.raises(PlanError, match="have the same prompts"):
        weightsmith.plan(recipe_of(models, [{"positive_prompts": [""]}] * 2, gate_mode="hidden"))
    placeholders = [{"positive_prompts": [""]}, {"positive_prompts": [""]}]
    assert weightsmith.plan(recipe_of(models, placeholders, gate_mode="random")).warnings == ()
    (warning,) = weightsmith.plan(recipe_of(models, placeholders, gate_mode="hidden"), lenient=True).warnings
    assert "have the same prompts" in warning.what


def test_packages_that_are_missing_are_those_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._features.mixture.router import missing_packages

    monkeypatch.setattr("weightsmith._base.installation.find_spec", lambda name: None)
    [problem] = missing_packages()
    assert problem.finding.fix == f"Run {install('moe')}; or use gate_mode: random, which needs no hidden states."
