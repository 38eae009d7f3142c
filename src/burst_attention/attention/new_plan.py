"""make_plan: check the arguments on all ranks, find rates, and choose a plan."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from ..comm.agreement import Agreement
from ..comm.link import connect, resolve_group, resolve_timeout
from ..comm.local import LocalGroup
from ..comm.transport import Transport
from ..plan.layout import Layout
from ..plan.mask import Mask
from ..plan.schedule import Schedule
from ..plan.strategy import Strategy, strategy_of
from ..planner.planner import Planner
from ..planner.rates import MeasuredOn, Rates
from .hardware import (
    CallShape,
    Hardware,
    RatesGiven,
    carries_gpus,
    checked_kinds,
    known_rates,
    known_shape,
    resolve_nodes,
    this_machine,
    usual_rates,
)
from .plan import MOST_TOKENS, Plan, Usage, check_seqlen
from .probe import measured

_OF_CALL = ("q_heads", "kv_heads", "head_dim")
_SAME_CALL = "Pass equal calls, or models of one configuration and one dtype, on every rank of the group"
_REMEDIES = dict.fromkeys(("call.dtype", *(f"call.{name}" for name in _OF_CALL)), _SAME_CALL)
MOST_SOURCE = 200  # characters of where rates come from, in the record that all ranks get


def make_plan(
    seqlen: int,
    *,
    mask: Mask | None = None,
    keys: Plan | Layout | Sequence[Sequence[tuple[int, int] | range]] | None = None,
    query_offset: int = 0,
    strategy: Strategy | str | None = None,
    call: CallShape | None = None,
    hardware: Hardware | None = None,
    group: Any = None,
    timeout: float | timedelta | None = None,
) -> Plan:
    """Plan exact attention over ``seqlen`` tokens. Every rank of the group must call it, with equal arguments.

    The planner chooses what the strategy leaves open, by predicted time, the same way on all ranks.
    :meth:`Plan.explain` prints the choice and the reason.

    Args:
        seqlen: tokens of the whole sequence, at least 0; it need not divide by anything.
        mask: which keys each query sees; causal if None. With ``keys`` it covers the positions up to the last query or
            key.
        keys: None: the keys are those of the ``seqlen`` tokens. Otherwise ``seqlen`` counts queries, and their keys lie
            elsewhere: in the shards of another plan (cross-attention), or in each rank's stretches of positions, by
            rank, ascending, such as ``[[(0, 4), (8, 9)], [(4, 8)]]`` (a cache that grows). Positions that no rank holds
            are seen by no query. k and v then have :attr:`Plan.key_length` rows.
        query_offset: the position of the first query. Causal masks, windows and documents compare positions.
        strategy: how to compute it: a :class:`~burst_attention.Strategy`, or a published scheme by name:
            ``burst``, ``ring``, ``zigzag-ring``, ``all-gather``, ``ulysses``, ``usp``, or ``usp:U`` with a Ulysses
            degree U; or fields, such as ``layout=zigzag,ulysses_degree=4``. None: the planner chooses everything.
        call: the calls to expect, as far as they are known: a layout is chosen for them. Other calls work too.
        hardware: how fast kernels and links are, and which ranks share a node. None: measured rates of
            ``burst calibrate`` if they fit, else a preset whose links and kernels the group's first plan measures,
            and keeps in ~/.config/burst-attention/measured; nodes by host name.
        group: a ProcessGroup or a 1-D DeviceMesh. None: the default group, or a single rank if torch.distributed is
            not initialised.
        timeout: seconds (or a timedelta) that an exchange may take before ExchangeError. None: the group's timeout.

    Raises:
        TypeError, ValueError: an argument can't be used, or ranks disagree: the same class on every rank.
    """
    resolved = resolve_group(group)
    transport, agreement = connect(resolved, None)
    rank, world = transport.rank, transport.world
    on_gpus = carries_gpus(resolved)
    with agreement.entering("make_plan"):
        seqlen = check_seqlen(seqlen)
        transport.timeout = agreement.transport.timeout = resolve_timeout(timeout)
        choice = strategy_of(strategy)
        call, hardware = checked_kinds(call, hardware)
        shape, at = known_shape(call), resolve_nodes(hardware.nodes, resolved, world)
        options: dict[str, Any] = {"mask": Mask() if mask is None else mask, "strategy": choice}
        options |= {"rank": rank, "world": world, **check_keys(keys, query_offset)}
        tried = Planner().choose(seqlen, **options)  # before rates are known, to refuse what can't be
        fields = {**tried.description, "layout": choice.layout if choice.layout == "auto" else tried.layout.description}
        fields |= {
            "route": choice.route,
            "remat": call.remat,
            "attention_chunks": call.attention_chunks,
            "grad": call.grad,
            "nodes": at and hashlib.blake2b(repr(at).encode(), digest_size=8).hexdigest(),
            **{f"call.{name}": shape and getattr(shape, name) for name in _OF_CALL},
            "call.dtype": shape and str(call.dtype or torch.bfloat16),
        }
        own = {"host": socket.gethostname(), **(_offered(hardware.rates, world, on_gpus) if rank == 0 else {})}
    first, *others = agreement.agree("make_plan", fields, own, remedies=_REMEDIES)
    names = [each["host"] for each in (first, *others)]
    hosts = [names.index(name) for name in names] if at is None else at
    rates, unsure = Rates.from_dict(first["rates"]), first["guessed"]
    threads = isinstance(resolved, LocalGroup) and len(set(hosts)) == 1  # they share no link, and one interpreter
    if first["measure"] and world > 1 and not threads:
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
        rates = replace(rates, measured_on=MeasuredOn(**first["measure"]))
        rates, unsure = measured(rates, transport, agreement, hosts, device)
    planner = Planner(rates, tuple(hosts), shape, unsure, call.remat, call.attention_chunks, call.grad)
    schedule = _chosen_together(planner, transport, agreement, seqlen, options)
    return Plan(schedule, planner, transport, agreement)


def _offered(source: RatesGiven, world: int, on_gpus: bool) -> dict[str, Any]:
    """Return what rank 0 tells the others about rates; ``measure``: the machine, if it should be measured."""
    own = known_rates(source, on_gpus=on_gpus, world=world)
    machine = asdict(this_machine(world, on_gpus)) if own is None and source is None else None
    rates = (own or usual_rates(on_gpus=on_gpus)).as_dict(most=MOST_SOURCE)
    return {"rates": rates, "guessed": own is None, "measure": machine}


def check_keys(keys: Any, query_offset: Any) -> dict[str, Any]:
    """Return ``make_plan``'s arguments about keys as :meth:`Planner.choose` takes them."""
    if isinstance(query_offset, bool) or not isinstance(query_offset, (int, np.integer)):
        raise TypeError(f"query_offset={query_offset!r} must be an int")
    if not 0 <= query_offset <= MOST_TOKENS:
        raise ValueError(f"query_offset={query_offset} must be at least 0 and at most {MOST_TOKENS:,}")
    if keys is None and query_offset:
        raise ValueError(
            f"query_offset={query_offset} needs keys: the earlier tokens' keys, on the ranks that hold them"
        )
    if isinstance(keys, Plan):
        keys = keys.schedule.layout
    elif keys is not None and not isinstance(keys, Layout):
        if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
            raise TypeError(
                f"keys={keys!r} must be a Plan whose tokens are the keys, or each rank's stretches, such as "
                "[[(0, 4), (8, 9)], [(4, 8)]]"
            )
        keys = Layout.of_stretches(keys)
    return {"keys": keys, "query_offset": int(query_offset)}


