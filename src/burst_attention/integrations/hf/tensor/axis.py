"""Cut a transformers model over a tensor-parallel axis, beside context parallelism and FSDP2.

transformers has a plan for each architecture, which names a style for each part, and code for each style (after
Megatron-LM, arXiv 1909.08053). We apply both to a model that is loaded already. The head stays cut in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from burst_attention.attention.batch import digest_text, weight_samples
from burst_attention.comm.collectives import naming, sum_
from burst_attention.comm.link import connect, real
from burst_attention.loss.head import AXIS, SAME_ON_AXIS

from ..reading import Reading, read
from ..reading.attached import hooks_of, origin_of
from ..versions import TESTED
from .parts import OF_EXPERTS, Cut, along_axis, forward_is_ours

Model = TypeVar("Model", bound=nn.Module)

# Model types whose loss and gradients were compared with one process; docs/models.md lists them too.
_TYPES = """
    afmoe arcee aria_text axk1 axk2 beam cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v3 deepseek_v32
    dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    glm glm4 glm4_moe glm_moe_dsa gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama llama4_text mellum
    mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3
    olmo_hybrid olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe seed_oss smollm3 solar_open vaultgemma youtu
"""
# Vision-language models, whose vision tower stays whole.
_SEEING = """
    aria aya_vision cohere2_vision cohere_compass deepseek_vl exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga
    got_ocr2 hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 internvl lighton_ocr llava llava_next llava_next_video
    llava_onevision minimax_m3_vl mistral3 mistral_large4 paddleocr_vl paligemma pp_chart2table qianfan_ocr qwen2_5_vl
    qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl_moe shieldgemma2 smolvlm video_llama_3 video_llava
"""
SEEING = frozenset(_SEEING.split())
COMPARED = frozenset(_TYPES.split()) | SEEING
# For architectures for which transformers has no plan.
_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn": "local_params",
        "model.layers.*.self_attn.sinks": "colwise",
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}
_CUT_HEADS = ("q_proj", "k_proj", "v_proj")
# What an attention with latents computes before its heads: whole, with the whole gradient on every rank.
_BEFORE_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")


def tensor_parallel(model: Model, mesh: DeviceMesh, *, experts: DeviceMesh | None = None) -> Model:
    """Cut a model's weights over the ranks of a tensor-parallel axis. Call it on every rank, before ``parallelize``.

        mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("dp", "cp", "tp"))
        hf.tensor_parallel(model, mesh["tp"])
        hf.parallelize(model, mesh["cp"])
        fully_shard(model, mesh=mesh["dp", "cp"]._flatten("fsdp"))  # each layer first, as usual

    Afterwards the ranks of the axis pass the same batches. Each computes its heads, its columns of the MLPs and
    its part of the vocabulary. Weights that are cut are DTensors; others stay whole, and their gradients are equal on
    all ranks of the axis. Clip gradients by :func:`clip_grad_norm_`.

    Args:
        model: a causal or vision-language model of transformers, whole and with equal weights on every rank of the
            axis, without an optimizer yet, of a model type that was compared with one process (docs/models.md). It is
            modified in place. Its attention heads and key-value heads must be multiples of the number of ranks.
        mesh: the axis, named "tp", of a mesh that has the other axes too. On one rank nothing is cut.
        experts: the ranks that share the experts of a mixture: those of a context and of ``mesh``, as one axis
            (``mesh["cp", "tp"]._flatten("ep")``). Experts then get the tokens of the whole sequence. Their gradients
            are whole: don't sum them over the context. None: the ranks of ``mesh`` share them.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: the model can't be cut, or weights differ between ranks; on every rank of the axis.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1 or mesh.mesh_dim_names != (AXIS,):
        raise TypeError(
            f'mesh={mesh!r} must be the axis "{AXIS}" of a DeviceMesh: init_device_mesh(..., mesh_dim_names=("dp", '
            f'"cp", "{AXIS}"))["{AXIS}"]'
        )
    shared = mesh if experts is None else experts
    if not isinstance(shared, DeviceMesh) or shared.ndim != 1 or mesh.mesh.tolist() not in _axes(shared, mesh):
        raise TypeError(
            f"experts={shared!r} must be one axis of a context's ranks and those of mesh={mesh!r}, these the inner "
            'ones: mesh["cp", "tp"]._flatten("ep")'
        )
    agreement = connect(shared.get_group(), None)[1]
    with agreement.entering("tensor_parallel"):
        plan, heads = plan_of(model, mesh.size(), shared.size())
        if empty := next((name for name, x in model.named_parameters() if x.is_meta), None):
            raise ValueError(f"{empty} has no values (it is on the meta device); pass a model with whole weights")
        weights = digest_text(weight_samples(model.named_parameters()))
        fields = {"model": type(model).__name__, "plan": digest_text(plan), "weights": weights}
    remedy = f"{SAME_ON_AXIS}: load one checkpoint, or set one seed before you build the model"
    agreement.agree("tensor_parallel", fields, remedy=remedy)
    own = agreement if experts is None else connect(mesh.get_group(), None)[1]
    _cut(model, Cut(mesh, own, heads, shared), plan)
    return model


