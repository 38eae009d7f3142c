"""The refused calls that tests/unit/test_refusals.py makes: by area, (call, class and start of the error's message).

A call is a Python expression, or a command line if it begins with ``burst``.
"""

import copy
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd import forward_ad

from burst_attention import CallShape, Hardware, Mask, Strategy, burst_attention, kernels, make_plan
from burst_attention.compat import ring_flash_attn
from burst_attention.compat.yunchang import LongContextAttention
from burst_attention.inference import ShardedCache, shard_weights
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss, token_log_probs
from burst_train import strategies
from burst_train.data.corpus import open_corpus
from burst_train.run.lock import claimed
from tests.support.hf_models import SEQLEN, cache_with_earlier_tokens, make_batch, make_model
from tests.support.trainer_refusals import TRAINERS, trainer_names
from tests.tools import families

Cases = list[tuple[str, str]]

CALL: Cases = [
    ("burst_attention(q, k, v, 8)", "TypeError: plan=8 must come from make_plan(seqlen, ...)"),
    ("burst_attention(q.tolist(), k, v, plan)", "TypeError: q is a list, not a tensor"),
    ("burst_attention(q.int(), k.int(), v.int(), plan)", "TypeError: q is torch.int32; use one of torch.float64,"),
    ("burst_attention(q[0], k[0], v[0], plan)", "ValueError: q has shape [4, 8, 16]; it must be [batch, heads,"),
    ("burst_attention(q, k.double(), v, plan)", "TypeError: k is torch.float64 on cpu, q is torch.float32 on cpu;"),
    (
        "burst_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], plan)",
        "ValueError: q has shape [1, 4, 5, 16], but this rank holds 8 tokens (dim 2); cut it",
    ),
    ("burst_attention(q, k[..., :8], v, plan)", "ValueError: q has head dim 16, k has 8; they must be equal"),
    ("burst_attention(q, k, v[:, :1], plan)", "ValueError: k has 2 heads, v has 1; they must be equal"),
    ("burst_attention(q[:, :3], k, v, plan)", "ValueError: q has 3 heads, not a multiple of the 2 heads of k and v"),
    ("burst_attention(q, k.repeat(2, 1, 1, 1), v, plan)", "ValueError: k has shape [2, 2, 8, 16], q [1, 4, 8, 16];"),
    ("burst_attention(q[:0], k, v, plan)", "ValueError: q has shape [0, 4, 8, 16]; only the number of tokens"),
    ("plan.shard(q, 2.0)", "TypeError: dim=2.0 must be an integer, the dim of the sequence"),
    ("burst_attention(q, k, v, plan, scale=float('nan'))", "ValueError: scale=nan must be a finite number, or None"),
    ("burst_attention(q, k, v, plan, scale=5e-324)", "ValueError: scale=5e-324 is too small for torch.float32, in"),
    ("burst_attention(q, k, v, plan, scale=True)", "ValueError: scale=True must be a finite number, or None for 1 /"),
    (
        "torch.func.grad(lambda x: burst_attention(x, k, v, plan).sum())(q)",
        "ValueError: burst_attention can't be transformed by torch.func (grad, jacrev, jvp,",
    ),
    ("tangent(lambda x: burst_attention(x, k, v, plan), q)", "ValueError: q has a tangent, but burst_attention has"),
    (
        "grad(grad(burst_attention(wanted, k, v, plan), wanted), wanted)",
        "RuntimeError: burst_attention can be differentiated once; second derivatives are not",
    ),
]
PLAN: Cases = [
    ("make_plan('8')", "TypeError: seqlen='8' must be an int"),
    ("make_plan(3.0)", "TypeError: seqlen=3.0 must be an int"),
    ("make_plan(-1)", "ValueError: seqlen=-1 must be at least 0 and world=1 at least 1"),
    ("make_plan(8, strategy=Strategy(layout='snake'))", "ValueError: layout='snake' is unknown; choose one of"),
    ("make_plan(8, strategy=Strategy(route='star'))", "ValueError: route='star' is unknown; choose one of auto,"),
    ("make_plan(8, strategy=Strategy(ulysses_degree=2))", "ValueError: ulysses_degree=2 does not divide the 1 ranks"),
    ("make_plan(8, strategy=Strategy(cache_qkv='some'))", "ValueError: cache_qkv='some' must be True, False or"),
    ("make_plan(8, strategy=Strategy(chunks=-1))", "ValueError: chunks=-1 must be a number of chunks, 0 to 64, or"),
    (
        "make_plan(8, strategy=Strategy(chunks=2, route='nodes'))",
        "ValueError: chunks=2 sends the shards of a",
    ),
    ("make_plan(8, call=CallShape(remat='all'))", "ValueError: remat='all' is unknown; choose one of none, layer,"),
    ("make_plan(8, call=CallShape(attention_chunks=0))", "ValueError: attention_chunks=0 must be at least 1"),
    ("make_plan(8, call=CallShape(q_heads=8))", "ValueError: CallShape has q_heads=8 and head_dim=None;"),
    ("make_plan(8, call=CallShape(q_heads=8, kv_heads=3, head_dim=4))", "ValueError: q_heads=8 must be a multiple of"),
    ("make_plan(8, call=CallShape(q_heads=0, head_dim=4))", "ValueError: q_heads=0"),
    ("make_plan(8, call=CallShape(q_heads=8, head_dim=4, dtype=torch.int32))", "TypeError: dtype=torch.int32"),
    ("make_plan(8, call=4)", "TypeError: call=4 must be a CallShape"),
    ("make_plan(8, hardware='h100-hgx')", "TypeError: hardware='h100-hgx' must be a Hardware"),
    ("make_plan(8, hardware=Hardware(rates='abacus'))", "ValueError: rates='abacus' is no preset"),
    ("make_plan(8, hardware=Hardware(rates=3))", "TypeError: rates=3 must be Rates"),
    ("make_plan(8, hardware=Hardware(rates='nowhere.toml'))", "ValueError: can't read rates of nowhere.toml:"),
    ("make_plan(8, hardware=Hardware(nodes=[0, 1]))", "ValueError: nodes=[0, 1] must be one integer"),
    ("make_plan(8, hardware=Hardware(nodes=[True]))", "ValueError: nodes=[True]"),
    ("make_plan(8, hardware=Hardware(nodes=3))", "TypeError: nodes=3 must be the node of each rank"),
    ("make_plan(8, strategy=4)", "TypeError: strategy=4 must be a Strategy or a name"),
    ("make_plan(8, strategy='usp:0')", "ValueError: strategy='usp:0' is unknown"),
    ("make_plan(8, strategy=Strategy(ulysses_degree='half'))", "ValueError: ulysses_degree='half'"),
    ("make_plan(8, strategy='turbo')", "ValueError: strategy='turbo' is unknown; choose one of auto,"),
    (
        "make_plan(8, strategy=Strategy(layout='balanced-per-document'))",
        "ValueError: layout='balanced-per-document' is not allowed: balanced always follows the",
    ),
    ("make_plan(8, mask='causal')", "TypeError: mask='causal' must be a burst_attention.Mask"),
    ("make_plan(8, call=CallShape(grad=1))", "TypeError: grad=1 must be True or False"),
    ("make_plan(2, query_offset=6)", "ValueError: query_offset=6 needs keys: the earlier tokens' keys, on the ranks"),
    ("make_plan(2, keys=[[(0, 8)]], query_offset=-1)", "ValueError: query_offset=-1 must be at least 0 and at most"),
    ("make_plan(2, keys=8)", "TypeError: keys=8 must be a Plan whose tokens are the keys, or each rank's stretches,"),
    ("make_plan(2, keys=[[(0, 8.5)]])", "TypeError: stretch (0, 8.5) must be a range or a pair of integers (start,"),
    ("make_plan(2, keys=[[(4, 8), (0, 4)]])", "ValueError: stretch (0, 4) follows (4, 8) on a rank; list each"),
    ("make_plan(2, keys=[[(0, 5)], [(4, 8)]])", "ValueError: stretches (0, 5) and (4, 8) overlap; put each position"),
    ("make_plan(2, keys=[[(0, 4)], [(4, 8)]])", "ValueError: keys are laid out over 2 ranks, the group has 1; list"),
    (
        "make_plan(2, keys=[[(0, 8)]], strategy=Strategy(layout='balanced'))",
        "ValueError: layout='balanced' follows the documents of one sequence and can't be",
    ),
    (
        "make_plan(2, keys=[[(0, 8)]], strategy=Strategy(cache_qkv=True, ulysses_degree=1))",
        "ValueError: cache_qkv=True can't be combined with keys, which have another length than",
    ),
    (
        "make_plan(2, keys=[[(0, 8)]], query_offset=6).with_mask(Mask(), seqlen=3)",
        "ValueError: seqlen=3 can't change in a plan with keys; make another plan with make_plan",
    ),
    (
        "burst_attention(q[:, :, :2], k[:, :, :7], v, make_plan(2, keys=[[(0, 8)]]))",
        "ValueError: k has shape [1, 2, 7, 16], but this rank holds 8 keys (dim 2); cut it with",
    ),
    ("make_plan(8, timeout=0)", "ValueError: timeout=0 must be a positive number of seconds, a timedelta or None"),
    ("unjoined(make_plan, 8)", "ValueError: group=None, but torch.distributed is not initialised in this rank of"),
    ("make_plan(8, group='all')", "TypeError: group='all' must be None, a ProcessGroup that this rank is in, or a"),
    ("Mask(window=0)", "ValueError: window=0 must be at least 1; a query always sees its own position"),
    ("Mask(window=2.5)", "TypeError: window=2.5 must be an integer"),
    ("Mask(window=float('inf'))", "TypeError: window=inf must be an integer"),
    ("Mask(causal=1)", "TypeError: causal=1 must be True or False"),
    ("Mask(prefix=-1)", "ValueError: prefix=-1 must be"),
    ("Mask(prefix=2, cu_seqlens=[0, 4])", "ValueError: prefix=2 can't be combined with cu_seqlens"),
    ("Mask(cu_seqlens=[])", "ValueError: cu_seqlens=[] must start with 0"),
    ("Mask(cu_seqlens=5)", "TypeError: cu_seqlens=5"),
    ("Mask(prefix=2, window=3)", "ValueError: prefix=2 can't be combined with window; leave one of them out"),
    ("Mask(cu_seqlens=[1, 8])", "ValueError: cu_seqlens=[1, 8] must start with 0, the first document's border"),
    ("Mask(cu_seqlens=[0, 5, 3])", "ValueError: cu_seqlens falls from 5 to 3; borders must not decrease"),
    ("make_plan(8, mask=Mask(cu_seqlens=[0, 7]))", "ValueError: cu_seqlens ends at 7, the sequence at 8; the last"),
    ("make_plan(8, mask=Mask(prefix=9))", "ValueError: prefix=9 is longer than the sequence; it must be at most"),
    ("Mask(blocks=[[True]])", "ValueError: blocks needs block; pass Mask(blocks=..., block=128), or neither"),
    ("Mask(together=[0, 0], causal=False)", "ValueError: together can't be combined with causal=False; leave one of"),
    ("Mask(together=[0, 0], prefix=1)", "ValueError: together can't be combined with prefix; leave one of them out"),
    ("Mask(together=[0.5, 1.0])", "TypeError: together has dtype float64; pass integers, the group of each token or"),
    ("Mask(together=[[0, 0]])", "ValueError: together has shape [1, 2]; pass one group number per token, or -1"),
    ("make_plan(8, mask=Mask(together=[0, 0]))", "ValueError: together has 2 entries, the sequence 8 tokens; pass"),
    ("Mask(blocks=[[1, 0], [1, 1]], block=4)", "TypeError: blocks has dtype int64; pass booleans, True where"),
    ("Mask(blocks=[[True, False]], block=4)", "ValueError: blocks has shape [1, 2]; it must be square: [S / block,"),
    ("make_plan(8, mask=Mask(blocks=[[True]], block=4))", "ValueError: blocks has 1 rows of block=4 tokens, but"),
    ("setattr(plan, 'seqlen', 9)", "AttributeError: seqlen can't be set: plans are immutable. Make another with"),
    ("plan.shard(x, 5)", "ValueError: dim=5 is out of range for x with 3 dims"),
    ("plan.shard(x[:, :7], 1)", "ValueError: x has shape [1, 7, 4]: dim 1 must be the sequence, 8 tokens"),
    ("plan.unshard(x, 3)", "ValueError: dim=3 is outside of x's 3 dims"),
    ("plan.unshard(x, 1, grad='mean')", "ValueError: grad='mean' is unknown; choose slice or sum"),
    ("plan.unshard(x, 1, at=[3, 8])", "ValueError: at="),
    ("plan.unshard(x, 1, at=[3, 3])", "ValueError: at="),
    ("plan.unshard(x[:, :7], 1, at=[3])", "ValueError: x has shape [1, 7, 4]: dim 1 must be this rank's 8 tokens"),
    ("plan.sum_shards(x[:, :7], 1)", "ValueError: x has shape [1, 7, 4]: dim 1 must be the sequence's 8 tokens"),
    ("plan.sum_shards([1], 0)", "TypeError: x is a list, not a tensor; pass the sequence's 8 tokens"),
    ("plan.unshard(x[:, :7], 1)", "ValueError: x has shape [1, 7, 4]: dim 1 must be this rank's 8 tokens"),
    ("plan.shard_labels(torch.zeros(8))", "ValueError: labels has shape [8]; it must be [batch, 8], unshifted"),
    (
        "plan.bytes(batch=1, q_heads=3, kv_heads=2, head_dim=16, dtype=torch.float32)",
        "ValueError: q_heads=3 must be a multiple of kv_heads=2",
    ),
    ("plan.bytes(batch=0, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.float32)", "ValueError: batch=0"),
    (
        "plan.bytes(batch=1, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.int8)",
        "TypeError: dtype=torch.int8 can't be used; choose one of torch.float64, torch.float32,",
    ),
]
_GATHERED = "ValueError: gather_kv=True needs route='direct', circulate='key-value' and ulysses_degree=1, not route="
PLAN_OF_TWO: Cases = [
    (f"make_plan(8, strategy=Strategy({given}), group=group)", start)
    for given, start in (
        ("ulysses_degree=3", "ValueError: ulysses_degree=3 does not divide the 2 ranks"),
        ("ulysses_degree=0", "ValueError: ulysses_degree=0 must be a number of head groups, at least 1, 'all' or"),
        ("ulysses_degree=True", "ValueError: ulysses_degree=True must be a number of head groups, at least 1, 'all'"),
        (
            "ulysses_degree=2, route='ring-attention'",
            "ValueError: route='ring-attention' passes shards on along the ring, and with",
        ),
        ("gather_kv='yes'", "ValueError: gather_kv='yes' must be True, False or 'auto'"),
        ("gather_kv=True, ulysses_degree=1, route='direct'", f"{_GATHERED}'direct', circulate='auto' and"),
        (
            "gather_kv=True, ulysses_degree=2, route='direct', circulate='key-value'",
            f"{_GATHERED}'direct', circulate='key-value' and ulysses_degree=2",
        ),
        (
            "gather_kv=True, ulysses_degree=1, route='ring-attention', circulate='key-value'",
            f"{_GATHERED}'ring-attention', circulate='key-value' and ulysses_degree=1",
        ),
        ("circulate='air'", "ValueError: circulate='air' is unknown; choose one of auto, query, key-value,"),
        ("chunks=2, route='ring-attention'", "ValueError: chunks=2 sends the shards of a sequence group together, and"),
    )
]
DIFFER: Cases = [
    ("make_plan([8, 9][rank], group=group)", "DisagreementError: make_plan: the ranks disagree on seqlen: rank 0"),
    (
        "make_plan(8, call=CallShape(q_heads=4, head_dim=8, dtype=dtype), group=group)",
        "DisagreementError: make_plan: the ranks disagree on call.dtype: rank 0 has torch.float32,",
    ),
    (
        "burst_attention(q, k, v, plan, scale=[0.5, 0.25][rank])",
        "DisagreementError: burst_attention: the ranks disagree on scale: rank 0 has 0.5, rank 1 has",
    ),
    (
        "burst_attention(q, k, v, plan, scale=[0.5, float('inf')][rank])",
        "ValueError: rank 1 refused the call: scale=inf must be a finite number, or None for 1 /",
    ),
    ("burst_attention(q, k, [v, v[:, :1]][rank], plan)", "ValueError: rank 1 refused the call: k has 2 heads, v has"),
    ("plan.unshard(x[:, :, : 3 - rank], 1)", "DisagreementError: unshard: the ranks disagree on other dims: rank 0"),
    ("pickle.dumps(plan)", "TypeError: a plan over 2 ranks can't be pickled or deep-copied: it is tied to this"),
]
LOSS: Cases = [
    ("next_token_loss(hidden, weight, labels, {None: plan})", "TypeError: plan={None: Plan(rank 0 of 1, seqlen=8,"),
    ("next_token_loss(hidden.long(), weight, labels, plan)", "TypeError: hidden has dtype torch.int64; pass fp64,"),
    ("next_token_loss([1.0], weight, labels, plan)", "TypeError: hidden is a list; pass a tensor"),
    ("next_token_loss(hidden[0], weight, labels, plan)", "ValueError: hidden has shape [8, 4]; pass [batch, local"),
    ("next_token_loss(hidden[:, :5], weight, labels, plan)", "ValueError: hidden has 5 tokens, the plan gives this"),
    ("next_token_loss(hidden, weight[:, :3], labels, plan)", "ValueError: lm_head_weight has shape [11, 3]; pass"),
    ("next_token_loss(hidden, weight.double(), labels, plan)", "TypeError: lm_head_weight has dtype torch.float64,"),
    ("next_token_loss(hidden, weight.to('meta'), labels, plan)", "ValueError: lm_head_weight is on meta, hidden on"),
    ("next_token_loss(hidden, weight, labels[:, 1:], plan)", "ValueError: labels has shape [1, 7], not hidden's [1,"),
    ("next_token_loss(hidden, weight, labels.float(), plan)", "TypeError: labels has dtype torch.float32; pass"),
    ("next_token_loss(hidden, weight, labels + 11, plan)", "ValueError: labels holds 11 for token 0 of row 0, neither"),
    ("next_token_loss(hidden, weight, labels - 1, plan)", "ValueError: labels holds -1 for token 0 of row 0, neither"),
    ("token_log_probs(hidden[0], weight, shifted, plan)", "ValueError: hidden has shape [8, 4]; pass [batch, local"),
    ("token_log_probs(hidden, weight, labels, plan)", "ValueError: labels has a label at the last position of the"),
]
LOSS += [
    (f"next_token_loss(hidden, weight, labels, plan, {option})", start)
    for option, start in (
        ("ignore_index=None", "TypeError: ignore_index=None must be an integer"),
        ("num_valid=-1", "ValueError: num_valid=-1 must be a count of tokens: finite and not negative"),
        ("num_valid=float('nan')", "ValueError: num_valid=nan must be a count of tokens"),
        ("num_valid=True", "TypeError: num_valid=True must be a number, a tensor of one number, or None"),
        ("num_valid='5'", "TypeError: num_valid='5' must be a number, a tensor of one number, or None"),
        ("num_valid=0", "ValueError: num_valid=0, but the group holds 8"),
        ("factor='2'", "TypeError: factor='2' must be a number"),
        ("factor=float('inf')", "ValueError: factor=inf must be finite and not 0;"),
        ("factor=0", "ValueError: factor=0 must be finite and not 0;"),
        ("softcap=True", "TypeError: softcap=True must be a number, or None for no cap"),
        ("softcap=0.0", "ValueError: softcap=0.0 must be finite and greater than 0, or None for no cap"),
        ("softcap=float('nan')", "ValueError: softcap=nan must be finite and greater than 0, or None for no cap"),
        ("bias=[0.0] * 11", "TypeError: bias is a list; pass a tensor"),
        ("bias=torch.zeros(3)", "ValueError: bias has shape [3]; pass [11], one number for each logit"),
        ("bias=torch.zeros(11).double()", "TypeError: bias has dtype torch.float64, hidden torch.float32; cast one"),
        ("bias=torch.zeros(11, device='meta')", "ValueError: bias is on meta, hidden on cpu; put them on one device"),
        ("chunk_tokens=0", "ValueError: chunk_tokens=0 must be a positive integer, or None"),
        ("chunk_tokens=2.5", "ValueError: chunk_tokens=2.5 must be a positive integer, or None"),
    )
]
LOSS += [
    (f"token_log_probs(hidden, weight, shifted, plan, {option})", start)
    for option, start in (
        ("temperature='1'", "TypeError: temperature='1' must be a number"),
        ("temperature=True", "TypeError: temperature=True must be a number"),
        ("temperature=0", "ValueError: temperature=0 must be finite and greater than 0; logits are divided by it"),
        ("temperature=-0.5", "ValueError: temperature=-0.5 must be finite and greater than 0;"),
        ("temperature=float('inf')", "ValueError: temperature=inf must be finite and greater than 0;"),
        ("temperature=float('nan')", "ValueError: temperature=nan must be finite and greater than 0;"),
        ("outputs='entropy'", "TypeError: outputs='entropy' must be a sequence of names out of log_probs, entropy,"),
        ("outputs=None", "TypeError: outputs=None must be a sequence of names out of log_probs, entropy,"),
        ("outputs=['kl']", "ValueError: outputs holds 'kl', which is unknown; choose from log_probs,"),
        ("outputs=['entropy', 3]", "ValueError: outputs holds 3, which is unknown; choose from log_probs,"),
        ("softcap=0", "ValueError: softcap=0 must be finite and greater than 0, or None for no cap"),
        ("bias=torch.zeros(3)", "ValueError: bias has shape [3]; pass [11], one number for each logit"),
        ("chunk_tokens=0", "ValueError: chunk_tokens=0 must be a positive integer, or None"),
    )
]
HF: Cases = [
    ("hf.shard_batch([1, 2], plan)", "TypeError: batch is a list; pass a mapping with input_ids"),
    ("hf.shard_batch({**batch, 'token_type_ids': ids}, plan)", "ValueError: batch has ['token_type_ids'], which"),
    ("hf.shard_batch({**batch, 'position_ids': ids}, plan)", "ValueError: batch has ['position_ids'], which"),
    ("hf.shard_batch({'labels': ids}, plan)", "ValueError: batch has no input_ids; pass token ids [batch, sequence]"),
    ("hf.shard_batch({'input_ids': ids.tolist()}, plan)", "TypeError: input_ids is a list"),
    ("hf.shard_batch({'input_ids': ids[:, 1:]}, plan)", "ValueError: input_ids has shape [2, 39]"),
    ("hf.shard_batch({**batch, 'labels': ids[:1]}, plan)", "ValueError: labels has 1 rows, input_ids 2"),
    ("hf.shard_batch({**batch, 'labels': ids[:, 1:]}, plan)", "ValueError: labels has shape [2, 39]; pass [batch,"),
    (
        "hf.shard_batch({**batch, 'attention_mask': padding}, plan)",
        "ValueError: attention_mask: a padding mask",
    ),
    ("model(**{**right, 'plan': None})", "ValueError: plan is missing: call hf.parallelize(model), then the"),
    ("model(**{**right, 'plan': 'zigzag'})", "TypeError: plan='zigzag' must be a Plan, or a mapping such as {None:"),
    ("model(**{**right, 'plan': {}})", "TypeError: plan={} must be a Plan"),
    ("model(**{**right, 'attention_mask': seen})", "ValueError: attention_mask: a mask Tensor [2, 1, 40, 40]"),
    ("model(**{**right, 'attention_mask': padding})", "ValueError: attention_mask: a padding mask (zeros in"),
    (
        "model(**{**right, 'position_ids': right['position_ids'] + 1})",
        "ValueError: position_ids differ from the positions of the plan's tokens on rank 0; pass",
    ),
    (
        "model(**{**right, 'past_key_values': cache(), 'use_cache': True})",
        "ValueError: the cache has earlier tokens (45 keys for 40 queries), which is not supported; pass",
    ),
    ("model(**right, is_causal=False)", "ValueError: is_causal=False of the layer is not the causal=True of the"),
    ("model(**right, cu_seq_lens_q=borders)", "ValueError: cu_seq_lens_q=Tensor [2] is refused: the plan defines"),
    ("model(**right, cu_seq_lens_k=borders)", "ValueError: cu_seq_lens_k=Tensor [2] is refused: the plan defines"),
    ("model(**right, max_length_q=40)", "ValueError: max_length_q=40 is refused: the plan defines"),
    ("model(**right, max_length_k=40)", "ValueError: max_length_k=40 is refused: the plan defines"),
    ("model(**right, seq_idx=ids)", "ValueError: seq_idx=Tensor [2, 40] is refused: the plan defines"),
    ("model(**right, head_mask=ids)", "ValueError: head_mask=Tensor [2, 40] is refused: masking heads is not"),
    ("model(**right, position_bias=ids)", "ValueError: position_bias=Tensor [2, 40] is refused: a bias on attention"),
    ("model(**right, alibi=ids)", "ValueError: alibi=Tensor [2, 40] is refused: a bias on attention logits"),
    ("model(**right, softcap=-30.0)", "ValueError: softcap=-30.0 must be a number from 2.23e-308 to 8.99e+307, or"),
    ("model(**right, softcap=0.0)", "ValueError: softcap=0.0 must be a number from 2.23e-308 to 8.99e+307, or"),
    ("model(**right, s_aux=borders)", "TypeError: sinks is torch.int64 on cpu; it must be floating point on cpu"),
    ("model(**right, s_aux=torch.zeros(3))", "ValueError: sinks has shape [3]; it must be [4], one logit a query"),
    ("model(**right, output_attentions=True)", "ValueError: output_attentions=True is refused: attention weights"),
    ("model(**right, temperature=2.0)", "ValueError: temperature=2.0 is refused: its effect on the attention is"),
    ("make_model('llama', attention_dropout=0.1).train()(**right)", "ValueError: dropout=0.1 of attention weights"),
    ("make_model('mistral')(**right)", "ValueError: sliding_window=7 of the layer is not the window=None of the"),
    ("make_model('mistral')(**{**right, 'plan': {None: plan}})", "ValueError: sliding_window=7 of the layer is not"),
    ("make_model('gemma3')(**{**right, 'plan': unlike})", "ValueError: plan has plans with different (seqlen,"),
    ("make_model('llama', rope_parameters=dynamic)(**right)", "ValueError: rope_parameters has rope type 'dynamic':"),
    ("hf.next_token_loss(wrapped, hidden, labels, plan)", "TypeError: model is a Sequential, and its body or its"),
    ("hf.clip_grad_norm_([head], 0.0)", "ValueError: max_norm=0.0 must be a number greater than 0; to keep"),
    ("hf.clip_grad_norm_([head], float('nan'))", "ValueError: max_norm=nan must be a number greater than 0;"),
    ("hf.clip_grad_norm_([head], '1')", "ValueError: max_norm='1' must be a number greater than 0;"),
    ("hf.clip_grad_norm_(model, 1.0)", "TypeError: parameters is a LlamaForCausalLM; pass model.parameters()"),
    ("hf.check_config('llama')", "TypeError: config is a str; pass a configuration: AutoConfig.from_pretrained(name)"),
    ("ShardedCache(model)", "TypeError: config is a LlamaForCausalLM; pass model.config"),
    ("shard_weights(model, None)", "ValueError: LlamaForCausalLM is not parallelized; call hf.parallelize(model)"),
    ("hf.parallelize(model, temperature=0)", "ValueError: temperature=0 must be finite and greater than 0;"),
]
MODELS: Cases = [
    ("hf.check_config(config('llama', attention_dropout=0.1))", "ValueError: attention_dropout=0.1 of the"),
    ("hf.check_config(config('gpt2', attn_pdrop=0.1))", "ValueError: attn_pdrop=0.1 of the configuration"),
    ("hf.check_config(config('llama', rope_parameters=dynamic))", "ValueError: rope_parameters has rope type 'dynam"),
    ("hf.check_config(config('t5'))", "ValueError: is_encoder_decoder=True of the configuration: cross-attention is"),
    ("hf.check_config(config('recurrent_gemma'))", "ValueError: block_types of the configuration has 'recurrent':"),
    ("hf.check_config(config('bloom'))", "ValueError: transformer.h.0.self_attention (BloomAttention) adds biases"),
    ("hf.check_config(config('rwkv'))", "ValueError: rwkv.blocks.0.attention (RwkvSelfAttention) is a recurrence"),
    ("hf.check_config(config('deepseek_v4'))", "ValueError: layer_types of the configuration has"),
    ("hf.check_config(config('bigbird_pegasus'))", "ValueError: model.decoder (BigBirdPegasusDecoder) has"),
    ("hf.unparallelize(eager)", "ValueError: model is a LlamaForCausalLM that is not parallelized; don't call"),
    (
        "hf.unparallelize(nn.Sequential(hf.parallelize(make_model('llama'), plan.transport.group)))",
        "ValueError: model is a Sequential around the parallelized model; pass",
    ),
    ("hf.check_model(eager, plan)", "ValueError: attn_implementation='eager' of layers of LlamaForCausalLM: their"),
    (
        "next_token_loss(forward(eager, plan=None), head, labels, plan)",
        "ValueError: no attention has used the plan for this batch, so each rank attended to its",
    ),
]
KERNELS: Cases = [
    ("burst_attention(q, k, v, plan, kernel=7)", "ValueError: kernel=7 must be a kernel's name, or auto"),
    ("burst_attention(q, k, v, plan, kernel='best')", "ValueError: kernel='best' is unknown; choose one of auto,"),
    ("burst_attention(q, k, v, plan, kernel='aten-flash')", "ValueError: kernel='aten-flash' runs on cuda, the"),
    ("burst_attention(q, k, v, plan, kernel='aten-cudnn')", "ValueError: kernel='aten-cudnn' runs on cuda, the"),
    ("burst_attention(q, k, v, plan, kernel='aten-efficient')", "ValueError: kernel='aten-efficient' runs on cuda,"),
    (
        "kernels.choose('aten', device=q.device, dtype=torch.int32)",
        "ValueError: kernel='aten' does not take torch.int32;",
    ),
    (
        "kernels.choose('aten', device=meta, dtype=torch.float32, head_dims=(16, 16))",
        "ValueError: kernel='aten' runs on cpu, the tensors are on meta; use kernel='aten-flash'",
    ),
]
COMPAT: Cases = [
    (
        "ring_flash_attn.ring_flash_attn_func(x, x, x, dropout_p=0.1)",
        "ValueError: dropout_p=0.1: dropout is not supported; pass dropout_p=0.0",
    ),
    (
        "ring_flash_attn.ring_flash_attn_func(x, x, x, alibi_slopes=slopes)",
        "ValueError: alibi_slopes: ALiBi is not supported; pass alibi_slopes=None and use rotary",
    ),
    (
        "ring_flash_attn.ring_flash_attn_func(x, x, x, window_size=(2, 3))",
        "ValueError: window_size=(2, 3) with causal=False: both sides must be equal; pass",
    ),
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, window_size=3)", "TypeError: window_size=3 must be (left, right),"),
    (
        "ring_flash_attn.ring_flash_attn_varlen_kvpacked_func(x[0], x.expand(4, 4, 2, 8), [0, 4], 4)",
        "ValueError: kv is [4, 4, 2, 8]; it must have 4 dims, and dim 1 must be 2",
    ),
    (
        "ring_flash_attn.ring_flash_attn_varlen_func(x, x, x, [0, 4], 4, group=group)",
        "ValueError: q, k and v must be [tokens, heads, head dim], but one is [1, 4, 2, 8]",
    ),
    ("ring_flash_attn.stripe_flash_attn_qkvpacked_func(x)", "ValueError: qkv is [1, 4, 2, 8]; it must have 5 dims,"),
    (
        "ring_flash_attn.zigzag_ring_flash_attn_func(odd, odd, odd, group=group)",
        "ValueError: 6 tokens can't be cut into 2 x 2 equal chunks, two for each of 2 ranks; pad",
    ),
    (
        "ring_flash_attn.ring_flash_attn_varlen_func(x[0], x[0], x[0], [0, 8], 8, group=group)",
        "ValueError: cu_seqlens ends at 8, but this rank has 4 tokens; pass this rank's borders:",
    ),
    (
        "ring_flash_attn.llama3_flash_attn_varlen_func(x[0], x[0], x[0], [0, 4], [0, 4], 4, 4, 1, slice(0, 4), "
        "group=group)",
        "ValueError: cu_seqlens_q=[0, 4], cu_seqlens_k=[0, 4] and local_k_slice=slice(0, 4,",
    ),
    (
        "ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2)",
        "ValueError: cu_seqlens ends at 7, which is not a multiple of 2 ranks; pad the last",
    ),
    (
        "LongContextAttention(ring_impl_type='basic_npu', ulysses_degree=1)",
        "ValueError: ring_impl_type='basic_npu' is unknown; choose one",
    ),
    (
        "LongContextAttention(ulysses_degree=2)(x, x, x, softcap=-30.0)",
        "ValueError: softcap=-30.0 must be a number from 1.18e-38 to",
    ),
    (
        "LongContextAttention(ring_impl_type='zigzag', ulysses_degree=2)",
        "ValueError: ulysses_degree=2 is not supported with ring_impl_type=zigzag; pass",
    ),
]
PARALLEL: Cases = [
    ("strategies.choose('turbo')", "ValueError: strategy='turbo' is unknown; choose one of auto, burst, ring,"),
    (
        "strategies.choose('usp:4').check(heads, 64, 6)",
        "ValueError: --strategy usp:4 has the Ulysses degree 4, which must divide the 6 ranks, and divide the 2",
    ),
    (
        "strategies.choose('tensor').check(heads, 64, 4)",
        "ValueError: --strategy tensor shares 6 query heads equally, but",
    ),
    ("strategies.choose('tensor').check(heads, 63, 2)", "ValueError: --strategy tensor shares 63 tokens"),
    ("strategies.choose('tensor-sequence').check(heads, 63, 2)", "ValueError: --strategy tensor-sequence shares 63"),
    ("strategies.choose('ulysses').check(heads, 64, 3)", "ValueError: --strategy ulysses has the Ulysses degree 3,"),
    ("strategies.choose('usp:x')", "ValueError: strategy='usp:x' is unknown"),
    ("strategies.choose('layout=zigzag,heads=2')", "ValueError: strategy="),
    ("strategies.choose('layout=zigzag,layout=contiguous')", "ValueError: strategy="),
    ("strategies.choose('layout=around')", "ValueError: layout='around' is unknown"),
    (
        "strategies.choose('single').check(heads, 64, 2)",
        "ValueError: --strategy single runs each sequence on one",
    ),
]
COMMANDS: Cases = [
    ("burst plan --seq-len 0 --ranks 2", "exit status 2: --seq-len 0 must be at least 2"),
    ("burst plan --seq-len 64 --ranks 2 --device-memory nan", "exit status 2: --device-memory nan must be a number"),
    ("burst plan --seq-len 64 --ranks 2 --model /nope", "exit status 2: --model '/nope': there is no such folder"),
    ("burst train --model tiny.txt --data tiny.txt", "exit status 2: --model 'tiny.txt' is a file; give the folder"),
    ("burst plan --seq-len 64 --ranks 2 --model llama-9", "exit status 2: --model 'llama-9' is not a preset"),
    ("burst plan --seq-len 64 --ranks 2 --hardware h100", "exit status 2: --hardware h100: rates='h100' is no"),
    ("burst plan --seq-len 64 --ranks 2 --generate", "exit status 2: --seq-len 64 must be above 64 with --generate"),
    ("burst plan --seq-len 1K --ranks 2 --generate --remat layer", "exit status 2: --remat layer is of a training"),
    ("burst plan --seq-len 1K --ranks 2 --generate --mlp-chunks 2", "exit status 2: --mlp-chunks 2 is of a training"),
    ("burst check --ranks 0", "exit status 2: --ranks 0 must be at least 1"),
    ("burst check --kernel best", "exit status 2: --kernel best is unknown; choose one of auto, reference, aten,"),
    ("burst check --masks causal causal", "exit status 2: --masks names causal twice; give it once"),
    ("burst check --dtypes bfloat16 --seq-len 64", "exit status 2: --dtypes bfloat16 need --seq-len of at least 256"),
    ("burst train --steps 0", "exit status 2: --steps 0 must be at least 1"),
    ("burst train --lr 0", "exit status 2: --lr 0.0 must be a number above 0"),
    ("burst train --ranks 3 --data-parallel 2", "exit status 2: --data-parallel 2 must divide the number of ranks,"),
    ("burst train --ranks 4 --seq-len 3", "exit status 2: --seq-len 3 is shorter than the 4 ranks that share a"),
    (
        "burst train --remat keep-attention --strategy tensor",
        "exit status 2: --remat keep-attention is not for --strategy tensor; use --remat layer",
    ),
    ("burst train --offload host", "exit status 2: --offload host moves the layer inputs that --remat layer or"),
    ("burst train --attention-chunks 2 --strategy tensor", "exit status 2: --attention-chunks 2 is not for --strategy"),
    ("burst train --attention-chunks 2 --remat keep-attention", "exit status 2: --attention-chunks 2 can't keep the"),
    ("burst train --optimizer-offload --device cpu", "exit status 2: --optimizer-offload is for GPUs; with --device"),
    ("burst train --compile --strategy tensor", "exit status 2: --compile is not for --strategy tensor; leave one"),
    (
        "burst train --max-positions 15 --seq-len 16 --data tiny.txt --out fresh",
        "exit status 2: --max-positions 15 is less than --seq-len 16; raise it to at least that",
    ),
    ("burst train --rope-scaling dynamic:4", "exit status 2: --rope-scaling 'dynamic:4' must be yarn:FACTOR with a"),
    ("burst train --rope-scaling yarn:4 --data tiny.txt", "exit status 2: --rope-scaling yarn:4: --model 'tiny' takes"),
    ("burst train --ignore-memory 32", "exit status 2: --ignore-memory '32' must be an amount with its unit (GiB,"),
    ("burst train --batch 2", "exit status 2: --batch 2 needs --pack none or --packing balanced, because packed"),
    ("burst train --packing balanced", "exit status 2: --batch 1 leaves --packing balanced one sequence; give the"),
    ("burst train --packing balanced --batch 2 --strategy ring", "exit status 2: --strategy ring has no layout"),
    (
        "burst train --packing balanced --batch 2 --ranks 2 --data-parallel 2",
        "exit status 2: --data-parallel 2 splits the ranks, but --packing balanced shares a batch",
    ),
    ("burst plan --packing balanced --seq-len 64 --ranks 2", "exit status 2: --batch 1 leaves --packing balanced"),
    ("burst train --ranks 4 --data-parallel 2 --tensor-parallel 3", "exit status 2: --tensor-parallel 3 must divide"),
    ("burst train --ranks 2 --tensor-parallel 2 --strategy single", "exit status 2: --tensor-parallel 2 can't be"),
    ("burst train --ranks 2 --tensor-parallel 2 --attention-chunks 2", "exit status 2: --tensor-parallel 2 can't be"),
    ("burst train --ranks 2 --tensor-parallel 2 --compile", "exit status 2: --tensor-parallel 2 can't be"),
    ("burst train --lora 4", "exit status 2: --lora 4 adapts a trained model, but --model tiny has random weights"),
    ("burst train --lora 4 --model theirs --strategy tensor", "exit status 2: --lora 4 is not for --strategy tensor"),
    ("burst train --ranks 2 --strategy single", "exit status 2: --strategy single runs each sequence on one rank, not"),
    ("burst train --data-parallel 2 --global-batch 3", "exit status 2: --global-batch 3 must be a multiple of 2,"),
    ("burst train --global-batch 4 --accumulate 3", "exit status 2: --global-batch 4 is not --data-parallel 1 x"),
    ("burst train --save-every 0", "exit status 2: --save-every '0' must be steps, as in 500, or minutes, as in 30m"),
    ("burst train --config stray.toml", "exit status 2: --config stray.toml: unknown setting 'seqlen'; did you mean"),
    ("burst train --config nowhere.toml", "exit status 2: --config nowhere.toml: [Errno 2] No such file or"),
    ("burst train --model theirs", "exit status 2: --model 'theirs': the folder holds no config.json"),
]
DATA: Cases = [
    ("read('nowhere')", "ValueError: --data 'nowhere': no such file or directory (give a file, a directory,"),
    ("read('empty')", "ValueError: --data 'empty': the directory holds no file to read"),
    ("read('blank.txt', b'')", "ValueError: --data 'blank.txt' holds no text"),
    ("read('latin.txt', b'caf\\xe9')", "ValueError: --data 'latin.txt': not UTF-8 text at byte 3"),
    ("read('rows.jsonl', b'{\"text\": 3.5}')", "ValueError: --data rows.jsonl:1: the 'text' field holds float,"),
    ("read('rows.jsonl', b'{\"Text\": \"a\"}')", "ValueError: --data rows.jsonl:1: no 'text' field among ['Text']"),
    ("read('rows.jsonl', b'[{\"text\": \"a\"}]')", "ValueError: --data rows.jsonl:1: expected an object with a"),
    ("read('rows.jsonl', b'{\"messages\": [3]}')", "ValueError: --data rows.jsonl:1: message 1 has no 'role'"),
    ("read('rows.jsonl.gz', b'text')", "ValueError: --data rows.jsonl.gz:1: broken gzip data (Not a gzipped file"),
    ("read('hf:')", "ValueError: --data hf:: give the data set's name, as in hf:allenai/c4:en"),
    (
        "burst train --data tiny.txt --ranks 8 --seq-len 64 --out fresh",
        "exit status 2: --held-out 0.05 of --data 'tiny.txt' leaves 6 tokens to evaluate, too few",
    ),
]
OUT: Cases = [
    ("burst train --out theirs", "exit status 2: --out 'theirs' holds files, but no marker of an earlier run, so"),
    ("burst train --out theirs --overwrite", "exit status 2: --out 'theirs' holds files, but no marker of an"),
    ("burst train --out run", "exit status 2: --out 'run' already holds a run; choose another folder or add"),
    ("burst train --out halted", "exit status 2: --out 'halted' holds an unfinished run, saved after step 12; add"),
    ("burst train --out theirs --resume", "exit status 2: --resume: 'theirs' holds no checkpoint; omit --resume to"),
    ("burst train --out halted --resume", "exit status 2: --resume: every checkpoint in 'halted/checkpoints' is"),
    ("burst train --resume half", "exit status 2: --resume half: there is no manifest.json, so this is not a whole"),
    ("burst export half model", "exit status 2: half: there is no manifest.json, so this is not a whole checkpoint"),
    ("burst export nowhere model", "exit status 2: CHECKPOINT 'nowhere' is missing: there is no such folder"),
    ("burst export run model", "exit status 2: CHECKPOINT 'run' is a run that holds no checkpoint"),
    ("burst train --out tiny.txt", "exit status 2: --out 'tiny.txt' can't be a folder: 'tiny.txt' is a file"),
    ("burst train --out tiny.txt/run", "exit status 2: --out 'tiny.txt/run' can't be a folder: 'tiny.txt' is a file"),
    ("burst train --out new --data new/tiny.txt", "exit status 2: --data 'new/tiny.txt' lies in --out 'new', where"),
    ("burst train --out foreign --overwrite", "exit status 2: --out 'foreign' has a .burst-run.json that is not of"),
    ("twice('fresh')", "ValueError: --out 'fresh' is in use by burst train, process"),
]


