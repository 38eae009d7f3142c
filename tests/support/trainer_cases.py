"""The cases in which a trainer over ranks is compared with the stock trainer in one process."""

import contextlib
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers

from tests.support import trainer_makers
from tests.support.hf_models import make_model
from tests.support.trainer_makers import HALF

PLAIN = {"loss": 1e-6, "grad_norm": 5e-6}
LONGER = {"loss": 2e-6, "grad_norm": 1e-5}
PREFERENCE = {"loss": 1e-5, "grad_norm": 1e-4}
ROUNDED = {"loss": 2e-3, "grad_norm": 2e-3, "metrics": float("inf")}  # a sign may turn


@dataclass(frozen=True)
class Case:
    """One comparison: ``kind`` names the function below that makes the trainer, ``options`` are its arguments."""

    name: str
    kind: str
    ranks: int = 2
    context: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=lambda: PLAIN)
    stock_ranks: int = 1  # more where what is drawn depends on it

    @property
    def fully_sharded(self) -> bool:
        return self.kind == "fsdp2" or bool(self.options.get("fsdp"))

    def holds(self, found: dict[str, float]) -> bool:
        """Whether each difference is within its bound; metrics are held to that of the gradient norm."""
        limits = {"eval_loss": self.bounds["loss"], "metrics": self.bounds["grad_norm"], **self.bounds}
        return all(found[name] <= limit for name, limit in limits.items())