def _axes(shared: DeviceMesh, mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks that share experts, by tensor-parallel axis."""
    ranks, size = shared.mesh.flatten().tolist(), mesh.size()
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def check_contexts(cut: Cut, ranks: list[int], chunks: int) -> None:
    """Refuse a context whose global ``ranks`` are not those that share the experts, and experts in chunks of tokens."""
    column = [axis[cut.mesh.get_local_rank()] for axis in _axes(cut.experts, cut.mesh)]
    if column != ranks:
        raise ValueError(
            f"group has the ranks {ranks}, but hf.tensor_parallel(experts=...) shares the experts over the context "
            f"{column}; pass the same axis to both"
        )
    if chunks > 1:
        raise ValueError(
            f"memory has mlp_chunks={chunks}, but the ranks of the context share the experts, which need all tokens "
            "at once; leave mlp_chunks out, or experts=... of hf.tensor_parallel"
        )


def plan_of(model: Any, ranks: int, shared: int | None = None) -> tuple[dict[str, str], int]:
    """Return each part's style by name, and over how many ranks heads are cut; ``shared``: how many share experts."""
    _check(model, ranks)
    plan = _styles_of(model, ranks, ranks if shared is None else shared)
    return plan, _ranks_of_heads(model, plan, ranks)


def ranks_of_heads(model: Any, ranks: int) -> int:
    """Return over how many of ``ranks`` ranks :func:`tensor_parallel` would cut the heads of a model's attention.

    Exchanges nothing, and needs no weights.

    Raises:
        TypeError, ValueError: the model can't be cut over ``ranks`` ranks; the message says why.
    """
    return plan_of(model, ranks)[1]


def _cut(model: Any, how: Cut, plan: Mapping[str, str]) -> None:
    if how.experts.size() > 1:
        _styles().apply(model, how, plan)
        model._burst_cut = how


def _styles() -> Any:
    """Return the module of styles, which needs code that older versions of transformers lack."""
    try:
        from . import styles as tensor_styles
    except ImportError as error:
        raise ValueError(
            f"transformers {transformers.__version__} lacks the code that tensor parallelism builds on ({error}); "
            f"install a later one: {TESTED['transformers'][1]} was tested"
        ) from error
    return tensor_styles


def cut_of(model: Any) -> Cut | None:
    """Return how :func:`tensor_parallel` cut a model; None if it did not."""
    return getattr(model, "_burst_cut", None)


def ranks_of(model: Any) -> int:
    """Return over how many ranks a model is cut, the experts' among them."""
    cut = cut_of(model)
    return 1 if cut is None else cut.experts.size()


def check_cut(reading: Reading) -> None:
    """Refuse a model that was cut, but not by :func:`tensor_parallel`."""
    if cut_of(reading.model) is not None:
        return
    for part in reading:
        if forward_is_ours(part.module) or any(along_axis(x) for x in part.module.parameters(recurse=False)):
            raise ValueError(
                f"{part.name or 'the model'} was cut over a tensor-parallel axis when the model was loaded, or by "
                'parallelize_module; load the model whole, and call hf.tensor_parallel(model, mesh["tp"]) first'
            )


@torch.no_grad()
def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the model's state on the CPU, with whole weights, gathered one by one; nothing if not ``keep``."""
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # tied weights stay tied
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) not in gathered:
            whole = _gathered(name, x) if isinstance(x, DTensor) else x
            gathered[id(x)] = whole.detach().cpu() if keep else torch.empty(0)
        state[name] = gathered[id(x)]
    return state if keep else {}


def _gathered(name: str, x: DTensor) -> Tensor:
    with naming(x.device_mesh.get_group(0), f"the gathering of {name}"):
        return x.full_tensor()


def check_attached(reading: Reading) -> None:
    """Refuse adapters and hooks that would see parts of hidden states."""
    for part in reading:
        hooks = hooks_of(part.module) if forward_is_ours(part.module) else ()
        if any(not origin_of(hook).startswith(("torch.distributed", "transformers.")) for hook in hooks):
            raise ValueError(
                f"{part.name} has a hook, which would get only this rank's part of its heads or columns; remove it, or "
                "leave out hf.tensor_parallel"
            )
        if type(part.module).__module__.startswith("peft."):
            raise ValueError(
                f"{part.name} is an adapter ({type(part.module).__name__}), which does not work on weights cut by "
                "tensor parallelism; train all weights, or leave out hf.tensor_parallel"
            )


