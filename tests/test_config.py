"""Settings: which source wins, what is said of bad values, and the defaults that depend on the machine."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from strata.config import CacheOptions, StrataConfig, format_size, parse_size, read_config
from strata.config.knobs import Knob, flag_of, knobs_of
from strata.config.machine import available_memory, disk_space, folder_bytes
from strata.config.options import ModelOptions
from strata.config.other_servers import COUNTERPARTS
from strata.config.sources import PARTS
from strata.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def read(*flags: str, **environment: str) -> StrataConfig:
    """Settings from flags and environment alone, with no disk tier to look at."""
    return read_config(flags, {"STRATA_DISK_CAPACITY": "0", **environment})


class TestSources:
    """Flag over environment over file over default."""

    def test_each_source_wins_over_the_next(self, tmp_path: Path) -> None:
        file = tmp_path / "strata.toml"
        file.write_text(
            'page-size = 4\nport = 9001\nhost_memory = "2GiB"\ninsecure = true\n', encoding="utf-8"
        )
        config = read(
            "--config",
            str(file),
            "--page-size",
            "1",
            "--write-policy=selective",
            STRATA_PAGE_SIZE="2",
            STRATA_PORT="9002",
        )
        assert config.cache.page_size == 1
        assert config.server.port == 9002
        assert config.cache.host_memory == 2 * GIB
        assert config.server.insecure is True
        assert config.cache.write_policy == "selective"
        assert config.scheduler.batch_tokens == 512
        assert config.origin("page_size") == "flag --page-size"
        assert config.origin("port") == "environment STRATA_PORT"
        assert config.origin("host_memory") == f"file {file}"
        assert config.origin("batch_tokens") == "default"

    def test_the_file_can_be_named_in_the_environment(self, tmp_path: Path) -> None:
        file = tmp_path / "strata.toml"
        file.write_text("prefetch-timeout-s = 1.5\n", encoding="utf-8")
        assert read(STRATA_CONFIG=str(file)).cache.prefetch_timeout_s == 1.5

    def test_settings_by_name(self) -> None:
        config = StrataConfig.of(disk_capacity="1GiB", page_size=1, disk_path="~/kv")
        assert config.cache.disk_capacity == GIB
        assert config.cache.disk_path == Path.home() / "kv"
        with pytest.raises(ConfigError, match="did you mean page-size"):
            StrataConfig.of(pagesize=1)

    @pytest.mark.parametrize(
        ("flags", "expected"), [((), False), (("--insecure",), True), (("--insecure=no",), False)]
    )
    def test_a_switch(self, flags: tuple[str, ...], expected: bool) -> None:
        assert read(*flags).server.insecure is expected

    @pytest.mark.parametrize(
        ("flags", "variables"),
        [
            (("--served-model-name", "a", "b/c"), {}),
            (("--served-model-name", "a,b/c"), {}),
            (("--served-model-name=a", "--served-model-name", "b/c"), {}),
            ((), {"STRATA_SERVED_MODEL_NAME": "a, b/c"}),
        ],
    )
    def test_several_names(self, flags: tuple[str, ...], variables: dict[str, str]) -> None:
        assert read(*flags, **variables).model.names("own") == ("a", "b/c")
        assert read().model.names("own") == ("own",)
        with pytest.raises(ConfigError, match=r"--served-model-name is one text; give a tuple of texts"):
            ModelOptions(served_model_name="abc")  # type: ignore[arg-type]

    def test_a_first_argument_that_is_no_flag_is_the_model_of_a_server(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        variables = {"STRATA_DISK_CAPACITY": "0", "STRATA_MODEL": "another"}

        def model(*words: str) -> StrataConfig:
            return read_config(words, variables, takes_model=True)

        for words in (
            ["org/name", "--port", "8001"],
            ["org/name"],
            ["org/name", "--served-model-name", "a", "b"],
        ):
            config = model(*words)
            assert config.model.model == "org/name" and config.origin("model") == "argument MODEL"
        assert model("--port", "8001").model.model == "another"
        with pytest.raises(
            ConfigError, match=r"named twice, as 'org/name' and by --model 'default'; give it once"
        ):
            model("org/name", "--model", "default")
        for words in (
            ["org/name", "org/other"],
            ["--port", "8001", "org/name"],
            ["--api-key", "k", "org/name"],
            ["--", "org/name"],
        ):
            with pytest.raises(SystemExit):
                model(*words)
            assert "a model comes before all flags" in capsys.readouterr().err or words[0] == "--"

    def test_names_are_unique_and_documented(self) -> None:
        names = [name for options in PARTS.values() for name in knobs_of(options)]
        assert len(names) == len(set(names))
        knobs = [knob for options in PARTS.values() for _, knob in knobs_of(options).values()]
        assert all(isinstance(knob, Knob) and knob.doc for knob in knobs)

    def test_options_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            read().cache.page_size = 3  # type: ignore[misc]

    def test_help_names_every_flag_and_its_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            read("--help")
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for options in PARTS.values():
            for name in knobs_of(options):
                assert f"--{name.replace('_', '-')} " in text
        assert "(default: 1 GiB)" in text and "10% of free space" in text


class TestRefusals:
    """A message names the setting, the value, the source and the remedy."""

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (
                ("--page-size", "0"),
                ["--page-size 0", "a whole number from 1 to 256", "leave --page-size out"],
            ),
            (("--page-size", "abc"), ["--page-size 'abc'", "from flag --page-size", "a whole number"]),
            (("--host-memory", "8 gallons"), ["--host-memory '8 gallons'", "such as 8GiB"]),
            (("--device-memory", "0"), ["--device-memory 0", "no device tier", "25%"]),
            (("--write-policy", "never"), ["--write-policy 'never'", "one of through, selective, back"]),
            (("--prefetch-timeout-s", "nan"), ["--prefetch-timeout-s nan", "seconds from 0 to 3600"]),
            (("--port", "65536"), ["--port 65536", "from 0 to 65535"]),
            (("--insecure=perhaps",), ["--insecure 'perhaps'", "true or false"]),
            (("--config", "nowhere.toml"), ["--config nowhere.toml does not exist"]),
            (("--config", "~nobody-here/a.toml"), ["--config ~nobody-here/a.toml", "home"]),
            (("--disk-path", "~nobody-here/kv"), ["--disk-path '~nobody-here/kv'", "a folder's path"]),
            (("--disk-path", ""), ["--disk-path ''", "a folder's path"]),
            (("--host-memory", "9999999999TiB"), ["--host-memory '9999999999TiB'", "such as 8GiB"]),
            (("--host-memory", "9" * 400), ["such as 8GiB"]),
        ],
    )
    def test_flags(self, flags: tuple[str, ...], words: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            read(*flags)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    def test_the_environment(self) -> None:
        with pytest.raises(
            ConfigError, match=r"--batch-tokens 'many' \(from environment STRATA_BATCH_TOKENS\)"
        ):
            read(STRATA_BATCH_TOKENS="many")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("page-sise = 4", "'page-sise' is no setting of Strata; did you mean page-size?"),
            (
                "max-num-seqs = 4",
                "'max-num-seqs' is no setting of Strata, but of other servers; here --max-running",
            ),
            ("page-size = [4]", "page-size is a list; give a whole number"),
            ("[cache]\npage-size = 4", "[cache] is a table; give all settings without one"),
            ("page-size = ", "cannot be read as TOML"),
            ("page-size = 4.5", "--page-size '4.5'"),
        ],
    )
    def test_the_file(self, tmp_path: Path, content: str, words: str) -> None:
        file = tmp_path / "strata.toml"
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read("--config", str(file))
        assert words in str(caught.value) and str(file) in str(caught.value)

    def test_an_unknown_or_shortened_flag(self, capsys: pytest.CaptureFixture[str]) -> None:
        for flag in ("--pages", "--no-such-flag"):
            with pytest.raises(SystemExit) as ended:
                read(flag, "1")
            assert ended.value.code == 2
            assert flag in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--page-sise", "4"), "--page-sise is no flag; did you mean --page-size?"),
            (("--page-sise=4",), "--page-sise is no flag; did you mean --page-size?"),
            (("--qqqqqqqqqq", "x"), "--qqqqqqqqqq is no flag; --help lists them"),
            (("-q",), "-q is no flag"),
            (("--gpu-memory-utilization", "0.9"), "here --device-memory sets the device tier's size"),
            (("--gpu-memory-utilization=0.9", "--port", "1"), "--gpu-memory-utilization is a flag of other"),
            (("-tp", "2"), "here there is none: a server computes on one device"),
            (("--port", "8001", "a-model"), "'a-model' belongs to no flag"),
        ],
    )
    def test_a_flag_that_is_none(
        self, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            read(*flags)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err

    def test_flags_of_other_servers_lead_to_flags_that_there_are(self) -> None:
        ours = {flag_of(name) for options in PARTS.values() for name in knobs_of(options)}
        assert not ours & COUNTERPARTS.keys()
        named = {flag for words in COUNTERPARTS.values() for flag in re.findall(r"--[a-z-]+", words)}
        assert len(named) > 10 and named <= ours

    def test_a_user_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does where nobody knows a home
        with pytest.raises(ConfigError, match=r"--disk-path is not given.*XDG_CACHE_HOME"):
            read()

    def test_a_key_is_never_shown(self) -> None:
        assert "s3cret" not in repr(read("--api-key", "s3cret").origins)


class TestSizes:
    """`8GiB` and its like."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("4096", 4096),
            ("8GiB", 8 * GIB),
            ("1.5 mib", 3 * MIB // 2),
            ("500MB", 500_000_000),
            ("2KiB", 2 * KIB),
        ],
    )
    def test_parse(self, text: str, expected: int) -> None:
        assert parse_size(text) == expected

    @pytest.mark.parametrize("text", ["", "-1", "GiB", "1 GiB GiB", "8G", "1e9", "inf"])
    def test_refuse(self, text: str) -> None:
        with pytest.raises(ValueError, match="size"):
            parse_size(text)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [(0, "0 B"), (1023, "1023 B"), (KIB, "1 KiB"), (3 * GIB // 2, "1.5 GiB"), (3 << 40, "3.0 TiB")],
    )
    def test_format(self, value: int, expected: str) -> None:
        assert format_size(value) == expected


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Lays out a fake file system root with 16 GiB of available memory."""
    files = {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n", **files}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="ascii")
    return root


class TestMachine:
    """Memory and disk space that are left."""

    def test_no_groups(self, tmp_path: Path) -> None:
        assert available_memory(write_tree(tmp_path, {})) == 16 * GIB

    @pytest.mark.parametrize(
        ("limit", "expected"), [("max\n", 16 * GIB), (f"{8 * GIB}\n", 6 * GIB), (f"{64 * GIB}\n", 16 * GIB)]
    )
    def test_version_2(self, tmp_path: Path, limit: str, expected: int) -> None:
        group = "sys/fs/cgroup/user/app"
        tree = {
            "proc/self/cgroup": "0::/user/app\n",
            f"{group}/memory.max": limit,
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        }
        assert available_memory(write_tree(tmp_path, tree)) == expected

    def test_version_2_outer_group_is_tighter(self, tmp_path: Path) -> None:
        tree = {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
        }
        assert available_memory(write_tree(tmp_path, tree)) == 3 * GIB

    def test_version_2_in_a_container_that_sees_only_its_own_group(self, tmp_path: Path) -> None:
        tree = {"proc/self/cgroup": "0::/../../else\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}
        assert available_memory(write_tree(tmp_path, tree)) == 2 * GIB

    def test_version_1(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/memory/docker/abc"
        tree = {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
        assert available_memory(write_tree(tmp_path, tree)) == 3 * GIB

    def test_a_group_over_its_limit_leaves_nothing(self, tmp_path: Path) -> None:
        tree = {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        }
        assert available_memory(write_tree(tmp_path, tree)) == 0

    def test_this_machine(self) -> None:
        assert 0 < available_memory() < 1 << 50

    def test_the_own_files_count_as_free(self, tmp_path: Path) -> None:
        root = tmp_path / "cache" / "kv"
        assert folder_bytes(root) == 0
        assert disk_space(root) > 0
        (root / "a").mkdir(parents=True)
        content = os.urandom(MIB)
        (root / "a" / "segment").write_bytes(content)
        with (root / "hole").open("wb") as hole:
            hole.truncate(GIB)
        assert MIB <= folder_bytes(root) < 2 * MIB

    def test_defaults(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("strata.config.options.available_memory", lambda: 16 * GIB)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for space, capacity in ((50 * GIB, 5 * GIB), (500 * GIB, 10 * GIB)):
            monkeypatch.setattr("strata.config.options.disk_space", lambda path, space=space: space)
            cache = CacheOptions()
            assert cache.device_memory == 4 * GIB
            assert cache.host_memory == GIB
            assert cache.disk_path == tmp_path / "strata" / "kv"
            assert cache.disk_capacity == capacity
        assert CacheOptions(disk_capacity=0).disk_capacity == 0


class TestDay:
    """`--chat-template-date`: a day in every spelling that a setting can come in."""

    def test_a_day(self, tmp_path: Path) -> None:
        file = tmp_path / "strata.toml"
        file.write_text("chat-template-date = 2024-07-26\n", encoding="utf-8")
        assert read_config(["--config", str(file)], {}).model.chat_template_date == "2024-07-26"
        assert (
            read_config(["--chat-template-date", "2024-07-26"], {}).model.chat_template_date == "2024-07-26"
        )
        assert StrataConfig.of().model.chat_template_date == ""

    @pytest.mark.parametrize("value", ["yesterday", "26 Jul 2024", "2024-02-30"])
    def test_no_day(self, value: str) -> None:
        with pytest.raises(
            ConfigError, match=f"--chat-template-date '{value}'.*is not a day such as 2024-07-26"
        ):
            read_config(["--chat-template-date", value], {})
