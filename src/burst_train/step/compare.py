"""Tensor parallelism (Megatron-LM, arXiv 1909.08053), plain and with sequence parallelism (arXiv 2205.05198).

Each rank holds some heads and some columns of the feed-forward layers, and computes them for all tokens. Attention
needs no exchange. The two sums of each layer do. The sharding uses torch's ``parallelize_module``.

Two changes make it a stronger baseline than the papers describe. The input of a block is gathered once for all its
projections. The loss is divided among the ranks by tokens, as always, so no tensor of the vocabulary's width is
exchanged. Embeddings, norms and the head are whole on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from burst_attention import Mask, Plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss, next_token_nll

NAME = "whole-sequence"  # of the attention, in transformers
WINDOW_ROWS = 1024


def register() -> None:
    """Register this module's attention with transformers, and that it needs no mask."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda **_: None)


@dataclass
class Output:
    """What :class:`Compared` returns, like the output of a parallelized model."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    logits: Tensor | None = None


class Compared(nn.Module):
    """A causal language model cut over the ranks of a plan; a call takes what a parallelized model's call takes."""

    def __init__(self, model: Any, plan: Plan, *, sequence: bool) -> None:
        super().__init__()
        self.model, self.base, self.sequence, self.form = model, plan, sequence, hf.find_form(model)

    def cut(self, mesh: DeviceMesh) -> None:
        """Split the layers' weights over the ranks of ``mesh``."""
        model = self.model
        tied = model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
        parallelize_module(model, mesh, _styles(model, sequence=self.sequence))
        if tied:
            model.get_submodule("lm_head").weight = model.get_parameter("model.embed_tokens.weight")
        left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if left:
            raise ValueError(
                f"--strategy tensor can't distribute {', '.join(left)}: their gradients would not be summed; "
                "choose another strategy"
            )

    def forward(
        self,
        *,
        input_ids: Tensor,
        shift_labels: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        num_items_in_batch: float | None = None,
        fused_lm_head: Any = False,
        logits_to_keep: int = 0,
    ) -> Output:
        """Return the mean loss over ``num_items_in_batch`` tokens, log-probabilities [B, S], or the last logits."""
        borders = None if cu_seq_lens_q is None else tuple(cu_seq_lens_q.tolist())
        plan = self.base.with_mask(Mask(cu_seqlens=borders), seqlen=input_ids.shape[1])
        hidden, head = self._hidden(input_ids, plan), hf.find_head(self.model, self.form)
        bias = None if head.bias is None else _partial(head.bias)
        head = replace(head, weight=_partial(head.weight), bias=bias)
        if shift_labels is None:
            last = plan.unshard(hidden, 1, at=range(plan.seqlen - logits_to_keep, plan.seqlen))
            return Output(logits=head.local().logits(last))
        labels = plan.shard(shift_labels, 1)
        if fused_lm_head:
            nll = next_token_nll(hidden, head.weight, labels, plan, **head.options)
            return Output(log_probs=-plan.unshard(nll, 1))
        loss = next_token_loss(hidden, head.weight, labels, plan, **head.options, num_valid=num_items_in_batch)
        return Output(loss=loss)

    def _hidden(self, input_ids: Tensor, plan: Plan) -> Tensor:
        """Return the last hidden states of this rank's tokens."""
        positions = torch.from_numpy(plan.mask.document_positions(torch.arange(plan.seqlen).numpy()))
        hidden: Tensor = self.model.model(
            input_ids=plan.shard(input_ids, 1) if self.sequence else input_ids,
            position_ids=positions.to(input_ids.device).repeat(len(input_ids), 1),
            use_cache=False,
            borders=plan.mask.cu_seqlens or (0, plan.seqlen),
        ).last_hidden_state
        plan.usage.note_call()
        if self.sequence:
            return hidden
        whole = DTensor.from_local(hidden, self.model.lm_head.weight.device_mesh, [Replicate()], run_check=False)
        local: Tensor = whole.redistribute(placements=[Shard(1)]).to_local()
        return local


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Compute PyTorch's causal attention within each document: q [B, Hq, S, D], k and v [B, Hkv, S, D]."""
    parts = []
    for rows, columns, mask in _calls(borders, window):
        parts.append(
            scaled_dot_product_attention(
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                attn_mask=None if mask is None else mask.to(q.device),
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _calls(borders: tuple[int, ...], window: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the calls that cover the documents: (rows, columns, bool [rows, columns] or None for ``is_causal``)."""
    for start, stop in itertools.pairwise(borders):
        if window is None or window >= stop - start:
            whole = slice(start, stop)
            yield whole, whole, None
            continue
        for top in range(start, stop, WINDOW_ROWS):  # one mask of all rows would need memory quadratic in the length
            bottom, left = min(top + WINDOW_ROWS, stop), max(top - window + 1, start)
            distance = torch.arange(top, bottom).unsqueeze(1) - torch.arange(left, bottom)
            yield slice(top, bottom), slice(left, bottom), (distance >= 0) & (distance < window)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The function that every layer calls."""
    window, scale = options.get("sliding_window"), options.get("scaling")
    out = whole_attention(query, key, value, options["borders"], window=window, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _styles(model: nn.Module, *, sequence: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if sequence else Replicate()  # hidden states [B, S, E] outside the blocks
    outside = SequenceParallel(use_local_output=True) if sequence else _Replicated()
    # A plain tensor between norm and projections joins the partial sums of their gradients in one exchange.
    first = SequenceParallel() if sequence else _Replicated()
    enter_attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    enter_mlp = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    layer: dict[str, ParallelStyle] = {
        "input_layernorm": first,
        "self_attn": enter_attention,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "post_attention_layernorm": first,
        "mlp": enter_mlp,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    for norm in ("q_norm", "k_norm"):  # they act per head, so on this rank's heads: [B, S, heads, D]
        if f"model.layers.0.self_attn.{norm}.weight" in dict(model.named_parameters()):
            layer[f"self_attn.{norm}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    styles: dict[str, ParallelStyle] = {f"model.layers.*.{name}": style for name, style in layer.items()}
    return styles | {"model.embed_tokens": outside, "model.norm": outside, "lm_head": _Replicated()}


def _partial(parameter: Any) -> Tensor:
    """Return a replicated parameter's local tensor; its gradient covers the loss of this rank's tokens only."""
    return parameter.to_local(grad_placements=[Partial()])


class _Replicated(ParallelStyle):
    """A style in which every rank computes the same with the same weights; input and output are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]  # stub

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False), *inputs[1:]

    @staticmethod
    def _leave(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Tensor:
        return output.to_local()
