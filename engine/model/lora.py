"""LoRA adapters in the forward pass: every row of a batch uses its own adapter or none.

A wrapper replaces each linear layer that an adapter changes. It lets the layer compute all rows, then adds each
adapter's part to that adapter's rows: y[rows] += (x[rows] · Aᵀ) · s·Bᵀ. The runner assigns the rows before the
forward pass.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.device import to_device
from engine.errors import ConfigError
from engine.model.adapter_files import Adapter
from engine.model.model_loader import probe_rows


class AdapterRows:
    """The rows of the next forward pass by adapter.

    It changes from step to step and is read while the layers run: a recorded forward (a CUDA graph) would keep the rows
    of its recording.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[str, Tensor]] = []  # adapter, its rows [n]

    def set(self, rows: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Set each adapter's rows [n]; the other rows use the model alone."""
        self.groups = [(adapter, to_device(numbers, torch.long, device)) for adapter, numbers in rows.items()]


class LoraLinear(nn.Module):
    """A linear layer and the adapters that change it."""

    def __init__(self, base: nn.Module, rows: AdapterRows, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """`weights` are, by adapter, Aᵀ (in, rank) and s·Bᵀ (rank, out)."""
        super().__init__()
        self.base = base
        self._rows = rows
        self._weights = weights

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (…, in) to (…, out); all dimensions except the last are rows, in the batch's order."""
        output: Tensor = self.base(inputs)
        for adapter, rows in self._rows.groups:
            if adapter in self._weights:
                a, b = self._weights[adapter]
                part = inputs.reshape(-1, inputs.shape[-1])[rows] @ a @ b
                output.view(-1, output.shape[-1]).index_add_(0, rows, part)
        return output


def attach_adapters(model: PreTrainedModel, adapters: Sequence[Adapter]) -> AdapterRows:
    """Wrap the layers of a prepared model, in place. Return the object that assigns rows to adapters.

    Raises ConfigError if an adapter changes a layer that does not compute the batch's rows, each once and in order.
    """
    rows = AdapterRows()
    owners: dict[str, Adapter] = {}
    wrappers: dict[str, LoraLinear] = {}
    for adapter in adapters:
        for layer in adapter.weights:
            owners.setdefault(layer, adapter)
    for layer in owners:
        weights = {adapter.info.name: adapter.weights[layer] for adapter in adapters if layer in adapter.weights}
        on_device = {name: (a.to(model.device), b.to(model.device)) for name, (a, b) in weights.items()}
        wrappers[layer] = LoraLinear(model.get_submodule(layer), rows, on_device)
        model.set_submodule(layer, wrappers[layer])
    for layer in probe_rows(model, wrappers) if wrappers else ():
        field = f"adapters.{owners[layer].info.name}"
        raise ConfigError(field, f"{layer} computes only some of a batch's tokens; adapters of it are not supported")
    return rows
