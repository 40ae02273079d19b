"""What an engine call can end in. The gateway and control decide what each means to their callers."""


class EngineError(Exception):
    """The engine answered something unusable, or broke off in the middle of an answer."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class EngineUnreachable(EngineError):
    """No connection: nothing was sampled, another replica can be tried."""


class AdapterNotLoaded(EngineError):
    """The engine does not serve this adapter (404 "does not exist"): nothing was sampled."""


class AdapterRejected(EngineError):
    """The engine refused to load an adapter; the reason is the engine's own."""


class WeightsRejected(EngineError):
    """The engine did not take other weights, or cannot swap them at all; the reason says what to do."""


class EngineOverloaded(EngineError):
    """The waiting queue is full (503): nothing was sampled, try again later."""


class EngineSlow(EngineError):
    """No answer in time. It may have read the request and be at work on it, or let it wait in its queue."""


class EngineBroke(EngineError):
    """The connection broke, or the stream ended in the middle. Before the first token another replica can be tried."""


class InvalidForEngine(EngineError):
    """The engine refused the request itself (400)."""


class PromptTooLong(InvalidForEngine):
    """The prompt leaves no room for a single token within the model's context."""
