"""What ``tests/trainers.py`` trains: tiny models, tokenizers and data made offline, and a trainer for each case."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from transformers import TrainerCallback

from tests.hf_models import VOCABULARY, make_model

STEPS, ACCUMULATED, BATCH = 10, 2, 4
PLAIN = {"loss": 1e-6, "grad_norm": 5e-6}
PREFERENCE = {"loss": 1e-5, "grad_norm": 1e-4}
ROUNDED = {"loss": 2e-3, "grad_norm": 2e-3, "metrics": float("inf")}  # a sign may turn
COMMON = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ACCUMULATED,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "max_grad_norm": 0.2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "eval_strategy": "steps",
    "eval_steps": 5,
    "bf16": False,
}


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


_ALL = (
    Case("plain", "plain"),
    Case("plain, 3 ranks", "plain", 3, 3),
    Case("right-padded", "padded"),
    Case("packed", "packed", 3, 3),
    Case("checkpointing", "padded", options={"gradient_checkpointing": True}),
    Case(
        "checkpointing, reentrant",
        "padded",
        options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    Case("iterable", "iterable"),
    Case("data 2 x context 2", "padded", 4, 2),
    Case("sft padded", "sft"),
    Case("sft packed", "sft", 3, 3, {"packing": True, "max_length": 64}),
    Case("sft, data 2 x context 2", "sft", 4, 2),
    Case("sft LoRA", "sft", options={"lora": True}),
    Case("dpo", "dpo", bounds=PREFERENCE),
    Case("dpo LoRA", "dpo", options={"lora": True}, bounds=PREFERENCE),
    Case("resumed", "padded", options={"stopped_at": 5, "save_strategy": "steps", "save_steps": 5}),
    Case("fsdp2", "fsdp2", options={"parallelism": {"cp_size": 2}}),
    Case("fsdp2, shard 2 x context 2", "fsdp2", 4, 2, {"parallelism": {"dp_shard_size": 2, "cp_size": 2}}),
    Case("fsdp2 in bf16", "fsdp2", options={"bf16": True, "parallelism": {"cp_size": 2}}, bounds=ROUNDED),
    Case("fsdp2 sft in bf16", "sft", options={"bf16": True, "fsdp": True}, bounds=ROUNDED),
    Case("bf16", "padded", options={"bf16": True}, bounds=ROUNDED),
    Case("dpo in bf16", "dpo", options={"bf16": True}, bounds=ROUNDED),
    Case("lightning", "lightning", bounds=PREFERENCE),
    Case("dpo, reference ahead", "dpo", options={"precompute_ref_log_probs": True}, bounds=PREFERENCE),
    Case("kto", "kto", bounds=PREFERENCE),
    Case("grpo", "grpo", options={"log_completions": True}, bounds=PREFERENCE),
    Case("grpo, ranks that differ", "grpo", options={"unlike": True}, bounds=PREFERENCE),
    Case("grpo, data 2 x context 2", "grpo", 4, 2, {"scale_rewards": "batch"}, PREFERENCE, stock_ranks=2),
)
CASES = {case.name: case for case in _ALL}


def save_model(folder: str) -> None:
    """The model of every case, for trainers that load it."""
    make_model("llama", "sdpa", dtype=torch.float32).save_pretrained(folder)


def run_case(name: str, folder: str, ours: bool) -> list[dict[str, float]]:
    """What the trainer of a case logs."""
    case = CASES[name]
    with _as_started(case, ours):
        trainer = globals()[f"make_{case.kind}"](case, ours, folder)
        if not hasattr(trainer, "state"):
            return trainer.history()
        stopped_at = case.options.get("stopped_at") if ours else None
        if stopped_at:
            trainer.train()
            assert trainer.state.global_step == stopped_at
            trainer = globals()[f"make_{case.kind}"](case, ours, folder, stop=False)
        trainer.train(resume_from_checkpoint=bool(stopped_at))
    return [*trainer.state.log_history, {"batch": trainer.get_total_train_batch_size(trainer.args)}]


@contextlib.contextmanager
def _as_started(case: Case, ours: bool) -> Iterator[None]:
    """As if torchrun had just started this process, or nothing had."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    around = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if dist.is_initialized():
        around |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    with contextlib.ExitStack() as stack:
        if case.fully_sharded:
            stack.enter_context(fully_sharded_on_cpu())
        stack.enter_context(mock.patch.dict(os.environ, around))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        yield


# The last logged of each run, which tells of all steps, and what tells of time.
_UNTOLD = ("time", "runtime", "per_second", "train_loss", "epoch", "learning_rate", "step")


