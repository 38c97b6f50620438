"""Where settings come from: a flag wins over the environment, that over a TOML file, that over the default.

Each value keeps its origin, so that it can be said where a setting was made.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from datetime import date
from types import MappingProxyType
from typing import Any

from strata.config.environment import read_environment
from strata.config.knobs import Knob, expanded, flag_of, format_size, knobs_of, parse_size, read_value
from strata.config.options import AUTO_SIZE, CacheOptions, ModelOptions, SchedulerOptions, ServerOptions
from strata.config.other_servers import COUNTERPARTS
from strata.config.shown import FORMATS, ShownSetting, shown_settings
from strata.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARTS: Mapping[str, type] = MappingProxyType(
    {"model": ModelOptions, "cache": CacheOptions, "scheduler": SchedulerOptions, "server": ServerOptions}
)
"""The parts of a `StrataConfig` by attribute name."""

DEFAULT_ORIGIN = "default"
_MACHINE_ORIGIN = "default, worked out from this machine"


@dataclass(frozen=True)
class StrataConfig:
    """All settings of one Strata process. `origins` names, by setting, where its value was given."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, **settings: Any) -> StrataConfig:
        """A config from settings by name, e.g. `StrataConfig.of(model="default", host_memory="2GiB")`.

        Text is read as a flag's would be. Raises ConfigError.
        """
        return _build({name: (value, f"the argument {name}") for name, value in settings.items()})

    def origin(self, name: str) -> str:
        """Where the setting `name` was given: a flag, a variable, a file, or `default`."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def shown(self) -> dict[str, list[ShownSetting]]:
        """By part, every setting with its origin in words; secrets are to stay hidden."""

        def origin(name: str) -> str:
            return self.origins.get(name) or (
                _MACHINE_ORIGIN if _is_worked_out(specs[name]) else DEFAULT_ORIGIN
            )

        specs = {name: spec for part in PARTS.values() for name, (spec, _) in knobs_of(part).items()}
        return {part: shown_settings(getattr(self, part), origin) for part in PARTS}


def read_config(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    program: str = "strata serve",
    takes_model: bool = False,
) -> StrataConfig:
    """Settings from command line arguments, the environment and the TOML file of `--config`. With `takes_model` a first
    argument that is no flag is the model.

    Raises ConfigError; leaves through SystemExit for `--help`, `--print-config` and unknown flags, as
    argparse does.
    """
    variables = os.environ if environment is None else environment
    parser = build_parser(program, takes_model)
    model = arguments[0] if takes_model and arguments and not arguments[0].startswith("-") else None
    known, others = parser.parse_known_args(arguments if model is None else arguments[1:])
    given = vars(known)
    _refuse(others, parser, takes_model)
    if model is not None and "model" in given:
        raise ConfigError(
            f"the model is named twice, as {model!r} and by --model {given['model']!r}; give it once"
        )
    print_format = given.pop("print_config", None)
    config_file = given.pop("config", None) or variables.get("STRATA_CONFIG")
    settings: dict[str, tuple[Any, str]] = {}
    if config_file:
        settings |= _read_file(config_file)
    settings |= read_environment(variables, _all_knobs())
    for name, value in given.items():
        settings[name] = (",".join(value) if isinstance(value, list) else value, f"flag {flag_of(name)}")
    if model is not None:
        settings["model"] = (model, "argument MODEL")
    config = _build(settings)
    if print_format is not None:
        print(FORMATS[print_format](config.shown()))
        raise SystemExit(0)
    return config


def build_parser(program: str, takes_model: bool = False) -> argparse.ArgumentParser:
    """A parser that knows every setting as a flag and leaves its value as text, to be read with its
    origin. What belongs to no flag it leaves."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [MODEL] [flags]" if takes_model else "%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=("MODEL, before all flags, is another way to give --model. " if takes_model else "")
        + "Every flag --some-name can also be given as STRATA_SOME_NAME or, in TOML, some-name; "
        "a flag wins over the environment, the environment over the file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (STRATA_CONFIG)")
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="toml",
        choices=tuple(FORMATS),
        help="print every setting with its origin, secrets hidden, as a TOML file or as JSON, and exit",
    )
    for part, options in PARTS.items():
        group = parser.add_argument_group(part)
        for name, (spec, knob) in knobs_of(options).items():
            is_switch = isinstance(spec.default, bool)
            group.add_argument(
                flag_of(name),
                dest=name,
                metavar="{" + ",".join(knob.choices) + "}" if knob.choices else name.upper(),
                # A word too much behind a key must not become a key.
                action="append" if knob.secret else "extend" if knob.several else "store",
                nargs="?" if is_switch else "+" if knob.several and not knob.secret else None,
                const="true" if is_switch else None,
                help=help_of(spec, knob).replace("%", "%%"),
            )
    return parser


