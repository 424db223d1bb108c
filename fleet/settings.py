"""``[fleet]`` and ``[pools.<name>.fleet]``: the bounds of each pool's size, and the drivers that start machines."""

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
    """The base of all drivers' settings."""


class StaticSettings(DriverSettings):
    """Machines that the controller does not manage: they are counted, but never started or ended."""

    kind: Literal["static"] = "static"


class ProcessSettings(DriverSettings):
    """Worker processes on the fleet controller's own machine."""

    kind: Literal["process"]
    # Names of simulated zones, for tests of the policy. All of them are this machine.
    places: tuple[str, ...] = ("",)


class Ec2Settings(DriverSettings):
    """Amazon EC2. Needs the extra ``aws`` (boto3)."""

    kind: Literal["ec2"]
    aws_region: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    aws_profile: str | None = None  # profile of ~/.aws; None: environment variables or the machine's role
    launch_template: str | None = None  # name of the template for disks, network and all settings that have no key here
    image_id: Annotated[str, Field(pattern="^ami-")] | None = None  # None: the launch template's
    instance_types: Annotated[tuple[str, ...], Field(min_length=1)]  # best first
    subnets: Annotated[dict[str, str], Field(min_length=1)]  # subnet ids by availability zone
    security_groups: tuple[str, ...] = ()
    instance_profile: str | None = None
    command: str = "spillway worker"  # command that the user data runs, with the worker's environment
    endpoint_url: HttpUrlText | None = None  # instead of AWS's endpoint

    @model_validator(mode="after")
    def _an_image_is_needed(self) -> "Ec2Settings":
        if self.image_id is None and self.launch_template is None:
            raise ValueError("image_id: required without a launch_template")
        return self


class KubernetesSettings(DriverSettings):
    """A Deployment whose replicas are the pool's machines. Needs the extra ``kubernetes``."""

    kind: Literal["kubernetes"]
    namespace: Annotated[str, Field(pattern="^[a-z0-9-]{1,63}$")] = "spillway"
    deployment: Annotated[str, Field(pattern="^[a-z0-9.-]{1,253}$")]
    context: str | None = None  # context of the kubeconfig; None: the current one, or the pod's service account


class RunPodSettings(DriverSettings):
    """RunPod pods, by version 2 of its REST API, which has no spot pods."""

    kind: Literal["runpod"]
    api_key: HeaderSecret | None = None  # None: the controller's variable RUNPOD_API_KEY
    gpu_types: Annotated[tuple[str, ...], Field(min_length=1)]  # RunPod's names, in order of preference
    image: str
    data_centers: tuple[str, ...] = ()  # such as "EU-RO-1", in order of preference; empty: any
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    disk_gib: PositiveInt = 50
    url: HttpUrlText = "https://api.runpod.io/v2"


class SaladSettings(DriverSettings):
    """A SaladCloud container group, by its REST API. Its replicas are the pool's machines."""

    kind: Literal["salad"]
    api_key: HeaderSecret | None = None  # None: the controller's variable SALAD_API_KEY
    organization: str
    project: str
    container_group: str
    url: HttpUrlText = "https://api.salad.com/api/public"


class SkyPilotSettings(DriverSettings):
    """Clusters of one machine each, launched by SkyPilot in a separate process."""

    kind: Literal["skypilot"]
    task: str  # path of a SkyPilot task file
    python: str = "python3"  # Python of the environment in which SkyPilot is installed
    infra: tuple[str, ...] = ()  # such as "aws/us-east-1", in order of preference; empty: as in the task file


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
    """``[[pools.<name>.fleet.schedules]]``: a minimum size at certain hours, ending the next day if end < begin."""

    days: tuple[Day, ...] = DAYS  # days on which the schedule begins
    begin: dt.time
    end: dt.time
    min_workers: Workers
    time_zone: ZoneInfo = ZoneInfo("UTC")


class PoolFleetSettings(Settings):
    """``[pools.<name>.fleet]``: the fleet controller scales this pool."""

    driver: AnyDriverSettings
    min_workers: Workers = 0
    max_workers: Workers = 8
    tokens_per_s: Annotated[float, Field(gt=0)] = 1000.0  # throughput of one busy worker, until it has been measured
    start_s: PositiveSeconds = 180.0  # time from launch to first heartbeat, until it has been measured
    start_limit_s: PositiveSeconds = 1200.0  # a machine without a heartbeat by then is ended and counts as failed
    unavailable_s: PositiveSeconds = 120.0  # how long a place is avoided after it had no capacity or lost machines

    schedules: tuple[ScheduleSettings, ...] = ()

    @model_validator(mode="after")
    def _bounds_must_be_in_order(self) -> "PoolFleetSettings":
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers: {self.min_workers} is above max_workers, {self.max_workers}")
        for schedule in self.schedules:
            if schedule.min_workers > self.max_workers:
                raise ValueError(
                    f"schedules: min_workers: {schedule.min_workers} is above max_workers, {self.max_workers}"
                )
        return self


class FleetSettings(Settings):
    """``[fleet]``: the fleet controller."""

    fleet_id: Annotated[str, Field(pattern="^[a-z0-9-]{1,40}$")] = "spillway"  # label of this installation at providers
    period_s: PositiveSeconds = 5.0  # period of the decisions
    max_wait_s: PositiveSeconds = 10.0  # target for the queue wait of interactive requests
    idle_s: PositiveSeconds = 600.0  # how long the last worker of a model is kept without requests
    cool_down_s: Seconds = 60.0  # minimum time before a pool shrinks; at least as long as a machine takes to start
    # launch_limit_s: how long a launch without an answer is looked for in the provider's list. listed_after_s: how long
    # the list may omit a launched machine: lists such as Amazon EC2's are eventually consistent.
    launch_limit_s: Seconds = 120.0
    listed_after_s: Seconds = 60.0
    # worker-keys.json of `spillway nats credentials`. With it, each machine gets its own credentials. They expire after
    # credentials_hours, and the machine is replaced before that.
    worker_keys: Path | None = None
    credentials_hours: Annotated[float, Field(ge=1, le=8760)] = 24.0
    keep_decisions_days: PositiveInt = 90


class ManagedPool(Settings):
    """A pool that the controller scales."""

    tier: str
    queues: frozenset[str]  # subjects.queue_of its models
    usd_per_hour: float
    drain_s: float
    fleet: PoolFleetSettings


class ControllerSettings(Settings):
    """Everything that one controller process needs."""

    controller_id: str
    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # credentials file for the queue server; None: user and password of the URLs
    nats_ca_file: Path | None = None  # CA of the queue server's certificate; None: the system's CAs
    database_url: str
    data_dir: Path
    fleet: FleetSettings
    pools: Mapping[str, ManagedPool]
    trusted_pools: frozenset[str] = frozenset()  # including pools that the controller does not scale
    worker_commands: Mapping[str, tuple[str, ...]]  # by pool: command that starts a worker on this machine
    worker_environment: Mapping[str, str]  # variables with which a worker reaches the queue
    local_environment: Mapping[str, str] = {}  # additional variables (paths) for workers on this machine
    hosted_usd_per_token: Mapping[str, float] = {}  # by model, for models that a hosted API also serves
