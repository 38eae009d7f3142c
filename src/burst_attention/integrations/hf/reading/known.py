"""What is known of classes of transformers and PEFT, by name: one table for each question.

Only names and modules are read here; ``structure`` decides, and ``converted`` replaces forwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import GenerationMixin

from burst_attention.recurrence import kernels

from ..classes import stock_class


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


NAME = "burst"  # of our attention among transformers' implementations
ALONE = "run it on one rank, where it sees the whole sequence"  # the remedy where a model can't run on shards

_GENERATED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The name of a model's cache, as argument and in its output: transformers renamed it in 5.24.
CACHE = "cache" if "cache" in _GENERATED else "past_key_values"
CACHES = ("cache", "past_key_values", "cache_params")  # its names in all versions; the last one is Mamba's

# Kernels over runs, by the names under which modeling files call the kernel over a whole sequence.
KERNELS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": kernels.convolution,
    "torch_chunk_gated_delta_rule": kernels.delta_rule,
    "chunk_kimi_delta_attention": kernels.delta_rule,
    "mamba2_chunk_scan": kernels.mamba2,
    "mamba_selective_scan": kernels.mamba1,
    "mamba2_split_conv1d_scan_combined": kernels.no_fused_kernel,
    "mamba_inner_fn": kernels.no_fused_kernel,
}
_CONVOLUTION = names("causal_conv1d_fn")
_GATED_DELTA = _CONVOLUTION | {"torch_chunk_gated_delta_rule"}
_KIMI_DELTA = _CONVOLUTION | {"chunk_kimi_delta_attention"}
_MAMBA_2 = _CONVOLUTION | {"mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}
_SCAN = _CONVOLUTION | {"mamba_selective_scan"}
_MAMBA_1 = _SCAN | {"mamba_inner_fn"}
_DECAYS = names("slope_rate query_decay key_decay diagonal_decay")  # attributes, not kernels
# Mechanisms, as docs/models.md names them, which names of KERNELS and _DECAYS a forward uses, and the classes.
_MECHANISMS = (
    ("Kimi delta", _KIMI_DELTA, "BailingHybridDeltaAttention Glm5NextTextLinearAttention KimiLinearDeltaAttention"),
    ("Mamba 2", _MAMBA_2, "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer"),
    ("Mamba 2", _MAMBA_2, "NemotronHMamba2Mixer Zamba2MambaMixer"),
    ("Mamba 1", _MAMBA_1, "FalconMambaMixer MambaMixer"),
    ("Mamba 1", _SCAN, "JambaMambaMixer ZambaMambaMixer"),
    ("convolution", _CONVOLUTION, "Lfm2MoeShortConv Lfm2ShortConv Lfm3ShortConv"),
    ("lightning", _DECAYS, "MiniMaxLightningAttention"),
    ("gated delta", _GATED_DELTA, "LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet"),
    ("gated delta", _GATED_DELTA, "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet"),
)
_MIXERS = {kind: (name, used) for name, used, kinds in _MECHANISMS for kind in kinds.split()}
CHUNKED, INDEXED, BLOCKS = "chunked_attention", "indexed_attention", "minimax_m3_sparse"
_CACHED = "which passes keys and values as a cache, and a cache holds whole sequences"
# Tuners of PEFT that work around the model, not in its layers.
TUNERS = {
    "CARTRIDGE": f"cartridges, {_CACHED}",
    "CPT": "CPT, whose own loss takes whole logits",
    "PREFIX_TUNING": f"prefix tuning, {_CACHED}",
}
# What passes between the tokens of a layer, by the layer's kind in a configuration's lists.
LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("full_attention", "sliding_attention", CHUNKED), "attention"),
    **dict.fromkeys(("attention", "global_attention", "local_attention"), "attention"),
    **dict.fromkeys((INDEXED, BLOCKS), "attention"),
    **dict.fromkeys(("linear_attention", "conv", "hybrid", "mamba", "mamba2"), "state"),  # one mixer each
    **dict.fromkeys(("mlp", "moe", "dense", "sparse"), "nothing"),
}
# Attentions that compute their scores themselves, by the folder of their modeling file (``own_attention``).
SCORES = names(
    """
    big_bird.BigBirdSelfAttention codegen.CodeGenAttention falcon.FalconAttention gpt_neo.GPTNeoSelfAttention
    gpt_neox_japanese.GPTNeoXJapaneseAttention gptj.GPTJAttention megatron_bert.MegatronBertSelfAttention
    mvp.MvpAttention openai.Attention rembert.RemBertSelfAttention roformer.RoFormerSelfAttention
    trocr.TrOCRAttention xglm.XGLMAttention
    """
)
# Attentions whose indexer chooses keys, by the start of the names of their classes (``indexed``).
_INDEXED = names("AXK2 DeepseekV32 Dots3NoteText Glm5NextText GlmMoeDsa HYV4 HYV4VL MiniMaxM3VL MistralLarge4Text")
_WIDE_KEYS = ("Dots3NoteTextIndexer",)  # indexers that rotate their keys by angles in fp32, and so send them in fp32
_NOT_PASSED_ON = ("NemotronAttention", "StableLmAttention")  # their layers keep keywords to themselves
# Embeddings whose forward takes ``position_ids`` [S], but the decoder around them counts those itself, or passes none.
_COUNTED = names(
    """
    BartLearnedPositionalEmbedding BigBirdPegasusLearnedPositionalEmbedding BlenderbotLearnedPositionalEmbedding
    BlenderbotSmallLearnedPositionalEmbedding MBartLearnedPositionalEmbedding MarianSinusoidalPositionalEmbedding
    MvpLearnedPositionalEmbedding PLBartLearnedPositionalEmbedding PegasusSinusoidalPositionalEmbedding
    RoFormerSinusoidalPositionalEmbedding TrOCRLearnedPositionalEmbedding
    """
)
# Model types whose configuration has a window, but whose layers use none in transformers.
WITHOUT_WINDOW = ("moshi",)
FULL_WITH_WINDOW = ("minimax",)  # whose layers of full attention have the window, if there is one
SAMPLING = ("PhimoeTopKRouter",)  # draws random values whenever it is in training mode

# Operations of classes of transformers that don't mix tokens there, though ``token_code`` can't tell: models with these
# classes equal one process (``tests/tools/families.py``), or the classes pick experts as those do.
_READ = (
    (
        "gather scatter_ softmax topk",  # along the experts of flattened tokens
        """
    AXK1TopkRouter AXK2TopkRouter AfmoeTokenChoiceRouter BailingHybridTopkRouter BeamTopKRouter Cohere2MoeTopKRouter
    DbrxFFN DeepseekV2TopkRouter DeepseekV32TopkRouter DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter
    Ernie4_5_MoeTopKRouter ExaoneMoeTopkRouter Glm4MoeLiteTopkRouter Glm4MoeTopkRouter Glm4vMoeTextTopkRouter
    Glm5NextTextTopkRouter GlmMoeDsaTopkRouter GptOssTopKRouter HYV3TopKRouter HYV4TopkRouter HYV4VLTopkRouter
    HunYuanMoEV1Gate KimiLinearTopkRouter Kolibri1TopKRouter Lfm2MoeTopKRouter Llama4Router LongcatFlashTopkRouter
    MiMoV2FlashTopkRouter MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter Mistral4TopkRouter MistralLarge4TextTopkRouter
    NemotronHTopkRouter SolarOpenTopkRouter Step3p7TopKRouter UnlimitedOcrTextTopkRouter
    """,
    ),
    ("scatter softmax sort sum topk", "JetMoeTopKGating"),
    ("sum transpose", "Llama4TextMoe"),  # over the experts
    ("T matmul", "DbrxExpertGLU"),  # weights of an expert
    ("matmul permute mean", "Gemma3nTextDecoderLayer Gemma3nTextModel"),  # over the copies of the stream
    ("numpy.sqrt", "CTRLModel"),
    ("cat", "DoryAttention"),  # of a cache
    # Of channels or heads.
    ("chunk split unbind", "DbrxAttention DiffLlamaAttention GPT2Attention GPTBigCodeAttention ModernBertAttention"),
    ("baddbmm matmul", "GPT2Attention"),  # a path of eager attention
    ("exponential_", "PhimoeTopKRouter"),  # refused in training
    ("_cast", "NemotronLayerNorm1P"),
    ("__setstate__", "WhisperDecoder"),
    (
        "arange cat cumsum index max min",  # of positions, which they get
        """
    BioGptLearnedPositionalEmbedding CamembertEmbeddings Data2VecTextEmbeddings FalconModel Gemma4TextModel
    Gemma4UnifiedTextModel Llama4TextAttention MiniMaxM3VLAttention OPTDecoder OPTLearnedPositionalEmbedding
    PhimoeRotaryEmbedding RobertaEmbeddings RobertaPreLayerNormEmbeddings XGLMSinusoidalPositionalEmbedding
    XLMRobertaEmbeddings XLMRobertaXLEmbeddings XmodEmbeddings XmodModel
    """,
    ),
    ("all", "Gemma4TextModel"),
    # Of the first head of a mask, for the indexer.
    ("index", "AXK2Attention DeepseekV32Attention Dots3NoteTextAttention GlmMoeDsaAttention HYV4Attention"),
    ("index", "HYV4VLAttention MistralLarge4TextAttention"),
    # Over the copies of the stream.
    ("sum", "Glm5NextTextHyperConnection HYV4HyperConnection HYV4HyperHead HYV4VLHyperConnection HYV4VLHyperHead"),
    ("matmul transpose", "Glm5NextTextDecoderLayer"),
    ("mean", "Glm5NextTextHyperHead"),
    ("cat einsum index pad", "BigBirdModel"),  # of masks
)
REVIEWED: Mapping[str, frozenset[str]] = {
    kind: frozenset().union(*(names(used) for used, kinds in _READ if kind in kinds.split()))
    for kind in " ".join(kinds for _, kinds in _READ).split()
}

_ALIBI = "adds biases by distance (ALiBi) to its attention scores, which no kernel here takes"
_CODEBOOKS = "reads several codebooks for each token, not one row of ids"
_COMPRESSED = "its queries see keys that sum up groups of tokens, which cross the shards' borders"
_INKLING = "it convolves keys and values over tokens, and adds biases by distance to its attention scores"
# By the name of the class that defines a part's forward.
REFUSED_PARTS: Mapping[str, str] = {
    "BigBirdBlockSparseAttention": "attends to random blocks of the sequence (set attention_type='original_full')",
    "BloomAttention": _ALIBI,
    "BltCrossAttention": "attends to patches of bytes, whose borders the model finds in the whole sequence",
    "CpmAntModel": "adds biases by position to its attention scores, which no kernel here takes",
    "DogeAttention": "makes its mask from the values of the keys that it gets",
    "FalconAttention": _ALIBI,
    "MptAttention": _ALIBI,
    "MusicgenDecoder": _CODEBOOKS,
    "MusicgenMelodyDecoder": _CODEBOOKS,
    "ProphetNetDecoder": "attends to several streams of predicted tokens (n-grams)",
    "ReformerAttention": "sorts the tokens of the whole sequence into buckets (LSH attention)",
    "RwkvSelfAttention": "is a recurrence with a shift of tokens (RWKV) whose state is not passed between ranks",
    "XLMModel": "makes its mask from the padding among the ids that it gets",
    "XLNetRelativeAttention": "adds biases by relative position to its attention scores, which no kernel here takes",
    "ZayaCCAProjection": "convolves queries and keys over neighbouring tokens, which are not passed between ranks",
    "xLSTMBackend": "is a recurrence (mLSTM) whose state is not passed between ranks",
}
# By the name in the configuration's list of layers.
REFUSED_LAYERS: Mapping[str, str] = {
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "hybrid_sliding": _INKLING,
    "recurrent": "it is a gated linear recurrence (RG-LRU) whose state is not passed between ranks",
}
OTHER_LAYER = "such a layer mixes tokens without the attention"

# PEFT adapters that treat each token independently, by the class that defines the forward, which we read, without
# "peft.tuners.". A class name alone is not enough: one of PEFT's thirty classes called ``Linear`` averages over all
# tokens of its input. Unlisted adapters, future ones included, are refused.
ADAPTERS = names(
    """
    adalora.bnb.SVDLinear4bit adalora.bnb.SVDLinear8bitLt adalora.gptq.SVDQuantLinear adalora.layer.SVDLinear
    adamss.layer.Linear beft.layer.Linear boft.layer.Linear c3a.layer.C3ALinear deft.layer.DeftLinear
    delora.layer.DeloraLinear fourierft.layer.FourierFTLinear frod.layer.Linear glora.layer.GloraEmptyPath
    glora.layer.GloraLinear glora.layer.GloraLoraPath glora.layer.GloraScalarPath glora.layer.GloraVectorPath
    gralora.layer.Linear hira.bnb.Linear4bit hira.bnb.Linear8bitLt hira.layer.Embedding hira.layer.Linear
    hra.layer.HRALinear ia3.bnb.Linear4bit ia3.bnb.Linear8bitLt ia3.layer.Linear ln_tuning.layer.LNTuningLayer
    loha.layer.LoHaLayer lokr.layer.LoKrLayer lora.aqlm.AqlmLoraLinear lora.arrow.ArrowLoraLinearLayer
    lora.awq.AwqLoraLinear lora.bnb.Linear4bit lora.bnb.Linear8bitLt lora.dora.DoraEmbeddingLayer
    lora.dora.DoraLinearLayer lora.eetq.EetqLoraLinear lora.gptq.GPTQLoraLinear lora.hqq.HqqLoraLinear
    lora.layer.Embedding lora.layer.Linear lora.layer.ParamWrapper lora.layer._LoraFactorsProxy
    lora.layer._LoraParameterProxy lora.variants.BlockDiagonalLinear miss.layer.MissLinear oft.layer.Embedding
    oft.layer.Linear oft.layer.OFTRotationModule osf.layer.Linear peanut.layer.Linear psoft.layer.Linear
    psoft.layer.OrthLayer randlora.bnb.Linear4bit randlora.bnb.Linear8bitLt randlora.layer.Linear
    road.bnb.Linear4bit road.bnb.Linear8bitLt road.layer.Linear shira.layer.Linear supertuning.layer.Linear
    tinylora.layer.Embedding tinylora.layer.Linear trainable_tokens.layer.TrainableTokensLayer unilora.layer.Linear
    vblora.layer.Linear vera.layer.Linear waveft.layer.WaveFTLinear
    """
)
# These wrap a module to train a copy of it. The copy is a submodule, so it is checked separately.
ADAPTER_WRAPPERS = ("peft.utils.other.AuxiliaryTrainingWrapper", "peft.utils.other.ModulesToSaveWrapper")
_DRAWS = "draws random values for its weights, different on each rank"
REFUSED_ADAPTERS = {
    "lily.layer.Linear": "mixes tokens: it averages its routing over all tokens",
    "boft.layer.MultiplicativeDropoutLayer": _DRAWS,
    "oft.layer.MultiplicativeDropoutLayer": _DRAWS,
    "poly.layer.Linear": _DRAWS,
    "pvera.layer.Linear": "draws random values for its hidden states, different on each rank",
}
# LoRA variants: objects that compute instead of the layer.
VARIANTS = names(
    """
    ArrowLinearVariant BdLoraLinearVariant DoraEmbeddingVariant DoraLinearVariant KasaLinearVariant
    MiCAEmbeddingVariant MiCALinearVariant QALoraLinearVariant
    """
)
REFUSED_VARIANTS = {
    "ALoraLinearVariant": "acts on the last tokens of the whole input (alora_offsets), but a rank has only a shard",
    "MontecloraLinearVariant": _DRAWS,
    "VeloraLinearVariant": "compresses along the mean of all tokens in its input, but a rank has only a shard",
}
UNKNOWN_ADAPTER = "is not among the PEFT adapters known to treat each token independently"


def layer_lists(config: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield (attribute, kinds of layers) for each list of layers in a configuration."""
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        kinds = getattr(config, attribute, None)
        if isinstance(kinds, (list, tuple)):
            yield attribute, [*kinds]


