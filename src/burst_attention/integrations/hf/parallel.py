"""Parallelize a transformers model: each rank passes in the whole batch and gets the whole loss.

    parallelize(model, group)
    loss = model(input_ids=ids, labels=labels).loss  # ids and labels [B, S], the same on every rank

To training loops and trainers the ranks of a group look like replicas that read the same batch. They need no change.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from burst_attention.attention.batch import PlanCache
from burst_attention.attention.hardware import Hardware
from burst_attention.attention.new_plan import make_plan
from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Meeting
from burst_attention.loss import LogitForm
from burst_attention.loss.checks import check_temperature
from burst_attention.plan.strategy import Strategy

from . import arguments, cached, call, converted, heads, models, parts, stub_forward, tensor_axis, untouched, vision
from .attention import call_shape, register
from .checks import running
from .classes import Converted, revert
from .dealt import passed
from .memory import Memory, unsave
from .outputs import answer, around, scaled
from .settings import Settings
from .snapshots import Snapshot
from .versions import warn_of_newer

Gradients = Literal["mean", "sum"]
_CACHED = "which passes keys and values as a cache, and a cache holds whole sequences"
# Tuners of PEFT that work around the model, not in its layers.
_TUNERS = {
    "CARTRIDGE": f"cartridges, {_CACHED}",
    "CPT": "CPT, whose own loss takes whole logits",
    "PREFIX_TUNING": f"prefix tuning, {_CACHED}",
}
Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch", bound=Mapping[str, Any])


def parallelize(
    model: Model,
    group: Any = None,
    *,
    strategy: Strategy | str | None = None,
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
        strategy: as for :func:`burst_attention.make_plan`, such as ``"ulysses"``. None: the predicted fastest for each
            batch. The prediction counts one forward even if layers are recomputed.
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
    cut = tensor_axis.cut_of(base)
    plan = make_plan(1, strategy=strategy, group=group, timeout=timeout, **_hints(base, memory))
    meeting = Meeting(plan.agreement, None if cut is None else cut.agreement)
    if cut is not None:
        cut.agreement.transport.timeout = plan.agreement.transport.timeout
    if plan.rank == 0:
        warn_of_newer()
    with meeting.entering("parallelize"):
        left, form = _check(model, plan, gradients, temperature, memory)
    inner = {"strategy": repr(strategy), "ranks of the group": plan.world, "rank in the group": plan.rank}
    inner["nodes of the group"] = list(plan.planner.nodes or ())
    try:
        with meeting.entering("parallelize"):
            memory.apply(vision.text_of(base))
        same = {"gradients": gradients, "temperature": temperature, "memory": repr(memory)}
        meeting.agree("parallelize", same, inner=inner)
    except Exception:
        unsave(vision.text_of(base))
        raise
    if cut is not None and cut.by_context:
        cut.share = 1.0 if gradients == "sum" else 1.0 / plan.world
    register()
    state: dict[str, Any] = {"gradients": gradients, "temperature": temperature, "memory": memory}
    _convert(base, plan, meeting=meeting.of_model(), form=form, left=left, **state)
    return model


def _hints(base: Any, memory: Any) -> dict[str, Any]:
    """Return what ``make_plan`` gets to predict the time of the model's calls."""
    cut, chunks = tensor_axis.cut_of(base), getattr(memory, "attention_chunks", 1)
    if cut is None:
        return {"call": call_shape(base, chunks)}
    # Groups that measured their links apart might choose layouts apart, and ranks of one axis would hold other tokens.
    return {"call": call_shape(base, chunks, cut.heads), "hardware": Hardware(rates="preset")}


def _convert(base: Any, plan: Plan, *, left: str | None, **state: Any) -> None:
    """Give a checked model our attention, our forward and its state; :func:`unparallelize` takes them away."""
    body, causal = vision.text_of(base), left is not None or models.check_causal(base)
    own = body.config._attn_implementation
    if left is None:
        _switch(base, parts.NAME)
    reaches = [] if left else models.windows_of(base, causal=causal)
    base._burst = _Context(
        PlanCache(plan, reaches, causal=causal),
        alone="sdpa" if own == parts.NAME else own,
        layers=parts.attention_configs(body),
        absolute=models.depends_on_places(base),
        left=left,
        **state,
    )
    if left is None:
        converted.convert(body)
        vision.convert(base)
        vars(base).pop("forward", None)  # TRL's fused head; our forward computes the same results
    base.__class__ = _parallel_class(type(base))  # type: ignore[arg-type]
    if left is None:
        base._burst.read = heads.read_by(base)


