// A timeline as a Gantt chart, and a model's tasks as a graph: SVG, drawn from attributes alone.
import { html, svg, type TemplateResult } from "lit";
import { bytes, count, ms, short, usdc } from "./format";

export type Span = {
  node: string;
  task: number;
  label: string;
  step: number;
  received_us: number;
  started_us: number;
  ended_us: number;
  sent_us: number;
};

const COLOURS = 8;
const MOST_DRAWN = 120; // tasks; a larger graph is a table only

/** Draw which node computed which task when: one row a task, one colour a node. */
export function gantt(spans: Span[]): TemplateResult {
  if (!spans.length) return html`<p class="quiet">The nodes reported no times.</p>`;
  const nodes = [...new Set(spans.map((span) => span.node))].sort();
  const rows = [...new Set(spans.map((span) => span.task))].sort((a, b) => a - b);
  const labels = new Map(spans.map((span) => [span.task, span.label]));
  const end = Math.max(...spans.map((span) => span.sent_us), 1);
  const [left, width, height] = [168, 760, 24];
  const x = (us: number): number => left + (Math.max(0, us) / end) * width;
  const steps = new Set(spans.map((span) => span.step)).size;
  const summary = `${steps} step${steps > 1 ? "s" : ""} in ${rows.length} tasks on ${nodes.length} nodes, ${ms(end / 1000)}`;
  return html`<figure class="chart">
    <figcaption>${summary}</figcaption>
    <div class="scroll" tabindex="0" role="group" aria-label="Timeline">
      <svg viewBox="0 0 ${left + width + 10} ${rows.length * height + 26}" role="img" aria-label=${summary}>
        ${rows.map(
          (task, row) => svg`
            <text class="label" x="0" y=${row * height + 16}>${cut(labels.get(task) ?? "", 22)}<title>${labels.get(task)}</title></text>
            <line class="grid" x1=${left} x2=${left + width} y1=${row * height + height - 1} y2=${row * height + height - 1}></line>`,
        )}
        ${spans.map((span) => {
          const y = rows.indexOf(span.task) * height + 4;
          const colour = `bar c${nodes.indexOf(span.node) % COLOURS}`;
          const bar = Math.max(1.2, x(span.ended_us) - x(span.started_us));
          return svg`<rect class=${colour} x=${x(span.started_us)} y=${y} width=${bar} height=${height - 9} rx="1.5">
            <title>${`${span.label}, step ${span.step}, node ${short(span.node)}: ${ms((span.ended_us - span.started_us) / 1000)}`}</title></rect>`;
        })}
        ${[0, 0.25, 0.5, 0.75, 1].map(
          (part) => svg`<text class="tick" x=${left + part * width} y=${rows.length * height + 18}
            text-anchor=${part === 1 ? "end" : part === 0 ? "start" : "middle"}>${ms((part * end) / 1000)}</text>`,
        )}
      </svg>
    </div>
    <p class="legend">${nodes.map(
      (node, place) => html`<a href="#/accounts/${node}" title=${node}><span class="dot c${place % COLOURS}"></span>${short(node)}</a>`,
    )}</p>
  </figure>`;
}

/** Draw when the tokens of an answer arrived here; `arrivals` are milliseconds after the request. */
export function arrivalChart(arrivals: number[]): TemplateResult | null {
  if (!arrivals.length) return null;
  const end = arrivals.at(-1)!;
  const width = 900;
  const summary = `${arrivals.length} tokens in ${ms(end)}, the first after ${ms(arrivals[0])}`;
  return html`<figure class="chart">
    <figcaption>As seen from here: ${summary}</figcaption>
    <div class="scroll">
      <svg viewBox="0 0 ${width} 20" role="img" aria-label=${summary}>
        ${arrivals.map((at, token) => {
          const from = token ? arrivals[token - 1] : 0;
          return svg`<rect class=${token ? "bar c0" : "wait"} x=${(from / end) * width} y="2" height="16"
            width=${Math.max(1, ((at - from) / end) * width - 1)}><title>${`token ${token + 1}: ${ms(at - from)}`}</title></rect>`;
        })}
      </svg>
    </div>
  </figure>`;
}