def _check(model: Any, ranks: int) -> None:
    """Refuse a model that can't be cut, or was not compared with one process."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a model of transformers, without adapters and wrappers: cut it "
            "first, then hf.parallelize and FSDP2"
        )
    if hasattr(model, "_burst"):
        raise ValueError("model is parallelized already; call hf.tensor_parallel before hf.parallelize")
    if cut_of(model) is not None:
        raise ValueError(f"model is cut already, over {ranks_of(model)} ranks; call hf.tensor_parallel once")
    kind, text = model.config.model_type, model.config.get_text_config(decoder=True).model_type
    named = type(model).__name__.endswith("ForConditionalGeneration" if kind in SEEING else "ForCausalLM")
    if not named or kind not in COMPARED or (kind in SEEING and text not in COMPARED | {_text_type(model.config)}):
        inner = "" if text == kind else f", around {text!r}"
        raise ValueError(
            f"{type(model).__name__} (model_type {kind!r}{inner}) was not compared with one process under tensor "
            f"parallelism; use FSDP2, or a model with a head of the {len(COMPARED)} types that docs/models.md lists, "
            "such as llama, qwen3_moe and gemma3_text"
        )
    for name, x in model.named_parameters():
        if isinstance(x, DTensor):
            raise ValueError(f"{name} is sharded already; pass a model with whole weights, before fully_shard")
    for name, module in model.named_modules():
        if ranks > 1 and (sparsity := getattr(module, "activation_sparsity", 0)):  # Gemma 3n's
            raise ValueError(
                f"{name} keeps the activations above a threshold that it takes from all of its columns "
                f"(activation_sparsity={sparsity}), but each rank would have a part of them; use FSDP2"
            )
    rows = model.get_output_embeddings().weight.shape[0]
    if -(-rows // ranks) * (ranks - 1) >= rows:
        raise ValueError(f"the vocabulary of {rows} tokens leaves some of {ranks} ranks none; use fewer ranks")


def _text_type(config: Any) -> str:
    """Return the model type of the language model inside of a configuration's default, with which it was compared."""
    kind: str = type(config)().get_text_config(decoder=True).model_type
    return kind


def _styles_of(model: Any, ranks: int, shared: int) -> dict[str, str]:
    """Return the style of each module and parameter, by its name."""
    styles = _styles()
    experts = dict(model.ep_plan or {})
    if shared > ranks and not experts:
        raise ValueError(f"experts=... of {type(model).__name__}, which has no experts; leave it out")
    plan = _PLANS.get(model.config.model_type, model.tp_plan) if ranks > 1 else {}
    plan = {name: style for name, style in plan.items() if not name.startswith(tuple(experts))} | experts
    expanded: dict[str, str] = model._expand_parallel_plan(plan)
    modules = read(model).modules
    for name, style in expanded.items():
        count = model.get_parameter(name).shape[0] if style == OF_EXPERTS else 0
        if count % shared:
            raise ValueError(f"{name} has {count} experts, which {shared} ranks can't share evenly; use other ranks")
    for name, style in expanded.items():
        module = modules.get(name)
        if not styles.known(style):
            raise ValueError(f"{name} has the style {style!r}, which this version of transformers does not have")
        if module is None:
            continue
        kind = type(module)
        if "forward" in vars(module):
            raise ValueError(f"{name} ({kind.__name__}) has a forward of its own, which would be lost; remove it")
        if kind not in (nn.Linear, nn.Embedding) and not kind.__module__.startswith("transformers.models."):
            raise ValueError(
                f"{name} is a {kind.__module__}.{kind.__name__}, an adapter or a quantized layer; cut a model with "
                "plain weights"
            )
    if ranks == 1:
        return expanded
    owners, latents = styles.owners_of_columns(expanded), styles.owners_of_latents(expanded)
    for name in (name for name, module in modules.items() if type(module) is nn.Linear):
        owner, given = name.rpartition(".")[0], expanded.get(name)
        right = given in ("colwise", "rowwise") if owner in owners else given != "colwise" or owner in latents
        if not right:  # the gradient of the owner's input would be wrong
            raise ValueError(f"{name} has the style {given!r} in {owner} of {type(model).__name__}: not supported")
    for owner in (*owners, *latents):
        expanded = _norms_of_heads(modules[owner], owner) | expanded
        planned = [name for name, style in expanded.items() if style != "local_params"]
        planned += [f"{owner}.{name}" for name in _BEFORE_HEADS] if owner in latents else []
        for name, _ in modules[owner].named_parameters(prefix=owner):
            if not any(name == each or name.startswith(f"{each}.") for each in planned):
                raise ValueError(  # each rank would have another gradient of it
                    f"{name} is used by heads or columns that are cut, but transformers' plan of "
                    f"{type(model).__name__} leaves it out; use FSDP2, or a configuration without it"
                )
    missing = [name for name in ("embed_tokens", "lm_head") if not any(name in each for each in expanded)]
    if missing:
        raise ValueError(f"transformers' plan of {type(model).__name__} does not cut its {missing[0]}")
    return expanded


