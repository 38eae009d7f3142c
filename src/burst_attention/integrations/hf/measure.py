"""Measure that a model can run on shards: only its attention may mix tokens.

Only the attention exchanges data between ranks, so every other part (projections, norms, experts, rotary angles) must
treat each token independently. A convolution, a recurrence, another attention, or positions counted from the shard's
start would give plausible but wrong numbers. ``reading.structure`` refuses parts of unknown classes before anything
runs. ``check_model`` also runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from burst_attention.attention.batch import PlanArgument, Plans
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.attention.plan import Plan
from burst_attention.plan.mask import Mask

from .call import stub_forward
from .layers import converted
from .reading import Reading, attached, forwards, read, structure
from .reading.configs import check_layers
from .reading.known import ALONE, NAME
from .running import RunningPlans, running

DOCUMENT = 7  # tokens of a document in the measurement; a number that sizes of layers rarely have


def check_model(model: PreTrainedModel, plan: PlanArgument) -> None:
    """Check by its parts and by measurement that a model can run on shards. Call it on all ranks.

    The attention also checks the parts, in its first call. ``check_model`` also finds models that never call it (for
    example, switched to ``sdpa``).

    The measurement runs the model with an attention in which each token sees only itself. Then other tokens, another
    place, more or fewer tokens on either side, and values ten times as large at other tokens must not change a token's
    hidden state. If the model is in training mode, it also runs in that mode, with ``nn.Dropout`` disabled. A repeated
    run detects random values.

    Args:
        model: the model on its device, not sharded yet.
        plan: as for ``model(..., plan=plan)``. With one rank nothing is checked.

    Raises:
        ValueError: the model can't run on shards; on every rank. The message names the part.
    """
    base = Plans.of(plan).one
    if base.world == 1:
        return
    with base.agreement.entering("check_model"):
        check_layers(model.config)
        reading = read(model)
        structure.check_structure(reading)
        attached.check_hooks(reading)
        structure.check_implementations(model, structure.attention_configs(reading))
        with converted.converted(reading):
            check_by_measure(reading, plan)
    base.exchange_small([])


def check_by_measure(reading: Reading, plan: PlanArgument) -> None:
    """Compare hidden states in evaluation, and in training mode if the model is in it."""
    model = reading.model
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model's parameters are already sharded; call check_model before fully_shard")
    modes = {part.module: part.module.training for part in reading}
    reached = [True] if converted.hands_plans(reading) else []
    run = _tokens_apart(model, plan, reached)
    try:
        for training in sorted({False, model.training}):
            model.train(training)
            for module in modes:
                if type(module) is nn.Dropout:  # a call over ranks refuses it
                    module.eval()
            _measure(model, run, reached)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _measure(model: PreTrainedModel, run: Callable[..., _Run], reached: list[bool]) -> None:
    """Compare the hidden states of short documents, each alone and beside others."""
    # A statistic of all tokens (maximum, mean, norm, threshold) may be the same for a permutation of the tokens, or be
    # set by the tokens that are compared. So the others have other ids, and once ten times as large values.
    bound, base = max(1e-4, torch.finfo(model.dtype).eps ** 0.5), [0, 1]
    plain, again, counted = run(base), run(base), run(base, counted=True)
    alone = dict(counted.quiet + plain.quiet)
    beside = {
        "other tokens": [counted, run([2, 1]), run([0, 3]), run([2, 1], counted=True)],
        "their place": [run([1, 0])],
        "the number of tokens": [run([0]), run([1]), run([2, 3, 0, 1]), run([0] * 8), run([1, 0, 2, 2, 2])],
        "the size of other tokens' values": [run(base, loud=1), run(base, loud=0), run([2, 0, 1], loud=0)],
    }
    if not reached:
        raise ValueError(
            f"{type(model).__name__} never called the attention {NAME!r}, so each rank would see only its shard; load "
            f"it with attn_implementation={NAME!r}. If it ignores that argument, {ALONE}"
        )
    most = bound * plain.states.abs().max().item()
    if not (random := _apart(again.states, plain.states)) <= most:
        raise ValueError(
            f"hidden states of {type(model).__name__} differ from run to run (by {random:.0e}) without nn.Dropout: "
            f"some part draws random values, different on each rank; set its rate to 0, or {ALONE}"
        )
    for what, runs in beside.items():
        apart = [_apart(states, alone[key]) for result in runs for key, states in result.quiet if key in alone]
        if wrong := [x for x in apart if not x <= most]:  # so written, a NaN counts as wrong
            raise ValueError(
                f"hidden states of {type(model).__name__} depend on {what} outside of the attention {NAME!r} (by "
                f"{max(wrong):.0e}), and each rank would see only its shard; {ALONE}"
            )


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return (x - y).abs().max().item()


class _Run(NamedTuple):
    """The hidden states [1, 7 n, E] of n documents, and ((document, its position), states) of those not loud."""

    states: torch.Tensor
    quiet: list[tuple[tuple[int, int], torch.Tensor]]


def _tokens_apart(model: PreTrainedModel, plan: PlanArgument, reached: list[bool]) -> Callable[..., _Run]:
    """Return a function that runs the model on documents of 7 tokens, where each token sees only itself."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Plan, **options: Any) -> torch.Tensor:
        reached.append(True)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def alone(plan: Plan, length: int) -> Plan:
        documents = tuple(range(0, length + 1, DOCUMENT))
        return single_rank_plan(length, mask=Mask(plan.mask.causal, plan.mask.window, documents))

    def run(documents: list[int], *, counted: bool = False, loud: int | None = None) -> _Run:
        """``documents``: numbers that give ids. ``counted``: positions go on. ``loud``: layers get it times ten."""
        within, vocabulary = torch.arange(DOCUMENT), model.config.get_text_config().vocab_size
        ids = torch.cat([(within + 3 + 8 * n) % vocabulary for n in documents])[None].to(model.device)
        positions = torch.arange(ids.shape[1]) if counted else within.repeat(len(documents))
        positions = positions[None].to(model.device)
        plans: Any = {key: alone(each, ids.shape[1]) for key, each in Plans.of(plan).items()}
        plans = RunningPlans(plans, positions=positions)
        inputs = {"input_ids": ids, "position_ids": positions, "plan": plans, "attend": attend, "use_cache": False}
        with torch.no_grad(), running(plans), _loudly(model, ids.shape[1], loud):
            states = stub_forward.run_body(forwards.body_of(model), **inputs)[0]
        keys = [(document, DOCUMENT * n * counted) for n, document in enumerate(documents)]
        each = enumerate(zip(keys, states.split(DOCUMENT, 1), strict=True))
        return _Run(states, [pair for n, pair in each if n != loud])

    return run


@contextmanager
def _loudly(model: nn.Module, length: int, loud: int | None) -> Iterator[None]:
    """Multiply one document's rows by ten in the input of every layer without layers inside."""

    def louder(x: Any) -> Any:
        if loud is None or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if x.shape[:-1] not in ((1, length), (length,)):
            return x
        factor = x.new_ones(length, 1)
        factor[DOCUMENT * loud : DOCUMENT * (loud + 1)] = 10
        return x * factor

    def before(_: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(louder, values)), {name: louder(x) for name, x in named.items()}

    leaves = [] if loud is None else [part.module for part in read(model) if len(part.inside) == 1]
    handles = [leaf.register_forward_pre_hook(before, with_kwargs=True) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
