"""Every causal language model of the installed transformers, tiny and random, over three ranks: equal or refused?

    python tests/tools/families.py [MODEL_TYPE ...]        writes docs/models.md without a model type

A model that comes out "different" (plausible wrong numbers) or "error" (no refusal by name) is a bug of ours. Weights
with which a choice of experts, keys or tokens is nearly a tie are drawn again: rounding would decide there.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from burst_attention import burst_attention, make_plan
from burst_attention.attention import chosen_attention
from burst_attention.attention.batch import Chunked, Plans
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.integrations.hf.call.stub_forward import run_body
from burst_attention.integrations.hf.layers.attention import Attention
from burst_attention.integrations.hf.reading import Kind, forwards, known, read
from burst_attention.integrations.hf.reading.forwards import body_of
from burst_attention.integrations.hf.reading.structure import attention_configs
from burst_attention.testing import WorkerError, local_world
from tests.support.conditioning import certain, greatest, margin_of_choices, name_of_worst

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
WORLD, SEQLEN, WINDOW, VOCABULARY = 3, 37, 5, 97
PROMPT = 70  # tokens that a cache over ranks shards
DRAWS = 8  # of weights
LARGEST = 20_000_000  # parameters of a model that is run; of larger ones only the parts are looked at
VISION = "[a vision-language model](#vision-language-models)"
# Relative L2. Models in fp64 round to fp32 in their norms and rotary angles.
BOUND, GRADIENT_BOUND = 1e-5, 1e-4
# Settings that make a model small, each taken where the configuration has it.
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
# These only where it is not None.
SMALL = (
    dict.fromkeys(("n_embd", "d_model", "embedding_size"), 64)
    | dict.fromkeys(("n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96)
    | dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "mamba_d_ssm"), 128)
    | dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), 4)
    | dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4)
    | dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size"), 96)
    # Far fewer keys than there are; with many heads no score is 0, so that stock's order of equal ones does not matter.
    | {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 8, "index_block_size": 4, "index_topk_blocks": 2}
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32)
    | dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32)
    | dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16)
    | dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 16)
    | dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input", "time_step_rank"), 8)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "encoder_layers", "n_groups", "linear_num_key_heads"), 2)
    | {"n_group": 1, "topk_group": 1, "vocab_size_per_layer_input": VOCABULARY}
)
LATENT = {"head_dim": 8, "num_key_value_heads": 4}  # of latent attention it is the part that is turned
_MIXED = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA4 = {
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "intermediate_size_mlp": 96,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
    "no_rope_layers": [1, 0] * 2,
}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 96},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4)
    | dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "shared_experts_intermediate_size"), 32)
    | {"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    "gemma3_text": {"layer_types": _MIXED},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": _MIXED, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"global_head_dim": 16, "top_k_experts": 2, "num_experts": 4, "moe_intermediate_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hy_v4_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts": 16, "layer_types": _LINEAR, "linear_num_heads": 4, "linear_head_dim": 16},
    "llama4_text": LLAMA4,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2, "index_n_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


# Encoders by default: as causal language models they need is_decoder=True.
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


@dataclass
class Verdict:
    """``text``: the refusal's or the error's message. The differences are relative to one process's eager attention."""

    model_type: str
    kind: str  # equal, refused, different, error, not built
    text: str = ""
    hidden: float = 0.0
    gradients: float = 0.0
    worst: str = ""
    windows: set[int | None] = field(default_factory=set)
    logits: str = ""
    generates: str = ""  # equal, different, an error, or how it is refused
    mechanisms: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        figures = f"{self.hidden:.0e} {self.gradients:.0e} {self.logits} {self.generates}"
        return f"{self.kind:10} {self.model_type:26} {figures} {self.text}"


def judge(model_type: str) -> Verdict:
    """Compare the model over ``WORLD`` ranks, by ``hf.parallelize``, with the same model in one process."""
    try:
        config, parts = built(model_type)
        large = sum(parameter.numel() for parameter in parts.parameters()) > LARGEST
    except Exception as error:
        return Verdict(model_type, "not built", _reason(model_type, first_line(error)))
    if large:
        return _without_weights(model_type, parts, _reason(model_type, "larger than is run here"))
    try:
        draws = (model_of(model_type, config, "eager", seed=seed) for seed in range(DRAWS))
        alone = certain(draws, margin)
        models = copies_of(alone)
        expected = one_process(model_type, alone)
    except Exception as error:
        return _without_weights(model_type, parts, first_line(error))
    try:
        return _by_running(model_type, config, alone, expected, models)
    except WorkerError as error:
        text = refusal(error)
        others = [each for each in error.errors.values() if each]
        return Verdict(model_type, "refused", text) if text else Verdict(model_type, "error", first_line(others[0]))


