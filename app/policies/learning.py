"""What a policy learns with: the SAO settings and their two presets. Stored as JSON in policies.settings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

LARGEST = 2**31 - 1
"""What every database, and every LIMIT, can hold."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
BatchSize = Annotated[int, Field(ge=1, le=10_000)]
"""SQLite takes 32,766 parameters in one statement, and a claim names every rollout."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
Training = Literal["lora", "full"]
"""What of a policy is trained: adapters on a frozen base, or all of its weights."""

FORM = 2
"""Counts the changes of how an update learns that no setting names: 1 was centring by one batch, and a floor that took
no account of what is settled. Results of another form are not compared, and a replay says so."""


class LearningSettings(BaseModel):
    """Defaults are the `online` preset on LoRA. Names follow the paper (arXiv 2607.07508) where it has one.

    Where settings are chosen, validate them with `context={"training": "full"}` for a policy that trains full weights:
    what is left out takes the defaults of `FULL`, and what is for adapters alone is refused. Stored settings are
    complete, and need no context.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: Literal["online", "paper"] = "online"

    advantage: Literal["value", "running_mean", "group"] = "value"
    """What a return is compared with: SAO's critic, or without one (learner/advantages.py) a `running_mean` of the last
    128 returns, the paper's comparator, or GRPO's `group` of G rollouts of one prompt."""
    clip: Literal["dis", "ppo", "none"] = "dis"
    """What becomes of a token whose ratio has left `dis_band`: masked, PPO's clip with the band as its bounds, or
    nothing (learner/sao/clipping.py)."""

    rollouts_per_update: BatchSize = 32
    min_rollouts: Count = 32
    """An update starts when this many rollouts are ready ..."""
    max_wait_s: float = Field(60.0, ge=0)
    """... or, once the oldest ready one has waited this long, when `min_rollouts_after_wait` are."""
    min_rollouts_after_wait: Count = 8
    group_size: int = Field(8, ge=2, le=10_000, validate_default=True)
    """G: rollouts with one tag `group` that `advantage: group` compares with each other; read there alone."""
    max_staleness: int | None = Field(4, ge=0, le=LARGEST)
    """Policy versions between the one that sampled and the head; None = no limit, DIS alone guards."""

    dis_band: tuple[float, float] = (0.2, 4.0)
    """Open interval of accepted ratios pi / pi_b (Eq. 1-3)."""
    critic_steps: Count = 1
    """K: full-batch critic steps before the policy's."""
    policy_steps: Count = 2
    """Full-batch policy steps per update; the ratios are recomputed before each."""
    alpha: float = Field(1.5, gt=0)
    """lambda_policy = 1 - 1 / (alpha * l), l = action tokens of the rollout."""
    critic_lambda: float = Field(1.0, ge=0, le=1)
    gamma: float = Field(1.0, gt=0, le=1)
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """What comes after an answer that a limit of length cut off: nothing, or what the critic expects there. `bootstrap`
    is for rewards that would have come later; a judge of the cut answer has said already what it is worth."""
    whiten_advantages: bool = False
    whiten_floor: float = Field(0.1, gt=0)
    anchor_coefficient: float = Field(0.02, ge=0)
    """Weight of the forward KL(base || pi), the exploration floor of an endpoint that must follow change."""
    anchor_follows_shortfall: bool = True
    """Whether that weight is multiplied by (1 + what is left to gain) / 2 (see `lr_follows_shortfall`): half of it
    where nothing is wrong, the whole of it at once when the policy's world changes."""
    anchor_where_failing: float = Field(5.0, ge=0)
    """So many times `anchor_coefficient` comes on top at a token where the critic expects failure: times the square of
    min(1, 2 (reward_max - R) / (reward_max - reward_min)), R the reward that the critic expects: V, or V divided by the
    number of rewards to come; and times (sum_v pi(v)^2)^2, 1 where the policy always takes the same token. An answer
    that is taken and fails for certain has no advantage; this is what moves it, and not what still explores."""
    centring: float = Field(0.95, ge=0, le=1)
    """How much of the batch's common push on the logits is taken out of the policy's gradient: the noise that moves all
    answers together, not what pushes the same way batch after batch (decisions/0015). 0: the paper's objective."""

    policy_optimiser: Literal["preconditioned", "adamw"] = "preconditioned"
    policy_lr: LearningRate = 3e-4
    lr_follows_shortfall: bool = True
    """Whether `policy_lr` is multiplied by what is left to gain: min(1, 2 (reward_max - mean reward) / (reward_max -
    reward_min)) of the batch. Steps shrink as the policy gets good, and grow at once when its world changes."""
    value_lr: LearningRate = 1e-3
    policy_grad_clip: float = Field(1.0, gt=0)
    value_grad_clip: float = Field(10.0, gt=0)
    critic_warmup_updates: int = Field(1, ge=0, le=LARGEST)
    """The first updates train the critic alone; they make no policy version."""
    lr_warmup_updates: int = Field(2, ge=0, le=LARGEST)
    """After them the policy's learning rate rises linearly over this many updates: an optimiser's first steps have
    full length whatever the gradient's noise."""

    lora_rank: Count = 16
    lora_alpha: Count = 32
    value_rank: Count = 16
    tokens_per_micro_batch: Count = 4096
    gradient_checkpointing: bool = False
    """Activations of a layer are computed again in the backward pass: less memory, about a third more time."""
    seed: int = Field(0, ge=0, lt=2**63)
    """What torch's generator takes."""

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        preset = PAPER if data.get("preset") == "paper" else {}
        training = FULL if _is_full(info) else {}
        return preset | training | data

    @field_validator("policy_optimiser", "lora_rank", "lora_alpha", "value_rank")
    @classmethod
    def _check_training(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        usual = FULL.get(info.field_name, cls.model_fields[info.field_name].default)
        if _is_full(info) and value != usual:
            raise ValueError(f"{value} is for adapters; a policy that trains full weights takes {usual}, or nothing")
        return value

    @field_validator("group_size")
    @classmethod
    def _check_groups(cls, size: int, earlier: ValidationInfo) -> int:
        batch = earlier.data.get("rollouts_per_update")
        if earlier.data.get("advantage") == "group" and batch is not None and batch % size:
            raise ValueError(
                f"rollouts_per_update ({batch}) must be a multiple of group_size ({size}) where advantage is group"
            )
        return size

    @field_validator("dis_band")
    @classmethod
    def _check_band(cls, band: tuple[float, float]) -> tuple[float, float]:
        low, high = band
        if not 0 <= low < high:
            raise ValueError(f"must be [low, high] with 0 <= low < high, not [{low:g}, {high:g}]")
        return band

    @property
    def warmup_updates(self) -> int:
        """Updates that hold the policy back: the critic's warm-up, where there is a critic."""
        return self.critic_warmup_updates if self.advantage == "value" else 0


PAPER: dict[str, Any] = {
    "critic_steps": 2,
    "policy_steps": 1,
    "policy_optimiser": "adamw",
    "policy_lr": 1.5e-4,
    "lr_follows_shortfall": False,
    "critic_warmup_updates": 10,
    "lr_warmup_updates": 0,
    "whiten_advantages": True,
    "anchor_coefficient": 0.0,
    "anchor_follows_shortfall": False,
    "anchor_where_failing": 0.0,
    "centring": 0.0,
}
"""The paper's exact setting as far as it states one; on LoRA it keeps LoRA's learning rates."""


FULL: dict[str, Any] = {
    "policy_optimiser": "adamw",
    "policy_lr": 1e-6,
    "value_lr": 5e-6,
}
"""Defaults where all weights are trained, in both presets: the paper's learning rates."""


def _is_full(info: ValidationInfo) -> bool:
    return info.context is not None and info.context.get("training") == "full"


def as_training(stored: str) -> Training:
    """
    Raises:
        ValueError: another release knew another way.
    """
    if stored not in get_args(Training):
        raise ValueError(f"unknown training {stored!r}: it is 'lora' or 'full'")
    return cast(Training, stored)


def stored_max_staleness(settings: Mapping[str, Any]) -> int | None:
    """Of a policy's stored settings, even where another release wrote them and as a whole they are not valid here."""
    limit: int | None = settings.get("max_staleness", LearningSettings.model_fields["max_staleness"].default)
    return limit
