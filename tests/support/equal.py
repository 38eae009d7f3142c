"""A step of a Hugging Face model over ranks is one process's: its loss, and the gradient of every parameter.

The reference is the stock model in one process. A copy of it whose weights are moved by half an ulp takes the same
step, which gives the bounds (``conditioning``).
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_attention.integrations import hf
from burst_attention.testing import local_world
from tests.support.conditioning import bounds_of, error_of, moved_copy, share_of_loss

Loss = Callable[[Any, dict[str, Any]], Tensor]  # of a model and a batch
_OTHERS = ("labels", "shift_labels", "num_items_in_batch", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
_OTHERS += ("max_length_q", "max_length_k")


class Apart(NamedTuple):
    """How far a step is from one process's, on the worst rank and in the worst gradient.

    ``share``: of the bounds. ``loss``, ``gradient``: relative errors; norms below 1e-9 count as that. ``largest``: of
    a gradient's values, relative to its largest one, or to 1e-3.
    """

    share: float
    loss: float
    gradient: float
    largest: float
    worst: str


def check(
    *found: Apart, loss: float = torch.inf, gradient: float = torch.inf, largest: float = torch.inf, share: float = 1
) -> None:
    """Assert that all are within the case's own bounds, and within these."""
    assert found
    for each in found:
        assert each.share <= share, each
        assert each.loss <= loss and each.gradient <= gradient and each.largest <= largest, each


def stock_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """The stock model's loss in its own dtype, with its router loss; transformers would cast logits to fp32.

    Virtual tokens in front of the batch's have no labels.
    """
    out = model(**{name: x for name, x in batch.items() if name not in _OTHERS}, use_cache=False)
    prompt = out.logits.shape[1] - batch["labels"].shape[1]
    labels = batch.get("shift_labels", F.pad(batch["labels"], (prompt, 1), value=-100)[:, 1:])
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss / batch.get("num_items_in_batch", (labels != -100).sum())
    return loss + model.router_aux_loss_coef * out.aux_loss if "aux_loss" in out else loss


def own_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """The loss that the model returns itself."""
    loss: Tensor = model(**batch).loss
    return loss


def step_of(model: Any, batch: dict[str, Any], loss: Loss = own_loss) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of those parameters that have one."""
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    return value.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


class Alone:
    """The step of one process, and that of its moved copy; ``dtype``: the lowest precision in the computation."""

    def __init__(self, model: Any, batch: dict[str, Any], loss: Loss = stock_loss, dtype: torch.dtype = torch.float32):
        steps = [step_of(each, batch, loss) for each in (model, moved_copy(model, dtype))]
        (self.losses, (self.wanted, self.moved)), self.dtype = zip(*steps, strict=True), dtype

    def apart(self, losses: Iterable[float], found: Mapping[str, Tensor]) -> Apart:
        """Compare the ranks' losses and the whole gradients."""
        assert found.keys() == self.wanted.keys(), found.keys() ^ self.wanted.keys()
        bounds, names, losses = bounds_of(self.wanted, self.moved), [*found], [*losses]
        errors = [error_of(found[name], self.wanted[name]) for name in names]
        shares = [error / max(bounds[name], 1e-300) for name, error in zip(names, errors, strict=True)]
        shares += [share_of_loss(each, *self.losses, self.dtype) for each in losses]
        of_losses = [abs(each / self.losses[0] - 1) for each in losses]
        off = {name: found[name] - x for name, x in self.wanted.items()}
        norms = [off[name].norm() / x.norm().clamp(min=1e-9) for name, x in self.wanted.items()]
        largest = [off[name].abs().max() / x.abs().max().clamp(min=1e-3) for name, x in self.wanted.items()]
        figures = [torch.tensor(each, dtype=torch.float64) for each in (shares, of_losses, norms, largest)]
        worst = int(figures[0].argmax())  # a NaN's, if there is one, as a tensor's maximum is
        return Apart(*(each.max().item() for each in figures), worst=[*names, *["the loss"] * len(losses)][worst])


def equal(
    alone: Any,
    batch: dict[str, Any],
    *,
    threads: int | None = None,
    stock: Loss = stock_loss,
    call: Loss = own_loss,
    prepare: Callable[[Any], Any] = lambda model: None,
    model: Any = None,
    gradients: str = "mean",
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Apart:
    """Compare a step of a parallelized copy of a stock model with the model's own.

    Args:
        alone: the stock model.
        batch: what both get.
        threads: the number of ranks, which are threads; None: this process is a rank, and so are the others.
        stock: the loss of one process.
        call: the loss over ranks.
        prepare: what is done to the parallelized copy; it may return a wrapper of it.
        model: a parallelized model, in place of a copy of ``alone``.
        gradients: as in ``hf.parallelize``; ``how``: its other options.
        whole: each rank has whole gradients, as DDP and FSDP2 leave them, in place of parts of a mean or of a sum.
        dtype: the lowest precision in which the case computes.
    """
    copies = iter([copy.deepcopy(alone) if model is None else model for _ in range(threads or 1)])

    def rank(group: Any = None) -> tuple[float, dict[str, Tensor]]:
        ours = next(copies)
        if model is None:
            hf.parallelize(ours, group, gradients=gradients, **{"timeout": 30} | how)
        wrapped = prepare(ours)
        return step_of(ours, batch, call if wrapped is None else lambda _, batch: call(wrapped, batch))

    if threads is None:
        loss, own = rank()
        own = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in own.items()}
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, (loss, own))
        if whole:
            steps = [(each, own) for each, _ in steps]
    else:
        with local_world(threads, timeout=30) as ranks:
            steps = ranks.run(rank)
    names = dict.fromkeys(name for _, own in steps for name in own)
    parts = {name: [own[name] for _, own in steps if name in own] for name in names}
    share = len(steps) if whole or gradients == "mean" else 1
    totals = {name: sum(each) / share for name, each in parts.items()}
    return Alone(alone, batch, stock, dtype).apart((loss for loss, _ in steps), totals)
