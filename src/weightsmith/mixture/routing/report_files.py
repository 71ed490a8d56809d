"""The routing report in the output: routing.json, a picture, and a section of the model card."""

from __future__ import annotations

import json

from weightsmith.mixture.routing.heat_map import heat_map
from weightsmith.mixture.routing.report import Report

JSON_NAME = "routing.json"
PICTURE_NAME = "routing.svg"


def report_files(report: Report | None) -> dict[str, bytes]:
    """Files of the output by name; none without a report."""
    if report is None:
        return {}
    data = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
    return {JSON_NAME: data.encode(), PICTURE_NAME: heat_map(report).encode()}


def report_section(report: Report | None) -> str:
    """What the model card says of it; "" without a report."""
    if report is None:
        return ""
    return f"""
## Routing

Where the router sends the tokens of the experts' texts: the share that goes to each expert first, mean over layers. Measured on
the hidden states of the base; in this model they differ after the first layer. By layer: [{JSON_NAME}]({JSON_NAME}).

{report.markdown()}

![Share of tokens for which an expert comes first, by layer]({PICTURE_NAME})
"""
