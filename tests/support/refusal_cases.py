"""The refused calls that ``python tests/tools/refusals.py`` runs: by area, (call, reason for the refusal).

A call is a Python expression, or a command line if it begins with ``burst``.
"""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from burst_train import engines
from burst_train.data.corpus import open_corpus
from burst_train.engines.ulysses import ulysses_attention
from burst_train.engines.whole import whole_attention
from burst_train.run.lock import claimed
from torch import nn
from torch.autograd import forward_ad

from burst_attention import CallShape, Mask, Strategy, burst_attention, kernels, make_plan
from burst_attention.compat import ring_flash_attn
from burst_attention.compat.yunchang import LongContextAttention
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss, token_log_probs
from tests.support import vision_models
from tests.support.adapters import LORA, TUNERS
from tests.support.hf_models import SEQLEN, cache_with_earlier_tokens, make_batch, make_model
from tests.support.trainer_refusals import TRAINERS, trainer_names
from tests.tools import families

Cases = list[tuple[str, str]]

CALL: Cases = [
    ("burst_attention(q, k, v, 8)", "a number defines neither this rank's tokens nor the mask"),
    ("burst_attention(q.tolist(), k, v, plan)", "a list has no dtype and no device"),
    ("burst_attention(q.int(), k.int(), v.int(), plan)", "softmax is not defined for integers"),
    ("burst_attention(q[0], k[0], v[0], plan)", "a guess at the missing dim could be wrong"),
    ("burst_attention(q, k.double(), v, plan)", "a cast would choose the precision in your place"),
    ("burst_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], plan)", "the shard has eight tokens, not five"),
    ("burst_attention(q, k[..., :8], v, plan)", "queries and keys need equal head dimensions"),
    ("burst_attention(q, k, v[:, :1], plan)", "each key needs one value"),
    ("burst_attention(q[:, :3], k, v, plan)", "three query heads can't share two key-value heads equally"),
    ("burst_attention(q, k.repeat(2, 1, 1, 1), v, plan)", "broadcasting would hide a mistake"),
    ("burst_attention(q, k, v, plan, scale=float('nan'))", "every score would be NaN"),
    ("burst_attention(q, k, v, plan, scale=5e-324)", "in fp32 it is 0, and 0 times the mask's -inf is NaN"),
    ("burst_attention(q, k, v, plan, scale=True)", "a bool instead of a number is probably a mistake"),
    ("burst_attention(q, k, v, plan, travels='query')", "what circulates belongs to the plan"),
    (
        "torch.func.grad(lambda x: burst_attention(x, k, v, plan).sum())(q)",
        "torch.func can't trace communication between ranks",
    ),
    ("tangent(lambda x: burst_attention(x, k, v, plan), q)", "torch would silently drop the tangent"),
    ("grad(grad(burst_attention(wanted, k, v, plan), wanted), wanted)", "the backward can't be differentiated again"),
]
PLAN: Cases = [
    ("make_plan('8')", "a length must be an int"),
    ("make_plan(-1)", "a length can't be negative"),
    ("make_plan(8, strategy=Strategy(layout='snake'))", "no such layout is known"),
    ("make_plan(8, strategy=Strategy(route='star'))", "no such route is known"),
    ("make_plan(8, strategy=Strategy(ulysses_degree=2))", "each head group needs its own ranks"),
    ("make_plan(8, strategy=Strategy(cache_qkv='some'))", "only all or nothing can be cached"),
    ("make_plan(8, strategy=Strategy(chunks=-1))", "a number of chunks can't be negative"),
    (
        "make_plan(8, strategy=Strategy(chunks=2, route='nodes'))",
        "this route forwards each owner's shard separately, but chunks mix all owners",
    ),
    ("make_plan(8, call=CallShape(remat='all'))", "no such policy is known"),
    ("make_plan(8, call=CallShape(attention_chunks=0))", "a layer makes at least one call"),
    ("make_plan(8, strategy='burst')", "no published scheme has this name"),
    ("make_plan(8, strategy=Strategy(layout='balanced-per-document'))", "it follows the documents in any case"),
    ("make_plan(8, layout='zigzag')", "the argument has a new name"),
    ("make_plan(8, mask='causal')", "a mask must be a Mask, which ranks compare field by field"),
    ("make_plan(8, call=CallShape(grad=1))", "a number could be a count of backwards"),
    ("make_plan(2, query_offset=6)", "the keys of the earlier tokens would be missing"),
    ("make_plan(2, keys=[[(0, 8)]], query_offset=-1)", "positions count from 0"),
    ("make_plan(2, keys=8)", "the number of keys does not say which rank holds which"),
    ("make_plan(2, keys=[[(0, 8.5)]])", "half a key can't be held"),
    ("make_plan(2, keys=[[(4, 8), (0, 4)]])", "chunks and head groups find rows by ascending positions"),
    ("make_plan(2, keys=[[(0, 5)], [(4, 8)]])", "a query would count this key twice"),
    ("make_plan(2, keys=[[(0, 4)], [(4, 8)]])", "the second rank does not exist"),
    ("make_plan(2, keys=[[(0, 8)]], strategy=Strategy(layout='balanced'))", "it places whole documents, not queries"),
    (
        "make_plan(2, keys=[[(0, 8)]], strategy=Strategy(cache_qkv=True, ulysses_degree=1))",
        "the cache has as many rows of queries as of keys",
    ),
    (
        "make_plan(2, keys=[[(0, 8)]], query_offset=6).with_mask(Mask(), seqlen=3)",
        "where the new tokens' keys lie is unknown",
    ),
    ("burst_attention(q[:, :, :2], k[:, :, :7], v, make_plan(2, keys=[[(0, 8)]]))", "a key would be missing"),
    ("make_plan(8, timeout=0)", "every exchange would time out"),
    ("unjoined(make_plan, 8)", "each rank would compute as if it were alone"),
    ("make_plan(8, group='all')", "only a process group defines the peers"),
    ("Mask(window=0)", "a softmax over no keys is undefined"),
    ("Mask(window=2.5)", "half a token can't be seen"),
    ("Mask(prefix=2, window=3)", "it is not defined which of them takes precedence"),
    ("Mask(cu_seqlens=[1, 8])", "token 0 would be in no document"),
    ("Mask(cu_seqlens=[0, 5, 3])", "a document can't end before it begins"),
    ("make_plan(8, mask=Mask(cu_seqlens=[0, 7]))", "token 7 would be in no document"),
    ("make_plan(8, mask=Mask(prefix=9))", "the prefix can't be longer than the sequence"),
    ("Mask(blocks=[[True]])", "the size of a block is unknown"),
    ("Mask(together=[0, 0], causal=False)", "every query sees every key already"),
    ("Mask(together=[0, 0], prefix=1)", "a prefix is such a group"),
    ("Mask(together=[0.5, 1.0])", "groups have numbers"),
    ("Mask(together=[[0, 0]])", "all rows of a batch share one mask"),
    ("make_plan(8, mask=Mask(together=[0, 0]))", "the other tokens' groups are unknown"),
    ("Mask(blocks=[[1, 0], [1, 1]], block=4)", "numbers may be scores, not what is seen"),
    ("Mask(blocks=[[True, False]], block=4)", "queries and keys have the same blocks"),
    ("make_plan(8, mask=Mask(blocks=[[True]], block=4))", "the second block's tokens would be in no row"),
    ("setattr(plan, 'seqlen', 9)", "the ranks have agreed on the plan's values"),
    ("plan.shard(x, 5)", "x has no such dimension"),
    ("plan.shard(x[:, :7], 1)", "it needs the whole sequence"),
    ("plan.unshard(x, 1, grad='mean')", "no such gradient mode is known"),
    ("plan.unshard(x[:, :7], 1)", "it needs whole shards"),
    ("plan.shard_labels(torch.zeros(8))", "labels need a batch dimension, even for one sequence"),
    (
        "plan.bytes(batch=1, q_heads=3, kv_heads=2, head_dim=16, dtype=torch.float32)",
        "attention does not accept these head counts",
    ),
    (
        "plan.bytes(batch=1, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.int8)",
        "attention does not accept that dtype",
    ),
]
DIFFER: Cases = [
    ("make_plan([8, 9][rank], group=group)", "each rank would wait for rows that the other does not have"),
    (
        "make_plan(8, strategy=Strategy(layout=['zigzag', 'striped'][rank]), group=group)",
        "tokens would be on both ranks or missing",
    ),
    ("burst_attention(q, k, v, plan, scale=[0.5, 0.25][rank])", "each rank would compute a different attention"),
    (
        "burst_attention(q, k, v, plan.with_mask(Mask(window=[2, 3][rank])))",
        "one rank would send data that the other does not expect",
    ),
    ("burst_attention(*(x.to(dtype) for x in (q, k, v)), plan)", "one rank would misread the other's bytes"),
    ("burst_attention(q.clone().requires_grad_(rank == 0), k, v, plan)", "only one rank would run the backward"),
    ("burst_attention(q, k, v, plan, kernel=['aten', 'reference'][rank])", "partial results differ in precision"),
    (
        "burst_attention(q, k, v, plan, scale=[0.5, float('inf')][rank])",
        "if one rank refuses a call, all ranks do",
    ),
    ("burst_attention(q, k, [v, v[:, :1]][rank], plan)", "the other rank's error names the rank at fault"),
    ("plan.unshard(x[:, :, : 3 - rank], 1)", "the parts would not fit together"),
    (
        "next_token_loss(hidden, weight, labels, plan, num_valid=[4, 5][rank])",
        "each rank would divide by another count",
    ),
    (
        "token_log_probs(hidden, weight, shifted, plan, temperature=[1.0, 0.5][rank])",
        "one result would mix two temperatures",
    ),
    ("pickle.dumps(plan)", "a process group belongs to one process"),
]
LOSS: Cases = [
    ("next_token_loss(hidden, weight, labels, {None: plan})", "one plan must define this rank's tokens"),
    ("next_token_loss(hidden[0], weight, labels, plan)", "a guess at the missing dim could be wrong"),
    ("next_token_loss(hidden[:, :5], weight, labels, plan)", "the shard has eight tokens, not five"),
    ("next_token_loss(hidden, weight[:, :3], labels, plan)", "the head's product would not be defined"),
    ("next_token_loss(hidden, weight.double(), labels, plan)", "a cast would choose the precision in your place"),
    ("next_token_loss(hidden, weight, labels[:, 1:], plan)", "each hidden state needs one target"),
    ("next_token_loss(hidden, weight, labels.float(), plan)", "a target must be an integer id"),
    ("next_token_loss(hidden, weight, labels + 11, plan)", "the vocabulary has no such id"),
    ("next_token_loss(hidden, weight, labels, plan, num_valid=-1)", "a count can't be negative"),
    ("next_token_loss(hidden, weight, labels, plan, num_valid=0)", "the loss would be infinite"),
    ("next_token_loss(hidden, weight, labels, plan, chunk_tokens=0)", "a chunk needs at least one token"),
    ("next_token_loss(hidden, weight, labels, plan, factor=0)", "all logits would be equal"),
    ("next_token_loss(hidden, weight, labels, plan, softcap=0.0)", "the cap divides by it"),
    ("next_token_loss(hidden, weight, labels, plan, bias=torch.zeros(3))", "each logit needs one bias"),
    ("token_log_probs(hidden, weight, labels, plan)", "the result has no entry for the last position"),
    ("token_log_probs(hidden, weight, labels, plan, temperature=0)", "logits are divided by the temperature"),
    ("token_log_probs(hidden, weight, labels, plan, outputs='entropy')", "each letter would be taken for a name"),
    ("token_log_probs(hidden, weight, labels, plan, outputs=['perplexity'])", "no such output is known"),
]
HF: Cases = [
    ("hf.shard_batch([1, 2], plan)", "a list does not say what its numbers mean"),
    ("hf.shard_batch({**batch, 'token_type_ids': ids}, plan)", "its meaning for a model is unknown"),
    ("hf.shard_batch({'labels': ids}, plan)", "a model needs token ids"),
    ("hf.shard_batch({**batch, 'labels': ids[:, 1:]}, plan)", "pass unshifted labels; shard_batch shifts them"),
    (
        "hf.shard_batch({**batch, 'attention_mask': padding}, plan)",
        "the plan's mask does not hide padding; pack the sequences instead",
    ),
    ("model(**{**right, 'plan': None})", "each rank would see its shard alone"),
    ("model(**{**right, 'plan': 'zigzag'})", "a layout's name is not a plan"),
    ("model(**{**right, 'attention_mask': padding})", "the plan's mask does not hide padding"),
    (
        "model(**{**right, 'position_ids': right['position_ids'] + 1})",
        "tokens would get the rotary angles of other tokens",
    ),
    (
        "model(**{**right, 'past_key_values': cache(), 'use_cache': True})",
        "the plan does not include the cached tokens",
    ),
    ("model(**right, is_causal=False)", "the layer and the plan must use the same mask"),
    ("model(**right, cu_seq_lens_q=borders)", "the plan's mask defines the documents on all ranks"),
    ("model(**right, softcap=-30.0)", "scores are divided by the cap"),
    ("model(**right, s_aux=torch.zeros(3))", "each query head has one sink"),
    ("model(**right, output_attentions=True)", "the S x S attention weights are never computed as a whole"),
    ("model(**right, temperature=2.0)", "a keyword with unknown effect could change the result"),
    ("make_model('llama', attention_dropout=0.1).train()(**right)", "ranks would have to draw the same dropout"),
    ("make_model('mistral')(**right)", "the plan's mask does not have the layer's window"),
    ("make_model('mistral')(**{**right, 'plan': {None: plan}})", "no plan has the layer's window"),
    ("make_model('gemma3')(**{**right, 'plan': unlike})", "all plans must cut the batch in the same way"),
    ("make_model('llama', rope_parameters=dynamic)(**right)", "the largest position differs by rank"),
    ("hf.next_token_loss(wrapped, hidden, labels, plan)", "a wrapper could change the logits"),
]
MODELS: Cases = [
    ("hf.check_config(config('llama', attention_dropout=0.1))", "ranks would have to draw the same dropout"),
    ("hf.check_config(config('t5'))", "cross-attention attends to another sequence"),
    ("hf.check_config(config('recurrent_gemma'))", "its recurrence is part of a module of unknown class"),
    ("hf.check_config(config('bloom'))", "its attention scores have a bias that no kernel adds"),
    ("hf.check_config(config('rwkv'))", "no state of this recurrence is passed between ranks"),
    ("hf.check_config(config('deepseek_v32'))", "a plan needs its mask before the call"),
    ("hf.check_config(config('bigbird_pegasus'))", "its layers and its configuration disagree about the mask"),
    ("hf.unparallelize(eager)", "there is nothing to undo"),
    ("hf.check_model(eager, plan)", "another attention would see only one shard"),
    ("hf.check_model(shifting, plan)", "its class is unknown and may mix tokens"),
    ("hf.check_model(disguised, plan)", "class names can mislead, so check_model also measures"),
    ("forward(shifting)", "the first call also finds it, without check_model"),
    ("forward(hooked)", "a hook on a part would get only one shard"),
    ("forward(noisy)", "each rank would draw different values"),
    ("forward(thinned)", "ranks would draw equal values for different tokens"),
    ("hf.parallelize(lily, plan.transport.group)", "this adapter mixes tokens"),
    ("hf.parallelize(activated, plan.transport.group)", "its offsets refer to the whole input"),
    ("hf.parallelize(dropping, plan.transport.group)", "each rank would draw other values for the same image"),
    ("seeing(**{**images, 'position_ids': places})", "the model computes them from the images"),
    ("seeing(**{**images, 'attention_mask': in_front})", "rows would have to move with their images"),
    ("seeing(**images, pixels=places)", "it may have to be cut like tokens"),
    (
        "next_token_loss(forward(eager, plan=None), head, labels, plan)",
        "the model did not use the plan that cut the labels",
    ),
]
KERNELS: Cases = [
    ("burst_attention(q, k, v, plan, kernel=7)", "a kernel is chosen by name"),
    ("burst_attention(q, k, v, plan, kernel='best')", "no such kernel is known"),
    ("burst_attention(q, k, v, plan, kernel='aten-flash')", "it needs a GPU, and these tensors are on the CPU"),
    ("burst_attention(q, k, v, plan, kernel='aten-cudnn')", "it needs a GPU"),
    ("burst_attention(q, k, v, plan, kernel='aten-efficient')", "it needs a GPU"),
    (
        "kernels.choose('aten', device=meta, dtype=torch.float32, head_dims=(16, 16))",
        "torch's CPU kernel is for the CPU",
    ),
]
COMPAT: Cases = [
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, dropout_p=0.1)", "ranks would have to draw the same dropout"),
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, alibi_slopes=slopes)", "no kernel adds a bias"),
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, window_size=(2, 3))", "a mask's window has equal sides"),
    ("ring_flash_attn.stripe_flash_attn_qkvpacked_func(x)", "it is unclear which dimension is packed"),
    (
        "ring_flash_attn.zigzag_ring_flash_attn_func(odd, odd, odd, group=group)",
        "an odd part can't be cut into equal halves",
    ),
    (
        "ring_flash_attn.ring_flash_attn_varlen_func(x[0], x[0], x[0], [0, 8], 8, group=group)",
        "borders refer to this rank's tokens",
    ),
    (
        "ring_flash_attn.llama3_flash_attn_varlen_func(x[0], x[0], x[0], [0, 4], [0, 4], 4, 4, 1, slice(0, 4), "
        "group=group)",
        "the second rank's keys start at another offset",
    ),
    ("ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2)", "it needs equal parts"),
    ("LongContextAttention(ring_impl_type='zigzag', ulysses_degree=2)", "its shards would have to be cut again"),
]
ENGINES: Cases = [
    ("engines.choose('turbo')", "no such engine is known"),
    ("engines.choose('ulysses', strategy=Strategy(layout='zigzag'))", "its all-to-all needs contiguous shards"),
    ("engines.choose('usp', strategy=Strategy(layout='striped'))", "its ring needs other shards"),
    ("engines.choose('usp', strategy=Strategy(ulysses_degree=4)).check(heads, 64, 6)", "its mesh needs full rows"),
    ("engines.choose('tensor', strategy=Strategy(route='ring'))", "it uses collectives, which have no route"),
    ("engines.choose('ulysses').check(heads, 64, 4)", "each rank needs whole heads"),
    ("engines.choose('tensor').check(heads, 64, 4)", "it needs equal parts of heads and columns"),
    ("engines.choose('tensor-sequence').check(heads, 63, 2)", "it gathers shards of equal size"),
    ("engines.choose('single').check(heads, 64, 2)", "it can't share a sequence between ranks"),
    ("whole_attention(q, k, v, plan)", "it would see only one shard"),
    ("ulysses_attention(q, k, v, plan)", "its all-to-all needs contiguous shards"),
]
COMMANDS: Cases = [
    ("burst plan --seq-len 0 --ranks 2", "there would be nothing to predict"),
    ("burst plan --seq-len 64 --ranks 2 --q-heads 3 --kv-heads 2", "attention does not accept these head counts"),
    ("burst plan --seq-len 64 --ranks 2 --q-heads 2 --window 5 --no-causal", "a window covers only earlier tokens"),
    ("burst plan --seq-len 64 --ranks 2 --device-memory nan", "no size can be compared with NaN"),
    ("burst plan --seq-len 64 --ranks 2 --model llama-9", "its sizes are unknown, and nothing is downloaded"),
    ("burst plan --seq-len 64 --ranks 2 --hardware h100", "no such rates are known"),
    ("burst plan --seq-len 1M --ranks 521", "no smaller group of ranks represents all of them"),
    ("burst plan --seq-len 1M --ranks 512 --window 400000", "a few ranks would not represent all of them"),
    ("burst check --ranks 0", "at least one rank is needed"),
    ("burst check --kernel best", "no such kernel is known"),
    ("burst check --masks causal causal", "the second run would only repeat the first"),
    ("burst check --dtypes bfloat16 --seq-len 64", "few numbers give no reliable estimate of PyTorch's error"),
    ("burst train --steps 0", "there would be nothing to train"),
    ("burst train --lr 0", "the weights would not change"),
    ("burst train --ranks 3 --data-parallel 2", "all groups must have the same size"),
    ("burst train --ranks 4 --seq-len 3", "a rank without tokens can't run a model"),
    (
        "burst train --remat keep-attention --engine ulysses",
        "activation checkpointing can't save the results of its communication",
    ),
    ("burst train --offload host", "no layer inputs would be saved"),
    ("burst train --offload activations --remat layer", "with disk:DIR as another value it would be ambiguous"),
    ("burst train --attention-chunks 2 --engine ulysses", "its attention is another library's, with all heads at once"),
    ("burst train --attention-chunks 2 --remat keep-attention", "results are kept by layer, not by group of heads"),
    ("burst train --optimizer-offload --device cpu", "on the CPU there is no other memory to offload to"),
    ("burst train --compile --engine tensor", "its all-reduces lie inside the compiled regions"),
    ("burst train --max-positions 15 --seq-len 16 --data tiny.txt --out fresh", "the sequence has more positions"),
    ("burst train --batch 2", "packed sequences differ in documents, but a batch shares one mask"),
    ("burst train --packing balanced", "one packed sequence is shared without it"),
    ("burst train --packing balanced --batch 2 --engine ring", "a ring needs equal shards of one sequence"),
    ("burst train --packing balanced --batch 2 --layout zigzag", "the two name different layouts"),
    ("burst train --packing balanced --batch 2 --ranks 2 --data-parallel 2", "all ranks are one group"),
    ("burst plan --packing balanced --seq-len 64 --ranks 2", "as for burst train"),
    ("burst train --ranks 2 --engine single", "this is checked before ranks start"),
    ("burst train --data-parallel 2 --global-batch 3", "each group must compute equally many sequences"),
    ("burst train --global-batch 4 --accumulate 3", "one of the two follows from the other"),
    ("burst train --save-every 0", "0 is neither a number of steps nor of minutes"),
    ("burst train --config stray.toml", "an unknown setting would be ignored"),
    ("burst train --config nowhere.toml", "a missing file must not silently mean defaults"),
    ("burst train --model theirs", "the folder has no model"),
]
DATA: Cases = [
    ("read('nowhere')", "a misspelt path must not become an empty corpus"),
    ("read('empty')", "training needs at least one document"),
    ("read('blank.txt', b'')", "training needs text"),
    ("read('latin.txt', b'caf\\xe9')", "text in the wrong encoding would be garbled"),
    ("read('rows.jsonl', b'{\"text\": 3.5}')", "a document must be text"),
    ("read('rows.jsonl', b'{\"Text\": \"a\"}')", 'only the field "text" holds documents'),
    ("read('rows.jsonl', b'[{\"text\": \"a\"}]')", "each line must be one object"),
    ("read('rows.jsonl.gz', b'text')", "the file's name promises compressed data"),
    ("read('hf:')", "the name of a data set is missing"),
    (
        "burst train --data tiny.txt --ranks 8 --seq-len 64 --out fresh",
        "each rank needs a token for evaluation",
    ),
]
OUT: Cases = [
    ("burst train --out theirs", "the folder holds other files"),
    ("burst train --out theirs --overwrite", "it overwrites only files of an earlier run"),
    ("burst train --out run", "it would delete an earlier run"),
    ("burst train --out halted", "it would delete a run that can be resumed"),
    ("burst train --out theirs --resume", "there is no checkpoint to resume from"),
    ("burst train --out halted --resume", "none of its checkpoints is complete"),
    ("burst train --resume half", "an incomplete checkpoint is never read"),
    ("burst export half model", "an incomplete checkpoint is never read"),
    ("burst export nowhere model", "the error separates a wrong path from a damaged checkpoint"),
    ("burst export run model", "this run has no checkpoint"),
    ("burst train --out tiny.txt", "a file is not a folder"),
    ("burst train --out tiny.txt/run", "a file can't contain a folder"),
    ("burst train --out new --data new/tiny.txt", "the run could overwrite its input"),
    ("burst train --out foreign --overwrite", "files listed in another format may be yours"),
    ("twice('fresh')", "two runs in one folder would mix their files"),
]


