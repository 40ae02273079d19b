"""What tokens tell each B, against plain transformers and peft, one sequence at a time."""

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.lora_model import LoraModel
from learner.plan import MicroBatch, plan_batch
from learner.token_moments import TokenMoments
from tests.unit.learner.batches import two_prefix_batch


def moments(model: LoraModel, budget: int) -> dict[str, Tensor]:
    plan = plan_batch(two_prefix_batch(), budget, share_prefixes=False)

    def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        logprobs = model.logprobs(states, plan.temperatures[micro_batch.index])
        return logprobs.gather(1, plan.action_ids[micro_batch.index][:, None]).sum() / plan.token_count

    policy_moments = TokenMoments(model.peft, "policy")
    model.accumulate_gradients("policy", plan, loss)
    return policy_moments.take()


def test_moments_are_those_of_all_tokens_whatever_the_micro_batches(
    model: LoraModel, tiny_model: Path, tmp_path: Path
) -> None:
    model.export_policy(tmp_path)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path), is_trainable=True
    )
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, module in plain.named_modules():
        if name.endswith(".lora_B.default"):

            def keep(_: object, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                output.retain_grad()
                seen.setdefault(name.replace("default", "policy") + ".weight", []).append((inputs[0], output))

            module.register_forward_hook(keep)
    batch = two_prefix_batch()
    count = sum(t.action_positions.numel() for t in batch)
    for trajectory in batch:
        logits = plain(trajectory.token_ids[: int(trajectory.action_positions[-1])].unsqueeze(0)).logits[0]
        logprobs = logits[trajectory.action_positions - 1] / trajectory.temperatures[:, None]
        taken = trajectory.token_ids[trajectory.action_positions][:, None]
        (logprobs.log_softmax(-1).gather(1, taken).sum() / count).backward()

    for budget in (1, 50, 4096):
        found = moments(model, budget)
        assert found.keys() == {n for n in model.policy_parameters if ".lora_B." in n}
        for name, moment in found.items():
            expected = torch.zeros_like(moment)
            for z, output in seen[name]:
                for token, delta in zip(z[0].detach(), output.grad[0], strict=True):  # type: ignore[index]
                    expected += delta.square().sum() * torch.outer(token, token)
            torch.testing.assert_close(moment, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_reading_leaves_no_moments(model: LoraModel) -> None:
    policy_moments = TokenMoments(model.peft, "policy")
    model.read_states("policy", plan_batch(two_prefix_batch(), 4096))
    assert policy_moments.take() == {}
