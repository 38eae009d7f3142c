"""Hugging Face transformers: parallel models, the attention ``burst``, and batches cut into shards.

    model = hf.parallelize(AutoModelForCausalLM.from_pretrained(name), group)
    loss = model(input_ids=ids, labels=labels).loss  # the whole batch on every rank

Or take each step by hand:

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="burst")
    shard = hf.shard_batch(batch, plan)
    out = model.model(input_ids=shard["input_ids"], position_ids=shard["position_ids"], plan=plan, use_cache=False)
    loss = hf.next_token_loss(model, out.last_hidden_state, shard["shift_labels"], plan)

Pass the plan to ``model(...)`` by keyword. For a model that mixes windowed and full layers pass a dict of plans, keyed
by the layers' sliding windows: ``{None: full_plan, 4096: full_plan.with_mask(...)}``. The plan's mask decides which
tokens a query sees. If a layer asks for a mask that the plan does not have, every rank raises an error that names it.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    text = "transformers is not installed: in the checkout, run pip install -e '.[hf]'"
    raise ModuleNotFoundError(text, name="transformers") from error

from burst_attention.attention.batch import Reach, shard_batch

from .attention import register
from .call import ahead
from .heads import find_form, find_head, next_token_loss
from .measure import check_model
from .memory import Memory
from .outputs import ParallelOutput
from .parallel import parallelize, plans_of, unparallelize
from .reading.attached import token_wise
from .reading.configs import layer_windows
from .reading.known import NAME
from .reading.models import attention_windows, check_config, recurrent_layers
from .stub_forward import added_losses
from .tensor_axis import clip_grad_norm_, ranks_of_heads, tensor_parallel

__all__ = [
    "NAME",
    "Memory",
    "ParallelOutput",
    "Reach",
    "added_losses",
    "ahead",
    "attention_windows",
    "check_config",
    "check_model",
    "clip_grad_norm_",
    "find_form",
    "find_head",
    "layer_windows",
    "next_token_loss",
    "parallelize",
    "plans_of",
    "ranks_of_heads",
    "recurrent_layers",
    "register",
    "shard_batch",
    "tensor_parallel",
    "token_wise",
    "unparallelize",
]