def attention_names(group: Any) -> dict[str, Any]:
    """Return tensors for an attention call and a loss, for this rank's shard of eight tokens."""
    plan = make_plan(8, group=group)
    rank, q, k, v = plan.rank, *(torch.randn(1, heads, plan.length, 16) for heads in (4, 2, 2))
    wanted, x, dtype = q.clone().requires_grad_(), torch.randn(1, plan.length, 4), [torch.float32, torch.float64][rank]
    hidden, weight = torch.randn(1, plan.length, 4), torch.randn(11, 4)
    labels = torch.zeros(1, plan.length, dtype=torch.int64)
    shifted = plan.shard_labels(torch.zeros(1, 8, dtype=torch.int64))
    heads = engines.Heads(q_heads=6, kv_heads=2, head_dim=16, hidden=96, intermediate=96)
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


class Shift(nn.Module):
    """A module that adds the previous token to each token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 1)


class ShiftLayer(Shift):
    """The same under a harmless name, in a package whose class names are trusted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


ShiftLayer.__module__ = "transformers_modules.of_somebody"


def with_part(part: nn.Module) -> Any:
    model = make_model("llama")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, part)
    return model


def config(model_type: str, **changes: Any) -> Any:
    made = copy.deepcopy(families.tiny_config(model_type))
    made.update(changes)
    return made


