"""Errors of keys and principals.

PrincipalError             rejected; the message is for the operator
├── InvalidField           a field cannot have this value
│   └── InvalidName        empty, too long or unprintable
├── NameTaken              an active object has this name
├── ChangedMeanwhile       the object was changed after the form was opened
├── NotAllowed             the person's role does not allow it
└── NotFound               nothing matches this reference
    ├── UnknownKey
    ├── AmbiguousKey       several active keys match
    ├── UnknownTeam
    ├── UnknownOrganisation
    └── UnknownSession
PepperError                the pepper file is unusable
LoginError                 a login failed; the message is for the user
├── WrongPassword
├── TooManyLogins          too many wrong passwords from this address
├── BadPassword            not acceptable as a new password
└── OidcError              the issuer's answer is invalid or missing
    └── OidcNotAllowed     the issuer knows the user, but the settings do not allow the login
"""

from protocol.errors import ExpectedError


class PrincipalError(ExpectedError, ValueError):
    """An operation on keys, teams or organizations was rejected; the message is for the operator."""


class InvalidField(PrincipalError):
    """A field cannot have this value; the message names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidName(InvalidField):
    """The name is empty, too long or unprintable."""


class NameTaken(PrincipalError):
    """Another object already has this name."""


class ChangedMeanwhile(PrincipalError):
    """The object was changed after the form was opened."""


class NotAllowed(PrincipalError):
    """The person's role does not allow the action; the message is for the person."""


class NotFound(PrincipalError):
    """Nothing matches this reference."""


class UnknownKey(NotFound):
    """No active key has this id, name or id prefix."""


class AmbiguousKey(NotFound):
    """Several active keys have this id prefix."""


class UnknownTeam(NotFound):
    """No team has this id or name."""


class UnknownOrganisation(NotFound):
    """No organization has this id or name."""


class UnknownSession(NotFound):
    """No running session has this id."""


class PepperError(ExpectedError):
    """The pepper file is unusable."""


class LoginError(ExpectedError):
    """A login failed; the message is for the user."""


class WrongPassword(LoginError):
    """Wrong user name or password."""


class TooManyLogins(LoginError):
    """Too many wrong passwords; try again in a minute."""


class BadPassword(LoginError):
    """The password is too short or too long."""


class OidcError(LoginError):
    """The issuer's answer is invalid or missing."""


class OidcNotAllowed(OidcError):
    """The issuer knows this user, but the settings do not allow the login."""

    def __init__(self, message: str, user: str) -> None:
        super().__init__(message)
        self.user = user
