"""Parts are known by what they do: by their code, or by a measurement, not by the name of their class."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    FNetConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MobileBertConfig,
    MobileBertModel,
    PatchTSMixerConfig,
    Wav2Vec2Config,
)
from transformers.models.fnet.modeling_fnet import FNetFourierTransform
from transformers.models.patchtsmixer.modeling_patchtsmixer import PatchMixerBlock
from transformers.models.wav2vec2.modeling_wav2vec2 import TDNNLayer

from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading import configs, read, structure
from burst_attention.testing import WorkerError, local_world
from tests.support.hf_models import make_model

WIDTH = 32


def remote(kind):
    """Give a class the module name of code that transformers loads from a model's folder."""
    kind.__module__ = "transformers_modules.of_somebody"
    return kind


# Code that comes with a model's weights. ``forward`` mixes tokens, in the way that a case of MIXING states.
SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn

def shifted(x):
    return torch.cat((x[:, :1], x[:, :-1]), dim=1)

class Shift(nn.Module):
    def forward(self, x):
        return x + x.roll(1, 1)

class {name}(Shift):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({width}, {width})

    def move(self, x):
        return x.roll(1, 1)

    def forward(self, x):
        {forward}
"""
# What forward does, and the operation that the refusal names.
MIXING = {
    "x + x.roll(1, 1)": "roll",
    "super().forward(x)": "roll",
    "x + self.move(x)": "roll",
    "x + shifted(x)": "cat",
    "x.cumsum(1)": "cumsum",
    "torch.cumsum(x, dim=1)": "cumsum",
    "sum_up(x, 1) if (sum_up := torch.cumsum) else x": "cumsum",
    "x + torch.flip(x, (1,))": "flip",
    "F.pad(x, (0, 0, 1, -1))": "pad",
    "x - x[:, :1]": "index",
    "x + x[:, -1, None]": "index",
    "x - x.mean(1, keepdim=True)": "mean",
    "x - x.mean()": "mean",
    "x / x.abs().max()": "max",
    "x / x.norm()": "norm",
    "x / x.var(dim=(0, 1))": "var",
    "x * F.softmax(x, dim=1)": "softmax",
    "x * x.softmax(-2)": "softmax",
    "x.sort(1).values": "sort",
    "torch.fft.fft(x, dim=1).real": "fft_fft",
    "(x @ x.mT) @ x": "matmul",
    "torch.bmm(torch.bmm(x, x.mT), x)": "bmm",
    "F.linear(F.linear(x, x[0]), x[0].t())": "linear",
    "torch.einsum('bsd,btd,bte->bse', x, x, x)": "einsum",
    "self.linear(x.transpose(1, 2)).transpose(1, 2)": "transpose",
    "self.linear(x.permute(0, 2, 1)).mT": "mT",
    "F.conv1d(x, self.linear.weight[:, :, None])": "conv1d",
    "F.avg_pool1d(x, 3, 1, 1)": "avg_pool1d",
    "nn.ZeroPad2d((0, 0, 1, -1))(x)": "ZeroPad2d",
    "x + torch.rand_like(x)": "rand_like",
}


@pytest.mark.parametrize("forward", MIXING)
def test_a_harmless_name_does_not_hide_that_tokens_mix(forward, tmp_path):
    names = ("DecoderLayer", "Block", "MLP", "RMSNorm", "LMHead", "Experts")
    name = "Own" + names[[*MIXING].index(forward) % len(names)]
    part = remote_code(tmp_path, name, forward)
    refusal = rf"mlp\.1 \({name}\) is not known to treat each token independently: it uses {MIXING[forward]} \("
    with pytest.raises(ValueError, match=refusal):
        structure.check_structure(read(with_part(part).model))


# What forward does that no reading of its names shows; the layer is then run.
HIDDEN = [
    "x * self.linear(x)[..., :1].squeeze(-1).softmax(-1)[..., None]",  # pools over tokens along a last dimension
    "x * (F.one_hot(x[..., :4].argmax(-1), x.shape[-1]).cumsum(1) <= 4)",  # a capacity
    "F.layer_norm(x, x.shape[1:])",
    "x / x.shape[1]",
    "x + self.linear.weight[: x.shape[1], : x.shape[2]]",  # positions counted from the shard's start
    "getattr(x, 'cumsum')(1)",
    "torch.einsum('bsd,btd,de->bse', x, x, self.linear.weight)",
]


@pytest.mark.parametrize("forward", HIDDEN)
def test_remote_code_is_run_too(forward, tmp_path):
    part = remote_code(tmp_path, "OwnMLP", forward)
    with pytest.raises(ValueError, match=r"mlp\.1 \(OwnMLP\) was run on random tokens: results of a token depend on"):
        structure.check_structure(read(with_part(part).model))


@pytest.mark.parametrize(
    ("first", "operation"),
    [("import torch.nn.functional as G", "a name that it imports"), ("fn = torch.nn.functional", "a name of its own")],
)
def test_names_that_remote_code_gives_itself_are_not_followed(first, operation, tmp_path):
    part = remote_code(tmp_path, "OwnMLP", "x", first=first)
    with pytest.raises(ValueError, match=rf"\(OwnMLP\) is not known .*: it uses {operation}"):
        structure.check_structure(read(with_part(part).model))


def remote_code(folder, name, forward, *, first="pass"):
    """Return a module of a class that was loaded from a model's folder."""
    path = folder / "modeling_own.py"
    path.write_text(SOURCE.format(name=name, width=WIDTH, forward=f"{first}; return {forward}"), "utf-8")
    spec = importlib.util.spec_from_file_location("transformers_modules.of_somebody", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


def with_part(part):
    model = make_model("llama")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, part.double())
    return model


