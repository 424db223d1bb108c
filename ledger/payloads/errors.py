"""What goes wrong with payloads.

PayloadError
├── BadPayloadKey      a configured key cannot be used
├── PayloadKeyMissing  a payload is sealed with a key that is not configured
├── BrokenPayload      it was changed since it was sealed, or is not what it says
├── UnknownPayload     no payload of this request is kept
└── ExportError        a training set cannot be made; the message is for the operator
"""


class PayloadError(Exception):
    """An operation on payloads failed; the message is for the operator."""


class BadPayloadKey(PayloadError, ValueError):
    """A configured key cannot be used."""


class PayloadKeyMissing(PayloadError):
    """A payload is sealed with a key that is not configured."""


class BrokenPayload(PayloadError):
    """It was changed since it was sealed, or is not what it says."""


class UnknownPayload(PayloadError):
    """No payload of this request is kept."""


class ExportError(PayloadError):
    """A training set cannot be made."""
