"""Errors of providers.

FleetError
├── ProviderError    the outcome is unknown: the provider may or may not have acted; list machines again
└── LaunchRefused    the machine was not launched
    ├── NoCapacity   no capacity at this place now: try another place
    └── OverQuota    the account's quota is used up
"""

from protocol.errors import ExpectedError


class FleetError(ExpectedError):
    """Base of the fleet's errors. The message contains the provider's answer."""


class ProviderError(FleetError):
    """The provider could not be reached, or its answer was lost."""


class LaunchRefused(FleetError):
    """The provider will not launch this machine, even on a retry: credentials, image, parameters."""


class NoCapacity(LaunchRefused):
    """The provider has no capacity for this machine at this place now."""


class OverQuota(LaunchRefused):
    """The account's quota at this place is used up."""
