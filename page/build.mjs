// Builds the page's files into a folder: by default the one that the package ships.
import { copyFile, mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import asc from "assemblyscript/asc";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = process.argv[2] ?? `${here}../extras/gateway/splitup_gateway/page`;
const COPIED = ["index.html", "owner.html", "icon.svg", "private/private.html", "private/private.webmanifest"];

await mkdir(target, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: [
    { in: "src/app.ts", out: "app" },
    { in: "src/app.css", out: "app" },
    { in: "src/owner.ts", out: "owner" },
    { in: "src/private/view.ts", out: "private" },
    { in: "src/private/private.css", out: "private" },
    { in: "src/private/worker.ts", out: "device" },
    { in: "src/private/offline.ts", out: "offline" },
  ],
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "eof",
  conditions: ["production"],
  external: ["module"], // of Node, where node-seal asks for it
  logLevel: "warning",
});
for (const name of COPIED) await copyFile(`${here}src/${name}`, `${target}/${name.split("/").pop()}`);
await copyFile(`${here}node_modules/node-seal/dist/seal_throws.wasm`, `${target}/seal.wasm`);
const options = ["--noAssert", "--runtime", "stub", "--importMemory", "--initialMemory", "1", "--maximumMemory", "65536"];
for (const [name, features] of [["kernels", ["simd"]], ["kernels-relaxed", ["simd", "relaxed-simd"]]]) {
  const enabled = features.flatMap((feature) => ["--enable", feature]);
  const { error, stderr } = await asc.main([
    "assembly/kernels.ts", "--baseDir", here, "-O3", ...enabled, ...options, "--outFile", `${target}/${name}.wasm`,
  ]);
  if (error) throw new Error(`${stderr}`);
}
