"""Log-probabilities and entropies of a whole sequence's tokens, for losses other than their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention.passes import check_transforms
from ..attention.plan import Plan
from .checks import check_arguments, check_outputs, check_plan, check_temperature, fields_of_axis
from .head import Head, LogitForm, entering
from .tokens import MEASURES, Measurement, measure


@dataclass(frozen=True)
class TokenLogProbs:
    """Per-token values from the logits of a whole sequence, the same on every rank.

    Every field is [B, S - 1], in the order of the sequence. Column i uses the logits at position i, with the token at
    i + 1 as label. It is 0, or False, where there is no label. Fields are fp32 (fp64 for fp64). None stands for a field
    that was not requested. z are the logits divided by the temperature, p is their softmax over the vocabulary.

    Attributes:
        log_probs: log p of the label. Differentiable.
        entropy: -sum of p log p. Differentiable.
        mean_logits: the mean of z.
        is_top1: bool, True if no other token has a greater z than the label.
        log_sum_sq_probs: the logarithm of the sum of p^2.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


def token_log_probs(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    plan: Plan,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("log_probs", "entropy"),
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """Return log-probabilities, entropies and more of each label, over the tokens of all ranks of ``plan``.

    Use it for preference and policy-gradient losses. Every rank computes the same scalar from the whole result and
    calls its backward, which moves nothing and gives this rank's share. *Summed* over ranks, the gradients are the
    one-device gradient. The logits of all tokens never exist at the same time.

        ours = token_log_probs(hidden, lm_head_weight, plan.shard_labels(ids), plan)
        loss = -(advantages * ours.log_probs).mean() - 0.01 * ours.entropy.mean()
        loss.backward()

    Args:
        hidden, lm_head_weight, labels: this rank's, as for :func:`next_token_loss`. The batch size is the same on all
            ranks. The last position of the sequence has no label and no column in the result.
        plan: the plan that sharded the sequence.
        temperature: the number that logits are divided by, after ``factor`` and ``softcap``. It is finite, greater than
            0, and the same on all ranks.
        bias, factor, softcap: how logits are computed, as for :func:`next_token_loss`.
        ignore_index: the label of a token without a target.
        outputs: names of the fields of :class:`TokenLogProbs` to compute, the same on all ranks. ``log_probs`` is
            always computed, at no extra cost.
        chunk_tokens: how many tokens' logits exist at the same time, as for :func:`next_token_loss`. A cap needs the
            same memory again in the backward. So do the entropy and ``log_sum_sq_probs``.

    Returns:
        The requested fields, for all S - 1 positions. Logits, their softmax and the sums are fp32 (fp64 for fp64),
        with or without autocast. A rank without a label gets gradients of zeros.

    Raises:
        TypeError, ValueError: an argument is bad on some rank, or ``temperature``, ``outputs``, ``factor``,
            ``softcap``, or the shape of the head or of its bias differs between ranks. Every rank raises.
    """
    check_plan(plan)
    with plan.agreement.entering("token_log_probs", once=True):
        with entering("token_log_probs", lm_head_weight):
            head = Head.of(lm_head_weight, bias, LogitForm(factor, softcap))
            here = check_arguments(hidden, head, labels, plan, ignore_index, chunk_tokens)
            check_temperature(temperature)
            measures = check_outputs(outputs, MEASURES)
            last = (plan.positions == plan.schedule.layout.stop - 1).to(here.device)
            if (here[:, last] != ignore_index).any():
                raise ValueError(
                    "labels has a label at the last position of the sequence, "
                    f"{plan.seqlen - 1}, which no token follows; pass plan.shard_labels"
                )
            check_transforms("token_log_probs", hidden=hidden, lm_head_weight=lm_head_weight, bias=bias)
        measurement = Measurement("token_log_probs", head.form, temperature, measures, chunk_tokens)
        head.agree("token_log_probs", fields_of_axis(hidden, head, here, ignore_index, measurement))
    same = {
        "temperature": temperature,
        "outputs": list(measures),
        "factor": factor,
        "softcap": softcap,
        "bias": None if head.bias is None else list(head.bias.shape),
        "lm_head_weight": list(head.weight.shape),
    }
    plan.agreement.agree("token_log_probs", same, once=True)
    with plan.agreement.entering("unshard", once=True):  # the next call in which ranks meet
        rows, table = measure(hidden, head, here, ignore_index, measurement)
        local = table.new_zeros(len(measures), here.numel())  # 0 where there is no label
        local[:, rows] = table
    whole = plan.unshard(local.view(len(local), *here.shape), 2, grad="slice")[..., : max(plan.seqlen - 1, 0)]
    values = dict(zip(measures, whole.unbind(0), strict=True))
    for name in {*values} - {"log_probs", "entropy"}:
        values[name] = values[name].detach()
    if "is_top1" in values:
        values["is_top1"] = values["is_top1"].bool()
    return TokenLogProbs(**values)
