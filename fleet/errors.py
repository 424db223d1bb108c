"""What can go wrong with a provider.

FleetError
├── ProviderError    the provider's answer is unknown: it may or may not have done it; ask again
└── LaunchRefused    it has surely not launched the machine
    ├── NoCapacity   no machine of this kind is to be had there now: try elsewhere
    └── OverQuota    the account may not have more of them
"""

from protocol.errors import ExpectedError


class FleetError(ExpectedError):
    """Base of the fleet's errors; the message says what a provider has answered."""


class ProviderError(FleetError):
    """The provider could not be asked, or its answer was lost."""


class LaunchRefused(FleetError):
    """The provider does not launch such a machine, whoever asks again: credentials, image, parameters."""


class NoCapacity(LaunchRefused):
    """The provider has no such machine at this place now."""


class OverQuota(LaunchRefused):
    """The account's quota at this place is used up."""
