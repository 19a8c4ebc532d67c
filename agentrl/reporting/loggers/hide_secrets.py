"""A run's configuration without what must not leave the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentrl.config.source import read_value
from agentrl.errors import ConfigError

HIDDEN = "(hidden)"
_KEY = re.compile(
    r"(^|[_\-. ]|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
    r"(api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|key|secrets?|passwords?|passwd|pwd|passphrase|"
    r"credentials?|auth|authorization|token|bearer|cookie)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"(?P<url>\b[a-z][a-z0-9+.-]*://)[^/?#\s]+@"
    r"|\bBearer\s+\S+"
    r"|\bBasic\s+(?=\S*(?:[\d=]|(?-i:[a-z][A-Z])))[\w+/=-]{8,}"
    r"|\b(?:sk|hf|gh[opsur]|github_pat|glpat|xox[abeps]|nvapi|gsk|pypi|npm|r8)[-_][A-Za-z0-9_-]{16,}"
    r"|\bA[KS]IA[A-Z0-9]{16}\b"
    r"|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?P<flag>(?:--?[\w-]*(?:key|token|secret|password)(?:=|\s+))"
    r"|\b\w*(?:api_?key|access_key|token|secret|password|passwd)=)\S+"
    r"|(?P<query>[?&][\w-]*(?:key|token|secret|password|signature)=)[^&\s]+",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password)", re.IGNORECASE)


def without_secrets(config: Mapping[str, object]) -> dict[str, object]:
    """A copy in which values of keys such as `api_key`, and credentials inside of texts, are hidden."""
    return {str(key): HIDDEN if _secret(str(key), value) else _clean(value) for key, value in config.items()}


def has_secrets(words: Sequence[str]) -> bool:
    """Whether a command line, such as `--set env.options.api_key=...`, says what `without_secrets` would hide."""
    given: dict[str, object] = {"words": list(words)}
    for word in words:
        key, _, value = word.partition("=")
        try:
            given[key] = read_value(value, word)
        except ConfigError:
            given[key] = value
    return without_secrets(given) != given


def _secret(key: str, value: object) -> bool:
    found = _KEY.search(key)
    if found is None or not value:
        return False
    if isinstance(value, int | float):  # a token may be an id, and a key a number of a column
        return not isinstance(value, bool) and found[2].lower().startswith(("pass", "pwd", "secret", "api"))
    return isinstance(value, str | list | tuple | Mapping)


def _clean(value: object) -> object:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        cleaned = [_clean(item) for item in value]
        for place, item in enumerate(value[:-1]):
            if isinstance(item, str) and _FLAG.fullmatch(item):  # `[--api-key, xyz]`
                cleaned[place + 1] = HIDDEN
        return cleaned
    return _VALUE.sub(_hidden, value) if isinstance(value, str) else value


def _hidden(found: re.Match[str]) -> str:
    if found["url"]:
        return f"{found['url']}{HIDDEN}@"
    return f"{found['flag'] or found['query'] or ''}{HIDDEN}"
