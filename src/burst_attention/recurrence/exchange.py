"""What a rank's runs need of other ranks: the state before each run, and the last tokens before it.

Over a run a linear recurrence is affine in the state S before it: S' = M S + U. Each rank computes (M, U) of its runs
from a zero state. Ranks gather these pairs, and each folds those before its runs, in the order of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention.plan import Plan
from ..attention.unshard import unshard
from .runs import GivenRows, runs_of


class RunExchange:
    """Exchanges states and borders between the ranks of a plan.

    Attributes:
        runs: this rank's runs and all others.

    Raises:
        ValueError: the plan's layout separates neighbouring tokens; on every rank.
    """

    def __init__(self, plan: Plan) -> None:
        with plan.agreement.entering("a recurrent layer"):
            self.runs = runs_of(plan.schedule.layout, plan.mask.cu_seqlens, plan.rank)
        self._plan = plan

    def gather(self, own: Tensor, rows: GivenRows) -> Tensor:
        """Return the rows [N, ...] of all ranks from this rank's [n, ...]. Gradients are summed over the ranks."""
        return unshard(own, 0, "sum", rows, self._plan.transport, self._plan.agreement)

    def before(self, x: Tensor, width: int) -> list[Tensor]:
        """Return the ``width`` tokens before each own run, zeros before a document.

        Args:
            x: [S_local, ...], this rank's tokens.
            width: number of tokens, at least 1.

        Returns:
            A tensor [width, ...] for each own run.
        """
        rows, own, indices = self.runs.borders(width)
        every = self.gather(x[own], rows)
        every = torch.cat([every, x.new_zeros(1, *x.shape[1:])])
        return [every[index] for index in indices]

    def states(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        zero: Tensor,
        factor_shape: Sequence[int],
        advance: Callable[[Tensor, Tensor], Tensor],
    ) -> list[Tensor]:
        """Return the state before each own run.

        Args:
            pairs: (M, U) of the own runs that are not the last of their document, in local order.
            zero: the state at the start of a document, in the dtype in which states are summed. If states need a
                gradient, it must require one, even on a rank without pairs: all ranks run the gather's backward.
            factor_shape: the shape of M.
            advance: returns M S for M and S.
        """
        runs, rows = self.runs, self.runs.pairs
        if not rows.seqlen:
            return [zero for _ in runs.own]
        size, givers = math.prod(factor_shape), [run for run in runs.own if not run.ends]
        flat = {
            run.first: torch.cat([x.to(zero.dtype).flatten() for x in pair])
            for run, pair in zip(givers, pairs, strict=True)
        }
        own = torch.stack([flat[first] for first in sorted(flat)]) if flat else zero.new_zeros(0, size + zero.numel())
        every = self.gather(own + zero.flatten()[:0].sum(), rows)
        # Zero, but connected to the gather: its backward exchanges messages, so every rank must run it.
        state = origin = zero + every[:0].sum()
        found, given = {}, iter(every)
        for run in runs.every:
            before = origin if run.begins else state
            found[run.first] = before
            if not run.ends:
                pair = next(given)
                state = advance(pair[:size].view(*factor_shape), before) + pair[size:].view(zero.shape)
        return [found[run.first] for run in runs.own]
