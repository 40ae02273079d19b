"""Iteration-level scheduling (Orca, OSDI 2022): who takes part is decided anew before every forward pass."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from app.engine.embedded.adapters import Adapter
from app.engine.embedded.blocks import BlockPool
from app.engine.embedded.options import BLOCK_SIZE, EngineOptions
from app.engine.embedded.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    sequence: Sequence
    start: int
    """First token of the sequence that this pass computes."""
    count: int

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the sequence's last token, so that the next one can be drawn."""
        return self.start + self.count == len(self.sequence.token_ids)


@dataclass
class Plan:
    scheduled: list[Scheduled] = field(default_factory=list)
    missing: list[Sequence] = field(default_factory=list)
    """Requests dropped because their adapter was unloaded before they started."""


class Scheduler:
    """Running requests go first, one token each; prompts share what is left of the pass, and the part of one is kept
    for requests that wait, which are taken up in order of arrival.

    A request that finds no block preempts the youngest one, whose KV is recomputed later. The youngest may be itself.
    """

    def __init__(self, options: EngineOptions, serves: Callable[[Adapter], bool]):
        self._options = options
        self._serves = serves
        # a long prompt takes half of a pass at most, so that those which arrive meanwhile need not wait for its end
        self._prompt_chunk = max(1, options.max_num_batched_tokens // 2)
        self.blocks = BlockPool(options.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    def plan(self) -> Plan:
        """The next pass; its blocks are taken and its full blocks are shared from now on, so it must be computed."""
        plan = Plan()
        budget = self._options.max_num_batched_tokens
        preempted = self.preemptions
        # oldest first, so that nothing that is part of this pass already is preempted
        for sequence, count in self._shares().items():
            if sequence not in self.running:
                continue
            if not self._make_room(sequence, count):
                break
            plan.scheduled.append(self._schedule(sequence, count))
            budget -= count
        if self.preemptions == preempted:
            self._admit(plan, budget)
        return plan

    def remove(self, sequence: Sequence) -> None:
        """Ends a request: its place and its blocks are free for the next pass."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def clear_cache(self) -> None:
        """Forget all KV. Those that run start again from their first token, before those that wait."""
        for sequence in reversed(self.running):
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.blocks.forget()

    def _shares(self) -> dict[Sequence, int]:
        """Tokens of the next pass for each running request, oldest first; those that get none are left out.

        Max-min fair: none gets less than an equal part unless it needs less, and what one does not need is for the
        others. So a short prompt never waits for the end of long ones.
        """
        budget = self._options.max_num_batched_tokens
        newcomers = bool(self.waiting) and len(self.running) < self._options.max_num_seqs
        parties = len(self.running) + newcomers
        shares: dict[Sequence, int] = {}
        for sequence in sorted(self.running, key=_pending):
            part = max(1, budget // parties)
            shares[sequence] = min(_pending(sequence), part, self._prompt_chunk, budget)
            budget -= shares[sequence]
            parties -= 1
        return {sequence: shares[sequence] for sequence in self.running if shares[sequence] > 0}

    def _admit(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._options.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.adapter is not None and not sequence.started and not self._serves(sequence.adapter):
                plan.missing.append(self.waiting.popleft())
                continue
            if not self._fits_adapters(sequence):
                return
            # at least the last token is computed, since its logits are needed
            shared = self.blocks.match(sequence.root, sequence.token_ids[:-1])
            count = min(len(sequence.token_ids) - len(shared) * BLOCK_SIZE, budget, self._prompt_chunk)
            needed = _blocks_for(len(shared) * BLOCK_SIZE + count) - len(shared)
            if needed + self.blocks.unheld(shared) > self.blocks.free:
                return
            self.waiting.popleft()
            self._share(sequence, shared)
            self.running.append(sequence)
            sequence.started = True
            plan.scheduled.append(self._schedule(sequence, count))
            budget -= count

    def _fits_adapters(self, sequence: Sequence) -> bool:
        active = {s.adapter.id for s in self.running if s.adapter is not None}
        if sequence.adapter is not None:
            active.add(sequence.adapter.id)
        return len(active) <= self._options.max_loras

    def _share(self, sequence: Sequence, shared: list[int]) -> None:
        for block in shared:
            self.blocks.hold(block)
        sequence.blocks = list(shared)
        sequence.computed = len(shared) * BLOCK_SIZE
        sequence.named = len(shared)
        sequence.parent = self.blocks.content_id(shared[-1]) if shared else sequence.root
        self.prefix_hit_tokens += sequence.computed

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempts until the blocks for `count` more tokens are free; False if that took the sequence itself."""
        while _blocks_for(sequence.computed + count) - len(sequence.blocks) > self.blocks.free:
            youngest = self.running.pop()
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _schedule(self, sequence: Sequence, count: int) -> Scheduled:
        scheduled = Scheduled(sequence, sequence.computed, count)
        sequence.computed += count
        while len(sequence.blocks) < _blocks_for(sequence.computed):
            sequence.blocks.append(self.blocks.take())
        while (sequence.named + 1) * BLOCK_SIZE <= sequence.computed:
            start = sequence.named * BLOCK_SIZE
            sequence.parent = self.blocks.name(
                sequence.blocks[sequence.named], sequence.parent, sequence.token_ids[start : start + BLOCK_SIZE]
            )
            sequence.named += 1
        return scheduled

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.named = 0
        sequence.parent = sequence.root


def _pending(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.computed


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
