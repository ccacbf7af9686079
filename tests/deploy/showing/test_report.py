from __future__ import annotations

from splitup_deploy.publishing.model_usage import ModelUsage
from splitup_deploy.showing.report import render_usage


def test_usage_shows_amounts_that_were_paid() -> None:
    use = ModelUsage("0x" + "ab" * 32, "demo", 3, 2, 1, 0, 1, 40, 1_200, 18)
    shown = render_usage([use]).plain
    assert "3 by 1 client: 2 settled, 1 refunded, 0 open" in shown
    assert "0.0012 USDC to nodes, 0.000018 USDC to the committee" in shown
