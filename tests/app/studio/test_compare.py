"""Models side by side, as transformers runs what weightsmith reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import weightsmith
from tests.app.studio.models import make, recipe
from weightsmith import Unsupported
from weightsmith._app.studio.places import Places
from weightsmith._app.studio.tasks import Asked, available, compare, tried
from weightsmith._reports import judge

TEXT = "The three most important things about this program are what it reads, what it writes and how fast it is. " * 3

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available(), reason="needs torch and transformers")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare").resolve()


@pytest.fixture(scope="module")
def places(root: Path) -> Places:
    return make(root)


def by_transformers(folder: Path) -> tuple[float, str]:
    """The perplexity of a folder's model on TEXT, and its continuation of "The" by 8 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT, add_special_tokens=False)["input_ids"][:384]])
    start = tokenizer("The", return_tensors="pt")
    with torch.inference_mode():
        perplexity = math.exp(model(input_ids=ids, labels=ids).loss.item())
        written = model.generate(**start, max_new_tokens=8, do_sample=False)[0, start["input_ids"].shape[1] :]
    return perplexity, tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.reader
def test_numbers_are_those_of_transformers_on_the_folder(root: Path, places: Places) -> None:
    folder = root / "models" / "fr"
    (sample,) = compare([str(folder)], places, Asked("The", TEXT, 8))
    perplexity, continuation = by_transformers(folder)
    assert sample.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert sample.continuation == continuation


@pytest.mark.matrix
def test_an_adapter_is_compared_as_it_is_merged(root: Path, places: Places) -> None:
    base, adapter = root / "models" / "base", root / "models" / "adapters" / "py"
    plain, tuned = compare([str(base), f"{base}+{adapter}"], places, Asked("The", TEXT, 8))
    assert (plain.problem, tuned.problem) == ("", "")
    assert plain.perplexity != tuned.perplexity
    assert plain.perplexity == pytest.approx(tuned.perplexity, rel=0.5)


@pytest.mark.long
def test_what_cannot_be_run_is_said_and_the_others_are_run(root: Path, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    with_code = root / "models" / "own"
    with_code.mkdir()
    for file in (root / "models" / "base").iterdir():
        (with_code / file.name).write_bytes(file.read_bytes())
    config = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Config"}}))
    (with_code / "evil.py").write_text("raise SystemExit('run')")
    names = [str(with_code), str(root / "secret"), str(root / "models" / "adapters" / "py"), str(root / "models" / "de")]
    samples = list(compare(names, places, Asked("The", "", 8)))
    assert "brings code of its own" in samples[0].problem
    assert "outside the folders" in samples[1].problem
    assert samples[2].problem
    assert (samples[3].problem, samples[3].perplexity) == ("", None)
    monkeypatch.setattr(judge, "BYTES_PER_WEIGHT", 1 << 40)
    (large,) = compare([str(root / "models" / "de")], places, Asked("The", "", 8))
    assert "this machine has" in large.problem
    with pytest.raises(Unsupported, match="too much"):
        list(compare(names, places, Asked("x" * 200_000)))


@pytest.mark.long
def test_a_merge_in_memory_is_the_merge_that_is_written(root: Path, places: Places) -> None:
    """Numbers of `tried` against transformers on the folder that a merge writes."""
    text, out = recipe(root), root / "out" / "written"
    sample = tried(text, places, Asked("The", TEXT, 8))
    assert sample.problem == ""
    weightsmith.merge(text, out, progress=False)
    perplexity, continuation = by_transformers(out)
    assert sample.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert sample.continuation == continuation
    (base,) = compare([str(root / "models" / "base")], places, Asked("", TEXT))
    assert sample.perplexity != base.perplexity
    assert "outside the folders" in tried(text.replace("models/fr", "secret"), places, Asked("The")).problem
