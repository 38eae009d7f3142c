"""What a setting's values came to, and the section of docs/models.md about them."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import families

BAD = ("late", "different", "error")
LISTED = 20  # model types that a row names
TITLE = "Settings"


@dataclass
class Outcome:
    """``kind``: equal, refused, late, different, error; "unchanged" settings change nothing, "fails" alone too.

    "alike": not run, because a type that was judged (``text``) has the same code for it.
    """

    model_type: str
    name: str  # of the setting that was moved
    own: dict[str, Any]  # it, and others that go with it
    kind: str
    text: str = ""

    def __str__(self) -> str:
        own = ", ".join(f"{name}={value}" for name, value in self.own.items()) or self.name
        return f"{self.kind:10} {self.model_type:24} {own:60} {self.text}"


def page(outcomes: list[Outcome], date: str) -> str:
    """The section of docs/models.md about settings."""
    ran = [outcome for outcome in outcomes if outcome.kind in ("equal", "refused", *BAD)]
    counts = Counter(outcome.kind for outcome in ran)
    types = {outcome.model_type for outcome in ran}
    settings = len({(outcome.model_type, outcome.name) for outcome in ran})
    alike = sum(outcome.kind == "alike" for outcome in outcomes)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    lines = [
        f"{date}, {versions}: {len(ran)} values of {settings} settings, of {len(types)} of the "
        f"{len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} model types. **Equal**: {counts['equal']}. **Refused** by "
        f"`hf.parallelize`: {counts['refused']}. {alike} more settings are read by the same code as in a type that was "
        "run. Refused although the type is equal above:",
        "",
        "| setting | model types | reason |",
        "|---|---|---|",
    ]
    base = {outcome.model_type for outcome in ran if outcome.kind == "equal"}
    kept = [outcome for outcome in ran if outcome.model_type in base]
    lines += [f"| {what} | {names} | {why} |" for what, names, why in _rows(kept, ("refused",))]
    lines += ["", "**Exceptions**:", ""]
    lines += [f"- {what} ({names}): {why}" for what, names, why in _rows(ran, BAD)] or ["None."]
    return "\n".join(lines)


def _rows(outcomes: list[Outcome], kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(settings, model types, reason), one row for each reason."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for outcome in outcomes:
        if outcome.kind in kinds:
            why = families.OWNER.sub("", families.SUFFIX.sub("", outcome.text)).replace("|", "or")
            shown, types = found.setdefault(why, (set(), set()))
            shown.add(f"{outcome.name}={_short(outcome)}")
            types.add(outcome.model_type)
    rows = [
        (", ".join(f"`{each}`" for each in sorted(shown)), sorted(types), why) for why, (shown, types) in found.items()
    ]
    return [
        (shown, ", ".join(types) if len(types) <= LISTED else f"{len(types)} types", why) for shown, types, why in rows
    ]


def _short(outcome: Outcome) -> str:
    """The value of a setting in a few words."""
    value = outcome.own.get(outcome.name)
    if isinstance(value, dict):
        kinds = re.findall(r"'rope_type': '(\w+)'", str(value))
        return next((each for each in kinds if each != "default"), "..." if kinds else str(value))
    if isinstance(value, list):
        return "/".join(dict.fromkeys(map(str, value)))
    return str(value)
