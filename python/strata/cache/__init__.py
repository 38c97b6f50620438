"""What other engines import: the prefix cache over their own pages (`Cache`), the cache over all tiers (`TieredCache`),
and the scheduler over the same tiers (`Scheduler`)."""

from strata.cache.page_cache import Cache, Match
from strata.cache.scheduler import Scheduler
from strata.cache.tiered import Ticket, TieredCache, TieredMatch
from strata.cache.tiers import TierUsage

__all__ = ["Cache", "Match", "Scheduler", "Ticket", "TierUsage", "TieredCache", "TieredMatch"]
