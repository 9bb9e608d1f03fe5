"""The card of a trained model: where it comes from, how good it is, and the checksums of its files.

``card.json`` lies beside the files of a model. Everything in it is plain JSON; no part of a model is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["interference", "demand", "coldstart"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CARD_FILE = "card.json"
FORMAT, FORMAT_VERSION = "cotenant-model", 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NOT_STATED = "none stated: measure only"  # the licence of data published without one
_RESTRICTED = re.compile(r"non-?\s?commercial|research (use|purposes?)|measure only|none stated", re.IGNORECASE)


class ModelFileError(ValueError):
    """A model file that cannot be used; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """What a model was fitted on.

    Attributes:
        source: The data in words.
        licence: Their licence in words.
        fingerprint: SHA-256 of their content, hexadecimal.
        rows: Number of rows that were used.
    """

    source: str
    licence: str
    fingerprint: str
    rows: int

    @property
    def restricted(self) -> bool:
        """Whether the licence forbids to pass on or to earn with what was made of the data."""
        return _RESTRICTED.search(self.licence) is not None


@dataclass(frozen=True, slots=True)
class Card:
    """Where a model comes from and how good it is.

    Attributes:
        kind: What it predicts.
        version: Its name in the registry; "" until the registry has given one.
        made_at: When it was fitted, ISO 8601 in UTC.
        program: The version of cotenant that fitted it.
        features_version: Version of the inputs it was fitted for.
        data: What it was fitted on.
        metrics: Its errors on groups that it had not seen, by name.
        baselines: The same errors of simpler predictors on the same groups.
        protocol: How these were found, in words.
        seed: Of everything random in the fit; None when nothing was.
        options: How it was fitted; plain JSON values.
        files: Name → SHA-256 of each of its files; the registry fills it in.
    """

    kind: Kind
    version: str
    made_at: str
    program: str
    features_version: int
    data: tuple[DataSource, ...]
    metrics: Mapping[str, float]
    baselines: Mapping[str, float]
    protocol: str
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def restricted(self) -> bool:
        """Whether the licence of any of the data forbids to pass the model on or to earn with it."""
        return any(each.restricted for each in self.data)


def digest(card: Card) -> str:
    """Return the SHA-256 of a card, its files' checksums included and its version left out."""
    return _digest(_body(card))


