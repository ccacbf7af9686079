"""Private inference: text and tokens stay on the device, nodes see hidden states.

``split``: a server for devices that run a private model's ends, and its client. ``adapters``: LoRA
adapters that are applied to encrypted hidden states. ``attacks``: what nodes can reconstruct.
"""

from splitup.core.extras import Command, Extra

EXTRA = Extra(
    commands={
        "splitup": {
            "adapter-host": Command(
                "splitup_private.adapters.command",
                "Apply adapters to hidden states that clients encrypt.",
            )
        },
        "splitup-deploy": {
            "privacy": Command(
                "splitup_private.attacks.command",
                "Measure what nodes can reconstruct of a private model's text.",
            )
        },
    },
    adapter_flags="splitup_private.adapters.flags:EncryptedAdapterFlags",
)
