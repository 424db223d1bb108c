"""deploy/terraform/aws: valid, and what it makes is what the driver of EC2 and the gateways are configured with.

Terraform and its provider for AWS are real, AWS is moto's server. Where Terraform is not installed, or cannot get the
provider, this is skipped; `TF_CLI_ARGS_init=-plugin-dir=…` names a folder that has it.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from fleet.drivers.ec2 import Ec2Driver
from fleet.machine import FLEET_LABEL, Order, labels_of, new_machine_id
from fleet.settings import Ec2Settings, FleetSettings
from gateway.settings import S3Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/deploy/aws.md"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
LIMIT_S = 300
SETTINGS = """
provider "aws" {
  region                      = "us-east-1"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  s3_use_path_style           = true
  endpoints {
    ec2 = "URL"
    iam = "URL"
    s3  = "URL"
    sts = "URL"
  }
}

"""

pytestmark = pytest.mark.slow


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("terraform")
    if program is None:
        pytest.skip("terraform is not installed")
    environment = {**os.environ, **CREDENTIALS, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    command = [program, f"-chdir={folder}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def done(folder: Path, *arguments: str) -> str:
    result = terraform(folder, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_is_formatted() -> None:
    done(ROOT, "fmt", "-check", "-diff", "-recursive", "deploy/terraform")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    from moto.server import ThreadedMotoServer  # takes a second of each process that collects tests

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def applied(folder: Path, url: str) -> dict[str, Any]:
    """Everything that the module makes, and says of it."""
    [page] = re.findall(r"^```terraform\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    provider, rest = page.split("\n\n", maxsplit=1)
    assert provider.startswith('provider "aws"')
    text = SETTINGS.replace("URL", url) + rest.replace("../spillway/deploy", str(ROOT / "deploy"))
    (folder / "main.tf").write_text(text)
    ready = terraform(folder, "init", "-input=false", "-no-color")
    if ready.returncode != 0 and "hashicorp/aws" in ready.stderr:
        pytest.skip("terraform cannot get its provider for AWS")
    assert ready.returncode == 0, ready.stderr
    done(folder, "validate", "-no-color")
    done(folder, "apply", "-auto-approve", "-input=false", "-no-color")
    again = terraform(folder, "plan", "-detailed-exitcode", "-input=false", "-no-color")
    assert again.returncode == 0, again.stdout  # 2: it would change something again
    return json.loads(done(folder, "output", "-json"))["spillway"]["value"]  # type: ignore[no-any-return]


async def test_the_driver_launches_from_what_it_makes(tmp_path: Path, aws: str) -> None:
    said = applied(tmp_path, aws)
    settings = Ec2Settings.model_validate(
        {"kind": "ec2", "instance_types": ["g6.xlarge"], "endpoint_url": aws, **said["driver"]}
    )
    assert S3Settings.model_validate(said["files"]).bucket.startswith("spillway-files-")
    fleet_id = FleetSettings().fleet_id
    driver = Ec2Driver(settings, fleet_id, "spot", spot=True)
    assert driver.places == ["us-east-1a/g6.xlarge", "us-east-1b/g6.xlarge", "us-east-1c/g6.xlarge"]
    machine_id = new_machine_id()
    labels = labels_of(fleet_id, "spot", machine_id)
    launched = await driver.launch(Order(machine_id, "spot", driver.places[1], labels, {}))
    ec2 = boto3.client("ec2", endpoint_url=aws, region_name="us-east-1")
    [instance] = ec2.describe_instances(InstanceIds=[launched])["Reservations"][0]["Instances"]
    assert instance["ImageId"] == "ami-0123456789abcdef0"
    assert instance["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert {group["GroupName"] for group in instance["SecurityGroups"]} == {"spillway-workers"}
    [group] = ec2.describe_security_groups(GroupNames=["spillway-workers"])["SecurityGroups"]
    assert group["IpPermissions"] == []  # nothing comes in
    # The role may end what carries the driver's label, and nothing else.
    policy = boto3.client("iam", endpoint_url=aws, region_name="us-east-1").get_role_policy(
        RoleName="spillway-home", PolicyName="fleet-and-files"
    )
    allowed = {str(one["Action"]): one for one in policy["PolicyDocument"]["Statement"]}
    ends = allowed["ec2:TerminateInstances"]["Condition"]["StringEquals"]
    assert ends == {f"ec2:ResourceTag/{FLEET_LABEL}": labels[FLEET_LABEL]}
    await driver.end(launched)
    await driver.close()
