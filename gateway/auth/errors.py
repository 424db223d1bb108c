"""What goes wrong with API keys.

ApiKeyError
├── InvalidKeyName    empty, too long or unprintable
├── DuplicateKeyName  an active key has this name
├── UnknownKey        no active key is meant by this reference
└── AmbiguousKey      several active keys are
PepperError           the pepper file is unusable
LoginError            somebody cannot log in; the message is for the person at the browser
├── WrongPassword
├── TooManyLogins     too many wrong passwords from there
├── BadPassword       it cannot be a new password
└── OidcError         the issuer's word is not to be trusted, or cannot be had
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


class LoginError(Exception):
    """Somebody cannot log in; the message is for the person at the browser."""


class WrongPassword(LoginError):
    """Wrong user name or password."""


class TooManyLogins(LoginError):
    """Too many wrong passwords; try again in a minute."""


class BadPassword(LoginError):
    """It is too short or too long to become a password."""


class OidcError(LoginError):
    """The issuer's word is not to be trusted, or cannot be had."""
