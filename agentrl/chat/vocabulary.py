"""A tokenizer that never interprets text as control tokens: message boundaries and message text stay separate.

A control token is an added token that structures a conversation: every special token, and added tokens that the
chat template writes itself (`<tool_call>`, `'<' + role + '>'`) or that look like one (`<|...|>`). The template may
write them; text from users, tools, files or the policy may not. Text therefore passes through the template with
each control token in it replaced by a private-use character (`shield`), so that neither the template nor the
tokenizer can act on it, and is restored as plain text when the rendered string is encoded.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.jinja import compile_template, variables_of
from agentrl.chat.memo import Memo
from agentrl.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SENTINEL = "\U000fffff"
"""Marks the end of a stand-in completion in a rendered string; `shield` never lets it through from text."""

_ESCAPE = "\U000ffffe"
_FIRST = 0xF0000  # plane 15 (private use): one character per control token, counting up
_LITERAL = 0x100000  # plane 16: follows _ESCAPE if the text itself contained a character of plane 15
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REMEMBERED_LENGTH = 4096
_MARKER_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class Vocabulary:
    """Convert ids to text and back, for one tokenizer directory.

    Attributes:
        control: id of each control token, by its text.
        special_tokens: bos_token, eos_token, ... as chat templates expect them.
        size: one more than the highest id; there may be gaps between ids.
    """

    def __init__(
        self, spec: Mapping[str, Any], special_tokens: Mapping[str, str], template: str, where: str
    ) -> None:
        added: list[dict[str, Any]] = list(spec["added_tokens"])
        self.special_tokens = dict(special_tokens)
        written = _written_by(template, special_tokens)
        self.control: dict[str, int] = {
            token["content"]: token["id"]
            for token in added
            if token["special"] or _structures(token["content"], written)
        }
        if len(self.control) > 0xFF00:
            raise ConfigError(f"{where}: {len(self.control)} control tokens; at most 65280 are supported")
        self._token_of_id = {id: token for token, id in self.control.items()}
        self._full = _tokenizer(spec, where)
        _check_ids(added, self._full, where)
        self._added: dict[int, str] = {token["id"]: token["content"] for token in added}
        model = _ids_of(spec["model"])
        self.size: int = max((*model.values(), *self._added), default=-1) + 1
        self._unknown = _unknown(spec["model"], model)
        self._byte_of = _byte_alphabet() if '"ByteLevel"' in json.dumps(spec.get("decoder")) else {}
        self._encoded: Memo[list[int]] = Memo()
        self._bare, self._remap = _without(self.control, spec, self._full, where)

        by_length = sorted(self.control, key=len, reverse=True)
        self._shield_of = {token: chr(_FIRST + i) for i, token in enumerate(by_length)}
        self._token_of_shield = {shield: token for token, shield in self._shield_of.items()}
        tokens = "|".join(map(re.escape, by_length)) or "(?!)"
        self._in_text = re.compile(f"({tokens})")
        self._to_shield = re.compile(f"{tokens}|[\U000f0000-\U000fffff]")
        flags = {token["content"]: token for token in added}
        spaced = [
            (r"(?:(?<!\s)\s+)?" if flags[token]["lstrip"] else "")  # linear in a run of white space
            + re.escape(token)
            + (r"\s*" if flags[token]["rstrip"] else "")
            for token in by_length
        ]
        self._rendered = re.compile(f"({'|'.join(spaced) or '(?!)'})|{_ESCAPE}(.)|([\U000f0000-\U000fffff])", re.S)

    @classmethod
    def from_directory(cls, path: Path, template: str) -> Vocabulary:
        """Read the files of the tokenizer in a Hugging Face directory.

        Raises:
            ConfigError: tokenizer.json is missing or cannot be read.
        """
        file = path / "tokenizer.json"
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no tokenizer.json there; give a Hugging Face model directory with a fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(directory) writes one)"
            ) from None
        except (OSError, ValueError) as e:
            raise ConfigError(f"{file}: cannot be read as JSON: {e}") from e
        config = read_json(path / "tokenizer_config.json")
        known = {token["content"] for token in spec["added_tokens"]}
        for id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if token["content"] not in known:
                spec["added_tokens"].append(_FLAGS | {"special": False} | token | {"id": int(id)})
        if "added_tokens_decoder" not in config:  # then transformers reads the file of its older releases as well
            config |= read_json(path / "special_tokens_map.json")
        special = _named_tokens(config)
        _add_special(spec, {token: token for token in _more_tokens(config)} | special, template, str(path))
        return cls(spec, special, template, str(path))

    def refuse_beyond(self, size: int, template: str, where: str) -> None:
        """Check that a model with `size` embeddings has one for every token that text or the template needs.

        Raises:
            ConfigError: it has not. Added tokens that the template does not write do not matter.
        """
        advice = f"the model has {size:,} (vocab_size in config.json): use the tokenizer that it was trained with"
        if self.size > size and (beyond := self._beyond(size)):
            raise ConfigError(f"{where}: tokenizer.json has ids up to {max(beyond):,}, and {advice}")
        read = variables_of(template)
        named = {token for name, token in self.special_tokens.items() if name in read}
        for token, id in self.control.items():
            if id >= size and (token in template or token in named):
                raise ConfigError(f"{where}: the chat template writes {token!r}, token {id:,}, and {advice}")

    def _beyond(self, size: int) -> set[int]:
        """Ids from `size` on that text can have."""
        ids = self._full.get_vocab(with_added_tokens=False).values()
        return {id for id in ids if id >= size} - self._added.keys()

    def shield(self, value: object) -> Any:
        """Return `value` (text, or JSON-like data with text) with every control token in it made opaque."""
        if isinstance(value, str):
            return self._to_shield.sub(self._opaque, _LONE_SURROGATE.sub("\ufffd", value))
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.shield(item) for item in value]
        return value

    def _opaque(self, match: re.Match[str]) -> str:
        found = match.group()
        return self._shield_of.get(found) or _ESCAPE + chr(_LITERAL + ord(found) - _FIRST)

    def unshield(self, rendered: str) -> str:
        """Return the text that a rendered string represents."""
        return self._rendered.sub(lambda m: m.group() if m.group(1) is not None else self._literal(m), rendered)

    def _literal(self, match: re.Match[str]) -> str:
        if match.group(2) is not None:
            return chr(ord(match.group(2)) - _LITERAL + _FIRST)
        return self._token_of_shield.get(match.group(3), "")

    def encode(self, rendered: str) -> list[int]:
        """Encode a rendered string: control tokens written by the template are control, shielded ones are text.

        Raises:
            TemplateError: the tokenizer produces a control token from plain text.
        """
        ids: list[int] = []
        text: list[str] = []
        end = 0
        for match in self._rendered.finditer(rendered):
            text.append(rendered[end : match.start()])
            end = match.end()
            if match.group(1) is None:
                text.append(self._literal(match))
            else:
                ids += self.encode_text("".join(text))
                text.clear()
                token = match.group(1)
                ids.append(self.control[token] if token in self.control else self.control[token.strip()])
        text.append(rendered[end:])
        ids += self.encode_text("".join(text))
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text; nothing in it becomes a control token.

        Short texts are cached: the pieces of a prompt recur with every episode of its group.
        """
        if not text or len(text) > _REMEMBERED_LENGTH:
            return self._encode_text(text)
        return list(self._encoded(text, 2 * len(text), lambda: self._encode_text(text)))

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        ids = self._bare_ids(text)
        if self._token_of_id.keys().isdisjoint(ids):
            return ids
        for parts in self._splits(text):
            ids = [id for part in parts for id in self._bare_ids(part)]
            if not (self._token_of_id.keys() & ids) - {self._unknown}:
                return ids
        raise TemplateError(f"the tokenizer makes a control token out of the text {text[:80]!r}")

    def _splits(self, text: str) -> Iterator[Iterable[str]]:
        """Yield the text in ever smaller parts: the model's own merges may produce a control token."""
        pieces = self._in_text.split(text)
        yield [part for n, piece in enumerate(pieces) for part in (piece if n % 2 else [piece])]
        yield text

    def _bare_ids(self, text: str) -> list[int]:
        ids = _encoding(self._bare, text)
        return [self._remap.get(id, id) for id in ids] if self._remap else ids

    def count(self, text: str) -> int:
        """The number of tokens of a plain text alone."""
        return len(_encoding(self._bare, text))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`, control tokens included."""
        text: str = self._full.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_plain(self, ids: Iterable[int]) -> str:
        """Decode `ids` without the tokens that the tokenizer marks as special."""
        text: str = self._full.decode(list(ids), skip_special_tokens=True)
        return text

    def encode_raw(self, text: str) -> list[int]:
        """Encode text, interpreting control tokens and adding those that the tokenizer puts around any text."""
        return _encoding(self._full, text, add_special_tokens=True)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; the bytes of several tokens together are their text in UTF-8."""
        if id in self._added:
            return self._added[id].encode()
        token: str = self._full.id_to_token(id) or ""
        if self._byte_of:
            return bytes(self._byte_of[c] for c in token if c in self._byte_of)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte.group(1), 16)])
        return token.replace("\u2581", " ").encode()

    def token(self, id: int) -> str | None:
        """Return the text of a control token; None for any other id."""
        return self._token_of_id.get(id)

    def split_control(self, rendered: str) -> Iterable[tuple[int, int, int]]:
        """Return (start, end, id) of each control token written by the template, in order."""
        for match in self._rendered.finditer(rendered):
            if match.group(1) is not None:
                token = match.group(1)
                yield (match.start(), match.end(), self.control[token if token in self.control else token.strip()])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (GPT-2's alphabet)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a template can name, as transformers gives them to it."""
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(more := config.get(key), dict):
            found |= more
    texts = {name: _content(value) for name, value in found.items()}
    return {name: text for name, text in texts.items() if text}


def _more_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a name."""
    found = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [text for value in found if (text := _content(value))] if isinstance(found, list) else []


def _content(token: object) -> str:
    """Return the text of a token as the files of a tokenizer write it; "" for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _add_special(spec: dict[str, Any], special: Mapping[str, str], template: str, where: str) -> None:
    """Add the special tokens by name that are in the vocabulary only, as transformers does.

    Raises:
        ConfigError: the template writes one that is not in the vocabulary either.
    """
    known = {token["content"] for token in spec["added_tokens"]}
    if known.issuperset(special.values()):
        return
    ids = _ids_of(spec["model"])
    read = variables_of(template)
    for name, token in special.items():
        if token in known:
            continue
        if token in ids:
            spec["added_tokens"].append(_FLAGS | {"special": True, "content": token, "id": ids[token]})
            known.add(token)
        elif name in read or token in template:
            raise ConfigError(
                f"{where}: the chat template writes {token!r}, a special token by tokenizer_config.json, but "
                "tokenizer.json does not have it, so the model would read it as text: use the model's own "
                "tokenizer.json, or correct tokenizer_config.json"
            )


def _ids_of(model: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the id of each token of a model (BPE, Unigram, ...), without added tokens."""
    vocabulary = model.get("vocab", {})
    return vocabulary if isinstance(vocabulary, dict) else {entry[0]: id for id, entry in enumerate(vocabulary)}


def _unknown(model: Mapping[str, Any], ids: Mapping[str, int]) -> int | None:
    """Return the id that a model gives to text for which it has no token; None if it has one for any text."""
    found = model.get("unk_id", ids.get(model.get("unk_token") or ""))
    return found if isinstance(found, int) else None


def _check_ids(added: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, where: str) -> None:
    """Check that `tokenizer` has given the added tokens their ids: it numbers those outside the vocabulary itself.

    Raises:
        ConfigError: it has not, so that their text would become the ids of other tokens.
    """
    for token in added:
        id, given = token["id"], tokenizer.token_to_id(token["content"])
        if given not in (id, None):
            raise ConfigError(
                f"{where}: the added token {token['content']!r} has the id {id:,} by its files, but `tokenizers` "
                f"reads it as {given:,}; add it to model.vocab in tokenizer.json with the id that the model was "
                "trained with"
            )


def _written_by(template: str, special_tokens: Mapping[str, str]) -> str:
    """Return the source of a template, and what it writes around messages: it may join markers from parts."""
    shown = [template]
    for roles in (
        ("system", "user", "assistant", "user"),
        ("user", "assistant", "user"),
        ("user", "assistant", "tool"),
    ):
        messages = [{"role": role, "content": ""} for role in roles]
        with contextlib.suppress(Exception):  # it may refuse them, and its errors are reported when it is probed
            shown.append(
                compile_template(template)(messages=messages, add_generation_prompt=True, **special_tokens)
            )
    return "\n".join(shown)


def _structures(token: str, written: str) -> bool:
    """Whether a non-special added token is a marker; runs of spaces or newlines are ordinary vocabulary."""
    return bool(_MARKER_SHAPE.fullmatch(token)) or (
        token in written and not token.isalnum() and len(token.strip()) > 2
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file is missing.

    Raises:
        ConfigError: the file exists but is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read as JSON: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _tokenizer(spec: Mapping[str, object], where: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}))
    except Exception as e:
        raise ConfigError(f"{where}: tokenizer.json is not one that `tokenizers` can load: {e}") from e
    return tokenizer


def _without(
    control: Mapping[str, int], spec: Mapping[str, Any], full: Tokenizer, where: str
) -> tuple[Tokenizer, dict[int, int]]:
    """Return the same tokenizer without its control tokens, as it reads text after a control token.

    Also returns the ids that were renumbered (new id -> id of `full`).
    """
    kept = [token for token in spec["added_tokens"] if token["content"] not in control]
    plain = {**spec, "added_tokens": kept, "post_processor": None}
    anchor = next(iter(control), "")
    probes = ["a", " a", "\n", "\na b", "1 + 2"]
    if any(token["content"] == anchor and token["rstrip"] for token in spec["added_tokens"]):
        probes = [probe.lstrip() for probe in probes]  # the token takes the white space after it

    def ids(tokenizer: Tokenizer, text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    for candidate in (plain, _without_prefix_space(plain)):
        bare = _of_model(full, candidate, where)
        renumbered = [(bare.token_to_id(token["content"]), int(token["id"])) for token in kept]
        remap = {new: id for new, id in renumbered if new is not None and new != id}
        if all([remap.get(i, i) for i in ids(bare, p)] == ids(full, anchor + p)[bool(anchor) :] for p in probes):
            return bare, remap
    raise ConfigError(
        f"{where}: this tokenizer reads text after a control token in a way that cannot be reproduced without it "
        f"(tried {anchor!r} followed by {probes}); use a tokenizer.json without prefix-space rules"
    )


def _of_model(full: Tokenizer, spec: Mapping[str, Any], where: str) -> Tokenizer:
    """Return the tokenizer that `spec` describes, except that it shares the model of `full`.

    Reading a large vocabulary again would take most of a second, and its memory.
    """
    from tokenizers import AddedToken, Tokenizer

    no_model = {"type": "BPE", "vocab": {}, "merges": []}
    steps = _tokenizer({**spec, "model": no_model, "added_tokens": []}, where)
    found = Tokenizer(full.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(steps, step) is not None:
            setattr(found, step, getattr(steps, step))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found.add_tokens(
        [AddedToken(token["content"], **{flag: token[flag] for flag in flags}) for token in spec["added_tokens"]]
    )
    return found


def _without_prefix_space(node: object) -> Any:
    """Return the tokenizer description without the rules that put a space before the first word."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_without_prefix_space(n) for n in node if not (isinstance(n, dict) and n.get("type") == "Prepend")]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Prepend":
        return None
    out = {
        key: value if key in ("vocab", "merges") else _without_prefix_space(value) for key, value in node.items()
    }
    if out.get("type") == "Metaspace":
        out["prepend_scheme"] = "never"
    if "add_prefix_space" in out:
        out["add_prefix_space"] = False
    return out


def _encoding(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text. Unlike `encode`, `encode_batch` releases the interpreter's lock while it works."""
    if len(text) < _REMEMBERED_LENGTH:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids
    (found,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return list(found.ids)
