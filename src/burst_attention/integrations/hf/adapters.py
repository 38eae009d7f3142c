"""The PEFT adapters that treat each token independently, listed by module and class.

A class name alone is not enough: PEFT has about thirty classes called ``Linear``, and one of them averages over all
tokens of its input. We read the forward of each listed class. Unlisted adapters, future ones included, are refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# The classes that define the forward, without the prefix "peft.tuners."
_TOKENWISE = frozenset(
    [
        "adalora.bnb.SVDLinear4bit",
        "adalora.bnb.SVDLinear8bitLt",
        "adalora.gptq.SVDQuantLinear",
        "adalora.layer.SVDLinear",
        "adamss.layer.Linear",
        "beft.layer.Linear",
        "boft.layer.Linear",
        "c3a.layer.C3ALinear",
        "deft.layer.DeftLinear",
        "delora.layer.DeloraLinear",
        "fourierft.layer.FourierFTLinear",
        "frod.layer.Linear",
        "glora.layer.GloraEmptyPath",
        "glora.layer.GloraLinear",
        "glora.layer.GloraLoraPath",
        "glora.layer.GloraScalarPath",
        "glora.layer.GloraVectorPath",
        "gralora.layer.Linear",
        "hira.bnb.Linear4bit",
        "hira.bnb.Linear8bitLt",
        "hira.layer.Embedding",
        "hira.layer.Linear",
        "hra.layer.HRALinear",
        "ia3.bnb.Linear4bit",
        "ia3.bnb.Linear8bitLt",
        "ia3.layer.Linear",
        "ln_tuning.layer.LNTuningLayer",
        "loha.layer.LoHaLayer",
        "lokr.layer.LoKrLayer",
        "lora.aqlm.AqlmLoraLinear",
        "lora.arrow.ArrowLoraLinearLayer",
        "lora.awq.AwqLoraLinear",
        "lora.bnb.Linear4bit",
        "lora.bnb.Linear8bitLt",
        "lora.dora.DoraEmbeddingLayer",
        "lora.dora.DoraLinearLayer",
        "lora.eetq.EetqLoraLinear",
        "lora.gptq.GPTQLoraLinear",
        "lora.hqq.HqqLoraLinear",
        "lora.layer.Embedding",
        "lora.layer.Linear",
        "lora.layer.ParamWrapper",
        "lora.layer._LoraFactorsProxy",
        "lora.layer._LoraParameterProxy",
        "lora.variants.BlockDiagonalLinear",
        "miss.layer.MissLinear",
        "oft.layer.Embedding",
        "oft.layer.Linear",
        "oft.layer.OFTRotationModule",
        "osf.layer.Linear",
        "peanut.layer.Linear",
        "psoft.layer.Linear",
        "psoft.layer.OrthLayer",
        "randlora.bnb.Linear4bit",
        "randlora.bnb.Linear8bitLt",
        "randlora.layer.Linear",
        "road.bnb.Linear4bit",
        "road.bnb.Linear8bitLt",
        "road.layer.Linear",
        "shira.layer.Linear",
        "supertuning.layer.Linear",
        "tinylora.layer.Embedding",
        "tinylora.layer.Linear",
        "trainable_tokens.layer.TrainableTokensLayer",
        "unilora.layer.Linear",
        "vblora.layer.Linear",
        "vera.layer.Linear",
        "waveft.layer.WaveFTLinear",
    ]
)
# These wrap a module to train a copy of it. The copy is a submodule, so it is checked separately.
_WRAPPERS = ("peft.utils.other.AuxiliaryTrainingWrapper", "peft.utils.other.ModulesToSaveWrapper")

_DRAWS = "draws random values for its weights, different on each rank"
_REFUSED = {
    "lily.layer.Linear": "mixes tokens: it averages its routing over all tokens",
    "boft.layer.MultiplicativeDropoutLayer": _DRAWS,
    "oft.layer.MultiplicativeDropoutLayer": _DRAWS,
    "poly.layer.Linear": _DRAWS,
    "pvera.layer.Linear": "draws random values for its hidden states, different on each rank",
}
# LoRA variants: objects that compute instead of the layer.
_VARIANTS = frozenset(
    [
        "ArrowLinearVariant",
        "BdLoraLinearVariant",
        "DoraEmbeddingVariant",
        "DoraLinearVariant",
        "KasaLinearVariant",
        "MiCAEmbeddingVariant",
        "MiCALinearVariant",
        "QALoraLinearVariant",
    ]
)
_REFUSED_VARIANTS = {
    "ALoraLinearVariant": "acts on the last tokens of the whole input (alora_offsets), but a rank has only a shard",
    "MontecloraLinearVariant": _DRAWS,
    "VeloraLinearVariant": "compresses along the mean of all tokens in its input, but a rank has only a shard",
}
_UNKNOWN = "is not among the PEFT adapters known to treat each token independently"


def reason_of_adapter(module: nn.Module, kind: type) -> str | None:
    """Return why an adapter can't run on shards; None if it can.

    Args:
        module: the adapter.
        kind: the PEFT class that defines the module's forward.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _WRAPPERS:
        return None
    name = name.removeprefix("peft.tuners.")
    if name not in _TOKENWISE:
        return f"is peft.tuners.{name}, which {_REFUSED.get(name, _UNKNOWN)}"
    variants: Any = getattr(module, "lora_variant", {})
    for variant in map(type, variants.values()):
        known = variant.__module__ == "peft.tuners.lora.variants" and variant.__name__ in _VARIANTS
        if not known:
            return f"uses {variant.__name__}, which {_REFUSED_VARIANTS.get(variant.__name__, _UNKNOWN)}"
    return None


def check_added_losses(model: nn.Module) -> None:
    """Refuse adapters that add to the loss on every rank, if gradients are summed over the ranks."""
    if any(type(module).__module__.startswith("peft.tuners.adalora.") for module in model.modules()):
        raise ValueError(
            "gradients='sum' is refused: AdaLoRA adds to the loss on every rank, so its term would be counted once per "
            "rank; use gradients='mean'"
        )
