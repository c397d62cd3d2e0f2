"""What deploy/ watches a cluster with, and a real Prometheus that watches nodes under load and faults."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvconnect.metrics import FAMILIES, PREFIX
from kvconnect.node.children import BadAnswer, Child, Children, fetch_json
from kvconnect.router.pool import Pool
from kvconnect.router.router_metrics import RouterMetrics
from tests.deploy.commands import DEPLOY, NAMESPACE, RELEASE, chart, named, tool
from tests.pair_kit import prefilled, route, serve, tokens
from tests.ports import free_port
from tests.test_docs import texts

FILES = DEPLOY / "observability"
RULES, RULES_TEST = FILES / "kvconnect.rules.yml", FILES / "kvconnect.rules.test.yml"
PANELS = json.loads((FILES / "grafana-dashboard.json").read_text())["panels"]
QUERIES = {f"{panel['title']} {one['refId']}": one["expr"] for panel in PANELS for one in panel["targets"]}
(GROUP,) = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
EXPRESSIONS = {**QUERIES, **{name: rule["expr"] for name, rule in ALERTS.items()}}
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
MOST_LOAD_S = 30
JOBS = {"reference": "kvconnect", "vllm": f"{NAMESPACE}/{RELEASE}"}
"""Prometheus' jobs, by what names its servers' metrics. The chart's queries name the second one."""


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def known_names() -> set[str]:
    """The names of all samples that nodes and routers export."""
    pools = [Pool(role, ["http://127.0.0.1:1"]) for role in ("prefill", "decode")]
    router = text_string_to_metric_families(RouterMetrics(*pools).text().decode())
    names = {f"{family.name}{suffix}" for family in router for suffix in _SUFFIXES.get(family.type, ("",))}
    return names | {f"{PREFIX}_{family.name}{end}" for family in FAMILIES for end in _SUFFIXES[family.kind]}


# --- by themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_names_metrics_that_there_are(name) -> None:
    named = set(re.findall(r"\bkvconnect_\w+", EXPRESSIONS[name]))
    assert named
    assert named <= known_names()


def test_reasons_in_alerts_are_those_that_are_counted() -> None:
    found = [one for name in ALERTS for one in re.findall(r'reason[=!]~?"(.+?)"', EXPRESSIONS[name])]
    named = {reason for reasons in found for reason in reasons.split("|")}
    assert len(named) > 10
    counted = texts()
    assert not {reason for reason in named if not any(re.fullmatch(reason, text) for text in counted)}