def attention_names(group: Any) -> dict[str, Any]:
    """Return tensors for an attention call and a loss, for this rank's shard of eight tokens."""
    plan = make_plan(8, group=group)
    rank, q, k, v = plan.rank, *(torch.randn(1, heads, plan.length, 16) for heads in (4, 2, 2))
    wanted, x, dtype = q.clone().requires_grad_(), torch.randn(1, plan.length, 4), [torch.float32, torch.float64][rank]
    hidden, weight = torch.randn(1, plan.length, 4), torch.randn(11, 4)
    labels = torch.zeros(1, plan.length, dtype=torch.int64)
    shifted = plan.shard_labels(torch.zeros(1, 8, dtype=torch.int64))
    heads = strategies.Heads(q_heads=6, kv_heads=2, head_dim=16, hidden=96, intermediate=96)
    meta = torch.device("meta")
    return COMMON | locals()


def compat_names(group: Any) -> dict[str, Any]:
    """Return tensors with four and three tokens on each of two ranks, in flash-attn's order of dimensions."""
    return COMMON | {
        "group": group,
        "x": torch.randn(1, 4, 2, 8),
        "odd": torch.randn(1, 3, 2, 8),
        "slopes": torch.ones(2),
    }


def grad(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def tangent(function: Any, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))


