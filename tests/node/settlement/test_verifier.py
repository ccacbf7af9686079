from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from splitup_node.settlement.verifier import Verifier

from splitup.core.errors import BadSignature


async def test_s79_an_order_costs_no_manifest_before_the_committee_has_signed_it() -> None:
    """Anybody may post one. A manifest of a stranger's choice is 4 MiB to fetch and to parse."""
    asked = []

    async def fetch_manifest(model_id: str) -> None:
        asked.append(model_id)

    async def check_certificate(certificate: Any) -> None:
        raise BadSignature("the committee has not signed this plan")

    context: dict[str, Any] = dict.fromkeys(Verifier.__dataclass_fields__)
    context["cache"] = SimpleNamespace(fetch_manifest=fetch_manifest)
    context["committees"] = SimpleNamespace(check_certificate=check_certificate)
    request = SimpleNamespace(execution_id="0x2", model_id="0x3")
    plan = SimpleNamespace(plan=SimpleNamespace(request=request))
    order: Any = SimpleNamespace(certificate=plan, task=0, draw=None)
    with pytest.raises(BadSignature):
        await Verifier(**context).accept(order)
    assert not asked
