"""Errors of payloads.

PayloadError
├── BadPayloadKey      a configured key cannot be used
├── PayloadKeyMissing  a payload is sealed with a key that is not configured
├── BrokenPayload      a payload was changed since it was sealed, or does not match its encoding
│   └── TooLargeToOpen      it is larger than its reader takes; no more than that was decompressed
├── UnknownPayload     no payload of this request is stored
└── ExportError        a training set cannot be built; the message is for the operator
"""

from protocol.errors import ExpectedError


class PayloadError(ExpectedError):
    """An operation on payloads failed; the message is for the operator."""


class BadPayloadKey(PayloadError, ValueError):
    """A configured key cannot be used."""


class PayloadKeyMissing(PayloadError):
    """A payload is sealed with a key that is not configured."""


class BrokenPayload(PayloadError):
    """A payload was changed since it was sealed, or does not match its encoding."""


class TooLargeToOpen(BrokenPayload):
    """A payload is larger, decompressed, than its reader takes."""


class UnknownPayload(PayloadError):
    """No payload of this request is stored."""


class ExportError(PayloadError):
    """A training set cannot be built."""