def difference(stock: list[dict], ours: list[list[dict]]) -> dict[str, float]:
    """The largest differences between what the stock trainer logged and what each rank's did."""
    found = {"loss": 0.0, "grad_norm": 0.0, "eval_loss": 0.0, "metrics": 0.0}
    assert sum("loss" in row for row in stock) == STEPS
    for log in ours:
        assert [set(row) for row in log] == [set(row) for row in stock], (log, stock)
        for theirs, mine in zip(stock, log, strict=True):
            for key in theirs:
                if key.endswith(_UNTOLD) and key not in found:
                    continue
                kind = key if key in found else "metrics"
                off = abs(float(theirs[key]) - float(mine[key]))
                off /= max(1.0, abs(float(theirs[key]))) if kind == "metrics" else 1.0
                found[kind] = max(found[kind], off if off == off else float("inf"))
    return found


_OWN = ("lora", "parallelism", "stopped_at", "unlike")  # options that are no arguments


def _train(case: Case, ours: bool, kind: type, arguments: type, folder: str, **given: Any) -> Any:
    """A trainer of this kind, over contexts if it is ours, with as many samples in a step either way."""
    from accelerate import ParallelismConfig

    contexts = case.ranks // case.context if ours else case.stock_ranks
    model, more = given.pop("model", None), {"context_size": case.context} if ours else {}
    own = {name: value for name, value in case.options.items() if name not in _OWN}
    settings = COMMON | {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH // contexts,
        "per_device_eval_batch_size": BATCH // contexts,
    }
    if case.fully_sharded:
        if not ours:
            own.pop("fsdp", None)
        else:
            settings["fsdp"], settings["fsdp_config"] = True, {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
            if "parallelism" in case.options:
                more = {}
                settings["parallelism_config"] = ParallelismConfig(**case.options["parallelism"])
    args = arguments(**(settings | given.pop("settings", {}) | own))
    if case.options.get("lora"):
        given["peft_config"] = _lora()
    if ours:
        kind = _over_contexts(kind)
    if model is None:
        model = make_model("llama", "sdpa", dtype=torch.float32)
    if hasattr(args, "beta") and not case.options.get("lora"):
        # Given by its path: the reference is loaded from there again.
        args.model_init_kwargs = {"attn_implementation": "sdpa", "dtype": "float32"}
        model = f"{os.path.dirname(folder)}/model"
    return kind(model=model, args=args, **given, **more)


def _over_contexts(kind: type) -> type:
    from burst_attention.integrations.trainer import BurstMixin

    return type(kind.__name__, (BurstMixin, kind), {})


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=True)


def _lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()


def _ids(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def _samples(count: int, seed: int, *, equal: bool = False) -> list[dict[str, list[int]]]:
    """Token ids and labels, of the first tokens none."""
    lengths = [24] * count if equal else _lengths(count, 9, 27, seed)
    return [{"input_ids": ids, "labels": ids if equal else [-100] * 3 + ids[3:]} for ids in _ids(lengths, seed)]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        key: torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])
        for key, value in fill.items()
    }


