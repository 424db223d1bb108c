"""Contents of the wheel: one name for site-packages, and all that an installed Spillway reads."""

import zipfile
from pathlib import Path

import pytest

from tests.unit.deploy.description import ROOMS
from tests.wheel import build_wheel, tracked_files

pytestmark = pytest.mark.slow
DEMO_MODEL = "models/spillway-demo"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if not name.endswith("/")}


def test_its_metadata_can_be_read_by_the_release_s_twine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        metadata = opened.read("spillway_gateway-0.2.0.dist-info/METADATA").decode()
    assert metadata.startswith("Metadata-Version: 2.4\nName: spillway-gateway\n")


def test_it_puts_one_name_into_site_packages(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"spillway", "spillway_gateway-0.2.0.dist-info"}


def test_it_holds_every_file_of_the_rooms_and_the_demo_model_and_nothing_else(names: set[str]) -> None:
    beside = {
        f"spillway/_roots/{name}" for name in tracked_files(*ROOMS, DEMO_MODEL) if not name.startswith("spillway/")
    }
    assert {name for name in names if name.startswith("spillway/")} == {*tracked_files("spillway"), *beside}


@pytest.mark.parametrize(
    "file",
    [
        f"{DEMO_MODEL}/model.safetensors",
        "migrations/alembic.ini",
        "migrations/env.py",
        "migrations/versions/0017_baseline.py",
        "console/dashboard/static/dashboard.css",
        "console/dashboard/templates/base.html",
        "console/login/templates/login.html",
        "engine/cpu/attention.c",
        "gateway/tokenizing/renderer.py",
    ],
)
def test_among_them_are(names: set[str], file: str) -> None:
    assert f"spillway/_roots/{file}" in names
