"""Plans that follow from the products of another one: a measurement first, and then what it decides.

Of a plan with `Plan.then`, only the products are computed. The kind that its `FollowUp` names makes a second plan from their
arrays, and that one is run. To add a kind, write a `FollowUpKind` beside the feature that makes the first plan, and add its
name to `OWN`; or a package with an entry point of the group `weightsmith.follow_ups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.plugins import Plugins
from weightsmith._planning.planner.loading import Began
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Step
from weightsmith.abc.product import Arrays, ProductReport


@dataclass(frozen=True, slots=True)
class SecondPlan:
    """A plan that follows from products.

    arrays   of products that it has too, by name: these are not computed again
    files    to add to the output
    reports  besides those of its products
    """

    prepared: Prepared
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    reports: Mapping[str, ProductReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FollowUpKind:
    """A kind of plan in two runs. Its settings, in `FollowUp.settings`, may come from an untrusted plan.

    follow     (the first plan, the arrays of its products by name, the answer to `question`, the size of the weight files
               that is tried while a target is searched, or None) → the second plan. Raises PlanError; FormatError for
               settings that no plan of ours has
    question   what is asked of another process while the products are computed, see `loading.Beside`; None: nothing
    expected   about the steps of the second plan, before anything is measured; () if nothing is known of them
    target     the largest divergence that the result may have, by which its size is searched; None: the settings say the size
    reference  the plan of the model that a divergence is measured from; only with a target
    divisible  several processes can share the work of the second plan
    """

    follow: Callable[[Prepared, Mapping[str, Arrays], Any, int | None], SecondPlan]
    question: Callable[[Prepared], Callable[[Began], Any] | None] = lambda prepared: None
    expected: Callable[[Prepared], Sequence[Step]] = lambda prepared: ()
    target: Callable[[Prepared], float | None] = lambda prepared: None
    reference: Callable[[Prepared], Prepared] = lambda prepared: prepared
    divisible: bool = False


OWN = {
    "quantised": "weightsmith._features.quantisation.formats:FOLLOW_UP",
    "lora": "weightsmith._features.adapters.extract:FOLLOW_UP",
}
"""`FollowUp.kind` → its kind, imported when a plan first uses it."""

KINDS = Plugins("kind of plan in two runs", "weightsmith.follow_ups", FollowUpKind, OWN)


def follow_up_kind(prepared: Prepared) -> FollowUpKind:
    """The kind of plan that follows from this one. Raises UnknownName."""
    assert prepared.plan.then is not None
    return KINDS.get(prepared.plan.then.kind, "then")
