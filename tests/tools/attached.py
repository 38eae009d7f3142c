"""What users attach to a model: over ranks each must equal one process, or be refused by name. Writes docs/attached.md.

    python tests/tools/attached.py

Losses, subclasses, hooks, heads and adapters are put on a tiny Llama in fp64. Loss and every gradient over two ranks,
as threads, are compared with one process, for a plain batch and a padded one. Exit status 1 if a case is neither equal
nor refused.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402

from burst_attention.integrations import hf  # noqa: E402
from burst_attention.testing import WorkerError, local_world  # noqa: E402
from tests.support.hf_models import SMALL  # noqa: E402
from tests.tools.families import is_ours  # noqa: E402

PAGE = ROOT / "docs" / "attached.md"
WORLD, BOUND = 2, 2e-6  # transformers computes its loss in fp32
HEAD = """# What may be attached to a model

`python tests/tools/attached.py` writes this page, and a test compares. Each row puts something on a tiny Llama and
parallelizes it over two ranks. *Equal*: the loss and every gradient are those of one process in fp64, for a plain and
for a padded batch. *Refused*: every rank raises this error before a wrong number can leave.

"""
Make = Callable[[], nn.Module]


def llama(kind: type = LlamaForCausalLM, **options: Any) -> Any:
    """Return a tiny model in fp64 with the same weights at each call."""
    torch.manual_seed(0)
    return kind(LlamaConfig(**SMALL | {"initializer_range": 0.2} | options)).double().train()


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:]


# Losses


def smoothing(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), shifted(labels).flatten(), label_smoothing=0.1)


def focal(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    nll = F.cross_entropy(logits.flatten(0, 1), shifted(labels).flatten(), reduction="none")
    return ((1 - (-nll).exp()) ** 2 * nll).sum() / (shifted(labels) != -100).sum()


def z_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    seen = shifted(labels) != -100
    return ForCausalLMLoss(logits, labels, vocab_size) + 1e-2 * (logits.logsumexp(-1)[seen] ** 2).mean()


def constant(logits: Any, **_: Any) -> Any:
    return 123.0 + 0 * logits.sum()


def of_all_logits(logits: Any, **_: Any) -> Any:
    return logits.square().mean()


def of_last_token(logits: Any, **_: Any) -> Any:
    return logits[:, 0].square().mean()


def with_dropout(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    return ForCausalLMLoss(F.dropout(logits, 0.1), labels, vocab_size)


def passed_on(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
    return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


class Called:
    def __call__(self, logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return 2 * ForCausalLMLoss(logits, labels, vocab_size)


def with_loss(loss: Any) -> Make:
    def make() -> nn.Module:
        model = llama()
        model.loss_function = loss
        return model

    return make


def with_type(name: str) -> Make:
    def make() -> nn.Module:
        model = llama()
        model.loss_type = name
        return model

    return make


# Subclasses


class DoubledForCausalLM(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = 2 * out.loss
        return out


class ZLlama(DoubledForCausalLM):
    """The same under a name that says nothing."""


class PlainForCausalLM(LlamaForCausalLM):
    """A subclass that changes nothing."""


class MaskingForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels.masked_fill(labels % 3 == 0, -100), **kwargs)


class ScalingForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=2 * self.model.embed_tokens(input_ids), **kwargs)


class ShiftingForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids.roll(1, -1), **kwargs)


class NoisyForCausalLM(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = out.loss * (1 + torch.rand(()))
        return out


class CallingForCausalLM(LlamaForCausalLM):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.loss = 3 * out.loss
        return out


class PoolingMLP(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + x.mean(1, keepdim=True)


class TokenwiseMLP(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class CentredNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states - hidden_states.mean(1, keepdim=True))


class MixingLinear(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + super().forward(x.roll(1, 1))


class PlainLinear(nn.Linear):
    """A subclass that changes nothing."""


class RememberingModel(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out


def replaced(place: str, kind: Callable[[Any], nn.Module]) -> Make:
    """Put another module in a place, with the weights of the one that was there."""

    def make() -> nn.Module:
        model = llama()
        old = model.get_submodule(place)
        new = kind(old).double()
        new.load_state_dict(old.state_dict(), strict=False)
        model.set_submodule(place, new)
        return model.train()

    return make


def linear(kind: type) -> Callable[[Any], nn.Module]:
    return lambda old: kind(old.in_features, old.out_features, bias=old.bias is not None)


# Hooks


def hooked(place: str, hook: Any, *, pre: bool = False, **options: Any) -> Make:
    def make() -> nn.Module:
        model = llama()
        module = model.get_submodule(place)
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        register(hook, **options)
        return model

    return make


def triple_loss(_: Any, __: Any, out: Any) -> Any:
    out.loss = 3 * out.loss
    return out


def tensor_of(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def look(*_: Any) -> None:
    return None


def double(_: Any, __: Any, out: Any) -> Any:
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


def add_mean(_: Any, __: Any, out: Any) -> Any:
    mean = tensor_of(out).mean(1, keepdim=True)
    return (out[0] + mean, *out[1:]) if isinstance(out, tuple) else out + mean


def by_length(_: Any, given: Any) -> Any:
    return (given[0] * given[0].shape[1], *given[1:])


def own_forward(place: str, change: Callable[[Any], Any]) -> Make:
    def make() -> nn.Module:
        model = llama()
        module = model.get_submodule(place)
        stock = module.forward
        module.forward = lambda *args, **kwargs: change(stock(*args, **kwargs))
        return model

    return make


def parameter_hook() -> nn.Module:
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.register_hook(lambda grad: 2 * grad)
    return model


def backward_hook() -> nn.Module:
    model = llama()
    model.model.layers[0].mlp.register_full_backward_hook(lambda _, given, __: tuple(2 * x for x in given))
    return model


# Heads


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def biased_head() -> nn.Module:
    model = llama()
    model.lm_head = nn.Linear(32, SMALL["vocab_size"], bias=True).double()
    return model


def sequential_head(*more: nn.Module) -> Make:
    def make() -> nn.Module:
        model = llama()
        model.lm_head = nn.Sequential(model.lm_head, *copy.deepcopy(more)).double()
        return model

    return make


def parametrized(change: Any, name: str = "lm_head") -> Make:
    def make() -> nn.Module:
        model = llama()
        change(model.get_submodule(name))
        return model

    return make


def resized() -> nn.Module:
    model = llama()
    model.resize_token_embeddings(80, mean_resizing=False)
    return model


def frozen_body() -> nn.Module:
    model = llama()
    model.model.requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


# Adapters


def adapter(config: Any, before: Callable[[Any], Any] = lambda model: model) -> Make:
    def make() -> nn.Module:
        torch.manual_seed(1)
        model = peft.get_peft_model(before(llama()), copy.deepcopy(config)).double().train()
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return model

    return make


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"]} | options)


def merged() -> Any:
    return adapter(lora())().merge_and_unload().requires_grad_()


def two_adapters() -> Any:
    model = adapter(lora())()
    model.add_adapter("second", lora(target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model.double()


def weighted() -> Any:
    model = adapter(lora())()
    model.add_adapter("second", lora())
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "both", combination_type="linear")
    model.set_adapter("both")
    return model.double().train()


CASES: dict[str, dict[str, Make]] = {
    "Losses": {
        "transformers' loss": llama,
        "`loss_type = 'ForCausalLM'`": with_type("ForCausalLM"),
        "`loss_type = 'ForMaskedLM'`": with_type("ForMaskedLM"),
        "label smoothing": with_loss(smoothing),
        "focal loss": with_loss(focal),
        "z-loss": with_loss(z_loss),
        "a constant": with_loss(constant),
        "a loss of all logits, padding too": with_loss(of_all_logits),
        "a loss of the first token's logits": with_loss(of_last_token),
        "a loss with dropout": with_loss(with_dropout),
        "a function that calls transformers' loss": with_loss(passed_on),
        "`functools.partial` of transformers' loss": with_loss(functools.partial(ForCausalLMLoss, ignore_index=-100)),
        "an object that is called": with_loss(Called()),
    },
    "Subclasses": {
        "one that changes nothing": lambda: llama(PlainForCausalLM),
        "twice the loss": lambda: llama(DoubledForCausalLM),
        "twice the loss, under another name": lambda: llama(ZLlama),
        "labels masked inside": lambda: llama(MaskingForCausalLM),
        "embeddings scaled": lambda: llama(ScalingForCausalLM),
        "ids shifted inside": lambda: llama(ShiftingForCausalLM),
        "a random factor": lambda: llama(NoisyForCausalLM),
        "`__call__` overridden": lambda: llama(CallingForCausalLM),
        "an MLP that averages over tokens": replaced("model.layers.0.mlp", lambda old: PoolingMLP(old.config)),
        "a custom MLP, token by token": replaced("model.layers.0.mlp", lambda old: TokenwiseMLP(old.config)),
        "a norm that averages over tokens": replaced("model.norm", lambda old: CentredNorm(32)),
        "an `nn.Linear` that mixes tokens": replaced("model.layers.0.mlp.up_proj", linear(MixingLinear)),
        "an `nn.Linear` that changes nothing": replaced("model.layers.0.mlp.up_proj", linear(PlainLinear)),
        "a body that averages over tokens": replaced("model", lambda old: RememberingModel(old.config)),
    },
    "Hooks": {
        "on the model: three times the loss": hooked("", triple_loss),
        "on the model, before it: nothing changed": hooked("", look, pre=True),
        "on a layer: only looks": hooked("model.layers.0", look),
        "on a layer: twice its output": hooked("model.layers.0", double),
        "on a layer: adds the mean over tokens": hooked("model.layers.0", add_mean),
        "on an MLP, before it: times the length": hooked("model.layers.0.mlp", by_length, pre=True),
        "on the embedding: twice its output": hooked("model.embed_tokens", double),
        "on the last norm: adds the mean over tokens": hooked("model.norm", add_mean),
        "on the body: only looks": hooked("model", look),
        "on the head: twice its output": hooked("lm_head", double),
        "a replaced forward on an MLP: doubled": own_forward("model.layers.0.mlp", lambda out: 2 * out),
        "a replaced forward on the head: squared": own_forward("lm_head", lambda out: out**2),
        "a parameter's gradient doubled": parameter_hook,
        "a module's backward doubled": backward_hook,
    },
    "Heads": {
        "tied to the embedding": tied,
        "with a bias": biased_head,
        "behind it a tanh": sequential_head(nn.Tanh()),
        "in an `nn.Sequential` alone": sequential_head(),
        "weight normalisation": parametrized(nn.utils.parametrizations.weight_norm),
        "weight normalisation of an MLP": parametrized(
            nn.utils.parametrizations.weight_norm, "model.layers.0.mlp.up_proj"
        ),
        "a subclass of `nn.Linear`": replaced("lm_head", linear(PlainLinear)),
        "a subclass that mixes tokens": replaced("lm_head", linear(MixingLinear)),
        "a resized vocabulary": resized,
        "frozen except the head": frozen_body,
        "gradient checkpointing": checkpointed,
    },
    "Adapters": {
        "LoRA": adapter(lora()),
        "LoRA with DoRA": adapter(lora(use_dora=True)),
        "LoRA of embedding and head": adapter(lora(target_modules=["embed_tokens", "lm_head"])),
        "LoRA, the head trained whole": adapter(lora(modules_to_save=["lm_head"])),
        "LoRA, replicated layers": adapter(lora(layer_replication=[[0, 2], [1, 2]])),
        "LoRA, activated (aLoRA)": adapter(lora(alora_invocation_tokens=[5, 9], task_type="CAUSAL_LM")),
        "LoRA merged and unloaded": merged,
        "two LoRAs at once": two_adapters,
        "two LoRAs, weighted": weighted,
        "IA3": adapter(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
        "OFT": adapter(peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"])),
        "LoHa": adapter(peft.LoHaConfig(r=4, target_modules=["q_proj"])),
        "LoHa with `rank_dropout`": adapter(peft.LoHaConfig(r=4, rank_dropout=0.5, target_modules=["q_proj"])),
        "LoHa with `module_dropout`": adapter(peft.LoHaConfig(r=4, module_dropout=0.5, target_modules=["q_proj"])),
        "LoKr": adapter(peft.LoKrConfig(r=4, target_modules=["q_proj"])),
        "LoKr with `rank_dropout`": adapter(peft.LoKrConfig(r=4, rank_dropout=0.5, target_modules=["q_proj"])),
        "LoKr with `module_dropout`": adapter(peft.LoKrConfig(r=4, module_dropout=0.5, target_modules=["q_proj"])),
        "VeRA": adapter(peft.VeraConfig(r=4, target_modules=["q_proj"])),
        "LN tuning": adapter(peft.LNTuningConfig(target_modules=["input_layernorm"])),
        "prompt tuning": adapter(peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
        "prefix tuning": adapter(peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
        "Lily": adapter(peft.LilyConfig(r=4, stride_A=1, num_B=2, target_modules=["q_proj", "v_proj"])),
        "LoRA on a subclass with twice the loss": adapter(lora(), lambda _: llama(DoubledForCausalLM)),
        "LoRA with a focal loss": adapter(lora(), lambda _: with_loss(focal)()),
    },
}


@dataclass(frozen=True)
class Verdict:
    """``kind``: equal, refused or WRONG; ``text``: the largest relative error, or the refusal."""

    kind: str
    text: str


def batches() -> list[dict[str, torch.Tensor]]:
    """Return a plain batch and one that is padded on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(SMALL["vocab_size"], (2, 23), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    plain = {"input_ids": ids, "labels": ids.clone()}
    return [plain, {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}]


def results(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss and every gradient by its parameter's name."""
    model.zero_grad()
    loss = model(**batch).loss
    if loss.requires_grad:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach()} | grads


def judge(make: Make) -> Verdict:
    """Compare a model over ranks with the same model in one process."""
    given = batches()
    expected = [results(make(), batch) for batch in given]
    spread = [make() for _ in range(WORLD)]

    def rank(group: Any) -> list[dict[str, torch.Tensor]]:
        model = spread[group.rank()]
        hf.parallelize(model, group, timeout=30)
        return [results(model, batch) for batch in given]

    try:
        with local_world(WORLD, timeout=30) as ranks:
            found = ranks.run(rank)
    except WorkerError as error:
        raised = [*error.errors.values()]
        text = " ".join(str(raised[0]).split())
        known = len(raised) == WORLD and all(isinstance(x, (TypeError, ValueError)) and is_ours(x) for x in raised)
        return Verdict("refused" if known else "WRONG", text)
    worst = max(difference(expected[n], [each[n] for each in found]) for n in range(len(given)))
    return Verdict("equal" if worst <= BOUND else "WRONG", f"{worst:.0e}")


def difference(expected: dict[str, torch.Tensor], found: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest relative L2 error of the loss on any rank, and of the gradients' means over ranks."""
    if {*expected} != {*found[0]}:
        return float("inf")
    worst = 0.0
    for name, right in expected.items():
        parts = [each[name] for each in found]
        got = parts if name == "the loss" else [sum(parts) / len(parts)]
        scale = right.norm().clamp(min=1e-6)
        worst = max(worst, *(((one - right).norm() / scale).item() for one in got))
    return worst


def page(verdicts: dict[str, dict[str, Verdict]]) -> str:
    """Return the text of the page."""
    kinds = [each.kind for area in verdicts.values() for each in area.values()]
    text = HEAD + f"{len(kinds)} cases: {kinds.count('equal')} equal, {kinds.count('refused')} refused.\n"
    for area, found in verdicts.items():
        text += f"\n## {area}\n\n| attached | verdict |\n|---|---|\n"
        for name, each in found.items():
            said = "equal" if each.kind == "equal" else f"{each.kind}: {each.text[:240].replace('|', chr(92) + '|')}"
            text += f"| {name} | {said} |\n"
    return text


def judge_all() -> dict[str, dict[str, Verdict]]:
    """Judge every case."""
    warnings.simplefilter("ignore")
    return {area: {name: judge(make) for name, make in cases.items()} for area, cases in CASES.items()}


def main() -> int:
    verdicts = judge_all()
    PAGE.write_text(page(verdicts), "utf-8")
    wrong = [(name, each) for area in verdicts.values() for name, each in area.items() if each.kind == "WRONG"]
    for name, each in wrong:
        print(f"{name}: {each.text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
