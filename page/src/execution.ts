// One execution: who computed it, when, what was verified, and what was paid.
import { html, type TemplateResult } from "lit";
import { gantt, type Span } from "./charts";
import { View } from "./element";
import { computePlanRoot, listExecutors, type Opening } from "./plan_root";
import { count, link, notice, short, time, usdc } from "./format";

type Payment = { account: string; amount_micro_usdc: number; from_slash: boolean };
type Receipt = {
  status: string;
  steps: number;
  payments: Payment[];
  slashes: [string, number][];
  paid_micro_usdc: number;
  fee_micro_usdc: number;
  refunded_micro_usdc: number;
  evidence_root: string;
  transaction: string;
};
type ChainEvent = { name: string; block: number; time: number | null; transaction: string; amount: number | null };
type Execution = {
  id: string;
  model_id: string;
  model: string;
  client: string;
  steps: number;
  max_price: number;
  deadline: number;
  block: number;
  time: number | null;
  state: string;
  plan_root: string | null;
  seed: string | null;
  exposures: [string, number][];
  receipt: Receipt | null;
  events: ChainEvent[];
};
type Plan = {
  root: string;
  opening: Opening;
  seed: string;
  snapshot: number;
  difference: string;
  signers: string[];
  tasks: { label: string; executor: string; fallbacks: string[]; verifiable: boolean }[];
};
type Verification = {
  seed: string;
  steps: number;
  verdicts: { task: number; outcome: string; validators: string[]; liars: string[]; silent: string[] }[];
};
type Timeline = { is_known: boolean; spans: Span[] };

/** Where a plan stands on the chain, as the server read it there. */
type Accepted = { execution: string; root: string; block: number; transaction: string };

/** Return what is wrong with a plan for the chain's root, "" for nothing; all is computed here. */
function findFault(plan: Plan, accepted: Accepted): string {
  const { opening } = plan;
  const root = computePlanRoot(opening);
  if (root !== accepted.root) return `its root is ${root}, and the chain has ${accepted.root}`;
  if (opening.execution_id !== accepted.execution) return "it is the plan of another execution";
  if (opening.seed !== plan.seed) return "it follows from another seed";
  const executors = listExecutors(opening);
  const isShown = (task: Plan["tasks"][number], index: number): boolean => {
    const fallbacks = opening.tasks[index].candidates.filter((node) => node !== executors[index]);
    return task.executor === executors[index] && task.fallbacks.join() === fallbacks.join();
  };
  const matches = plan.tasks.length === executors.length && plan.tasks.every(isShown);
  return matches ? "" : "the table shows other nodes than the plan";
}

/** Who was chosen for each task: signed by the members, computed again by the server, and checked here. */
export class PlanView extends View<Plan> {
  static override properties = { ...View.properties, brief: { type: Boolean }, accepted: {} };
  declare brief: boolean;
  declare accepted: Accepted;
  override period = 0;

  private proof(plan: Plan): TemplateResult {
    const fault = findFault(plan, this.accepted);
    if (fault) return html`<p class="error" role="alert">This plan is not the one on chain: ${fault}</p>`;
    return html`<p class="proof"><span class="badge good">root matches</span> This browser computed the root of the table
      below, and it is the one on chain. <span class="quiet">The chain's root was read by this server, from the event
      PlanAccepted in block ${count(this.accepted.block)}, transaction
      <span class="mono" title=${this.accepted.transaction}>${short(this.accepted.transaction)}</span>; to trust nobody,
      compare it with a chain node of your own.</span></p>`;
  }

  override render(): TemplateResult | null {
    const plan = this.data;
    if (!plan) return notice(this.error, true);
    return html`
      ${
        plan.difference
          ? html`<p class="error">This plan is wrong: ${plan.difference}</p>`
          : html`<p><span class="badge good">checked</span> Signed by ${plan.signers.length} members; every choice
              follows from the seed, as this server computed it again.</p>`
      }
      ${this.proof(plan)}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Computed by</th>
          ${this.brief ? null : html`<th>Fallbacks</th>`}<th>Verifiable</th></tr></thead>
        <tbody>${plan.tasks.map(
          (task) => html`<tr>
            <td>${task.label}</td>
            <td>${link("accounts", task.executor)}</td>
            ${this.brief ? null : html`<td>${task.fallbacks.map((node) => html`${link("accounts", node)} `)}</td>`}
            <td>${task.verifiable ? "yes" : "no"}</td>
          </tr>`,
        )}</tbody>
      </table></div>
      <dl>
        <dt>Root</dt><dd class="mono">${plan.root}</dd>
        <dt>Seed</dt><dd class="mono">${plan.seed}</dd>
        <dt>List of nodes</dt><dd>number ${plan.snapshot}</dd>
      </dl>`;
  }
}

