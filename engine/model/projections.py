"""Replaces a model's linear layers by fast ones, packed for the CPU or in integers, and joined where possible.

Layers with the same input, such as the projections to queries, keys and values, become one product: fewer and larger
calls. They are found by observation: siblings that receive the identical tensor while the model runs once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.model.huge_pages import use_huge_pages
from engine.model.linear import make_fast_linear, memory_of

Siblings = list[tuple[nn.Module, list[str]]]  # a module, and the names of its linear layers with the same input


class SharedProjection:
    """One product for several layers, each of which takes its part. Not a module: its layers hold it."""

    def __init__(self, product: nn.Module, widths: list[int]) -> None:
        self._product = product
        self._widths = widths
        self._rows: Tensor | None = None  # the input of the current product
        self._parts: dict[int, Tensor] = {}

    def part(self, number: int, rows: Tensor) -> Tensor:
        """Return part `number` (…, width) of the product with `rows` (…, in), computed at the first layer's call."""
        if rows is not self._rows or number not in self._parts:
            self._rows = rows  # kept, so that no other tensor can get the same identity
            self._parts = dict(enumerate(self._product(rows).split_with_sizes(self._widths, dim=-1)))
        part = self._parts.pop(number)
        if not self._parts:
            self._rows = None
        return part


class ProjectionPart(nn.Module):
    """One of the layers that a SharedProjection computes."""

    def __init__(self, shared: SharedProjection, number: int) -> None:
        super().__init__()
        self._shared = shared
        self._number = number

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        return self._shared.part(self._number, rows)


@contextmanager
def watch_siblings(model: nn.Module) -> Iterator[Siblings]:
    """Record the inputs of the linear layers while the model runs in this context; fill the list at its end."""
    siblings: Siblings = []
    given: list[tuple[nn.Module, dict[str, Tensor]]] = []  # to each parent's layers, by name
    handles = []
    for parent in model.modules():
        inputs: dict[str, Tensor] = {}
        given.append((parent, inputs))
        for name, layer in _linears_of(parent).items():
            handles.append(layer.register_forward_pre_hook(partial(_note, inputs, name)))
    yield siblings
    for handle in handles:
        handle.remove()
    siblings += [(parent, names) for parent, inputs in given for names in _group_by_input(parent, inputs)]


def make_fast(model: nn.Module, siblings: Siblings, quantize: Quantization | None) -> None:
    """Replace the model's plain `nn.Linear` layers; each group of `siblings` becomes one product.

    A weight that is also used elsewhere (the embedding of a tied model) is kept beside its copy.
    """
    made = []
    for parent, names in siblings:
        layers = [_linears_of(parent)[name] for name in names]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        product = make_fast_linear(weight, _joined_biases(layers), quantize)
        made.append(product)
        shared = SharedProjection(product, [layer.out_features for layer in layers])
        for number, name in enumerate(names):
            setattr(parent, name, ProjectionPart(shared, number))
    for parent in list(model.modules()):
        for name, layer in _linears_of(parent).items():
            made.append(make_fast_linear(layer.weight.detach(), _joined_biases([layer]), quantize))
            setattr(parent, name, made[-1])
    use_huge_pages([memory for module in made if (memory := memory_of(module)) is not None])


def _linears_of(parent: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in parent.named_children() if type(child) is nn.Linear}


def _note(inputs: dict[str, Tensor], name: str, _layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    inputs[name] = arguments[0]


def _group_by_input(parent: nn.Module, inputs: dict[str, Tensor]) -> list[list[str]]:
    """Group the names of the layers that received the same tensor and can be joined."""
    groups: dict[tuple[int, torch.dtype, bool], list[str]] = {}
    for name, layer in _linears_of(parent).items():
        if name in inputs:
            key = (id(inputs[name]), layer.weight.dtype, layer.bias is None)
            groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _joined_biases(layers: list[nn.Linear]) -> Tensor | None:
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None
