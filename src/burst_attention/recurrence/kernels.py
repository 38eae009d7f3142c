"""Kernels of recurrent layers over runs. Each takes the model's own kernel, and its arguments, as a black box.

With S the state before a run, the kernel's output is out = out₀ + R S, where out₀ is the output from a zero state. So
each function runs the kernel over the rank's runs from zero, gets S by :meth:`RunExchange.states` and adds R S.

Sources: gated delta rule, arXiv 2412.06464, eq. 10; Kimi delta attention, arXiv 2510.26692; Mamba 2, arXiv 2405.21060,
section 6; Mamba, arXiv 2312.00752, eq. 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels.contract import accumulation_dtype
from .exchange import RunExchange, no_autocast

Kernel = Callable[..., Any]
_OF_PACKED = ("cu_seqlens", "seq_idx")  # the plan defines the documents


def convolution(
    kernel: Kernel,
    exchange: RunExchange,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Run ``causal_conv1d_fn`` [B, C, S_local] with weight [C, k] over own runs, behind the tokens before each."""
    width, tokens = weight.shape[-1] - 1, hidden_states.movedim(2, 0)
    if not width:
        return kernel(hidden_states, weight, bias, activation=activation, **_plain(options))
    parts: list[Tensor] = []
    for run, before in zip(exchange.own, exchange.before(tokens, width), strict=True):
        parts += [before, tokens[run.local]]
    joined = torch.cat(parts).movedim(0, 2).contiguous()
    out = kernel(joined, weight, bias, activation=activation, **_plain(options))
    pieces = out.split([part.shape[0] for part in parts], 2)
    return torch.cat(pieces[1::2], 2)


