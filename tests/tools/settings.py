"""Every setting of every causal model's configuration, moved: equal over three ranks, refused by name, or wrong?

    python tests/tools/settings.py [MODEL_TYPE ...] [--log FILE]      writes docs/models.md without a model type

Each setting that changes the loss or a gradient of a tiny random model in one process is turned over (booleans) or
moved (numbers, names, layer types, rotary frequencies). A setting that changes nothing is tried again beside each
choice that another setting makes. ``--log`` keeps the outcomes as JSON lines; a type that it has is not run again.
A setting is "alike" and not run over ranks if the same code reads it in a type that was judged, and moves it alike.

"late" (refused, but only by the first call), "different" and "error" (no refusal by name) are bugs of ours.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import inspect
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading import forwards
from burst_attention.testing import WorkerError, local_world
from tests.support.conditioning import FACTOR, certain, moved_copy, name_of_worst
from tests.support.hf_models import WHOLE_HEADS
from tests.tools import families
from tests.tools.families import BOUND, GRADIENT_BOUND, SEQLEN, WORLD, first_line, refusal
from tests.tools.moves import COMMON, SIZED, settings_of
from tests.tools.outcomes import BAD, TITLE, Outcome, page
from tests.tools.readers import Readers, code_of, reads

MOST, MANY = 3, 8  # values of one number that are run, and of a name, a list or rotary frequencies
DOCUMENTS = (0, 17, 18, SEQLEN)  # of a packed batch


class Subject:
    """A model with some settings in one process: its results, and which settings were read."""

    def __init__(self, model_type: str, own: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
        self.model_type, self.own = model_type, own
        self.config, parts = families.built(model_type, **own)
        if sum(parameter.numel() for parameter in parts.parameters()) > families.LARGEST:
            raise ValueError("larger than is run here")
        self.read: Readers = {}
        with reads(self.config, self.read):
            self.model = families.model_of(model_type, self.config, "eager", parts)
            own_weights = dict(self.model.named_parameters())
            if weights is not None and {n: x.shape for n, x in weights.items()} == {
                n: x.shape for n, x in own_weights.items()
            }:
                self.model.load_state_dict(weights, strict=False)
            self.fresh = copy.deepcopy(self.model)  # some models hold a state that can't be copied when they have run
            self.expected = families.one_process(model_type, self.model)
        self.results = {"loss": self.expected.loss.detach(), "hidden": self.expected.hidden}
        for name, parameter in self.model.named_parameters():
            self.results[name] = torch.zeros(1) if parameter.grad is None else parameter.grad
        if not all(x.isfinite().all() for x in self.results.values()):
            raise ValueError("not finite")
        if not any(each.any() for name, each in self.results.items() if name not in ("loss", "hidden")):
            raise ValueError("no gradient")  # a factor of 0, for example

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def is_like(self, other: "Subject") -> bool:
        """Whether another model's loss, hidden states and gradients are the same."""
        theirs = other.results
        return self.results.keys() == theirs.keys() and all(
            x.shape == theirs[name].shape and torch.equal(x, theirs[name]) for name, x in self.results.items()
        )


def sweep(model_type: str, only: set[str] | None = None, seen: dict[str, str] | None = None) -> Iterator[Outcome]:
    """Judge each setting of a model type.

    Args:
        model_type: as ``AutoModelForCausalLM`` knows it.
        only: the names of the settings to judge; None: all.
        seen: by the digest of a setting's code, the type in which it was judged. Settings that it has are not run;
            those that are judged here are added, unless one of their values comes out wrong.
    """
    seen = {} if seen is None else seen
    try:
        base = Subject(model_type, {})
    except Exception as error:
        yield Outcome(model_type, "", {}, "fails", first_line(error))
        return
    every = settings_of(base.config, families.model_class(model_type))
    chosen = {name: values for name, values in every.items() if only is None or name in only}
    beside: list[Subject] = []
    idle: dict[str, list[dict[str, Any]]] = {}
    for name, values in chosen.items():
        code = code_of(base.config, name, [own[name] for own in values], base.read)
        if code in seen:
            beside += _choices(model_type, name, values, base)
            yield Outcome(model_type, name, {}, "alike", seen[code])
            continue
        outcomes, found = _moved(model_type, base, name, values)
        yield from outcomes
        beside += found
        if all(outcome.kind == "fails" for outcome in outcomes):
            idle[name] = values
        elif code is not None and not any(outcome.kind in BAD for outcome in outcomes):
            seen[code] = model_type
    for name, values in idle.items():  # a switch may matter only beside another of them
        with contextlib.suppress(Exception):
            if {name: True} in values and name not in COMMON:
                beside.append(Subject(model_type, {name: True}, base.weights))
    for name, values in idle.items():
        found = list(itertools.islice(_beside(model_type, name, values, beside), MOST))
        yield from found or [Outcome(model_type, name, {}, "unchanged")]


