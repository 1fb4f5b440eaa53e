"""bidikv's part of D's `/metrics`, read from Prometheus' text format. Standard library and httpx only."""

from __future__ import annotations

import re

import httpx

_SAMPLE = re.compile(r"^(bidikv_\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 10.0


class Metrics:
    """The samples of one scrape.

    Args:
        text: in Prometheus' text format; lines that are not ours are skipped.
    """

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            if found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                self._samples.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), float(value)))

    def __bool__(self) -> bool:
        """Whether there is any sample of ours."""
        return bool(self._samples)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels; 0 where there is none."""
        return sum(value for have, value in self._samples.get(name, ()) if labels.items() <= have.items())


def scrape(root_url: str) -> Metrics:
    """Return D's metrics as they are now.

    Args:
        root_url: of the server, without `/v1`; `/metrics` asks for no key.

    Raises:
        httpx.HTTPError: it does not serve them.
    """
    reply = httpx.get(f"{root_url}/metrics", timeout=_TIMEOUT_S, follow_redirects=True)
    return Metrics(reply.raise_for_status().text)
