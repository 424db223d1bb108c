"""Amazon EC2, by boto3: the extra ``aws``.

Requests, error codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html and
.../errors-overview.html. The order's id is the launch's ClientToken, so that the same order is one machine; lists are
eventually consistent (``fleet.listed_after_s``).
"""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader

from fleet.errors import LaunchRefused, NoCapacity, OverQuota, ProviderError
from fleet.machine import FLEET_LABEL, POOL_LABEL, Order, ProviderMachine
from fleet.settings import Ec2Settings

NO_CAPACITY: Final = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "SpotMaxPriceTooLow",
        "Unsupported",  # this type is not offered in this zone
    }
)
OVER_QUOTA: Final = frozenset(
    {"InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "SpotInstanceCountExceeded", "VcpuLimitExceeded"}
)
# Refused as they are, but the machine may exist, or the next try may do.
UNCERTAIN: Final = frozenset({"IdempotentInstanceTerminated", "IdempotentParameterMismatch", "RequestLimitExceeded"})
PAID_STATES: Final = ("pending", "running", "shutting-down", "stopping", "stopped")
CALLS: Final = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1})  # the controller retries
USER_DATA_MAX_BYTES: Final = 16 * 1024
MODELS: Final = Loader()  # a cache: boto3's description of EC2 takes 0.3 s to read, for each pool


class Ec2Driver:
    """Launches an instance for each machine; a place is a zone and a type: "us-east-1a/g6e.xlarge"."""

    launches_once: ClassVar[bool] = True

    def __init__(self, settings: Ec2Settings, fleet_id: str, pool: str, *, spot: bool) -> None:
        """``spot``: launch at the market's price, to be ended with two minutes' notice."""
        self._settings = settings
        self._mine = {FLEET_LABEL: fleet_id, POOL_LABEL: pool}
        self._spot = spot
        core = botocore.session.Session()
        core.register_component("data_loader", MODELS)
        session = boto3.Session(
            botocore_session=core, profile_name=settings.aws_profile, region_name=settings.aws_region
        )
        self._ec2: Any = session.client("ec2", endpoint_url=settings.endpoint_url, config=CALLS)

    @property
    def places(self) -> Sequence[str]:
        """Each type in each zone: the best type's zones first."""
        return [f"{zone}/{kind}" for kind in self._settings.instance_types for zone in self._settings.subnets]

    async def launch(self, order: Order) -> str:
        """Run one instance, whose user data start the worker."""
        answer = await asyncio.to_thread(self._call, "run_instances", self._launch_arguments(order))
        [instance] = answer["Instances"]
        return str(instance["InstanceId"])

    def _launch_arguments(self, order: Order) -> dict[str, Any]:
        settings = self._settings
        zone, _, kind = order.place.partition("/")
        tags = [{"Key": key, "Value": value} for key, value in {**order.labels, "Name": order.machine_id}.items()]
        data = user_data(order.environment, settings.command)
        if len(data.encode()) > USER_DATA_MAX_BYTES:
            raise LaunchRefused(f"the user data exceed {USER_DATA_MAX_BYTES} bytes")
        arguments: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": order.machine_id,
            "InstanceType": kind,
            "SubnetId": settings.subnets[zone],
            "UserData": data,
            "TagSpecifications": [{"ResourceType": resource, "Tags": tags} for resource in ("instance", "volume")],
        }
        if settings.launch_template is not None:
            arguments["LaunchTemplate"] = {"LaunchTemplateName": settings.launch_template}
        if settings.image_id is not None:
            arguments["ImageId"] = settings.image_id
        if settings.security_groups:
            arguments["SecurityGroupIds"] = list(settings.security_groups)
        if settings.instance_profile is not None:
            arguments["IamInstanceProfile"] = {"Name": settings.instance_profile}
        if self._spot:
            market = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": market}
        return arguments

    async def machines(self) -> list[ProviderMachine]:
        """Return our instances, also stopped ones, whose disks are charged for."""
        return await asyncio.to_thread(self._list)

    async def end(self, provider_id: str) -> None:
        """Terminate an instance, if it is ours."""
        if any(one.provider_id == provider_id for one in await asyncio.to_thread(self._list, [provider_id])):
            await asyncio.to_thread(self._call, "terminate_instances", {"InstanceIds": [provider_id]})

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self._ec2.close)

    def _list(self, only: Sequence[str] = ()) -> list[ProviderMachine]:
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in self._mine.items()]
        filters.append({"Name": "instance-state-name", "Values": list(PAID_STATES)})
        if only:
            filters.append({"Name": "instance-id", "Values": list(only)})
        try:
            pages = list(self._ec2.get_paginator("describe_instances").paginate(Filters=filters))
        except (ClientError, BotoCoreError) as error:
            raise ProviderError(str(error)) from error
        return [
            _machine(instance)
            for page in pages
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises ProviderError, LaunchRefused, NoCapacity and OverQuota."""
        try:
            return dict(getattr(self._ec2, name)(**arguments))
        except ClientError as error:
            raise _failure(error) from error
        except BotoCoreError as error:
            raise ProviderError(str(error)) from error


def user_data(environment: Mapping[str, str], command: str) -> str:
    """Return the script that a machine runs when it starts: the worker's environment, then the command."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    return f"#!/bin/sh\nset -eu\n{exports}exec {command}\n"


def _machine(instance: Mapping[str, Any]) -> ProviderMachine:
    labels = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
    return ProviderMachine(instance["InstanceId"], labels, instance["State"]["Name"] == "shutting-down")


def _failure(error: ClientError) -> ProviderError | LaunchRefused:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in NO_CAPACITY:
        return NoCapacity(str(error))
    if code in OVER_QUOTA:
        return OverQuota(str(error))
    is_refused = 400 <= status < 500 and code not in UNCERTAIN
    return LaunchRefused(str(error)) if is_refused else ProviderError(str(error))
