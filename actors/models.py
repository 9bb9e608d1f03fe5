"""From the model registry to models that serve. What cannot be loaded is replaced by something simpler, and told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.datasets.registry import (
    SHIPPED,
    DemandExperts,
    Kind,
    ModelFileError,
    Registry,
    load_coldstart,
    load_demand,
    load_interference,
)
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.types import InterferencePredictor
from cotenant.scheduler.core.models import Models

T = TypeVar("T")


class ModelShelf:
    """The registry as the settings want it used.

    Args:
        settings: What is to predict.
        state_dir: Where the registry lies unless the settings say otherwise.
    """

    def __init__(self, settings: PredictionSettings, state_dir: Path) -> None:
        self.registry = Registry(
            state_dir / "models" if settings.models is None else Path(settings.models).expanduser()
        )
        self._kinds: dict[Kind, bool] = {
            "interference": settings.interference == "learned",
            "coldstart": settings.cold_start,
            "demand": settings.demand == "mixture",
        }

    def wanted(self) -> dict[str, str]:
        """Return the version of each kind that is to serve; a kind that is switched off or has none is missing."""
        versions = {kind: self._active(kind) for kind, on in self._kinds.items() if on}
        return {kind: version for kind, version in versions.items() if version is not None}

    def load(self, versions: Mapping[str, str]) -> Models:
        """Return the models of these versions (see ``ModelSource``)."""
        serving: dict[str, str] = {}
        warnings: list[str] = []
        learned = self._first("interference", versions, self._predictor, serving, warnings)
        classes = self._first(
            "coldstart", versions, lambda version: load_coldstart(self.registry, version), serving, warnings
        )
        interference = UtilisationRule() if learned is None else learned
        serving.setdefault("interference", "utilisation rule")
        return Models(interference, classes, serving, tuple(warnings))

    def demand(self, versions: Mapping[str, str]) -> tuple[str, DemandExperts | None, tuple[str, ...]]:
        """Return the version of the trained demand experts that serve, and them; and what went wrong.

        The version may be another one than was asked for; "" and None when there are no experts.
        """
        serving: dict[str, str] = {}
        warnings: list[str] = []
        experts = self._first("demand", versions, self._sound_experts, serving, warnings)
        return serving.get("demand", ""), experts, tuple(warnings)

    def _predictor(self, version: str) -> InterferencePredictor:
        return load_interference(self.registry, version).predictor()

    def _sound_experts(self, version: str) -> DemandExperts:
        experts = load_demand(self.registry, version)
        experts.forecaster()  # experts that cannot join the mixture are of no use
        return experts

    def _active(self, kind: Kind) -> str | None:
        try:
            return self.registry.active(kind)
        except ModelFileError:
            return SHIPPED if self.registry.ships(kind) else None  # the damaged choice is told by ``warnings``

    def warnings(self, serving: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """What is wrong with the registry itself, and with the files of what serves: it would not after a restart."""
        found: list[str] = []
        try:
            self.registry.active("interference")
        except ModelFileError as error:
            found.append(str(error))
        return *found, *self.gone(serving or {})

    def gone(self, serving: Mapping[str, str]) -> list[str]:
        """Return which of the models that serve could not be loaded again, and why; by kind, their versions."""
        found = []
        for kind, on in self._kinds.items():
            version = serving.get(kind) if on else None
            if version is None or version not in {SHIPPED, self._active(kind)}:
                continue  # words for what is no model; or it is about to be replaced by another
            try:
                self.registry.verified(kind, version)
            except ModelFileError as error:
                found.append(f"{kind} model {version} serves until cotenant is restarted, its files are lost: {error}")
        return found

    def serving(self, models: Models, gpu_types: Collection[str]) -> dict[str, str]:
        """Return what serves, by kind, in words; of what was fitted to other GPUs than the cluster has it is said.

        Args:
            models: The models that serve.
            gpu_types: Types of the GPUs in the cluster.
        """
        said = dict(models.serving)
        learned, classes = models.interference, models.cold_start
        if isinstance(learned, LearnedInterference) and (other := sorted(set(gpu_types) - set(learned.models))):
            fitted = ", ".join(sorted(learned.models)) or "nothing"
            said["interference"] += (
                f" (fitted to {fitted}; for {', '.join(other)} an estimate until pairs are measured)"
            )
        if classes is not None and "coldstart" in said and gpu_types and not set(gpu_types) <= set(classes.gpu_types):
            fitted = ", ".join(classes.gpu_types) or "GPUs not told"
            said["coldstart"] += f" (fitted to {fitted}; of jobs on {', '.join(sorted(gpu_types))} it says nothing)"
        return said

    def _first(
        self,
        kind: Kind,
        versions: Mapping[str, str],
        load: Callable[[str], T],
        serving: dict[str, str],
        warnings: list[str],
    ) -> T | None:
        """Load the version, else the shipped one if there is one; note what serves and what could not."""
        wanted = versions.get(kind)
        if wanted is None:
            return None
        for version in dict.fromkeys((wanted, SHIPPED) if self.registry.ships(kind) else (wanted,)):
            try:
                found = load(version)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a model, something else serves
                warnings.append(f"{kind} model {version} cannot be used: {error}")
            else:
                serving[kind] = version
                return found
        return None
