"""What ``state.json`` of a checkpoint holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..checked import Checked, Format, Natural
from ..data.cursor import Position
from .generators import Generators

Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32"]  # safetensors' names
Size = Annotated[int, Field(ge=0, lt=2**63)]
Shape = tuple[Size, ...]


class TensorEntry(Checked):
    """A whole tensor."""

    dtype: Dtype
    shape: Shape


class Group(Checked, extra="ignore"):
    """A parameter group of AdamW. Its learning rate follows from the schedule."""

    parameters: list[str]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    initial_lr: float


class Optimizer(Checked):
    """The optimizer, without its moments. ``fewer``: steps of the parameters that took fewer, by name."""

    name: str
    steps: float
    groups: list[Group]
    fewer: dict[str, float] = Field(default_factory=dict)


class Schedule(Checked, extra="ignore"):
    """The position of the learning-rate schedule; the rate is recomputed."""

    last_epoch: Natural


class Losses(Checked):
    """Training losses of the first and the last step; the held-out loss after it, if measured."""

    first: float
    last: float
    held_out: float | None = None


class State(Checked, extra="ignore"):
    """Everything of a run but its tensors; ``generators`` by rank, ``config`` by section."""

    format: Format
    step: Natural
    tensors: dict[str, TensorEntry]
    config: dict[str, dict[str, Any]]
    model: dict[str, Any]
    generation: dict[str, Any] | None = None
    optimizer: Optimizer
    schedule: Schedule
    generators: list[Generators]
    cursor: Position
    losses: Losses
    rates: dict[str, Any] | None = None  # by which the run's calls were planned; None until 0.3
