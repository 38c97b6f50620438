"""Settings from environment variables: `STRATA_PAGE_SIZE` is `page_size`. A variable that is none is refused, since a
setting that is misspelled would be a setting that silently does not hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from strata.errors import ConfigError

PREFIX = "STRATA_"

_OTHERS = frozenset({"STRATA_CONFIG", "STRATA_CACHE_DIR"})
"""Read elsewhere: the file with settings, and where models are kept."""

_OF_TESTS = "STRATA_SOAK"
"""What the tests read begins so."""

_SERVICE_LINK = re.compile(
    r"STRATA\w*_SERVICE_(HOST|PORT\w*)|STRATA_\w+_PORT|STRATA\w*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
"""What Kubernetes sets in every container for a service whose name begins with `strata`."""

_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


def variable_of(name: str) -> str:
    """The environment variable that sets the field `name`."""
    return PREFIX + name.upper()


def read_environment(variables: Mapping[str, str], known: Collection[str]) -> dict[str, tuple[str, str]]:
    """By setting, its text and where that is from. Raises ConfigError for a variable of Strata's that is no setting."""
    names = {variable_of(name): name for name in known}
    settings = {}
    for variable, value in variables.items():
        if variable in names:
            if variable == "STRATA_PORT" and _LINK_VALUE.fullmatch(value):
                raise ConfigError(
                    f"environment STRATA_PORT {value!r} is no port but what Kubernetes sets for a service named "
                    "strata; give the service another name, or set enableServiceLinks: false in the pod"
                )
            settings[names[variable]] = (value, f"environment {variable}")
        elif variable.startswith(PREFIX) and not _is_foreign(variable):
            close = difflib.get_close_matches(variable, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "`strata serve --help` lists the settings"
            raise ConfigError(f"environment {variable} is no setting of Strata; {hint}")
    return settings


def _is_foreign(variable: str) -> bool:
    return (
        variable in _OTHERS or variable.startswith(_OF_TESTS) or _SERVICE_LINK.fullmatch(variable) is not None
    )
