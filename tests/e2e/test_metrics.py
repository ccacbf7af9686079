"""What Prometheus reads of every party of a real network, and what dashboard and alerts ask."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitup.devnet.ports import find_free_ports
from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.client.test_telemetry import run_collector
from tests.e2e.conftest import MODEL, ROOT, Network
from tests.e2e.server import run_server

MONITORING = ROOT / "deploy" / "monitoring"
PARTIES = ("node-0", "member-0", "gateway-0")
NAME = re.compile(r"\b(?:splitup|process)_[a-z_]+\b")


def scrape(url: str) -> dict[str, dict[str, float]]:
    """Return the samples by name, and by labels as Prometheus writes them."""
    with urllib.request.urlopen(url) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        text = reply.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type != "unknown", family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[str(sample.labels)] = sample.value
    return found


def find_url(network: Network, party: str) -> str:
    log = (network.directory / "logs" / f"{party}.log").read_text()
    return re.findall(r"metrics: (http://127\.0\.0\.1:[0-9]+/metrics)", log)[-1]


def list_secrets(directory: Path) -> list[str]:
    return [path.read_text().strip() for path in directory.glob("*/passphrase")]


@pytest.mark.long  # in small: node and member metrics have tests of their own
def test_every_party_is_measured_and_dashboard_and_alerts_ask_for_what_there_is(
    network: Network,
) -> None:
    def is_complete() -> bool:
        live = scrape(find_url(network, "member-0"))["splitup_member_nodes_live"]["{}"]
        return live == network.nodes

    network.wait_for(is_complete)  # on a busy machine a heartbeat may be late
    names = ("node-0", "member-0", "gateway-0", "gateway-1")
    parties = {name: scrape(find_url(network, name)) for name in names}
    node, member, *gateways = parties.values()
    assert node["splitup_node_tasks_loaded"]["{}"] > 0
    assert 0 < node["splitup_node_memory_used_bytes"]["{}"]
    assert member["splitup_member_has_group_key"]["{}"] == 1
    requests = [gateway.get("splitup_http_requests_total", {}) for gateway in gateways]
    assert any("/v1/model" in labels for each in requests for labels in each)

    [port] = find_free_ports(1)
    url = f"http://127.0.0.1:{port}/metrics"
    with run_server(network, "--metrics", f"127.0.0.1:{port}") as api:
        body = {"model": MODEL, "prompt": "library for", "max_tokens": 5, "temperature": 2}
        request = urllib.request.Request(
            f"{api}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).read()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{api}/nothing")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(url.replace(str(port), api.split(":")[2].split("/")[0]))
        serve = scrape(url)
    model = str({"model": MODEL})
    assert serve["splitup_serve_texts_total"][model] == 1
    assert 1 <= serve["splitup_serve_completion_tokens_total"][model] <= 5
    assert serve["splitup_serve_cost_usdc_total"][model] > 0
    assert serve["splitup_serve_first_token_seconds_count"]["{}"] == 1
    requests = serve["splitup_http_requests_total"]
    assert requests[str({"method": "POST", "route": "/v1/completions", "status": "200"})] == 1
    assert requests[str({"method": "GET", "route": "unknown", "status": "404"})] == 2

    known = {name for samples in (*parties.values(), serve) for name in samples}
    rules = [(MONITORING / "alerts.yml").read_text()]
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    rules += [query["expr"] for panel in dashboard["panels"] for query in panel.get("targets", ())]
    asked = {name for rule in rules for name in NAME.findall(rule)}
    assert asked and asked <= known, asked - known
    ours = {name for name in known if name.startswith("splitup_")}
    assert all(re.fullmatch(r"splitup_(node|member|serve|http)_[a-z_]+", name) for name in ours)


def test_no_secret_is_shown(network: Network) -> None:
    secrets = list_secrets(network.directory)
    assert secrets
    for party in PARTIES:
        with urllib.request.urlopen(find_url(network, party)) as reply:
            text = reply.read().decode()
        assert not [secret for secret in secrets if secret in text]
        assert not re.search(r"0x[0-9a-f]{40}", text), "no account, no key"


@pytest.mark.long  # in small: tests/client/test_telemetry.py
async def test_an_execution_is_sent_as_a_trace_without_its_text(network: Network) -> None:
    async with run_collector() as (url, spans, _):
        process = await asyncio.create_subprocess_exec(
            *(find_program("splitup"), "generate", MODEL, "--config", network.directory),
            *("--prompt", "library for", "--max-tokens", "4"),
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url},
            stdout=subprocess.PIPE,
        )
        async with asyncio.timeout(HANG_S):
            text = (await process.communicate())[0].decode().strip()
        assert process.returncode == 0
    [root] = [span for span in spans if not span.parent_span_id]
    tasks = [span for span in spans if span.parent_span_id == root.span_id]
    assert root.name == "execution" and len(tasks) > 5
    assert {span.trace_id for span in spans} == {root.trace_id}
    sent = b"".join(span.SerializeToString() for span in spans)
    assert b"library" not in sent and text.encode() not in sent
