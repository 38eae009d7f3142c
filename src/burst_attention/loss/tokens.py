"""Per-token values from logits, computed in chunks so that the logits of all tokens never exist.

Every loss over shards uses the loop in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.passes import check_batches, check_transforms, differentiable_once
from ..comm.agreement import BACKWARD, over_axis
from .head import Head, HeadPart, LogitForm, default_chunk, operand, product

MEASURES = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


@dataclass(frozen=True)
class Measurement:
    """The values to compute for each token."""

    call: str  # the public function to name in errors
    form: LogitForm
    temperature: float = 1.0  # logits are divided by it
    measures: tuple[str, ...] = ("log_probs",)  # of MEASURES, this one first; it and the entropy have gradients
    chunk_tokens: int | None = None  # how many tokens' logits exist at the same time; None for the default


def measure(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, ignore_index: int, measurement: Measurement
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the measures of this rank's labels [B, S_local], on the CPU. Exchanges nothing but parts of the head.

    Returns (rows, table): int64 [n], the labels' indices in the flattened ``labels``, and [measures, n] in fp32 (fp64).
    """
    label = labels.flatten()
    rows = (label != ignore_index).nonzero().squeeze(1)
    rows, target = (x.to(hidden.device, non_blocking=True) for x in (rows, label[rows].long()))
    return rows, _Measure.apply(hidden, head.weight, head.bias, rows, target, measurement, head.part)


class _Measure(torch.autograd.Function):
    """Ledger, for the n tokens of this rank that have a label (N = B * S_local in all), chunk by chunk:

    h_nE = hidden[rows], W_VE, b_V = bias or 0, t_n = target; f = factor, k = softcap, T = temperature.

      forward   y_nV = f (h W^T + b);                      z_nV = k tanh(y / k) / T, y / T without a cap;
                lse_n = logsumexp(z);                      log p_nV = z - lse;
                log_probs l_n = z[t] - lse;                entropy H_n = -sum over V of p log p;
                mean_logits = mean over V of z;            is_top1 = (z[t] = max over V of z);
                log_sum_sq_probs = log of the sum over V of p^2.

      backward  dl_n, dH_n given, r_n = max(|dl|, |dH|), u = max over n of r; without an entropy r = -dl;
                dz_nV = (dl (onehot(t) - p) - dH p (log p + H)) / r;
                dy_nV = dz (1 - (T z / k)^2), dz without a cap;
                dh_nE = r (f / T) dy W (0 in the other rows);
                dW_VE = u (f / T) ((r / u) dy)^T h;        db_V = u (f / T) sum over n of (r / u) dy.

    Saved: hidden, W and b (as given), rows, t, lse and H (n numbers each). The backward computes z again, because z
    for all tokens would not fit. dW and db are summed over chunks in fp32 (fp64 for fp64) and rounded once. r, u and
    f / T are applied after the products, because a mean's 1 / n would flush dy to zero in fp16.

    With a part of the vocabulary, ranks gather what each has of a chunk (lse, z[t], and so on), merge it in rank order,
    and sum r (f / T) dy W in fp32 before its rounding; dW and db are the part's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: torch.Tensor,
        target: torch.Tensor,
        measurement: Measurement,
        part_of: HeadPart | None,
    ) -> torch.Tensor:
        """Compute the measures [measures, rows], one chunk of logits at a time."""
        compute, flat = torch.float64 if hidden.dtype == torch.float64 else torch.float32, hidden.flatten(0, 1)
        head, measures = Head(weight, bias, measurement.form, part_of), measurement.measures
        table = torch.empty(len(measures), len(rows), dtype=compute, device=hidden.device)
        lse = torch.empty(len(rows), dtype=compute, device=hidden.device)
        most = weight.shape[0] if part_of is None else max(part_of.sizes)  # ranks of an axis take equal chunks
        ctx.chunk = measurement.chunk_tokens or default_chunk(len(rows), most, weight.shape[1])
        ctx.measurement, ctx.part = measurement, part_of
        ctx.number = 0 if part_of is None else part_of.agreement.count
        with torch.autocast(hidden.device.type, enabled=False):
            w = operand(weight, compute)
            for part in _parts(len(rows), ctx.chunk):
                logits = head.chunk(operand(flat[rows[part]], compute), w, compute)
                logits = _divided_(logits, measurement.temperature)
                table[:, part], lse[part] = _measured(measures, logits, target[part], part_of)
        entropy = table[measures.index("entropy")].clone() if "entropy" in measures else None
        ctx.save_for_backward(hidden, weight, bias, rows, target, lse, entropy)
        return table

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias."""
        return differentiable_once(ctx.measurement.call)(_backward)(ctx, grad)


