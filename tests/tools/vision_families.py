"""Every image-text-to-text model of the installed transformers, tiny and random, over three ranks: equal or refused?

    python tests/tools/vision_families.py [MODEL_TYPE ...]    writes docs/models.md without a model type

A model that comes out "different" (plausible wrong numbers) or "error" (no refusal by name) is a bug of ours.
"""

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import vision
from burst_attention.testing import WorkerError, local_world
from tests.support import vision_models
from tests.support.conditioning import greatest, name_of_worst
from tests.support.equal import stock_loss
from tests.tools.families import BOUND, GRADIENT_BOUND, WORLD, apart_of, first_line, reasons, refusal, refusal_of, run

_GENERATE = (
    "**Generate over ranks**: text alone, where the model only embeds it "
    "([which](how-to/generate.md#text-with-vision-language-models)). Images in the prompt have no cache over ranks."
)
LARGEST = 30_000_000  # parameters of a model that is run


@dataclass
class Verdict:
    """``text``: the refusal's or the error's message. The differences are relative to one process's eager attention."""

    model_type: str
    kind: str  # equal, refused, different, error, not built
    text: str = ""
    loss: float = 0.0
    gradients: float = 0.0
    tower: int = 0  # parameters outside of the language model that get a gradient
    tokens: int = 0  # image tokens of the batch
    packed: str = ""  # of documents in a row: as ``kind``

    def __str__(self) -> str:
        figures = f"{self.loss:.0e} {self.gradients:.0e} {self.tower:3} {self.tokens:3} {self.packed}"
        return f"{self.kind:10} {self.model_type:22} {figures} {self.text}"


def judge(model_type: str) -> Verdict:
    """Compare the model over ``WORLD`` ranks with one process, on two rows with three images."""
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in vision_models.build(model_type).parameters())
        if size > LARGEST:
            return Verdict(model_type, "not built", f"{size:,} parameters, even if made small")
        alone = vision_models.build(model_type)
    except Exception as error:
        return Verdict(model_type, "not built", first_line(error))
    try:
        batch = vision_models.images_and_text(alone)
        expected = stock_loss(alone, batch)
        expected.backward()
    except Exception as error:
        return _on_text(model_type, alone, first_line(error))
    tokens = int((batch["input_ids"] == vision_models.image_token(alone.config)).sum())
    verdict = _compared(model_type, alone, batch, expected.item(), tokens)
    return _on_documents(verdict, alone) if verdict.kind == "equal" else verdict


def _on_documents(verdict: Verdict, alone: Any) -> Verdict:
    """Compare on rows of two documents, too."""
    batch = vision_models.packed(alone)
    try:
        alone.zero_grad()
        expected = stock_loss(alone, batch)
        expected.backward()
    except Exception:
        verdict.packed = "not built"
        return verdict
    found = _compared(verdict.model_type, alone, batch, expected.item(), verdict.tokens)
    verdict.packed = found.kind
    if found.kind in ("different", "error"):
        verdict.kind, verdict.text = found.kind, f"packed documents: {found.text}"
    return verdict


def _on_text(model_type: str, alone: Any, otherwise: str) -> Verdict:
    """Whether a model that can't be run on images here is refused, with images or as it is."""
    alone.zero_grad()
    batch = vision_models.text(alone)
    if vision.language_model_of(alone) is None:
        batch["pixel_values"] = torch.zeros(2, 3, 16, 16, dtype=alone.dtype)
        verdict = _compared(model_type, alone, batch, 0.0, 0)
        if verdict.kind == "refused":
            return verdict
        del batch["pixel_values"]
    try:
        expected = stock_loss(alone, batch)
        expected.backward()
    except Exception:
        refused = refusal_of(alone)
        otherwise = refused or f"no images are made here: {otherwise}"
        return Verdict(model_type, "refused" if refused else "not built", otherwise)
    verdict = _compared(model_type, alone, batch, expected.item(), 0)
    if verdict.kind == "equal":
        verdict.kind, verdict.text = "not built", f"equal on text; no images are made here: {otherwise}"
    return verdict


def _compared(model_type: str, alone: Any, batch: dict[str, Any], expected: float, tokens: int) -> Verdict:
    models = [copy.deepcopy(alone) for _ in range(WORLD)]

    def rank(group: Any) -> float:
        model = models[torch.distributed.get_rank() if group is None else group.rank()]
        hf.parallelize(model, group, gradients="sum", timeout=60)
        out = model(**batch)
        out.loss.backward()
        return out.loss.item()

    for model in models:
        model.zero_grad()
    try:
        with local_world(WORLD, timeout=60) as ranks:
            loss = ranks.run(rank)[0]
    except WorkerError as error:
        if refused := refusal(error):
            return Verdict(model_type, "refused", refused)
        return Verdict(model_type, "error", first_line(next(each for each in error.errors.values() if each)))
    inner = vision.language_model_of(alone)
    text = {id(each) for each in (alone if inner is None else inner).parameters()}
    wanted = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    floor, apart = 1e-5 * greatest(each.norm().item() for each in wanted.values()), apart_of(wanted, models)
    worst = name_of_worst(apart)
    off = abs(loss / expected - 1)
    right = off <= BOUND and apart[worst] <= GRADIENT_BOUND
    moved = [n for n, p in alone.named_parameters() if id(p) not in text and n in wanted and wanted[n].norm() > floor]
    text_of = "" if right else f"loss by {off:.0e}, {worst} by {apart[worst]:.0e}"
    return Verdict(model_type, "equal" if right else "different", text_of, off, apart[worst], len(moved), tokens)


def page(verdicts: list[Verdict]) -> str:
    """The section of docs/models.md about vision-language models."""
    equal = [verdict for verdict in verdicts if verdict.kind == "equal"]
    tower = [verdict.tower for verdict in equal]
    packed = sorted(verdict.model_type for verdict in equal if verdict.packed == "equal")
    apart = f"{max(each.loss for each in equal):.0e}, gradients by {max(each.gradients for each in equal):.0e}"
    lines = [
        f"All {len(verdicts)} types of transformers {transformers.__version__}: {WORLD} ranks.",
        "",
        f"**Equal** ({len(equal)}): losses differ by at most {apart} (relative L2).",
        f"{min(tower)} to {max(tower)} parameters outside of the language model get a gradient.",
        "",
        f"{', '.join(sorted(verdict.model_type for verdict in equal))}.",
        "",
        f"**Packed documents**, by `position_ids` that restart ({len(packed)}), equal, too; all others refuse them:",
        f"{', '.join(packed)}.",
        "",
        _GENERATE,
        "",
        *reasons(verdicts),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(__doc__, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, judge, "Vision-language models", page))
