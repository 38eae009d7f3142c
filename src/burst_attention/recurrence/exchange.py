"""What a rank's runs need of other ranks: the state before each run, and the last tokens before it.

Over a run a linear recurrence is affine in the state S before it: S' = M S + U. Each rank computes (M, U) of its runs
from a zero state. A scan over the runs of each document then gives the state before every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention.passes import check_batches, check_transforms, differentiable_once
from ..attention.plan import Plan
from ..comm.transport import Receive, Send, Transport
from ..kernels.contract import accumulation_dtype
from .runs import Borders, Runs, runs_of

LAYER = "a recurrent layer"  # the name of its calls in agreements
Pair = tuple[Tensor | None, Tensor]  # (M, U); M is None if nothing comes before, so that U is a state


@dataclass
class Past:
    """What a recurrent layer keeps of all tokens so far, equal on all ranks. None before the first token.

    ``columns``: [B, C, k], the last inputs of its convolution of width k; zeros before the first token.
    """

    columns: Tensor | None = None
    state: Tensor | None = None


class RunExchange:
    """Exchanges states and borders between the ranks of a plan. ``own``: this rank's runs, in local order.

    ``past``: what the layer keeps of earlier tokens, which a call replaces. The tokens are then one document that goes
    on, without a gradient. Raises ValueError on every rank for a layout that separates neighbours, or a plan with
    ``keys``.
    """

    def __init__(self, plan: Plan, *, past: Past | None = None) -> None:
        layout = plan.schedule.layout
        with plan.agreement.entering(LAYER, once=True):
            if plan.schedule.keys is not None and past is None:
                raise ValueError(
                    "a recurrent layer can't use a plan with keys: its state of the earlier tokens is unknown; use a "
                    "plan of the whole sequence"
                )
            self.runs = runs_of(layout, plan.mask.cu_seqlens if past is None else None, plan.rank)
        self.own = [self.runs.every[n] for n in self.runs.own]
        if past is not None:
            continues = past.columns is not None or past.state is not None
            self.own = [replace(run, start=run.start - continues, stop=run.stop + 1) for run in self.own]
        self._plan, self._past, self._start = plan, past, layout.start

    def before(self, x: Tensor, width: int) -> Tensor:
        """Return the ``width`` tokens before each own run [own runs, width, ...], zeros before a document."""
        if not self.runs.chains and self._past is None:
            return x.new_zeros(len(self.own), width, *x.shape[1:])
        call = self._agreed("tokens before a convolution", x, {"shape": list(x.shape[1:]), "width": width})
        with call.failing():
            borders = self.runs.borders(width)
            rows: Tensor = _Before.apply(x.index_select(0, _at(borders.rows, x)), len(self.own) * width, borders, call)
            before = rows.unflatten(0, (len(self.own), width))
            if self._past is not None:
                self._past.columns = self._last_columns(x, before, self._past.columns)
        return before

    def states(
        self, pairs: Sequence[tuple[Tensor, Tensor]], zero: Tensor, factor_shape: Sequence[int], *, diagonal: bool
    ) -> list[Tensor]:
        """Return the state before each own run, from (M, U) of own runs that are not the last of their document.

        ``zero``: the state at a document's start. If states need a gradient it must require one, even on a rank
        without pairs. ``diagonal``: M S multiplies by elements; otherwise it is a matrix product.
        """
        if not self.runs.chains and self._past is None:
            return [zero for _ in self.own]
        shapes = {"shape": list(zero.shape), "factor": list(factor_shape)}
        scan = _Scan(self._agreed("recurrent states", zero, shapes), tuple(factor_shape), tuple(zero.shape), diagonal)
        with no_autocast(zero), scan.call.failing():
            return self._scanned(scan, pairs, zero)

    def _scanned(self, scan: _Scan, pairs: Sequence[tuple[Tensor, Tensor]], zero: Tensor) -> list[Tensor]:
        """Return the state before each own run, as :meth:`states` does."""
        runs, past = self.runs, self._past
        going_on = (n for n, run in zip(runs.own, self.own, strict=True) if not run.ends)
        exact = [(factor.to(zero.dtype), state.to(zero.dtype)) for factor, state in pairs]
        scans = dict(zip(going_on, exact, strict=True))
        after = {n: state for n, (_, state) in scans.items()}
        if past is not None and past.state is not None:
            zero = past.state.to(zero.dtype)
            after |= {0: scan.joined(scans[0], (None, zero))[1]} if 0 in scans else {}
        factors = (scans[n][0] for n in runs.inner)
        *states, anchor = _States.apply(zero, scan, *(after[n] for n in runs.givers), *factors)
        # Zero, but connected to the scan: its backward exchanges messages, so every rank must run it.
        origin, states_of = zero + anchor.sum(), dict(zip(runs.takers, states, strict=True))
        if past is not None:
            last = len(runs.every) - 1
            whole = scan.joined(scans[last], (None, states_of.get(last, origin)))[1] if last in scans else zero
            past.state = self._from_last(whole, "the state behind the last token")
        return [states_of.get(n, origin) for n in runs.own]

    def _last_columns(self, x: Tensor, before: Tensor, earlier: Tensor | None) -> Tensor:
        """Fill in the earlier tokens before the first runs; return the last of all, [B, C, width + 1]."""
        width, last = before.shape[1], len(self.runs.every) - 1
        for row, run in zip(before, self.own, strict=True):
            missing = max(0, width - (run.first - self._start))
            if earlier is not None and missing:
                row[:missing] = earlier.movedim(2, 0)[1 + width - missing :]
        columns = x.new_empty(width + 1, *x.shape[1:])
        if last in self.runs.own:
            at = self.runs.own.index(last)
            columns = torch.cat([before[at], x[self.own[at].local]])[-width - 1 :]
        return self._from_last(columns, "the last tokens of a convolution").movedim(0, 2)

    def _from_last(self, x: Tensor, name: str) -> Tensor:
        """Return ``x`` of the rank with the last token, on every rank. Others pass a tensor of its shape and dtype."""
        transport, owner = self._plan.transport, self.runs.every[-1].owner
        if transport.rank == owner:
            x = x.contiguous()
            sends = [Send(peer, x) for peer in range(transport.world) if peer != owner]
            transport.wait(transport.post(sends, [], label=name))
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        transport.wait(transport.post([], [Receive(owner, out)], label=name))
        return out

    def _agreed(self, name: str, x: Tensor, fields: Mapping[str, Any]) -> _Exchange:
        plan = self._plan
        with plan.agreement.entering(LAYER, once=True):
            check_transforms(name, x=x)
            plan.transport.check_device(x.device)
            wanted = x.requires_grad and torch.is_grad_enabled()
            fields = {
                "exchange": name,
                **fields,
                "dtype": str(x.dtype),
                "gradient wanted": wanted,
                "runs": self.runs.description,
            }
        plan.agreement.agree(LAYER, fields, once=True)
        return _Exchange(name, self.runs, plan.transport, plan.transport.health.next_call())


@dataclass(frozen=True, eq=False)
class _Exchange:
    name: str
    runs: Runs
    transport: Transport
    number: int  # marks the messages of one direction

    def backward(self, *grads: Tensor) -> _Exchange:
        """Check the gradients, and return the exchange of the backward."""
        name = f"the backward of {self.name}"
        check_transforms(name, **{f"gradient {n}": grad for n, grad in enumerate(grads)})
        check_batches(name, *grads)
        return replace(self, number=self.transport.health.note_backward(self.number))

    def failing(self) -> AbstractContextManager[None]:
        """Mark the group as failed if the block raises. The ranks have agreed, so they wait for its messages."""
        return self.transport.health.failing(self.name)


@dataclass(frozen=True, eq=False)
class _Scan:
    """A scan over the runs of every document, in either direction."""

    call: _Exchange
    factor_shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    diagonal: bool

    def __call__(self, own: Mapping[int, Pair], like: Tensor, *, reverse: bool) -> dict[int, Tensor]:
        """Return the state before each own run but a document's first, by index in ``Runs.every``."""
        runs, transport = self.call.runs, self.call.transport
        before: dict[int, Pair] = {}
        for number, moves in enumerate(runs.rounds[reverse]):
            sends, receives, arriving = [], [], {}
            leaving = {n: self.joined(own[n], before.get(n)) for n in {m.source for m in moves} & own.keys()}
            for move in moves:
                source, target = runs.every[move.source].owner, runs.every[move.target].owner
                if source == target == runs.rank:
                    arriving[move.target] = leaving[move.source]
                elif source == runs.rank:
                    sends += [Send(target, x.contiguous()) for x in leaving[move.source] if x is not None]
                elif target == runs.rank:
                    factor = like.new_empty(self.factor_shape) if move.whole else None
                    arriving[move.target] = factor, like.new_empty(self.state_shape)
                    receives += [Receive(source, x) for x in arriving[move.target] if x is not None]
            label = f"{self.call.name}, {'backward' if reverse else 'forward'}, round {number}"
            transport.wait(transport.post(sends, receives, label=label, call=self.call.number))
            before |= {n: self.joined(before[n], pair) if n in before else pair for n, pair in arriving.items()}
        return {n: state for n, (_, state) in before.items()}

    def joined(self, late: Pair, early: Pair | None) -> Pair:
        """Return the pair of two stretches, one behind the other: M = M_late M_early, U = M_late U_early + U_late."""
        factor, state = late
        if early is None or factor is None:
            return late
        return None if early[0] is None else self.times(factor, early[0]), self.times(factor, early[1]) + state

    def times(self, factor: Tensor, x: Tensor) -> Tensor:
        return factor * x if self.diagonal else factor @ x

    def transposed(self, factor: Tensor) -> Tensor:
        return factor if self.diagonal else factor.mT