def within(module: str, packages: Sequence[str]) -> bool:
    """Return whether a module, by its name, is one of these packages or inside of one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_called(module: nn.Module, role: str) -> bool:
    """Return whether the name of a module's class ends with ``role``."""
    return type(module).__name__.endswith(role)


def code_names(function: Any) -> frozenset[str]:
    """Return the global names and attributes that a function uses, its decorators aside."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def mechanism(module: nn.Module) -> str | None:
    """Return a known mixer's mechanism; None for other modules, and if its transformers calls other kernels."""
    kind = stock_class(module)
    name, used = _MIXERS.get(kind.__name__, (None, frozenset()))
    return name if name is not None and code_names(kind.forward) & (KERNELS.keys() | _DECAYS) == used else None


def scores_itself(module: nn.Module) -> bool:
    """Return whether a module is a known attention that computes its scores itself. One with ALiBi is not.

    Nor is GPT-J's or CodeGen's from transformers 5.24 on: there they call the attention of the configuration.
    """
    kind = stock_class(module)
    if "ALL_ATTENTION_FUNCTIONS" in code_names(kind.forward):
        return False
    home, _, folder = kind.__module__.rpartition(".")[0].rpartition(".")
    ours = home == "transformers.models" and f"{folder}.{kind.__name__}" in SCORES
    return ours and not getattr(getattr(module, "config", None), "alibi", False)


