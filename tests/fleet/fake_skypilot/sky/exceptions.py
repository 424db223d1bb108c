"""The exceptions of skypilot 0.14.1 that the runner knows by name."""


class ResourcesUnavailableError(Exception):
    failover_history: list[Exception] = []  # noqa: RUF012

    def with_failover_history(self, history: list[Exception]) -> "ResourcesUnavailableError":
        self.failover_history = history
        return self


class ClusterDoesNotExist(ValueError):
    pass


class ClusterOwnerIdentityMismatchError(Exception):
    pass


class InvalidClusterNameError(Exception):
    pass


class InvalidCloudConfigs(Exception):
    pass


class InvalidCloudCredentials(Exception):
    pass


class NoCloudAccessError(Exception):
    pass


class NotSupportedError(Exception):
    pass


class PermissionDeniedError(Exception):
    pass


class ResourcesMismatchError(Exception):
    pass


class UserRequestRejectedByPolicy(Exception):
    pass