def config(model_type: str, **changes: Any) -> Any:
    made = copy.deepcopy(families.tiny_config(model_type))
    made.update(changes)
    return made


def model_names(group: Any) -> dict[str, Any]:
    """Return a tiny Llama, modified copies of it, a batch, and correct arguments of a call."""
    plan, batch, model, cache = (
        make_plan(SEQLEN, group=group),
        make_batch(),
        make_model("llama"),
        cache_with_earlier_tokens,
    )
    right = {**hf.shard_batch(batch, plan), "plan": plan, "use_cache": False}
    ids, labels, head = batch["input_ids"], right.pop("shift_labels"), model.lm_head.weight
    hidden, wrapped = torch.randn(2, plan.length, 32, dtype=torch.float64), nn.Sequential(model)
    eager = make_model("llama", "eager")
    padding, borders = torch.ones(2, SEQLEN, dtype=torch.long), torch.tensor([0, SEQLEN])
    seen = torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool)
    padding[1, -3:] = 0
    unlike = {None: plan, 7: make_plan(SEQLEN, mask=Mask(window=7), group=group, strategy=Strategy(layout="striped"))}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}

    def forward(model: Any, **changes: Any) -> torch.Tensor:
        return model.model(**right | changes)[0]

    return COMMON | locals()