def _moved(
    model_type: str, base: Subject, name: str, values: list[dict[str, Any]]
) -> tuple[list[Outcome], list[Subject]]:
    """Judge some values of a setting: their outcomes, and the choices among them, which others may need."""
    outcomes: list[Outcome] = []
    choices: list[Subject] = []
    for own in values:
        count = sum(outcome.kind != "fails" for outcome in outcomes)
        if count == _most(name, own[name]):
            break
        outcome, subject = _judged(model_type, base, own, name)
        if outcome.kind != "unchanged":
            outcomes.append(outcome)
        if subject is not None and outcome.kind == "equal" and len(choices) < 2 and _is_choice(own[name]):
            choices.append(subject)
    return outcomes, choices


def _choices(model_type: str, name: str, values: list[dict[str, Any]], base: Subject) -> list[Subject]:
    """The choices among the values of a setting that is not run over ranks."""
    found: list[Subject] = []
    for own in values:
        if len(found) < 2 and _is_choice(own[name]):
            with contextlib.suppress(Exception):
                subject = Subject(model_type, own, base.weights)
                found += [] if subject.is_like(base) else [subject]
    return found


def judge(model_type: str, own: dict[str, Any]) -> Outcome:
    """Judge the first of some settings, beside the others."""
    name, *_ = own
    others = {each: value for each, value in own.items() if each != name}
    return _judged(model_type, Subject(model_type, others), own, name)[0]


def _most(name: str, value: Any) -> int:
    if isinstance(value, (str, dict, list)):
        return MANY
    return 1 if _is_size(name) else MOST


def _may_mix(name: str, value: Any) -> bool:
    """Whether a setting may matter for documents: sizes, factors and rotary frequencies are each token's alone."""
    return not (_is_size(name) or isinstance(value, float) or "rope" in name)


def _is_size(name: str) -> bool:
    return name in SIZED or name.endswith(("eps", "epsilon", "_dim", "_size", "_act", "activation"))


def _is_choice(value: Any) -> bool:
    return isinstance(value, (bool, str, list))


def _beside(model_type: str, name: str, values: list[dict[str, Any]], beside: list[Subject]) -> Iterator[Outcome]:
    """The outcomes of a setting that alone changes nothing, beside others."""
    for other in beside:
        for own in values[:2] if name not in other.own else ():
            outcome, _ = _judged(model_type, other, other.own | own, name)
            if outcome.kind not in ("unchanged", "fails"):
                yield outcome
                break


def _judged(model_type: str, base: Subject, own: dict[str, Any], name: str) -> tuple[Outcome, Subject | None]:
    """Judge the setting ``name`` of ``own`` if it changes what ``base`` computes."""
    outcome = functools.partial(Outcome, model_type, name, own)
    try:
        config = families.tiny_config(base.config.model_type, **own)
        others = {each for each, x in config.to_dict().items() if x != base.config.to_dict().get(each)} - {name}
        if name not in base.read and not others & base.read.keys():
            return outcome("unchanged"), None
        subject = Subject(model_type, own, base.weights)
    except Exception as error:
        return outcome("fails", first_line(error)), None
    if subject.is_like(base):
        return outcome("unchanged"), None
    return outcome(*over_ranks(subject, packed=_may_mix(name, own[name]))), subject


def over_ranks(subject: Subject, *, packed: bool = True) -> tuple[str, str]:
    """Compare a model over ``WORLD`` ranks with one process: the kind of its outcome, and a reason.

    Weights with which a choice of experts or keys is nearly a tie are drawn again.
    """
    draws = (families.model_of(subject.model_type, subject.config, "eager", seed=n) for n in range(1, families.DRAWS))
    model = certain(itertools.chain([subject.fresh], draws), families.margin)
    if model is not subject.fresh:
        subject = Subject(subject.model_type, subject.own, dict(model.named_parameters()))
    models = families.copies_of(subject.fresh)
    given = {"gradients": "sum", "timeout": 60, "strategy": WHOLE_HEADS}
    spread = whole = False
    try:
        with local_world(WORLD, timeout=60) as ranks:
            ranks.run(lambda group: hf.parallelize(models[group.rank()], group, **given) and None)
            spread = True
            expected, again = subject.expected.loss.item(), functools.partial(families.one_process, subject.model_type)
            found = _stepped(ranks, subject.model, models, expected, families.batch(), again)
            if found or not packed or not _can_be_packed(subject):
                return ("different", found) if found else ("equal", "")
            whole = True
            found = _stepped(ranks, subject.model, models, *_packed(subject.model), _packed)
            return ("different", f"packed: {found}") if found else ("equal", "")
    except WorkerError as error:
        text = refusal(error)
        if text and whole:  # a batch that this model can't take, not a setting
            return "equal", f"packed: {text.splitlines()[0]}"
        if text:
            return ("late" if spread else "refused"), text.splitlines()[0]
        return "error", first_line(next(each for each in error.errors.values() if each))


