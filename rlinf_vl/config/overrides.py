"""Overrides of the command line in Hydra's grammar, and corrections for those that a shell has
changed."""

import copy
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlinf_vl.config.keys import config_keys, config_sections
from rlinf_vl.config.presets import PRESETS
from rlinf_vl.config.removed import RENAMED

#: The hint for several values, which only `train --multirun` takes.
ONE_RUN = (
    "`rlinf-vl train CONFIG --multirun KEY=1,2` runs one value after the other; without --multirun, "
    "and for other verbs, give one value"
)
_BEGINS = re.compile(r"[+~]*[\w./@-]+=")
_DELETES = re.compile(r"~[\w.]+$")
# text that needs no quotes, neither in a shell nor in Hydra's grammar
_PLAIN = re.compile(r"[\w./:+%@-]+", re.ASCII)


def apply_overrides(
    written: dict[str, Any], overrides: Sequence[str | tuple[str, Any]]
) -> list[str]:
    """Apply overrides in place: first the texts, then the pairs (key, value).

    A section given as a mapping is merged; everything else is replaced. Changing a key that has
    presets also replaces the YAML's values of the keys that they set.

    Returns:
        The problems, each with the corrected argument if there is one.
    """
    problems, set_keys = [], set[str]()
    # Values before the overrides, to find the choices that they change.
    chosen = {
        key: written.get(f"algorithm.{key}", config_keys()[f"algorithm.{key}"].default)
        for key in PRESETS
    }
    for words in _expanded(list(_groups([text for text in overrides if isinstance(text, str)]))):
        text = words[0]
        # Users of Hydra try its flag, and argparse passes it on as an override.
        if text in ("--multirun", "-m"):
            problems.append(f"{text}: {ONE_RUN}")
            continue
        # A shell splits what is not quoted; the argument to write is worth more than the error
        # alone.
        if len(words) > 1:
            fixed = _corrected(_joined(words))
            further_words = ", ".join(map(repr, words[1:]))
            hint = (
                f"; write {fixed}"
                if fixed
                else "; write key=value, in quotes where a blank, a bracket or a comma is"
            )
            problems.append(f"override {text!r}: {further_words} came as separate arguments{hint}")
            continue
        try:
            override = _parsed(text)
        except HydraException as error:
            fixed = _corrected(text)
            reason = str(error).splitlines()[0]
            hint = f"write {fixed}" if fixed else "write key=value, and quote '{…}' and '[…]'"
            problems.append(f"override {text!r}: can't be read ({reason}); {hint}")
            continue
        key, value = override.key_or_group, override.value()
        value = _with_function_names(value) if key == "reward.functions" else value
        if override.is_delete():
            problems.append(f"override {text!r}: '{key}' can't be removed; give it a value")
        # A comma outside of quotes is a sweep for Hydra; nearly always a list or a text was meant.
        elif override.is_sweep_override():
            fixed = _corrected(text)
            hint = f"write {fixed}" if fixed else f"quote a value with a comma in it; {ONE_RUN}"
            problems.append(f"override {text!r}: is a sweep; a run takes one value: {hint}")
        else:
            set_keys |= _set(written, key, value)
    for pair in overrides:
        if not isinstance(pair, str):
            set_keys |= _set(written, *pair)
    for key, old_value in chosen.items():
        new_value = written.get(f"algorithm.{key}", old_value)
        if new_value != old_value:
            # Without a value in `written`, the preset of the new choice fills the key
            # (`with_presets`).
            preset_keys = {f"algorithm.{name}" for name in PRESETS[key].get(str(new_value), {})}
            for preset_key in preset_keys - set_keys:
                written.pop(preset_key, None)
    return problems


def _with_function_names(value: Any) -> Any:
    """Return the entries of `reward.functions`, with bare names turned into mappings."""
    # Bare names are what a user writes first; the schema has mappings, for weights and keywords.
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        return value
    return [{"function": entry} if isinstance(entry, str) else entry for entry in entries]


