"""Which model gives config, tokenizer and the other files, and which files these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import decoder, plan, warnings

FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": "{}",
    "preprocessor_config.json": "{}",
    "modeling_own.py": "raise SystemExit",
    "merges.txt": "",
    "LICENSE": "",
}


def linear(*models: str, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m} for m in models], "parameters": {"weight": 1}, **options}


def test_the_base_is_the_donor_and_else_the_first_model(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / n, seed=i) for i, n in enumerate("ab"))
    assert plan(linear(a, b)).models[0].ref == a
    p = plan(linear(a, b, base_model=b))
    assert (p.donor, p.models[0].ref) == (0, b)


CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


def test_what_a_loader_reads_is_carried(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", settings=CODE)
    for name, text in {**FILES, "README.md": "", "pytorch_model.bin": "", "optimizer.pt": "", ".gitattributes": ""}.items():
        (tmp_path / "a" / name).write_text(text)
    p = plan(linear(a))
    assert p.carried == tuple(sorted(FILES))
    assert not warnings(p)


SECRETS = ["credentials.json", "id_rsa", "model.py", "notes.bak", "tokenizer.json.incomplete", "x.exe"]


def test_what_no_loader_reads_is_left_out_and_the_plan_says_so(tmp_path: Path) -> None:
    a, b = plan_help.model(tmp_path / "a"), plan_help.model(tmp_path / "b", seed=1)
    for name in (*SECRETS, "tokenizer.json"):
        (tmp_path / "a" / name).write_text("secret")
    (tmp_path / "b" / "notes.txt").write_text("the other models are no donors")
    p = plan(linear(a, b))
    assert p.carried == ("tokenizer.json",)
    listed = ", ".join(map(repr, SECRETS))
    assert warnings(p) == [
        f"{a}: 6 files are not copied into the output, because no loader reads them: {listed}\n"
        "  -> Copy what is needed into the output yourself."
    ]
    (tmp_path / "a" / "zzz").write_text("")
    assert "7 files are not copied" in (message := warnings(plan(linear(a, b)))[0])
    assert message.count("and 1 more") == 1


def test_the_output_holds_none_of_what_is_left_out(tmp_path: Path) -> None:
    import weightsmith

    a = plan_help.model(tmp_path / "a")
    for name in SECRETS:
        (tmp_path / "a" / name).write_text("secret")
    done = weightsmith.merge(linear(a), tmp_path / "out", fsync=False)
    assert not {p.name for p in done.out.iterdir()} & set(SECRETS)
    assert "id_rsa" in str(done.warnings[0])


def test_what_is_left_out_of_the_donor_of_a_mixture_is_said(tmp_path: Path) -> None:
    import weightsmith
    from tests import moe_zoo
    from tests.features.mixture.test_moe import config, llama, recipe
    from tests.mini import write_checkpoint

    models = {name: write_checkpoint(tmp_path / name, llama(seed), config()) for seed, name in enumerate(("base", "a"))}
    pruned = moe_zoo.store(tmp_path / "moe", "own", moe_zoo.experts())
    for folder in (models["base"], pruned):
        (folder / "id_rsa").write_text("secret")
    for source in (recipe(models, ["a", "a"]), {"model": str(pruned), "prune_experts": {"keep": [0, 1]}}):
        assert any("'id_rsa'" in text for text in warnings(weightsmith.plan(source)))


def test_an_adapter_leaves_out_what_its_base_does(tmp_path: Path) -> None:
    from tests.models.lora.test_lora import adapter, base

    a, lora = base(tmp_path / "a"), adapter(tmp_path / "lora")
    (a / "id_rsa").write_text("secret")
    p = plan(linear(f"{a}+{lora}"))
    assert "id_rsa" not in p.carried
    assert any("'id_rsa'" in text for text in warnings(p))


def test_files_arrive_and_code_is_not_run(tmp_path: Path) -> None:
    import weightsmith

    a = plan_help.model(tmp_path / "a", settings=CODE)
    for name, text in FILES.items():
        (tmp_path / "a" / name).write_text(text)
    weightsmith.merge(linear(a), tmp_path / "out", fsync=False)
    assert {name: (tmp_path / "out" / name).read_text() for name in FILES} == FILES


def test_an_empty_quantisation_entry_does_not_stay(tmp_path: Path) -> None:
    p = plan(linear(plan_help.model(tmp_path / "a", settings={"quantization_config": {}})))
    assert p.config is not None
    assert "quantization_config" not in p.config


def test_a_single_file_has_no_config_and_the_plan_says_so(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a") + "/model.safetensors"
    p = plan(linear(a))
    assert (p.config, p.carried) == (None, ())
    assert warnings(p) == [f"the output has no config.json: {a} has none\n  -> Name its folder, not the file."]


def test_a_model_without_a_config_still_merges_by_its_names(tmp_path: Path) -> None:
    folders = [str(write_checkpoint(tmp_path / n, decoder(3, seed=i))) for i, n in enumerate("ab")]
    p = plan(linear(*folders))
    assert len(p.steps) == len(decoder(3))
    assert "has none" in warnings(p)[0]


def test_relative_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    plan_help.model(tmp_path / "a")
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "r.yml"
    recipe.write_text("merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1}\n")
    monkeypatch.chdir(tmp_path)
    assert plan(str(recipe)).models[0].ref == "a"