def is_indexed(module: nn.Module) -> bool:
    """Return whether a module is a known attention to keys that an indexer chooses, or to those of a layer before."""
    own: Any = module
    chooses = getattr(own, "indexer", None) is not None or getattr(own, "skip_topk", False)
    return chooses and _starts_a_name(module, "Attention")


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module is a known indexer."""
    return _starts_a_name(module, "Indexer")


def pools_keys(module: nn.Module) -> bool:
    """Return whether an indexer chooses among keys that it makes of groups of tokens."""
    return hasattr(module, "index_kpool")


def has_wide_keys(module: nn.Module) -> bool:
    """Return whether an indexer's keys are in fp32 at least, whatever the model's dtype."""
    return stock_class(module).__name__ in _WIDE_KEYS


def _starts_a_name(module: nn.Module, role: str) -> bool:
    kind = stock_class(module)
    ours = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(role)
    return ours and kind.__name__.removesuffix(role) in _INDEXED


def gets_no_keywords(module: nn.Module) -> bool:
    """Return whether a module is an attention that gets no keywords from its layer."""
    return type(module).__name__ in _NOT_PASSED_ON or scores_itself(module)


def is_counted(module: nn.Module) -> bool:
    """Return whether a module embeds positions that the module around it counts."""
    kind = stock_class(module)
    return kind.__name__ in _COUNTED and kind.__module__.startswith("transformers.models.")


def is_tempered(module: nn.Module) -> bool:
    """Return whether an attention (Llama 4's) scales queries by their places, counted from the shard's start."""
    own: Any = module
    return type(own).__name__ == "Llama4TextAttention" and bool(own.attn_temperature_tuning) and not own.use_rope


def states_causal(module: nn.Module) -> bool:
    """Return whether an attention says that it is causal. transformers takes one that says nothing for causal."""
    default = getattr(module, "is_decoder", True) if scores_itself(module) else True
    return bool(getattr(module, "is_causal", default))
