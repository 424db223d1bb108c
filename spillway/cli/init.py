"""``spillway init``: write a configuration file from a template."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from spillway.cli.context import fail, out
from spillway.config import DEFAULT_CONFIG_NAME, DEMO_MODEL_PATH

TEMPLATES: Final = Path(__file__).parents[1] / "templates"


class Template(StrEnum):
    """A template: the name of a file in ``TEMPLATES``."""

    DEMO = "demo"
    VLLM = "vllm"
    TWO_CLOUDS = "two-clouds"


NEXT: Final = {
    Template.DEMO: "next: spillway up",
    Template.VLLM: "next: set pools.vllm.engine.tokenizer and url, then: spillway up",
    Template.TWO_CLOUDS: "next: edit the URLs, models and prices, then: spillway config check",
}


def init(
    template: Annotated[
        Template,
        typer.Argument(
            help="demo: the demo model on this machine. vllm: a vLLM server. two-clouds: spot pools with overflow to "
            "a hosted API."
        ),
    ] = Template.DEMO,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write. An existing file is never overwritten.")
    ] = Path(DEFAULT_CONFIG_NAME),
) -> None:
    """Write a configuration file from a template: demo, vllm or two-clouds. Overwrites nothing."""
    text = (TEMPLATES / f"{template}.toml").read_text().replace("{demo_model}", str(DEMO_MODEL_PATH))
    try:
        with output.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise fail(f"{output} already exists. Name another file with --output") from error
    except OSError as error:
        raise fail(f"{output}: {error.strerror}") from error
    out.print(f"wrote {output}", markup=False, soft_wrap=True)
    out.print(NEXT[template], markup=False, soft_wrap=True)