def _reason(model_type: str, otherwise: str) -> str:
    """Why a model is not built: tests/tools/vision_families.py runs those with images."""
    return VISION if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else otherwise


def refusal(error: WorkerError) -> str:
    """The error by which the library refuses a model on every rank; empty if any rank has another."""
    own = [error.errors.get(rank) for rank in range(WORLD)]
    return str(own[0]) if all(type(each) in (TypeError, ValueError) and is_ours(each) for each in own) else ""


def _without_weights(model_type: str, parts: torch.nn.Module, otherwise: str) -> Verdict:
    """Whether a model is refused that can't be run here, and has no memory for its weights."""
    refused = refusal_of(parts)
    return Verdict(model_type, "refused" if refused else "not built", refused or otherwise)


def refusal_of(model: Any) -> str:
    """The error by which ``hf.parallelize`` refuses a model; empty if it doesn't."""
    try:
        with local_world(WORLD, timeout=60) as ranks:
            ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group))
    except WorkerError as error:
        return refusal(error)
    return ""


def one_process(model_type: str, alone: Any) -> Any:
    """The output of the model's own forward, and gradients."""
    if forwards.has_stock_loss(alone):
        alone.loss_function = exact_loss
    with dtype_of_scores(model_type):
        out = alone(**batch(), use_cache=False)
        out.hidden = hidden_of(alone, batch()["input_ids"], torch.arange(SEQLEN).repeat(2, 1)).detach()
    out.loss.backward()
    return out


def margin(model: Any) -> float:
    """How far all choices of experts, keys and tokens are from a tie that rounding would decide."""

    def run(model: Any) -> None:
        with dtype_of_scores(model.config.model_type):
            model(**batch(), use_cache=False)
        with contextlib.suppress(Exception):  # not all can; what they choose until then counts
            _generated_alone(model)

    return margin_of_choices(model, run)


def _by_running(model_type: str, config: PreTrainedConfig, alone: Any, expected: Any, models: list[Any]) -> Verdict:
    windows: set[int | None] = set()
    mechanisms = mechanisms_of(alone, config)

    def rank(group: Any) -> tuple[float, torch.Tensor, torch.Tensor | Exception]:
        model = hf.parallelize(models[group.rank()], group, gradients="sum", timeout=60)
        loss = model(**batch()).loss
        loss.backward()
        with torch.no_grad():
            logits = model(input_ids=batch()["input_ids"], logits="gather").logits
        try:
            return loss.item(), logits, _generated(model, past_key_values=ShardedCache(model.config, group))
        except Exception as error:
            return loss.item(), logits, error

    noting = functools.partial(_noting, windows, mechanisms)
    with mock.patch.dict(Attention.__call__.__kwdefaults__, attend=noting), local_world(WORLD, timeout=60) as ranks:
        answers = ranks.run(rank)
    verdict = _compared(model_type, alone, expected, models, *answers[0][:2])
    verdict.windows, verdict.mechanisms = windows, mechanisms
    verdict.generates = _of_tokens(alone, [tokens for _, _, tokens in answers])
    if verdict.generates in ("different", "error"):
        verdict.kind, verdict.text = verdict.generates, f"generate: {answers[0][2]}"
    reported = _reported_by_the_checks(model_type, config)
    if reported:
        verdict.kind, verdict.text = "error", f"{verdict.kind}, but the checks report: {reported}"
    return verdict


def copies_of(alone: Any) -> list[Any]:
    """The same model for each rank. Copy it before it runs: some models then hold a state, which can't be copied."""
    models = [copy.deepcopy(alone) for _ in range(WORLD)]
    for model in models:
        model.zero_grad()
        vars(model).pop("_loss_function", None)  # exact_loss
    return models


def _generated(model: Any, **cache: Any) -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY, (1, PROMPT), generator=_generator(2))
    return model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, **cache)


def _generated_alone(alone: Any) -> torch.Tensor:
    # transformers' cache drops keys beyond a window that such a model's layers don't use.
    return _generated(alone, use_cache=alone.config.model_type not in known.WITHOUT_WINDOW)