def delta_rule(
    kernel: Kernel,
    exchange: RunExchange,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run a chunked gated delta rule. A head's state is [K, V] and M is [K, K].

    With the values [v | 0] and the state [0 | I] one call of the kernel gives out₀ and R, U and M.
    q, k [B, S_local, H, K]; v [B, S_local, Hv, V]; g [B, S_local, Hv] or [..., K]; beta [B, S_local, Hv].
    """
    options = _plain(options, "initial_state", "output_final_state")
    (batch, _, heads, wide), size, exact = value.shape, key.shape[-1], accumulation_dtype(query.dtype)
    zero = _zero((query, key, value, g, beta), (batch, heads, size, wide), exact)
    unit = torch.eye(size, dtype=exact, device=value.device).expand(batch, heads, size, size)
    state, values = torch.cat([zero, unit], -1), F.pad(value, (0, size))
    outs, reads, pairs = [], [], []
    for run in exchange.own:
        q, k, v, decay, rate = (x[:, run.local] for x in (query, key, value if run.begins else values, g, beta))
        start = zero if run.begins else state
        out, final = kernel(q, k, v, g=decay, beta=rate, initial_state=start, output_final_state=True, **options)
        outs.append(out[..., :wide])
        reads.append(out[..., wide:])
        if not run.ends:  # where a document begins, M multiplies nothing: any will do
            pairs.append((unit if run.begins else final[..., wide:], final[..., :wide]))
    states = exchange.states(pairs, zero, unit.shape, diagonal=False)
    for n, (run, before) in enumerate(zip(exchange.own, states, strict=True)):
        if run.begins:
            outs[n] = _after(outs[n], before)
        else:
            with no_autocast(before):
                read = torch.einsum("bthk,bhkv->bthv", reads[n].to(exact), before)
            outs[n] = (outs[n] + read).to(value.dtype)
    return torch.cat(outs, 1), None


def mamba2(
    kernel: Kernel,
    exchange: RunExchange,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Any:
    """Run ``mamba2_chunk_scan``. A head's state is [P, N], and M is one number.

    M = exp(A Σ Δ) over the run, and token t reads exp(A Σ Δ) C_t S, with the sum up to t.
    hidden_states [B, S_local, H, P]; dt [B, S_local, H]; A [H]; B, C [B, S_local, G, N].
    """
    wants_state = options.get("return_final_states", False)
    if options.get("z") is not None:
        raise ValueError("z: a gate inside of mamba2_chunk_scan is not supported over ranks; apply it afterwards")
    options = _plain(options, "initial_states", "return_final_states", "z")
    batch, _, heads, wide = hidden_states.shape
    exact = accumulation_dtype(hidden_states.dtype)
    bias = options.get("dt_bias")
    zero = _zero((hidden_states, dt, A, B, C, bias), (batch, heads, wide, B.shape[-1]), exact)
    step = _step(dt, bias, options.get("dt_softplus", False), exact)
    logs = A.to(exact) * step.clamp(*options.get("dt_limit", (0.0, float("inf"))))
    outs, pairs = [], []
    for run in exchange.own:
        x, t, b, c = (each[:, run.local] for each in (hidden_states, dt, B, C))
        out, final = kernel(x, t, A, b, c, return_final_states=True, **options)
        outs.append(out)
        if not run.ends:
            pairs.append((logs[:, run.local].sum(1).exp()[..., None, None], final))
    states = exchange.states(pairs, zero, (batch, heads, 1, 1), diagonal=True)
    for n, (run, before) in enumerate(zip(exchange.own, states, strict=True)):
        if run.begins:
            outs[n] = _after(outs[n], before)
        else:
            c = C[:, run.local].to(exact).repeat_interleave(heads // C.shape[2], 2)
            with no_autocast(before):
                read = torch.einsum("bthn,bhpn->bthp", c, before) * logs[:, run.local].cumsum(1).exp()[..., None]
            outs[n] = (outs[n] + read).to(outs[n].dtype)
    out = torch.cat(outs, 1)
    return (out, None) if wants_state else out


def mamba1(
    kernel: Kernel,
    exchange: RunExchange,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Any:
    """Run ``mamba_selective_scan``. A channel's state is [N], and M is diagonal.

    M = exp(A Σ Δ) over the run, and token t reads exp(A Σ Δ) S against C_t, with the sum up to t.
    hidden_states, dt [B, D, S_local]; A [D, N]; B, C [B, N, S_local].
    """
    wants_state, gate = options.get("return_last_state", False), options.get("z")
    options = _plain(options, "return_last_state", "z")  # the gate multiplies the whole output, so it comes last
    batch, wide, _ = hidden_states.shape
    exact = accumulation_dtype(hidden_states.dtype)
    bias = options.get("delta_bias")
    zero = _zero((hidden_states, dt, A, B, C, bias), (batch, wide, A.shape[-1]), exact)
    step = _step(dt.mT, bias, options.get("delta_softplus", False), exact).mT
    outs, pairs = [], []
    for run in exchange.own:
        x, t, b, c = (each[..., run.local] for each in (hidden_states, dt, B, C))
        out, final = kernel(x, t, A, b, c, return_last_state=True, **options)
        outs.append(out)
        if not run.ends:
            pairs.append(((A.to(exact) * step[..., run.local].sum(-1, keepdim=True)).exp(), final))
    states = exchange.states(pairs, zero, zero.shape, diagonal=True)
    for n, (run, before) in enumerate(zip(exchange.own, states, strict=True)):
        if run.begins:
            outs[n] = _after(outs[n], before)
        else:
            total, c = step[..., run.local].cumsum(-1), C[..., run.local].to(exact)
            # Recomputed in the backward: the decays of all channels, states and tokens are large.
            read = checkpoint(
                _read_channels, A.to(exact), total, c, before, use_reentrant=False, preserve_rng_state=False
            )
            outs[n] = (outs[n] + read).to(outs[n].dtype)
    out = torch.cat(outs, -1)
    out = out if gate is None else out * F.silu(gate)
    return (out, None) if wants_state else out


def lightning(exchange: RunExchange, query: Tensor, key: Tensor, value: Tensor, rates: Tensor, *, block: int) -> Tensor:
    """Compute lightning attention (arXiv 2401.04658, algorithm 1): its state decays by exp(-rate) with each token.

    M = exp(-rate L) over a run of L tokens, and its token t (from 1) reads exp(-rate t) q S.
    q, k [B, H, S_local, K]; v [B, H, S_local, V]; rates [H, 1, 1] > 0; ``block`` tokens are computed together.
    """
    exact = accumulation_dtype(query.dtype)
    (batch, heads, _, size), wide, rates = query.shape, value.shape[-1], rates.to(exact)
    zero, outs, pairs = _zero((query, key, value), (batch, heads, size, wide), exact), [], []
    with no_autocast(zero):
        for run in exchange.own:
            state = zero
            for first in range(run.offset, run.local.stop, block):
                q, k, v = (x[:, :, first : min(first + block, run.local.stop)].to(exact) for x in (query, key, value))
                after = _ages(q, rates)
                apart = after[:, :, 0, None] - after[:, None, :, 0]
                within = (q @ k.mT) * (-apart).masked_fill(apart < 0, -torch.inf).exp()
                outs.append(within @ v + (q * (-after).exp()) @ state)
                left = after[:, -1:] - after
                state = (-after[:, -1:]).exp() * state + (k * (-left).exp()).mT @ v
            if not run.ends:
                pairs.append(((-rates * run.length).exp(), state))
    out = torch.cat(outs, 2)
    reads = []
    states = exchange.states(pairs, zero, rates.shape, diagonal=True)
    for run, before in zip(exchange.own, states, strict=True):
        q = query[:, :, run.local].to(exact)
        with no_autocast(before):
            reads.append((q * (-_ages(q, rates)).exp()) @ before)
    return (out + torch.cat(reads, 2)).to(value.dtype)


def _ages(x: Tensor, rates: Tensor) -> Tensor:
    """Return rate x t for the tokens t = 1, 2, ... of x [B, H, T, K]: [H, T, 1]."""
    return rates * torch.arange(1, x.shape[2] + 1, dtype=rates.dtype, device=x.device)[:, None]


def no_fused_kernel(kernel: Kernel, exchange: RunExchange, *args: Any, **options: Any) -> None:
    """Decline a kernel of convolution, scan and projection, which takes no state. The mixer then calls each part."""


def _read_channels(A: Tensor, total: Tensor, C: Tensor, state: Tensor) -> Tensor:
    with no_autocast(state):
        return torch.einsum("bnt,bdtn,bdn->bdt", C, (A[:, None] * total[..., None]).exp(), state)


def _plain(options: dict[str, Any], *taken: str) -> dict[str, Any]:
    """Return a kernel's options without those of packed documents and those that we set."""
    return {name: value for name, value in options.items() if name not in (*_OF_PACKED, *taken)}


def _zero(inputs: tuple[Tensor | None, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zero state that requires a gradient if any input does, as states after a run do."""
    tensors = [x for x in inputs if x is not None]
    nothing = sum(x.flatten()[:0].sum().to(dtype) for x in tensors)
    return tensors[0].new_zeros(shape, dtype=dtype) + nothing


def _after(out: Tensor, state: Tensor) -> Tensor:
    """Return ``out``, connected to a state that does not change it: the gather's backward must run on every rank."""
    return out + state.flatten()[:0].sum().to(out.dtype)


def _step(dt: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    """Return Δ [..., S, H] as the kernel computes it: fp32 in mamba_ssm, the dtype of ``dt`` in transformers."""
    dt = dt.to(dtype) if dt.is_cuda else dt
    step = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(step) if softplus else step).to(dtype)
