"""The styles by which :mod:`.axis` cuts parts of layers, on top of those of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed import tensor_parallel as styles
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from burst_attention.comm.collectives import naming
from burst_attention.loss.head import SummedGradient

from ..reading import Kind, read
from ..running import ALONE, RunningPlans, running_plans
from .parts import OF_EXPERTS, Cut, InStep, Scaled, Summed, own_tokens, part, summed, used, using, whole_tokens


class _SummedWeights(styles.TensorParallelLayer):
    """A whole weight that each rank uses for its heads, such as q_norm: sum the parts of its gradient."""

    # transformers' own style sums ``.grad`` after each backward, and so counts earlier backwards again.
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> AbstractContextManager[None]:
        """Use the weights through a function that sums their gradients."""
        return using(module, lambda weight: used(weight, mesh))


class _Columns(styles.ColwiseParallel):
    """A linear layer's columns. The gradient of its input is a part, which :func:`_sum_inputs` sums once for all."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        """Replace the forward by one on this rank's part."""

        def forward(x: Tensor) -> Tensor:
            return F.linear(x, part(module.weight), part(module.bias))

        module.forward = forward
        return module


class _ColumnsOfLatents(_Columns):
    """As :class:`_Columns`, of an attention with latents: what its columns take differs, so each sums for itself."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        """Replace the forward by one on this rank's part, which sums the gradient of its input."""
        columns, group = super().install_forward(module, mesh).forward, mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            product: Tensor = columns(SummedGradient.apply(x, group, False))
            return product

        module.forward = forward
        return module


class _Rows(styles.RowwiseParallel):
    """A linear layer's rows, whose products the ranks sum. The bias is added once."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        """Replace the forward by one on this rank's part."""

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else part(module.bias)
            return summed(F.linear(x, part(module.weight)), bias, mesh)

        module.forward = forward
        return module


def _sum_inputs(module: Any, mesh: DeviceMesh, *, own_weights: bool) -> None:
    """Sum the gradient of a module's input; ``own_weights``: the module uses this rank's parts of its own weights."""
    group = mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (SummedGradient.apply(args[0], group, False), *args[1:])
        else:
            kwargs["hidden_states"] = SummedGradient.apply(kwargs["hidden_states"], group, False)
        with using(module, part) if own_weights else nullcontext():
            return type(module).forward(module, *args, **kwargs)  # the class may have been replaced since (Memory)

    module.forward = forward


def _sum_rotary(module: Any, mesh: DeviceMesh, *, dims: int) -> None:
    """Sum the gradient of the last ``dims`` columns of a latent's projection, the rotary part of all heads' keys.

    The latent's own gradient is summed where heads are made of it: its norm is between.
    """
    group = mesh.get_group()

    def forward(x: Tensor) -> Tensor:
        out = type(module).forward(module, x)
        rotary = SummedGradient.apply(out[..., -dims:], group, False)
        return torch.cat([out[..., :-dims], rotary], -1)

    module.forward = forward


def _use_parts(module: Any) -> None:
    """Let a module use this rank's parts of its own weights."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with using(module, part):
            return type(module).forward(module, *args, **kwargs)

    module.forward = forward


def _share_experts(module: Any, how: Cut) -> None:
    """Replace the forward of experts: each rank has some whole, for all tokens, and the ranks' outputs are summed."""
    # Slices of every expert would not be contiguous where gate and up share a weight, and checkpoints of
    # torch.distributed can't hold those. transformers' own code for this sums gradients in place.
    rank, by_context = how.experts.get_local_rank(), how.by_context
    module.burst_by_context = by_context
    own_loop = type(module).__name__ == "GptOssExperts"

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        plans = running_plans(module) if by_context else ALONE
        # Without a plan, all ranks that share the experts have the same tokens.
        plan = plans.one if isinstance(plans, RunningPlans) else None
        group = (how.experts if plan is None else how.mesh).get_group()
        hidden, weights = (SummedGradient.apply(x, group, False) for x in (hidden, weights))
        if plan is not None:
            hidden, index, weights = (whole_tokens(x, plan) for x in (hidden, index, weights))
        count = module.num_experts  # of this rank
        away = index // count != rank
        # One more than the last expert means none, but gpt-oss's own loop refuses it; there the weight 0 decides.
        none = 0 if own_loop and module.config._experts_implementation == "eager" else count
        index = torch.where(away, none, index % count)
        with using(module, lambda x: Scaled.apply(x.to_local() if isinstance(x, DTensor) else x, how.share)):
            out = type(module).forward(module, hidden, index, weights.masked_fill(away, 0))
            # If no token chose these experts, their output has no gradient; the others wait for this rank's sums.
            idle = torch.is_grad_enabled() and not out.requires_grad
            own = [hidden, weights, *(x for x in module._parameters.values() if x is not None)] if idle else []
            out = InStep.apply(out, *(x.flatten()[:0] for x in own))
        return Summed.apply(out if plan is None else own_tokens(out, plan), group)

    module.forward = forward


