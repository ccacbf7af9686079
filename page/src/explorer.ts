// The explorer: live nodes, models, executions, accounts and the committee.
import { html, type TemplateResult } from "lit";
import { dag, dayChart, type Day, type TaskInfo } from "./charts";
import { View } from "./element";
import { eventTable, stateClass } from "./execution";
import { bytes, count, link, notice, percent, price, short, time, usdc } from "./format";

type NodeRow = {
  address: string;
  operator: string;
  endpoint: string;
  class: string;
  stake: number;
  locked: number;
  task_count: number;
  vram_free_bytes: number;
  queue_ms: number;
  rtt_ms: number;
  uptime: number | null;
};
type ModelRow = {
  id: string;
  name: string;
  developer: string;
  task_count: number;
  price_nano_usdc: number;
  vram_bytes: number;
  least_holders: number;
};
type ExecutionRow = {
  id: string;
  model_id: string;
  model: string;
  client: string;
  steps: number;
  max_price: number;
  time: number | null;
  block: number;
  state: string;
  cost: number | null;
};
type Events = Parameters<typeof eventTable>[0];

/** A list whose further pages follow the first one. */
class Pages<T extends { next: string | number | null }> extends View<T> {
  static override properties = { ...View.properties, base: {}, place: { state: true } };
  declare base: string;
  declare place: (string | number)[];
  protected cursor = "before";

  constructor() {
    super();
    this.base = "";
    this.place = [];
  }

  override willUpdate(changed: Map<string, unknown>): void {
    if (changed.has("base")) this.place = [];
    if (changed.has("base") || changed.has("place")) {
      const last = this.place.at(-1);
      const mark = this.base.includes("?") ? "&" : "?";
      const path = last === undefined ? this.base : `${this.base}${mark}${this.cursor}=${last}`;
      if (path !== this.path) changed.set("path", this.path);
      this.path = path;
    }
    super.willUpdate(changed);
  }

  protected turner(): TemplateResult | null {
    const next = this.data?.next;
    if (!this.place.length && (next === null || next === undefined)) return null;
    return html`<p class="turner">
      <button ?disabled=${!this.place.length} @click=${() => (this.place = this.place.slice(0, -1))}>Newer</button>
      <button ?disabled=${next === null || next === undefined} @click=${() => (this.place = [...this.place, next!])}>Older</button>
    </p>`;
  }
}

export class NodesView extends Pages<{ sequence: number; total: number; nodes: NodeRow[]; next: number | null }> {
  override cursor = "start";
  private search = "";

  override render(): TemplateResult {
    const found = this.data;
    return html`
      <h1>Live nodes</h1>
      <p><input type="search" placeholder="Address, class, operator or endpoint" aria-label="Filter nodes" .value=${this.search}
        @change=${(event: Event) => {
          this.search = (event.target as HTMLInputElement).value;
          this.base = `/explorer/v1/nodes?search=${encodeURIComponent(this.search)}`;
        }}></p>
      ${notice(this.error, !found)}
      ${
        found
          ? html`<p class="quiet">${count(found.total)} ${found.total === 1 ? "node" : "nodes"} in the committee's list number ${count(found.sequence)}</p>
            <div class="scroll"><table>
              <thead><tr><th>Node</th><th>Operator</th><th>Class</th><th class="number">Tasks</th>
                <th class="number">Free memory</th><th class="number">Queue</th><th class="number">Uptime</th><th class="number">Stake</th><th class="number">Locked</th></tr></thead>
              <tbody>${found.nodes.map(
                (node) => html`<tr>
                  <td>${link("accounts", node.address)}</td>
                  <td>${node.operator === node.address ? html`<span class="quiet">itself</span>` : link("accounts", node.operator)}</td>
                  <td class="class" title=${node.class}>${node.class}</td>
                  <td class="number">${node.task_count}</td>
                  <td class="number">${bytes(node.vram_free_bytes)}</td>
                  <td class="number">${count(node.queue_ms)} ms</td>
                  <td class="number">${percent(node.uptime)}</td>
                  <td class="number">${usdc(node.stake)}</td>
                  <td class="number">${usdc(node.locked)}</td>
                </tr>`,
              )}</tbody></table></div>
              <p class="quiet">Uptime: how often a node was on the list when this server looked, in the last 24 hours and
                since it was started.</p>${this.turner()}`
          : null
      }`;
  }
}

export class ModelsView extends Pages<{ models: ModelRow[]; next: string | null }> {
  override render(): TemplateResult {
    const found = this.data;
    return html`<h1>Models</h1>
      ${notice(this.error, !found)}
      ${
        found
          ? html`<div class="scroll"><table>
              <thead><tr><th>Name</th><th>Id</th><th>Developer</th><th class="number">Tasks</th><th class="number">Memory</th>
                <th class="number">Price per million steps</th><th class="number">Holders</th></tr></thead>
              <tbody>${found.models.map(
                (model) => html`<tr>
                  <td>${link("models", model.id, model.name)}</td>
                  <td>${link("models", model.id)}</td>
                  <td>${link("accounts", model.developer)}</td>
                  <td class="number">${model.task_count}</td>
                  <td class="number">${bytes(model.vram_bytes)}</td>
                  <td class="number">${price(model.price_nano_usdc)}</td>
                  <td class="number">${model.least_holders}</td>
                </tr>`,
              )}</tbody></table></div>
              <p class="quiet">Holders: live nodes that hold the task that fewest hold.</p>${this.turner()}`
          : null
      }`;
  }
}

