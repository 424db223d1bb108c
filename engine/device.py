"""Chooses the engine's device and dtype, and copies small data to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError


def choose_device(config: EngineConfig) -> torch.device:
    """Return the configured device, set as the calling thread's current one. Raises ConfigError if it is missing."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no NVIDIA GPU or driver"
        raise ConfigError("device", f"{config.device!r} is not available: {build}")
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError("device", f"{config.device!r} is not available: torch finds {found} GPU(s)")
    torch.cuda.set_device(device)  # kernels launch on the thread's current device
    return device


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the weights' dtype; see EngineConfig for what "auto" means."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Create a tensor on `device` without waiting for the work queued there.

    A copy from ordinary memory would wait; one from pinned memory is queued, and torch keeps that memory until it is
    done.
    """
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
