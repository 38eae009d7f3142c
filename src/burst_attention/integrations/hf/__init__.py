"""Hugging Face transformers: parallel models, the attention ``burst``, and batches cut into shards.

    model = hf.parallelize(AutoModelForCausalLM.from_pretrained(name), group)
    loss = model(input_ids=ids, labels=labels).loss  # the whole batch on every rank

With another mask, or a loss of each rank's own hidden states:

    with hf.shards(model, batch, mask=Mask(prefix=100)) as shard:
        hidden = model.model(**shard)[0]
    loss = hf.next_token_loss(model, hidden, shard.labels, shard.plan)
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    text = "transformers is not installed: in the checkout, run pip install -e '.[hf]'"
    raise ModuleNotFoundError(text, name="transformers") from error

from burst_attention.attention.batch import Reach

from .call.heads import find_form, find_head, next_token_loss
from .call.outputs import ParallelOutput
from .call.run import Shard, ahead, shards
from .layers.attention import register
from .layers.by_hand import shard_batch
from .layers.indexed import indexed_layers
from .layers.memory import Memory
from .measure import check_model
from .parallel import parallelize, plans_of, unparallelize
from .reading.attached import token_wise
from .reading.configs import layer_windows
from .reading.forwards import added_losses
from .reading.known import NAME
from .reading.models import attention_windows, check_config, recurrent_layers
from .tensor.axis import clip_grad_norm_, ranks_of_heads, tensor_parallel

__all__ = [
    "NAME",
    "Memory",
    "ParallelOutput",
    "Reach",
    "Shard",
    "added_losses",
    "ahead",
    "attention_windows",
    "check_config",
    "check_model",
    "clip_grad_norm_",
    "find_form",
    "find_head",
    "indexed_layers",
    "layer_windows",
    "next_token_loss",
    "parallelize",
    "plans_of",
    "ranks_of_heads",
    "recurrent_layers",
    "register",
    "shard_batch",
    "shards",
    "tensor_parallel",
    "token_wise",
    "unparallelize",
]