def file_names(_: Any) -> dict[str, Any]:
    """Fill the working folder with a user's files, an earlier run, and a marker of another format."""
    for folder in ("theirs", "empty", "run", "foreign", "new", "half"):
        Path(folder).mkdir()
    Path("theirs/notes.txt").write_text("mine")
    for path in ("tiny.txt", "new/tiny.txt"):
        Path(path).write_text("tiny " * 20)
    Path("stray.toml").write_text("seqlen = 3\n")
    Path("run/summary.json").write_text("{}")
    Path("run/.burst-run.json").write_text('{"format": 1, "wrote": ["summary.json"]}')
    Path("halted/checkpoints/step-00000012").mkdir(parents=True)
    Path("halted/.burst-run.json").write_text('{"format": 1, "wrote": ["checkpoints/"]}')
    Path("foreign/.burst-run.json").write_text('{"format": 9}')

    def read(name: str, content: bytes | None = None) -> None:
        if content is not None:
            Path(name).write_bytes(content)
        list(open_corpus(name).documents())

    def twice(name: str) -> None:
        with (
            claimed(name, by="burst train", overwrite=False, writes=()),
            claimed(name, by="", overwrite=False, writes=()),
        ):
            pass

    return {"read": read, "twice": twice}


def unjoined(call: Any, *given: Any) -> Any:
    """Make the call on a rank of a job whose process group is not initialized."""
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="4"):
        return call(*given)