export class VerificationView extends View<Verification> {
  override period = 0;

  override render(): TemplateResult | null {
    const found = this.data;
    if (!found) return notice(this.error, true);
    if (!found.verdicts.length) return html`<p>No task of this execution was drawn.</p>`;
    return html`<p>${count(found.verdicts.length)} of the tasks ${found.verdicts.length === 1 ? "was" : "were"} drawn after all results were committed.</p>
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Verdict</th><th>Recomputed by</th><th>At fault</th></tr></thead>
        <tbody>${found.verdicts.map(
          (verdict) => html`<tr>
            <td>${verdict.task}</td>
            <td><span class="badge ${verdict.outcome === "honest" ? "good" : "bad"}">${verdict.outcome}</span></td>
            <td>${verdict.validators.map((node) => html`${link("accounts", node)} `)}</td>
            <td>${[...verdict.liars, ...verdict.silent].map((node) => html`${link("accounts", node)} `)}</td>
          </tr>`,
        )}</tbody>
      </table></div>`;
  }
}

export class TimelineView extends View<Timeline> {
  override render(): TemplateResult | null {
    if (!this.data) return notice(this.error, true);
    if (this.data.is_known) {
      this.period = 0;
      return gantt(this.data.spans);
    }
    return html`<p class="quiet">Nodes report their times to the client when an execution ends. This one is open, or
      another client's.</p>`;
  }
}

type Gas = {
  total: number;
  is_complete: boolean;
  transactions: { transaction: string; events: string[]; gas: number | null }[];
};

/** The gas of an execution's transactions. */
export class GasView extends View<Gas> {
  override period = 0;

  override render(): TemplateResult | null {
    const found = this.data;
    if (!found) return notice(this.error, true);
    return html`<p>${found.is_complete ? "" : "At least "}${count(found.total)} gas in
        ${count(found.transactions.length)} transactions. <span class="quiet">One that serves several executions counts for
        each.</span></p>
      <div class="scroll"><table>
        <thead><tr><th>Transaction</th><th>Events</th><th class="number">Gas</th></tr></thead>
        <tbody>${found.transactions.map(
          (one) => html`<tr><td class="mono" title=${one.transaction}>${short(one.transaction)}</td>
            <td>${[...new Set(one.events)].join(", ")}</td><td class="number">${count(one.gas)}</td></tr>`,
        )}</tbody></table></div>`;
  }
}

function receipt(found: Receipt | null): TemplateResult {
  if (!found) {
    return html`<p class="quiet">Not settled yet. An execution that serves a chat stays open for further requests; it
      is paid when it ends.</p>`;
  }
  return html`
    <dl>
      <dt>Closed</dt><dd>${found.status}, ${count(found.steps)} steps</dd>
      <dt>To the nodes</dt><dd>${usdc(found.paid_micro_usdc)}</dd>
      <dt>Committee's fee</dt><dd>${usdc(found.fee_micro_usdc)}</dd>
      <dt>Came back</dt><dd>${usdc(found.refunded_micro_usdc)}</dd>
      <dt>Transaction</dt><dd class="mono">${found.transaction}</dd>
    </dl>
    ${
      found.payments.length || found.slashes.length
        ? html`<div class="scroll"><table>
          <thead><tr><th>Account</th><th class="number">Amount</th><th>Why</th></tr></thead>
          <tbody>
            ${found.payments.map(
              (paid) => html`<tr><td>${link("accounts", paid.account)}</td>
                <td class="number">${usdc(paid.amount_micro_usdc)}</td>
                <td>${paid.from_slash ? "reward out of a slashed stake" : "work"}</td></tr>`,
            )}
            ${found.slashes.map(
              ([node, amount]) => html`<tr><td>${link("accounts", node)}</td>
                <td class="number bad">−${usdc(amount)}</td><td>slashed</td></tr>`,
            )}
          </tbody>
        </table></div>`
        : null
    }`;
}