class _States(torch.autograd.Function):
    """Ledger. in U_j of the own runs j whose document goes on, then M_j of those among them that don't begin it; out
    S_j before each own run that doesn't begin its document, then an empty tensor; saved M_j and S_j.

    forward S_{j+1} = M_j S_j + U_j, with M S = 0 at a document's start.
    back    dU_j = L_{j+1} and dM_j = L_{j+1} S_j^T (diagonal: the product by elements, summed to M's shape), where
            L_j = G_j + M_j^T L_{j+1} and G_j is the gradient of S_j. This is the same scan from the last run to the
            first, of the pairs (M_j^T, G_j).
    """

    @staticmethod
    def forward(ctx: Any, zero: Tensor, scan: _Scan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the states; the empty tensor connects a rank that takes none."""
        ctx.scan, runs = scan, scan.call.runs
        factors: dict[int, Tensor] = dict(zip(runs.inner, tensors[len(runs.givers) :], strict=True))
        pairs: dict[int, Pair] = {n: (factors.get(n), x) for n, x in zip(runs.givers, tensors, strict=False)}
        states = scan(pairs, zero, reverse=False)
        ctx.save_for_backward(*factors.values(), *(states[n] for n in runs.inner))
        return *(states[n] for n in runs.takers), zero.new_zeros(0)

    @staticmethod
    @differentiable_once("recurrent states")
    def backward(ctx: Any, saved: list[Tensor], *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scan the gradients from the last run to the first."""
        scan: _Scan = replace(ctx.scan, call=ctx.scan.call.backward(*grads))
        runs = scan.call.runs
        factors = dict(zip(runs.inner, saved, strict=False))
        states = dict(zip(runs.inner, saved[len(runs.inner) :], strict=True))
        pairs: dict[int, Pair] = {
            n: (scan.transposed(factors[n]) if n in factors else None, grad)
            for n, grad in zip(runs.takers, grads, strict=False)
        }
        with no_autocast(grads[-1]), scan.call.failing():
            later = scan(pairs, grads[-1], reverse=True)
            of_factors = [
                (later[n] * states[n]).sum_to_size(factors[n].shape) if scan.diagonal else later[n] @ states[n].mT
                for n in runs.inner
            ]
        return None, None, *(later[n] for n in runs.givers), *of_factors


class _Before(torch.autograd.Function):
    """Ledger. in the own tokens that some run needs; out the tokens before each own run, zeros before a document;
    saved nothing.

    back    dx of a token = the sum of the gradients of all runs that it was given to, in the order of their ranks, in
            the accumulation dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: int, borders: Borders, call: _Exchange) -> Tensor:
        """Send each rank the tokens that it needs."""
        ctx.borders, ctx.call = borders, call
        out = x.new_zeros(places, *x.shape[1:])
        leaving = [x.index_select(0, _at(rows, x)) for rows in borders.sends]
        for at, part in zip(borders.places, _all_to_all(leaving, borders.places, call, "forward"), strict=True):
            out.index_copy_(0, _at(at, out), part)
        return out

    @staticmethod
    @differentiable_once("tokens before a convolution")
    def backward(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send each token's gradients to its owner, which sums them."""
        borders, call = ctx.borders, ctx.call.backward(grad)
        with call.failing():
            leaving = [grad.index_select(0, _at(at, grad)) for at in borders.places]
            total = grad.new_zeros(len(borders.rows), *grad.shape[1:], dtype=accumulation_dtype(grad.dtype))
            for rows, part in zip(borders.sends, _all_to_all(leaving, borders.sends, call, "backward"), strict=True):
                total.index_add_(0, _at(rows, grad), part.to(total.dtype))
        return total.to(grad.dtype), None, None, None


def _at(rows: Sequence[int], like: Tensor) -> Tensor:
    """Return row numbers on a tensor's device. The host doesn't wait for the copy."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)


def _all_to_all(leaving: list[Tensor], expected: Sequence[Sequence[int]], call: _Exchange, phase: str) -> list[Tensor]:
    """Send ``leaving[r]`` to each rank r; return what each rank r sent here, as many rows as ``expected[r]``."""
    rows = [len(each) for each in expected]
    return call.transport.all_to_all(leaving, rows, label=f"{call.name}, {phase}", call=call.number)


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which products keep the dtype of their factors. States are sent and summed in that dtype."""
    return torch.autocast(x.device.type, enabled=False)
