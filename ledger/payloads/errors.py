"""Errors of payloads.

PayloadError
├── BadPayloadKey      a configured key cannot be used
├── PayloadKeyMissing  a payload is sealed with a key that is not configured
├── BrokenPayload      a payload was changed after it was sealed, or does not match its encoding
│   └── TooLargeToOpen      a payload exceeds the reader's limit; decompression stopped at the limit
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
    """A payload was changed after it was sealed, or does not match its encoding."""


class TooLargeToOpen(BrokenPayload):
    """A decompressed payload exceeds its reader's limit."""


class UnknownPayload(PayloadError):
    """No payload of this request is stored."""


class ExportError(PayloadError):
    """A training set cannot be built."""
