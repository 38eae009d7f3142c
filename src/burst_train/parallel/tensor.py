"""Tensor parallelism (Megatron-LM, arXiv 1909.08053), plain and with sequence parallelism (arXiv 2205.05198).

Each rank holds some heads and some columns of the feed-forward layers, and computes them for all tokens. Attention
needs no exchange. The two sums of each layer do. The sharding uses torch's ``parallelize_module``.

Two changes make it a stronger baseline than the papers describe. The input of a block is gathered once for all its
projections. The loss is divided among the ranks by tokens, as always, so no tensor of the vocabulary's width is
exchanged. Embeddings, norms and the head are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from burst_attention.attention.batch import Plans, check_tokens, shard_tokens
from burst_attention.attention.new_plan import make_plan, single_rank_plan
from burst_attention.attention.plan import Plan
from burst_attention.launch.join import CONTEXT, DATA
from burst_attention.loss import Head
from burst_attention.plan.strategy import Strategy

from .contract import Heads, PlansByWindow, whole_attention

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose projections are known


@dataclass(frozen=True)
class TensorParallelism:
    """Tensor parallelism over the ranks of a group: ``tensor``, or ``tensor-sequence`` with sequence parallelism.

    With the latter each rank holds only its tokens between blocks, and sums are scattered instead of replicated.
    """

    name: str
    posts: bool = False

    @property
    def sequence(self) -> bool:
        """Whether sequence parallelism is added."""
        return self.name == "tensor-sequence"

    def check(self, heads: Heads, seq_len: int, world: int) -> None:
        """Raise ValueError unless the ranks divide the heads, the feed-forward columns and the sequence."""
        if heads.family not in FAMILIES:
            raise ValueError(
                f"--strategy {self.name} can't share the projections of a {heads.family}, only those of "
                f"{', '.join(FAMILIES)}; choose another strategy"
            )
        sizes = {
            "query heads": heads.q_heads,
            "key-value heads": heads.kv_heads,
            "feed-forward columns": heads.intermediate,
            "tokens (--seq-len)": seq_len,
        }
        for what, size in sizes.items():
            if size % world:
                raise ValueError(
                    f"--strategy {self.name} shares {size} {what} equally, but {world} ranks don't divide them; "
                    "use a number of ranks that does, or another strategy"
                )

    def plan(self, seqlen: int, *, group: Any, timeout: float | None = None, **_: Any) -> Plan:
        """Make the plan of one sequence over ``group``, with direct messages."""
        return make_plan(seqlen, group=group, timeout=timeout, strategy=Strategy(layout="contiguous", route="direct"))

    def spread(
        self,
        wrapper: nn.Module,
        *,
        mesh: DeviceMesh,
        everyone: DeviceMesh,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        """Split the layers' weights over the ranks of a context."""
        if offload:
            raise ValueError(f"--optimizer-offload is not for --strategy {self.name}; leave it out")
        model = wrapper.get_submodule("model")
        tied = model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
        parallelize_module(model, mesh[CONTEXT], self._styles(model))
        if tied:
            model.get_submodule("lm_head").weight = model.get_parameter("model.embed_tokens.weight")
        left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if left:
            raise ValueError(
                f"--strategy {self.name} can't distribute {', '.join(left)}: their gradients would not be summed; "
                "choose another strategy"
            )
        from .body import shard_parameters  # imports transformers

        # FSDP2 shards over the data-parallel groups. It also keeps fp32 weights for a bf16 computation.
        shard_parameters(wrapper, mesh[DATA], dtype)

    def _styles(self, model: nn.Module) -> dict[str, ParallelStyle]:
        between = Shard(1) if self.sequence else Replicate()  # hidden states [B, S, E] outside the blocks
        outside = SequenceParallel(use_local_output=True) if self.sequence else _Replicated()
        # A plain tensor between norm and projections joins the partial sums of their gradients in one exchange.
        first = SequenceParallel() if self.sequence else _Replicated()
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

    def shard(self, batch: Mapping[str, Tensor], plans: PlansByWindow) -> dict[str, Tensor]:
        """Return this rank's part of a batch; all ids, unless the sequence is sharded."""
        plan = Plans.of(plans).one
        check_tokens(plan)
        shard = shard_tokens(batch["input_ids"], plan.shift_labels(batch["labels"]), plan)
        positions = single_rank_plan(plan.seqlen, mask=plan.mask).document_positions.to(shard["input_ids"].device)
        shard["position_ids"] = positions.repeat(shard["input_ids"].shape[0], 1)  # attention is over all tokens
        return shard if self.sequence else shard | {"input_ids": batch["input_ids"]}

    def hidden(self, model: Any, shard: Mapping[str, Tensor], plans: PlansByWindow) -> Tensor:
        """Return the last hidden states of this rank's tokens."""
        hidden = model.model(
            input_ids=shard["input_ids"],
            position_ids=shard["position_ids"],
            use_cache=False,
            plan={window: _alone(plan) for window, plan in plans.items()},
            attend=whole_attention,
        ).last_hidden_state
        if self.sequence:
            return hidden
        whole = DTensor.from_local(hidden, model.lm_head.weight.device_mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local()

    def head(self, head: Head) -> Head:
        """Return the head with this rank's tensors, whose gradients are partial sums."""
        return replace(head, weight=_partial(head.weight), bias=None if head.bias is None else _partial(head.bias))

    def sent(self, plans: Sequence[Plan], heads: Heads, *, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the collectives' bytes that a rank sends in (forward, backward)."""
        plan = plans[0]
        tokens = (plan.world - 1) * batch * plan.length
        one = tokens * heads.hidden * dtype.itemsize  # bytes of a gather or a scatter; a sum is both
        # Each layer has two sums in the forward and two in the backward. Without sequence parallelism the backward
        # also gathers the gradients of the last hidden states.
        return len(plans) * 4 * one, len(plans) * 4 * one + (0 if self.sequence else one)


def _partial(parameter: Any) -> Tensor:
    """Return a replicated parameter's local tensor; its gradient covers the loss of this rank's tokens only."""
    return parameter.to_local(grad_placements=[Partial()])


def _alone(plan: Plan) -> Plan:
    """Return a single-rank plan of all tokens; it shares the usage record of ``plan``, which cut the shards."""
    return single_rank_plan(plan.seqlen, mask=plan.mask, usage=plan.usage)


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
