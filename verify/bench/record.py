"""Measure points and keep what was found: a row a contender and point, from which everything else is computed."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from verify import document
from verify.bench import check as bench_check
from verify.bench import limits, machine, peers, start
from verify.bench import points as bench_points
from verify.bench.limits import Ceiling
from verify.timing import BATCHES, FLUSH_BYTES, LATENCY_RUNS, ROUNDS, interleaved

PLACES = 5  # decimals of a millisecond: a hundredth of what an event resolves
KEY = ("direction", "dtype", "causal", "d", "N", "B", "H")


class Bench:
    """A session of measurements on one machine.

    Parameters
    ----------
    clock : verify.timing.Clock
    kernels, others : list of str
        Our kernels, and peers.
    rounds : int
    seconds : float
        For the rounds of one point.
    fewest : int
        Rounds that everyone takes part in, however slow.
    inputs : verify.bench.points.Inputs, optional
    """

    def __init__(self, clock, kernels, others, rounds=ROUNDS, seconds=3.0, fewest=1, inputs=None):
        self.clock, self.kernels, self.others = clock, kernels, others
        self.rounds, self.seconds, self.fewest = rounds, seconds, fewest
        self.inputs = inputs or bench_points.Inputs()
        self.measured = machine.measured(clock)
        self.head = document.head("times", "gpu")
        self.device = self.head["device"]
        self.sheet = limits.datasheet(self.device)
        self.light = limits.speed_of_light(self.device, machine.state().get("max_sm_mhz"), self.measured)

    def measure(self, point, against=None) -> list[dict]:
        """The rows of a point: every contender that could be timed, and every one that could not, with the reason.

        ``against``: a second storage type, if our kernels are to be timed against themselves in it, as `in_type` names
        them, instead of against peers.

        What does not compute the right thing is not timed, and a time that no machine can reach is not reported.
        """
        found, reasons, truths = self._entered(point, () if against else self.others)
        if against:
            twins, _, of_twins = self._entered(replace(point, dtype=against), ())
            for c in twins:
                del c.facts["fingerprint"]  # which the kernel's own row has
                name, c.name = c.name, in_type(c.name, against)
                truths[c.name] = of_twins[name]
            found += twins
        ready, failed = [], {}
        for c in found:
            try:
                with c.within():
                    c.facts["first_call_s"] = start.seconds(c.work, self.clock.device)
                    errors = truths[c.name].rmse(c.outputs())
                    c.facts["rmse"], *_ = errors.values()
            except Exception as error:  # a kernel or back end that fails must not cost the others their times
                failed[c.name] = bench_points.brief(error)
                continue
            if wrong := truths[c.name].wrong(errors):
                failed[c.name] = wrong
            else:
                ready.append(c)
        before = machine.state()
        times = interleaved(self.clock, ready, self.rounds, self.seconds, self.fewest) if ready else {}
        states = {"before": before, "after": machine.state()}
        rows = []
        for c in ready:
            truth = truths[c.name]
            if wrong := truth.wrong(truth.rmse(c.outputs())):  # of the last run that was timed
                failed[c.name] = f"after the timed runs {wrong}"
            else:
                rows.append(self._row(point, c, times[c.name], truth, states))
        for name, reason in (reasons | failed).items():
            rows.append({**_where(point), "name": name, "not_measured": reason, "failed": name in failed})
        return rows

    def _entered(self, point, others):
        """Who runs at a point, why the others do not, and what each is checked against."""
        arrays, truth = self.inputs.device(point), bench_check.Truth(point, self.inputs.host(point))
        found, reasons = bench_points.contenders(point, self.kernels, others, arrays)
        return found, reasons, {c.name: truth for c in found}

    def _row(self, point, contender, times, truth, states):
        """One row; with "refused" and no time in it where a time cannot be true."""
        work, row = point.work, {**_where(point), "name": contender.name, **contender.facts}
        row["rmse_plain"], *_ = truth.rmse_plain.values()
        for cold, runs in ((True, times.ms), (False, times.warm_ms)):
            for ms in runs:
                if reason := limits.too_fast(ms, work, self.light, cold):
                    return {**row, "refused": reason}
        median = float(np.median(times.ms))
        row |= {
            "median_ms": round(median, PLACES),
            "p90_ms": round(float(np.percentile(times.ms, 90)), PLACES),
            "min_ms": round(float(min(times.ms)), PLACES),
            "warm_ms": round(float(np.median(times.warm_ms)), PLACES) if times.warm_ms else None,
            **{name: round(us, 1) for name, us in times.host_us.items()},
            "usual_us": {name: round(us, 1) for name, us in times.usual_us.items()},
            "tflops": round(work.tflops(median), 2),
            "gb_per_s": round(work.gb_per_s(median), 1),
            "of_measured": _shares(self.measured, work, median),
            "of_datasheet": _shares(self.sheet, work, median),
            "ms": [round(float(ms), PLACES) for ms in times.ms],
            "state": states,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return row

    def record(self, kind, rows, restarts=()) -> dict:
        """A record: where and how it was made, its rows, and what `start.restarts` found if anything was restarted."""
        return {
            **self.head,
            "kind": kind,
            "peers": {name: peers.version_of(name) or f"not measured: {peers.absent(name)}" for name in peers.PEERS},
            "protocol": self.protocol(),
            "ceilings": {name: c and vars(c) for name, c in
                         (("measured", self.measured), ("datasheet", self.sheet), ("speed_of_light", self.light))},
            **({"restarts": list(restarts)} if restarts else {}),
            "rows": rows,
        }  # fmt: skip

    def protocol(self) -> dict:
        """How times were taken, in words and numbers."""
        return {
            "clock": "CUDA events around the launches, the device kept busy until they are queued",
            "order": "interleaved: A B C, C B A, ...; a cold run of each a round",
            "rounds": self.rounds,
            "seconds": self.seconds,
            "l2": f"cold: {FLUSH_BYTES >> 20} MiB written before every run; warm_ms: straight after the same work",
            "host": f"us a call, of one thread: the least of {BATCHES} batches' medians of {LATENCY_RUNS}, on several "
                    "cores and spread over the rounds; usual_us: the median batch",
            "checked": f"before and after, {bench_check.LEAST_ROWS} to {bench_check.MOST_ROWS} rows of two heads of O "
                       f"or dQ, and of dK and dV up to N = {bench_check.WHOLE}, "
                       f"against fp64: RMSE <= {bench_check.FACTOR:g} x the plain formula's + ulp / 2",
            "rmse": "of O, or of dQ",
            "flops": "2 (d + dv) a visible pair forward, 2.5 times that backward; bytes: compulsory",
        }  # fmt: skip


def in_type(name, dtype):
    """What a kernel is called that runs in another storage type than its point's."""
    return f"{name} in {dtype}"


