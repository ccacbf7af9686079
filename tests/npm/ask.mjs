// Asks a server of SplitUp with OpenAI's own package: node ask.mjs BASE_URL MODEL
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "library for" }];
const colour = { type: "string", enum: ["red", "blue"] };
const schema = {
  type: "object",
  properties: { colour },
  required: ["colour"],
  additionalProperties: false,
};
const paint = { type: "function", function: { name: "paint", parameters: schema } };

const found = {};
for await (const each of client.models.list()) found.model = each.id;

const plain = { model, messages, max_tokens: 8, seed: 1 };
const whole = await client.chat.completions.create(plain);
found.whole = whole.choices[0].message.content;
found.cost = whole.usage.splitup.cost_micro_usdc;
found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...plain, stream: true }))
  found.streamed += chunk.choices[0]?.delta.content ?? "";

const json_schema = { name: "answer", strict: true, schema };
const answer = await client.chat.completions.parse({
  ...plain,
  max_tokens: 100,
  response_format: { type: "json_schema", json_schema },
});
found.parsed = answer.choices[0].message.parsed;

const called = client.chat.completions.stream({
  ...plain,
  max_tokens: 100,
  tools: [paint],
  tool_choice: "required",
  parallel_tool_calls: false,
});
found.called = (await called.finalChatCompletion()).choices[0].message.tool_calls[0].function;

const response = await client.responses.create({
  model,
  input: "library for",
  max_output_tokens: 100,
  temperature: 0,
  text: { format: { type: "json_schema", ...json_schema } },
});
found.response = JSON.parse(response.output_text);

try {
  await client.chat.completions.create({ ...plain, model: "unknown" });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.code, error.param];
}
console.log(JSON.stringify(found));