def test_code_that_cannot_be_read_is_refused():
    space = {"nn": nn, "__name__": "transformers_modules.of_somebody"}
    exec("class OwnMLP(nn.Module):\n    def forward(self, x):\n        return x", space)
    with pytest.raises(ValueError, match=r"\(OwnMLP\) is not known .*: it uses code that cannot be read"):
        structure.check_structure(read(with_part(space["OwnMLP"]()).model))


OF_TRANSFORMERS = {
    "FNetBasicFourierTransform": lambda: FNetFourierTransform(FNetConfig(hidden_size=WIDTH)),
    "TDNNLayer": lambda: TDNNLayer(Wav2Vec2Config()),
    "PatchMixerBlock": lambda: PatchMixerBlock(PatchTSMixerConfig(gated_attn=False)),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_classes_of_transformers_that_mix_tokens_are_refused_beside_an_attention(name):
    part = OF_TRANSFORMERS[name]()
    with pytest.raises(ValueError, match=rf"\({name}\) is not known to treat each token independently: it uses"):
        structure.check_structure(read(with_part(part).model))


def test_mobilebert_joins_the_embeddings_of_neighbouring_tokens():
    with torch.device("meta"):
        model = MobileBertModel(MobileBertConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"embeddings \(MobileBertEmbeddings\) is not known to treat each token"):
        structure.check_structure(read(model))


@remote
class RemoteNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@remote
class RemoteMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)
        self.act = F.silu

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


@remote
class RemoteMixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(RemoteMLP() for _ in range(4))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(2, dim=-1)
        mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for expert, layer in enumerate(self.experts):
            place, token = torch.where(mask[expert])
            out.index_add_(0, token, layer(flat[token]) * weights[token, place, None])
        return out.view(x.shape)


@pytest.mark.parametrize("kind", [RemoteNorm, RemoteMLP, RemoteMixture])
def test_remote_code_that_treats_each_token_independently_is_taken(kind):
    structure.check_structure(read(with_part(kind()).model))


class Scaled(nn.Linear):
    """A linear layer that rounds its input to 8 bits, as the packages for quantization do."""

    def forward(self, x):
        scale = x.detach().abs().amax(self.over, keepdim=True).clamp_min(1e-12) / 127
        return F.linear((x / scale).round() * scale, self.weight)


Scaled.__module__ = "torchao.of_a_test"


def quantized(over):
    layer = Scaled(48, WIDTH, bias=False).double()  # a down projection
    layer.over = over
    return layer


