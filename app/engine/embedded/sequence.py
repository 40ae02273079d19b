"""One request as the engine sees it: its tokens, how it samples, and what KV it holds."""

from dataclasses import dataclass, field

import numpy as np

from app.engine.embedded.adapters import Adapter
from app.engine.embedded.detokenizer import Detokenizer


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int = 0
    """How many of the most likely tokens to report beside the sampled one."""


@dataclass(frozen=True)
class SampledToken:
    id: int
    logprob: float
    top: dict[int, float]
    """The most likely tokens and their log-probs, most likely first; empty if none were asked for."""


@dataclass(frozen=True)
class Output:
    """What a step added to a request. finish_reason: stop, length, abort (nobody listens), missing (its adapter was
    unloaded before it started), error (the model produced no numbers)."""

    request_id: str
    token: SampledToken | None
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class WeightSpan:
    """Completion tokens start ... end - 1 were sampled by the weights with this label."""

    version: str
    start: int
    end: int


@dataclass(eq=False)
class Sequence:
    request_id: str
    adapter: Adapter | None
    """None: the base model."""
    prompt_ids: list[int]
    sampling: SamplingParams
    detokenizer: Detokenizer
    random: np.random.Generator = field(init=False)
    """The request's own: what it samples does not depend on its neighbours."""
    token_ids: list[int] = field(init=False)
    """Prompt and completion."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV lies in the blocks (or will, after the running pass)."""
    named: int = 0
    """Leading blocks that others can share."""
    parent: int = 0
    """Content id of the last named block, or the root of the adapter."""
    started: bool = False
    weight_spans: list[WeightSpan] = field(default_factory=list)
    """Whose the completion's tokens are, in order and without a gap."""

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.random = np.random.Generator(np.random.SFC64(None if seed is None else seed % 2**64))
        self.token_ids = list(self.prompt_ids)
        self.parent = self.root

    @property
    def root(self) -> int:
        """Where the chain of shared contents starts; content ids are positive, so roots are not."""
        return 0 if self.adapter is None else -self.adapter.id

    def append(self, token_id: int, weight_version: str) -> None:
        """A sampled token, and the label of the weights that sampled it."""
        at = self.completion_tokens
        self.token_ids.append(token_id)
        if self.weight_spans and self.weight_spans[-1].version == weight_version:
            self.weight_spans[-1].end = at + 1
        else:
            self.weight_spans.append(WeightSpan(weight_version, at, at + 1))

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)