def test_every_alert_says_what_to_do_and_is_tried_with_planted_series() -> None:
    tried = {
        one["alertname"]
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for one in test["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert tried == ALERTS.keys()
    assert all({"summary", "action"} == rule["annotations"].keys() for rule in ALERTS.values())


def test_promtool_takes_configuration_and_rules_and_every_alert_fires_when_it_should() -> None:
    promtool("check", "config", FILES / "prometheus.yml")
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES_TEST)


def test_the_collector_has_what_its_pipelines_name() -> None:
    config = yaml.safe_load((FILES / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= config[kind].keys()


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(cells)) == len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_picture_in_the_docs_has_every_panel() -> None:
    """``python -m tests.deploy.dashboard_picture docs/dashboard.svg`` after a change of the dashboard."""
    picture = (DEPLOY.parent / "docs" / "dashboard.svg").read_text()
    titles = re.findall(r'font-weight="bold"[^>]*>(.*?)</text>', picture)
    assert [unescape(title) for title in titles] == [panel["title"] for panel in PANELS]


# --- with a real Prometheus -----------------------------------------------------------------------


class Prometheus:
    """A Prometheus that scrapes these targets each second, by the configuration in deploy/."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((FILES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [
            {"targets": [url.removeprefix("http://")], "labels": {"server": name}}
            for name, url in targets.items()
        ]
        # Of servers as vLLM has them (kvconnect/vllm/stats.py); a router is the same before both.
        as_vllm = {"source_labels": ["server", "__name__"], "regex": "(?:prefill|decode);(kvconnect_.*)"}
        as_vllm |= {"target_label": "__name__", "replacement": "vllm:$1"}
        config["scrape_configs"] = [
            {**scrape, "job_name": JOBS["reference"]},
            {**scrape, "job_name": JOBS["vllm"], "metric_relabel_configs": [as_vllm]},
        ]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        listen, data = f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"
        command = [tool("prometheus"), f"--config.file={file}", listen, data]
        self.child = Child("prometheus", command, folder / "prometheus.log", url=self.url)

    def get(self, path: str, **query: Any) -> Any:
        return fetch_json(f"{self.url}/api/v1/{path}?{urlencode(query)}")["data"]

    def sees_all(self) -> bool:
        """Every target has been scraped."""
        try:
            found = self.get("targets")["activeTargets"]
        except BadAnswer:
            return False
        return bool(found) and all(one["health"] == "up" for one in found)

    def series(self, expression: str, since: float, job: str = ".*") -> list[dict[str, Any]]:
        """What a panel with this query shows since then: ``metric``, and ``values`` with their times."""
        expression = expression.replace("$instance", f'.*", job=~"{job}').replace("$__rate_interval", "8s")
        found = self.get("query_range", query=expression, start=since, end=time.time(), step=1)["result"]
        for one in found:
            values = [(at, float(value)) for at, value in one["values"]]
            one["values"] = [(at, value) for at, value in values if math.isfinite(value)]
        return [one for one in found if one["values"]]

    def has_data(self, expression: str, since: float, job: str = ".*") -> bool:
        """Whether a panel with this query shows a number for some moment since then."""
        return bool(self.series(expression, since, job))

    def empty_panels(self, since: float) -> list[str]:
        """The queries of panels that show nothing, under either's names."""
        return [
            f"{name}, {whose}"
            for name, query in QUERIES.items()
            for whose, job in JOBS.items()
            if not self.has_data(query, since, job)
        ]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[tuple[Prometheus, float]]:
    with watching(tmp_path_factory.mktemp("observability")) as seen:
        yield seen


@contextmanager
def watching(folder: Path, least_s: float = 0) -> Iterator[tuple[Prometheus, float]]:
    """A Prometheus that has seen a pair under load, a lease that ends, other weights, and P being killed.

    P is killed after ``least_s`` at least, and the block begins as long after that.
    """
    kept = {"cpu_bytes": 1 << 22, "disk_path": str(folder / "kept"), "disk_bytes": 1 << 22}
    ports = {name: free_port() for name in ("prefill", "decode", "router", "other")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with Children(folder) as children:
        # First, since it takes seconds to begin.
        prometheus = Prometheus(folder, {name: urls[name] for name in ("prefill", "decode", "router")})
        children.add(prometheus.child)

        def node(name: str, role: str, *options: str, **extra: Any) -> Child:
            at = "--port", str(ports[name])
            extra |= {"lease_s": 2, "peer_timeout_s": 2}
            return serve(children, name, role, *at, *options, policy="recompute", **extra)

        prefill = node("prefill", "kv_producer", offload=kept)
        node("decode", "kv_consumer")
        node("other", "kv_producer", "--seed", "1").wait_ready()
        route(children, [urls["prefill"]], [urls["decode"]], "--port", str(ports["router"]))
        prometheus.child.wait_until(prometheus.sees_all, 30)
        began_at = time.time()
        sent = [f"rate(kvconnect_{name}[8s]) > 0" for name in ("lease_seconds_count", "offload_rows_total")]
        load(urls, lambda: all(prometheus.has_data(query, began_at) for query in sent), least_s)
        prefill.kill()
        load(urls, lambda: not prometheus.empty_panels(began_at), least_s)
        yield prometheus, began_at


def load(urls: dict[str, str], is_seen: Callable[[], bool], least_s: float) -> None:
    """Requests through the router, and for the nodes alone what goes wrong there, until it is seen."""
    for number, name in enumerate(("prefill", "other")):
        try:
            params = prefilled(urls[name], prompt(number))
        except BadAnswer:
            continue
        if name == "other":
            tokens(urls["decode"], prompt(number), kv_transfer_params=params)
    least = time.monotonic() + least_s
    while (now := time.monotonic()) < least or (now < least + MOST_LOAD_S and not is_seen()):
        for number in range(7):
            tokens(urls["router"], prompt(number + 2))


def prompt(number: int) -> list[int]:
    return [(number + index * 7) % 250 + 1 for index in range(200)]


pytestmark = pytest.mark.timeout(300)


def test_every_panel_shows_data(watched) -> None:
    prometheus, began_at = watched
    assert not prometheus.empty_panels(began_at)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_what_keda_asks_for_is_there_and_is_one_number(watched, name) -> None:
    prometheus, began_at = watched
    scaled = {"autoscaling": {"maxReplicas": 8, "requests": 8, "waiting": 8}}
    objects = chart({"monitoring": {"enabled": True}, name: scaled})
    for trigger in named(objects, "ScaledObject", name)["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert set(re.findall(r"\bkvconnect_\w+", query)) <= known_names()
        assert prometheus.has_data(query, began_at)
        assert len(prometheus.get("query", query=query)["result"]) == 1


def test_every_rule_is_evaluated_and_other_weights_are_an_alert(watched) -> None:
    prometheus, _ = watched
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(ALERTS, "ok")
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert "KVConnectOtherWeights" in firing