def departing() -> list[Any]:
    """Return models with a hook on a part, with a part that draws random values, and with two adapters."""
    hooked, noisy, *adapted = (make_model("llama", dtype=torch.float32) for _ in range(4))
    hooked.model.layers[0].register_forward_hook(print)
    noisy.model.layers[0].mlp.residual_dropout = 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = peft.LilyConfig(**TUNERS["LILY"][0]), peft.LoraConfig(r=4, **LORA["activated"][0])
        with_adapters = [peft.get_peft_model(*each) for each in zip(adapted, configs, strict=True)]
    return [hooked.double(), noisy.double().train(), *with_adapters]


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
    eager, shifting, disguised = make_model("llama", "eager"), with_part(Shift()), with_part(ShiftLayer())
    hooked, noisy, lily, activated = departing()
    thinned = make_model("llama").train()
    thinned.model.layers[0].mlp.add_module("more", nn.Dropout(0.1))
    seeing, dropping = (vision_models.build("qwen2_5_vl") for _ in range(2))
    dropping.model.visual.blocks[0].add_module("more", nn.Dropout(0.1))
    images = vision_models.images_and_text(seeing)
    places, in_front = torch.arange(images["input_ids"].shape[1])[None], images["attention_mask"].flip(1)
    images["labels"] = images["labels"].where(in_front.bool(), -100).where(images["attention_mask"].bool(), -100)
    images["labels"][:, :5] = -100
    hf.parallelize(seeing, plan.transport.group)
    padding, borders = torch.ones(2, SEQLEN, dtype=torch.long), torch.tensor([0, SEQLEN])
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
        Path(path).write_text("tiny")
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
COMMON |= {each.__name__: each for each in (whole_attention, ulysses_attention, grad, token_log_probs)}
COMMON |= {"ring_flash_attn": ring_flash_attn, "LongContextAttention": LongContextAttention}
COMMON |= {"torch": torch, "pickle": pickle, "engines": engines, "kernels": kernels, "hf": hf}
# area: (cases, a function that returns the names they use, ranks)
AREAS = {
    "The attention call": (CALL, attention_names, 1),
    "The plan and its mask": (PLAN, attention_names, 1),
    "Ranks that differ": (DIFFER, attention_names, 2),
    "The loss": (LOSS, attention_names, 1),
    "A Hugging Face call": (HF, model_names, 1),
    "Trainers": (TRAINERS, trainer_names, 1),
    "Models": (MODELS, model_names, 2),
    "Other packages' names": (COMPAT, compat_names, 2),
    "Kernels": (KERNELS, attention_names, 1),
    "Engines": (ENGINES, attention_names, 2),
    "Commands and their flags": (COMMANDS, file_names, 1),
    "Data": (DATA, file_names, 1),
    "The output folder": (OUT, file_names, 1),
}