# Names that every expression may use.
COMMON = {
    each.__name__: each
    for each in (
        CallShape,
        Hardware,
        Mask,
        Strategy,
        burst_attention,
        make_plan,
        next_token_loss,
        make_model,
        config,
        tangent,
        unjoined,
    )
}
COMMON |= {each.__name__: each for each in (grad, token_log_probs)}
COMMON |= {"ring_flash_attn": ring_flash_attn, "LongContextAttention": LongContextAttention}
COMMON |= {"ShardedCache": ShardedCache, "shard_weights": shard_weights, "nn": nn}
COMMON |= {"torch": torch, "pickle": pickle, "strategies": strategies, "kernels": kernels, "hf": hf}
# area: (cases, a function that returns the names they use, ranks)
AREAS = {
    "The attention call": (CALL, attention_names, 1),
    "The plan and its mask": (PLAN, attention_names, 1),
    "The plan of two ranks": (PLAN_OF_TWO, attention_names, 2),
    "Ranks that differ": (DIFFER, attention_names, 2),
    "The loss": (LOSS, attention_names, 1),
    "A Hugging Face call": (HF, model_names, 1),
    "Trainers": (TRAINERS, trainer_names, 1),
    "Models": (MODELS, model_names, 2),
    "Other packages' names": (COMPAT, compat_names, 2),
    "Kernels": (KERNELS, attention_names, 1),
    "How ranks share a model": (PARALLEL, attention_names, 2),
    "Commands and their flags": (COMMANDS, file_names, 1),
    "Data": (DATA, file_names, 1),
    "The output folder": (OUT, file_names, 1),
}