def write_card(folder: Path, card: Card) -> None:
    """Write ``card.json``.

    Raises:
        ModelFileError: A field of the card has a value that could not be read back.
    """
    path = folder / CARD_FILE
    try:
        text = json.dumps({"version": card.version} | _body(card), indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{path}: a card holds plain JSON and finite numbers: {error}") from error
    _parsed(path, json.loads(text))
    path.write_text(text + "\n", encoding="utf-8")


def read_card(folder: Path, kind: Kind, version: str, features_version: int) -> Card:
    """Read and check ``card.json``.

    Args:
        folder: Where it lies.
        kind: What kind of model must be there.
        version: The name by which it was asked for.
        features_version: What the running program reads.

    Raises:
        ModelFileError: The card is missing, damaged, of another kind, version, format or features version.
    """
    path = folder / CARD_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read as the card of a model: {error}") from error
    card = _parsed(path, raw)
    for name, found, wanted in (("kind", card.kind, kind), ("version", card.version, version)):
        if found != wanted:
            raise refused(path, name, found, f"{wanted!r}, as the folder says")
    if card.features_version != features_version:
        raise refused(path, "features_version", card.features_version, f"{features_version}: fit the model again")
    if version.rpartition("-")[2] != _digest({name: raw[name] for name in raw if name != "version"})[:8] and (
        "-" in version
    ):
        raise ModelFileError(f"{path}: damaged: its content does not belong to the version {version}")
    return card


def check_files(folder: Path, card: Card) -> None:
    """Compare the files of a model with the checksums in its card.

    Raises:
        ModelFileError: A file is missing or differs.
    """
    for name, wanted in card.files.items():
        path = folder / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
        if found != wanted:
            raise ModelFileError(f"{path}: damaged: its SHA-256 is {found[:12]}…, the card says {wanted[:12]}…")


def refused(path: Path, name: str, value: object, accepted: str) -> ModelFileError:
    """Return the error of one field of a file."""
    return ModelFileError(f"{path}: {name}: {value!r:.120} is not accepted; give {accepted}")


def _body(card: Card) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(asdict(card)))  # as it will be read back
    del content["version"]
    return {"format": FORMAT, "format_version": FORMAT_VERSION} | content


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _parsed(path: Path, raw: object) -> Card:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ModelFileError(f"{path}: not the card of a model; its format must be {FORMAT!r}")
    fields = _Fields(path, raw)
    fields.need(
        "format_version", raw.get("format_version") == FORMAT_VERSION, f"{FORMAT_VERSION}: another cotenant wrote it"
    )
    fields.need("kind", raw.get("kind") in KINDS, f"one of {', '.join(KINDS)}")
    fields.need("made_at", _is_utc(raw.get("made_at")), "a date and time in ISO 8601, UTC")
    fields.need("features_version", _is_whole(raw.get("features_version")), "a whole number")
    fields.need("seed", raw.get("seed") is None or _is_whole(raw.get("seed")), "a whole number or nothing")
    fields.need("options", isinstance(raw.get("options"), dict), "a mapping of names to values")
    files = fields.mapping("files", "names of files and their SHA-256")
    for name, checksum in files.items():
        good = _FILE.fullmatch(name) and isinstance(checksum, str) and _SHA256.fullmatch(checksum)
        fields.need("files", bool(good), "names of files without folders and their SHA-256")
    return Card(
        kind=raw["kind"],
        version=fields.text("version", empty=True),
        made_at=raw["made_at"],
        program=fields.text("program"),
        features_version=raw["features_version"],
        data=_sources(fields),
        metrics=fields.numbers("metrics"),
        baselines=fields.numbers("baselines"),
        protocol=fields.text("protocol"),
        seed=raw["seed"],
        options=raw["options"],
        files=files,
    )


def _sources(fields: _Fields) -> tuple[DataSource, ...]:
    accepted = "a list of sources, each with source, licence, fingerprint (SHA-256) and rows"
    found = fields.raw.get("data")
    fields.need("data", isinstance(found, list) and bool(found), accepted)
    sources = []
    for each in found if isinstance(found, list) else ():
        whole = each if isinstance(each, dict) else {}
        source, licence, fingerprint = (str(whole.get(name) or "") for name in ("source", "licence", "fingerprint"))
        rows = whole["rows"] if _is_whole(whole.get("rows")) else -1
        good = source.strip() and licence.strip() and _SHA256.fullmatch(fingerprint) and rows >= 0
        fields.need("data", bool(good), accepted)
        sources.append(DataSource(source, licence, fingerprint, rows))
    return tuple(sources)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one file, read with errors that name file and field."""

    path: Path
    raw: Mapping[str, Any]

    def need(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise refused(self.path, name, self.raw.get(name), accepted)

    def text(self, name: str, empty: bool = False) -> str:
        value = self.raw.get(name)
        self.need(name, isinstance(value, str) and (empty or bool(value.strip())), "a text")
        return str(value)

    def mapping(self, name: str, accepted: str) -> dict[str, Any]:
        value = self.raw.get(name)
        self.need(name, isinstance(value, dict), accepted)
        return dict(value) if isinstance(value, dict) else {}

    def numbers(self, name: str) -> dict[str, float]:
        values = self.mapping(name, "names and numbers")
        for value in values.values():
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            self.need(name, good, "names and finite numbers")
        return {key: float(value) for key, value in values.items()}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_utc(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except ValueError:
        return False


__all__ = [
    "CARD_FILE",
    "KINDS",
    "Card",
    "DataSource",
    "Kind",
    "ModelFileError",
    "check_files",
    "digest",
    "read_card",
    "refused",
    "write_card",
]
