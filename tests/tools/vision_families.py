"""Every image-text-to-text model of the installed transformers, tiny and random, over three ranks: equal or refused?

    python tests/tools/vision_families.py [MODEL_TYPE ...]    writes docs/models.md without a model type

Text alone also generates over 1 to 3 ranks: a prompt, whole and in pieces, later turns, a saved cache, and a seed.

A model that comes out "different" (plausible wrong numbers) or "error" (no refusal by name) is a bug of ours.
"""

import copy
import faulthandler
import functools
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed as dist
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import vision
from burst_attention.testing import WorkerError, local_world
from tests.support import vision_models
from tests.support.conditioning import certain, greatest, margin_of_choices, name_of_worst
from tests.support.equal import stock_loss
from tests.support.generating import generate, vision_model
from tests.tools.families import (
    BOUND,
    GRADIENT_BOUND,
    WORLD,
    apart_of,
    first_line,
    is_ours,
    mixers_of,
    reasons,
    refusal,
    refusal_of,
    run,
)
from tests.tools.shared_families import SAMPLED, Pools

LARGEST = 30_000_000  # parameters of a model that is run
PROMPT, TURNS, NEW = 150, (20, 80), {"max_new_tokens": 6}  # tokens of text alone; the last turn continues a saved cache
DRAWS = 40  # of prompts
ORDINARY = 80  # tokens that stand for text alone
LOGITS = 2e-6  # how far they may be from one process's
_NOT_RUN = "not run: "
_OF_TEXT = re.compile(r"\w+ is a vision-language model that .*: (with text alone it .*?)(?: \(|;|\. )")
PATIENCE = 120  # seconds that the ranks have


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
    generates: str = ""  # from text alone: equal, different, an error, or how it is refused

    def __str__(self) -> str:
        figures = f"{self.loss:.0e} {self.gradients:.0e} {self.tower:3} {self.tokens:3} {self.packed}"
        generates = f"; generates: {self.generates}" if self.generates else ""
        return f"{self.kind:10} {self.model_type:22} {figures} {self.text}{generates}"


def judge(model_type: str, pools: Pools) -> Verdict:
    """Compare the model over ranks with one process: its training on images, and what it generates from text alone."""
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in vision_models.build(model_type).parameters())
        if size > LARGEST:
            return Verdict(model_type, "not built", f"{size:,} parameters, even if made small")
        alone = vision_models.build(model_type)
    except Exception as error:
        return Verdict(model_type, "not built", first_line(error))
    verdict = _trained(model_type, alone)
    if verdict.kind in ("equal", "not built"):  # what can't be made may be images alone
        verdict.generates = _generates(model_type, pools)
    if verdict.generates.startswith(("different", "error")):
        verdict.kind, verdict.text = verdict.generates.partition(" ")[0], f"generate: {verdict.generates}"
    return verdict


def _trained(model_type: str, alone: Any) -> Verdict:
    """Compare the model over ``WORLD`` ranks with one process, on two rows with three images."""
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


def _generates(model_type: str, pools: Pools) -> str:
    """Whether text alone generates one process's tokens and logits over ranks, or how it is refused."""
    try:
        alone = vision_model(model_type, "eager")
        dtype = torch.float64 if mixers_of(alone) else torch.float32  # the former are made exact
        draws = (_text(PROMPT, seed) for seed in range(DRAWS))
        prompt = certain(draws, lambda ids: margin_of_choices(alone, lambda model: _one_process(model, ids), dtype))
        expected = _one_process(alone, prompt)
    except Exception as error:
        return _NOT_RUN + first_line(error)
    texts = [out.sequences for out in expected]
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 1, 3):
            arguments = (model_type, prompt, texts, str(Path(folder) / "cache"))
            try:
                done = pools.run(world, _over_ranks, *arguments, timeout=PATIENCE)
            except WorkerError as error:
                return f"error over {world} ranks: {str(error)[-600:]}"
            if all(isinstance(each, str) for each in done):
                return done[0]
            for found in done:
                for n, (out, logits) in found:
                    apart = (logits - torch.stack(expected[n].logits)).abs().max().item()
                    if not torch.equal(out, texts[n]) or not apart <= LOGITS:
                        return f"different over {world} ranks: text {n}, logits by {apart:.0e}"
    return "equal"


