"""Attention to chosen keys, and the choice: passes in which keys circulate, whose kernels take another time.

Bytes are those of any pass, from the rows' shape (:class:`~burst_attention.plan.indexed.Indexed`). A choice scores all
pairs. The attention computes with the chosen ones, which are predicted as if they were spread evenly over the keys that
a query sees. A visit's arrays are as wide as its fullest query needs, so the other queries' are computed in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ..plan.assignment import KEYS_CIRCULATE, circulating
from ..plan.cost import Shape
from ..plan.groups import WHOLE
from ..plan.indexed import DENSE, SCORE_ROWS, Indexed
from ..plan.route import ROUTES
from ..plan.rows import Direction, Side
from .passes import Estimate, PassModel
from .rates import ChosenKernels
from .timing import Wire
from .traffic import TrafficModel

SAMPLES = 33  # rows of a shard of which chosen keys are counted
BEYOND = 3.0  # standard deviations: by which the fullest of many queries has more keys in a shard than the mean
WIDE = 4  # bytes of an element that a kernel computes with


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexedPass(PassModel):
    """A pass of an indexed attention over direct routes."""

    call: Indexed

    @property
    def kernels(self) -> ChosenKernels:
        """The kernels' rates; ValueError if they are unknown."""
        rates = self.wire.rates
        if rates.chosen is None:
            raise ValueError(
                f"--hardware {rates.name}: these rates don't say how fast chosen keys are found and attended to; "
                "measure them with burst calibrate"
            )
        return rates.chosen

    def _launches(self) -> Estimate:
        """As for any pass, but a visit's operators are few whatever its tiles."""
        launches, *others = super()._launches()
        return 0 * launches, *others  # type: ignore[return-value]


class ChoicePass(IndexedPass):
    """The choice: scores of all visible pairs, of which each query keeps the best."""

    @property
    def _cell_seconds(self) -> np.ndarray:
        kernels, call = self.kernels, self.call
        a_pair = call.index_heads * 2 * call.index_dim / kernels.score
        a_pair += call.index_heads / kernels.pool if call.block else 1 / kernels.keep
        seconds: np.ndarray = self.traffic.computed(self.groups, SCORE_ROWS) * self.shape.batch * a_pair
        return seconds

    def _fold_seconds(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Seconds in which two choices become one; the first of a query is taken as it is."""
        call = self.call
        kept = call.index_heads * call.count // call.block if call.block else call.count
        later = queries.copy()
        later[..., 0] = 0
        return later * self.shape.batch * 2 * kept / self.kernels.keep


class ChosenPass(IndexedPass):
    """The attention to chosen keys."""

    @property
    def _cell_seconds(self) -> np.ndarray:
        shape, call, kernels = self.shape, self.call, self.kernels
        forward = self.direction is Direction.FORWARD
        rows, keys = (self.traffic.pairs.rows[side] for side in Side)
        width, groups = self._width, shape.q_heads // shape.kv_heads
        products = (1, 1) if forward else (3, 2)
        flops = 2 * groups * (products[0] * shape.head_dim + products[1] * shape.v_head_dim)
        way = "forward" if forward else "backward"
        gather, by_rows, by_all = (getattr(kernels, f"{what}_{way}") for what in ("gather", "rows", "dense"))
        gathered = width * (shape.key_width * WIDE / gather + flops / by_rows)
        few = keys <= DENSE / groups * width
        choices = shape.kv_heads if call.block else 1
        each = shape.kv_heads * np.where(few, keys * flops / by_all, gathered) + choices * call.count / kernels.look
        seconds: np.ndarray = shape.batch * rows * each
        return seconds

    @cached_property
    def _width(self) -> np.ndarray:
        """Keys that the fullest query of each pair of shards has chosen there, [N]."""
        traffic, call = self.traffic, self.call
        owner, other, _, q0, q1, k0, k1, lo, hi = traffic.table.T
        places = np.linspace(0, np.maximum(0, traffic.lengths[Side.QUERY] - 1), SAMPLES).round().astype(np.int64).T
        row = places[owner] - q0[:, None]
        inside = (row >= 0) & (row < (q1 - q0)[:, None])
        first, last = np.maximum(0, row - hi[:, None]), np.minimum((k1 - k0)[:, None] - 1, row - lo[:, None])
        visible = np.where(inside, np.maximum(0, last - first + 1), 0)
        seen = np.zeros(places.shape)
        np.add.at(seen, owner, visible)
        code, at = np.unique(owner * traffic.parts + other, return_inverse=True)
        here = np.zeros((len(code), SAMPLES))
        np.add.at(here, at, visible)
        share = here / np.maximum(1, seen[code // traffic.parts])
        unit = call.block or 1
        units = np.minimum(seen[code // traffic.parts], call.count) / unit
        more = BEYOND * unit * np.sqrt(units * share * (1 - share))
        count = np.minimum(np.minimum(call.count, here), units * unit * share + more)
        width: np.ndarray = count.max(1)
        return width


def indexed_passes(traffic: TrafficModel, call: Indexed, like: Shape, wire: Wire) -> list[IndexedPass]:
    """Return the choice, if the layer makes one, the forward and the backward of the attention."""

    def pass_of(kind: type[IndexedPass], direction: Direction, shape: Shape) -> IndexedPass:
        cube = circulating(KEYS_CIRCULATE, direction, WHOLE, traffic.world)
        spread = traffic.layout, traffic.regions, cube, WHOLE, ROUTES["direct"], direction, traffic.keys
        return kind(*spread, whole=traffic, shape=shape, wire=wire, call=call)

    choice = [pass_of(ChoicePass, Direction.FORWARD, call.choice(like))] if call.chooses else []
    attention = (pass_of(ChosenPass, direction, call.attention(like)) for direction in Direction)
    return [*chain(choice, attention)]
