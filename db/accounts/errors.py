"""Errors of keys and principals.

PrincipalError             refused; the message is for the operator
├── InvalidField           a field cannot have this value
│   └── InvalidName        empty, too long or unprintable
├── NameTaken              an active one has this name
├── ChangedMeanwhile       it was changed since the form was opened
├── NotAllowed             the role of the person does not allow it
└── NotFound               nothing is meant by this reference
    ├── UnknownKey
    ├── AmbiguousKey       several active keys are
    ├── UnknownTeam
    ├── UnknownOrganisation
    └── UnknownSession
PepperError                the pepper file is unusable
LoginError                 somebody cannot log in; the message is for the person at the browser
├── WrongPassword
├── TooManyLogins          too many wrong passwords from there
├── BadPassword            it cannot be a new password
└── OidcError              the issuer's word is not to be trusted, or cannot be had
    └── OidcNotAllowed     the issuer knows the user, and the settings do not let them in
"""

from protocol.errors import ExpectedError


class PrincipalError(ExpectedError, ValueError):
    """An operation on keys, teams or organisations was refused; the message is for the operator."""


class InvalidField(PrincipalError):
    """A field cannot have this value; the message names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidName(InvalidField):
    """The name is empty, too long or unprintable."""


class NameTaken(PrincipalError):
    """Another one has this name already."""


class ChangedMeanwhile(PrincipalError):
    """Somebody else has changed it since the form was opened."""


class NotAllowed(PrincipalError):
    """The role of this person does not allow it; the message is for the person."""


class NotFound(PrincipalError):
    """Nothing is meant by this reference."""


class UnknownKey(NotFound):
    """No active key has this id, name or id prefix."""


class AmbiguousKey(NotFound):
    """Several active keys have this id prefix."""


class UnknownTeam(NotFound):
    """No team has this id or name."""


class UnknownOrganisation(NotFound):
    """No organisation has this id or name."""


class UnknownSession(NotFound):
    """No running session has this id."""


class PepperError(ExpectedError):
    """The pepper file is unusable."""


class LoginError(ExpectedError):
    """Somebody cannot log in; the message is for the person at the browser."""


class WrongPassword(LoginError):
    """Wrong user name or password."""


class TooManyLogins(LoginError):
    """Too many wrong passwords; try again in a minute."""


class BadPassword(LoginError):
    """Raised for a password that is too short or too long."""


class OidcError(LoginError):
    """The issuer's word is not to be trusted, or cannot be had."""


class OidcNotAllowed(OidcError):
    """The issuer knows this user, and the settings do not let them in."""

    def __init__(self, message: str, user: str) -> None:
        super().__init__(message)
        self.user = user
