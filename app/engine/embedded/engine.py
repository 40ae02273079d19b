"""Requests in, sampled tokens out, one forward pass at a time. No threads and no HTTP here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from app.engine.embedded.adapters import AdapterStore
from app.engine.embedded.attention import Rows
from app.engine.embedded.model import PackedModel
from app.engine.embedded.options import EngineOptions
from app.engine.embedded.sampling import sample
from app.engine.embedded.scheduler import Scheduled, Scheduler
from app.engine.embedded.sequence import Output, SampledToken, Sequence

FIRST_WEIGHT_VERSION = "default"
"""The label of the weights that an engine was started with, as in vLLM."""


@dataclass
class Counts:
    """Since the start."""

    steps: int = 0
    """Forward passes."""
    mixed_adapter_steps: int = 0
    """Forward passes with requests under at least two adapters."""
    computed_tokens: int = 0
    """Rows of all passes: prompt tokens that no earlier request had computed, and one per completion token."""
    completion_tokens: int = 0


class Engine:
    """Owns the model, the adapters and the schedule. One thread calls everything that changes them."""

    def __init__(self, options: EngineOptions):
        self.options = options
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.model = PackedModel(options)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._eos_token_ids = self.model.eos_token_ids | ({self.eos_token_id} - {None})
        self.adapters = AdapterStore(
            self.model.linear_layers,
            dtype=self.model.dtype,
            max_rank=options.max_lora_rank,
            max_in_memory=options.max_cpu_loras,
        )
        self.scheduler = Scheduler(options, self.adapters.serves)
        self.counts = Counts()
        self.paused = False
        self.weight_version = FIRST_WEIGHT_VERSION
        """What completions say of the weights that sampled them; whoever loads others sets it."""
        self._sequences: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Queues a request; prompt and completion together fit `max_model_len`, so that it can always end."""
        self._sequences[sequence.request_id] = sequence
        self.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> Output | None:
        """Ends a request that nobody listens to; None if it has ended already."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        self.scheduler.remove(sequence)
        return Output(request_id, None, sequence.detokenizer.take(finished=True), "abort")

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._sequences) and not self.paused

    def pause(self, *, clear_cache: bool) -> None:
        """No further pass until `resume`. Requests stay where they are, and new ones join them.

        clear_cache: also forget all KV; what has been sampled is kept, its KV is computed again after `resume`.
        """
        self.paused = True
        if clear_cache:
            self.scheduler.clear_cache()

    def resume(self) -> None:
        self.paused = False

    def reload_weights(self, directory: Path) -> None:
        """Take the weights of another model of this shape; no KV of the former ones is ever used again.

        Raises:
            WeightsUnsupported: nothing has changed then.
        """
        self.model.reload_weights(directory)
        self.scheduler.clear_cache()

    def step(self) -> list[Output]:
        """One forward pass over the requests that run now; what it added to each."""
        plan = self.scheduler.plan()
        outputs = [Output(self._sequences.pop(s.request_id).request_id, None, "", "missing") for s in plan.missing]
        if plan.scheduled:
            outputs.extend(self._run(plan.scheduled))
        return outputs

    def _run(self, scheduled: list[Scheduled]) -> Iterator[Output]:
        scheduled = sorted(scheduled, key=lambda s: s.sequence.root)
        token_ids: list[int] = []
        wanted: list[int] = []
        for s in scheduled:
            token_ids.extend(s.sequence.token_ids[s.start : s.start + s.count])
            if s.samples:
                wanted.append(len(token_ids) - 1)
        rows = [Rows(s.start, s.count, s.sequence.blocks) for s in scheduled]
        logits = self.model.forward(token_ids, rows, [s.sequence.adapter for s in scheduled], wanted)
        self.counts.steps += 1
        self.counts.mixed_adapter_steps += len({s.sequence.root for s in scheduled}) > 1
        self.counts.computed_tokens += len(token_ids)
        sampling = [s.sequence for s in scheduled if s.samples]
        if not sampling:
            return
        tokens = sample(logits, [s.sampling for s in sampling], [s.random for s in sampling])
        for sequence, token in zip(sampling, tokens, strict=True):
            yield self._advance(sequence, token)

    def _advance(self, sequence: Sequence, token: SampledToken | None) -> Output:
        """Appends a sampled token and decides whether the request ends with it."""
        finish_reason: str | None = None
        stop_reason: int | str | None = None
        if token is None:
            finish_reason = "error"
        else:
            sequence.append(token.id, self.weight_version)
            self.counts.completion_tokens += 1
            if token.id in sequence.sampling.stop_token_ids or self._is_eos(sequence, token.id):
                finish_reason = "stop"
                stop_reason = None if token.id == self.eos_token_id else token.id
            else:
                stop_reason = sequence.detokenizer.push(token.id)
                if stop_reason is not None:
                    finish_reason = "stop"
                elif sequence.completion_tokens == sequence.sampling.max_tokens:
                    finish_reason = "length"
        if finish_reason is not None:
            self.scheduler.remove(sequence)
            del self._sequences[sequence.request_id]
        text = sequence.detokenizer.take(finished=finish_reason is not None)
        return Output(sequence.request_id, token, text, finish_reason, stop_reason)

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self._eos_token_ids and not sequence.sampling.ignore_eos