/** Everything about an execution; in a chat without what the chat shows already. */
export class ExecutionView extends View<Execution> {
  static override properties = { ...View.properties, execution: {}, firstStep: { type: Number }, brief: { type: Boolean } };
  declare execution: string;
  declare firstStep: number;
  declare brief: boolean;

  constructor() {
    super();
    this.execution = "";
    this.firstStep = 0;
    this.brief = false;
  }

  override willUpdate(changed: Map<string, unknown>): void {
    if (changed.has("execution")) {
      changed.set("path", this.path);
      this.path = `/explorer/v1/executions/${this.execution}`;
    }
    super.willUpdate(changed);
  }

  override render(): TemplateResult | null {
    const found = this.data;
    if (!found) return notice(this.error, true);
    const at = `/explorer/v1/executions/${this.execution}`;
    const event = found.events.find((one) => one.name === "PlanAccepted");
    const accepted: Accepted | null = event
      ? { execution: found.id, root: found.plan_root!, block: event.block, transaction: event.transaction }
      : null;
    return html`
      ${this.brief ? null : html`<h1>Execution <span class="mono">${short(found.id)}</span></h1>`}
      <dl>
        <dt>Execution</dt><dd class="mono">${this.brief ? link("executions", found.id) : found.id}</dd>
        <dt>State</dt><dd><span class="badge ${stateClass(found.state)}">${found.state}</span></dd>
        ${
          this.brief
            ? null
            : html`<dt>Model</dt><dd>${link("models", found.model_id, found.model)}</dd>
              <dt>Client</dt><dd>${link("accounts", found.client)}</dd>
              <dt>Requested</dt><dd>${time(found.time)}, block ${found.block}</dd>
              <dt>Steps</dt><dd>at most ${count(found.steps)}, for at most ${usdc(found.max_price)}</dd>
              <dt>Deadline</dt><dd>${time(found.deadline)}</dd>`
        }
      </dl>
      <h2>Plan</h2>
      ${
        accepted
          ? html`<plan-view ?brief=${this.brief} .accepted=${accepted} .path=${`${at}/plan`}></plan-view>`
          : html`<p class="quiet">Not planned yet.</p>`
      }
      <h2>Timeline</h2>
      <timeline-view .path=${`${at}/timeline?start=${this.firstStep}`}></timeline-view>
      <h2>Verification</h2>
      ${
        found.receipt?.status === "settled"
          ? html`<verification-view .path=${`${at}/verification`}></verification-view>`
          : html`<p class="quiet">${found.receipt ? "It was refunded: nothing was verified." : "It comes with the settlement."}</p>`
      }
      <h2>Receipt</h2>
      ${receipt(found.receipt)}
      ${
        this.brief
          ? null
          : html`<h2>Stakes at risk</h2>
            ${
              found.exposures.length
                ? html`<div class="scroll"><table><thead><tr><th>Node</th><th class="number">Locked</th></tr></thead>
                  <tbody>${found.exposures.map(
                    ([node, amount]) => html`<tr><td>${link("accounts", node)}</td><td class="number">${usdc(amount)}</td></tr>`,
                  )}</tbody></table></div>`
                : html`<p class="quiet">No commitments yet.</p>`
            }
            <h2>Gas</h2>
            <gas-view .path=${`${at}/gas`}></gas-view>
            <h2>On chain</h2>
            ${eventTable(found.events)}`
      }`;
  }
}

export function stateClass(state: string): string {
  return { settled: "good", refunded: "bad" }[state] ?? "";
}

export function eventTable(events: (ChainEvent & { execution?: string | null })[]): TemplateResult {
  return html`<div class="scroll"><table>
    <thead><tr><th>Event</th><th>Time</th><th class="number">Block</th><th>Execution</th><th>Transaction</th></tr></thead>
    <tbody>${events.map(
      (event) => html`<tr>
        <td>${event.name}${event.amount === null ? "" : html` <span class="quiet">${usdc(event.amount)}</span>`}</td>
        <td>${time(event.time)}</td>
        <td class="number">${event.block}</td>
        <td>${event.execution ? link("executions", event.execution) : ""}</td>
        <td class="mono" title=${event.transaction}>${short(event.transaction)}</td>
      </tr>`,
    )}</tbody></table></div>`;
}

customElements.define("plan-view", PlanView);
customElements.define("verification-view", VerificationView);
customElements.define("gas-view", GasView);
customElements.define("timeline-view", TimelineView);
customElements.define("execution-view", ExecutionView);
