"""One frozen base model under two LoRA adapters: the policy, and the value model with its scalar head.

States are computed at the positions that predict an action token, and nowhere else are logits or values: for N action
tokens there are (N, vocabulary) logits, never (B, L, vocabulary).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal
from uuid import UUID

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.adapters import load_adapter, policy_lora_config, save_adapter, value_lora_config
from learner.attention import PACKED_ATTENTION, PrefixKv, Rows
from learner.plan import BatchPlan, MicroBatch, PrefixGroup, plan_batch
from learner.trajectory import Trajectory

HEAD_INPUT_RMS = 0.2
"""Root mean square of the value head's inputs. A decoder's states are large and have much in common, so that one
AdamW step on the head would move all values at once by a multiple of a reward (SmolLM2: by 0.3 at 5e-4)."""

Role = Literal["base", "policy", "value"]
Loss = Callable[[Tensor, MicroBatch], Tensor]
"""((n, H) states, micro-batch) -> scalar, this micro-batch's share of the batch's loss."""


class LearnerModel:
    """Adapter weights and the value head are float32; the base has the engine's dtype.

    With a bfloat16 base the adapters multiply in bfloat16 too, as they do in the engine: faster, and the learner's
    log-probs differ less from the behaviour's. Their master copies and the optimisers stay float32.
    """

    def __init__(self, base_model: Path, dtype: Dtype, settings: LearningSettings, policy_adapter: Path) -> None:
        """Loads the base and the policy adapter of a version; the value model starts from the base with V = 0.

        Raises:
            ValueError: the adapter does not fit the settings, or the model's architecture is not supported.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = AutoModelForCausalLM.from_pretrained(base_model, dtype=getattr(torch, dtype), local_files_only=True)
        base.requires_grad_(False).eval().to(self.device)
        value_config = value_lora_config(settings, base)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.peft: PeftModel = get_peft_model(base, policy_lora_config(settings, base), adapter_name="policy")
            self.peft.add_adapter("value", value_config)
        load_adapter(self.peft, "policy", policy_adapter)
        self._causal_lm: PreTrainedModel = base  # with the adapters' layers in place
        self.value_head = nn.Linear(base.config.get_text_config().hidden_size, 1, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if base.dtype != torch.float32:
            for layer in self.peft.modules():
                if isinstance(layer, LoraLayer):
                    layer.cast_input_dtype_enabled = False  # autocast casts the weights instead of the activations
        self._check_architecture()

    @property
    def dtype(self) -> torch.dtype:
        """The base's."""
        return self._causal_lm.dtype

    @property
    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> trainable parameter of the policy."""
        return self._adapter_parameters("policy")

    @property
    def value_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> trainable parameter of the value model, the head's included."""
        head = {f"value_head.{name}": parameter for name, parameter in self.value_head.named_parameters()}
        return self._adapter_parameters("value") | head

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

    def logprobs(self, states: Tensor, temperatures: Tensor) -> Tensor:
        """(n, V) float32 log-probs, nats: log_softmax(logits / T), the distribution that the engine samples from.

        states: (n, H) of the policy or the base. temperatures: (n,).
        """
        logits = self._causal_lm.get_output_embeddings()(states).float()
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
            top = self.logprobs(self.read_states(role, plan), plan.temperatures).topk(k)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]

    def export_policy(self, directory: Path) -> None:
        """Writes the policy's adapter as a standard PEFT directory: factorised, float32, no modules_to_save."""
        save_adapter(self.peft, "policy", directory)

    def decoder_forward(
        self, token_ids: Tensor, positions: Tensor, rows: Rows | None, prefix: PrefixKv | None
    ) -> Tensor:
        """(M, H) states of the decoder, without its output layer, for M tokens: see `packed_attention`."""
        dtype = self._causal_lm.dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            output = self._causal_lm.get_decoder()(
                input_ids=token_ids.to(self.device).unsqueeze(0),
                position_ids=positions.to(self.device).unsqueeze(0),
                use_cache=False,
                rows=None if rows is None else rows.to(self.device),
                prefix=prefix,
            )
        return output.last_hidden_state[0]

    def _states(self, micro_batch: MicroBatch, prefix: "_SharedPrefix") -> Tensor:
        states = self.decoder_forward(micro_batch.token_ids, micro_batch.positions, micro_batch.rows, prefix.leaves)
        return states[micro_batch.states.to(self.device)]

    @contextmanager
    def _active(self, role: Role) -> Iterator[None]:
        if role == "base":
            with self.peft.disable_adapter():
                yield
        else:
            self.peft.set_adapter(role)
            yield

    def _adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.peft.named_parameters() if f".{adapter}." in name}

    def _check_architecture(self) -> None:
        """Compares with the model's own forward pass: some families scale or cap logits, or attend in other ways.

        Raises:
            ValueError: its log-probs differ, or not all of its layers attend to everything before.
        """
        name, config = type(self._causal_lm).__name__, self._causal_lm.config
        if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
            raise ValueError(f"{name} has layers without full attention; the learner does not support them")
        prompts = [[*range(1, 41), *range(50, 50 + 3 * i)] for i in range(1, 4)]
        config._attn_implementation = "sdpa"
        with torch.no_grad(), self._active("base"):
            expected = [
                self._causal_lm(input_ids=torch.tensor([p], device=self.device), use_cache=False).logits[0, -1].float()
                for p in prompts
            ]
        config._attn_implementation = PACKED_ATTENTION
        for logits, top in zip(expected, self.top_logprobs("base", prompts, 5), strict=True):
            stock = logits.log_softmax(-1)
            difference = max(abs(stock[token].item() - logprob) for token, logprob in top)
            if difference > 0.5:
                raise ValueError(
                    f"{name} computes its logits in a way that the learner does not reproduce "
                    f"(log-probs differ by {difference:.2f} nats); it cannot be trained"
                )


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
