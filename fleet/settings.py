"""``[fleet]`` and ``[pools.<name>.fleet]``: how many workers a pool may have, and who starts them."""

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from protocol.process import HeaderSecret, HttpUrlText, PositiveInt, PositiveSeconds, Settings

Seconds = Annotated[float, Field(ge=0, le=31_536_000)]
Workers = Annotated[int, Field(ge=0, le=10_000)]


class DriverSettings(Settings):
    """What every driver has."""


class StaticSettings(DriverSettings):
    """Machines that somebody else starts and ends: they are counted, never touched."""

    kind: Literal["static"] = "static"


class ProcessSettings(DriverSettings):
    """Worker processes on the fleet controller's own machine."""

    kind: Literal["process"]
    # Each place is a provider's zone as far as the policy goes; all of them are this machine.
    places: tuple[str, ...] = ("",)


class Ec2Settings(DriverSettings):
    """Amazon EC2, by boto3: the extra ``aws``."""

    kind: Literal["ec2"]
    aws_region: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    aws_profile: str | None = None  # of ~/.aws; None: what the environment says, or the machine's role
    launch_template: str | None = None  # by name: disks, network, and whatever else is not named here
    image_id: Annotated[str, Field(pattern="^ami-")] | None = None  # None: the launch template's
    instance_types: Annotated[tuple[str, ...], Field(min_length=1)]  # best first
    subnets: Annotated[dict[str, str], Field(min_length=1)]  # by availability zone
    security_groups: tuple[str, ...] = ()
    instance_profile: str | None = None
    command: str = "spillway worker"  # what the machine's user data start, with the worker's environment
    endpoint_url: HttpUrlText | None = None  # instead of AWS' own

    @model_validator(mode="after")
    def _an_image_is_needed(self) -> "Ec2Settings":
        if self.image_id is None and self.launch_template is None:
            raise ValueError("image_id: required without a launch_template")
        return self


class KubernetesSettings(DriverSettings):
    """A Deployment whose replicas are the pool's machines: the extra ``kubernetes``."""

    kind: Literal["kubernetes"]
    namespace: Annotated[str, Field(pattern="^[a-z0-9-]{1,63}$")] = "spillway"
    deployment: Annotated[str, Field(pattern="^[a-z0-9.-]{1,253}$")]
    context: str | None = None  # of the kubeconfig; None: its current one, or the pod's own service account


class RunPodSettings(DriverSettings):
    """Pods of RunPod, by its REST API, version 2, which has no spot pods."""

    kind: Literal["runpod"]
    api_key: HeaderSecret | None = None  # None: RUNPOD_API_KEY of the controller's environment
    gpu_types: Annotated[tuple[str, ...], Field(min_length=1)]  # as RunPod names them, best first
    image: str
    data_centers: tuple[str, ...] = ()  # such as "EU-RO-1", best first; none: anywhere
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    disk_gib: PositiveInt = 50
    url: HttpUrlText = "https://api.runpod.io/v2"


class SaladSettings(DriverSettings):
    """A container group of SaladCloud, by its REST API. Its replicas are the pool's machines."""

    kind: Literal["salad"]
    api_key: HeaderSecret | None = None  # None: SALAD_API_KEY of the controller's environment
    organization: str
    project: str
    container_group: str
    url: HttpUrlText = "https://api.salad.com/api/public"


class SkyPilotSettings(DriverSettings):
    """Clusters of one machine each, by SkyPilot in a process of its own."""

    kind: Literal["skypilot"]
    task: str  # the path of a task file
    python: str = "python3"  # of the environment in which SkyPilot is installed
    infra: tuple[str, ...] = ()  # such as "aws/us-east-1", best first; none: what the task file says


AnyDriverSettings = Annotated[
    StaticSettings
    | ProcessSettings
    | Ec2Settings
    | KubernetesSettings
    | RunPodSettings
    | SaladSettings
    | SkyPilotSettings,
    Field(discriminator="kind"),
]


Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: Final[tuple[Day, ...]] = get_args(Day)  # in the order of datetime.weekday()


class ScheduleSettings(Settings):
    """``[[pools.<name>.fleet.schedules]]``: a floor at certain hours; one that ends before it begins ends next day."""

    days: tuple[Day, ...] = DAYS  # on which it begins
    begin: dt.time
    end: dt.time
    min_workers: Workers
    time_zone: ZoneInfo = ZoneInfo("UTC")


class PoolFleetSettings(Settings):
    """``[pools.<name>.fleet]``: the pool's size is the fleet controller's business."""

    driver: AnyDriverSettings
    min_workers: Workers = 0
    max_workers: Workers = 8
    tokens_per_s: Annotated[float, Field(gt=0)] = 1000.0  # of one busy worker, until it has been measured
    start_s: PositiveSeconds = 180.0  # from the launch to the first heartbeat, likewise
    start_limit_s: PositiveSeconds = 1200.0  # a machine whose worker has not come by then is ended, and counted
    unavailable_s: PositiveSeconds = 120.0  # how long a place without capacity, or that has just lost machines, rests

    schedules: tuple[ScheduleSettings, ...] = ()

    @model_validator(mode="after")
    def _bounds_must_be_in_order(self) -> "PoolFleetSettings":
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers: {self.min_workers} is more than max_workers, {self.max_workers}")
        for schedule in self.schedules:
            if schedule.min_workers > self.max_workers:
                raise ValueError(
                    f"schedules: min_workers: {schedule.min_workers} is more than max_workers, {self.max_workers}"
                )
        return self


class FleetSettings(Settings):
    """``[fleet]``: the controller."""

    fleet_id: Annotated[str, Field(pattern="^[a-z0-9-]{1,40}$")] = "spillway"  # the label of this installation
    period_s: PositiveSeconds = 5.0  # between two decisions
    max_wait_s: PositiveSeconds = 10.0  # of interactive requests, which the size of the fleet is to keep
    idle_s: PositiveSeconds = 600.0  # how long the last worker of a model stays without any request
    cool_down_s: Seconds = 60.0  # how long what was needed is kept, at least; else as long as a machine takes to start
    # How long the answer to a launch may be missing before the machine is looked for in vain, and how long a provider's
    # list may leave out what it has launched: Amazon EC2 calls its own eventually consistent.
    launch_limit_s: Seconds = 120.0
    listed_after_s: Seconds = 60.0
    # Of `spillway nats credentials`: each machine gets credentials of its own, and is replaced before they expire.
    worker_keys: Path | None = None
    credentials_hours: Annotated[float, Field(ge=1, le=8760)] = 24.0
    keep_decisions_days: PositiveInt = 90


class ManagedPool(Settings):
    """A pool whose size the controller decides."""

    tier: str
    queues: frozenset[str]  # subjects.queue_of its models
    usd_per_hour: float
    drain_s: float
    fleet: PoolFleetSettings


class ControllerSettings(Settings):
    """Everything that one controller process needs."""

    controller_id: str
    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # our user at the queue server; None: what the URLs say
    nats_ca_file: Path | None = None  # who vouches for the queue server's certificate; None: the usual authorities
    database_url: str
    data_dir: Path
    fleet: FleetSettings
    pools: Mapping[str, ManagedPool]
    trusted_pools: frozenset[str] = frozenset()  # also of those that somebody else sizes
    worker_commands: Mapping[str, tuple[str, ...]]  # by pool: what starts one of its workers on this machine
    worker_environment: Mapping[str, str]  # how a worker reaches the queue
    local_environment: Mapping[str, str] = {}  # what one on this machine needs besides: paths
    hosted_usd_per_token: Mapping[str, float] = {}  # of models that a hosted API serves, too
