"""Experts of a mixture, some on each rank: which modules can be shared so, and what their parts add up to."""

import peft
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, MixtralForCausalLM, NemotronHConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from burst_attention.inference import weights
from burst_attention.inference.columns import rows_of
from burst_attention.inference.experts import adds_up, sum_of_parts, width_of

SIZES = {"hidden_size": 16, "intermediate_size": 24}
KINDS = {  # with gates, with biases and transposed weights, without gates and of a width of their own
    MixtralExperts: MixtralConfig(**SIZES, num_local_experts=5),
    GptOssExperts: GptOssConfig(**SIZES, num_local_experts=5),
    NemotronHExperts: NemotronHConfig(**SIZES, n_routed_experts=5, moe_intermediate_size=24, moe_latent_size=8),
}


def experts_of(kind, how, dtype):
    config = KINDS[kind]
    config._experts_implementation = how
    experts = kind(config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for x in experts.parameters():
        torch.nn.init.normal_(x, std=0.3, generator=generator)
    return experts


def tokens_for(experts, dtype):
    """Twelve tokens, two of which choose the same experts; a router's weights are often in fp32."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(12, width_of(experts), generator=generator).to(dtype)
    scores = torch.rand(12, 5, generator=generator)
    scores[1] = scores[0]
    chosen = scores.topk(3)
    return x, chosen.indices, chosen.values.softmax(-1)


def in_double(experts, chosen):
    """Return the sum over the experts, of weights in fp64, by the class's own loop."""
    exact = experts_of(type(experts), "eager", torch.float64)
    for own, x in exact.named_parameters():
        x.data.copy_(experts.get_parameter(own))
    return exact(chosen[0].double(), chosen[1], chosen[2].double())


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_parts_add_up_to_the_whole(kind, how, ranks):
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        experts = experts_of(kind, how, dtype)
        assert adds_up(experts, rows_of(5, ranks))
        chosen, rows = tokens_for(experts, dtype), rows_of(5, ranks)
        parts, others = (
            [{own: x.roll(n, 0)[each.start : each.stop] for own, x in experts._parameters.items()} for each in rows]
            for n in (0, 1)
        )
        found, expected = sum_of_parts(experts, chosen, rows, parts), in_double(experts, chosen)
        assert found.dtype == dtype and experts.num_experts == 5
        assert ((found - expected).norm() / expected.norm()).item() <= bound
        wrong = sum_of_parts(experts, chosen, rows, others)
        assert ((wrong - expected).norm() / expected.norm()).item() > 0.3, "the bound can't tell experts apart"


@torch.no_grad()
def test_sums_of_half_precision_are_rounded_once():
    """Many ranks' equal results: in bf16 a running sum would stop growing at 256 of them."""
    experts = experts_of(MixtralExperts, "eager", torch.bfloat16)
    x, own = torch.ones(1, 16, dtype=torch.bfloat16), {own: x[:1] for own, x in experts._parameters.items()}
    rows = [range(n, n + 1) for n in range(600)]
    one, many = (
        sum_of_parts(experts, (x, torch.arange(n)[None], torch.ones(1, n)), rows[:n], [own] * n).double()
        for n in (1, 600)
    )
    assert ((many - 600 * one).abs() <= 2**-8 * (600 * one).abs()).all()


def shared_of(model):
    """Return the names of the modules whose weights two ranks would share."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    return [*weights._sharable(model, layers, 2)]


def mixture():
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    )


def test_experts_are_shared():
    assert "model.layers.0.mlp.experts" in shared_of(mixture())


def test_experts_with_an_adapter_are_not_shared():
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(mixture(), peft.LoraConfig(r=2, target_modules=[], target_parameters=parameters))
    assert not any("experts" in name for name in shared_of(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: experts.register_forward_hook(lambda *_: None),
        lambda experts: setattr(experts, "forward", experts.forward),
        lambda experts: experts.to(torch.float8_e4m3fn),
        lambda experts: setattr(experts, "num_experts", 3),
    ],
)
def test_changed_experts_are_not_shared(change):
    model = mixture()
    change(model.model.layers[0].mlp.experts)
    assert not any("experts" in name for name in shared_of(model))


def test_experts_whose_parts_do_not_add_up_are_not_shared(monkeypatch):
    stock, model = MixtralExperts.forward, mixture()

    def normalised(self, x, index, share):
        return stock(self, x, index, share) / share.sum(-1, keepdim=True)

    monkeypatch.setattr(MixtralExperts, "forward", normalised)
    assert not any("experts" in name for name in shared_of(model))