export type Day = { date: string; executions: number; paid: number; rewards: number; slashed: number };

/** Draw what was earned on each day (UTC), and list it. */
export function dayChart(days: Day[]): TemplateResult {
  const earned = (day: Day): number => day.paid + day.rewards;
  const total = days.reduce((sum, day) => sum + earned(day), 0);
  const most = Math.max(...days.map(earned), 1);
  const [width, height, gap] = [900, 90, 4];
  const step = width / days.length;
  const summary = `${usdc(total)} in ${days.length} days`;
  return html`<figure class="chart">
      <figcaption>${summary}</figcaption>
      <div class="scroll">
        <svg viewBox="0 0 ${width} ${height + 18}" role="img" aria-label=${summary}>
          ${days.map((day, place) => {
            const tall = (earned(day) / most) * height;
            return svg`<rect class="bar c0" x=${place * step} y=${height - tall} width=${step - gap} height=${tall}>
                <title>${`${day.date}: ${usdc(earned(day))}`}</title></rect>
              <text class="tick" x=${place * step} y=${height + 14}>${day.date.slice(5)}</text>`;
          })}
          <line class="grid" x1="0" x2=${width} y1=${height} y2=${height}></line>
        </svg>
      </div>
    </figure>
    <div class="scroll"><table>
      <thead><tr><th>Day</th><th class="number">Executions</th><th class="number">Paid</th><th class="number">Rewards</th>
        <th class="number">Slashed</th></tr></thead>
      <tbody>${days
        .filter((day) => day.executions || day.rewards || day.slashed)
        .map(
          (day) => html`<tr><td>${day.date}</td><td class="number">${count(day.executions)}</td>
            <td class="number">${usdc(day.paid)}</td><td class="number">${usdc(day.rewards)}</td>
            <td class="number">${usdc(day.slashed)}</td></tr>`,
        )}</tbody></table></div>`;
}

export type TaskInfo = { id: string; label: string; vram_bytes: number; price_nano_usdc: number; holders: number };

/** Draw a model's tasks from left to right; each stands right of those it reads from. */
export function dag(tasks: TaskInfo[], edges: [number, number][]): TemplateResult | null {
  if (tasks.length > MOST_DRAWN) return null;
  const layers: number[] = tasks.map(() => 0);
  for (const [from, to] of edges) layers[to] = Math.max(layers[to], layers[from] + 1);
  const counts: number[] = [];
  const rows = layers.map((layer) => (counts[layer] = (counts[layer] ?? 0) + 1) - 1);
  const tallest = Math.max(...counts);
  const [width, height, gapX, gapY] = [132, 44, 38, 14];
  const x = (task: number): number => layers[task] * (width + gapX) + 2;
  const y = (task: number): number =>
    (rows[task] + (tallest - counts[layers[task]]) / 2) * (height + gapY) + 2;
  const total = counts.length * (width + gapX) - gapX + 4;
  const summary = `${tasks.length} tasks, ${edges.length} edges`;
  return html`<figure class="chart">
    <div class="scroll" tabindex="0" role="group" aria-label="Graph of tasks">
      <svg class="dag" width=${total} height=${tallest * (height + gapY) + 4} role="img" aria-label=${summary}>
        ${edges.map(([from, to]) => {
          const [x1, y1, x2, y2] = [x(from) + width, y(from) + height / 2, x(to), y(to) + height / 2];
          const middle = Math.max((x1 + x2) / 2, x2 - gapX / 2);
          return svg`<path class="edge" d="M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}"></path>`;
        })}
        ${tasks.map(
          (task, place) => svg`<g>
            <title>${`${task.label}: ${bytes(task.vram_bytes)}, held by ${task.holders} nodes`}</title>
            <rect class=${task.holders ? "task" : "task missing"} x=${x(place)} y=${y(place)} width=${width} height=${height} rx="6"></rect>
            <text class="name" x=${x(place) + 10} y=${y(place) + 18}>${cut(task.label, 16)}</text>
            <text class="tick" x=${x(place) + 10} y=${y(place) + 34}>${bytes(task.vram_bytes)} · ${task.holders} nodes</text></g>`,
        )}
      </svg>
    </div>
  </figure>`;
}

function cut(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
