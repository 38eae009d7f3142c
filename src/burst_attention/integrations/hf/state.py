"""The state of a parallelized model, and what of it follows from the model as it is now."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from burst_attention.attention.batch import PlanCache
from burst_attention.comm.agreement import Meeting
from burst_attention.loss import LogitForm

from .call import arguments, heads
from .call.outputs import scaled
from .layers import checks, converted
from .layers.memory import Memory, check_reentrant
from .reading import Reading, attached, forwards, models, read, structure
from .settings import Settings
from .snapshots import Snapshot, Watched
from .tensor import axis

Gradients = Literal["mean", "sum"]


@dataclass(eq=False)
class ModelState:
    """The state of a parallelized model, its attribute ``_burst``."""

    plans: PlanCache
    meeting: Meeting  # of all ranks that share a sequence, and those that share its tokens
    form: LogitForm | None  # None: the model's head gets the hidden states of whole sequences
    gradients: Gradients
    temperature: float
    memory: Memory
    stock_attention: str  # the attention implementation for a single rank, used by generate
    layers: list[Any]  # the configurations from which the layers read their attention implementation
    absolute: bool  # whether absolute positions matter, not only distances
    left: str | None  # why the model, on one rank, stays as it is; None: it runs on shards
    generating: bool = field(default=False, init=False)
    compared: bool = field(default=False, init=False)  # whether the ranks have compared their weights
    right: Watched | None = field(default=None, init=False)  # the parts as of the last check
    read: Snapshot | None = field(default=None, init=False)  # what ``form``, ``plans`` and ``absolute`` follow from
    settings: Settings | None = field(default=None, init=False)  # of these parts; None without other ranks
    copies: int = field(default=0, init=False)  # of this model
    shared: Any = field(default=None, init=False)  # weights of which each rank holds rows; None: whole, or by FSDP2
    fit: Any = field(default=None, init=False)  # what the cache of a running ``generate`` needs of the model
    passed: str | None = field(default=None, init=False)  # the keyword of a running ``generate``'s cache over ranks
    warned: bool = field(default=False, init=False)  # of a batch without labels
    experts: list[Any] = field(default_factory=list, init=False)  # of these parts
    tables: dict[str, int] = field(default_factory=dict, init=False)  # how many values an input may have, by name

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        """Copy the layers' configurations; share the rest, because a process group can't be copied."""
        self.copies += 1
        own = self.meeting.of_model(f"{self.meeting.outer.model}.{self.copies}")  # a copy is another model
        return replace(self, layers=copy.deepcopy(self.layers, memo), meeting=own)

    def check_parts(self, model: Any) -> None:
        """Check what was attached or changed since the last call, and derive again what follows from it."""
        stale, changed = not _holds(self.read), not _holds(self.right)
        if stale or changed:
            reading = read(model)
            if stale:
                self._derive(reading)
            if changed:
                self._check(reading)
        checks.check_experts(self.experts)  # at last: weights may be converted at any time

    def _check(self, reading: Reading) -> None:
        body, over_ranks, cut = reading.text, self.plans.base.world > 1, self.meeting.inner is not None
        converted.convert_body(body)
        self.memory.check(body)
        check_reentrant(body)
        if over_ranks or cut:
            attached.check_random(reading, body)
            attached.check_hooks(body)
        elif self.memory != Memory():
            attached.check_random(body)
        if over_ranks:
            structure.check_structure(body)
            structure.check_rotary(body)
            if self.gradients == "sum":
                structure.check_added_losses(body)
            self.layers = structure.attention_configs(body)
        if cut:
            axis.check_attached(body)
        structure.check_attention_is_ours(body)
        if self.form is not None:
            heads.check_untouched(reading.model)
        self.tables, self.experts = arguments.tables_of(body), checks.experts_of(body)
        self.right, self.settings = Watched(reading), None if self.meeting.alone else Settings(reading)

    def _derive(self, reading: Reading) -> None:
        """Derive what follows from the configurations and attributes of the model."""
        model, causal = reading.model, models.check_causal(reading)
        if causal != self.plans.causal:
            raise ValueError(
                f"the attention of {type(model).__name__} was causal={self.plans.causal} in hf.parallelize, and is "
                f"causal={causal} now; undo the change, or call hf.unparallelize(model) and hf.parallelize(model) again"
            )
        self.form, self.absolute = form_of(reading), models.depends_on_places(reading)
        self.plans = self.plans.with_windows(models.windows_of(model, causal=causal))
        self.read = heads.read_by(model)

    def share(self, whole: Any) -> Any:
        """Return the same value, its gradient scaled for ``gradients``: unscaled, it is a rank's share of a sum."""
        if whole is None or self.gradients == "sum":
            return whole
        return scaled(whole, float(self.plans.base.world))


def _holds(before: Snapshot | Watched | None) -> bool:
    return before is not None and before.unchanged()


def form_of(reading: Reading) -> LogitForm | None:
    """Return the form of the logits; None where the head gets whole sequences: classifiers, encoders, nested heads."""
    model, causal = reading.model, models.check_causal(reading)  # raises if layers differ
    if type(model).__name__.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None
    if forwards.stock_forward(model) is not None and (heads.is_nested(reading) or not causal):
        return None
    if forwards.has_stock_forward(model):
        try:
            return heads.find_form(model)
        except heads.ChangedError:
            return None  # layers between body and head (ELECTRA, ModernBERT's decoder)
    heads.check_untouched(model)
    return LogitForm()  # a placeholder: a custom forward computes its logits itself
