"""Evaluates the PromQL of the alerts over what is scraped, as Prometheus does, and ``promtool test rules``.

Only what the alerts use is here; another function, operator or argument fails the test that has it.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import promql_parser
from prometheus_client.core import Metric

LOOKBACK_S = 300.0
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_SCALARS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_FILTERS: dict[str, Callable[[float, float], bool]] = {"==": operator.eq, "<": operator.lt, ">": operator.gt}
_SETS = ("and", "or", "unless")


class Prometheus:
    """Keeps what was scraped, and evaluates expressions at a time."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, Labels], tuple[list[float], list[float | None]]] = {}
        self._last: dict[str, set[tuple[str, Labels]]] = {}

    def scrape(self, at: float, instance: str, families: Iterable[Metric]) -> None:
        """Take a target's answer, empty if it gives none. Series that it no longer has are stale."""
        now: set[tuple[str, Labels]] = set()
        for family in families:
            for sample in family.samples:
                labels = {**sample.labels, "instance": instance, "job": "lora-fs"}
                series = sample.name, frozenset(labels.items())
                now.add(series)
                self._add(series, at, sample.value)
        for gone in self._last.get(instance, set()) - now:
            self._add(gone, at, None)
        self._last[instance] = now

    def _add(self, series: tuple[str, Labels], at: float, value: float | None) -> None:
        times, values = self._series.setdefault(series, ([], []))
        times.append(at)
        values.append(value)

    def value(self, expression: Any, at: float) -> Vector | float:
        """Evaluate a parsed expression."""
        match type(expression).__name__:
            case "NumberLiteral":
                return float(expression.val)
            case "ParenExpr":
                return self.value(expression.expr, at)
            case "VectorSelector":
                return self._instant(expression, at)
            case "AggregateExpr":
                return self._aggregate(expression, at)
            case "BinaryExpr":
                return self._binary(expression, at)
            case "Call":
                return self._call(expression, at)
            case other:
                raise NotImplementedError(other)

    def _chosen(self, selector: Any) -> Iterator[tuple[Labels, list[float], list[float | None]]]:
        for (name, labels), (times, values) in self._series.items():
            told = dict(labels)
            if name == selector.name and all(
                _matches(one, told.get(one.name, "")) for one in selector.matchers.matchers
            ):
                yield labels, times, values

    def _instant(self, selector: Any, at: float) -> Vector:
        at -= selector.offset.total_seconds() if selector.offset is not None else 0
        found = {}
        for labels, times, values in self._chosen(selector):
            last = bisect_right(times, at) - 1
            if last >= 0 and times[last] > at - LOOKBACK_S and (value := values[last]) is not None:
                found[labels] = value
        return found

    def _call(self, call: Any, at: float) -> Vector | float:
        name, args = call.func.name, call.args
        if name == "time":
            return at
        if name in ("rate", "increase"):
            span = args[0].range.total_seconds()
            told = self._increases(args[0].vector_selector, span, at)
            return {labels: up / (span if name == "rate" else 1) for labels, up in told.items()}
        inner = self.value(args[-1] if name == "histogram_quantile" else args[0], at)
        assert isinstance(inner, dict)
        if name == "absent":
            return {} if inner else {frozenset(): 1.0}
        if name == "label_replace" and not args[3].val and not args[4].val:  # it sets a label, no more
            return {_with(labels, args[1].val, args[2].val): one for labels, one in inner.items()}
        if name == "histogram_quantile":
            return _quantile(args[0].val, inner)
        raise NotImplementedError(name)

    def _increases(self, selector: Any, span: float, at: float) -> Vector:
        """How much each counter rose, as Prometheus extrapolates it to both ends of the range."""
        found = {}
        for labels, times, values in self._chosen(selector):
            within = zip(times, values, strict=True)
            known = [(t, v) for t, v in within if at - span < t <= at and v is not None]
            if len(known) < 2:
                continue
            steps = [(v if v < u else v - u) for (_, u), (_, v) in pairwise(known)]
            between = known[-1][0] - known[0][0]
            pause = between / (len(known) - 1)
            before, after = known[0][0] - (at - span), at - known[-1][0]
            reach = sum(one if one < 1.1 * pause else pause / 2 for one in (before, after))
            found[labels] = sum(steps) * (between + reach) / between
        return found

    def _aggregate(self, aggregate: Any, at: float) -> Vector:
        inner, groups = self.value(aggregate.expr, at), dict[Labels, list[float]]()
        assert isinstance(inner, dict)
        kept = aggregate.modifier.labels if aggregate.modifier is not None else ()
        for labels, value in inner.items():
            groups.setdefault(_only(labels, kept), []).append(value)
        made: Mapping[str, Callable[[list[float]], float]] = {"sum": sum, "count": len, "max": max}
        return {labels: float(made[str(aggregate.op)](values)) for labels, values in groups.items()}

    def _binary(self, binary: Any, at: float) -> Vector | float:
        op, left, right = str(binary.op), self.value(binary.lhs, at), self.value(binary.rhs, at)
        on = binary.modifier.matching.labels if binary.modifier and binary.modifier.matching else None

        def key(labels: Labels) -> Labels:
            return labels if on is None else _only(labels, on)

        if op in _SETS:
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            theirs, ours = {key(labels) for labels in right}, {key(labels) for labels in left}
            if op == "or":
                return left | {labels: one for labels, one in right.items() if key(labels) not in ours}
            return {labels: one for labels, one in left.items() if (key(labels) in theirs) is (op == "and")}
        if isinstance(left, float) and isinstance(right, float):
            return _SCALARS[op](left, right)
        pairs: Iterator[tuple[Labels, float, float]]
        if isinstance(left, float):
            assert isinstance(right, dict)
            pairs = ((labels, left, one) for labels, one in right.items())
        elif isinstance(right, float):
            pairs = ((labels, one, right) for labels, one in left.items())
        else:
            others = {key(labels): one for labels, one in right.items()}
            pairs = ((one, left[one], others[key(one)]) for one in left if key(one) in others)
        if op in _FILTERS:
            return {labels: one for labels, one, other in pairs if _FILTERS[op](one, other)}
        return {labels: _SCALARS[op](one, other) for labels, one, other in pairs}


