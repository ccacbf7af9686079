"""What keeping tasks on one's own machine hides, in plain words."""

from __future__ import annotations

from splitup.graph.manifest import ClientPart, PrivacyMeasure


def describe_privacy(client: ClientPart) -> list[str]:
    """Return the sentences that a user of a private model should read before the first token."""
    promise = (
        "Text and tokens stay on your device. Nodes that receive activations can usually "
        "reconstruct them if they know the model. They also see how long your text is, and when."
    )
    if client.privacy is None:
        return [promise, "The model's developer has not measured how much attacks recover."]
    return [promise, *describe_measure(client.privacy)]


def describe_measure(found: PrivacyMeasure) -> list[str]:
    """Return what attacks recovered, a sentence each."""
    curve = ", ".join(f"{_format(share)} from {pairs:,}" for pairs, share in found.pairs)
    return [
        "The model's developer attacked it. Of a text's tokens, a node recovered "
        f"{_format(found.with_weights_bps)} with the model's weights; without them, after learning "
        f"from pairs of a token and its activations: {curve}.",
        f"From the activations that nodes send back: {_format(found.returned_bps)} of the tokens "
        "without the weights; with them, the next token is the likeliest one in "
        f"{_format(found.next_token_bps)}.",
    ]


def _format(share_bps: int) -> str:
    return f"{share_bps / 100:.0f} %"
