// The service worker: it keeps the files of the private page, so that the page opens without the
// server. Requests of the API pass by it. It serves what is under /private, which the page's worker
// has to be, too, to be served.
type Work = Event & { waitUntil(work: Promise<unknown>): void };
type Asked = Work & { request: Request; respondWith(reply: Promise<Response>): void };
type Scope = {
  addEventListener(type: string, listener: (event: Asked) => void): void;
  skipWaiting(): Promise<void>;
  clients: { claim(): Promise<void> };
};
const scope = self as unknown as Scope; // TypeScript's own types of it exclude those of pages
const CACHE = "splitup-private";
const FILES = ["/private", "/private.js", "/private.css", "/app.css", "/private/device.js", "/private/kernels.wasm", "/private/kernels-relaxed.wasm", "/icon.svg", "/private.webmanifest"];

scope.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)));
  void scope.skipWaiting();
});

scope.addEventListener("activate", (event) => event.waitUntil(scope.clients.claim()));

scope.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== "GET" || url.origin !== location.origin || !FILES.includes(url.pathname)) return;
  event.respondWith(serve(event.request, url.pathname));
});

/** Answer from the server where it answers, so that a page is never older than its worker. */
async function serve(request: Request, path: string): Promise<Response> {
  const cache = await caches.open(CACHE);
  try {
    const reply = await fetch(request);
    if (reply.ok) await cache.put(path, reply.clone());
    return reply;
  } catch (error) {
    const kept = await cache.match(path);
    if (kept) return kept;
    throw error;
  }
}
