// What bench/browser_head.py runs in the browser; `page` are the private page's modules.
const median = (list) => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
let state = 1; // xorshift
function next() {
  state ^= state << 13;
  state ^= state >>> 17;
  state ^= state << 5;
  return state >>> 0;
}

/** Fill memory with float16 numbers of both signs, from 2^-10 to 2^-5. */
function fill(halves) {
  for (let i = 0; i < halves.length; i++) halves[i] = (next() & 0x83ff) | ((5 + (next() % 5)) << 10);
}

async function readKernels(name) {
  return (await fetch(`${location.origin}/${name}`)).arrayBuffer();
}

/** Return milliseconds: the median of choosing a token, by how it is sampled. */
async function measureHead([rows, width, repeats]) {
  const kernels = await page.Kernels.load(readKernels);
  const table = kernels.addTable("float16", rows, width);
  fill(new Uint16Array(kernels.getBytes(table).buffer, table.at, rows * width));
  const began = performance.now();
  kernels.quantise(table);
  const times = { quantise: performance.now() - began };
  const measure = async (name, work) => {
    const list = [];
    for (let i = 0; i < repeats; i++) {
      const vector = Float32Array.from({ length: width }, () => (next() / 2 ** 31 - 1) * 4);
      await new Promise((resolve) => setTimeout(resolve));
      const start = performance.now();
      work(vector, i);
      list.push(performance.now() - start);
    }
    times[name] = median(list);
  };
  const samplings = {
    greedy: {},
    "temperature 0.8": { temperature: 0.8 },
    "top_k 40": { temperature: 0.8, top_k: 40 },
    "top_p 0.95": { temperature: 0.8, top_p: 0.95 },
  };
  await measure("all logits, nearly", (vector) => kernels.scan(vector, table));
  for (const [name, options] of Object.entries(samplings)) {
    const sampler = new page.Sampler(kernels, { ...page.GREEDY, ...options });
    sampler.prepare(0, rows); // while the nodes compute
    await measure(`a token, ${name}`, (vector) => sampler.choose(page.computeLogits(kernels, vector, table), 0));
  }
  const sampler = new page.Sampler(kernels, { ...page.GREEDY, temperature: 0.8 });
  await measure("noise, while nodes compute", (_, i) => sampler.prepare(i + 1, rows));
  await measure("all logits, exactly", (vector) => kernels.multiply(vector, table));
  return times;
}

/** Fetch a table, store it, and load it into the kernels' memory, in a worker. */
async function loadTable([rows, width]) {
  const bytes = rows * width * 2;
  const piece = new Uint8Array(8 * 1024 * 1024);
  fill(new Uint16Array(piece.buffer));
  const hash = page.sha256.create();
  for (let start = 0; start < bytes; start += piece.length) hash.update(piece.subarray(0, bytes - start));
  const digest = Array.from(hash.digest(), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const source = { digest, bytes, file: "f", start: 0, name: "table" };
  // as a network gives it: in parts of 64 KiB
  const send = (start, end) => {
    let place = start;
    return new ReadableStream({
      pull: (to) => {
        if (place === end) return to.close();
        const next = Math.min(end, place + 65_536);
        to.enqueue(piece.slice(place % piece.length, ((next - 1) % piece.length) + 1));
        place = next;
      },
    });
  };
  const store = await page.TensorStore.open(async (_, start, end) => new Response(send(start, end)));
  const began = performance.now();
  await store.fetch(source);
  const fetched = performance.now();
  const kernels = await page.Kernels.load(readKernels);
  const table = kernels.addTable("float16", rows, width);
  await store.read(source, () => kernels.getBytes(table));
  return { fetch: fetched - began, load: performance.now() - fetched };
}
