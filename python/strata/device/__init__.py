"""Device tiers: the memory that models compute from. `cpu` needs no GPU."""

from strata.device.cpu import CpuPool

__all__ = ["CpuPool"]
