"""The engine's exceptions.

EngineError
├── UnsupportedModel    the model cannot run here at all; raised while loading
├── ConfigError         a field of EngineConfig cannot be met; raised while loading
├── RequestRejected     one request can never be served; raised by add_request
│   └── GrammarTooComplex   its grammar exceeds a request's cost limit; raised at any time
└── EngineCorrupted     the engine's bookkeeping is inconsistent; the process should end
"""


class EngineError(Exception):
    """The engine cannot do what was requested."""


class UnsupportedModel(EngineError):
    """The model's architecture cannot run in this engine."""


class ConfigError(EngineError):
    """A field of the engine's configuration cannot be met."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestRejected(EngineError):
    """The request can never be served; `field` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class GrammarTooComplex(RequestRejected):
    """The request's grammar costs more to compile or to follow than one request may spend, on any worker."""


class EngineCorrupted(EngineError):
    """The block pool's bookkeeping is inconsistent."""
