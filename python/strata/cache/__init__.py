"""The cache for engines that own their pages: match and pin, reserve, commit or abort."""

from strata.cache.page_cache import Cache, Match

__all__ = ["Cache", "Match"]
