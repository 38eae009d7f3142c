"""Parallelize a transformers model: each rank passes in the whole batch and gets the whole loss.

    parallelize(model, group)
    loss = model(input_ids=ids, labels=labels).loss  # ids and labels [B, S], the same on every rank

To training loops and trainers the ranks of a group look like replicas that read the same batch. They need no change.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from burst_attention.attention.batch import PlanCache, Reach
from burst_attention.attention.hardware import CallShape, Hardware
from burst_attention.attention.new_plan import make_plan
from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Meeting
from burst_attention.loss import LogitForm
from burst_attention.loss.checks import check_temperature
from burst_attention.plan.groups import Groups
from burst_attention.plan.mask import Mask
from burst_attention.plan.strategy import Strategy, for_chosen_keys

from . import untouched
from .call import arguments, generate, heads, run, vision
from .call.outputs import answer, around
from .classes import Converted, revert
from .layers import checks, converted
from .layers.attention import call_shape, register
from .layers.dealt import passed
from .layers.memory import Memory, unsave
from .reading import attached, forwards, known, models, read, structure
from .reading.parts import Kind, text_of
from .running import running
from .state import Gradients, ModelState, form_of
from .tensor import axis
from .versions import warn_of_newer

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    group: Any = None,
    *,
    plan: Plan | None = None,
    strategy: Strategy | str | None = None,
    hardware: Hardware | None = None,
    gradients: Gradients = "mean",
    temperature: float = 1.0,
    memory: Memory | None = None,
    timeout: float | timedelta | None = None,
) -> Model:
    """Shard each sequence of the model's batches over the ranks of ``group``. Call it on every rank.

    Afterwards ``model(input_ids=..., labels=...)`` takes the whole batch on every rank, and returns a
    :class:`ParallelOutput` with the one-device loss. Documents come from ``position_ids`` that restart,
    ``cu_seq_lens_q``, ``seq_idx`` or ``sequence_ids``. Padding comes from ``attention_mask``. The loss is divided by
    ``num_items_in_batch`` if given. ``logits="gather"`` and ``output_hidden_states`` return whole logits and hidden
    states, with gradients; ``inputs_embeds`` may replace ``input_ids``. ``model.generate`` runs on each
    rank separately, unless it gets a :class:`burst_attention.inference.ShardedCache`.

    Args:
        model: a transformers model for causal or masked language modelling, or for classification of sequences or
            tokens, or a PEFT model of one. (For classification, and for heads of several layers as in BERT, every rank
            gathers the last hidden states.) Encoders need no option: the mask follows from the model. Call
            ``parallelize`` before DDP, ``fully_shard`` and ``torch.compile``. It modifies the model in place and
            replaces the model's class with a subclass.
        group: a ProcessGroup, one axis of a DeviceMesh, or None: as for :func:`burst_attention.make_plan`.
        plan: a plan for sequences of the usual length, over the ranks that share them, in place of ``group``,
            ``strategy``, ``hardware`` and ``timeout``. Batches of its length keep its layout, whatever their documents.
        strategy: as for :func:`burst_attention.make_plan`, such as ``"ulysses"``. None: the predicted fastest for each
            batch. The prediction counts one forward even if layers are recomputed.
        hardware: as for :func:`burst_attention.make_plan`.
        gradients: ``mean``: the mean over all ranks is the one-device gradient, as DDP and FSDP expect. ``sum``: the
            sum over the ranks of ``group`` is the one-device gradient.
        temperature: the temperature of the fields per token that ``fused_lm_head=True`` requests, as in TRL.
        memory: recomputation, chunks and offload, which save activation memory; None: none of them.
        timeout: as for :func:`burst_attention.make_plan`.

    Returns:
        ``model``.

    A custom ``loss_function`` or forward runs unchanged on each rank, on the hidden states of the whole batch. So each
    rank computes whole logits, and the model returns the output of the custom forward.

    Weights must be equal on all ranks. DDP and FSDP ensure that, and the first call compares a sample of the weights.
    A batch without any label has loss 0 and no gradient (in transformers the loss is NaN).

    Raises:
        TypeError, ValueError: the model can't run on shards, or an argument is wrong; on every rank.
    """
    base: Any = heads.base_of(model)
    memory = Memory() if memory is None else memory
    cut = axis.cut_of(base)
    given = {"group": group, "strategy": strategy, "hardware": hardware, "timeout": timeout}
    asked = repr(strategy)
    if plan is None:
        plan = make_plan(1, **given | _hints(base, memory, hardware, strategy))
    elif not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} must be a Plan of make_plan, or None")
    else:
        asked = repr(plan.schedule.strategy)
        with plan.agreement.entering("parallelize"):
            _check_plan(plan, {name: x for name, x in given.items() if x is not None})
    meeting = Meeting(plan.agreement, None if cut is None else cut.agreement)
    if cut is not None:
        cut.set_timeout(plan.agreement.transport.timeout)
    if plan.rank == 0:
        warn_of_newer()
    with meeting.entering("parallelize"):
        left, form = _check(model, plan, gradients, temperature, memory)
    inner = {"strategy": asked, "ranks of the group": plan.world, "rank in the group": plan.rank}
    inner["tokens of the plan"] = plan.seqlen
    inner["nodes of the group"] = list(plan.planner.nodes or ())
    try:
        with meeting.entering("parallelize"):
            memory.apply(text_of(base))
        same = {"gradients": gradients, "temperature": temperature, "memory": repr(memory)}
        meeting.agree("parallelize", same, inner=inner)
    except Exception:
        unsave(text_of(base))
        raise
    if cut is not None and cut.by_context:
        cut.share = 1.0 if gradients == "sum" else 1.0 / plan.world
    register()
    state: dict[str, Any] = {"gradients": gradients, "temperature": temperature, "memory": memory}
    _convert(base, plan, meeting=meeting.of_model(), form=form, left=left, **state)
    return model


def _hints(base: Any, memory: Any, hardware: Hardware | None, strategy: Any) -> dict[str, Any]:
    """Return what ``make_plan`` gets to predict the time of the model's calls."""
    cut, chunks = axis.cut_of(base), getattr(memory, "attention_chunks", 1)
    hints: dict[str, Any] = {"call": call_shape(base, chunks, 1 if cut is None else cut.heads)}
    if strategy is None and isinstance(base, nn.Module) and read(base).of(Kind.INDEXED):
        hints["strategy"] = for_chosen_keys(Strategy())
    if cut is None:
        return hints
    # Groups that measured their links apart might choose layouts apart, and ranks of one axis would hold other tokens.
    if isinstance(hardware, Hardware | None) and (hardware is None or hardware.rates is None):
        hardware = Hardware(rates="preset", nodes=None if hardware is None else hardware.nodes)
    return hints | {"hardware": hardware}


