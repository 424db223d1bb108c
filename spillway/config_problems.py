"""Error messages for an invalid configuration. Each names its key."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel

from spillway.config_values import variable_of

_UNIONS: Final = (["engine"], ["fleet", "driver"])  # below a pool
# Examples of required keys. Keys with fixed choices need none: the message lists all choices.
EXAMPLES: Final[Mapping[str, str]] = {
    "aws_region": '"us-east-1"',
    "begin": '"08:00"',
    "bucket": '"my-bucket"',
    "client_id": '"spillway"',
    "container_group": '"my-group"',
    "deployment": '"spillway-worker"',
    "driver": '{ kind = "static" }',
    "end": '"18:00"',
    "endpoint": '"my-endpoint"',
    "engine": '{ kind = "vllm", url = "http://127.0.0.1:8001", tokenizer = "Qwen/Qwen3-0.6B" }',
    "gpu_types": '["NVIDIA GeForce RTX 4090"]',
    "image": '"registry.example.com/spillway-vllm:0.2.0"',
    "instance_types": '["g5.xlarge"]',
    "issuer": '"https://login.example.com"',
    "location": '"us-central1"',
    "min_workers": "1",
    "model": '"Qwen/Qwen3-0.6B"',
    "models": '["my-model"], with a section [models.my-model]',
    "organization": '"my-organization"',
    "path": '"Qwen/Qwen3-0.6B"',
    "project": '"my-project"',
    "subnets": '{ us-east-1a = "subnet-0123456789abcdef0" }',
    "task": '"worker.yaml"',
    "tokenizer": '"Qwen/Qwen3-0.6B"',
    "url": '"http://127.0.0.1:8001"',
}
_PLAIN: Final = {"tuple_type": 'must be a list, such as ["a", "b"]', "dict_type": "must be a table"}
_NO_MODELS: Final = "is missing. Add a section for each model that clients can request. Example: [models.my-model]"


def explain(problem: Mapping[str, Any], root: type[BaseModel]) -> str:
    """Return the message for a problem in ``root``."""
    keys = keys_of(problem)
    message = _message(problem, root, keys)
    return f"{'.'.join(keys)}: {message}" if keys else message


def _message(problem: Mapping[str, Any], root: type[BaseModel], keys: Sequence[str]) -> str:
    location, kind, given = problem["loc"], problem["type"], problem.get("input")
    if kind == "missing":
        return _NO_MODELS if keys == ["models"] else f"is missing. {_example(keys[-1], _field_at(root, location))}"
    if kind == "extra_forbidden":
        return f"unknown key; valid keys: {', '.join(_model_at(root, location[:-1]).model_fields)}"
    if kind == "union_tag_not_found":
        return f"'kind' is required. Choose from: {', '.join(_by_kind(_field_at(root, location)))}"
    if kind == "union_tag_invalid":
        return f"unknown kind {problem['ctx']['tag']!r}. Choose from: {', '.join(_by_kind(_field_at(root, location)))}"
    if kind == "literal_error":
        return f"invalid value {given!r:.100}. Choose from: {problem['ctx']['expected'].replace(chr(39), '')}"
    return _PLAIN.get(kind) or str(problem["msg"]).removeprefix("Value error, ")


def _example(name: str, annotation: Any) -> str:  # noqa: ANN401  # any type
    if get_origin(annotation) is Literal:
        return f"Choose from: {', '.join(map(str, get_args(annotation)))}"
    return f"Example: {name} = {EXAMPLES[name]}" if name in EXAMPLES else "Add it"


def source_of(keys: Sequence[str], where: str, env: Mapping[str, str]) -> str:
    """Return the environment variable that holds a key's value, or else ``where``."""
    variable = variable_of(keys)
    return f"environment: {variable}" if variable in env else where


def keys_of(problem: Mapping[str, Any]) -> list[str]:
    """Return the path to the invalid key."""
    # pydantic's location has a tagged union's tag between the union and the key. The tag is not a key of the file.
    parts = [str(part) for part in problem["loc"]]
    tag = next(
        (2 + len(union) for union in _UNIONS if parts[:1] == ["pools"] and parts[2 : 2 + len(union)] == union), None
    )
    return [part for n, part in enumerate(parts) if n != tag]


def _field_at(root: type[BaseModel], location: Sequence[int | str]) -> Any:  # noqa: ANN401  # any type
    """Return the type of the field at a location."""
    return _model_at(root, location[:-1]).model_fields[str(location[-1])].annotation


def _model_at(root: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """Return the model whose keys are at a location."""
    here: Any = root
    for part in location:
        if isinstance(here, UnionType):
            here = _by_kind(here)[str(part)]
        elif get_origin(here) is dict:
            here = get_args(here)[1]
        elif get_origin(here) is tuple:
            here = get_args(here)[0]
        else:
            here = here.model_fields[str(part)].annotation
            if NoneType in get_args(here):
                here = get_args(here)[0]
    model: type[BaseModel] = here
    return model


def _by_kind(union: UnionType) -> dict[str, type[BaseModel]]:
    """Return the members of a tagged union, by kind."""
    return {kind: one for one in get_args(union) for kind in get_args(one.model_fields["kind"].annotation)}
