"""What ``python tests/tools/refusals.py`` asks for: by area, (what is asked, why it is refused).

What is asked is a Python expression, or a command line if it begins with ``burst``.
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

from burst_attention import Mask, burst_attention, kernels, make_plan
from burst_attention.compat import ring_flash_attn
from burst_attention.compat.yunchang import LongContextAttention
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss, token_log_probs
from tests.support.adapters import LORA, TUNERS
from tests.support.hf_models import SEQLEN, cache_with_earlier_tokens, make_batch, make_model
from tests.support.trainer_refusals import TRAINERS, trainer_names
from tests.tools import families

Cases = list[tuple[str, str]]

CALL: Cases = [
    ("burst_attention(q, k, v, 8)", "a number says neither which tokens are here nor what a query sees"),
    ("burst_attention(q.tolist(), k, v, plan)", "only tensors have a dtype and a device"),
    ("burst_attention(q.int(), k.int(), v.int(), plan)", "integers have no softmax"),
    ("burst_attention(q[0], k[0], v[0], plan)", "a guess at the missing dim could be wrong"),
    ("burst_attention(q, k.double(), v, plan)", "a cast would choose the precision in your place"),
    ("burst_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], plan)", "five of the plan's eight tokens: not its shard"),
    ("burst_attention(q, k[..., :8], v, plan)", "queries and keys of different widths have no product"),
    ("burst_attention(q, k, v[:, :1], plan)", "each key has one value"),
    ("burst_attention(q[:, :3], k, v, plan)", "three query heads can't share two key-value heads equally"),
    ("burst_attention(q, k.repeat(2, 1, 1, 1), v, plan)", "broadcasting would hide a mistake"),
    ("burst_attention(q, k, v, plan, scale=float('nan'))", "no score would be a number"),
    ("burst_attention(q, k, v, plan, scale=5e-324)", "in fp32 it is 0, and 0 times a mask's -inf is NaN"),
    ("burst_attention(q, k, v, plan, scale=True)", "a flag in a number's place is a slip"),
    ("burst_attention(q, k, v, plan, travels='all')", "there is no such assignment of pairs"),
    ("torch.func.grad(lambda x: burst_attention(x, k, v, plan).sum())(q)", "an exchange can't be traced by it"),
    ("tangent(lambda x: burst_attention(x, k, v, plan), q)", "torch would drop the tangent without a word"),
    ("grad(grad(burst_attention(wanted, k, v, plan), wanted), wanted)", "the backward has no formula for its own"),
]
PLAN: Cases = [
    ("make_plan('8')", "a length is an int"),
    ("make_plan(-1)", "nothing has less than no tokens"),
    ("make_plan(8, layout='snake')", "no such layout is known"),
    ("make_plan(8, route='star')", "no such route is known"),
    ("make_plan(8, heads=2)", "each head group is computed by ranks of its own"),
    ("make_plan(8, keep='some')", "all of a slice is kept, or nothing"),
    ("make_plan(8, waves=-1)", "shards come in so many waves, or owner by owner"),
    ("make_plan(8, waves=2, route='nodes')", "who passes a shard on has to know which it is"),
    ("make_plan(8, remat='all')", "nobody knows what that recomputes"),
    ("make_plan(8, mask='causal')", "masks are compared between ranks field by field"),
    ("make_plan(8, timeout=0)", "every exchange would fail"),
    ("unjoined(make_plan, 8)", "each rank would take itself for the only one"),
    ("make_plan(8, group='all')", "only a group says who the peers are"),
    ("Mask(window=0)", "a softmax over no keys is undefined"),
    ("Mask(window=2.5)", "half a token can't be seen"),
    ("Mask(window=4, causal=False)", "which way it would look is not defined"),
    ("Mask(prefix=2, window=3)", "which of the two would win is not defined"),
    ("Mask(cu_seqlens=[1, 8])", "token 0 would be in no document"),
    ("Mask(cu_seqlens=[0, 5, 3])", "a document can't end before it begins"),
    ("make_plan(8, mask=Mask(cu_seqlens=[0, 7]))", "token 7 would be in no document"),
    ("make_plan(8, mask=Mask(prefix=9))", "the prefix is a part of the sequence"),
    ("setattr(plan, 'seqlen', 9)", "ranks have agreed on what it was made for"),
    ("plan.shard(x, 5)", "x has no such dim"),
    ("plan.shard(x[:, :7], 1)", "it is cut from the whole sequence"),
    ("plan.unshard(x, 1, grad='mean')", "no such way to bring gradients back is known"),
    ("plan.unshard(x[:, :7], 1)", "it is put together from whole shards"),
    ("plan.shard_labels(torch.zeros(8))", "a batch of one is a batch, too"),
    (
        "plan.bytes(batch=1, q_heads=3, kv_heads=2, head_dim=16, dtype=torch.float32)",
        "no call could have such heads",
    ),
    (
        "plan.bytes(batch=1, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.int8)",
        "no call could have that dtype",
    ),
]
DIFFER: Cases = [
    ("make_plan([8, 9][rank], group=group)", "each would wait for rows that the other does not have"),
    ("make_plan(8, layout=['zigzag', 'striped'][rank], group=group)", "a token would be on both ranks, or on none"),
    ("burst_attention(q, k, v, plan, scale=[0.5, 0.25][rank])", "each would compute another attention"),
    ("burst_attention(q, k, v, plan.with_mask(Mask(window=[2, 3][rank])))", "what one sends the other would not take"),
    ("burst_attention(*(x.to(dtype) for x in (q, k, v)), plan)", "bytes of one dtype would be read as another"),
    ("burst_attention(q.clone().requires_grad_(rank == 0), k, v, plan)", "one rank alone would enter the backward"),
    ("burst_attention(q, k, v, plan, kernel=['aten', 'reference'][rank])", "partial results differ in precision"),
    (
        "burst_attention(q, k, v, plan, scale=[0.5, float('inf')][rank])",
        "what one rank refuses the others refuse with it",
    ),
    ("burst_attention(q, k, [v, v[:, :1]][rank], plan)", "the rank at fault is named on the other"),
    ("plan.unshard(x[:, :, : 3 - rank], 1)", "the parts would not fit together"),
    (
        "next_token_loss(hidden, weight, labels, plan, num_valid=[4, 5][rank])",
        "each rank would divide by another count",
    ),
    (
        "token_log_probs(hidden, weight, shifted, plan, temperature=[1.0, 0.5][rank])",
        "one result would be of two temperatures",
    ),
    ("pickle.dumps(plan)", "a process group is of one process"),
]
LOSS: Cases = [
    ("next_token_loss(hidden, weight, labels, {None: plan})", "which tokens are here is one plan's to say"),
    ("next_token_loss(hidden[0], weight, labels, plan)", "a guess at the missing dim could be wrong"),
    ("next_token_loss(hidden[:, :5], weight, labels, plan)", "five of the plan's eight tokens: not its shard"),
    ("next_token_loss(hidden, weight[:, :3], labels, plan)", "the head's product would not be defined"),
    ("next_token_loss(hidden, weight.double(), labels, plan)", "a cast would choose the precision in your place"),
    ("next_token_loss(hidden, weight, labels[:, 1:], plan)", "each hidden state has one target"),
    ("next_token_loss(hidden, weight, labels.float(), plan)", "a target is an id"),
    ("next_token_loss(hidden, weight, labels + 11, plan)", "there is no logit for it"),
    ("next_token_loss(hidden, weight, labels, plan, num_valid=-1)", "a mean over less than nothing"),
    ("next_token_loss(hidden, weight, labels, plan, num_valid=0)", "the loss would be infinite"),
    ("next_token_loss(hidden, weight, labels, plan, chunk_tokens=0)", "it would never get done"),
    ("next_token_loss(hidden, weight, labels, plan, factor=0)", "all logits would be the same"),
    ("next_token_loss(hidden, weight, labels, plan, softcap=0.0)", "the cap divides by it"),
    ("next_token_loss(hidden, weight, labels, plan, bias=torch.zeros(3))", "each logit has one bias"),
    ("token_log_probs(hidden, weight, labels, plan)", "its log-probability would have no place in the result"),
    ("token_log_probs(hidden, weight, labels, plan, temperature=0)", "in that limit there is one token and no choice"),
    ("token_log_probs(hidden, weight, labels, plan, outputs='entropy')", "each letter would be a name"),
    ("token_log_probs(hidden, weight, labels, plan, outputs=['perplexity'])", "nothing of that name is known"),
]
HF: Cases = [
    ("hf.shard_batch([1, 2], plan)", "nothing says what the numbers are"),
    ("hf.shard_batch({**batch, 'token_type_ids': ids}, plan)", "what it means to a model is not known"),
    ("hf.shard_batch({'labels': ids}, plan)", "there is nothing to embed"),
    ("hf.shard_batch({**batch, 'labels': ids[:, 1:]}, plan)", "labels go in unshifted: they are shifted here"),
    ("hf.shard_batch({**batch, 'attention_mask': padding}, plan)", "padding changes the softmax; packing does not"),
    ("model(**{**right, 'plan': None})", "each rank would see its shard alone"),
    ("model(**{**right, 'plan': 'zigzag'})", "a layout is not yet a plan"),
    ("model(**{**right, 'attention_mask': padding})", "the plan's mask is what is seen, and it hides no padding"),
    ("model(**{**right, 'position_ids': right['position_ids'] + 1})", "rotary angles of other tokens"),
    ("model(**{**right, 'past_key_values': cache(), 'use_cache': True})", "the plan does not know the cached tokens"),
    ("model(**right, is_causal=False)", "the layer and the plan must mean the same pairs"),
    ("model(**right, cu_seq_lens_q=borders)", "documents stand in the mask, the same on all ranks"),
    ("model(**right, softcap=30.0)", "no kernel here caps scores"),
    ("model(**right, s_aux=torch.zeros(4))", "no kernel here has sinks"),
    ("model(**right, output_attentions=True)", "weights of S by S are what is avoided"),
    ("model(**right, temperature=2.0)", "a keyword of unknown effect could change the result"),
    ("make_model('llama', attention_dropout=0.1).train()(**right)", "ranks would have to draw the same dropout"),
    ("make_model('mistral')(**right)", "the layer asks for a window that the plan does not hold"),
    ("make_model('mistral')(**{**right, 'plan': {None: plan}})", "of plans by window that one is missing"),
    ("make_model('gemma3')(**{**right, 'plan': unlike})", "one batch is cut one way"),
    ("make_model('llama', rope_parameters=dynamic)(**right)", "the longest position differs by rank"),
    ("hf.next_token_loss(wrapped, hidden, labels, plan)", "a wrapper could change the logits"),
]
MODELS: Cases = [
    ("hf.check_config(config('llama', attention_dropout=0.1))", "ranks would have to draw the same dropout"),
    ("hf.check_config(config('gemma2', attn_logit_softcapping=50.0))", "no kernel here caps scores"),
    ("hf.check_config(config('t5'))", "a decoder's cross-attention looks at another sequence"),
    ("hf.check_config(config('lfm2'))", "a convolution needs the neighbours of a token"),
    ("hf.check_config(config('qwen3_next'))", "a linear attention's state goes from token to token"),
    ("hf.check_config(config('bloom'))", "its scores have a bias that no kernel here adds"),
    ("hf.unparallelize(eager)", "there is nothing to undo"),
    ("hf.check_model(eager, plan)", "another attention would see one shard"),
    ("hf.check_model(shifting, plan)", "what is not known by class is not trusted"),
    ("hf.check_model(disguised, plan)", "names can mislead, so it is measured too"),
    ("forward(shifting)", "seen at the first call, too, without check_model"),
    ("forward(hooked)", "a hook on a part would be given one shard"),
    ("forward(noisy)", "each rank would draw other values"),
    ("hf.parallelize(lily, plan.transport.group)", "an adapter that mixes tokens"),
    ("hf.parallelize(activated, plan.transport.group)", "offsets are counted on whole inputs"),
    (
        "next_token_loss(forward(eager, plan=None), head, labels, plan)",
        "labels were cut, but nobody attended over ranks",
    ),
]
KERNELS: Cases = [
    ("burst_attention(q, k, v, plan, kernel=7)", "kernels have names"),
    ("burst_attention(q, k, v, plan, kernel='best')", "no such kernel is known"),
    ("burst_attention(q, k, v, plan, kernel='aten-flash')", "it is for GPUs, and these tensors are not on one"),
    ("burst_attention(q, k, v, plan, kernel='aten-cudnn')", "it is for GPUs, too"),
    ("burst_attention(q, k, v, plan, kernel='aten-efficient')", "it is for GPUs, too"),
    (
        "kernels.choose('aten', device=meta, dtype=torch.float32, head_dims=(16, 16))",
        "torch's CPU kernel is for the CPU",
    ),
]
COMPAT: Cases = [
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, dropout_p=0.1)", "ranks would have to draw the same dropout"),
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, alibi_slopes=slopes)", "no kernel here adds a bias"),
    ("ring_flash_attn.ring_flash_attn_func(x, x, x, window_size=(2, 2))", "a mask's windows look back"),
    ("ring_flash_attn.stripe_flash_attn_qkvpacked_func(x)", "which dim is packed would be a guess"),
    (
        "ring_flash_attn.zigzag_ring_flash_attn_func(odd, odd, odd, group=group)",
        "halves of an odd part are two guesses",
    ),
    (
        "ring_flash_attn.ring_flash_attn_varlen_func(x[0], x[0], x[0], [0, 8], 8, group=group)",
        "borders are the rank's own",
    ),
    (
        "ring_flash_attn.llama3_flash_attn_varlen_func(x[0], x[0], x[0], [0, 4], [0, 4], 4, 4, 1, slice(0, 4), "
        "group=group)",
        "the second rank's keys begin elsewhere",
    ),
    ("ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2)", "parts are equal there"),
    ("LongContextAttention(ring_impl_type='zigzag', ulysses_degree=2)", "its shards are cut once more"),
    ("LongContextAttention(ulysses_degree=1)(x, x, x, softcap=30.0)", "no kernel here caps scores"),
]
ENGINES: Cases = [
    ("engines.choose('turbo')", "no such engine is known"),
    ("engines.choose('ulysses', layout='zigzag')", "its exchange puts contiguous shards together"),
    ("engines.choose('usp', layout='striped')", "its ring would be that of other tokens"),
    ("engines.choose('usp', heads=4).check(heads, 64, 6)", "its mesh has whole rows"),
    ("engines.choose('tensor', route='ring')", "it has collectives, and no route"),
    ("engines.choose('ulysses').check(heads, 64, 4)", "it gives each rank whole heads"),
    ("engines.choose('tensor').check(heads, 64, 4)", "it cuts heads and columns equally"),
    ("engines.choose('tensor-sequence').check(heads, 63, 2)", "its gathers take shards of one size"),
    ("engines.choose('single').check(heads, 64, 2)", "it has no exchange for a shared sequence"),
    ("whole_attention(q, k, v, plan)", "it would see one shard"),
    ("ulysses_attention(q, k, v, plan)", "its exchange puts contiguous shards together"),
]
COMMANDS: Cases = [
    ("burst plan --seq-len 0 --ranks 2", "there would be nothing to tell"),
    ("burst plan --seq-len 64 --ranks 2 --q-heads 3 --kv-heads 2", "no call could have such heads"),
    ("burst plan --seq-len 64 --ranks 2 --q-heads 2 --window 5 --no-causal", "windows look back"),
    ("burst plan --seq-len 64 --ranks 2 --device-memory nan", "nothing could be said to fit"),
    ("burst plan --seq-len 64 --ranks 2 --model llama-9", "its sizes are not known, and nothing is fetched"),
    ("burst plan --seq-len 64 --ranks 2 --hardware h100", "no such rates are known"),
    ("burst plan --seq-len 1M --ranks 521", "no part of so many ranks stands for all"),
    ("burst plan --seq-len 1M --ranks 512 --window 400000", "what few ranks do would not go on over more"),
    ("burst check --ranks 0", "somebody has to compute"),
    ("burst check --kernel best", "no such kernel is known"),
    ("burst check --masks causal causal", "a slip: the second would be run for nothing"),
    ("burst check --dtypes bfloat16 --seq-len 64", "on a few numbers PyTorch's own error is no measure"),
    ("burst train --steps 0", "there would be nothing to train"),
    ("burst train --lr 0", "nothing would be learned"),
    ("burst train --ranks 3 --data-parallel 2", "groups of ranks are of one size"),
    ("burst train --ranks 4 --seq-len 3", "a rank without a token can't run a model"),
    ("burst train --remat keep-attention --engine ulysses", "its exchanges are no operator that a checkpoint can keep"),
    ("burst train --offload activations", "nothing would be moved"),
    ("burst train --optimizer-offload --device cpu", "there is no other memory to move it to"),
    ("burst train --compile --engine tensor", "its sums over ranks lie between what would be compiled"),
    ("burst train --max-positions 15 --seq-len 16 --data tiny.txt --out fresh", "the sequence has more"),
    ("burst train --batch 2", "packed sequences have each their own documents, and a batch shares one mask"),
    ("burst train --ranks 2 --engine single", "seen before a rank is started"),
    ("burst train --data-parallel 2 --global-batch 3", "every group computes as many sequences"),
    ("burst train --global-batch 4 --accumulate 3", "the one number follows from the other"),
    ("burst train --save-every 0", "neither steps nor minutes"),
    ("burst train --config stray.toml", "a setting that is not read must not seem to be"),
    ("burst train --config nowhere.toml", "nothing is taken silently from defaults"),
    ("burst train --model theirs", "there is nothing to load"),
]
DATA: Cases = [
    ("read('nowhere')", "a misspelt path must not become an empty corpus"),
    ("read('empty')", "no document, no training"),
    ("read('blank.txt', b'')", "no text, no training"),
    ("read('latin.txt', b'caf\\xe9')", "a wrong encoding would train on rubbish"),
    ("read('rows.jsonl', b'{\"text\": 3.5}')", "a number is no document"),
    ("read('rows.jsonl', b'{\"Text\": \"a\"}')", "another field could be anything"),
    ("read('rows.jsonl', b'[{\"text\": \"a\"}]')", "one object a line, so that a line can be named"),
    ("read('rows.jsonl.gz', b'text')", "its name says that it is compressed"),
    ("read('hf:')", "the hub has many data sets"),
    (
        "burst train --data tiny.txt --ranks 8 --seq-len 64 --out fresh",
        "each of the ranks that evaluate needs a token",
    ),
]
OUT: Cases = [
    ("burst train --out theirs", "somebody else's files are there"),
    ("burst train --out theirs --overwrite", "it overwrites what a run wrote, and nothing else"),
    ("burst train --out run", "an earlier run would be lost"),
    ("burst train --out halted", "a run that can go on would be lost"),
    ("burst train --out theirs --resume", "there is nothing to go on from"),
    ("burst train --out halted --resume", "none of its checkpoints is whole"),
    ("burst train --resume half", "what is not whole is not read"),
    ("burst export half model", "what is not whole is not read"),
    ("burst export nowhere model", "a misspelt path is not a damaged checkpoint"),
    ("burst export run model", "a run may hold none"),
    ("burst train --out tiny.txt", "a file is no folder"),
    ("burst train --out tiny.txt/run", "nor can one hold a folder"),
    ("burst train --out new --data new/tiny.txt", "the run would write beside, or over, what it reads"),
    ("burst train --out foreign --overwrite", "what another format lists can't be told from your files"),
    ("twice('fresh')", "two runs in one folder would mix"),
]


def attention_names(group: Any) -> dict[str, Any]:
    """A call's tensors and a loss's, of this rank's part of eight tokens."""
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
    """Four and three tokens on each of two ranks, in flash-attn's order of dims."""
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
    """Adds to each token the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 1)


class ShiftLayer(Shift):
    """The same from a package whose classes are named by what they do, under a name of what only holds others."""

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
    """Models with a hook on a part, with random values of a part, and with two adapters."""
    hooked, noisy, *adapted = (make_model("llama", dtype=torch.float32) for _ in range(4))
    hooked.model.layers[0].register_forward_hook(print)
    noisy.model.layers[0].mlp.residual_dropout = 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = peft.LilyConfig(**TUNERS["LILY"][0]), peft.LoraConfig(r=4, **LORA["activated"][0])
        with_adapters = [peft.get_peft_model(*each) for each in zip(adapted, configs, strict=True)]
    return [hooked.double(), noisy.double().train(), *with_adapters]


def model_names(group: Any) -> dict[str, Any]:
    """A tiny Llama, others that depart from it, a batch, and what the model is rightly called with."""
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
    padding, borders = torch.ones(2, SEQLEN, dtype=torch.long), torch.tensor([0, SEQLEN])
    padding[1, -3:] = 0
    unlike = {None: plan, 7: make_plan(SEQLEN, layout="striped", mask=Mask(window=7), group=group)}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}

    def forward(model: Any, **changes: Any) -> torch.Tensor:
        return model.model(**right | changes)[0]

    return COMMON | locals()


def file_names(_: Any) -> dict[str, Any]:
    """The working folder with somebody's files in it, an earlier run, and a marker of another format."""
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
    """Make the call as a rank of a job that has not joined the others."""
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="4"):
        return call(*given)


# What every expression may name.
COMMON = {
    each.__name__: each
    for each in (Mask, burst_attention, make_plan, next_token_loss, make_model, config, tangent, unjoined)
}
COMMON |= {each.__name__: each for each in (whole_attention, ulysses_attention, grad, token_log_probs)}
COMMON |= {"ring_flash_attn": ring_flash_attn, "LongContextAttention": LongContextAttention}
COMMON |= {"torch": torch, "pickle": pickle, "engines": engines, "kernels": kernels, "hf": hf}
# area: (cases, the names that they use, ranks)
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
