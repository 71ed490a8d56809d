"""From a recipe and the headers of its models to a Plan, with every problem found before a byte of tensor data is read.

    placement.py   which models feed which part of the output: `models`, `slices` and `modules` in one form
    match.py       which tensor of each model feeds which output tensor, whatever the prefixes; tied heads
    parameters.py  what each parameter is for each tensor and model, and where the recipe says so
    config.py      config.json of the output
    build.py       puts these together
    steps.py       the Plan itself
"""

from weightsmith.planner.build import Prepared as Prepared
from weightsmith.planner.build import prepare as prepare
from weightsmith.planner.steps import Plan as Plan
