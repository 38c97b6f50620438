"""What other engines import: the prefix cache over their own pages (`Cache`), the cache over all tiers (`TieredCache`),
the scheduler over the same tiers (`Scheduler`), and the copies alone (`CopyMover`)."""

from strata.cache.mover import CopyMover, Movement
from strata.cache.page_cache import Cache, Match
from strata.cache.scheduler import Scheduler
from strata.cache.tiered import Ticket, TieredCache, TieredMatch
from strata.cache.tiers import TierUsage

__all__ = [
    "Cache",
    "CopyMover",
    "Match",
    "Movement",
    "Scheduler",
    "Ticket",
    "TierUsage",
    "TieredCache",
    "TieredMatch",
]
