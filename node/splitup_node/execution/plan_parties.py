"""Who may open a data link to this node: the parties of the plans that it was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from splitup.messages.plans import PlanCertificate


class PlanParties:
    """The keys that plans name, each as often as there are plans that name it."""

    def __init__(self) -> None:
        self._may_open: Counter[tuple[str, str]] = Counter()  # (key, execution, or "" for any)
        self.expected: dict[str, PlanCertificate] = {}  # by execution: this node prepares for it

    def may_open(self, key: str, execution_id: str) -> bool:
        """Return whether a key may open a link, for one execution or "" for all that it is in.

        A link for one execution is its client's.
        """
        return (key, execution_id) in self._may_open

    def add(self, certificate: PlanCertificate) -> None:
        """Let the parties of a checked plan connect."""
        self._may_open.update(_list_links(certificate))

    def remove(self, certificate: PlanCertificate) -> None:
        """Forget a plan that was added."""
        for name in _list_links(certificate):
            self._may_open[name] -= 1
            if not self._may_open[name]:
                del self._may_open[name]

    @contextmanager
    def expect(self, certificate: PlanCertificate) -> Iterator[None]:
        """Let the parties of a checked plan connect while this node prepares for it."""
        execution_id = certificate.plan.request.execution_id
        self.add(certificate)
        self.expected[execution_id] = certificate
        try:
            yield
        finally:
            self.expected.pop(execution_id, None)
            self.remove(certificate)


def _list_links(certificate: PlanCertificate) -> Iterator[tuple[str, str]]:
    request = certificate.plan.request
    yield request.client_key, request.execution_id
    yield request.client_key, ""
    for node in certificate.plan.nodes:
        yield node.signing_key, ""
