"""Process settings, read from the environment. What a policy learns with is in app/policies/learning.py."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_POLICY = "default"


class Settings(BaseSettings):
    """One instance per process. Every field is an environment variable `EVERGREEN_<FIELD>` unless it says otherwise."""

    model_config = SettingsConfigDict(env_prefix="EVERGREEN_", extra="ignore", frozen=True)

    home: Path = Path("var")
    """State of the embedded default: database, broker, artifacts, logs, admin.key."""
    host: str = "127.0.0.1"
    port: int = 8000
    model: str = DEFAULT_MODEL
    """Base model of the default policy: the packaged default, a local directory, or a hub name."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of base weights, engine and learner alike; auto = that of the model's files, which for the packaged default
    is what is faster where it was prepared."""
    preset: Literal["online", "paper"] = "online"
    """Learning settings that the default policy is created with."""
    training: Literal["lora", "full"] = "lora"
    """What of the default policy is trained: adapters on a frozen base, or all weights. Fixed when it is created."""

    database_url_setting: str | None = Field(
        None, validation_alias=AliasChoices("DATABASE_URL", "EVERGREEN_DATABASE_URL")
    )
    broker_url: str = Field("filesystem://", validation_alias=AliasChoices("BROKER_URL", "EVERGREEN_BROKER_URL"))
    sqlite_synchronous: Literal["NORMAL", "FULL"] = "NORMAL"
    """NORMAL survives kill -9 of any process; FULL survives power loss too, and costs one fsync a commit."""

    engine_urls: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated vLLM servers. Empty: `up` starts the embedded engine."""
    engine_port: int = 8101
    """Port of the embedded engine."""
    request_timeout_s: float = 600.0
    """An interaction that runs longer is aborted."""
    idle_with_reward_s: float = 60.0
    """An open rollout that has a reward and sees no call or reward for this long becomes ready."""
    idle_without_reward_s: float = 1800.0
    """An open rollout without any reward that idles this long is skipped(no_reward)."""

    bodies_kept_days: float = Field(30.0, ge=0)
    """Request and response bytes older than this are dropped; tokens, rewards and what became of them stay."""

    @field_validator("engine_urls", mode="before")
    @classmethod
    def _split_urls(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(url.strip().rstrip("/") for url in value.split(",") if url.strip())
        return value

    @property
    def database_url(self) -> str:
        return self.database_url_setting or f"sqlite:///{self.home.resolve() / 'evergreen.db'}"

    @property
    def replica_urls(self) -> tuple[str, ...]:
        return self.engine_urls or (f"http://127.0.0.1:{self.engine_port}",)

    @property
    def models_dir(self) -> Path:
        return self.home.resolve() / "models"

    @property
    def artifacts_dir(self) -> Path:
        return self.home.resolve() / "artifacts"

    @property
    def broker_dir(self) -> Path:
        return self.home.resolve() / "broker"

    @property
    def logs_dir(self) -> Path:
        return self.home.resolve() / "logs"

    @property
    def admin_key_path(self) -> Path:
        return self.home.resolve() / "admin.key"


@lru_cache
def get_settings() -> Settings:
    return Settings()
