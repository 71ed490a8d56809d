"""How well models predict texts: `weightsmith eval`.

Each model is a plan of products without output, whose last one is the losses (`_activations/losses.py`). It runs layer by layer
in a staging folder, so that an interrupted evaluation resumes. The reference comes first; its states are kept for the others.

    measure.py  `evaluate`: models are opened, texts are cut into rows, plans are run; how far each layer's output is from the
                reference's; the result of a merge before it is published, for --evaluate
    opening.py  a model or a recipe, with what cuts its texts into tokens; where unfinished work is kept;
                models that a command measures
    values.py   scores, with standard errors: `Evaluation`, and its page
"""
