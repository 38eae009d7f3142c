"""Layers whose weights the ranks share by rows: whole for a prompt, never gathered for a step of few tokens.

Of y = x Wᵀ + b, with W [F, E], rank r holds the rows W_r [F_r, E], so it can compute the columns y_r [..., F_r].

    a prompt, x of a shard:     W is gathered with its decoder layer, while the layer before it computes
    a step, x on every rank:    y_r = x W_rᵀ + b_r; each rank sends y_r to all others; y = [y_0, ..., y_W-1]

Sums stay within a rank, so a step rounds as in one process, in any dtype, and all ranks get equal bits. Layers of one
input, such as q, k and v, share an exchange. An embedding's rows are shared too: who has a token's row sends it.
Where only the argmax of logits matters, ranks exchange their greatest ones.

Of a mixture y = Σ_e w_e f_e(x), rank r holds the experts of its rows, with all their weights and biases:

    a prompt, x of a shard:     as above; where rows are read in place, Σ_r over the experts of rank r
    a step, x on every rank:    y_r = Σ w_e f_e(x) over the rank's experts that x chose; y = Σ_r y_r

Both sums are in fp32 (fp64 of fp64), in the order of ranks, and rounded once, so all ranks get equal bits.

The idea of weights by columns beside keys by tokens is Helix's (arXiv 2507.07120, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from burst_attention.attention.batch import weight_samples
from burst_attention.comm.transport import Pending, Receive, Send, Transport
from burst_attention.integrations.hf.classes import become
from burst_attention.integrations.hf.layers.dealt import Step
from burst_attention.integrations.hf.running import RUNNING

from .experts import Weights, add_chosen, sum_dtype, sum_of_parts, using, width_of

ARGMAX_BYTES = 8  # of a rank's greatest logit and its token
TAG = 0xB3  # apart from messages of attention, which a gathering of the next layer runs beside


@dataclass(eq=False)
class Part:
    """What a rank holds of a module's weights."""

    shared: Shared
    name: str
    layer: int | None  # the number of its decoder layer; None: outside of layers
    rows: tuple[range, ...]  # of each whole weight, by rank
    weights: tuple[str, ...] = ("weight",)  # the names of the module's parameters that ranks share
    in_place: list[Weights] | None = None  # those rows, by rank, where this rank can read all of them
    together: list[Any] = field(default_factory=list)  # modules of the same input that this one's step computes too


@dataclass(eq=False)
class _Gathering:
    """Whole weights of a decoder layer, which arrive or have arrived."""

    pending: Pending | None
    weights: dict[Any, Weights]