def pack(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows laid end to end in one, each a document: positions restart, first tokens have no label."""
    ids = [i for row in rows for i in row["input_ids"]]
    labels = [i for row in rows for i in (-100, *row["labels"][1:])]
    places = [i for row in rows for i in range(len(row["input_ids"]))]
    made = {"input_ids": ids, "labels": labels, "position_ids": places}
    return {key: torch.tensor([value]) for key, value in made.items()}


class Stream(torch.utils.data.IterableDataset):
    """Samples one after the other, of which nobody knows how many there are."""

    def __init__(self, samples: list[dict[str, list[int]]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from self.samples


def make_plain(case: Case, ours: bool, folder: str, *, equal: bool = True, **given: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    data = {"train_dataset": _samples(80, 1, equal=equal), "eval_dataset": _samples(23, 2, equal=equal)}
    return _train(case, ours, Trainer, TrainingArguments, folder, **(data | given))


class Stop(TrainerCallback):
    """Ends a run at a step, as a job that is ended does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def make_padded(case: Case, ours: bool, folder: str, *, stop: bool = True, **given: Any) -> Any:
    step = case.options.get("stopped_at")
    given |= {"callbacks": [Stop(step)] if step and ours and stop else None}
    return make_plain(case, ours, folder, equal=False, data_collator=collate, **given)


def make_fsdp2(case: Case, ours: bool, folder: str) -> Any:
    return make_padded(case, ours, folder)


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


def make_packed(case: Case, ours: bool, folder: str) -> Any:
    return make_plain(case, ours, folder, equal=False, data_collator=pack)


def make_iterable(case: Case, ours: bool, folder: str) -> Any:
    return make_padded(case, ours, folder, train_dataset=Stream(_samples(80, 1)))


def tokenizer() -> Any:
    """A word for each id of the vocabulary; of the first three, padding, the end and what is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def make_sft(case: Case, ours: bool, folder: str) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    train, evaluated = (
        Dataset.from_dict({"text": [_text(ids) for ids in _ids(_lengths(n, 9, 27, seed), seed)]})
        for n, seed in ((200, 1), (23, 2))
    )
    return _train(
        case,
        ours,
        SFTTrainer,
        SFTConfig,
        folder,
        train_dataset=train,
        eval_dataset=evaluated,
        processing_class=tokenizer(),
    )


def _preferences(count: int, seed: int) -> dict[str, list[str]]:
    parts = [[_text(ids) for ids in _ids(_lengths(count, 5, 15, seed + i), seed + i)] for i in range(3)]
    return dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))


def _on_disk(data: Any, folder: str, ours: bool) -> Any:
    from datasets import load_from_disk

    if not ours or dist.get_rank() == 0:
        data.save_to_disk(folder)
    if ours:
        dist.barrier()
    return load_from_disk(folder)


def make_dpo(case: Case, ours: bool, folder: str) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    train, evaluated = (Dataset.from_dict(_preferences(n, seed)) for n, seed in ((80, 1), (23, 7)))
    if case.options.get("precompute_ref_log_probs"):  # one rank leaves what it made to the others in files
        train, evaluated = (_on_disk(data, f"{folder}-{data.num_rows}", ours) for data in (train, evaluated))
    data = {"train_dataset": train, "eval_dataset": evaluated, "processing_class": tokenizer()}
    return _train(case, ours, DPOTrainer, DPOConfig, folder, settings={"max_grad_norm": 0.5}, **data)


def make_kto(case: Case, ours: bool, folder: str) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    def unpaired(count: int, seed: int) -> Dataset:
        made = _preferences(count, seed)
        return Dataset.from_dict(
            {"prompt": made["prompt"], "completion": made["chosen"], "label": [i % 3 > 0 for i in range(count)]}
        )

    data = {"train_dataset": unpaired(80, 1), "eval_dataset": unpaired(23, 7), "processing_class": tokenizer()}
    return _train(case, ours, KTOTrainer, KTOConfig, folder, **data)


def reward(completions: list[str], **_: Any) -> list[float]:
    """For even words, and short."""
    words = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(1.0 - i % 2 for i in each) - 0.1 * len(each) for each in words]


def _generate_reversed(self: Any, prompts: list) -> Any:
    """Completions that differ from those of other ranks, as those of a GPU's kernels may."""
    from trl import GRPOTrainer

    prompt_ids, completion_ids, *more = GRPOTrainer._generate(self, prompts)
    return prompt_ids, [ids[::-1] for ids in completion_ids], *more


def make_grpo(case: Case, ours: bool, folder: str) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    train, evaluated = (Dataset.from_dict({"prompt": _preferences(n, seed)["prompt"]}) for n, seed in ((80, 1), (6, 7)))
    loaded = {"attn_implementation": "sdpa", "dtype": "float32"}
    settings = {
        "model_init_kwargs": loaded,
        "num_generations": 2,
        "max_completion_length": 9,
        "beta": 0.1,
        "temperature": 0.9,
    }
    data = {"train_dataset": train, "eval_dataset": evaluated, "processing_class": tokenizer(), "reward_funcs": reward}
    if case.options.get("unlike") and ours and dist.get_rank() % case.context:
        data["reward_funcs"] = lambda **given: [value + 1 for value in reward(**given)][::-1]
        data["reward_funcs"].__name__ = reward.__name__
        GRPOTrainer = type(GRPOTrainer.__name__, (GRPOTrainer,), {"_generate": _generate_reversed})
    return _train(case, ours, GRPOTrainer, GRPOConfig, folder, settings=settings, **data)


class Fitted:
    """A run of Lightning's trainer, as the others tell of theirs."""

    def __init__(self, ours: bool, ranks: int, folder: str) -> None:
        self.ours, self.ranks, self.folder = ours, ranks, folder

    def history(self) -> list[dict[str, float]]:
        import lightning

        module = _lightning_module(self.ours)
        train, evaluated = (
            torch.utils.data.DataLoader(_samples(count, seed), batch_size=BATCH, collate_fn=collate)
            for count, seed in ((80, 1), (23, 2))
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=self.ranks if self.ours else 1,
            strategy="ddp" if self.ours else "auto",
            use_distributed_sampler=False,
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=0.2,
            val_check_interval=10,
            default_root_dir=self.folder,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        trainer.fit(module, train, evaluated)
        return module.told


def _lightning_module(ours: bool) -> Any:
    import lightning

    from burst_attention.integrations import hf

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.told, self.losses = make_model("llama", "sdpa", dtype=torch.float32), [], []

        def configure_model(self) -> None:
            if ours:
                hf.parallelize(self.model)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            self.log("eval_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.told.append({"eval_loss": self.trainer.callback_metrics["eval_loss"].item()})

        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **_: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
            self.told.append({"loss": sum(self.losses) / len(self.losses), "grad_norm": norm.item()})
            self.losses.clear()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=COMMON["learning_rate"])

    return Module()


def make_lightning(case: Case, ours: bool, folder: str) -> Fitted:
    return Fitted(ours, case.ranks, folder)
