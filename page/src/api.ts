// Requests to the server that this page came from, and the key that they carry.

export class ApiError extends Error {
  constructor(message: string, readonly status: number) {
    super(message);
  }
}

const KEY = "splitup-api-key";

/** Return the API key: of this tab, or the one that the user asked to remember. */
export function getKey(): string {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

/** Use a key from now on; it outlives the tab only with `remember`. */
export function setKey(key: string, remember: boolean): void {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
}

export function isRemembered(): boolean {
  return localStorage.getItem(KEY) !== null;
}

function makeHeaders(): Record<string, string> {
  const key = getKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function check(reply: Response): Promise<Response> {
  if (reply.ok) return reply;
  let message = `the server answered ${reply.status}`;
  try {
    message = (await reply.json()).error.message ?? message;
  } catch {
    // not an error of the API: its status says enough
  }
  throw new ApiError(message, reply.status);
}

/** GET a JSON object; raise ApiError, also when the server does not answer. */
export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  let reply: Response;
  try {
    reply = await fetch(path, { headers: makeHeaders(), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("the server does not answer; is splitup serve still running?", 0);
  }
  return (await check(reply)).json() as Promise<T>;
}

/** End the work on a stream. */
export async function stop(stream: string): Promise<void> {
  await fetch(`/v1/streams/${stream}`, { method: "DELETE", headers: makeHeaders() });
}

export type Delta = { text: string; thought: string; finish: string | null; usage: Usage | null };

export type Usage = {
  prompt_tokens: number;
  completion_tokens: number;
  splitup: { executions: string[]; steps: number; first_step: number; cost_micro_usdc: number };
};

/** POST a request with "stream": true; yield what its events add to the text. */
export async function* stream(
  path: string,
  body: object,
  signal: AbortSignal,
  onStream: (id: string) => void,
): AsyncGenerator<Delta> {
  const reply = await check(
    await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...makeHeaders() },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  );
  onStream(reply.headers.get("x-splitup-stream") ?? "");
  const reader = reply.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop()!;
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === undefined || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) {  // it ended early, and tells what it cost
        yield { text: "", thought: "", finish: chunk.error.code === "stopped" ? "stopped" : null, usage: chunk.usage ?? null };
        if (chunk.error.code === "stopped") return;
        throw new ApiError(chunk.error.message, 502);
      }
      const choice = chunk.choices?.[0];
      yield {
        text: choice?.delta?.content ?? choice?.text ?? "",
        thought: choice?.delta?.reasoning_content ?? "",
        finish: choice?.finish_reason ?? null,
        usage: chunk.usage ?? null,
      };
    }
  }
}