type ModelDetails = ModelRow & {
  tasks: (TaskInfo & { flops: number })[];
  edges: [number, number][];
  requests: number;
  revenue: number;
  is_retired: boolean;
};

export class ModelView extends View<ModelDetails> {
  override render(): TemplateResult | null {
    const model = this.data;
    if (!model) return notice(this.error, true);
    return html`${notice(this.error, false)}
      <h1>${model.name} ${model.is_retired ? html`<span class="badge bad">retired</span>` : null}</h1>
      <dl>
        <dt>Id</dt><dd class="mono">${model.id}</dd>
        <dt>Developer</dt><dd>${link("accounts", model.developer)}</dd>
        <dt>Price</dt><dd>${price(model.price_nano_usdc)} per million steps</dd>
        <dt>Memory</dt><dd>${bytes(model.vram_bytes)} in ${count(model.task_count)} tasks</dd>
        <dt>Executions</dt><dd>${count(model.requests)}, which cost ${usdc(model.revenue)}</dd>
      </dl>
      <h2>Tasks</h2>
      ${dag(model.tasks, model.edges)}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Id</th><th class="number">Memory</th><th class="number">Operations</th>
          <th class="number">Price per million steps</th><th class="number">Holders</th></tr></thead>
        <tbody>${model.tasks.map(
          (task) => html`<tr>
            <td>${task.label}</td><td class="mono" title=${task.id}>${short(task.id)}</td>
            <td class="number">${bytes(task.vram_bytes)}</td><td class="number">${count(task.flops)}</td>
            <td class="number">${price(task.price_nano_usdc)}</td>
            <td class="number">${task.holders || html`<span class="badge bad">0</span>`}</td>
          </tr>`,
        )}</tbody></table></div>
      <h2>Executions</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${model.id}`}></executions-view>`;
  }
}

export class ExecutionsView extends Pages<{ executions: ExecutionRow[]; next: string | null }> {
  static override properties = { ...Pages.properties, embedded: { type: Boolean } };
  declare embedded: boolean;

  override render(): TemplateResult {
    const found = this.data;
    return html`${this.embedded ? null : html`<h1>Executions</h1>`}
      ${notice(this.error, !found)}
      ${found && !found.executions.length ? html`<p class="quiet">None yet.</p>` : null}
      ${
        found?.executions.length
          ? html`<div class="scroll"><table>
              <thead><tr><th>Execution</th><th>Requested</th><th>Model</th><th>Client</th><th>State</th>
                <th class="number">Steps</th><th class="number">Locked</th><th class="number">Cost</th></tr></thead>
              <tbody>${found.executions.map(
                (row) => html`<tr>
                  <td>${link("executions", row.id)}</td>
                  <td title="block ${row.block}">${time(row.time)}</td>
                  <td>${link("models", row.model_id, row.model)}</td>
                  <td>${link("accounts", row.client)}</td>
                  <td><span class="badge ${stateClass(row.state)}">${row.state}</span></td>
                  <td class="number">${count(row.steps)}</td>
                  <td class="number">${usdc(row.max_price)}</td>
                  <td class="number">${usdc(row.cost)}</td>
                </tr>`,
              )}</tbody></table></div>${this.turner()}`
          : null
      }`;
  }
}

type Account = {
  address: string;
  totals: Record<string, { count: number; amount: number }>;
  node:
    | (Partial<NodeRow> & {
        live: boolean;
        stake: number;
        vram_gb: number;
        tasks: { id: string; model?: string; model_id?: string; task?: number }[];
      })
    | null;
  events: Events;
  next: string | null;
};
const ROLES: Record<string, string> = {
  payout: "Earned by work",
  reward: "Rewards out of slashes",
  slashed: "Slashed",
  refund: "Refunded",
  executor: "Executions computed",
  client: "Requests, deposits and withdrawals",
  developer: "Models registered",
  member: "Committees",
  operator: "Nodes operated",
};

export class AccountView extends Pages<Account> {
  override render(): TemplateResult | null {
    const found = this.data;
    if (!found) return notice(this.error, true);
    const node = found.node;
    return html`${notice(this.error, false)}
      <h1>Account <span class="mono">${short(found.address)}</span></h1>
      <dl>
        <dt>Address</dt><dd class="mono">${found.address}</dd>
        ${Object.entries(ROLES)
          .filter(([role]) => role in found.totals)
          .map(([role, words]) => {
            const total = found.totals[role];
            const money = ["payout", "reward", "slashed", "refund"].includes(role);
            return html`<dt>${words}</dt><dd>${money ? html`${usdc(total.amount)} <span class="quiet">in ${count(total.count)}</span>` : count(total.count)}</dd>`;
          })}
      </dl>
      ${
        node
          ? html`<h2>Node <span class="badge ${node.live ? "good" : "bad"}">${node.live ? "live" : "not live"}</span></h2>
            <dl>
              <dt>Stake</dt><dd>${usdc(node.stake)}${node.locked ? html`, ${usdc(node.locked)} locked` : null}</dd>
              <dt>Memory</dt><dd>${node.vram_gb} GB offered${node.live ? html`, ${bytes(node.vram_free_bytes!)} free` : null}</dd>
              ${
                node.live
                  ? html`<dt>Uptime</dt><dd>${percent(node.uptime!)} <span class="quiet">of the last 24 hours, as far as
                      this server was running</span></dd>
                    <dt>Class</dt><dd>${node.class}</dd>
                    <dt>Operator</dt><dd>${link("accounts", node.operator!)}</dd>
                    <dt>Endpoint</dt><dd class="mono">${node.endpoint}</dd>`
                  : null
              }
            </dl>
            ${
              node.tasks.length
                ? html`<h2>Tasks in memory</h2><ul class="tasks">${node.tasks.map(
                    (task) => html`<li title=${task.id}>${
                      task.model_id ? html`${link("models", task.model_id, task.model)} ${task.task}` : html`<span class="mono">${short(task.id)}</span>`
                    }</li>`,
                  )}</ul>`
                : null
            }`
          : null
      }
      ${
        node || found.totals.payout
          ? html`<h2>Earned by day</h2>
            <earnings-view .path=${`/explorer/v1/accounts/${found.address}/earnings`}></earnings-view>`
          : null
      }
      <h2>Requests</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${found.address}`}></executions-view>
      <h2>On chain</h2>
      ${eventTable(found.events)}${this.turner()}`;
  }
}

