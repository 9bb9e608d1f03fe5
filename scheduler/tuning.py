"""Changes of the settings that may change while everything runs: ``{"placement": {"confidence": 0.9}}``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from cotenant.configs import yamlfile
from cotenant.configs.loader import about_names, accepted
from cotenant.configs.settings import Settings
from cotenant.scheduler.errors import NotAccepted
from cotenant.scheduler.views import TuningView

Changes = Mapping[str, Mapping[str, object]]
"""By section, the settings to change and their new values."""


def tuning_of(settings: Settings) -> TuningView:
    """Return those of the settings that may change while everything runs."""
    return TuningView(**{section: getattr(settings, section) for section in TuningView.model_fields})


def with_tuning(settings: Settings, tuning: TuningView) -> Settings:
    """Return the settings with these in place of their own."""
    return settings.model_copy(update={section: getattr(tuning, section) for section in TuningView.model_fields})


def changed(tuning: TuningView, changes: Changes) -> TuningView:
    """Return the settings after the changes.

    Raises:
        NotAccepted: A section or key that there is not, or a value that is not accepted; names the key, the value and
            what is accepted.
    """
    tree = tuning.model_dump(mode="json")
    for section, values in changes.items():
        _require_known(section, tree, "section")
        if not isinstance(values, Mapping):
            raise NotAccepted(section, values, f"a mapping of its keys: {', '.join(tree[section])}")
        for key, value in values.items():
            _require_known(key, tree[section], section)
            tree[section][key] = value
    try:
        # As JSON: strict, so that true is no number, but plain mappings do for queues and tenants.
        return TuningView.model_validate_json(json.dumps(tree), strict=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(error, changes) from error


def read_changes(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """Read changes written ``section.key=value``, the value in YAML; the last of several for one key counts.

    Raises:
        NotAccepted: A text of another form.
    """
    changes: dict[str, dict[str, object]] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (sign and dot and section and key):
            raise NotAccepted("set", text, "section.key=value, as placement.confidence=0.9")
        try:
            changes.setdefault(section, {})[key] = yamlfile.read(value)
        except yamlfile.YamlError as error:
            raise NotAccepted(name.strip(), value, "a value in YAML") from error
    return changes


def _require_known(name: object, there: Mapping[str, object], where: str) -> None:
    if name in there:
        return
    close = difflib.get_close_matches(str(name), there, n=1, cutoff=0.6)
    field = "settings" if where == "section" else where
    raise NotAccepted(field, name, f"a known name; did you mean {close[0]}?" if close else f"one of {', '.join(there)}")


def _refusal(error: Exception, changes: Changes) -> NotAccepted:
    if not isinstance(error, ValidationError) or len(where := error.errors()[0]["loc"]) < 2:
        return NotAccepted("settings", dict(changes), "values that JSON can hold")
    section, key = str(where[0]), str(where[1])
    return NotAccepted(f"{section}.{key}", changes[section][key], accepted((section, key)) + about_names(error))
