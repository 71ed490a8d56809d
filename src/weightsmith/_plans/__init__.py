"""The Plan: everything a run will do, as a value. Imports `_base` and `_files`.

`values.py` defines it; `draft.py` is a plan in the making or from JSON, and has the checks that every plan passes; `codec.py`
writes and reads records as JSON, which is untrusted. `parts.py` divides a plan among processes, and hashes its parts;
`summary.py` has the records of its totals. (A module named `plan` would hide the function `weightsmith.plan`.)
"""

from weightsmith._plans.draft import PlanDraft as PlanDraft
from weightsmith._plans.draft import ProductSettings as ProductSettings
from weightsmith._plans.draft import StatisticRequest as StatisticRequest
from weightsmith._plans.draft import TextSource as TextSource
from weightsmith._plans.draft import plan_from_json as plan_from_json
from weightsmith._plans.values import CAST as CAST
from weightsmith._plans.values import COPY as COPY
from weightsmith._plans.values import FILL as FILL
from weightsmith._plans.values import JOIN as JOIN
from weightsmith._plans.values import PERTURB as PERTURB
from weightsmith._plans.values import PLAIN as PLAIN
from weightsmith._plans.values import PRODUCTS as PRODUCTS
from weightsmith._plans.values import Block as Block
from weightsmith._plans.values import Dropped as Dropped
from weightsmith._plans.values import FileRead as FileRead
from weightsmith._plans.values import FollowUp as FollowUp
from weightsmith._plans.values import Gather as Gather
from weightsmith._plans.values import ModelInput as ModelInput
from weightsmith._plans.values import OwnCode as OwnCode
from weightsmith._plans.values import Parameters as Parameters
from weightsmith._plans.values import Plan as Plan
from weightsmith._plans.values import Product as Product
from weightsmith._plans.values import Provenance as Provenance
from weightsmith._plans.values import Read as Read
from weightsmith._plans.values import Role as Role
from weightsmith._plans.values import Settings as Settings
from weightsmith._plans.values import StatisticRead as StatisticRead
from weightsmith._plans.values import Step as Step
from weightsmith._plans.values import Table as Table
from weightsmith._plans.values import TakenForCopy as TakenForCopy
from weightsmith._plans.values import Value as Value
from weightsmith._plans.values import arrays_of as arrays_of
from weightsmith._plans.values import needs_of as needs_of