def _where(point):
    """The point's sizes, as rows name them."""
    return {name: getattr(point, name) for name in KEY}


def _shares(ceiling: Ceiling | None, work, ms):
    if ceiling is None:
        return None
    return {name: None if x is None else round(x, 4) for name, x in ceiling.shares(work, ms).items()}


def key(row) -> tuple:
    """What point a row belongs to."""
    return tuple(row[name] for name in KEY)


def by_point(rows) -> dict:
    """{point's key: {name: row}}, in order."""
    found = {}
    for row in rows:
        found.setdefault(key(row), {})[row["name"]] = row
    return found


def same_run(one, other) -> bool:
    """Whether two records' rows may stand side by side: one device, driver, set of versions and protocol."""
    return all(one.get(name) == other.get(name) for name in ("device", "driver", "packages", "peers", "protocol"))


def merged(record, older) -> dict:
    """A record with the points of an older one that it has not measured again, if both are of one machine and protocol.

    A point is replaced as a whole: ratios are between runs that stood side by side.
    """
    if older is None or not same_run(record, older):
        return record
    fresh = {key(row) for row in record["rows"]}
    kept = [row for row in older["rows"] if key(row) not in fresh]
    starts = {(row["name"], row["direction"]): row for made in (older, record) for row in made.get("restarts", ())}
    merged = {**record, **({"restarts": list(starts.values())} if starts else {})}
    del merged["rows"]  # the last entry of the document
    return {**merged, "rows": sorted([*kept, *record["rows"]], key=key)}
