// Asks a server of SplitUp with Anthropic's own package: node ask_messages.mjs BASE_URL MODEL
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "the wall?" }];
const input_schema = {
  type: "object",
  properties: { colour: { enum: ["red", "blue"] } },
  required: ["colour"],
};
const asked = { model, messages, max_tokens: 60, tools: [{ name: "paint", input_schema }] };

const found = {};
for await (const each of client.models.list()) found.model = each.id;
const { tools, max_tokens, ...counted } = asked;
found.counted = (await client.messages.countTokens(counted)).input_tokens;
const answer = await client.messages.stream(asked).finalMessage();
found.reason = answer.stop_reason;
found.content = answer.content.map(({ id, ...rest }) => rest);
found.tokens = answer.usage.output_tokens;
try {
  await client.messages.create({ ...asked, model: "unknown" });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.error.error.type];
}
console.log(JSON.stringify(found));
