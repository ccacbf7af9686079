#!/usr/bin/env -S node --liftoff-only
// The Solidity compiler from npm, behind the command line that py-solc-x and forge expect of a native solc.
// The stock `solcjs` prints notices around its JSON and has no --include-path; --liftoff-only skips
// the optimising WebAssembly tier, which costs more than one compilation wins.
"use strict";

const fs = require("fs");
const path = require("path");

// Stated here so that --version answers without loading nine megabytes of WebAssembly; checked below.
const VERSION = "0.8.37+commit.f401782d.Emscripten.clang";

function parse(argv) {
  const options = { version: false, standardJson: false, file: null, basePath: process.cwd(), includePaths: [] };
  for (let i = 0; i < argv.length; i++) {
    const [name, inline] = argv[i].split(/=(.*)/s);
    const value = () => (inline === undefined ? argv[++i] : inline);
    if (name === "--version") options.version = true;
    else if (name === "--standard-json") options.standardJson = true;
    else if (name === "--base-path") options.basePath = path.resolve(value());
    else if (name === "--include-path") options.includePaths.push(path.resolve(value()));
    else if (name === "--allow-paths") value(); // every path below the roots is readable anyway
    else if (!name.startsWith("-") && options.file === null) options.file = argv[i];
    else if (argv[i] !== "-") throw new Error(`unknown option ${argv[i]}`);
  }
  return options;
}

// Resolves an import below the base path, then below the include paths, and never outside them.
function importer(roots) {
  return (unit) => {
    for (const root of roots) {
      const file = path.resolve(root, unit);
      if (file.startsWith(root + path.sep) && fs.existsSync(file)) {
        return { contents: fs.readFileSync(file, "utf8") };
      }
    }
    return { error: `File not found: ${unit}; looked in ${roots.join(", ")}` };
  };
}

function main() {
  const options = parse(process.argv.slice(2));
  if (options.version) {
    process.stdout.write(`solc, the solidity compiler commandline interface\nVersion: ${VERSION}\n`);
    return;
  }
  if (!options.standardJson) throw new Error("only --version and --standard-json are offered");
  const solc = require("solc");
  if (solc.version() !== VERSION) {
    throw new Error(`npm installed solc ${solc.version()}, expected ${VERSION}: run npm ci --ignore-scripts`);
  }
  // py-solc-x cannot pass --include-path, so the packages beside this file are always searched, last.
  const roots = [options.basePath, ...options.includePaths, path.join(__dirname, "node_modules")];
  const input = fs.readFileSync(options.file === null ? 0 : options.file, "utf8");
  process.stdout.write(solc.compile(input, { import: importer(roots) }));
}

try {
  main();
} catch (error) {
  process.stderr.write(`solc.js: ${error.message}\n`);
  process.exitCode = 1;
}
