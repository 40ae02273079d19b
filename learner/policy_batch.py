"""What the policy's objective needs of a batch."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.plan import BatchPlan, MicroBatch
from learner.sao.anchor import settled
from learner.sao.centring import PushSums, common_pushes, push_sums
from learner.sao.clipping import clip_weights, clipped_policy_loss
from learner.trajectory import Trajectory


class PolicyBatch:
    """What the objective needs of a batch's N action tokens, in flat order.

    anchor_weights, anchor_failing: (N,) weights of KL(base || pi) in units of `anchor_coefficient`; the second is what
    comes on top where the critic expects failure.
    """

    def __init__(
        self,
        plan: BatchPlan,
        trajectories: Sequence[Trajectory],
        advantages: Tensor,
        settings: LearningSettings,
        anchor_weights: Tensor,
        anchor_failing: Tensor,
    ) -> None:
        self.settings = settings
        self._anchor_weights = anchor_weights
        self._anchor_failing = anchor_failing
        self._plan = plan
        self.opening = torch.cat([t.opening for t in trajectories])
        self._behaviour = torch.cat([t.behaviour_logprobs for t in trajectories])
        self._advantages = advantages

    def loss(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor:
        """logprobs: (n, V) of the micro-batch's tokens. Its share of the objective, to be minimised."""
        taken, behaviour, advantages = self._taken(logprobs, micro_batch)
        band, clip = self.settings.dis_band, self.settings.clip
        return clipped_policy_loss(taken, behaviour, advantages, band, self._plan.token_count, clip)

    def anchor_loss(self, anchor: Tensor, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor:
        """anchor: (n,) KL(base || pi). logprobs: (n, V). Its share of the batch's weighted mean."""
        weights, failing = (
            of[micro_batch.index].to(anchor.device) for of in (self._anchor_weights, self._anchor_failing)
        )
        if self.settings.anchor_settled_power > 0:
            failing = failing * settled(logprobs) ** self.settings.anchor_settled_power
        weights = self.settings.anchor_coefficient * (weights + failing)
        return (weights * anchor).sum() / self._plan.token_count

    def common_pushes(self, parts: Iterable[tuple[MicroBatch, Tensor]]) -> Tensor:
        """(2, V) common pushes of the batch, from all of its micro-batches and their (n, V) log-probs."""
        sums: list[PushSums] = []
        for micro_batch, logprobs in parts:
            taken, behaviour, advantages = self._taken(logprobs.detach(), micro_batch)
            weights = clip_weights(taken - behaviour, advantages, self.settings.dis_band, self.settings.clip)
            ids, opening = (of[micro_batch.index].to(logprobs.device) for of in (self._plan.action_ids, self.opening))
            sums.append(push_sums(logprobs, ids, weights * advantages, opening))
        return common_pushes(sums, self.settings.centring_threshold)

    def _taken(self, logprobs: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) log pi of the sampled tokens, their behaviour log-probs and advantages."""
        ids, behaviour, advantages = (
            of[micro_batch.index].to(logprobs.device)
            for of in (self._plan.action_ids, self._behaviour, self._advantages)
        )
        return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), behaviour, advantages
