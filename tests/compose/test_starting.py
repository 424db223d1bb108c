"""Where no Docker Engine answers, scripts/start-docker.sh starts one, or says why not."""

import subprocess
from pathlib import Path

import pytest

from tests.compose.docker import STARTER, STARTER_FOLDER_VARIABLE, NoDocker, call, running_docker

SILENT = "exit 1"
ANSWERING = "test $1 = compose && echo 2.26.1 || echo 26.1.5"
STARTING = f"""\
echo "$*" >>"$(dirname "$0")/calls"
test $1 = --stop && exit
mkdir -p $1/bin
printf '#!/bin/sh\\n{ANSWERING}\\n' >$1/bin/docker
chmod +x $1/bin/docker"""


def program(path: Path, script: str) -> Path:
    """Write a program of the shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where an engine would lie, on a machine whose `docker` reaches no engine."""
    program(tmp_path / "bin/docker", SILENT)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv(STARTER_FOLDER_VARIABLE, str(tmp_path / "engine"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return tmp_path / "engine"


def test_an_engine_is_started_and_stopped(folder: Path, tmp_path: Path) -> None:
    with running_docker(program(tmp_path / "starter", STARTING)) as versions:
        assert versions == ("26.1.5", "2.26.1")
        assert (tmp_path / "calls").read_text() == f"{folder}\n"
    assert (tmp_path / "calls").read_text() == f"{folder}\n--stop {folder}\n"


def test_it_is_stopped_after_a_failure(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError), running_docker(program(tmp_path / "starter", STARTING)):
        raise AssertionError
    assert (tmp_path / "calls").read_text().splitlines()[-1] == f"--stop {folder}"


def test_an_engine_that_answers_is_used(folder: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin/docker", ANSWERING)
    with running_docker(program(tmp_path / "starter", STARTING)) as versions:
        assert versions == ("26.1.5", "2.26.1")
    assert not (tmp_path / "calls").exists()


def test_no_engine_is_started_beside_the_one_of_docker_host(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with (
        pytest.raises(NoDocker, match=r"No Docker Engine answers at tcp://192\.0\.2\.1:2375"),
        running_docker(program(tmp_path / "starter", STARTING)),
    ):
        pass
    assert not (tmp_path / "calls").exists()


def test_without_root_it_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin/id", "echo 1000")
    with pytest.raises(NoDocker, match="Run this as root.*\n.*\n- Install them: "), running_docker():
        pass
    assert not folder.exists()


def test_the_script_explains_itself() -> None:
    text = call(str(STARTER), "--help")
    assert "--stop [FOLDER]" in text
    assert "$" not in text, "a variable of the script"
    wrong = subprocess.run([STARTER, "--stpo"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, text)


def test_nothing_to_stop_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run([STARTER, "--stop", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"No engine of {tmp_path} runs.\n")
