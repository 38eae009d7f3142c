"""The trainers of ``trainer_cases``, with tiny tokenizers and data made offline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import MoeModelOutputWithPast

from tests.support.hf_models import SMALL, VOCABULARY, make_model
from tests.tools.families import model_class, tiny_config

if TYPE_CHECKING:
    from tests.support.trainer_cases import Case

STEPS, HALF, ACCUMULATED, BATCH = 6, 3, 2, 4
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
    "eval_steps": HALF,
    "bf16": False,
}
_OWN = (
    "lora",
    "parallelism",
    "stopped_at",
    "unlike",
    "samples",
    "mixture",
    "fsdp",
    "launched",
    "own_loss",
    "memory",
    "strategy",
    "family",
    "dtype",
    "long_tail",
)  # options that are no arguments


def arguments_of(case: Case, ours: bool, folder: str, kind: type = TrainingArguments, **settings: Any) -> Any:
    """As many samples in a step however many ranks there are."""
    from accelerate import ParallelismConfig

    contexts = case.ranks // case.context if ours else 1
    if not ours and case.stock_ranks > 1:
        contexts = case.stock_ranks
    own = {name: value for name, value in case.options.items() if name not in _OWN}
    sizes = {f"per_device_{what}_batch_size": BATCH // contexts for what in ("train", "eval")}
    kind_of = "Mixtral" if case.options.get("mixture") else "Llama"
    if ours and case.fully_sharded:
        sizes |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": f"{kind_of}DecoderLayer"}}
    if ours and "parallelism" in case.options:
        sizes["parallelism_config"] = ParallelismConfig(**case.options["parallelism"])
    return kind(**(COMMON | {"output_dir": folder} | sizes | settings | own))


def _train(case: Case, ours: bool, kind: type, arguments: type, folder: str, **given: Any) -> Any:
    """A trainer of this kind, over contexts if it is ours."""
    args = arguments_of(case, ours, folder, arguments, **given.pop("settings", {}))
    sizes = case.options.get("parallelism", {})
    reported = "cp_size" in sizes or "launched" in case.options
    more = {"context_size": case.context // sizes.get("tp_size", 1)} if ours and not reported else {}
    if ours and "strategy" in case.options:
        more["strategy"] = case.options["strategy"]
    if ours and "memory" in case.options:
        from burst_attention.integrations import hf

        more["memory"] = hf.Memory(offload=f"disk:{folder}", **case.options["memory"])
    lora = case.options.get("lora")
    if case.options.get("own_loss"):
        given["model"] = make_model("llama", "sdpa", dtype=torch.float32)
        given["model"].loss_function = smoothed
    if lora is True:
        given["peft_config"] = _lora()
    dtype = case.options.get("dtype", torch.float32)
    model = mixture() if case.options.get("mixture") else make_model("llama", "sdpa", dtype=dtype)
    if "family" in case.options:
        model = of_family(case.options["family"], by_document=not ours and "packing" in case.options, dtype=dtype)
    if lora == "wrapped":
        torch.manual_seed(0)
        model = get_peft_model(model, _lora())
    if hasattr(args, "beta") and not lora:
        # Given by its path: the reference is loaded from there again.
        args.model_init_kwargs = {"attn_implementation": "sdpa", "dtype": "float32"}
        model = f"{os.path.dirname(folder)}/model"
    given.setdefault("model", model)
    return (over_contexts(kind) if ours else kind)(args=args, **given, **more)


def smoothed(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    """A loss that is not transformers': the next token's, its labels smoothed."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    logits = logits.view(-1, vocab_size)
    loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum")
    return loss / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def mixture() -> Any:
    """A mixture of experts with a router loss."""
    torch.manual_seed(0)
    own = {"num_local_experts": 4, "sliding_window": None, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(**SMALL, **own, attn_implementation="sdpa", experts_implementation="eager", pad_token_id=0)
    return MixtralForCausalLM(config)


def of_family(name: str, *, by_document: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model of a family; ``by_document``: one that runs each packed document separately."""
    config = tiny_config(name)
    config.vocab_size, config._attn_implementation, config._experts_implementation = VOCABULARY, "eager", "eager"
    config.router_aux_loss_coef = 0.0  # TRL would add the loss, which the reference for packed documents does not have
    torch.manual_seed(0)
    model = model_class(name)(config).to(dtype)
    if by_document:
        kind = type(model.model)
        model.model.__class__ = type(kind.__name__, (ByDocument, kind), {})
    return model


class ByDocument:
    """A body that runs each packed document separately: transformers' own may carry states from one to the next."""

    def forward(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        borders = [*(position_ids[0] == 0).nonzero().flatten().tolist(), input_ids.shape[1]]
        each = (
            super(ByDocument, self).forward(input_ids=input_ids[:, a:b], use_cache=False)
            for a, b in itertools.pairwise(borders)
        )
        return MoeModelOutputWithPast(last_hidden_state=torch.cat([out.last_hidden_state for out in each], 1))


def over_contexts(kind: type) -> type:
    """The kind with the mixin before it."""
    from burst_attention.integrations.trainers import BurstMixin

    return type(kind.__name__, (BurstMixin, kind), {})


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=True)


def _lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()


def _tailed(count: int, seed: int) -> list[int]:
    """Lengths with a long tail: most documents are short, a few as long as the model has positions."""
    drawn = torch.empty(count).log_normal_(2.3, 1.1, generator=torch.Generator().manual_seed(seed))
    return drawn.clamp(2, SMALL["max_position_embeddings"] - 8).int().tolist()


def _ids(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def samples(count: int, seed: int, *, equal: bool = False, tailed: bool = False) -> list[dict[str, list[int]]]:
    """Token ids and labels, of the first tokens none."""
    lengths = [24] * count if equal else _tailed(count, seed) if tailed else _lengths(count, 9, 27, seed)
    first = 0 if equal else 1 if tailed else 3
    return [{"input_ids": ids, "labels": [-100] * first + ids[first:]} for ids in _ids(lengths, seed)]


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
    """An iterable dataset without a length."""

    def __init__(self, samples: list[dict[str, list[int]]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from self.samples


def make_plain(case: Case, ours: bool, folder: str, *, equal: bool = True, **given: Any) -> Any:
    from transformers import Trainer

    drawn = {"equal": equal, "tailed": bool(case.options.get("long_tail"))}
    data = {
        "train_dataset": samples(case.options.get("samples", 80), 1, **drawn),
        "eval_dataset": samples(23, 2, **drawn),
    }
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


def make_packed(case: Case, ours: bool, folder: str) -> Any:
    return make_plain(case, ours, folder, equal=False, data_collator=pack)


def make_rows(case: Case, ours: bool, folder: str) -> Any:
    """Batches of several rows, in each of which documents lie end to end."""
    given = {
        name: packed_rows(samples(count, seed, tailed=True), 120)
        for name, count, seed in (("train_dataset", 400, 1), ("eval_dataset", 60, 2))
    }
    return make_plain(case, ours, folder, **given)


def packed_rows(documents: list[dict[str, list[int]]], length: int) -> list[dict[str, list[int]]]:
    """Rows of this length, filled with documents one after another; a document that does not fit begins a row."""
    rows: list[list[dict[str, list[int]]]] = [[]]
    for each in documents:
        if sum(len(one["input_ids"]) for one in rows[-1]) + len(each["input_ids"]) > length:
            rows.append([])
        rows[-1].append(each)
    packed = [{name: x[0].tolist() for name, x in pack(row).items()} for row in rows]
    last = {"input_ids": 0, "labels": -100}  # the rest of a row is one more document without labels
    for row in packed:
        rest = length - len(row["input_ids"])
        row["position_ids"] += range(rest)
        for name, value in last.items():
            row[name] += [value] * rest
    return packed


def make_iterable(case: Case, ours: bool, folder: str) -> Any:
    return make_padded(case, ours, folder, train_dataset=Stream(samples(80, 1)), eval_dataset=Stream(samples(23, 2)))


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

    def lengths(count: int, seed: int) -> list[int]:
        return _tailed(count, seed) if case.options.get("long_tail") else _lengths(count, 9, 27, seed)

    train, evaluated = (
        Dataset.from_dict({"text": [_text(ids) for ids in _ids(lengths(n, seed), seed)]})
        for n, seed in ((case.options.get("samples", 200), 1), (23, 2))
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


def make_reward(case: Case, ours: bool, folder: str) -> Any:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_labels=1, pad_token_id=0, attn_implementation="sdpa")
    train, evaluated = (Dataset.from_dict(_preferences(n, seed)) for n, seed in ((80, 1), (24, 7)))
    data = {"train_dataset": train, "eval_dataset": evaluated, "processing_class": tokenizer()}
    model = LlamaForSequenceClassification(config)
    return _train(case, ours, RewardTrainer, RewardConfig, folder, model=model, **data)


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


def make_lightning(case: Case, ours: bool, folder: str) -> Any:
    from tests.support.trainer_lightning import Fitted

    return Fitted(ours, case.ranks, folder)


def classifier(problem: str) -> Any:
    """A head of four scores; ``problem`` as transformers names it."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    own = {"num_labels": 1 if problem == "regression" else 4, "problem_type": problem}
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, **own, pad_token_id=0, attn_implementation="sdpa"))


def graded(count: int, seed: int, problem: str) -> list[dict[str, Any]]:
    """Token ids and what a head of :func:`classifier` learns of them; one class is unknown."""
    marks = {
        "single_label_classification": lambda ids: -100 if ids[0] % 7 == 0 else ids[0] % 4,
        "multi_label_classification": lambda ids: [float(ids[place] % 2) for place in range(4)],
        "regression": lambda ids: ids[0] / VOCABULARY,
    }
    return [{"input_ids": ids, "labels": marks[problem](ids)} for ids in _ids(_lengths(count, 9, 27, seed), seed)]


def collate_graded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    padded = collate([{**row, "labels": row["input_ids"]} for row in rows])
    return padded | {"labels": torch.tensor([row["labels"] for row in rows])}