def _named(style: styles.TensorParallelLayer) -> styles.TensorParallelLayer:
    """Return a style of transformers, the errors of whose exchanges in a forward are ours."""

    def naming_errors(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(module: nn.Module, *args: Any) -> Any:
            with naming(args[-1].get_group(), f"an exchange of {type(module).__name__} over a tensor-parallel axis"):
                return change(module, *args)

        return changed

    own = copy.copy(style)
    for name in ("transform_inputs_pre_forward", "transform_output_post_forward"):
        setattr(own, name, naming_errors(getattr(style, name)))
    return own


_OF_LATENTS = "mla_kv_a_proj"  # transformers' style of the projection to a latent and the rotary part of its keys
_STYLES: Mapping[str, styles.TensorParallelLayer] = {
    "colwise": _Columns(),
    "rowwise": _Rows(),
    "replicated_with_grad_allreduce": _SummedWeights(),
}


def known(style: str) -> bool:
    """Return whether there is a style of this name."""
    return style in _STYLES or style == _OF_LATENTS or style in ALL_PARALLEL_STYLES


def apply(model: Any, how: Cut, plan: Mapping[str, str]) -> None:
    """Cut the weights and replace the forwards, as transformers does when it loads a model."""
    modules, parameters = read(model).modules, dict(model.named_parameters(remove_duplicate=False))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    latents = owners_of_latents(plan)
    for name, style_name in plan.items():
        owner, _, parameter = name.rpartition(".")
        mesh = how.experts if style_name == OF_EXPERTS else how.mesh
        if style_name == "ep_dispatch_experts":
            _share_experts(modules[name], how)
            continue
        if style_name == _OF_LATENTS:
            if name in modules:
                _sum_rotary(modules[name], mesh, dims=modules[owner].qk_rope_head_dim)
            continue
        style = _STYLES.get(style_name) or _named(ALL_PARALLEL_STYLES[style_name])
        if style_name == "colwise" and owner in latents:
            style = _ColumnsOfLatents()
        if name in parameters:
            style.validate_param(modules[owner], parameter, mesh, parameter_name=name)
            style.shard_param(modules[owner], parameter, mesh)
            _free(modules[owner], parameter)
        elif style_name != "local_params":
            style.install_forward(modules[name], mesh)
    for name in owners_of_columns(plan):
        _sum_inputs(modules[name], how.mesh, own_weights=plan.get(name) == "local_params")
    for name in latents:
        if plan.get(name) == "local_params":
            _use_parts(modules[name])
    for part_of_layer in read(model).of(Kind.INDEXER) if how.mesh.size() > 1 else ():
        indexer: Any = part_of_layer.module
        indexer.burst_axis = how.mesh
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def owners_of_columns(plan: Mapping[str, str]) -> list[str]:
    """Return the names of attentions and feed-forward parts whose input goes to columns alone."""
    columns = (name.rpartition(".") for name, style in plan.items() if style == "colwise")
    return [owner for owner, _, name in columns if name in ("q_proj", "up_proj")]


def owners_of_latents(plan: Mapping[str, str]) -> list[str]:
    """Return the names of attentions that make this rank's heads of a latent, which every rank has whole."""
    columns = (name.rpartition(".") for name, style in plan.items() if style == "colwise")
    return [owner for owner, _, name in columns if name == "kv_b_proj"]


def _free(module: nn.Module, name: str) -> None:
    """Keep no more memory of a cut weight than its part: a slice would keep the whole weight."""
    weight = module._parameters[name]
    if isinstance(weight, DTensor):
        local = weight._local_tensor
        if local.untyped_storage().nbytes() > local.nbytes:
            weight._local_tensor = local.clone(memory_format=torch.contiguous_format)