def _of_tokens(alone: Any, made: list[torch.Tensor | Exception]) -> str:
    """Whether the ranks' tokens are those of one process: equal, different, error, or how they are refused."""
    if any(isinstance(each, Exception) for each in made):
        refused = all(type(each) in (TypeError, ValueError) and is_ours(each) for each in made)
        return str(made[0]) if refused else "error"
    expected = _generated_alone(alone)
    return "equal" if all(torch.equal(each, expected) for each in made) else "different"


def plans_of(full: Any, config: PreTrainedConfig) -> Plans:
    """The plans of all layers, as ``hf.parallelize`` makes them, and one for the tool's window."""
    reaches = hf.layer_windows(config.get_text_config(decoder=True)) if hasattr(config, "num_hidden_layers") else []
    return Plans.by_windows(full, [None, WINDOW, *(each for each in reaches if isinstance(each, Chunked))], full.mask)


def _compared(model_type, alone, expected, models, loss, logits):
    """Compare the loss, the logits and the gradient of each parameter with those of one process."""
    off = greatest([abs(loss / expected.loss.item() - 1), relative(logits, expected.logits.detach())])
    every = apart_of(gradients_of(alone), models)
    apart = every[worst := name_of_worst(every)]
    right = off <= BOUND and apart <= GRADIENT_BOUND
    text = "" if right else f"loss or logits by {off:.0e}, {worst} by {apart:.0e}"
    head = _form_of(alone.get_output_embeddings(), expected.hidden, logits)
    return Verdict(model_type, "equal" if right else "different", text, off, apart, worst, logits=head)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients that a model has, by parameter."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def apart_of(gradients: dict[str, torch.Tensor], models: list[Any]) -> dict[str, float]:
    """How far the sum over the ranks' models is from each gradient, relative to its norm."""
    # A gradient that is nothing but rounding has no digits to compare.
    floor = 1e-5 * greatest(gradient.norm().item() for gradient in gradients.values())
    ours = [dict(model.named_parameters()) for model in models]
    totals = {name: sum(mine[name].grad for mine in ours if mine[name].grad is not None) for name in gradients}
    return {
        name: ((totals[name] - gradient).norm() / max(gradient.norm().item(), floor)).item()
        for name, gradient in gradients.items()
    }


def exact_loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """transformers' next-token loss without its cast of the logits to fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _reported_by_the_checks(model_type: str, config: PreTrainedConfig) -> str:
    """What ``hf.check_model`` or ``hf.check_config`` refuses."""
    models = [model_of(model_type, config, "burst")]
    models += [copy.deepcopy(models[0]) for _ in range(WORLD - 1)]

    def rank(group: Any) -> None:
        full = make_plan(SEQLEN, group=group)
        hf.check_model(models[full.rank], plans_of(full, config))

    try:
        hf.check_config(config, training=False)
        with local_world(WORLD, timeout=30) as ranks:
            ranks.run(rank)
    except (ValueError, WorkerError) as error:
        return str(error)
    return ""


@torch.no_grad()
def _form_of(head: Any, hidden: torch.Tensor, logits: torch.Tensor) -> str:
    """Whether the logits are hidden states times the head's weight and nothing else."""
    if head is None or head.weight.shape[1] != hidden.shape[2]:
        return "no plain head"
    product = hidden @ head.weight.T
    return "" if logits.shape == product.shape and relative(logits, product) <= BOUND else "changed after the product"


def built(model_type: str, **own: Any) -> tuple[PreTrainedConfig, Any]:
    """A small configuration with which the class can be built, and the model without memory for its weights."""
    config = tiny_config(model_type, **own)
    try:
        return config, without_weights(model_type, config)
    except AttributeError:  # some classes are of a model's text alone, and can't take the whole model's configuration
        text = config.get_text_config(decoder=True)
        if text is config:
            raise
        config = tiny_config(text.model_type, **own)
        return config, without_weights(model_type, config)


def without_weights(model_type: str, config: PreTrainedConfig) -> Any:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return model_class(model_type)(copy.deepcopy(config))


