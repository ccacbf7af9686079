"""Doors for programs and people: the APIs of OpenAI, Anthropic and Ollama, a page, an explorer."""

from splitup.core.extras import Command, Extra

EXTRA = Extra(
    commands={
        "splitup": {
            "serve": Command(
                "splitup_gateway.commands.serve",
                "Offer models over HTTP to clients of the OpenAI API.",
            ),
            "keys": Command(
                "splitup_gateway.commands.keys", "Create, list and revoke the API keys of serve."
            ),
            "relay": Command(
                "splitup_gateway.commands.relay",
                "Let a phone on the local network reach serve on this machine.",
            ),
        },
        "splitup-node": {
            "page": Command(
                "splitup_gateway.commands.owner_page", "Show status and earnings in a browser."
            )
        },
    }
)
