"""What ``splitup-deploy export`` found, as text. Pure: data in, text out."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from splitup.client.inputs import format_bytes


def render_export(report: dict[str, Any]) -> Text:
    """Return the lines of a report."""
    rows = " and ".join(str(count) for count in report["rows"].values())
    what = report.get("file") or "sizes only: nothing was written"
    lines = [
        f"{what}: {report['backend']}, {report['dtype']}, {report['max_len']} positions, "
        f"steps of {rows} row{'s' * (rows != '1')}"
    ]
    if "file_bytes" in report:
        lines.append(f"  file     {format_bytes(report['file_bytes'])}")
    lines += [
        f"  weights  {format_bytes(report['weights_bytes'])}",
        f"  cache    {format_bytes(report['cache_bytes'])} = {report['cache_formula']}; "
        "a step reads one and writes one",
        f"  masks    {format_bytes(report['masks_bytes'])} of the largest step",
    ]
    for method, found in report.get("delegated", {}).items():
        others = ", ".join(f"{count} {name}" for name, count in found["others"].items())
        lines.append(
            f"  {method:8} {found['delegated']} of {found['operations']} operations delegated, "
            f"in {found['subgraphs']} subgraphs; the others: {others or 'none'}"
        )
    if (check := report.get("check")) is not None:
        lines += _describe_check(check)
    return Text("\n".join(lines))


def _describe_check(check: dict[str, Any]) -> list[str]:
    errors = check["layer_errors"]
    lines = [
        f"  error    {check['logits_error']:.1e} of the logits of {check['tokens']} tokens, "
        "against our kernels on this CPU",
        f"           {min(errors):.1e} to {max(errors):.1e} of a layer's keys and values, "
        "against torch at float32",
        f"           {100 * check['same_likeliest_token']:.1f} % of the rows have the same "
        "likeliest token",
    ]
    if "nats_per_token" in check:
        lines.append(
            f"  loss     {check['nats_per_token']:.4f} nats/token of a text that the model wrote "
            f"with {check['nats_per_token_of_the_model']:.4f}"
        )
    rates = (check["rows_per_s"], check["rows_per_s_of_our_kernels"])
    what = "  speed    {:.1f} rows/s here; {:.1f} with our kernels: in turns, one thread each"
    lines.append(what.format(*rates))
    return lines