def _stepped(
    ranks: Any,
    alone: Any,
    models: list[Any],
    expected: float,
    batch: dict[str, torch.Tensor],
    again: Callable[[Any], Any],
) -> str:
    """Run a step over the ranks; return how far its loss or a gradient is off, or an empty string.

    ``again`` makes a model's gradients in one process: where one is off, its own change tells what is rounding.
    """

    def rank(group: Any) -> float:
        model = models[group.rank()]
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss.item()

    off = abs(ranks.run(rank)[0] / expected - 1)
    apart = families.apart_of(families.gradients_of(alone), models)
    wrong = {name: apart[name] for name in apart if not apart[name] <= GRADIENT_BOUND}
    if wrong:
        again(moved := moved_copy(alone))
        changes = families.apart_of(families.gradients_of(alone), [moved])
        wrong = {name: x for name, x in wrong.items() if not x <= FACTOR * changes[name]}
    worst = name_of_worst(wrong) if wrong else None
    of_worst = "no gradient" if worst is None else f"{worst} by {wrong[worst]:.0e}"
    return "" if off <= BOUND and not wrong else f"loss by {off:.0e}, {of_worst}"


def _can_be_packed(subject: Subject) -> bool:
    """Whether each document alone says what its loss is: an auxiliary loss is of all tokens."""
    return forwards.has_stock_forward(subject.model) and getattr(subject.expected, "aux_loss", None) is None


def _packed(alone: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradients in the model, of one process that runs each document alone; the packed batch."""
    ids, pieces = families.batch()["input_ids"], list(itertools.pairwise(DOCUMENTS))
    alone.zero_grad()
    placed = "position_ids" in inspect.signature(alone.forward).parameters  # some count from another number than 0

    def logits_of(a: int, b: int) -> torch.Tensor:
        places = {"position_ids": torch.arange(b - a).repeat(2, 1)} if placed else {}
        return alone(input_ids=ids[:, a:b], use_cache=False, **places).logits[:, :-1].flatten(0, 1)

    with families.dtype_of_scores(alone.config.model_type):
        logits = [logits_of(a, b) for a, b in pieces]
    loss = F.cross_entropy(torch.cat(logits), torch.cat([ids[:, a + 1 : b].flatten() for a, b in pieces]))
    loss.backward()
    positions = torch.cat([torch.arange(b - a) for a, b in pieces]).repeat(2, 1)
    return loss.item(), {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def _with_end(model_type: str, only: set[str] | None, seen: dict[str, str]) -> Iterator[Outcome]:
    """The outcomes of a type, and one that says it is done, with the digests of the code that it was judged by."""
    yield from sweep(model_type, only, seen if only is None else {})
    if only is None:
        own = {str(n): code for n, (code, judged) in enumerate(seen.items()) if judged == model_type}
        yield Outcome(model_type, "", own, "done")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="*", help="only these; the page is left as it is")
    parser.add_argument("--setting", action="append", help="only this one, also of types that the log has; repeatable")
    parser.add_argument("--log", type=Path, help="a file of outcomes to continue")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    log, only = arguments.log, {*arguments.setting} if arguments.setting else None
    known = [Outcome(**json.loads(line)) for line in log.read_text().splitlines()] if log and log.exists() else []
    done = {outcome.model_type: outcome.own for outcome in known if outcome.kind == "done"}
    seen = {code: model_type for model_type, codes in done.items() for code in codes.values()}
    for model_type in arguments.model_type or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in done and only is None:
            continue
        for outcome in _with_end(model_type, only, seen):
            known.append(outcome)
            print(outcome, flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(outcome), default=str) + "\n")
    last = {(each.model_type, each.name, str(each.own)): each for each in known}  # of a setting that ran again
    print(Counter(outcome.kind for outcome in last.values()), transformers.__version__, torch.__version__)
    if not arguments.model_type:
        families.write_section(TITLE, page([*last.values()], datetime.date.today().isoformat()))
    return int(any(outcome.kind in BAD for outcome in last.values()))


if __name__ == "__main__":
    sys.exit(main())
