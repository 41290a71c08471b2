"""Certificates that expire while streams run: whose it was is left out, until a new one is on its disk."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from faults import Faults

from rt.net.certs import issue
from rt.net.identity import Identity, Role

pytestmark = pytest.mark.slow

VALID = timedelta(seconds=3)


def issue_short(directory: Path, role: Role, name: str) -> datetime:
    """Replace a certificate by one that is soon over; when that is."""
    until = datetime.now(UTC) + VALID
    issue(
        directory,
        Identity("s", role, name),
        loopback=role == "node",
        renew=True,
        days=1,
        now=until - timedelta(days=1),
    )
    return until


def test_what_is_left_out_with_an_expired_certificate_comes_back_with_a_new_one(faults: Faults) -> None:
    nodes = faults.nodes
    pki, node = nodes.root / "pki", nodes.names[2]
    with faults.sender("expires") as expires, faults.sender("lasts") as lasts:
        faults.wait_flow(expires, lasts)
        until = issue_short(pki, "node", node)
        issue_short(pki, "publisher", "expires")
        for suffix in (".crt", ".key"):
            (pki / f"expires{suffix}").replace(pki / "publisher" / f"expires{suffix}")
        faults.wait(lambda: datetime.now(UTC) > until + VALID, "both certificates to expire")
        nodes.reset()
        faults.wait(lambda: "expired" in expires.last_words(), "the publisher's push to say why")

        def standing() -> tuple[int, int]:
            return expires.notes.merged, nodes.merged_position(node)

        def is_left_out() -> bool:
            """What was on its way before may have to arrive first."""
            before = standing()
            faults.wait_flow(lasts)
            return standing() == before

        try:
            faults.wait(is_left_out, "both to be left out, while the others go on")
            left = standing()
            faults.wait(lambda: expires.notes.flushed > left[0] + 200, "publishing to go on all the same")
            assert standing() == left
        finally:  # The cluster is others' too.
            issue(pki, Identity("s", "node", node), loopback=True, renew=True)
            nodes.certificate("publisher", "expires")
        faults.wait_flow(expires, lasts)
        expires.close()
        lasts.close()
        faults.verdict(allowed=["[Cc]ertificate|expired|SSL"])
