"""
How often something happens, learned from few events: the rate of failures and the share of last words that succeed.

**Rate.** Events per hour of exposure are Poisson with a Gamma prior: n events in E hours make Gamma(a0 + n, b0 + E),
with mean (a0 + n) / (b0 + E) (conjugate prior; Gelman et al., "Bayesian Data Analysis", 2.6). Since the loss of time
is linear in the rate, its posterior *mean* is what gives the best interval; a mean of intervals or of times between
failures would be too long.

One such pair has two weak points: a prior worth thousands of hours hides for hundreds of failures that a machine is a
thousand times worse than expected, and old counts hide that the rate has changed. Hence a `Rate` weighs several
*runs*, each a pair of its own:

* from the start, beside the prior, ever sicker ones, ten times each, with ever less weight (a mixture of conjugate
  priors);
* after each failure one that says "from here on it is different", worth a quarter of a failure at the present mean
  (Bayesian online change point detection; Adams and MacKay, arXiv 0710.3742, 2007).

What is seen multiplies the weight of each run by how well the run foretold it. With time everything seen fades by
half per half-life, counts as well as weights (power prior; Ibrahim and Chen, Statistical Science 15(1), 2000), back
to the prior.

Values go through `lastwords.protocol.codec`; all fields are finite.
"""

from __future__ import annotations

import dataclasses
import math

from lastwords_operator.core import numeric

