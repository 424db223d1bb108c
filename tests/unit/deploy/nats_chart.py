"""What NATS' own chart makes of our values, as far as they meet it (helm/charts/nats/files/config of chart 2.14.2)."""

import copy
import json
import re
from typing import Any

from tests.unit.deploy.chart import HELM_FOLDER, documents

CERTIFICATES = "/etc/nats-certs"
Values = dict[str, Any]


def values_of(*names: str) -> Values:
    """The values of these files, each over those before it."""
    found: Values = {}
    for name in names:
        [document] = documents(HELM_FOLDER / f"nats/{name}.yaml")
        found = _merged(found, document)
    return found


def _merged(below: Values, above: Values) -> Values:
    mixed = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **mixed}


def server_config(values: Values) -> Values:
    """The configuration of each server, with the chart's own settings."""
    config = copy.deepcopy(values["config"])
    made: Values = {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "port": 4222,
        **_tls(config.pop("nats", {}), "nats"),
        "http_port": 8222,
    }
    assert config.pop("monitor") == {"enabled": True}
    if cluster := config.pop("cluster", None):
        made["cluster"] = {"name": "nats", "port": 6222, "no_advertise": True, **cluster["merge"]}
    if leafnodes := config.pop("leafnodes", None):
        made["leafnodes"] = {"port": 7422, "no_advertise": True, **_tls(leafnodes, "leafnodes")}
    if jetstream := config.pop("jetstream", None):
        made["jetstream"] = {
            "max_memory_store": f"<< {jetstream['memoryStore']['maxSize']} >>",
            "store_dir": "/data",
            "max_file_store": f"<< {jetstream['fileStore']['maxSize']} >>",
            **jetstream["merge"],
        }
    made |= config.pop("merge")
    assert not config, f"what does the chart make of {sorted(config)}?"
    return made


def _tls(section: Values, folder: str) -> Values:
    if not section.get("tls", {}).get("enabled"):
        return {}
    return {
        "tls": {f"{name}_file": f"{CERTIFICATES}/{folder}/tls.{end}" for name, end in (("cert", "crt"), ("key", "key"))}
    }


def as_text(config: Values) -> str:
    """A configuration as nats-server reads it: JSON, but for what stands between << and >>."""
    return re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", json.dumps(config, indent=2))
