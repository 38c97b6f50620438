"""Settings: what there is (`options`), how a value is read (`knobs`), where it comes from (`sources`), and
what the machine leaves (`machine`)."""

from strata.config.knobs import format_size, parse_size
from strata.config.machine import available_memory
from strata.config.options import CacheOptions, ModelOptions, SchedulerOptions, ServerOptions
from strata.config.sources import DEFAULT_ORIGIN, StrataConfig, read_config

__all__ = [
    "DEFAULT_ORIGIN",
    "CacheOptions",
    "ModelOptions",
    "SchedulerOptions",
    "ServerOptions",
    "StrataConfig",
    "available_memory",
    "format_size",
    "parse_size",
    "read_config",
]
