"""What an update needs of a policy and its value model, however they are trained.

States are computed at the positions that predict an action token, and nowhere else are logits or values: for N action
tokens there are (N, vocabulary) logits, never (B, L, vocabulary).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Literal
from uuid import UUID

import torch
from torch import Tensor, nn

from app.policies.dtype import Dtype
from learner.attention import PrefixKv, Rows
from learner.plan import BatchPlan, MicroBatch, PrefixGroup, plan_batch
from learner.trajectory import Trajectory

HEAD_INPUT_RMS = 0.2
"""Root mean square of the value head's inputs. A decoder's states are large and have much in common, so that one
AdamW step on the head would move all values at once by a multiple of a reward (SmolLM2: by 0.3 at 5e-4)."""

Role = Literal["base", "policy", "value"]
Loss = Callable[[Tensor, MicroBatch], Tensor]
"""((n, H) states, micro-batch) -> scalar, this micro-batch's share of the batch's loss."""


class LearnerModel(ABC):
    """A policy, its value model with a scalar head, and the frozen base that both started from.

    What is trained is float32, whatever dtype the forward pass multiplies in: that of the engine.
    """

    def __init__(self, dtype: Dtype, hidden_size: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.value_head = nn.Linear(hidden_size, 1, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._decoder: nn.Module
        """Of the active role."""

    @property
    @abstractmethod
    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> trainable parameter of the policy."""

    @property
    @abstractmethod
    def value_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> trainable parameter of the value model, the head's included."""

    @abstractmethod
    def served_policy(self) -> dict[str, Tensor]:
        """Name -> copy of a policy weight as engines get it."""

    @abstractmethod
    def export_policy(self, directory: Path) -> None:
        """Writes the policy, as engines load it, into an empty directory."""

    @abstractmethod
    def _active(self, role: Role) -> AbstractContextManager[None]:
        """Makes `_decoder` that of a role, with the weights as they stand now."""

    @abstractmethod
    def _output_layer(self, role: Role) -> nn.Module: ...

    def plan(self, trajectories: Sequence[Trajectory], tokens_per_micro_batch: int) -> BatchPlan:
        return plan_batch(trajectories, tokens_per_micro_batch)

    def read_states(self, role: Role, plan: BatchPlan) -> Tensor:
        """(N, H) states that predict the batch's action tokens, in flat order, without gradient."""
        states: Tensor | None = None
        with torch.no_grad(), self._active(role):
            for group in plan.groups:
                prefix = _SharedPrefix(self, group)
                for micro_batch in group.micro_batches:
                    part = self._states(micro_batch, prefix)
                    if states is None:
                        states = part.new_empty(plan.token_count, part.shape[-1])
                    states[micro_batch.index] = part
        assert states is not None
        return states

    def accumulate_gradients(self, role: Role, plan: BatchPlan, loss: Loss) -> None:
        """Adds the gradient of the batch's loss, the sum of `loss` over its micro-batches, to the parameters' `.grad`.

        A shared prefix runs forward once, and backward once: with the gradients that its keys and values have
        gathered from all micro-batches of its group.
        """
        with self._active(role):
            for group in plan.groups:
                prefix = _SharedPrefix(self, group)
                for micro_batch in group.micro_batches:
                    loss(self._states(micro_batch, prefix), micro_batch).backward()
                prefix.backward()

    def logprobs(self, states: Tensor, temperatures: Tensor, role: Role = "policy") -> Tensor:
        """(n, V) float32 log-probs, nats: log_softmax(logits / T), the distribution that the engine samples from.

        states: (n, H) of `role`, the policy or the base. temperatures: (n,).
        """
        logits = self._output_layer(role)(states).float()
        return torch.log_softmax(logits / temperatures.to(logits.device).unsqueeze(-1), dim=-1)

    def values(self, states: Tensor) -> Tensor:
        """(n,) float32 V(s_t): of the state before each action token, under the value model."""
        states = nn.functional.rms_norm(states.float(), states.shape[-1:]) * HEAD_INPUT_RMS
        return self.value_head(states).squeeze(-1)

    def top_logprobs(self, role: Role, prompts: Sequence[Sequence[int]], k: int) -> list[list[tuple[int, float]]]:
        """Per prompt (token ids), the k likeliest next tokens at T = 1: (token, log-prob in nats), best first."""
        one = torch.ones(1)
        next_tokens = [
            Trajectory(
                rollout_id=UUID(int=0),
                segment=0,
                token_ids=torch.tensor([*prompt, 0]),  # the token itself is never fed
                action_positions=torch.tensor([len(prompt)]),
                behaviour_logprobs=one,
                rewards=one,
                reward_counts=one,
                temperatures=one,
                staleness=one,
                interaction_index=one,
                rollout_action_tokens=1,
                rollout_return=0.0,
            )
            for prompt in prompts
        ]
        plan = self.plan(next_tokens, max(len(prompt) for prompt in prompts))
        with torch.no_grad():
            top = self.logprobs(self.read_states(role, plan), plan.temperatures, role).topk(k)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]

    def decoder_forward(
        self, token_ids: Tensor, positions: Tensor, rows: Rows | None, prefix: PrefixKv | None
    ) -> Tensor:
        """(M, H) states of the active decoder, without its output layer, for M tokens: see `packed_attention`."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self._decoder(
                input_ids=token_ids.to(self.device).unsqueeze(0),
                position_ids=positions.to(self.device).unsqueeze(0),
                use_cache=False,
                rows=None if rows is None else rows.to(self.device),
                prefix=prefix,
            )
        states: Tensor = output.last_hidden_state[0]
        return states

    def _states(self, micro_batch: MicroBatch, prefix: "_SharedPrefix") -> Tensor:
        states = self.decoder_forward(micro_batch.token_ids, micro_batch.positions, micro_batch.rows, prefix.leaves)
        return states[micro_batch.states.to(self.device)]

    def _head_parameters(self) -> dict[str, nn.Parameter]:
        return {f"value_head.{name}": parameter for name, parameter in self.value_head.named_parameters()}


class _SharedPrefix:
    """A prefix's keys and values, computed once: detached leaves that gather the gradients of every micro-batch."""

    def __init__(self, model: LearnerModel, group: PrefixGroup) -> None:
        self.leaves: PrefixKv | None = None
        """None for a group that shares no prefix."""
        self._outputs = PrefixKv()
        if length := group.prefix_ids.numel():
            model.decoder_forward(group.prefix_ids, torch.arange(length), None, self._outputs)
            # what does not depend on a trained parameter (the first layer's under the value adapter) needs no gradient
            self.leaves = PrefixKv(
                *([kv.detach().requires_grad_(kv.requires_grad) for kv in part] for part in self._outputs.all())
            )

    def backward(self) -> None:
        """One backward pass through the prefix, of all that its keys and values have gathered."""
        if self.leaves is None:
            return
        pairs = zip(chain(*self._outputs.all()), chain(*self.leaves.all()), strict=True)
        gathered = [(output, leaf.grad) for output, leaf in pairs if leaf.grad is not None]
        torch.autograd.backward([output for output, _ in gathered], [grad for _, grad in gathered])