def dtype_of_scores(model_type: str) -> AbstractContextManager[None]:
    """Let XGLM, which makes its least score in the default dtype, make it in fp64."""
    return default_dtype(torch.float64 if model_type == "xglm" else torch.float32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors in another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def taken_by(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a model's forward takes."""
    names = inspect.signature(model.forward).parameters
    return given if "kwargs" in names else {name: value for name, value in given.items() if name in names}


def tiny_config(model_type: str, **own: Any) -> PreTrainedConfig:
    """The default configuration made small; that of a model with several parts stays as it is."""
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    names = known | dict.fromkeys(getattr(kind, "attribute_map", {}))
    changes = {name: value for name, value in SIZES.items() if name in names}
    changes |= {name: value for name, value in SMALL.items() if name in names and known.get(name, 0) is not None}
    if "qk_rope_head_dim" in known:
        changes |= LATENT
    if known.get("sliding_window"):
        changes["sliding_window"] = WINDOW
    for name in ("attention_dropout", "attn_pdrop"):
        if name in known:
            changes[name] = 0.0
    if model_type in ENCODERS:
        changes["is_decoder"] = True
    return kind(**changes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | OWN.get(model_type, {}) | own)


def model_class(model_type: str) -> Callable[..., Any]:
    """The class that ``AutoModelForCausalLM`` takes."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def model_of(
    model_type: str, config: PreTrainedConfig, implementation: str, parts: Any = None, *, seed: int = 0
) -> Any:
    """The same random weights under every attention; larger than at a first step, so that every part shows.

    ``parts``: the model without memory for its weights, if there is one already.
    """
    config = copy.deepcopy(config)
    parts = without_weights(model_type, config) if parts is None else parts
    own = any(map(known.scores_itself, parts.modules()))  # their classes read the implementation when they are built
    config._attn_implementation = "eager" if own else implementation
    config._experts_implementation = "eager"  # the fused one knows no fp64
    torch.manual_seed(seed)
    model = model_class(model_type)(config).double().eval()
    if mixers_of(parts):  # their decays and sums over the sequence magnify the fp32 in modeling files
        make_exact(body_of(model))
    if own:
        for each in attention_configs(read(model)):
            each._attn_implementation = implementation
    return moved(model, 5 + seed)


@torch.no_grad()
def moved(model: Any, seed: int = 5, size: float = 0.05) -> Any:
    """Add random numbers to a model's weights, and return it."""
    generator = _generator(seed)
    for parameter in model.parameters():
        parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def make_exact(body: Any) -> None:
    """Let a body's parts compute in fp64 what their modeling file casts to fp32; heads and forwards stay stock."""
    exact = double_module(type(body).__module__.split(".")[-2])
    for part in body.modules():
        own = type(part).__module__
        for name, value in vars(part).items():
            if inspect.isfunction(value) and value.__module__ == own:
                setattr(part, name, getattr(exact, value.__name__))
        part.__class__ = getattr(exact, type(part).__name__, type(part))


@functools.cache
def double_module(name: str) -> Any:
    """transformers' modeling file of a package with its fp32 islands in fp64, so that rounding hides nothing."""
    kind = f"transformers.models.{name}.modeling_{name}"
    source = Path(importlib.util.find_spec(kind).origin).read_text()
    source = re.sub(r"from \.\.\.(\w)", r"from transformers.\1", source)
    source = re.sub(r"from \.\.\. import", "from transformers import", source)
    source = re.sub(r"from \.\.(\w)", r"from transformers.models.\1", source)
    source = re.sub(r"from \.(\w)", rf"from transformers.models.{name}.\1", source)
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = re.sub(r"dtype=torch\.float\b(?!\d)", "dtype=torch.float64", source)
    source = source.replace("@auto_docstring", "@_undocumented")
    plain = "def _undocumented(f=None, **_):\n    return f if f is not None else (lambda g: g)\n"
    source = source.replace("\nimport torch\n", f"\nimport torch\n\n{plain}\n", 1)
    own = f"{kind}_64"
    module = sys.modules[own] = importlib.util.module_from_spec(importlib.util.spec_from_loader(own, loader=None))
    linecache.cache[f"<{own}>"] = len(source), None, source.splitlines(keepends=True), f"<{own}>"  # parts are read
    exec(compile(source, f"<{own}>", "exec"), module.__dict__)
    return module


def mixers_of(model: Any) -> set[str]:
    """The mechanisms of its layers, other than attention, that pass a state from token to token."""
    return {str(known.mechanism(mixer.module)) for mixer in read(model).of(Kind.MIXER)}


def mechanisms_of(model: Any, config: PreTrainedConfig) -> set[str]:
    """What the library does for this model apart from attention; its calls say the rest."""
    found = mixers_of(model)
    if config.model_type in ENCODERS:
        found.add("encoder")
    if any(map(known.scores_itself, model.modules())):
        found.add("scores")
    if any(map(known.is_counted, model.modules())):
        found.add("positions")
    text = config.get_text_config(decoder=True)
    if known.CHUNKED in (getattr(text, "layer_types", None) or ()):
        found.add("chunks")
    return found


def hidden_of(model: Any, ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    return run_body(body_of(model), input_ids=ids, position_ids=positions, use_cache=False, **options)[0]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, SEQLEN), generator=_generator(1))
    return {"input_ids": ids, "labels": ids}


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1].strip()[:160] if text else ''}"


