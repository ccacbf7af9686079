"""The demo's report for a person: graph, assignment, timeline, text, money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitup.client.inputs import PER_MILLION_STEPS, format_price, format_usdc
from splitup.client.outcome import TraceEvent
from splitup.demo.report import DemoReport, summarise
from splitup.graph.manifest import InputSource, Manifest

_GANTT_COLUMNS: Final = 64
_LABEL_COLUMNS: Final = 20
_MB: Final = 10**6


def show_report(report: DemoReport, console: Console) -> None:
    """Print everything, in the order in which it happened."""
    names = name_nodes(report)
    _show_graph(report, names, console)
    _show_timeline(report, names, console)
    _show_output(report, console)
    _show_verification(report, names, console)
    _show_money(report, names, console)
    console.print(
        f"\n{report.total_s:.0f} s in all, of which {report.setup_s:.0f} s to start the network "
        "and register the model",
    )


def name_nodes(report: DemoReport) -> dict[str, str]:
    """Return short names for every account of the report: A, B, C … for nodes."""
    nodes = {entry.node for entry in report.plan.nodes}
    nodes |= {p.account for r in report.receipts for p in r.payments}
    nodes |= {v for entry in report.verified for v in entry.validators}
    nodes.discard(report.plan.request.client)
    names = {node: _letter(index) for index, node in enumerate(sorted(nodes))}
    names[report.plan.request.client] = "you"
    return names


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"N{index}"


def _show_graph(report: DemoReport, names: dict[str, str], console: Console) -> None:
    console.rule(f"model {report.model.name}: {len(report.manifest.tasks)} tasks", align="left")
    executors = report.plan.executors()
    table = Table(box=None)
    for column in ("task", "reads", "weights", "VRAM", "price", "node"):
        table.add_column(column, no_wrap=True)
    for index, task in enumerate(report.manifest.tasks):
        table.add_row(
            f"{index:2} {task.label[:_LABEL_COLUMNS]}",
            _describe_sources(report.manifest, index),
            f"{task.weights_bytes / _MB:.2f}",
            f"{task.vram_bytes / _MB:.2f}",
            format_price(task.price_nano_usdc).removesuffix(f" USDC{PER_MILLION_STEPS}"),
            names[executors[index]],
        )
    console.print(table)
    console.print("weights and VRAM in MB, prices in USDC per million steps", style="dim")
    for node in sorted(set(executors)):
        console.print(f"{names[node]}  {node}")


def _describe_sources(manifest: Manifest, index: int) -> str:
    sources = []
    for port in manifest.tasks[index].inputs:
        source = port.source
        name = source.input if isinstance(source, InputSource) else str(source.task)
        sources.append(name)
    return ", ".join(dict.fromkeys(sources))


# ---- timeline ----------------------------------------------------------------------------------


def _show_timeline(report: DemoReport, names: dict[str, str], console: Console) -> None:
    steps = sorted({event.step for event in report.main.trace})
    step = steps[-2:][0] if steps else 0  # near the end: one token at a time, nothing overlaps
    events = [event for event in report.main.trace if event.step == step]
    console.rule(f"timeline of step {step}, by the nodes' own clocks", align="left")
    for line in draw_gantt(events, report.manifest, names):
        console.print(line)
    console.print(
        Text.assemble(
            ("█", "green"), " compute  ", ("▒", "yellow"), " transfer  ", ("·", "dim"), " waiting"
        )
    )
    everything = report.transitions()
    for label, chosen in (
        ("all", everything),
        ("between nodes", [t for t in everything if not t.is_local]),
        ("within a node", [t for t in everything if t.is_local]),
    ):
        figures = summarise(chosen)
        if figures["count"]:
            console.print(
                f"transition, {label}: p50 {figures['p50']:.2f} ms, p99 {figures['p99']:.2f} ms "
                f"over {figures['count']}",
            )


def draw_gantt(
    events: Sequence[TraceEvent], manifest: Manifest, names: dict[str, str]
) -> Iterator[Text]:
    """Yield one line per task of one step: transfer to it, waiting in its queue, compute.

    Transfer runs from the end of the last predecessor's compute to the arrival of the last input.
    """
    if not events:
        return
    ended = {event.task: event.ended_ns for event in events}
    sources: dict[int, list[int]] = {}
    for source, target in manifest.edges():
        sources.setdefault(target, []).append(source)
    first = min(event.received_ns for event in events)
    span = max(1, max(event.ended_ns for event in events) - first)

    def column(moment_ns: int) -> int:
        return max(0, min(_GANTT_COLUMNS, (moment_ns - first) * _GANTT_COLUMNS // span))

    for event in sorted(events, key=lambda event: event.task):
        known = [ended[source] for source in sources.get(event.task, ()) if source in ended]
        left = column(max(known, default=event.received_ns))
        arrived, started = column(event.received_ns), column(event.started_ns)
        stopped = max(column(event.ended_ns), started + 1)  # never invisible
        label = event.label[:_LABEL_COLUMNS].ljust(_LABEL_COLUMNS)
        line = Text(f"{event.task:3} {label} {names.get(event.node, '?'):3}│")
        line.append(" " * left)
        line.append("▒" * (arrived - left), "yellow")
        line.append("·" * (started - max(arrived, left)), "dim")
        line.append("█" * (stopped - started), "green")
        line.append(" " * (_GANTT_COLUMNS + 1 - stopped) + "│")
        line.append(f" {(event.ended_ns - event.started_ns) / 1e6:6.2f} ms", "dim")
        yield line


# ---- result and money --------------------------------------------------------------------------


def _show_output(report: DemoReport, console: Console) -> None:
    main, model = report.main, report.model
    console.rule(f"output: {main.tokens} tokens in {main.session.steps} steps", align="left")
    between = "\n" if model.is_chat else ""
    console.print(Text.assemble((model.prompt + between, "bold"), main.text))
    console.print(
        f"first token after {main.first_s:.2f} s, then {main.tokens_per_s:.1f} tokens a second"
    )
    comparison = report.comparison
    if comparison.equal:
        verdict = f"equal bit for bit: all {comparison.compared_bytes:,} bytes of logits"
    else:
        verdict = f"DIFFERENT: largest difference {comparison.largest_difference:g}"
    console.print(f"compared with the whole model in one process: {verdict}")
    console.print(
        f"submitted to last result: {main.elapsed_s:.2f} s, of which "
        f"{main.plan_s:.2f} s until every task had its node; the whole model takes "
        f"{comparison.reference_s:.2g} s ({comparison.determinism_class})",
    )


def _show_verification(report: DemoReport, names: dict[str, str], console: Console) -> None:
    console.rule("verification: 8 % of tasks, drawn after their outputs were fixed", align="left")
    main = report.plan.request.execution_id
    if not any(entry.execution_id == main for entry in report.verified):
        more = len(report.receipts) - 1
        console.print(
            "no task of this execution was drawn"
            + (f"; short executions until one was drawn: {more}" if more else ""),
        )
    if not report.verified:
        console.print(f"no task was drawn in {len(report.receipts)} executions")
    for entry in report.verified:
        by = ", ".join(names[validator] for validator in entry.validators) or "nobody"
        console.print(
            f"task {entry.task} ({entry.label}) of node {names.get(entry.executor, '?')}, "
            f"recomputed by {by}: {entry.verdict}",
        )


def _show_money(report: DemoReport, names: dict[str, str], console: Console) -> None:
    runs = "execution" if len(report.receipts) == 1 else "executions"
    console.rule(f"money of {len(report.receipts)} {runs}", align="left")
    totals: Counter[str] = Counter()
    for receipt in report.receipts:
        for payment in receipt.payments:
            totals[payment.account] += payment.amount_micro_usdc
        for node, amount in receipt.slashes:
            console.print(f"{names.get(node, node)}  slashed {format_usdc(amount)}")
    for account, amount in sorted(totals.items()):
        console.print(f"{names[account]:3} {account}  {format_usdc(amount)}")
    back = sum(receipt.refunded_micro_usdc for receipt in report.receipts)
    console.print(
        f"paid in all {format_usdc(totals.total())}, back to you {format_usdc(back)}",
    )
