// Numbers, times and identifiers as people read them.
import { html, type TemplateResult } from "lit";

export function usdc(micro: number | null | undefined): string {
  if (micro === null || micro === undefined) return "–";
  const digits = micro !== 0 && Math.abs(micro) < 1_000_000 ? 6 : 2;
  return `${(micro / 1e6).toLocaleString("en", { maximumFractionDigits: digits })} USDC`;
}

/** The price of a million steps, from that of one. */
export function price(nano: number): string {
  return usdc(nano * 1000);
}

export function bytes(count: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count.toLocaleString("en", { maximumFractionDigits: count < 10 ? 1 : 0 })} ${units[unit]}`;
}

export function ms(milliseconds: number): string {
  if (milliseconds >= 1000) return `${(milliseconds / 1000).toFixed(2)} s`;
  return `${milliseconds.toFixed(milliseconds < 10 ? 2 : 0)} ms`;
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined) return "–";
  return `${(Math.floor(share * 1000) / 10).toLocaleString("en")} %`;
}

export function time(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  return new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

export function short(id: string): string {
  return id.length > 14 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id;
}

/** A short id that leads to its page; the whole one is its title. */
export function link(kind: "executions" | "models" | "accounts", id: string, text = ""): TemplateResult {
  if (!id) return html`–`;
  return html`<a class=${text ? "" : "mono"} href="#/${kind}/${id}" title=${id}>${text || short(id)}</a>`;
}

/** What replaces a view that is loading or has failed. */
export function notice(error: string, isLoading: boolean): TemplateResult | null {
  if (error) return html`<p class="error" role="alert">${error}</p>`;
  return isLoading ? html`<p class="quiet" aria-busy="true">Loading …</p>` : null;
}
