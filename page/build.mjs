// Builds the page's files into a folder: by default the one that the package ships.
import { copyFile, mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = process.argv[2] ?? `${here}../splitup/serve/page`;

await mkdir(target, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: ["src/app.ts", "src/owner.ts", "src/app.css"],
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "eof",
  conditions: ["production"],
  logLevel: "warning",
});
for (const name of ["index.html", "owner.html", "icon.svg"]) await copyFile(`${here}src/${name}`, `${target}/${name}`);