def _measured(
    measures: tuple[str, ...], logits: torch.Tensor, target: torch.Tensor, part: HeadPart | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ledger's measures [measures, n] of z [n, V], and lse [n]. Overwrites z."""
    stats = {"lse": torch.logsumexp(logits, 1)}
    if part is None:
        stats["label"] = logits.gather(1, target[:, None]).squeeze(1)
    else:
        row, inside = part.place(target)
        stats["label"] = logits.gather(1, row[:, None]).squeeze(1).masked_fill_(~inside, -torch.inf)
    if "mean_logits" in measures:
        stats["mean_logits"] = logits.mean(1)
    if "is_top1" in measures:
        stats["most"] = logits.amax(1)
    if "entropy" in measures or "log_sum_sq_probs" in measures:
        log_p = _log_p_(logits, stats["lse"])
        p = log_p.exp()
        if "log_sum_sq_probs" in measures:  # no log of 0: the sum is at least 1 / V
            stats["log_sum_sq_probs"] = 2 * torch.linalg.vector_norm(p, dim=1).log()
        if "entropy" in measures:
            stats["entropy"] = -p.mul_(log_p).sum(1)
    if part is not None:
        stats = _merged(stats, part)
    lse, label = stats["lse"], stats["label"]
    stats["log_probs"] = label - lse
    if "is_top1" in measures:
        stats["is_top1"] = (label >= stats["most"]).to(lse.dtype)
    return torch.stack([stats[name] for name in measures]), lse


def _merged(own: dict[str, torch.Tensor], part: HeadPart) -> dict[str, torch.Tensor]:
    """Return what the ranks have of a chunk, over the whole vocabulary: each [n], the same bits on every rank.

    With lse_r, H_r of rank r's part and w_r = exp(lse_r - lse): H = sum of w_r (H_r + lse - lse_r).
    """
    every = dict(zip(own, part.gather(torch.stack([*own.values()])).unbind(1), strict=True))  # each [ranks, n]
    lse = torch.logsumexp(every["lse"], 0)
    below = (every["lse"] - lse).clamp_(min=torch.finfo(lse.dtype).min)  # log w_r
    merged = {"lse": lse, "label": every["label"].amax(0)}
    if "most" in own:
        merged["most"] = every["most"].amax(0)
    if "mean_logits" in own:
        sizes = torch.tensor(part.sizes, dtype=lse.dtype, device="cpu").to(lse.device, non_blocking=True)[:, None]
        merged["mean_logits"] = (every["mean_logits"] * sizes).sum(0) / sum(part.sizes)
    share = below.exp()  # where it is 0, all logits of a part may be minus infinity
    if "log_sum_sq_probs" in own:
        squares = torch.where(share > 0, every["log_sum_sq_probs"] + 2 * below, -torch.inf)
        merged["log_sum_sq_probs"] = torch.logsumexp(squares, 0)
    if "entropy" in own:
        merged["entropy"] = torch.where(share > 0, share * (every["entropy"] - below), 0).sum(0)
    return merged


def _backward(ctx: Any, saved: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Compute the ledger's backward from the gradient of the table."""
    measurement: Measurement = ctx.measurement
    check_transforms(f"the backward of {measurement.call}", grad=grad)
    check_batches(f"the backward of {measurement.call}", grad)
    hidden, weight, bias, rows, target, lse, entropy = saved
    if ctx.part is not None:
        ctx.part.agreement.begin(ctx.number, over_axis(BACKWARD))
    compute, flat = lse.dtype, hidden.flatten(0, 1)
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dhidden = torch.zeros(flat.shape, dtype=flat.dtype, device=flat.device) if wants_hidden else None
    dweight = torch.zeros(weight.shape, dtype=compute, device=weight.device) if wants_weight else None
    dbias = torch.zeros(bias.shape, dtype=compute, device=bias.device) if wants_bias else None
    shares = _Shares.of(measurement.measures, grad, entropy)
    form = measurement.form.factor / measurement.temperature
    head = Head(weight, bias, measurement.form, ctx.part)
    with torch.autocast(hidden.device.type, enabled=False):
        w = operand(weight, compute)
        for part in _parts(len(rows), ctx.chunk):
            h = operand(flat[rows[part]], compute)
            logits = head.chunk(h, w, compute)
            dproduct = _dproduct(measurement, ctx.part, logits, lse[part], target[part], shares.part(part))
            narrow = dproduct.to(w.dtype)
            if dhidden is not None:
                scale = (shares.row[part] * form)[:, None]
                dh = product(narrow, w, compute)
                dh = dh if head.part is None else head.part.sum_(dh)
                dhidden[rows[part]] = (dh * scale).to(dhidden.dtype)
            if shares.of_unit is not None:
                narrow = dproduct.mul_(shares.of_unit[part, None]).to(w.dtype)
            if dbias is not None:
                dbias += dproduct.sum(0)
            if dweight is not None:
                dweight += product(narrow.T, h, compute)
    if dhidden is not None:
        dhidden = dhidden.view(hidden.shape)
    # A rank without a label contributes exactly 0, so it must not be multiplied by a factor that may not be finite.
    for total in (dweight, dbias):
        if total is not None and len(rows):
            total.mul_(shares.unit * form)
    return dhidden, _rounded(dweight, weight), _rounded(dbias, bias), None, None, None, None


@dataclass(frozen=True, eq=False)
class _Shares:
    """The gradient of a table, split into the factors of the ledger's backward. Tensors are [n]."""

    row: torch.Tensor  # r
    unit: float | torch.Tensor  # u, the maximum of the magnitudes of r; r itself if it is the same everywhere
    of_unit: torch.Tensor | None  # r / u; None if it is 1 everywhere
    # -dl / r, dH / r and H; None without an entropy, because -dl / r is 1 then
    entropic: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(measures: tuple[str, ...], grad: torch.Tensor, entropy: torch.Tensor | None) -> _Shares:
        """Split a gradient [measures, n]."""
        dlog_probs = grad[measures.index("log_probs")]
        if entropy is None and len(dlog_probs) and dlog_probs.stride(0) == 0:  # a mean's, which is not read
            return _Shares(-dlog_probs, -dlog_probs[0], None)
        if entropy is None:
            return _Shares(-dlog_probs, *_unit(-dlog_probs))
        dentropy = grad[measures.index("entropy")]
        row = torch.maximum(dlog_probs.abs(), dentropy.abs())
        # Don't divide by an r that is 0 or not finite. The later product with r carries it into the result.
        divides = (row > 0) & row.isfinite()
        of_label = torch.where(divides, -dlog_probs / row, 1)
        of_entropy = torch.where(divides, dentropy / row, 0)
        return _Shares(row, *_unit(row), (of_label, of_entropy, entropy))

    def part(self, part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the part of ``entropic`` as columns [rows, 1]."""
        if self.entropic is None:
            return None
        of_label, of_entropy, entropy = self.entropic
        return of_label[part, None], of_entropy[part, None], entropy[part, None]


def _unit(row: torch.Tensor) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """Return (u, r / u), with None for r / u if it is 1 everywhere, or if u is 0 or not finite.

    Off the CPU nothing is read, so that the host doesn't wait: r / u is then given, as 1 where it would be None.
    """
    if not len(row):
        return 0.0, None
    unit = row.abs().max()
    of_unit = torch.where((unit > 0) & unit.isfinite(), row / unit, 1)
    if row.device.type != "cpu":
        return unit, of_unit
    return unit, None if (of_unit == 1).all() else of_unit


def _dproduct(
    measurement: Measurement,
    vocabulary: HeadPart | None,
    logits: torch.Tensor,
    lse: torch.Tensor,
    target: torch.Tensor,
    shares: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the ledger's dy [n, V] from T z [n, V]. Overwrites its input."""
    softcap = measurement.form.softcap
    slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1)
    logits = _divided_(logits, measurement.temperature)
    inside: Any = 1
    if vocabulary is not None:
        target, inside = vocabulary.place(target)
    label = torch.arange(len(target), device=target.device), target
    if shares is None:
        dlogits = logits.sub_(lse[:, None]).exp_()
        dlogits[label] -= inside if vocabulary is None else inside.to(lse.dtype)
    else:
        of_label, of_entropy, entropy = shares
        log_p = _log_p_(logits, lse)
        p = log_p.exp()
        dlogits = log_p.add_(entropy).mul_(-of_entropy).add_(of_label).mul_(p)
        dlogits[label] -= of_label.squeeze(1) * inside
    return dlogits if slope is None else dlogits.mul_(slope)


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def _divided_(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature == 1 else logits.div_(temperature)


def _log_p_(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Turn z into log p in place. Minus infinity becomes the least finite number, so that p log p is 0 where p is 0."""
    return logits.sub_(lse[:, None]).clamp_(min=torch.finfo(lse.dtype).min)


def _rounded(total: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)
