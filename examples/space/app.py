"""The studio as a Space of the Hugging Face Hub: models are named by their hub ids; nothing of the machine can be read."""

from __future__ import annotations

import tempfile

from weightsmith._app.studio.places import Places
from weightsmith._app.studio.server import launch

folder = tempfile.mkdtemp(prefix="weightsmith-")
# A Space is shown in a frame of the Hub, where cookies are not sent: who may open it is set in the Space's settings.
launch(Places.of([folder], f"{folder}/results"), host="0.0.0.0", port=7860, token="")
