// The page of a node's owner: what it holds, what it earned by day, why it gets no work, what mends it.
import { html, type TemplateResult } from "lit";
import { dayChart, type Day } from "./charts";
import { View } from "./element";
import { bytes, count, notice, short, usdc } from "./format";

type Facts = {
  chain: { address: string; active: boolean; stake_micro_usdc: number; locked_micro_usdc: number };
  node: {
    running: boolean;
    warnings?: string[];
    resident?: { task_id: string; label: string; vram_bytes: number }[];
    not_loaded?: { task: string; task_id: string; reason: string }[];
    vram_bytes?: number;
    vram_used_bytes?: number;
    executions?: number;
  };
  obstacles: string[];
  rows: [string, string][];
  earnings: {
    days: Day[];
    ready_to_withdraw_micro_usdc: number;
    undistributed_micro_usdc: number;
    withdrawn_micro_usdc: number;
  };
};

class OwnerPage extends View<Facts> {
  override period = 3000;

  constructor() {
    super();
    this.path = "/node/v1/view";
  }

  private work(facts: Facts): TemplateResult {
    const found = [...facts.obstacles, ...((facts.node.running && facts.node.warnings) || [])];
    return found.length
      ? html`<h2>What keeps work away, and what mends it</h2>
          <ul class="obstacles">${found.map((sentence) => html`<li class="error">${sentence}</li>`)}</ul>`
      : html`<p><span class="badge good">ready</span> Nothing keeps work away.</p>`;
  }

  private tasks(facts: Facts): TemplateResult {
    const { resident = [], not_loaded = [], vram_bytes = 0, vram_used_bytes = 0 } = facts.node;
    return html`<h2>Tasks in memory</h2>
      ${
        resident.length
          ? html`<p class="quiet">${count(resident.length)} tasks in ${bytes(vram_used_bytes)} of ${bytes(vram_bytes)}</p>
            <div class="scroll"><table>
              <thead><tr><th>Task</th><th>Id</th><th class="number">Memory</th></tr></thead>
              <tbody>${resident.map(
                (task) => html`<tr><td>${task.label}</td><td class="mono" title=${task.task_id}>${short(task.task_id)}</td>
                  <td class="number">${bytes(task.vram_bytes)}</td></tr>`,
              )}</tbody></table></div>`
          : html`<p class="quiet">None.</p>`
      }
      ${not_loaded.map((task) => html`<p class="error">Not loaded: task ${task.task}, ${task.reason}</p>`)}`;
  }

  override render(): TemplateResult {
    const facts = this.data;
    return html`
      <header><a class="brand" href="/"><img src="/icon.svg" alt="" width="22" height="22">SplitUp node</a></header>
      <main>${notice(this.error, !facts)}${facts ? this.show(facts) : null}</main>`;
  }

  private show(facts: Facts): TemplateResult {
    const { chain, node, earnings } = facts;
    return html`<div>
      <h1>Node <span class="mono">${short(chain.address)}</span>
        <span class="badge ${node.running ? "good" : "bad"}">${node.running ? "running" : "not running"}</span></h1>
      ${this.work(facts)}
      <dl>
        <dt>Address</dt><dd class="mono">${chain.address}</dd>
        <dt>Stake</dt><dd>${usdc(chain.stake_micro_usdc)}${chain.locked_micro_usdc ? html`, ${usdc(chain.locked_micro_usdc)} locked` : null}</dd>
        <dt>Ready to withdraw</dt><dd>${usdc(earnings.ready_to_withdraw_micro_usdc)}${
          earnings.undistributed_micro_usdc
            ? html`, ${
                earnings.undistributed_micro_usdc === earnings.ready_to_withdraw_micro_usdc
                  ? null
                  : html`of which ${usdc(earnings.undistributed_micro_usdc)} are `
              }settled and distributed when you withdraw`
            : null
        }</dd>
        ${earnings.withdrawn_micro_usdc ? html`<dt>Withdrawn so far</dt><dd>${usdc(earnings.withdrawn_micro_usdc)}</dd>` : null}
        ${node.running ? html`<dt>Running executions</dt><dd>${count(node.executions)}</dd>` : null}
      </dl>
      <h2>Earned by day</h2>
      ${dayChart(earnings.days)}
      ${this.tasks(facts)}
      <h2>As splitup-node status says it</h2>
      <dl class="status">${facts.rows.map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl>
    </div>`;
  }
}

customElements.define("owner-page", OwnerPage);