def leaves(written: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested mappings."""
    for name, value in written.items():
        key = RENAMED.get(f"{prefix}{name}", f"{prefix}{name}")
        if isinstance(value, dict) and value and key not in config_keys():
            yield from leaves(value, f"{key}.")
        elif value or key not in config_sections():  # an empty section sets nothing
            yield key, value


def _set(written: dict[str, Any], key: str, value: Any) -> set[str]:
    """Set a key, or the keys of a section; return the keys set."""
    if key in config_sections() and isinstance(value, dict):
        section_leaves = dict(leaves(value, f"{key}."))
        written.update(section_leaves)
        return set(section_leaves)
    if mapping := next(_under(key), None):
        # A copy is changed, since the mapping may be that of a composed config that is used again.
        old_value = written.get(mapping)
        place = written[mapping] = copy.deepcopy(old_value) if isinstance(old_value, dict) else {}
        *within, name = key.removeprefix(f"{mapping}.").split(".")
        for inner in within:
            place[inner] = place = place[inner] if isinstance(place.get(inner), dict) else {}
        place[name] = value
    else:
        written[key] = value
    return {key}


def _is_mapping(key: str) -> bool:
    return get_origin(config_keys()[key].type) is dict


def _parsed(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Group the words of the command line by override. An override begins with `key=` or a key."""
    group: list[str] = []
    for word in words:
        # Inside brackets a word continues the override, whatever it looks like.
        is_open = group and _depth(" ".join(group)) > 0
        if (
            group
            and not is_open
            and (_BEGINS.match(word) or _DELETES.match(word) or word in config_keys())
        ):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _depth(text: str) -> int:
    return sum((c in "[{") - (c in "]}") for c in text)


def _expanded(groups: list[list[str]]) -> Iterator[list[str]]:
    """Yield the groups, joining those that a shell made of `key={a:1,b:2}`: `key=a:1` and
    `key=b:2`."""
    while groups:
        words = groups.pop(0)
        key, _, value = words[0].partition("=")
        # Only these keys take mappings, so a repeated key with a colon elsewhere is a mistake.
        takes_braces = key in config_sections() or (
            key in config_keys() and "dict" in str(config_keys()[key].type)
        )
        while takes_braces and re.match(r"\[?\w[\w.]*:", value) and groups:
            if not groups[0][0].startswith(f"{key}=") or ":" not in groups[0][0]:
                break
            words = words + groups.pop(0)
        yield words


def _joined(words: Sequence[str]) -> str:
    """Join the words of an override that a shell has split."""
    key, equals, value = words[0].partition("=")
    if all(word.startswith(f"{key}=") for word in words):  # the shell has expanded braces
        # Only the first colon ends a name: a value may be a path with further ones.
        parts = [word.removeprefix(f"{key}=").replace(":", ": ", 1) for word in words]
        bare = [part.strip("[]") for part in parts]
        return (
            f"{key}=[{{{', '.join(bare)}}}]"
            if parts[0] != bare[0]
            else f"{key}={{{', '.join(parts)}}}"
        )
    return f"{key}={' '.join(part for part in (value, *words[1:]) if part not in ('', '='))}"


def _corrected(text: str) -> str | None:
    """Return an override with the quotes that a shell and Hydra's grammar need; None if it can't be
    corrected."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not (key in config_keys() or key in config_sections() or any(_under(key))):
        return None
    annotation = str(config_keys()[key].type) if key in config_keys() else ""
    try:
        # Text without brackets is left as it is: YAML would turn `on` or `1_000` into other values.
        read = yaml.safe_load(value) if value[:1] in ("[", "{") else value
    except yaml.YAMLError:
        return None
    # `a,b` for a list is a sweep in Hydra, and two elements for its writer.
    if isinstance(read, str) and "list" in annotation and "," in read:
        read = [part.strip() for part in read.split(",")]
    if isinstance(read, str) and not (
        _PLAIN.fullmatch(read) or "str" in annotation or any(_under(key))
    ):
        return None
    fixed = f"{key}={_value(read)}"
    try:
        # Hydra would still read it as a sweep, so it is no correction.
        if _parsed(fixed).is_sweep_override():
            return None
    except HydraException:
        return None
    return in_shell(fixed)


def _under(key: str) -> Iterator[str]:
    """Yield the keys that hold mappings and that a dotted name leads into."""
    return (k for k in config_keys() if key.startswith(f"{k}.") and _is_mapping(k))


def _value(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_value(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if not isinstance(value, str):
        return yaml.safe_dump(value).partition("\n")[0]
    if _PLAIN.fullmatch(value):
        return value
    # The quote that the text lacks spares most backslashes.
    quote = '"' if "'" in value else "'"
    return f"{quote}{value.replace(quote, chr(92) + quote)}{quote}"


def in_shell(text: str) -> str:
    """Return an argument as it is written in a shell."""
    if re.fullmatch(r"[\w./:+%@=,-]+", text, re.ASCII):
        return text
    if "'" not in text:
        return f"'{text}'"
    # An interactive bash expands `!` within double quotes, too.
    return shlex.quote(text) if "!" in text else '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