def _norms_of_heads(attention: Any, name: str) -> dict[str, str]:
    """Return the style of norms with one weight for all heads, which some plans of transformers leave out (GLM-4.5)."""
    norms = {x: getattr(attention, x, None) for x in ("q_norm", "k_norm")}
    of_heads = [x for x, norm in norms.items() if _shape_of(norm) == (getattr(attention, "head_dim", None),)]
    return {f"{name}.{x}": "replicated_with_grad_allreduce" for x in of_heads}


def _shape_of(module: Any) -> tuple[int, ...]:
    return tuple(getattr(getattr(module, "weight", None), "shape", ()))


def _ranks_of_heads(model: Any, plan: Mapping[str, str], ranks: int) -> int:
    """Return over how many ranks the heads of an attention are cut."""
    counts = [("num_attention_heads", each) for each in _heads_of_latents(model, plan)]
    if not counts:
        if not any(name.endswith(_CUT_HEADS) and style == "colwise" for name, style in plan.items()):
            return 1  # q, k and v are gathered: every rank computes all heads
        text = model.config.get_text_config(decoder=True)
        counts = [(name, getattr(text, name)) for name in ("num_attention_heads", "num_key_value_heads")]
    for name, count in counts:
        if count % ranks:
            raise ValueError(
                f"{name}={count} of the model is not a multiple of the {ranks} ranks of the axis; use "
                f"{'fewer' if count < ranks else 'other'} ranks"
            )
    return ranks


def _heads_of_latents(model: Any, plan: Mapping[str, str]) -> list[int]:
    """Return the heads of each attention with latents whose heads the plan cuts; layers may differ in them."""
    modules = read(model).modules
    return [modules[owner].num_heads for owner in _styles().owners_of_latents(plan)]


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip gradients by the norm of all of them, over all ranks that hold parts. Call it on every rank.

    Like :func:`torch.nn.utils.clip_grad_norm_`, which takes no weights of several meshes. A gradient that is a DTensor
    counts once, whole; one that is no DTensor is taken as equal on all ranks. If the norm is not finite, the gradients
    stay as they are.

    Args:
        parameters: the model's, the same on every rank; those without a gradient count as 0.
        max_norm: the largest norm, greater than 0.

    Returns:
        The norm before, a scalar in fp32 (fp64 for fp64), equal on all ranks.

    Raises:
        TypeError: a gradient is a partial sum over an axis of its mesh, or ``parameters`` is a module.
        ValueError: ``max_norm`` is not greater than 0.
    """
    limit = real(max_norm)
    if limit is None or not limit > 0:  # so written, a NaN is refused too
        raise ValueError(
            f"max_norm={max_norm!r} must be a number greater than 0; to keep gradients, leave the call out"
        )
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters is a {type(parameters).__name__}; pass model.parameters()")
    every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    squares: dict[Any, Tensor] = {}
    for x in every:
        axes = _axes_of(x)
        local = _local_of(x.grad) if x.grad is not None else _local_of(x).new_zeros(())
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(local, dtype=wide).square()
        squares[axes] = squares[axes] + square if axes in squares else square
    for (mesh, dims), square in squares.items():
        for dim in dims:
            sum_(square, mesh.get_group(dim), "clip_grad_norm_")
    norm = torch.as_tensor(sum(squares.values())).sqrt()
    scale = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for x in every:
        if x.grad is not None:
            _local_of(x.grad).mul_(scale)
    return norm


def _axes_of(x: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return the mesh of a weight's gradient, and its axes over which the gradient is cut."""
    of = x if x.grad is None else x.grad
    if not isinstance(of, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in of.placements):
        raise TypeError(f"a gradient has the placements {of.placements}, a partial sum; redistribute it first")
    return of.device_mesh, tuple(n for n, placement in enumerate(of.placements) if not isinstance(placement, Replicate))


def _local_of(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x
