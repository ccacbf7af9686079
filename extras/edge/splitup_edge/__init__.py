"""Models for small devices: one as a file (``splitup-deploy export``), and a text from it.

``splitup edge run`` needs neither a network nor an account.
"""

from splitup.core.extras import Command, Extra

EXTRA = Extra(
    commands={
        "splitup": {
            "edge": Command(
                "splitup_edge.run_command",
                "Continue a text with an exported model, without a network.",
            )
        },
        "splitup-deploy": {
            "export": Command(
                "splitup_edge.export_command", "Write a model as one file for a small device."
            )
        },
    }
)
