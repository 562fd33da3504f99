"""The gateway's metrics: choices by reason, requests in flight, replicas by state. Read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_fs.sidecar.gateway.choice import Reason
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch


class Metrics(Collector):
    """The series of one gateway.

    Attributes:
        registry: what a scrape reads.
        retried: requests that were sent to another replica, since the first did not take them.
        queued: seconds from a request's arrival until it was sent to a replica.
    """

    def __init__(self, router: Router, watch: Watch) -> None:
        self._router, self._watch = router, watch
        self.retried = 0
        self.registry = CollectorRegistry()
        self.queued = Histogram(
            "lora_fs_gateway_queue_seconds",
            "From a request's arrival until a replica was chosen for it",
            registry=self.registry,
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """Read the router and the replicas."""
        choices = CounterMetricFamily("lora_fs_gateway_choices", "Choices", labels=["reason"])
        for reason in Reason:
            if reason is not Reason.WAIT:
                choices.add_metric([reason.value], self._router.chosen[reason])
        yield choices
        yield CounterMetricFamily("lora_fs_gateway_retries", "Sent to another replica", value=self.retried)
        yield CounterMetricFamily(
            "lora_fs_gateway_ejections", "Of a replica whose answers failed", value=self._router.ejections
        )
        yield GaugeMetricFamily(
            "lora_fs_gateway_waiting", "Requests that wait for a load's turn", value=self._router.waiting
        )
        flight = GaugeMetricFamily("lora_fs_gateway_in_flight", "Requests", labels=["replica"])
        for peer in self._router.peers:
            flight.add_metric([peer.name], peer.in_flight)
        yield flight
        ready, ejected = len(self._router.ready), len(self._router.ejected)
        states = GaugeMetricFamily("lora_fs_gateway_replicas", "By state", labels=["state"])
        states.add_metric(["ready"], ready - ejected)
        states.add_metric(["ejected"], ejected)
        states.add_metric(["out"], len(self._watch.seen) - ready)
        yield states
