"""The Plan: everything a run will do, as a value. `values.py` defines it, `reading.py` reads it from JSON, `parts.py` divides
it among processes.

Commands build a plan from headers only; the engine runs it; the store takes the position of every byte from it.
(A module named `plan` would hide the function `weightsmith.plan`.)
"""

from weightsmith.plans.draft import PlanDraft as PlanDraft
from weightsmith.plans.forms import plan_from_json as plan_from_json
from weightsmith.plans.values import CAST as CAST
from weightsmith.plans.values import COPY as COPY
from weightsmith.plans.values import FILL as FILL
from weightsmith.plans.values import JOIN as JOIN
from weightsmith.plans.values import PERTURB as PERTURB
from weightsmith.plans.values import PLAIN as PLAIN
from weightsmith.plans.values import PRODUCTS as PRODUCTS
from weightsmith.plans.values import Block as Block
from weightsmith.plans.values import Dropped as Dropped
from weightsmith.plans.values import FileRead as FileRead
from weightsmith.plans.values import Gather as Gather
from weightsmith.plans.values import Made as Made
from weightsmith.plans.values import ModelInput as ModelInput
from weightsmith.plans.values import OwnCode as OwnCode
from weightsmith.plans.values import Parameters as Parameters
from weightsmith.plans.values import Plan as Plan
from weightsmith.plans.values import Product as Product
from weightsmith.plans.values import Read as Read
from weightsmith.plans.values import Role as Role
from weightsmith.plans.values import Settings as Settings
from weightsmith.plans.values import Step as Step
from weightsmith.plans.values import Table as Table
from weightsmith.plans.values import Value as Value
from weightsmith.plans.values import arrays_of as arrays_of
from weightsmith.plans.values import needs_of as needs_of
