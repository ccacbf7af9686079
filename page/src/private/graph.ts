// The graph of a task as splitup.graph.ir describes it: read from its canonical bytes.

export type Dim = number | string; // a string is a symbol, which every step binds to a number
export type Port = { name: string; dtype: string; shape: Dim[] };
export type Weight = { name: string; dtype: string; shape: number[]; digest: string };
export type Node = { op: string; dtype: string; srcs: number[]; arg: unknown };
export type Graph = {
  inputs: Port[];
  weights: Weight[];
  states: Port[];
  nodes: Node[];
  outputs: { name: string; node: number }[];
  updates: { state: number; node: number }[];
};

const MAX_NODES = 20_000;

/** Read a graph whose bytes have been checked against the task's id. */
export function parseGraph(text: string, label: string): Graph {
  const expect = (condition: boolean, problem: string): void => {
    if (!condition) throw new Error(`the graph of the task '${label}' cannot be read: ${problem}; update this page`);
  };
  const found = JSON.parse(text);
  expect(found.format === "splitup.graph" && found.version === 1, `it has the format ${found.format} ${found.version}`);
  expect(found.nodes.length <= MAX_NODES, `it has ${found.nodes.length} nodes`);
  const port = ([name, dtype, shape]: [string, string, Dim[]]): Port => ({ name, dtype, shape });
  const graph: Graph = {
    inputs: found.inputs.map(port),
    weights: found.weights.map(([name, dtype, shape, digest]: [string, string, number[], string]) => ({ name, dtype, shape, digest })),
    states: found.states.map(port),
    nodes: found.nodes.map(([op, dtype, srcs, arg]: [string, string, number[], unknown]) => ({ op, dtype, srcs, arg })),
    outputs: found.outputs.map(([name, node]: [string, number]) => ({ name, node })),
    updates: found.updates.map(([state, node]: [number, number]) => ({ state, node })),
  };
  const count = graph.nodes.length;
  graph.nodes.forEach((node, place) =>
    expect(node.srcs.every((src) => Number.isInteger(src) && src >= 0 && src < place), `node ${place} reads a later one`),
  );
  expect([...graph.outputs, ...graph.updates].every(({ node }) => node in graph.nodes && node < count), "an output is no node");
  return graph;
}
