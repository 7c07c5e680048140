"""Which arms of a comparison differ in more than how they were trained."""

from __future__ import annotations

from collections.abc import Sequence

from ssl_vit.records import ArmRecord
from ssl_vit.report.runs import flat


def architecture_differences(arms: Sequence[ArmRecord]) -> list[str]:
    """What arms differ in from the first of them with an encoder of its own: a phrase per arm that does, such as
    `supervised: encoder.depth 12 (masked patch prediction: 4)`; empty where all are alike."""
    first = next(arm for arm in arms if arm.kind != "scratch")
    found = []
    for arm in (arm for arm in arms if arm.architecture != first.architecture):
        words = f"another encoder than {first.label}"
        if arm.encoder and first.encoder:
            own, other = flat(arm.encoder), flat(first.encoder)
            words = ", ".join(
                f"{key} {own[key]} ({first.label}: {other[key]})" for key in own if own[key] != other[key]
            )
        found.append(f"{arm.label}: {words}")
    return found