def _chosen_together(
    planner: Planner, transport: Transport, agreement: Agreement, seqlen: int, options: Mapping[str, Any]
) -> Schedule:
    """Return the planner's schedule; the ranks divide its simulations and check that they chose the same."""
    failure, exchanging = None, False

    def share(work: Callable[[int, int], Any]) -> list[Any]:
        nonlocal exchanging
        own = work(transport.rank, transport.world)
        exchanging = True
        every = agreement.collect("make_plan's simulations", own)
        exchanging = False
        return every

    try:
        schedule = planner.choose(seqlen, **options, share=share)
    except Exception as error:
        if exchanging:  # all ranks know
            raise
        failure = error
    with agreement.entering("make_plan"):
        if failure is not None:
            raise failure
    agreement.agree("make_plan's choice", {"layout": schedule.layout.name, "route": schedule.route.name})
    return schedule


def single_rank_plan(seqlen: int, *, mask: Mask | None = None, usage: Usage | None = None) -> Plan:
    """Return the plan of a single rank, which holds the whole sequence. Needs no process group, exchanges nothing."""
    planner, strategy = Planner(), Strategy(layout="contiguous", route="direct", ulysses_degree=1)
    schedule = planner.choose(seqlen, mask=Mask() if mask is None else mask, strategy=strategy, rank=0, world=1)
    return Plan(schedule, planner, Transport(None), Agreement(Transport(None)), usage=usage)
