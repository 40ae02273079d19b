"""What the policy's objective needs of a batch."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.plan import BatchPlan
from learner.sao.anchor import settled
from learner.sao.centring import PushEvidence, PushSums, common_pushes, push_sums, total
from learner.sao.clipping import clip_weights, clipped_policy_loss
from learner.trajectory import Trajectory


class PolicyBatch:
    """What the objective needs of a batch's N action tokens, in flat order.

    anchor_weights, anchor_failing: (N,) weights of KL(base || pi) in units of `anchor_coefficient`; the second is what
    comes on top where the critic expects failure and the policy has settled. evidence: of the policy's earlier batches;
    the first policy step adds this one to it.
    """

    def __init__(
        self,
        plan: BatchPlan,
        trajectories: Sequence[Trajectory],
        advantages: Tensor,
        settings: LearningSettings,
        anchor_weights: Tensor,
        anchor_failing: Tensor,
        evidence: PushEvidence,
    ) -> None:
        self.settings = settings
        self._evidence = evidence
        self._in_evidence = False
        self._anchor_weights = anchor_weights
        self._anchor_failing = anchor_failing
        self._plan = plan
        self.opening = torch.cat([t.opening for t in trajectories])
        self._behaviour = torch.cat([t.behaviour_logprobs for t in trajectories])
        self._advantages = advantages

    def loss(self, logprobs: Tensor, index: Tensor) -> Tensor:
        """logprobs: (n, V). index: (n,) places in flat order. Their share of the objective, to be minimised."""
        taken, behaviour, advantages = self._taken(logprobs, index)
        band, clip = self.settings.dis_band, self.settings.clip
        return clipped_policy_loss(taken, behaviour, advantages, band, self._plan.token_count, clip)

    def anchor_loss(self, anchor: Tensor, logprobs: Tensor, index: Tensor) -> Tensor:
        """anchor: (n,) KL(base || pi). logprobs: (n, V). Their share of the batch's weighted mean."""
        weights, failing = (of[index].to(anchor.device) for of in (self._anchor_weights, self._anchor_failing))
        weights = self.settings.anchor_coefficient * (weights + failing * settled(logprobs))
        return (weights * anchor).sum() / self._plan.token_count

    def common_pushes(self, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """(2, V) common pushes of the batch. parts: (n,) places in flat order and (n, V) log-probs, of all of it."""
        whole = total(self._push_sums(*part) for part in parts)
        if not self._in_evidence:  # later steps see the same rollouts again
            self._evidence.add(whole)
            self._in_evidence = True
        return common_pushes(whole, self._evidence.noise_share())

    def _push_sums(self, index: Tensor, logprobs: Tensor) -> PushSums:
        taken, behaviour, advantages = self._taken(logprobs, index)
        weights = clip_weights(taken - behaviour, advantages, self.settings.dis_band, self.settings.clip)
        ids, opening = (of[index].to(logprobs.device) for of in (self._plan.action_ids, self.opening))
        return push_sums(logprobs, ids, weights * advantages, opening)

    def _taken(self, logprobs: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) log pi of the sampled tokens, their behaviour log-probs and advantages."""
        ids, behaviour, advantages = (
            of[index].to(logprobs.device) for of in (self._plan.action_ids, self._behaviour, self._advantages)
        )
        return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), behaviour, advantages