def _text(count: int, seed: int) -> torch.Tensor:
    """Ids [1, count] of tokens that stand for text."""
    return torch.randint(3, ORDINARY, (1, count), generator=torch.Generator().manual_seed(seed))


def _one_process(model: Any, prompt: torch.Tensor) -> list[Any]:
    """The prompt's text, those of the later turns, and that of a seed. No turn reuses keys."""
    outs = [_of(model, prompt)]
    for count in TURNS:
        outs.append(_of(model, torch.cat([outs[-1].sequences, _text(count, count)], 1)))
    return [*outs, _sampled(model, prompt)]


def _of(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    # A model may have said the token of padding.
    return generate(model, cache, ids, attention_mask=torch.ones_like(ids), **NEW | options)


def _sampled(model: Any, ids: torch.Tensor, cache: Any = None) -> Any:
    torch.manual_seed(3)
    return _of(model, ids, cache, **SAMPLED)


def _over_ranks(model_type: str, prompt: torch.Tensor, texts: list[torch.Tensor], folder: str) -> Any:
    """A rank's (number, (tokens, logits)) of each text, or how the cache is refused."""
    faulthandler.dump_traceback_later(PATIENCE - 20)
    transformers_logging.set_verbosity_error()
    model = vision_model(model_type)
    inputs = [prompt, *(text[:, : -NEW["max_new_tokens"]] for text in texts[1:3])]
    try:
        model = hf.parallelize(model, timeout=60)
        cache, pieces = (ShardedCache(model.config, timeout=60, prefill_chunk=chunk) for chunk in (None, 64))
        outs = [(0, _of(model, inputs[0], cache)), (1, _of(model, inputs[1], cache))]
        outs += [(0, _of(model, inputs[0], pieces)), (1, _of(model, inputs[1], pieces))]
        if dist.get_world_size() == 2:
            cache.save(folder)
        outs.append((2, _of(model, inputs[2], pieces)))
        outs.append((2, _of(model, inputs[2], ShardedCache.load(folder, model.config, timeout=60))))
        outs.append((3, _sampled(model, prompt, ShardedCache(model.config, timeout=60))))
    except (TypeError, ValueError) as error:
        if not is_ours(error):
            raise
        return str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return [(n, (out.sequences, torch.stack(out.logits))) for n, out in outs]


def _generate_of(verdicts: list[Verdict]) -> list[str]:
    """The paragraphs about text alone."""
    equal = sorted(verdict.model_type for verdict in verdicts if verdict.generates == "equal")
    others = [Verdict(each.model_type, *_no_cache(each.generates)) for each in verdicts if each.generates]
    return [
        f"**Generate over ranks** ({len(equal)}): with a `ShardedCache`, the tokens and logits of one process after a",
        "prompt of text alone, over 1, 2 and 3 ranks ([details](how-to/generate.md#text-with-vision-language-models)).",
        "",
        f"{', '.join(equal)}.",
        "",
        *reasons(others),
    ]


def _no_cache(generates: str) -> tuple[str, str]:
    """The heading of those that don't generate over ranks, and the reason."""
    if generates == "equal":
        return generates, ""
    if generates.startswith(_NOT_RUN):
        return "not generated", generates.removeprefix(_NOT_RUN)
    shorter = _OF_TEXT.match(generates)
    return "refuse the cache", shorter[1] if shorter else generates


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
        *_generate_of(verdicts),
        "",
        *reasons(verdicts),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    with Pools() as pools:
        judged = functools.partial(judge, pools=pools)
        sys.exit(run(__doc__, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, judged, "Vision-language models", page))
