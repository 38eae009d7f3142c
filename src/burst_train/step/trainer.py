"""One rank of a training run: its steps and their measurements."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from burst_attention import Plan
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.link import connect, resolve_group
from burst_attention.integrations import hf
from burst_attention.launch.join import RankContext
from burst_attention.plan.strategy import for_chosen_keys

from ..checkpoint.saving import resumable, resume
from ..checkpoint.snapshot import TrainingState
from ..config import TrainConfig
from ..data.sequences import ReadAhead, TokenSequence, TrainingStream, digest_of, join_sequences, open_sequences
from ..health.finite import MOST_LEFT_OUT, OutputWatch, Spikes, first_gradient, name_first
from ..health.flops import ModelFlops, peak_of
from ..health.watch import StepWatch, traced
from ..run.metrics import StepRecord, Summary
from ..strategies import Heads, choose
from ..structure import build_empty
from .evaluate import token_losses
from .model import batch_of, build_model, model_config, model_in, ranks_of_heads
from .optim import clip_by_global_norm, make_optimizer, make_schedule

READ_AHEAD = 2  # steps


class Trainer(TrainingState):
    """One rank of a training run."""

    def __init__(self, config: TrainConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.reader, self.tokenizer = open_sequences(config)
        self.dtype = config.model.compute_dtype(context.device.type)
        self.model_config = model_config(
            config.model.model,
            self.tokenizer,
            config.data.seq_len,
            max_positions=config.model.max_positions,
            rope_scaling=config.model.rope_scaling,
            named=config.data.tokenizer,
        )
        empty = build_empty(self.model_config)
        self.windows = hf.attention_windows(empty)
        self.sharing = choose(**config.how)
        if any(hf.indexed_layers(empty)):
            self.sharing = replace(self.sharing, strategy=for_chosen_keys(self.sharing.strategy))
        self.heads = Heads.of(self.model_config)
        self.own_heads = self.heads.of_rank(ranks_of_heads(self.model_config, config.parallel.tensor_parallel))
        self.notes: list[str] = []  # for the user
        self.resumed = resumable(config, context, self.notes.append)
        self.rates = None if self.resumed is None else self.resumed.rates  # None: this user's, or measured
        self.plan = self._make_plan()
        self._everyone: Agreement | None = None  # of several groups; the ranks of one group compare by their plan
        if self.plan.world < context.world:
            _, self._everyone = connect(resolve_group(context.everyone), config.parallel.timeout)
        self.model = build_model(
            config.model.model,
            self.model_config,
            self.sharing,
            self.plan,
            dtype=self.dtype,
            mesh=context.mesh,
            everyone=context.everyone,
            seed=config.run.seed,
            memory=config.memory,
            lora=config.model.lora,
            tensor=context.tensor_mesh,
        )
        self.indexed = hf.indexed_layers(model_in(self.model)) if self._posts else []
        self.flops = ModelFlops.of(self.model, self.heads, self.windows, self.model_config, self.indexed)
        self.peak = peak_of(context.device, self.dtype, config.parallel.peak_tflops)
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(self.optimizer, config)
        self.sequences: TrainingStream | ReadAhead = self.reader.training()
        self.step, self.first_loss, self.last_loss = 0, math.nan, math.nan
        self.held_out: float | None = None
        self.held_out_tokens = 0
        self.watch = StepWatch(config.run.step_timeout, rank=context.rank, world=context.world)
        self._left_out, self._spikes = 0, Spikes()  # consecutive steps left out

    def go_on(self) -> list[str]:
        """Resume from ``--resume``, if rank 0's configuration sets it; return notes for the user."""
        notes = self.notes
        if self.config.model.lora is not None:
            sizes = [(p.requires_grad, p.numel()) for p in self.model.parameters()]
            trained, frozen = (sum(size for wanted, size in sizes if wanted is flag) for flag in (True, False))
            notes.append(f"--lora trains {trained:,} parameters; {frozen:,} are frozen")
        if self.resumed is not None:
            resume(self, self.resumed, notes.append)
        return notes

    def steps(self) -> Iterator[StepRecord]:
        """Run the remaining optimizer steps, one by one."""
        if isinstance(self.sequences, ReadAhead):  # left by earlier steps, which closed it
            self.sequences = self.reader.training(self.sequences.cursor())
        with closing(ReadAhead(self.sequences, READ_AHEAD * self.config.sequences_per_step)) as self.sequences:
            for step in range(self.step + 1, self.config.run.steps + 1):
                run, rank = self.config.run, self.context.rank
                with traced(run.out, step, rank) if step == run.profile else nullcontext():
                    record = self._take(step)
                yield record

    def _take(self, step: int) -> StepRecord:
        """Run one optimizer step."""
        self.watch.begin(step)
        start, sent, waited = time.perf_counter(), self.plan.transport.sent, self._waited()
        lr = float(self.schedule.get_last_lr()[0])
        sequences = list(itertools.islice(self.sequences, self.config.sequences_per_step))
        loss, predicted = self.backward(sequences)
        self.watch.enter("optimizer")
        norm = clip_by_global_norm(self.model, self.config.optim.clip)
        left_out = self._why_left_out(step, loss, norm, sequences)
        if left_out is None:
            self.optimizer.step()
            self.schedule.step()
            self.last_loss = loss
            self.first_loss = loss if math.isnan(self.first_loss) else self.first_loss
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        seconds, flops = time.perf_counter() - start, self.flops.of_step(sequences)
        return StepRecord(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens_per_second=self.tokens_per_step / seconds,
            seconds=seconds,
            tokens=step * self.tokens_per_step,
            bytes_sent=self.plan.transport.sent - sent if self._posts else None,
            bytes_predicted=predicted,
            flops=flops,
            mfu=self._mfu([flops], seconds),
            exchange_seconds=self._waited() - waited if self._posts else None,
            left_out=left_out,
            spike=self._spikes.multiple(loss),
        )

    @property
    def _posts(self) -> bool:
        """Whether activations use the plan's transport."""
        return not self.sharing.cuts_layers

    def _waited(self) -> float:
        """Seconds that this rank waited in attention exchanges and their agreements."""
        return self.plan.transport.waited + self.plan.agreement.transport.waited

    def _mfu(self, flops: Sequence[int | None], seconds: float) -> float | None:
        numbers = [n for n in flops if n is not None]
        if not self.peak or len(numbers) < len(flops):
            return None
        return sum(numbers) / seconds / (self.peak * self.context.world)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step reads over all ranks."""
        return self.config.sequences_per_step * self.config.data.seq_len

    def backward(self, sequences: list[TokenSequence]) -> tuple[float, int]:
        """Accumulate the gradient of the mean loss over a step's sequences; return the loss and the bytes predicted."""
        self.watch.enter("forward")
        self._agree_on(sequences)
        # Every rank reads all sequences, so every rank knows this without communication.
        num_valid = sum(sequence.valid_tokens for sequence in sequences)
        loss, predicted = 0.0, 0
        batches = [*self._micro_batches(sequences)]
        read = (batch_of(batch, self.context.device) for batch in [*batches, *self._coming()])
        coming = hf.ahead(self.model, read) if self._posts else read
        for batch, entries in zip(batches, coming, strict=False):
            part_loss = self._forward(entries, num_valid)
            self.watch.enter("backward")
            part_loss.backward()
            self.watch.enter("forward")
            loss += part_loss.item()
            predicted += self._predict_sent(batch[0].cu_seqlens)
        return self.context.sum_over_groups(loss), predicted

    def _forward(self, batch: Mapping[str, Tensor], num_valid: int) -> Tensor:
        """Return the batch's part of the mean loss over ``num_valid`` tokens."""
        out = self.model(**batch, num_items_in_batch=max(num_valid, 1))
        loss: Tensor = out.loss
        parts = self.config.sequences_per_step // self.config.optim.batch
        if getattr(out, "aux_loss", None) is not None and parts > 1:  # the router loss is the mean of the parts'
            loss = loss + model_in(self.model).router_aux_loss_coef * (1 / parts - 1) * out.aux_loss
        return loss

    def _why_left_out(self, step: int, loss: float, norm: float, sequences: list[TokenSequence]) -> str | None:
        """Return why this step is left out, the same on all ranks; FloatingPointError if ``--on-nan`` says so."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._left_out = 0
            return None
        self._left_out += 1
        where = self._first_not_finite(sequences) or "all outputs and gradients of the layers are finite"
        text = f"step {step}: loss {loss}, gradient norm {norm}: {where}"
        if self.config.run.on_nan == "stop":
            raise FloatingPointError(f"{text}; lower --lr, or use --on-nan skip to leave out such steps")
        if self._left_out == MOST_LEFT_OUT:
            raise FloatingPointError(f"{text}; --on-nan skip has left out {MOST_LEFT_OUT} steps in a row; lower --lr")
        return text

    def _first_not_finite(self, sequences: list[TokenSequence]) -> str:
        """Describe where the first non-finite value arose: rerun the forward, then search the gradients."""
        model = model_in(self.model)
        with OutputWatch(model) as watch, torch.no_grad():
            for batch in self._micro_batches(sequences):
                watch.next_batch()
                self._forward(batch_of(batch, self.context.device), 1)
        self._reshard()
        gradient = first_gradient(model, list(watch.order))
        outputs, gradients = zip(*self.context.collect((watch.first, gradient)), strict=True)
        return name_first(outputs) or name_first(gradients)

    def _reshard(self) -> None:
        """Reshard parameters after a forward alone: FSDP's root keeps them whole, but checkpoints save shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def evaluate_if_due(self) -> float | None:
        """Return the held-out loss after the latest step, if ``--eval-every`` measures it there."""
        every = self.config.run.eval_every
        self.held_out = None
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.watch.enter("evaluation")
            self.held_out, self.held_out_tokens = self.evaluate()
        return self.held_out

    def evaluate(self) -> tuple[float | None, int]:
        """Return (mean loss per valid token over the held-out sequences, number of those tokens)."""
        sequences = list(itertools.islice(self.reader.held_out(), self.config.data.held_out_sequences))
        self._agree_on(sequences)
        tokens = sum(sequence.valid_tokens for sequence in sequences)
        if not tokens:
            return None, 0
        self.model.eval()
        losses = token_losses(self.model, sequences, plan=self.plan, context=self.context)
        mine = sum(loss.sum(dtype=torch.float64).item() for _, loss in losses)
        self.model.train()
        self._reshard()
        return sum(self.context.collect(mine if self.context.is_first_of_tensor else 0.0)) / tokens, tokens

    def summarise(self, records: list[StepRecord]) -> Summary:
        """Evaluate, and collect all ranks' figures."""
        measured = self.held_out is not None  # after the last step
        held_out_loss, held_out_tokens = (self.held_out, self.held_out_tokens) if measured else self.evaluate()
        waits = [record.exchange_seconds for record in records if record.exchange_seconds is not None]
        waited = sum(waits) / len(waits) if waits else None
        counted = [record.bytes_sent for record in records if record.bytes_sent is not None]
        sent = sum(counted) / len(counted) if counted else None
        predicted = sum(record.bytes_predicted for record in records) / len(records) if records else None
        seconds = sum(record.seconds for record in records)
        by_rank = self.context.collect((self.context.peak_memory(), sent, predicted, waited, seconds))
        peak_memory, bytes_sent, bytes_predicted, waited_by_rank, durations = map(list, zip(*by_rank, strict=True))
        return Summary(
            steps=self.step,
            left_out=[record.step for record in records if record.left_out],
            spikes={record.step: record.spike for record in records if record.spike},
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            held_out_loss=held_out_loss,
            held_out_tokens=held_out_tokens,
            tokens_per_second=len(records) * self.tokens_per_step / durations[0] if records else None,
            mfu=self._mfu([record.flops for record in records], durations[0]) if records else None,
            exchange_seconds=waited_by_rank,
            skipped_files=self.reader.corpus.skipped,
            peak_memory=peak_memory,
            bytes_sent=bytes_sent,
            bytes_predicted=bytes_predicted,
        )

    def _agree_on(self, sequences: list[TokenSequence]) -> None:
        """Raise DisagreementError if ranks read different tokens, in a group or in several."""
        record = {"digest of tokens and borders": digest_of(sequences)}
        if self.context.tensor_mesh is not None:  # its ranks are in several groups, and must hold the same tokens
            record["layout of the tokens"] = self.plan.schedule.layout.description
        (self._everyone or self.plan.agreement).agree("the sequences to train on", record)

    def _make_plan(self) -> Plan:
        """Return the plan of a step's sequences, but for their documents."""
        seqlen = self.config.micro_batch[1]
        self.sharing.check(self.own_heads, seqlen, self.context.context_mesh.size())
        group, timeout = self.context.context_mesh, self.config.parallel.timeout
        # Groups that measured their links apart might choose other layouts, and ranks of one axis would mix tokens.
        rates = "preset" if self.rates is None and self.context.tensor_mesh is not None else self.rates
        return self.sharing.plan(
            seqlen, group=group, timeout=timeout, heads=self.own_heads, dtype=self.dtype, rates=rates
        )

    def _micro_batches(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """Yield this group's sequences, one batch per micro-step."""
        batch, groups = self.config.optim.batch, self.config.parallel.data_parallel
        for start in range(self.context.group_index * batch, len(sequences), groups * batch):
            own = sequences[start : start + batch]
            yield [join_sequences(own)] if self.config.joins else own

    def _coming(self) -> list[list[TokenSequence]]:
        """Return this group's first batch of the next step, if that step's sequences were read."""
        count = self.config.sequences_per_step
        read = self.sequences.coming(count) if isinstance(self.sequences, ReadAhead) else []
        return [*itertools.islice(self._micro_batches(read), 1)] if len(read) == count else []

    def _predict_sent(self, borders: tuple[int, ...] | None) -> int:
        """Return the bytes that this rank's attention sends, forward and backward, in all layers."""
        if self._posts:
            plans = hf.plans_of(self.model, self.plan.seqlen, borders)
            layers = [plans[window] for window in self.windows]
        else:
            layers = [self.plan] * len(self.windows)
        rows = self.config.micro_batch[0]
        sizes: dict[str, Any] = {"batch": rows, "dtype": self.dtype, "indexed": self.indexed}
        forward, backward = self.sharing.sent(layers, self.own_heads, **sizes)
        # A recomputed layer exchanges again, except for results that no backward needs.
        return forward * (2 if self.config.memory.remat == "layer" else 1) + backward