class Rule:
    """One alerting rule: pending since its expression first had a series, and firing after ``for``."""

    def __init__(self, rule: Mapping[str, Any]) -> None:
        self._expression = promql_parser.parse(rule["expr"])
        self._for_s = {"m": 60, "s": 1}[rule.get("for", "0s")[-1]] * int(rule.get("for", "0s")[:-1])
        self._since: dict[Labels, float] = {}

    def firing(self, prometheus: Prometheus, at: float) -> list[dict[str, str]]:
        """Evaluate once more. Return the labels of each alert that fires."""
        now = prometheus.value(self._expression, at)
        assert isinstance(now, dict)
        self._since = {labels: self._since.get(labels, at) for labels in now}
        return [dict(labels) for labels, since in self._since.items() if at - since >= self._for_s]


def _matches(matcher: Any, value: str) -> bool:
    kind = str(matcher.op).rpartition(".")[2]
    if kind in ("Equal", "NotEqual"):
        return (value == matcher.value) is (kind == "Equal")
    return (re.fullmatch(matcher.value, value) is not None) is (kind == "Re")


def _only(labels: Labels, kept: Any) -> Labels:
    return frozenset(pair for pair in labels if pair[0] in kept)


def _with(labels: Labels, name: str, value: str) -> Labels:
    return frozenset({**dict(labels), name: value}.items())


def _quantile(share: float, buckets: Vector) -> Vector:
    """Interpolate within the bucket that the share falls in; NaN where nothing was counted."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(p for p in labels if p[0] != "le"), []).append((bound, count))
    found = {}
    for labels, told in groups.items():
        told.sort()
        rank, before, low = share * told[-1][1], 0.0, 0.0
        found[labels] = math.nan
        for bound, count in told if rank else ():
            if count >= rank:
                inside = (rank - before) / (count - before)
                found[labels] = low if math.isinf(bound) else low + (bound - low) * inside
                break
            before, low = count, bound
    return found