def unparallelize(model: Model) -> Model:
    """Undo :func:`parallelize`: restore the model's class and attention. Exchanges nothing.

    Args:
        model: the result of :func:`parallelize`, not wrapped. It is modified in place and keeps its weights.

    Returns:
        ``model``, which can be pickled again, by ``torch.save`` for example, unless :func:`tensor_parallel` cut it.

    Raises:
        ValueError: ``model`` is not parallelized.
    """
    base: Any = heads.base_of(model)
    if not isinstance(base, _Parallel):
        why = "that is not parallelized; don't call hf.unparallelize"
        if isinstance(base, nn.Module) and any(isinstance(part, _Parallel) for part in base.modules()):
            why = "around the parallelized model; pass that, such as DDP's model.module"
        raise ValueError(f"model is a {type(base).__name__} {why}")
    spread: Any = base
    alone, left = spread._burst.alone, spread._burst.left
    revert(spread, vision.Seam)
    revert(vision.text_of(spread), Converted)
    unsave(vision.text_of(spread))
    del spread._burst
    spread.__class__ = spread.stock_class
    if left is None:
        _switch(spread, alone)
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
    if own is not None and not (stub_forward.is_of_class(base, own) or stub_forward.is_fused_by_trl(base, own)):
        raise ValueError(
            f"model has the forward {getattr(own, '__qualname__', own)} in place of its class's forward, and it would "
            "be lost; parallelize the model before you replace its forward"
        )
    tensor_axis.check_cut(base)
    if plan.world > 1:
        models.check_parts(base, vision.text_of(base), plan.layout)
        parts.check_hooks(base, root=False)
    left = untouched.reason_of(base) if plan.world == 1 else None
    form = _form_of(base) if left is None else untouched.form_of(base)
    tuner = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if tuner in _TUNERS:
        raise ValueError(f"model is tuned by PEFT's {_TUNERS[tuner]}; use LoRA, prompt tuning or P-tuning")
    if not isinstance(memory, Memory):
        raise TypeError(f"memory={memory!r} must be a burst_attention.integrations.hf.Memory")
    cut = tensor_axis.cut_of(base)
    if cut is not None and cut.by_context:
        ranks = [dist.get_rank()] if plan.world == 1 else dist.get_process_group_ranks(plan.transport.group)
        tensor_axis.check_contexts(cut, ranks, memory.mlp_chunks)
    if left is not None:
        untouched.check_memory(left, memory)
        untouched.warn(left)
    return left, form


def _form_of(model: Any) -> LogitForm | None:
    """Return the form of the logits; None where the head gets whole sequences: classifiers, encoders, nested heads."""
    causal = models.check_causal(model)  # raises if layers differ
    if type(model).__name__.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None
    if stub_forward.is_stock(model) and (heads.is_nested(model) or not causal):
        return None
    if stub_forward.has_stock_forward(model):
        try:
            return heads.find_form(model)
        except heads.ChangedError:
            return None  # layers between body and head (ELECTRA, ModernBERT's decoder)
    heads.check_untouched(model)
    return LogitForm()  # a placeholder: a custom forward computes its logits itself


@dataclass(eq=False)
class _Context:
    """The state of a parallelized model."""

    plans: PlanCache
    meeting: Meeting  # of all ranks that share a sequence, and those that share its tokens
    form: LogitForm | None  # None: the model's head gets the hidden states of whole sequences
    gradients: Gradients
    temperature: float
    memory: Memory
    alone: str  # the attention implementation for a single rank, used by generate
    layers: list[Any]  # the configurations from which the layers read their attention implementation
    absolute: bool  # whether absolute positions matter, not only distances
    left: str | None  # why the model, on one rank, stays as it is; None: it runs on shards
    generating: bool = field(default=False, init=False)
    compared: bool = field(default=False, init=False)  # whether the ranks have compared their weights
    right: parts.Watched | None = field(default=None, init=False)  # the parts as of the last check
    read: Snapshot | None = field(default=None, init=False)  # what ``form``, ``plans`` and ``absolute`` follow from
    settings: Settings | None = field(default=None, init=False)  # of these parts; None without other ranks
    copies: int = field(default=0, init=False)  # of this model
    fit: cached.Fit | None = field(default=None, init=False)  # of a running ``generate``
    passed: str | None = field(default=None, init=False)  # the keyword of a running ``generate``'s cache over ranks
    warned: bool = field(default=False, init=False)  # of a batch without labels
    tables: dict[str, int] = field(default_factory=dict, init=False)  # how many values an input may have, by name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Context:
        """Copy the layers' configurations; share the rest, because a process group can't be copied."""
        self.copies += 1
        own = self.meeting.of_model(f"{self.meeting.outer.model}.{self.copies}")  # a copy is another model
        return replace(self, layers=copy.deepcopy(self.layers, memo), meeting=own)

    def check_parts(self, model: Any) -> None:
        """Check what was attached or changed since the last call, and derive anew what follows from it."""
        self._derive(model)
        if self.right is not None and self.right.unchanged():
            return
        body, over_ranks, cut = vision.text_of(model), self.plans.base.world > 1, self.meeting.inner is not None
        converted.convert(body)
        self.memory.check(body)
        if over_ranks or cut:
            parts.check_random(model, body)
            parts.check_hooks(body)
        elif self.memory != Memory():
            parts.check_random(body)
        if over_ranks:
            parts.check_structure(body)
            parts.check_rotary(body)
            if self.gradients == "sum":
                parts.check_added_losses(body)
            self.layers = parts.attention_configs(body)
        if cut:
            tensor_axis.check_attached(body)
        parts.check_attention_is_ours(body)
        if self.form is not None:
            heads.check_untouched(model)
        self.tables = arguments.tables_of(body)
        self.right, self.settings = parts.Watched(model), None if self.meeting.alone else Settings(model)

    def _derive(self, model: Any) -> None:
        """Derive what follows from the configurations and attributes of the model, unless they are as before."""
        if self.read is not None and self.read.unchanged():
            return
        causal = models.check_causal(model)
        if causal != self.plans.causal:
            raise ValueError(
                f"the attention of {type(model).__name__} was causal={self.plans.causal} in hf.parallelize, and is "
                f"causal={causal} now; undo the change, or call hf.unparallelize(model) and hf.parallelize(model) again"
            )
        self.form, self.absolute = _form_of(model), models.depends_on_places(model)
        self.plans = self.plans.with_windows(models.windows_of(model, causal=causal))
        self.read = heads.read_by(model)

    def share(self, whole: Any) -> Any:
        """Return the same value, its gradient scaled for ``gradients``: unscaled, it is a rank's share of a sum."""
        if whole is None or self.gradients == "sum":
            return whole
        return scaled(whole, float(self.plans.base.world))