class Slopes(torch.autograd.Function):
    """A product whose backward rounds gradients by their largest value."""

    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        scale = slope.abs().max().clamp_min(1e-12) / 127
        slope = (slope / scale).round() * scale
        return slope @ weight, slope.flatten(0, 1).T @ x.flatten(0, 1)


class BackwardScaled(nn.Linear):
    def forward(self, x):
        return Slopes.apply(x, self.weight)


BackwardScaled.__module__ = "torchao.of_a_test"
DEPENDS = r"layers\.1\.mlp\.down_proj \(\w+\) .* results of a token depend on other tokens"


def with_linear(layer):
    model = make_model("llama")
    model.model.layers[1].mlp.down_proj = layer
    return model


@pytest.mark.parametrize("layer", ["input", "channels", "slopes"])
def test_layers_that_scale_by_a_statistic_of_all_tokens_are_refused(layer):
    over = {"input": (0, 1, 2), "channels": 1}.get(layer)
    layer = quantized(over) if over else BackwardScaled(48, WIDTH, bias=False).double()
    with local_world(2, timeout=20) as ranks, pytest.raises(WorkerError) as caught:
        ranks.run(lambda group: hf.parallelize(with_linear(layer), group))
    assert caught.match(DEPENDS), caught.value


def test_layers_that_scale_each_token_are_taken_and_left_as_they_are():
    layer = quantized(-1)
    before, state = layer.weight.clone(), torch.get_rng_state()
    layer.register_forward_hook(hf.token_wise(lambda *_: pytest.fail("hooks do not run")))
    structure.check_structure(read(with_linear(layer).model))
    assert torch.equal(layer.weight, before) and layer.weight.grad is None
    torch.manual_seed(3)
    model = with_linear(layer).model
    state = torch.get_rng_state()
    structure.check_structure(read(model))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_on_the_meta_device_are_replaced_for_the_measurement():
    structure.check_structure(read(with_linear(quantized(-1).to("meta")).model))
    with pytest.raises(ValueError, match="depend on other tokens"):
        structure.check_structure(read(with_linear(quantized(1).to("meta")).model))


def test_a_layer_that_fails_is_refused():
    layer = quantized(-1)
    del layer.over
    with pytest.raises(ValueError, match=r"down_proj \(Scaled\) fails on random tokens \(AttributeError: .* first"):
        structure.check_structure(read(with_linear(layer).model))


def test_a_declared_class_is_measured_where_it_takes_the_models_width():
    @hf.token_wise
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return x - x.mean(1, keepdim=True)

    @hf.token_wise
    class Joined(nn.Module):
        def forward(self, x, other):
            return x + other.mean()

    part = Centred()
    with pytest.raises(ValueError, match=r"mlp\.1 \(Centred\) was run on random tokens: .* depend on other tokens"):
        structure.check_structure(read(with_part(part).model))
    assert part.seen == 0, "a measurement leaves buffers as they are"
    structure.check_structure(read(with_part(Joined()).model))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize(("recipe", "taken"), [("tensorwise", False), ("rowwise", True), ("rowwise_with_gw_hp", True)])
def test_torchaos_float8_training(recipe, taken):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = make_model("llama", dtype=torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.model.layers, config=config)
    if taken:
        structure.check_structure(read(model.model))
    else:
        with pytest.raises(ValueError, match=r"q_proj \(Float8Linear\) .* depend on other tokens"):
            structure.check_structure(read(model.model))


def test_a_window_below_one_is_refused_only_where_layers_use_it():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 8, "intermediate_size": 48, "num_local_experts": 2, "vocab_size": 64, "sliding_window": 0}
    config = GptOssConfig(**small, layer_types=["full_attention"] * 2)
    configs.check_layers(config)
    hf.check_config(config)
    config.layer_types = ["full_attention", "sliding_attention"]
    for check in (configs.check_layers, hf.check_config):
        with pytest.raises(ValueError, match="sliding_window=0 of the configuration is below 1"):
            check(config)
    config.layer_types, config._attn_implementation = ["full_attention"] * 2, "burst"
    with local_world(2, timeout=20) as ranks:
        ranks.run(lambda group: hf.parallelize(GptOssForCausalLM(config), group) and None)
