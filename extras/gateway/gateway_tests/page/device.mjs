// Runs what the private page computes on a device, in Node: `node device.mjs PROGRAM < JSON`.
// PROGRAM is the body of an async function of `page` (its modules), `kernels` and `given`.
import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { createRequire } from "node:module";

const here = new URL(".", import.meta.url);
const root = new URL("../../../../", here);
const require = createRequire(new URL("page/package.json", root));
const { build } = require("esbuild");
const MODULES = ["arrays", "graph", "kernels", "logits", "noise", "program", "sampler", "tokenizer"];

const folder = await mkdtemp(`${tmpdir()}/splitup-page-`);
try {
  const source = MODULES.map((name) => `export * from "./${name}";`).join("\n");
  await build({
    stdin: { contents: source, resolveDir: new URL("page/src/private", root).pathname, loader: "ts" },
    outfile: `${folder}/page.mjs`,
    bundle: true,
    format: "esm",
    platform: "node",
    logLevel: "warning",
  });
  const page = await import(`${folder}/page.mjs`);
  const kernels = await page.Kernels.load((name) => readFileSync(new URL(`extras/gateway/splitup_gateway/page/${name}`, root)));
  const program = new (Object.getPrototypeOf(async () => {}).constructor)("page", "kernels", "given", "readFileSync", process.argv[2]);
  const found = await program(page, kernels, JSON.parse(readFileSync(0, "utf8")), readFileSync);
  process.stdout.write(JSON.stringify(found));
} finally {
  await rm(folder, { recursive: true });
}
