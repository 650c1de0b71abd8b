"""What /metrics tells Prometheus."""

from __future__ import annotations

from engine import Engine
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("serve_requests", "HTTP requests by how they ended", ["path", "end"], registry=registry)
        self.prompt = Counter("serve_prompt_tokens", "Tokens of prompts", registry=registry)
        self.shared = Counter("serve_shared_tokens", "Tokens of prompts whose keys were in the cache already", registry=registry)
        self.answered = Counter("serve_answer_tokens", "Tokens of answers", registry=registry)
        times = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
        self.first = Histogram("serve_first_token_seconds", "From a request to its first token", buckets=times, registry=registry)
        self.whole = Histogram("serve_request_seconds", "From a request to its end", buckets=times, registry=registry)
        for name, about, now in (
            ("serve_running", "Requests that have pages", lambda: len(engine.running)),
            ("serve_waiting", "Requests that wait for pages", lambda: len(engine.queue)),
            ("serve_pages", "Pages of the cache", lambda: engine.pages.count),
            ("serve_free_pages", "Pages that no request uses", lambda: engine.pages.free),
        ):
            Gauge(name, about, registry=registry).set_function(now)

    def text(self) -> bytes:
        return generate_latest(self._registry)