class _Parallel:
    """Methods that take precedence over those of the model's class."""

    _burst: _Context

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate on each rank separately, without a plan; with a cache over ranks, on all ranks together."""
        generate: Any = super().generate  # type: ignore[misc]
        if self._burst.left is not None:
            untouched.check_call(self._burst.left, kwargs)
            return generate(*args, **kwargs)
        argument = passed(kwargs)
        if argument is not None:
            with cached.generating(self, args, kwargs, argument) as named:
                return generate(*args, **named)
        cached.agree_on_generate(self, args, kwargs)
        with _alone(self):
            return generate(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does. All ranks must call it if weights are sharded or cut; rank 0 writes whole ones."""
        save: Any = super().save_pretrained  # type: ignore[misc]
        asked = inspect.signature(save).bind(save_directory, *args, **kwargs)
        given = asked.arguments
        sharded = any(isinstance(x, DTensor) for x in cast("nn.Module", self).parameters())
        if sharded and given.get("state_dict") is None and not given.get("distributed_checkpoint"):
            first = dist.get_rank() == 0
            given["state_dict"] = tensor_axis.whole_state(cast("nn.Module", self), keep=first)
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
    """Return a subclass under the class's name, which model cards, checkpoints and trainers read."""

    @functools.wraps(kind.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._burst.left is not None:
            untouched.check_call(self._burst.left, kwargs)
        if self._burst.generating or self._burst.left is not None:
            return kind.forward(self, *args, **kwargs)
        if passed(kwargs) is not None:
            return cached.forward(self, args, kwargs)
        agreed = call.agreed(self, args, kwargs)
        if agreed.own:
            return around(self, lambda: call.run_body(self, agreed), agreed)
        return answer(self, call.run_body(self, agreed), agreed)

    members = {"forward": forward, "stock_class": kind}
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__")}
    return type(kind.__name__, (_Parallel, kind), members | named)


@contextmanager
def _alone(model: Any) -> Any:
    """Run the model on this rank alone, with its original attention, inside this context."""
    model._burst.generating = True
    _switch(model, model._burst.alone)
    try:
        with running():
            yield
    finally:
        _switch(model, parts.NAME)
        model._burst.generating = False


def _switch(model: Any, implementation: str) -> None:
    """Switch all layers to an attention, including layers with a copy of the model's configuration."""
    text = vision.text_of(model)
    (model if vision.language_model_of(model) is None else text).set_attn_implementation(implementation)
    for config in parts.attention_configs(text):
        config._attn_implementation = implementation


def ahead(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches; while a step runs, a thread plans for the next batch, whose documents may be new.

    Without it, the model's forward does this first: for packed documents it takes up to half a second.

    Args:
        model: a parallelized model, or a wrapper of one, such as DDP.
        batches: mappings of the model's arguments, such as a DataLoader's.

    Raises:
        TypeError: no part of ``model`` is parallelized.
    """
    spread = next((each for each in model.modules() if isinstance(each, _Parallel)), None)
    if spread is None:
        raise TypeError(f"model is a {type(model).__name__} without a parallelized part; call hf.parallelize first")
    waiting: list[Batch] = []
    for batch in batches:
        with suppress(TypeError, ValueError):  # the model's forward raises it, on every rank
            named = (*arguments.BATCH, *arguments.TOKENS)
            rows = call.rows_for(spread, {name: batch[name] for name in named if batch.get(name) is not None})
            spread._burst.plans.ahead(rows.input_ids.shape[1], rows.cu_seqlens)
        if waiting:
            yield waiting.pop()
        waiting.append(batch)
    yield from waiting
