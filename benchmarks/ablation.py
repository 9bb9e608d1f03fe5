"""What each idea contributes: the shipped core on a sample of the Philly week, with one idea at a time left out.

A sample has the load of the week: on 32 GPUs as large a part of its jobs of up to 8 GPUs as 32 is of 304, drawn anew
for each repetition. Samples differ a lot, so every variant is compared with the whole core sample by sample; the spread
of that difference is its standard error. What pairs really do is a table that the core does not see; unless the row
says otherwise it is told predictions made without the job's model family, and learns.

Demand forecasts are no variant: jobs of a trace are steady, so there is nothing to foresee. What they contribute is
measured on real jobs whose demand changes (``loop.py``).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from common import Row, options, write_report
from peers_work import COMPLETION, QUEUEING, SLOWDOWN, SLOWDOWN_P99, changed, data_folder, kept, sample

from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction
from cotenant.scheduler.core.models import first_models, only
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.sensing import Sensing
from cotenant.scheduler.simulation.simulate import Scenario, shipped_core
from cotenant.scheduler.simulation.tables import load_pairs, utilisations
from cotenant.scheduler.simulation.traces import load
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Trace, even_cluster

GPUS, GPUS_PER_HOST, USABLE_GIB = 32, 8, 23
SEEDS = 6
WHOLE = "everything"


class Blind:
    """Says that nobody slows anybody down."""

    name = "blind"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        return [ThroughputPrediction(1.0, 1.0, 1.0)] * len(members)


class Unlearning:
    """The table as it was told, whatever is measured."""

    name = "unlearning"

    def __init__(self, table: TablePredictor) -> None:
        self._table = table

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        return self._table.predict(members, gpu_type)


@dataclass(frozen=True, slots=True)
class Variant:
    """The core without one idea.

    Attributes:
        name: What is left out.
        change: Settings by section and name.
        predictor: Makes the predictor from the one that is told predictions and from the truth; None = the rule.
        patched: What else is switched off while it runs.
        estimates: Whether jobs say how long they run.
    """

    name: str
    change: dict[str, dict[str, object]]
    predictor: Callable[[TablePredictor, PairTable], InterferencePredictor] | None = lambda told, _truth: told
    patched: Callable[[], AbstractContextManager[object]] = nullcontext
    estimates: bool = True


def _core(value: object, *names: str) -> Callable[[], AbstractContextManager[object]]:
    """Put a value in the place of something of the core, wherever it is looked up."""

    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as patches:
            for name in names:
                patches.enter_context(patch(f"cotenant.{name}", value))
            yield

    return patched


VARIANTS = (
    Variant(WHOLE, {}),
    Variant("told the truth about pairs", {}, lambda _told, truth: TablePredictor(truth, error=0.0)),
    Variant("no learning from measured pairs", {}, lambda told, _truth: Unlearning(told)),
    Variant("utilisation rule instead of a model", {}, None),
    Variant("no interference model", {}, lambda _told, _truth: Blind()),
    Variant("no limit on slowdown", {"placement": {"default_max_slowdown": 1e6}}),
    Variant("no sharing", {"placement": {"max_jobs_per_gpu": 1}}),
    Variant("at most two jobs a GPU", {"placement": {"max_jobs_per_gpu": 2}}),
    Variant("no suspending or moving", {"rebalance": {"enabled": False}}),
    Variant("no shrinking to what is used", {"resize": {"enabled": False}}),
    Variant(
        "order of arrival only",
        {"scheduling": {"size_weight": 0.0, "fair_share_weight": 0.0}},
        patched=_core(
            lambda size: 1.0 + 0.0 * size,
            "scheduler.core.priority.pace_of",
            "scheduler.core.line.paces_of",
            "scheduler.core.savers.paces_of",
        ),
    ),
    Variant("no estimates of run times (no backfill)", {}, estimates=False),
    Variant("no reservations", {}, patched=_core(math.inf, "scheduler.core.waiting.RESERVE_AFTER_S")),
    Variant("no exchange within a batch", {}, patched=_core(False, "placement.engine.Cotenant.exchanges")),
    Variant(
        "no regard for fragments",
        {},
        patched=_core(lambda _fleet, places, _needs: np.zeros(len(places)), "placement.choosing.fragments_made"),
    ),
)


def run(data: Path, trace: Trace, variant: Variant, gpus: int, seed: int) -> Result:
    """Simulate one variant on one sample."""
    if not variant.estimates:
        trace = Trace(trace.name, tuple(replace(job, estimate_s=None) for job in trace.jobs))
    table, utils = data / "traces" / "peer_runs" / "pair_truth.csv.gz", utilisations(trace)
    truth = PairTable(load_pairs(table), utils)
    told = TablePredictor(PairTable(load_pairs(table, "n_predicted_lof"), utils))
    models = first_models if variant.predictor is None else only(variant.predictor(told, truth))
    settings = changed(variant.change)
    scenario = Scenario(trace, even_cluster(gpus, per_node=GPUS_PER_HOST, memory_bytes=USABLE_GIB * GIB), truth)
    with variant.patched():
        return shipped_core(scenario, settings=settings, models=models, sensing=Sensing(seed=seed))


def rows(data: Path, gpus: int, seeds: int, variants: Iterable[Variant]) -> Iterator[Row]:
    """The figures of the variants: means over the samples, with their spread."""
    whole: list[float] = []  # mean completion with everything, by sample
    for variant in variants:
        found = [_figures(data, gpus, seed, variant) for seed in range(seeds)]
        completion = [each[COMPLETION][0] for each in found]
        whole = whole or completion
        method = "cotenant" if variant.name == WHOLE else f"cotenant: {variant.name}"
        for metric, (_, unit) in found[0].items():
            values = [each[metric][0] for each in found]
            yield Row(_case(gpus), method, metric, float(np.mean(values)), unit, float(np.std(values)))
        longer = np.subtract(completion, whole)
        error = float(np.std(longer, ddof=1) / math.sqrt(seeds)) if seeds > 1 else None
        yield Row(_case(gpus), method, "mean completion, longer than with everything", float(longer.mean()), "s", error)


def _case(gpus: int) -> str:
    return f"samples of the Philly week, {gpus} GPUs"


def _figures(data: Path, gpus: int, seed: int, variant: Variant) -> dict[str, tuple[float, str]]:
    """The figures of one variant on one sample, with their units."""
    trace = sample(load(data / "traces" / "peer_runs" / "philly_week.csv.gz"), gpus, seed)
    summary = run(data, trace, variant, gpus, seed).summary()
    alone = float(np.mean([job.duration_s for job in trace.jobs]))
    return {
        COMPLETION: (summary["jct_s"]["mean"], "s"),
        "mean completion beyond the run time alone": (summary["jct_s"]["mean"] - alone, "s"),
        QUEUEING: (summary["queue_s"]["mean"], "s"),
        SLOWDOWN: (summary["slowdown"]["mean"], "1"),
        SLOWDOWN_P99: (summary["slowdown"]["p99"], "1"),
        "GPU time saved": (summary["saving"], "1"),
    }


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with traces/ (default: $COTENANT_DATA or ../shared/data)")
    parser.add_argument(
        "--method", default="", metavar="REGEX", help="only variants in whose name this is found, and the whole core"
    )
    parser.add_argument("--add", action="store_true", help="keep the rows of the JSON file that are not measured again")
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    if not (data / "traces" / "peer_runs").exists():
        print(f"ablation: skipped, there is no {data}; give --data or set COTENANT_DATA", file=sys.stderr)
        return
    seeds, gpus = (1, 8) if arguments.quick else (SEEDS, GPUS)
    wanted = (each for each in VARIANTS if each.name == WHOLE or re.search(arguments.method, each.name))
    found = list(rows(data, gpus, seeds, wanted))
    earlier = kept(arguments.json, found) if arguments.add else []
    write_report("ablation", [*earlier, *found], arguments.json)


if __name__ == "__main__":
    main()