def _noting(windows, mechanisms, q, k, v, plan, **options):
    windows.add(plan.mask.window)
    mechanisms |= {name for key, name in (("softcap", "soft cap"), ("sinks", "sinks")) if key in options}
    if (indices := options.pop("indices", None)) is not None:
        mechanisms.add("indexer")
        return chosen_attention(q, k, v, indices, plan, **options)[0]
    return burst_attention(q, k, v, plan, **options)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def is_ours(error: BaseException) -> bool:
    """Whether the library raised it, and not something in a model that fell over what it was given."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = ("burst_attention", "burst_train")
    return trace is not None and any(name in trace.tb_frame.f_code.co_filename for name in ours)


SUFFIX = re.compile(
    r",? (?:so|and) each rank would see only its shard; run it on one rank, where it sees the whole sequence$"
)
OWNER = re.compile(r"^(?:\S+|the model) \((\w+)\) ")


def page(verdicts: list[Verdict]) -> str:
    """The section of docs/models.md about causal language models."""
    equal = [verdict for verdict in verdicts if verdict.kind == "equal"]
    apart = f"{max(each.hidden for each in equal):.0e}, gradients by {max(each.gradients for each in equal):.0e}"
    lines = [
        f"All {len(verdicts)} model types of transformers {transformers.__version__}: {WORLD} ranks, {SEQLEN} tokens.",
        "",
        f"**Equal** ({len(equal)}): loss and logits differ by at most {apart} (relative L2).",
        "",
        "| mechanism | model types |",
        "|---|---|",
    ]
    rows: dict[str, list[str]] = {}
    for verdict in sorted(equal, key=lambda each: each.model_type):
        windows = {"windows"} if WINDOW in verdict.windows else set()
        for name in sorted(verdict.mechanisms | windows) or ["attention alone"]:
            rows.setdefault(name, []).append(verdict.model_type)
    rows["logits"] = sorted(verdict.model_type for verdict in equal if verdict.logits)
    lines += [
        f"| {name} | {', '.join(types)} |" for name, types in sorted(rows.items(), key=lambda row: row[0].lower())
    ]
    generate = sorted(verdict.model_type for verdict in equal if verdict.generates == "equal")
    listed = f"**Generate over ranks** ({len(generate)}): with a `ShardedCache`, one process's tokens after a prompt of"
    lines += ["", f"{listed} {PROMPT}. All others refuse the cache.", "", f"{', '.join(generate)}.", ""]
    return "\n".join([*lines, *reasons(verdicts)])


def reasons(verdicts: Iterable[Any]) -> list[str]:
    """Lists of the refused model types and of those that were not built, those with one reason in one line."""
    lines = []
    for kind in sorted({verdict.kind for verdict in verdicts} - {"equal"}):
        found: dict[str, list[str]] = {}
        for verdict in sorted(verdicts, key=lambda each: each.model_type):
            if verdict.kind == kind:
                reason = SUFFIX.sub("", verdict.text.replace("\n", " "))
                owner = OWNER.match(reason)
                found.setdefault(OWNER.sub("", reason), []).append(
                    verdict.model_type + (f" ({owner[1]})" if owner else "")
                )
        lines += [f"**{kind.capitalize()}** ({sum(map(len, found.values()))}):", ""]
        lines += [f"- {', '.join(types)}: {reason}" for reason, types in found.items()]
        lines.append("")
    return lines[:-1]


def write_section(title: str, text: str) -> None:
    """Replace the section of docs/models.md."""
    start, section, rest = PAGE.read_text("utf-8").partition(f"## {title}\n")
    end = rest.find("\n## ")
    PAGE.write_text(f"{start}{section}\n{text}\n{'' if end < 0 else rest[end:]}", "utf-8")


def run(description: str | None, every: Iterable[str], judge: Callable[[str], Any], title: str, page: Any) -> int:
    """Judge the named model types, or every one and write the page's section; return the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="*", help="only these; the page is left as it is")
    chosen = parser.parse_args().model_type
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    verdicts = []
    for model_type in chosen or every:
        found = judge(model_type)
        verdicts.append(found)
        print(found, flush=True)
    if not chosen:
        write_section(title, page(verdicts))
    return int(any(verdict.kind in ("different", "error") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(run(__doc__, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, judge, "Causal language models", page))