def _check_plan(plan: Plan, given: dict[str, Any]) -> None:
    """Refuse a plan that can't be the base of a model's plans, and arguments that it holds already."""
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} and a plan, which has its own, are both given; pass it to make_plan")
    if plan.keys_apart is not None:
        raise ValueError("plan has keys, as for cross-attention or a cache; make it without keys=")
    if plan.mask != Mask(plan.mask.causal):
        raise ValueError(f"plan has the mask {plan.mask!r}, but the model and each batch say which; omit it")


def _convert(base: Any, plan: Plan, *, left: str | None, **state: Any) -> None:
    """Give a checked model our attention, our forward and its state; :func:`unparallelize` takes them away."""
    reading = read(base)
    body, causal = reading.text, left is not None or models.check_causal(reading)
    if plan.mask.causal != causal:  # keeps the layout
        plan = plan.with_mask(Mask(causal=causal))
    own = body.model.config._attn_implementation
    if left is None:
        _switch(base, known.NAME)
    reaches = [] if left else models.windows_of(base, causal=causal)
    base._burst = ModelState(
        PlanCache(plan, reaches, causal=causal),
        stock_attention="sdpa" if own == known.NAME else own,
        layers=structure.attention_configs(body),
        absolute=models.depends_on_places(reading),
        left=left,
        **state,
    )
    if left is None:
        converted.convert_body(body)
        vision.convert(base)
        vars(base).pop("forward", None)  # TRL's fused head; our forward computes the same results
    base.__class__ = _parallel_class(type(base))  # type: ignore[arg-type]
    if left is None:
        base._burst.read = heads.read_by(base)