MOST_PRIOR_HOURS = 10_000.0
SICKER_RUNS = 6
SICKER_SHARE = 0.05
"""Each sicker run adds this share to the mean before anything is seen."""
CHANGE_SHARE = 1 / 100
"""How likely an event is the last of its rate. More would follow changes sooner, and chance too."""
CHANGE_EVENTS = 0.25
"""What the present mean is worth to the rate that follows. More would take too long to correct after a great change."""
MOST_RUNS = 16
_LEAST_LOG_WEIGHT = -200.0
_NEGLIGIBLE_LOG_WEIGHT = -40.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed before anything is seen: `events` in `hours` of exposure. Both above 0."""

    events: float = 1.0
    hours: float = 6000.0

    def __post_init__(self) -> None:
        """Refuse what is no belief."""
        if not (0 < self.events < math.inf and 0 < self.hours < math.inf):
            raise ValueError(f"a prior needs events and hours above 0, not {self.events} and {self.hours}")


NODE_PRIOR = Prior()
"""
4 failures per 1000 node-days. Published: 2.3 to 6.5 for GPU nodes (Kokolis et al., HPCA 2025, arXiv 2410.21680: 6.5
and 2.3; Llama 3, arXiv 2407.21783: 419 in 54 days of 2048 nodes, 3.8).
"""
JOB_PRIOR = Prior(events=0.5, hours=3000.0)
"""
Failures of the job itself per hour, whatever its size: as rare as those of one node, and easily convinced. An
assumption.
"""
PREEMPTION_PRIOR = Prior(events=0.1, hours=6000.0)
"""Rare until seen: an assumption."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """
    A belief about a rate per hour of exposure: weighted runs, one entry of each tuple per run. The first run is the
    plain Gamma-Poisson pair on `prior`. Log weights are natural logarithms, of weights that sum to 1.
    """

    prior: Prior
    prior_events: tuple[float, ...]
    prior_hours: tuple[float, ...]
    log_prior_weights: tuple[float, ...]
    log_weights: tuple[float, ...]
    events: tuple[float, ...]
    hours: tuple[float, ...]

    @property
    def shapes(self) -> list[float]:
        """Of the Gamma posterior of each run."""
        return [prior + seen for prior, seen in zip(self.prior_events, self.events, strict=True)]

    @property
    def exposures(self) -> list[float]:
        """Rate parameter of the Gamma posterior of each run, in hours."""
        return [prior + seen for prior, seen in zip(self.prior_hours, self.hours, strict=True)]

    @property
    def mean(self) -> float:
        """Expected events per hour of exposure: the figure to plan with. Always above 0."""
        return sum(
            math.exp(log) * shape / exposure
            for log, shape, exposure in zip(self.log_weights, self.shapes, self.exposures, strict=True)
        )

    @property
    def remembered(self) -> float:
        """Events that still count."""
        return sum(math.exp(log) * events for log, events in zip(self.log_weights, self.events, strict=True))

    def credible(self, share: float = 0.9) -> tuple[float, float]:
        """The middle interval of events per hour that holds `share` of the belief."""
        return self._quantile((1 - share) / 2), self._quantile((1 + share) / 2)

    def _quantile(self, probability: float) -> float:
        runs = zip(self.log_weights, self.shapes, self.exposures, strict=True)
        heavy = [(log, shape, exposure) for log, shape, exposure in runs if log > _NEGLIGIBLE_LOG_WEIGHT]

        def cdf(t: float) -> float:
            return sum(
                math.exp(log) * numeric.gamma_cdf(shape, math.exp(t) * exposure) for log, shape, exposure in heavy
            )

        def density(t: float) -> float:
            logs = [
                log + shape * (t + math.log(exposure)) - math.exp(t) * exposure - math.lgamma(shape)
                for log, shape, exposure in heavy
            ]
            return sum(math.exp(log) for log in logs if log > _LEAST_LOG_WEIGHT)

        return math.exp(numeric.invert(cdf, density, probability, math.log(self.mean)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """
    A belief about the share of successes: Beta(1 + successes, 1 + failures). By its means, three of three do not say
    "always".
    """

    successes: float = 0.0
    failures: float = 0.0

    @property
    def mean(self) -> float:
        """Expected share of successes, strictly between 0 and 1."""
        return (self.successes + 1) / (self.successes + self.failures + 2)

    def credible(self, share: float = 0.9) -> tuple[float, float]:
        """The middle interval that holds `share` of the belief."""
        a, b = 1 + self.successes, 1 + self.failures
        return numeric.beta_quantile(a, b, (1 - share) / 2), numeric.beta_quantile(a, b, (1 + share) / 2)


def fresh(prior: Prior) -> Rate:
    """Nothing seen yet."""
    runs = range(SICKER_RUNS + 1)
    logs = _normal([math.log(SICKER_SHARE / 10**times) if times else 0.0 for times in runs])
    return Rate(
        prior=prior,
        prior_events=tuple(prior.events for _ in runs),
        prior_hours=tuple(prior.hours / 10**times for times in runs),
        log_prior_weights=logs,
        log_weights=logs,
        events=tuple(0.0 for _ in runs),
        hours=tuple(0.0 for _ in runs),
    )


def prior_from(rate: Rate, weight: float = 2.5) -> Prior:
    """
    A prior for a new job out of what others have seen (of a node pool): the same mean, worth `weight` failures, so
    that it may be wrong. Never worth more than `MOST_PRIOR_HOURS`, since a very low rate would take too long to
    correct.
    """
    hours = min(weight / rate.mean, MOST_PRIOR_HOURS)
    return Prior(events=rate.mean * hours, hours=hours)


def exposed(rate: Rate, hours: float) -> Rate:
    """`hours` of exposure (at least 0) have passed with no event."""
    runs = zip(rate.log_weights, rate.shapes, rate.exposures, strict=True)
    return dataclasses.replace(
        rate,
        log_weights=_normal([log - shape * math.log1p(hours / exposure) for log, shape, exposure in runs]),
        hours=tuple(known + hours for known in rate.hours),
    )


def happened(rate: Rate) -> Rate:
    """An event, at the end of the exposure that was counted so far."""
    before = rate.mean
    runs = zip(rate.log_weights, rate.shapes, rate.exposures, strict=True)
    logs = _normal([log + math.log(shape / exposure) for log, shape, exposure in runs])
    anchor_hours = CHANGE_EVENTS / before
    # As unlikely beforehand as a sicker run of that rate, so that it does not stay when all else is forgotten.
    beforehand = math.log(SICKER_SHARE * min(1.0, anchor_hours / rate.prior.hours))
    kept = _kept(logs)
    return Rate(
        prior=rate.prior,
        prior_events=(*(rate.prior_events[i] for i in kept), CHANGE_EVENTS),
        prior_hours=(*(rate.prior_hours[i] for i in kept), anchor_hours),
        log_prior_weights=(*(rate.log_prior_weights[i] for i in kept), beforehand),
        log_weights=_normal([*(logs[i] + math.log1p(-CHANGE_SHARE) for i in kept), math.log(CHANGE_SHARE)]),
        events=(*(rate.events[i] + 1 for i in kept), 0.0),
        hours=(*(rate.hours[i] for i in kept), 0.0),
    )


def faded(rate: Rate, factor: float) -> Rate:
    """Only `factor` (0 to 1) of what was seen still counts."""
    weights = zip(rate.log_prior_weights, rate.log_weights, strict=True)
    return dataclasses.replace(
        rate,
        log_weights=_normal([beforehand + factor * (log - beforehand) for beforehand, log in weights]),
        events=tuple(events * factor for events in rate.events),
        hours=tuple(hours * factor for hours in rate.hours),
    )


def fading(hours: float, half_life_hours: float) -> float:
    """What is left after `hours`: 2 ** (-hours / half-life). A clock that ran backwards forgets nothing."""
    return math.exp2(-max(0.0, hours) / half_life_hours)


def faded_share(share: Share, factor: float) -> Share:
    """Only `factor` (0 to 1) of what was seen still counts."""
    return Share(successes=share.successes * factor, failures=share.failures * factor)


def mtbf_seconds(events_per_hour: float) -> float:
    """Mean time between events in seconds; infinite for a rate of 0."""
    return 3600.0 / events_per_hour if events_per_hour > 0 else math.inf


def _kept(logs: tuple[float, ...]) -> list[int]:
    """All runs from the start, since forgetting leads back to them, and the heaviest others; room for one more."""
    kept = list(range(len(logs)))
    if len(kept) == MOST_RUNS:
        kept.remove(min(kept[SICKER_RUNS + 1 :], key=lambda i: logs[i]))
    return kept


def _normal(logs: list[float]) -> tuple[float, ...]:
    most = max(logs)
    total = most + math.log(sum(math.exp(log - most) for log in logs))
    return tuple(max(_LEAST_LOG_WEIGHT, log - total) for log in logs)
