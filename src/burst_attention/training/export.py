"""The trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from .model import NextTokenModel
from .tokenizer import Tokenizer


def save_model(wrapper: NextTokenModel, tokenizer: Tokenizer, folder: Path, *, rank: int) -> None:
    """Write what ``AutoModelForCausalLM.from_pretrained(folder)`` loads. Every rank must call it; rank 0 writes.

    The weights are the fp32 (fp64) ones that were trained. Which attention computed them is not written down: the
    reader's own is as good.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(wrapper, options=options)
    if rank:
        return
    model = wrapper.model
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del weights["lm_head.weight"]  # gathered, the two no longer share memory and would be written twice
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save(folder)
