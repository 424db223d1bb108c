"""The driver for a pool's settings. Packages of extras are imported on use."""

from collections.abc import Sequence
from pathlib import Path

from fleet.drivers.base import Driver
from fleet.drivers.process import ProcessDriver
from fleet.drivers.replicas import ReplicaDriver
from fleet.drivers.runpod import RunPodDriver
from fleet.drivers.salad import SaladApi
from fleet.drivers.skypilot import SkyPilotDriver
from fleet.drivers.static import StaticDriver
from fleet.errors import FleetError
from fleet.machine import FLEET_LABEL, POOL_LABEL
from fleet.settings import (
    AnyDriverSettings,
    Ec2Settings,
    KubernetesSettings,
    ProcessSettings,
    RunPodSettings,
    SaladSettings,
    SkyPilotSettings,
    StaticSettings,
)
from protocol.distribution import needing

SPOT_TIER = "spot"


def create(  # noqa: PLR0911 - one for each kind
    settings: AnyDriverSettings,
    *,
    fleet_id: str,
    pool: str,
    tier: str,
    worker_command: Sequence[str],
    log_dir: Path,
) -> Driver:
    """Create a pool's driver. Raises FleetError if a requirement is missing.

    ``worker_command``: the command that starts a worker on this machine.
    """
    spot = tier == SPOT_TIER
    common = {FLEET_LABEL: fleet_id, POOL_LABEL: pool}
    match settings:
        case StaticSettings():
            return StaticDriver()
        case ProcessSettings():
            return ProcessDriver(fleet_id, pool, settings.places, log_dir=log_dir, command=worker_command)
        case Ec2Settings():
            with needing("aws", key="driver.kind", error=FleetError):
                from fleet.drivers.ec2 import Ec2Driver  # noqa: PLC0415 - brings boto3
            return Ec2Driver(settings, fleet_id, pool, spot=spot)
        case RunPodSettings():
            if spot:
                raise FleetError("tier: RunPod's API has no spot pods. Use the driver skypilot instead")
            return RunPodDriver(settings, fleet_id, pool)
        case SkyPilotSettings():
            return SkyPilotDriver(settings, fleet_id, pool, spot=spot)
        case SaladSettings():
            return ReplicaDriver(SaladApi(settings), common)
        case KubernetesSettings():
            with needing("kubernetes", key="driver.kind", error=FleetError):
                from fleet.drivers.kubernetes import KubernetesApi  # noqa: PLC0415 - brings lightkube
            return ReplicaDriver(KubernetesApi(settings), common)
