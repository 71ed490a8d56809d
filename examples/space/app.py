"""The studio as a Space of the Hugging Face Hub: models are named by their hub ids; nothing of the machine can be read."""

from __future__ import annotations

import tempfile

from weightsmith._app.studio.page import launch
from weightsmith._app.studio.places import Places

folder = tempfile.mkdtemp(prefix="weightsmith-")
launch(Places.of([folder], f"{folder}/results"), host="0.0.0.0", port=7860)