_EPOCH = {"max_steps": -1, "num_train_epochs": 1}
_BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": HALF, "save_total_limit": 1}
_UNLIKE = {"unlike": True, "scale_rewards": "batch"}  # ranks of a context generate and reward differently
_SAVING = {"recompute": "layer", "attention_chunks": 2, "mlp_chunks": 3}
_FIXED = {"strategy": "burst-attention"}  # links that seem 4 times slower would choose another, with other bits
_HALVES = {"stopped_at": HALF, "save_strategy": "steps", "save_steps": HALF}
# On a CPU accelerate can't save whole states of FSDP2: it does not wait for the weights that it gathers.
_SHARDS = {
    "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": "SHARDED_STATE_DICT"}
}
_MESH = {"tp_size": 2, "cp_size": 2}
_PACKED = {"packing": True, "max_length": 64}
_DTYPES = {"gpt_oss": {"dtype": torch.float64}}  # in fp32 a rounding sends a token to another expert at step 6
FAMILIES = ("gemma2", "gpt_oss", "qwen3_5_text")
IN_CI = (
    "iterable",
    "memory, fsdp2",
    "sft packed, tp 2 x cp 2",
    "sft packed",
    "grpo, data 2 x context 2",
    "lightning",
)
_ALL = (
    Case("plain", "plain"),
    Case("right-padded", "padded"),
    Case("packed", "packed", 3, 3),
    Case("checkpointing", "padded", options={"gradient_checkpointing": True}),
    Case(
        "checkpointing, reentrant",
        "padded",
        options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    Case("memory", "padded", 4, 2, {"memory": _SAVING}),
    Case("memory, fsdp2", "fsdp2", 4, 2, {"memory": _SAVING, "parallelism": {"dp_shard_size": 2, "cp_size": 2}}),
    Case("iterable", "iterable", 4, 2),
    Case("iterable, one context", "iterable"),
    Case("data 2 x context 2", "padded", 4, 2, {"include_num_input_tokens_seen": "non_padding"}),
    Case("tokens averaged by rank", "padded", options={"average_tokens_across_devices": False}),
    Case("grouped by length", "padded", options={"train_sampling_strategy": "group_by_length"}),
    Case("workers", "padded", options={"dataloader_num_workers": 1, "eval_on_start": True}),
    Case("an epoch, its last batch of one", "padded", options=_EPOCH | {"samples": 77}),
    Case("an epoch, its last batch dropped", "padded", 4, 2, _EPOCH | {"samples": 78, "dataloader_drop_last": True}),
    Case("best model at end", "padded", options=_BEST),
    Case("mixture", "padded", options={"mixture": True}),
    Case("own loss, data 2 x context 2", "padded", 4, 2, {"own_loss": True}),
    Case("sft padded", "sft"),
    Case("sft mixture", "sft", options={"mixture": True}),
    Case("sft wrapped before", "sft", options={"lora": "wrapped"}),
    Case("sft packed", "sft", 4, 4, {"packing": True, "max_length": 64}),
    Case("sft, data 2 x context 2", "sft", 4, 2),
    Case("sft LoRA", "sft", options={"lora": True}),
    Case("dpo", "dpo", bounds=PREFERENCE),
    Case("dpo LoRA", "dpo", options={"lora": True}, bounds=PREFERENCE),
    Case("resumed", "padded", 4, 2, _HALVES | _FIXED),
    Case("fsdp2", "fsdp2", options={"parallelism": {"cp_size": 2}}),
    Case("fsdp2, tp 2 x cp 2", "fsdp2", 4, 4, {"parallelism": _MESH}),
    Case("fsdp2, tp 2 x dp 2", "fsdp2", 4, 2, {"parallelism": {"tp_size": 2, "dp_shard_size": 2}}),
    Case("fsdp2, tp 2 x cp 2, in bf16", "fsdp2", 4, 4, {"parallelism": _MESH, "bf16": True}, ROUNDED),
    Case("fsdp2, tp 2 x cp 2, resumed", "padded", 4, 4, {"parallelism": _MESH, "fsdp": True} | _HALVES | _SHARDS),
    Case("sft packed, tp 2 x cp 2", "sft", 4, 4, {"parallelism": _MESH, "fsdp": True} | _PACKED, LONGER),
    Case("mixture, tp 2 x cp 2", "fsdp2", 4, 4, {"parallelism": _MESH, "mixture": True}, LONGER),
    Case("checkpointing, tp 2 x cp 2", "fsdp2", 4, 4, {"parallelism": _MESH, "gradient_checkpointing": True}),
    Case("memory, tp 2 x cp 2", "fsdp2", 4, 4, {"parallelism": _MESH, "memory": _SAVING}),
    Case("fsdp2, launched", "fsdp2", options={"launched": True}),
    Case("fsdp2 in bf16", "fsdp2", options={"bf16": True, "parallelism": {"cp_size": 2}}, bounds=ROUNDED),
    Case("fsdp2 sft in bf16", "sft", options={"bf16": True, "fsdp": True}, bounds=ROUNDED),
    Case("bf16", "padded", options={"bf16": True}, bounds=ROUNDED),
    Case("dpo in bf16", "dpo", options={"bf16": True}, bounds=ROUNDED),
    Case("lightning", "lightning", bounds=PREFERENCE),
    Case("dpo, reference ahead", "dpo", options={"precompute_ref_log_probs": True}, bounds=PREFERENCE),
    Case("kto", "kto", bounds=PREFERENCE),
    Case("reward", "reward", bounds=PREFERENCE),
    Case("grpo", "grpo", options={"log_completions": True}, bounds=PREFERENCE),
    Case("grpo, data 2 x context 2", "grpo", 4, 2, _UNLIKE, PREFERENCE, stock_ranks=2),
    *(Case(f"padded {name}", "padded", options={"family": name}, bounds=LONGER) for name in FAMILIES),
    *(
        Case(
            f"sft packed {name}",
            "sft",
            options=_PACKED | {"family": name} | _DTYPES.get(name, {}),
            bounds=LONGER,
        )
        for name in FAMILIES
    ),
)
CASES = {case.name: case for case in _ALL}


class Sides:
    """Where cases run: the stock trainers in a separate process, ours in pools of ranks."""

    def __init__(self, pools: Callable[[int], Any]) -> None:
        self.pools = pools
        self.alone = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"))

    def compare(self, case: Case) -> dict[str, float]:
        """Return the largest differences over all steps and ranks."""
        with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
            save_model(f"{folder}/model")
            if case.stock_ranks > 1:
                (stock, *_) = self.pools(case.stock_ranks).run(run_case, case.name, f"{folder}/stock", False)
            else:
                stock = self.alone.submit(run_case, case.name, f"{folder}/stock", False).result()
            ours = self.pools(case.ranks).run(run_case, case.name, f"{folder}/ours", True, timeout=300)
        return difference(case, stock, ours)


def save_model(folder: str) -> None:
    """The model of every case, for trainers that load it."""
    make_model("llama", "sdpa", dtype=torch.float32).save_pretrained(folder)


def run_case(name: str, folder: str, ours: bool) -> list[dict[str, float]]:
    """What the trainer of a case logs."""
    case = CASES[name]
    with as_started(case, ours):
        trainer = getattr(trainer_makers, f"make_{case.kind}")(case, ours, folder)
        if not hasattr(trainer, "state"):
            return trainer.history()
        stopped_at = case.options.get("stopped_at") if ours else None
        if stopped_at:
            trainer.train()
            assert trainer.state.global_step == stopped_at
            trainer = getattr(trainer_makers, f"make_{case.kind}")(case, ours, folder, stop=False)
        trainer.train(resume_from_checkpoint=bool(stopped_at))
    return [*trainer.state.log_history, {"batch": trainer.get_total_train_batch_size(trainer.args)}]


@contextlib.contextmanager
def as_started(case: Case, ours: bool) -> Iterator[None]:
    """As if torchrun had just started this process, or nothing had."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    around = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if dist.is_initialized():
        around |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    if ours and case.options.get("launched"):  # as ``accelerate launch --use_parallelism_config`` says it
        around |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": str(case.context)}
    with contextlib.ExitStack() as stack:
        if case.fully_sharded:
            stack.enter_context(fully_sharded_on_cpu())
        stack.enter_context(mock.patch.dict(os.environ, around))
        # A pool's ranks are daemons, which may have no data loader's workers.
        stack.enter_context(mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        yield


# The last logged of each run, which tells of all steps, and what tells of time.
_UNTOLD = ("time", "runtime", "per_second", "train_loss", "epoch", "learning_rate", "step")


def difference(case: Case, stock: list[dict], ours: list[list[dict]]) -> dict[str, float]:
    """The largest differences between what the stock trainer logged and what each rank's did."""
    found = {"loss": 0.0, "grad_norm": 0.0, "eval_loss": 0.0, "metrics": 0.0}
    assert sum("loss" in row for row in stock) == trainer_makers.STEPS
    for log in ours:
        assert [set(row) for row in log] == [set(row) for row in stock], (log, stock)
        for theirs, mine in zip(stock, log, strict=True):
            for key in theirs:
                if key.endswith(_UNTOLD) and key not in found:
                    continue
                if key == "total_flos" and case.ranks > case.context:  # contexts pad to their own longest
                    continue
                kind = key if key in found else "metrics"
                off = abs(float(theirs[key]) - float(mine[key]))
                off /= max(1.0, abs(float(theirs[key]))) if kind == "metrics" else 1.0
                found[kind] = max(found[kind], off if off == off else float("inf"))
    return found


@contextlib.contextmanager
def fully_sharded_on_cpu() -> Iterator[None]:
    """Stands in for accelerate's check of the device: with it FSDP is set up on CPU as accelerate does it on a GPU."""
    from accelerate.state import AcceleratorState, DistributedType

    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    with mock.patch.object(AcceleratorState, "__init__", make):
        yield