def plans_of(model: nn.Module, seqlen: int, cu_seqlens: Sequence[int] | None = None) -> Mapping[Reach, Plan]:
    """Return the plans of a parallelized model's call, by what its layers see. Exchanges nothing.

    Their ``bytes`` predict what the call sends; their transport counts what all calls of the model have sent.

    Args:
        model: the result of :func:`parallelize`, not wrapped.
        seqlen: tokens of a row.
        cu_seqlens: the borders of its documents, ``[0, ..., seqlen]``; None: the row is one document.

    Raises:
        TypeError, ValueError: ``model`` is not parallelized, or the borders don't fit.
    """
    state = getattr(heads.base_of(model), "_burst", None)
    if state is None:
        raise TypeError(f"model is a {type(model).__name__} that is not parallelized; call hf.parallelize first")
    plans: Mapping[Reach, Plan] = state.plans.get(seqlen, None if cu_seqlens is None else tuple(cu_seqlens))
    return plans


def unparallelize(model: Model) -> Model:
    """Undo :func:`parallelize`: restore the model's class and attention. Exchanges nothing.

    Args:
        model: the result of :func:`parallelize`, not wrapped. It is modified in place and keeps its weights.

    Returns:
        ``model``, which can be pickled again, by ``torch.save`` for example, unless :func:`tensor_parallel` cut it.

    Raises:
        ValueError: ``model`` is not parallelized, or ranks share its weights.
    """
    base: Any = heads.base_of(model)
    if not isinstance(base, _Parallel):
        why = "that is not parallelized; don't call hf.unparallelize"
        if isinstance(base, nn.Module) and any(isinstance(part, _Parallel) for part in base.modules()):
            why = "around the parallelized model; pass that, such as DDP's model.module"
        raise ValueError(f"model is a {type(base).__name__} {why}")
    spread: Any = base
    if spread._burst.shared is not None:
        raise ValueError(f"shard_weights has shared the weights of {type(base).__name__} over ranks; load it again")
    stock_attention, left = spread._burst.stock_attention, spread._burst.left
    revert(spread, vision.Seam)
    revert(text_of(spread), Converted)
    unsave(text_of(spread))
    del spread._burst
    spread.__class__ = spread.stock_class
    if left is None:
        _switch(spread, stock_attention)
    return model


def _check(
    model: Any, plan: Plan, gradients: Any, temperature: Any, memory: Any
) -> tuple[str | None, LogitForm | None]:
    """Check the arguments of :func:`parallelize`; return why the model stays as it is, and the form of its logits."""
    base = heads.base_of(model)
    check_temperature(temperature)
    if gradients not in get_args(Gradients):
        raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(get_args(Gradients))}")
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model is a {type(base).__name__}; pass a model of transformers, or a PEFT model of one. Parallelize it "
            "first, then wrap it by DDP, FSDP or torch.compile"
        )
    if isinstance(base, _Parallel):
        raise ValueError(f"model is parallelized over {base._burst.plans.base.world} ranks already; parallelize once")
    own = vars(base).get("forward")
    # TRL's fused head computes what ours does; accelerate sets the class's own forward when it removes its autocast.
    if own is not None and not (forwards.is_of_class(base, own) or forwards.is_fused_by_trl(base, own)):
        raise ValueError(
            f"model has the forward {getattr(own, '__qualname__', own)} in place of its class's forward, and it would "
            "be lost; parallelize the model before you replace its forward"
        )
    reading = read(base)
    axis.check_cut(reading)
    checks.check_experts(checks.experts_of(reading))
    if plan.world > 1:
        models.check_parts(reading, reading.text, plan.layout)
        attached.check_hooks(reading, root=False)
    left = untouched.reason_of(base) if plan.world == 1 else None
    if left is None:
        arguments.wants_router(base, {})  # as the configuration says
    form = form_of(reading) if left is None else untouched.form_of(base)
    tuner = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if tuner in known.TUNERS:
        raise ValueError(f"model is tuned by PEFT's {known.TUNERS[tuner]}; use LoRA, prompt tuning or P-tuning")
    if not isinstance(memory, Memory):
        raise TypeError(f"memory={memory!r} must be a burst_attention.integrations.hf.Memory")
    cut = axis.cut_of(base)
    if cut is not None and cut.by_context:
        ranks = [dist.get_rank()] if plan.world == 1 else dist.get_process_group_ranks(plan.transport.group)
        axis.check_contexts(cut, ranks, memory.mlp_chunks)
    if left is not None:
        untouched.check_memory(left, memory)
        untouched.warn(left)
    if plan.world > 1:
        _check_degree(plan, call_shape(base, memory.attention_chunks, 1 if cut is None else cut.heads))
    return left, form


