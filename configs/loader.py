"""Reads settings: ``default.yaml``, then a user's YAML file, then ``COTENANT_<SECTION>__<KEY>`` environment variables.

Every value remembers where it came from, so that an error names the file or variable, the key, the value and what is
accepted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cotenant.configs import yamlfile
from cotenant.configs.settings import Settings

DEFAULTS = Path(__file__).with_name("default.yaml")
FILE_VARIABLE = "COTENANT_CONFIG"
PREFIX = "COTENANT_"
SEPARATOR = "__"

_Path = tuple[str, ...]
_TYPES = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "string": "a text"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class SettingsError(ValueError):
    """A setting, or the file that should hold it, is not accepted. The message says which, where and what is."""


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the settings.

    Args:
        path: The user's file; None = the one ``$COTENANT_CONFIG`` names, if any.
        environ: Environment variables.

    Raises:
        SettingsError: A file that cannot be read, an unknown key, or a value that is not accepted.
    """
    if path is None and environ.get(FILE_VARIABLE):
        path = Path(environ[FILE_VARIABLE])
    values: dict[_Path, Any] = {}
    origins: dict[_Path, str] = {}
    for source in (DEFAULTS, path):
        if source is not None:
            for key, value in _flatten(_read(source), str(source)).items():
                values[key], origins[key] = value, str(source)
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX) and SEPARATOR in name:
            key = tuple(name.removeprefix(PREFIX).lower().split(SEPARATOR))
            values[key], origins[key] = _scalar(name, text), f"environment variable {name}"
    for key in values:
        _require_known(key, origins[key])
    return _validate(values, origins)


def accepted(key: tuple[str, ...]) -> str:
    """Say in words what a setting accepts, from its declaration."""
    section, name = key
    schema = Settings.model_json_schema()
    definitions: dict[str, dict[str, Any]] = schema["$defs"]
    return _options(_resolved(schema["properties"][section], definitions)["properties"][name], definitions)


def about_names(error: ValidationError) -> str:
    """Return, as the end of a sentence, which name is not accepted and what is; empty where names are not the fault."""
    where = error.errors()[0]["loc"]
    if where[-1] != "[key]":
        return ""
    names = "of 1 to 128 characters"
    if where[0] == "scheduling":
        names = "that begin with a letter or a digit, of letters, digits, '.', '_' and '-', at most 63"
    return f"; give names {names}: {_shown(where[-2])} is none"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yamlfile.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); give a YAML file of settings") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not text in UTF-8; give a YAML file of settings") from error
    except yamlfile.YamlError as error:
        raise SettingsError(f"{path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: holds {_shown(content)}; give sections: {', '.join(Settings.model_fields)}")
    return content


def _flatten(sections: Mapping[Any, Any], source: str) -> dict[_Path, Any]:
    flat: dict[_Path, Any] = {}
    for section, keys in sections.items():
        if keys is None and section in Settings.model_fields:
            continue  # a section whose keys are all commented out
        if not isinstance(keys, dict):
            _require_known((str(section),), source)
            raise SettingsError(
                f"{source}: {section}: {_shown(keys)} is not accepted; give its keys, indented below it"
            )
        flat.update({(str(section), str(key)): value for key, value in keys.items()})
    return flat


def _scalar(name: str, text: str) -> Any:
    try:
        return yamlfile.read(text)
    except yamlfile.YamlError as error:
        raise SettingsError(f"environment variable {name}: {_shown(text)} is not a YAML value") from error


def _require_known(key: _Path, source: str) -> None:
    known = [(section,) for section in Settings.model_fields] if len(key) == 1 else _all_keys()
    if key in known:
        return
    shown = ".".join(key)
    names = [".".join(name) for name in known]
    close = difflib.get_close_matches(shown, names, n=1, cutoff=0.8)
    in_section = [name for name in names if name.startswith(f"{key[0]}.")]
    listed = ", ".join(in_section or Settings.model_fields)
    accepted_names = f"did you mean {close[0]}?" if close else f"give one of {listed}"
    raise SettingsError(f"{source}: {shown} is not a setting; {accepted_names}")


def _all_keys() -> list[_Path]:
    return [
        (section, key)
        for section, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    ]


def _validate(values: Mapping[_Path, Any], origins: Mapping[_Path, str]) -> Settings:
    tree: dict[str, dict[str, Any]] = {}
    for (section, key), value in values.items():
        tree.setdefault(section, {})[key] = _plain(value)
    try:
        # As JSON: strict, so that true is no number, but plain mappings do for sections.
        return Settings.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        wrong = tuple(str(part) for part in error.errors()[0]["loc"][:2])
        raise SettingsError(
            f"{origins[wrong]}: {'.'.join(wrong)}: {_shown(values[wrong])} is not accepted; give {accepted(wrong)}"
            f"{about_names(error)}"
        ) from error


def _plain(value: Any) -> Any:
    """Return the value; for what JSON cannot hold (a date, bytes, a list inside itself) []: no setting takes that."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return []
    return value


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, dict[str, Any]]) -> Mapping[str, Any]:
    reference = schema.get("$ref") or (schema["allOf"][0]["$ref"] if "allOf" in schema else None)
    return definitions[reference.rsplit("/", 1)[-1]] if reference else schema


def _options(schema: Mapping[str, Any], definitions: Mapping[str, dict[str, Any]]) -> str:
    return " or ".join(_words(_resolved(each, definitions), definitions) for each in schema.get("anyOf", [schema]))


def _words(schema: Mapping[str, Any], definitions: Mapping[str, dict[str, Any]]) -> str:
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if schema.get("type") == "null":
        return "null"
    if "patternProperties" in schema:
        (inner,) = schema["patternProperties"].values()
        return f"names, each with {_options(inner, definitions)}"
    if "properties" in schema:
        parts = (f"{name}: {_options(each, definitions)}" for name, each in schema["properties"].items())
        return f"{{{', '.join(parts)}}}"
    limits = [f"{sign} {schema[limit]:g}" for limit, sign in _LIMITS.items() if limit in schema]
    return " ".join([_TYPES[schema["type"]], " and ".join(limits)]).strip()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