def _refuse(others: Sequence[str], parser: argparse.ArgumentParser, takes_model: bool) -> None:
    """Leaves as argparse does if there is anything that no flag took."""
    for word in others:
        flag = word.partition("=")[0]
        if flag in COUNTERPARTS:
            parser.error(f"{flag} is a flag of other servers; here {COUNTERPARTS[flag]}")
        if flag.startswith("-"):
            close = difflib.get_close_matches(flag, map(flag_of, _all_knobs()), n=1)
            parser.error(
                f"{flag} is no flag; {f'did you mean {close[0]}?' if close else '--help lists them'}"
            )
    if others:
        first = "; a model comes before all flags" if takes_model else ""
        parser.error(f"{others[0]!r} belongs to no flag{first}; --help lists them")


def help_of(spec: Field[Any], knob: Knob) -> str:
    """What a setting means, and its default unless that is empty or the text says it."""
    value: Any = spec.default
    if not isinstance(value, str | int | float) or value in ("", AUTO_SIZE):
        return knob.doc
    shown = format_size(int(value)) if knob.read is parse_size else str(value).lower()
    return f"{knob.doc} (default: {shown})"


def _is_worked_out(spec: Field[Any]) -> bool:
    """Whether the default differs from machine to machine."""
    return spec.default == AUTO_SIZE or spec.default_factory is not MISSING


def _all_knobs() -> dict[str, Knob]:
    return {name: knob for options in PARTS.values() for name, (_, knob) in knobs_of(options).items()}


def _build(settings: Mapping[str, tuple[Any, str]]) -> StrataConfig:
    """Reads texts, makes the parts, which check themselves."""
    known = _all_knobs()
    values: dict[str, Any] = {}
    for name, (value, origin) in settings.items():
        if name not in known:
            raise ConfigError(f"{origin} is no setting of Strata{_closest(name, known)}")
        values[name] = read_value(name, known[name], value, origin) if isinstance(value, str) else value
    parts = {
        part: options(**{name: values[name] for name in knobs_of(options) if name in values})
        for part, options in PARTS.items()
    }
    return StrataConfig(
        **parts, origins=MappingProxyType({name: origin for name, (_, origin) in settings.items()})
    )


def _read_file(path: str) -> dict[str, tuple[Any, str]]:
    """Settings of a TOML file as text. Keys are spelled as the flags are; underscores do as well."""
    try:
        file = expanded(path)
    except ValueError as error:
        raise ConfigError(f"--config {path} is no path ({error}); give the path of a TOML file") from error
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"--config {path} does not exist; give the path of a TOML file, or leave --config out"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read as TOML: {error}; repair the file") from error
    known = _all_knobs()
    settings = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            raise ConfigError(f"--config {path}: [{key}] is a table; give all settings without one")
        if name not in known:
            raise ConfigError(f"--config {path}: {key!r} is no setting of Strata{_closest(name, known)}")
        if isinstance(value, date):
            value = value.isoformat()
        if known[name].several and isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if not isinstance(value, str | int | float):
            raise ConfigError(
                f"--config {path}: {key} is a {type(value).__name__}; give {known[name].wanted}"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        settings[name] = (text, f"file {path}")
    return settings


def _closest(name: str, known: Mapping[str, Any]) -> str:
    if flag_of(name) in COUNTERPARTS:
        return f", but of other servers; here {COUNTERPARTS[flag_of(name)]}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0].replace('_', '-')}?" if close else "; `strata serve --help` lists them"