def _check_degree(plan: Plan, shape: CallShape) -> None:
    """Refuse a fixed Ulysses degree that can't split the heads of a layer's calls."""
    degree, q_heads, kv_heads = plan.schedule.strategy.ulysses_degree, shape.q_heads, shape.kv_heads
    if not isinstance(degree, int) or q_heads is None or kv_heads is None:
        return
    try:
        Groups.of(degree, q_heads=q_heads, kv_heads=kv_heads)
    except ValueError as error:
        chunks = shape.attention_chunks
        why = f" (a layer's calls have so few by memory=Memory(attention_chunks={chunks}))" if chunks > 1 else ""
        raise ValueError(f"{error}{why}") from None


class _Parallel:
    """Methods that take precedence over those of the model's class."""

    _burst: ModelState

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate on each rank separately, without a plan; with a cache over ranks, on all ranks together."""
        own: Any = super().generate  # type: ignore[misc]
        if self._burst.left is not None:
            untouched.check_call(self._burst.left, kwargs)
            return own(*args, **kwargs)
        argument = passed(kwargs)
        if argument is not None:
            with kwargs[argument].generating(self, args, kwargs, argument) as named:
                return own(*args, **named)
        generate.agree_on_generate(self, args, kwargs)
        with _alone(self):
            return own(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does. All ranks must call it if weights are sharded or cut; rank 0 writes whole ones."""
        save: Any = super().save_pretrained  # type: ignore[misc]
        asked = inspect.signature(save).bind(save_directory, *args, **kwargs)
        given = asked.arguments
        sharded = any(isinstance(x, DTensor) for x in cast("nn.Module", self).parameters())
        if sharded and given.get("state_dict") is None and not given.get("distributed_checkpoint"):
            first = dist.get_rank() == 0
            given["state_dict"] = axis.whole_state(cast("nn.Module", self), keep=first)
            given["is_main_process"] = first and given.get("is_main_process", True)
        return save(*asked.args, **asked.kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a parallelized {type(self).__name__} can't be pickled because it holds a process group; save "
            "model.state_dict(), call model.save_pretrained(folder), or pickle hf.unparallelize(model)"
        )

    def __copy__(self) -> Any:  # the default would use __reduce_ex__
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


@functools.cache
def _parallel_class(kind: Any) -> Any:
    """Return a subclass, whose forward begins each call, under the class's name: model cards and trainers read it."""

    @functools.wraps(kind.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._burst.left is not None:
            untouched.check_call(self._burst.left, kwargs)
        if self._burst.generating or self._burst.left is not None:
            return kind.forward(self, *args, **kwargs)
        argument = passed(kwargs)
        if argument is not None:
            return kwargs[argument].run(self, args, kwargs)
        call = run.agreed(self, args, kwargs)
        if call.own:
            return around(self, lambda: run.run_body(self, call), call)
        return answer(self, run.run_body(self, call), call)

    members = {"forward": forward, "stock_class": kind}
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__")}
    return type(kind.__name__, (_Parallel, kind), members | named)


@contextmanager
def _alone(model: Any) -> Any:
    """Run the model on this rank alone, with its original attention, inside this context."""
    model._burst.generating = True
    _switch(model, model._burst.stock_attention)
    try:
        with running():
            yield
    finally:
        _switch(model, known.NAME)
        model._burst.generating = False


def _switch(model: Any, implementation: str) -> None:
    """Switch all layers to an attention, including layers with a copy of the model's configuration."""
    text = text_of(model)
    (model if vision.language_model_of(model) is None else text).set_attn_implementation(implementation)
    for config in structure.attention_configs(read(text)):
        config._attn_implementation = implementation
