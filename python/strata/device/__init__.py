"""Device tiers: the memory that models compute from. `cpu` needs no GPU; `cuda` is an NVIDIA GPU's, and can be imported
without one."""

from strata.device.cpu import CpuPool
from strata.device.pool import DevicePool

__all__ = ["CpuPool", "DevicePool"]
