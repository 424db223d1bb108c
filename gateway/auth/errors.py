"""What goes wrong with API keys.

ApiKeyError
├── InvalidKeyName    empty, too long or unprintable
├── DuplicateKeyName  an active key has this name
├── UnknownKey        no active key is meant by this reference
└── AmbiguousKey      several active keys are
PepperError           the pepper file is unusable
"""


class ApiKeyError(ValueError):
    """An operation on API keys was refused; the message is for the operator."""


class InvalidKeyName(ApiKeyError):
    """The name is empty, too long or unprintable."""


class DuplicateKeyName(ApiKeyError):
    """An active key has this name already."""


class UnknownKey(ApiKeyError):
    """No active key has this id, name or id prefix."""


class AmbiguousKey(ApiKeyError):
    """Several active keys have this id prefix."""


class PepperError(Exception):
    """The pepper file is unusable."""