export class EarningsView extends View<{ days: Day[] }> {
  override period = 60_000;

  override render(): TemplateResult | null {
    return this.data ? dayChart(this.data.days) : notice(this.error, true);
  }
}

type Committee = {
  configuration: number;
  quorum: number;
  group_key: string;
  epoch: number | null;
  snapshot: number | null;
  randomness: { seed: string; execution: string; block: number }[];
  members: { address: string; endpoint: string; bond: number }[];
  events: Events;
};

export class CommitteeView extends View<Committee> {
  override render(): TemplateResult | null {
    const found = this.data;
    if (!found) return notice(this.error, true);
    return html`${notice(this.error, false)}<h1>Committee</h1>
      <dl>
        <dt>Configuration</dt><dd>${found.configuration}</dd>
        <dt>Quorum</dt><dd>${found.quorum} of ${found.members.length} members</dd>
        <dt>Epoch</dt><dd>${count(found.epoch)}</dd>
        <dt>List of nodes</dt><dd>number ${count(found.snapshot)}</dd>
        <dt>Group key</dt><dd class="mono">${found.group_key || "none yet"}</dd>
      </dl>
      <div class="scroll"><table>
        <thead><tr><th>Member</th><th>Endpoint</th><th class="number">Bond</th></tr></thead>
        <tbody>${found.members.map(
          (member) => html`<tr><td>${link("accounts", member.address)}</td><td class="mono">${member.endpoint}</td>
            <td class="number">${usdc(member.bond)}</td></tr>`,
        )}</tbody></table></div>
      <h2>Randomness</h2>
      ${
        found.randomness.length
          ? html`<p class="quiet">Each seed is the hash of a threshold signature, which no member could choose.</p>
            <div class="scroll"><table>
              <thead><tr><th>Seed</th><th>Execution</th><th class="number">Block</th></tr></thead>
              <tbody>${found.randomness.map(
                (one) => html`<tr><td class="mono" title=${one.seed}>${short(one.seed)}</td><td>${link("executions", one.execution)}</td>
                  <td class="number">${count(one.block)}</td></tr>`,
              )}</tbody></table></div>`
          : html`<p class="quiet">None yet.</p>`
      }
      <h2>On chain</h2>
      ${eventTable(found.events)}`;
  }
}

type Results = { results: { kind: "execution" | "model" | "account"; id: string; name: string }[] };

export class SearchView extends View<Results> {
  override period = 0;

  override render(): TemplateResult {
    return html`<h1>Search</h1>
      ${notice(this.error, !this.data)}
      ${this.data && !this.data.results.length ? html`<p class="quiet">Nothing begins like this.</p>` : null}
      <ul class="results">${this.data?.results.map(
        (found) => html`<li><span class="badge">${found.kind}</span>
          <a href="#/${found.kind}s/${found.id}">${found.name || html`<span class="mono">${found.id}</span>`}</a></li>`,
      )}</ul>`;
  }
}

customElements.define("nodes-view", NodesView);
customElements.define("models-view", ModelsView);
customElements.define("model-view", ModelView);
customElements.define("executions-view", ExecutionsView);
customElements.define("earnings-view", EarningsView);
customElements.define("account-view", AccountView);
customElements.define("committee-view", CommitteeView);
customElements.define("search-view", SearchView);
