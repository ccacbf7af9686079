"""Draft and target models behind gRPC, and the caller of both.

Other programs may implement either side: ``speculation.proto`` is the interface. The decoder that
both sides drive is the market's own (``splitup.decode.speculation``).
"""

from splitup.core.extras import Command, Extra

EXTRA = Extra(
    commands={
        "splitup": {
            "draft-worker": Command(
                "splitup_speculation.draft_worker",
                "Draft for others with a small model, over gRPC.",
            ),
            "target-worker": Command(
                "splitup_speculation.target_worker",
                "Verify others' drafts with a model, over gRPC.",
            ),
            "speculate": Command(
                "splitup_speculation.speculate",
                "Continue a text by workers that draft and verify.",
            ),
        }
    }
)
