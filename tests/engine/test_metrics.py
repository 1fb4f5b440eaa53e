"""What is measured is there to be scraped, and true, on an engine that does nothing."""

from server_ext.core.metrics import ALL, READER, Metric

from .common import total
from .rig import Rig
from .talk import words


def sample_name(metric: Metric) -> str:
    """Return the name of a metric's samples."""
    return f"{metric.name}_count" if metric.kind == "histogram" else metric.name


def test_an_idle_engine_that_holds_a_lease_serves_every_metric(rig: Rig) -> None:
    """Each name and each label value that is known beforehand is served, and the gauges are those of now."""
    talk = rig.talk()
    said = talk.right_turn(words(200))
    scrape, on_prefill = rig.scrape("decode"), rig.scrape("prefill")
    for metric in ALL:
        for known in metric.known or ((),):
            labels = dict(zip(metric.labels, known, strict=False))  # where none is known, any series will do
            assert total(on_prefill if metric in READER else scrape, sample_name(metric), **labels) >= 0
    leases = {state: total(scrape, "bidikv_leases", state=state) for state in ("idle", "running", "provisional")}
    assert leases == {"idle": 1, "running": 0, "provisional": 0}
    assert total(scrape, "bidikv_blocks", state="leased") == said.lease["num_blocks"]
    assert total(scrape, "bidikv_stale_reads_total") == 0
    assert total(scrape, "bidikv_turns_total", outcome=said.cache["outcome"], reason=said.cache["reason"]) > 0
    talk.release()
    assert total(rig.scrape("decode"), "bidikv_leases", state="idle") == 0