@dataclass(eq=False)
class Shared:
    """The weights of one model that its ranks share, and their exchanges."""

    transport: Transport
    layers: list[list[Any]]  # the modules of each decoder layer whose weights are shared
    around: list[Any] = field(default_factory=list)  # embedding and head
    filling: bool = False
    in_place: bool = False  # whether a prompt reads the rows of all ranks where they lie
    # (module, name of its parameter, digests of this rank's rows and of the whole), by the weight's name in the model
    _samples: dict[str, tuple[Any, str, str, str]] = field(default_factory=dict)
    _gathered: dict[int, _Gathering] = field(default_factory=dict)
    _unused: list[Tensor] = field(default_factory=list)  # memory of layers that are done
    _lead: Any = None  # the module that computed last in a step, its input, and results that it left for others
    _input: tuple[Tensor, int] | None = None
    _ready: dict[Any, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a model with shared weights can't be copied; load it again")

    @property
    def modules(self) -> list[Any]:
        """The modules whose weights are shared."""
        return [*self.around, *(module for layer in self.layers for module in layer)]

    def share(
        self, module: Any, name: str, layer: int | None, cut: Mapping[str, tuple[nn.Parameter, list[Tensor] | None]]
    ) -> None:
        """Let a module use rows of shared weights from now on. A head keeps its class, which the loss asks for.

        ``cut``: by the names of its parameters, this rank's rows, and those of all ranks where they can be read.
        """
        linear = isinstance(module, nn.Linear)
        if layer is not None or not linear:
            become(module, _Linear if linear else _Embedding if isinstance(module, nn.Embedding) else _Experts)
        weights = {own: weight for own, (weight, _) in cut.items()}
        rows = rows_of(len(next(iter(weights.values()))), self.transport.world)
        every = [of_ranks for _, of_ranks in cut.values() if of_ranks is not None]
        readable = len(every) == len(cut)
        in_place = [dict(zip(cut, of_rank, strict=True)) for of_rank in zip(*every, strict=True)] if readable else None
        vars(module)["burst_part"] = Part(self, name, layer, rows, tuple(weights), in_place)
        module._parameters.update(weights)
        (self.around if layer is None else self.layers[layer]).append(module)

    def keep(self, model: nn.Module, samples: Mapping[str, str]) -> None:
        """Keep the digests of those whole weights that the ranks now share."""
        cut = {module._parameters[own]: (module, own) for module in self.modules for own in module.burst_part.weights}
        owners = {name: cut[x] for name, x in model.named_parameters() if x in cut}
        self._samples = {name: (*owner, "", samples[name]) for name, owner in owners.items()}
        rows = self.rows()
        self._samples = {name: (*owner, rows.get(name, ""), samples[name]) for name, owner in owners.items()}

    def rows(self) -> dict[str, str]:
        """Return digests of this rank's rows of shared weights, if any. No version counts all writes to them."""
        weights = {name: module._parameters[own] for name, (module, own, *_) in self._samples.items()}
        return weight_samples((name, getattr(x, "_local_tensor", x)) for name, x in weights.items())

    def samples(self) -> dict[str, str]:
        """Return the digests of shared weights that have not changed since."""
        rows = self.rows()
        return {name: whole for name, (*_, own, whole) in self._samples.items() if rows.get(name, "") == own}

    def has(self, module: Any) -> bool:
        """Return whether a module's weight is shared."""
        return "burst_part" in vars(module)

    def look_in_place(self) -> bool:
        """Return whether this rank's rows are still where other ranks read them; someone may have assigned others."""
        rank, parts = self.transport.rank, [(module, module.burst_part.in_place) for module in self.modules]
        self.in_place = all(
            rows is not None and all(local(module, own).data_ptr() == x.data_ptr() for own, x in rows[rank].items())
            for module, rows in parts
        )
        return self.in_place

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Gather whole weights inside this context, each layer's when it runs."""
        self.filling = True
        try:
            yield
            for gathering in self._gathered.values():
                self._wait(gathering)
        except BaseException as error:
            if any(each.pending is not None for each in self._gathered.values()):  # messages are on their way
                self.transport.health.fail("a prompt with shared weights", error)
            raise
        finally:
            self.filling = False
            self._gathered, self._unused = {}, []

    def rows_of_all(self, module: Any) -> list[Weights]:
        """Return the rows of a module's weights: by rank if they lie on this host, else those gathered from all."""
        part = module.burst_part
        if not self.filling:
            raise ValueError(
                f"the weight of {part.name} is shared over {self.transport.world} ranks by shard_weights, which serves "
                "generation with a ShardedCache alone; pass cache=ShardedCache(model.config), or load the model again"
            )
        return part.in_place if self.in_place else [self._whole(module)]

    def _whole(self, module: Any) -> Weights:
        """Return the whole weights of a module, and let the next layer's arrive."""
        part = module.burst_part
        if part.layer is None:
            return self._wait(self._gather([module], part.name)).weights[module]
        gathering = self._layer(part.layer)
        if gathering.pending is not None:
            self._wait(gathering)
            for number in [n for n in self._gathered if n not in (part.layer, part.layer + 1)]:
                for weights in self._wait(self._gathered.pop(number)).weights.values():
                    self._unused += weights.values()
            if part.layer + 1 < len(self.layers):
                self._layer(part.layer + 1)
        return gathering.weights[module]

    def _layer(self, number: int) -> _Gathering:
        if number not in self._gathered:
            modules = self.layers[number]
            self._gathered[number] = self._gather(modules, f"the weights of layer {number}")
        return self._gathered[number]

    def _gather(self, modules: Sequence[Any], label: str) -> _Gathering:
        """Start to gather weights: each rank's rows go to their place in the whole."""
        rank, world = self.transport.rank, self.transport.world
        weights, sends, receives = dict[Any, Weights](), list[Send](), list[Receive]()
        for module in modules:
            weights[module], rows = {}, module.burst_part.rows
            for name in module.burst_part.weights:
                own = local(module, name)
                whole = weights[module][name] = self._memory(own, rows[-1].stop)
                whole[rows[rank].start : rows[rank].stop] = own
                for hop in range(1, world):
                    ahead, behind = (rank + hop) % world, (rank - hop) % world
                    sends.append(Send(ahead, own))
                    receives.append(Receive(behind, whole[rows[behind].start : rows[behind].stop]))
        return _Gathering(self.transport.post(sends, receives, label=label), weights)

    def _wait(self, gathering: _Gathering) -> _Gathering:
        if gathering.pending is not None:
            self.transport.wait(gathering.pending)
            gathering.pending = None
        return gathering

    def _memory(self, own: Tensor, rows: int) -> Tensor:
        shape = (rows, *own.shape[1:])
        for n, x in enumerate(self._unused):
            if x.shape == shape and x.dtype == own.dtype:
                return self._unused.pop(n)
        return own.new_empty(shape)

    def product(self, module: Any, x: Tensor) -> Tensor:
        """Return all columns [..., F] of a linear layer, whose input x [..., E] every rank has."""
        version = -1 if x.is_inference() else x._version  # it may be written to in place, which inference mode hides
        same = self._input is not None and self._input[0] is x and self._input[1] == version >= 0
        if same and (out := self._ready.pop(module, None)) is not None:
            return out
        lead, together = self._lead, module.burst_part.together if version >= 0 else []
        if same and lead is not module and module not in lead.burst_part.together:
            lead.burst_part.together.append(module)  # from the next step on, they share an exchange
        modules = [module, *together]
        label = f"a step, the columns of {module.burst_part.name}"
        widths = [sum(map(len, rows)) for rows in zip(*(each.burst_part.rows for each in modules), strict=True)]

        def compute() -> Tensor:
            owns = [F.linear(x, local(each), self._bias(each)) for each in modules]
            return owns[0].contiguous() if len(owns) == 1 else torch.cat(owns, -1)

        parts = self._exchange([x.new_empty(*x.shape[:-1], width) for width in widths], compute, label)
        if len(modules) == 1:
            outs = [torch.cat(parts, -1)]
        else:
            split = [part.split([len(each.burst_part.rows[n]) for each in modules], -1) for n, part in enumerate(parts)]
            outs = [torch.cat(columns, -1) for columns in zip(*split, strict=True)]
        self._lead, self._input = module, (x, version)
        self._ready = dict(zip(together, outs[1:], strict=True))
        return outs[0]

    def _bias(self, module: Any) -> Tensor | None:
        bias, rows = module._parameters["bias"], module.burst_part.rows[self.transport.rank]
        return None if bias is None else bias[rows.start : rows.stop]

    def argmax(self, module: Any, x: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the token with the greatest logit, int64 [...], by a head whose input x [..., E] every rank has.

        ``logits_of`` makes logits of products. As torch.argmax of all logits in fp32: the lowest of equal ones, and NaN
        before any number. Each rank sends the bits of its greatest logit and that token, int32 [..., 2].
        """
        part, rank = module.burst_part, self.transport.rank

        def compute() -> Tensor:
            logits = logits_of(F.linear(x, local(module), self._bias(module))).float()
            place = logits.argmax(-1, keepdim=True)
            return torch.cat([logits.gather(-1, place).view(torch.int32), place.int() + part.rows[rank].start], -1)

        parts = [x.new_empty(*x.shape[:-1], 2, dtype=torch.int32) for _ in part.rows]
        every = self._exchange(parts, compute, f"a step, the argmax of {part.name}")
        greatest, tokens = torch.stack(every, -1).unbind(-2)
        owner = greatest.view(torch.float32).argmax(-1, keepdim=True)
        return tokens.gather(-1, owner).squeeze(-1).long()

    def looked_up(self, module: Any, ids: Tensor) -> Tensor:
        """Return the embeddings [..., E] of ids that every rank has. The rank with a token's row computes it."""
        part, own = module.burst_part, local(module)
        _check_ids(part, ids)
        rows = part.rows[self.transport.rank]
        parts = [own.new_empty(*ids.shape, own.shape[1]) for _ in part.rows]
        self._exchange(parts, lambda: _looked_up(module, ids, rows, own), f"a step, the rows of {part.name}")
        return _of_owners(part, ids, parts)

    def mixed(self, module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sum [n, E] over the experts ``index`` [n, K] of each token, times ``weights`` [n, K].

        Every rank has the same tokens x [n, E]. Ranks compare the experts of each token: rounding may differ where
        processors do, and an expert that each of two ranks leaves to the other would be missing.
        """
        part, sizes, dtype = module.burst_part, (len(x), x.shape[1] + 1), sum_dtype(x)

        def compute() -> Tensor:
            sums, own = x.new_zeros(sizes, dtype=dtype), {name: local(module, name) for name in part.weights}
            add_chosen(sums[:, :-1], module, (x, index, weights), part.rows[self.transport.rank], own)
            sums[:, -1] = index.sum(-1)
            return sums

        empty = [x.new_empty(sizes, dtype=dtype) for _ in part.rows]
        parts = self._exchange(empty, compute, f"a step, the experts of {part.name}")
        out = parts[0]
        for each in parts[1:]:
            if not torch.equal(each[:, -1], parts[0][:, -1]):
                raise RuntimeError(
                    f"{part.name}: ranks chose other experts for a token, because their rounding differs; run all "
                    "ranks on equal processors with equal numbers of threads, or generate with whole weights"
                )
            out = out + each
        return out[:, :-1].to(x.dtype)

    def _exchange(self, parts: list[Tensor], compute: Callable[[], Tensor], label: str) -> list[Tensor]:
        """Fill ``parts`` with what each rank computes, by rank, and return them. A rank receives before it computes."""
        expected = self.transport.expect(parts, label=label)
        try:
            own = parts[self.transport.rank] = compute()
        except BaseException as error:
            self.transport.health.fail(label, error)
            raise
        self.transport.gather(expected, own)
        return parts

    def step_bytes(self, batch: int, *, logits: bool) -> int:
        """Return the bytes that this rank sends in a step of one token a row that calls each module once."""
        rank, count = self.transport.rank, 0
        for module in self.modules:
            part = module.burst_part
            weight, looks_up = module._parameters[part.weights[0]], isinstance(module, nn.Embedding)
            if isinstance(module, _Experts):
                count += (width_of(module) + 1) * sum_dtype(weight).itemsize
            elif logits or looks_up or part.layer is not None:
                count += (weight.shape[1] if looks_up else len(part.rows[rank])) * weight.dtype.itemsize
            else:
                count += ARGMAX_BYTES  # of the head
        return (self.transport.world - 1) * batch * count


class _Linear(nn.Module):
    """A linear layer whose weight is shared."""

    burst_part: Part
    stock_class: Any

    def forward(self, x: Tensor) -> Tensor:
        shared = self.burst_part.shared
        if isinstance(RUNNING.plans, Step):
            if RUNNING.plans.differs():
                raise ValueError(
                    f"{self.burst_part.name} gets keys of the cache, which differ between ranks; generate with whole "
                    "weights"
                )
            return shared.product(self, x)
        bias, parts = self._parameters["bias"], shared.rows_of_all(self)
        if len(parts) == 1:
            return F.linear(x, parts[0]["weight"], bias)
        flat = x.reshape(-1, x.shape[-1])
        out = flat.new_empty(len(flat), self.burst_part.rows[-1].stop)
        for rows, own in zip(self.burst_part.rows, parts, strict=True):
            weight, columns = own["weight"], out[:, rows.start : rows.stop]  # the product goes there, without a copy
            if bias is None:
                torch.mm(flat, weight.t(), out=columns)
            else:
                torch.addmm(bias[rows.start : rows.stop], flat, weight.t(), out=columns)
        return out.view(*x.shape[:-1], -1)


class _Embedding(nn.Module):
    """An embedding whose weight is shared; it may scale what it looks up."""

    burst_part: Part
    stock_class: Any

    def forward(self, ids: Tensor) -> Tensor:
        shared = self.burst_part.shared
        if isinstance(RUNNING.plans, Step):
            return shared.looked_up(self, ids)
        parts = shared.rows_of_all(self)
        if len(parts) == 1:
            with using(self, parts[0], padding_idx=None):  # which matters to gradients alone
                return self.stock_class.forward(self, ids)
        _check_ids(self.burst_part, ids)
        parts_by_rows = zip(self.burst_part.rows, parts, strict=True)
        every = [_looked_up(self, ids, rows, own["weight"]) for rows, own in parts_by_rows]
        return _of_owners(self.burst_part, ids, every)


class _Experts(nn.Module):
    """The experts of a mixture, of which each rank holds some."""

    burst_part: Part
    stock_class: Any

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        shared = self.burst_part.shared
        if isinstance(RUNNING.plans, Step):
            return shared.mixed(self, x, index, weights)
        parts = shared.rows_of_all(self)
        if len(parts) == 1:
            with using(self, parts[0]):
                out: Tensor = self.stock_class.forward(self, x, index, weights)
            return out
        return sum_of_parts(self, (x, index, weights), self.burst_part.rows, parts)


def _check_ids(part: Part, ids: Tensor) -> None:
    most = part.rows[-1].stop
    if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < most:
        raise IndexError(f"{part.name} has {most} rows, but gets ids {ids.min()} to {ids.max()}")


def _looked_up(module: Any, ids: Tensor, rows: range, weight: Tensor) -> Tensor:
    """Return what an embedding that has these rows alone looks up; other ids give any of them."""
    with using(module, {"weight": weight}, padding_idx=None):
        out: Tensor = module.stock_class.forward(module, (ids - rows.start).clamp(0, len(rows) - 1))
    return out


def _of_owners(part: Part, ids: Tensor, every: Sequence[Tensor]) -> Tensor:
    """Return each id's embedding of those of every rank: that of the rank which has its row."""
    owner, out = ids // len(part.rows[0]), every[0]
    for n in range(1, len(every)):
        out = torch.where((owner == n).unsqueeze(-1), every[n], out)
    return out


def rows_of(rows: int, world: int) -> tuple[range, ...]:
    """Return the rows of each rank, as a DTensor's ``Shard(0)`` has them."""
    size = -(-rows // world)
    return tuple(range(min(rows, size * n), min(rows, size * (n + 1))) for n in range(world))


def local(module: Any, name: str = "weight") -> Tensor:
    """Return this rank's rows of a module's weight."""
    own: Tensor = module._parameters[name]._local_tensor
    return own


def cut_weight(weight: nn.Parameter, mesh: DeviceMesh, own: Tensor | None = None) -> nn.Parameter:
    """Return this rank's rows of a weight as a DTensor, in memory of their own, on the mesh's device; or in ``own``."""
    rows = rows_of(weight.shape[0], mesh.size())[mesh.get_local_rank()]
    part = weight.detach()[rows.start : rows.stop]
    if own is None:
        own = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    else:
        own.copy_(part)
    contiguous = torch.empty(weight.shape, device="meta").stride()
    shape: dict[str, Any] = {"shape": weight.shape, "stride": contiguous}
    return nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False, **shape), weight.requires_grad)


def transport_for(transport: Transport) -> Transport:
    """Return a transport for weights over the group of another."""
    return replace(transport, tag=TAG, sent=0, received=0, waited=0.0)
