"""One full-batch step of the policy.

Logits are large: a token's take as much memory as a hundred of its states, and the objective holds more than ten
tensors of their size. So a micro-batch's action tokens go through the output layer in parts, each with its own backward
pass, and the decoder runs backward once with the gradient that its states have gathered.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from learner.health import PolicyReading
from learner.model import LearnerModel
from learner.optimisers import clip_and_step
from learner.plan import BatchPlan, MicroBatch
from learner.policy_batch import PolicyBatch
from learner.sao.anchor import forward_kl
from learner.sao.centring import centring_loss
from learner.sao.health import entropy

TOKENS_PER_PART = 128
"""Action tokens whose logits are in memory at once: 25 MB for each tensor of a vocabulary of 49,152."""


def policy_step(
    model: LearnerModel, optimiser: Optimizer, plan: BatchPlan, base_states: Tensor | None, batch: PolicyBatch
) -> PolicyReading:
    """In place. base_states: (N, H) for the anchor; None: there is none.

    Raises:
        TrainingDiverged: the gradient is not finite; nothing has been stepped.
    """
    policy_pass = PolicyPass(model, plan, base_states)
    settings = batch.settings
    common: Tensor | None = None
    if settings.centring > 0 and sum(len(group.micro_batches) for group in plan.groups) > 1:
        # what all of the batch has in common must be known before the first backward pass
        common = batch.common_pushes(policy_pass.parts(model.read_states("policy", plan)))

    def part_loss(states: Tensor, index: Tensor, pushes: Tensor | None) -> Tensor:
        logprobs = policy_pass.logprobs(states, index)
        policy_pass.record(logprobs, index)
        result = batch.loss(logprobs, index)
        if pushes is not None:
            opening = batch.opening[index].to(logprobs.device)
            result = result + centring_loss(logprobs, opening, pushes, settings.centring, plan.token_count)
        if base_states is not None:
            result = result + batch.anchor_loss(policy_pass.anchor(logprobs, index), logprobs, index)
        return result

    def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        pushes = common
        if settings.centring > 0 and common is None:  # this micro-batch is the whole batch
            pushes = batch.common_pushes(policy_pass.parts(states.detach(), micro_batch.index))
        return in_parts(states, micro_batch.index, lambda part, index: part_loss(part, index, pushes))

    optimiser.zero_grad()
    model.accumulate_gradients("policy", plan, loss)
    return policy_pass.reading(clip_and_step(optimiser, model.policy_parameters, settings.policy_grad_clip, "policy"))


def in_parts(states: Tensor, index: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A scalar with the gradient, in `states`, of the sum of `loss` over parts; what its own parameters get of it is in
    their `.grad` already. Its value means nothing.

    states: (n, H). index: (n,). loss: of a part of both.
    """
    gradients: list[Tensor] = []
    for part, part_index in zip(states.detach().split(TOKENS_PER_PART), index.split(TOKENS_PER_PART), strict=True):
        leaf = part.requires_grad_()  # each part its own: a whole one would gather a whole gradient per part
        loss(leaf, part_index).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return (states * torch.cat(gradients)).sum()


class PolicyPass:
    """One pass over the batch with the policy as it stands, keeping what the health figures need."""

    def __init__(self, model: LearnerModel, plan: BatchPlan, base_states: Tensor | None) -> None:
        self._model = model
        self._plan = plan
        self._base_states = base_states
        self._taken = torch.empty(plan.token_count)
        self._entropy = torch.empty(plan.token_count)
        self._base_kl = torch.empty(plan.token_count if base_states is not None else 0)

    def logprobs(self, states: Tensor, index: Tensor) -> Tensor:
        """(n, V) log pi. states: (n, H). index: (n,) the tokens' places in the batch's flat order."""
        return self._model.logprobs(states, self._plan.temperatures[index])

    def record(self, logprobs: Tensor, index: Tensor) -> None:
        """Keeps the figures of some tokens; logprobs and index as of `logprobs`."""
        taken = logprobs.detach().gather(1, self._plan.action_ids[index].to(logprobs.device).unsqueeze(1)).squeeze(1)
        self._taken[index] = taken.cpu()
        self._entropy[index] = entropy(logprobs).cpu()

    def parts(self, states: Tensor, index: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Places and (n, V) log pi, without gradient, a part at a time. states, index: default all of the batch."""
        index = torch.arange(self._plan.token_count) if index is None else index
        for part, part_index in zip(states.split(TOKENS_PER_PART), index.split(TOKENS_PER_PART), strict=True):
            with torch.no_grad():
                logprobs = self.logprobs(part, part_index)
            yield part_index, logprobs

    def anchor(self, logprobs: Tensor, index: Tensor) -> Tensor:
        """(n,) KL(base || pi)."""
        assert self._base_states is not None
        with torch.no_grad():
            base_states = self._base_states[index.to(logprobs.device)]
            base_logprobs = self._model.logprobs(base_states, self._plan.temperatures[index], "base")
        anchor = forward_kl(base_logprobs, logprobs)
        self._base_kl[index] = anchor.detach().cpu()
        return anchor

    def reading(self, grad_norm: float | None) -> PolicyReading:
        return PolicyReading(self._taken, self._entropy, self._base_kl, grad_norm)

    def read(self) -> PolicyReading:
        """The whole batch without a step."""
        for index, logprobs in self.parts(self._model.read_states("policy", self._plan)):
            self.record(logprobs, index)
            if self._base_states is not None:
                self.anchor(logprobs, index)
        return self.reading(None)
