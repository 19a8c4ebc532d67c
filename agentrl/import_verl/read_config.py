"""The keys of a verl configuration: of a YAML file, or of the command line in a launch script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agentrl.errors import ConfigError
from agentrl.import_verl.shell import Script

ROOTS = (
    *("data", "actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "reward"),
    *("custom_reward_function", "actor", "rollout"),
)
"""First parts of the keys by which a verl configuration is known."""
_SETTING = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_REMOVAL = re.compile(r"~([A-Za-z_]\w*(?:\.[\w-]+)+)(?:=.*)?", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_OWN_CONFIGS = re.compile(r"ppo_\w*trainer")
_BAND = re.compile(r"[0-9.]+_[0-9.]+")


@dataclass(slots=True)
class Keys:
    """Values by dotted key, and what has to be said of the source as a whole."""

    source: Path
    values: dict[str, object] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def find(self, name: str) -> Path | None:
        """The file that a path of the configuration means: relative to the source or to the current folder."""
        path = Path(os.path.expanduser(name))
        for place in (self.source.parent / path, path):
            if place.exists():
                return place
        return None


def read_keys(source: Path) -> Keys:
    """The leaves of a YAML file, or the `key=value` words of a script.

    Raises:
        ConfigError: it cannot be read, or no verl key is in it.
    """
    if not source.is_file():
        raise ConfigError(f"import-verl: no file {source}")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{source}: not UTF-8 text (byte {e.start}: {e.reason})") from None
    keys = Keys(source)
    if source.suffix in (".yaml", ".yml"):
        keys.values = read_leaves(source, text)
    else:
        _read_script(keys, text)
    if not keys.values.keys().isdisjoint(("finetuning_type", "model_name_or_path", "stage")):
        raise ConfigError(
            f"{source}: a configuration of LLaMA-Factory, not of verl. Its reward_model_type api becomes "
            "`reward_model: {kind: http, url: ...}`, and full `reward_model: {kind: classifier, path: ...}`; lora "
            "is not supported (docs/environments.md explains why)"
        )
    if not keys.values.keys().isdisjoint(("env", "env.use")):
        raise ConfigError(f"{source}: is a configuration of agentrl already: agentrl check {source}")
    if not any(key.partition(".")[0] in ROOTS for key in keys.values):
        raise ConfigError(f"{source}: no verl key (data.*, actor_rollout_ref.*, algorithm.*, trainer.*) in it")
    _resolve(keys.values)
    return keys


def read_leaves(path: Path, text: str) -> dict[str, object]:
    """The leaves of a YAML mapping by dotted key; Hydra's own sections are left out. Raises ConfigError."""
    data = read_yaml(path, text)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: not a mapping of keys")
    try:
        leaves = _leaves(data, "")
    except RecursionError:
        raise ConfigError(f"{path}: a part of it refers to itself") from None
    return {k: v for k, v in leaves if k.partition(".")[0] not in ("defaults", "hydra")}


def read_yaml(path: Path, text: str) -> object:
    """The data of a YAML text. Raises ConfigError."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not YAML: {str(e).splitlines()[0]}") from None


def _leaves(data: Mapping[object, object], before: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in data.items():
        path = f"{before}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, Mapping) and value else [(path, value)]
    return found


def value_of(text: str) -> object:
    """The value of a command line setting: YAML, as far as Hydra's own grammar is the same."""
    text = text.strip()
    if not text:
        return None
    if _BAND.fullmatch(text):
        return text  # YAML would read 0.5_2 as a number
    if text.startswith("{"):
        text = re.sub(r"([{,]\s*[\w'\"]+):(?=\S)", r"\1: ", text)
    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return text


def _read_script(keys: Keys, text: str) -> None:
    script = Script(str(keys.source))
    script.read(text)
    launches = [found for words in script.commands if (found := _launch(words)) is not None]
    joined: list[list[str]] = []
    for words in launches:
        if joined and (_SETTING.fullmatch(words[0]) or _REMOVAL.fullmatch(words[0])):
            joined[-1] += words  # behind a line that was commented out
        else:
            joined.append(words)
    if not joined:
        return
    best = max(joined, key=len)
    if len(joined) > 1:
        keys.remarks.append(f"{len(joined)} commands set verl keys; the one with the most of them was read")
    _base(keys, best)
    for word in best:
        if match := _SETTING.fullmatch(word):
            value = value_of(match[2])
            for key, leaf in (
                _leaves(value, f"{match[1]}.") if isinstance(value, Mapping) and value else [(match[1], value)]
            ):
                keys.values[key] = leaf
        elif match := _REMOVAL.fullmatch(word):
            for key in [k for k in keys.values if k == match[1] or k.startswith(f"{match[1]}.")]:
                del keys.values[key]


def _launch(words: list[str]) -> list[str] | None:
    """The words of a command that sets verl keys; also of one that stands in a single word (`bash -c "..."`)."""
    if any((m := _SETTING.fullmatch(word)) and m[1].partition(".")[0] in ROOTS for word in words):
        return words
    for word in words:
        if "verl" in word and "=" in word and any(c.isspace() for c in word):
            inner = Script("")
            inner.read(word)
            for command in inner.commands:
                if (found := _launch(command)) is not None:
                    return found
    return None


def _base(keys: Keys, words: list[str]) -> None:
    """The YAML file of `--config-path` and `--config-name`, whose keys the command line changes."""
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        for option, names in (("path", ("--config-path", "-cp")), ("name", ("--config-name", "-cn"))):
            if word in names:
                options[option] = following
            elif word.startswith(tuple(f"{name}=" for name in names)):
                options[option] = word.partition("=")[2]
    name = options.get("name", "").removesuffix(".yaml")
    if not name or _OWN_CONFIGS.fullmatch(name):
        return
    path = keys.find(f"{options.get('path', '.')}/{name}.yaml")
    if path is None or not path.is_file():
        keys.remarks.append(
            f"--config-name {name}: there is no file {options.get('path', '.')}/{name}.yaml; its keys are not in "
            "the result"
        )
        return
    keys.values |= read_leaves(path, path.read_text(encoding="utf-8"))


def _resolve(values: dict[str, object]) -> None:
    """Fill in `${a.b}`, `${.b}` and `${oc.select:a.b,default}`; one that names no key here is left out."""
    for key in list(values):
        for _ in range(8):
            value = values[key]
            if not isinstance(value, str) or not (match := _INTERPOLATION.search(value)):
                break
            found = _lookup(key, match[1], values)
            if found is NotImplemented:
                break
            whole = match[0] == value
            values[key] = found if whole else value.replace(match[0], "" if found is None else str(found))


def _lookup(key: str, inner: str, values: Mapping[str, object]) -> object:
    name, comma, default = inner.removeprefix("oc.select:").partition(",")
    name = name.strip()
    if inner.startswith("oc.env:"):
        return value_of(default) if comma else NotImplemented
    if name.startswith("."):
        parent = key.split(".")[: -(len(name) - len(name.lstrip(".")))]
        name = ".".join([*parent, name.lstrip(".")])
    if name in values and name != key:
        return values[name]
    if "." not in name:
        return NotImplemented  # a variable of the shell
    return value_of(default) if comma else None
