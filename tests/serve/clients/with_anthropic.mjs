// Anthropic's SDK for Node, as a while-loop with tools. Usage: node with_anthropic.mjs PLAIN_URL STREAM_URL

import Anthropic from "@anthropic-ai/sdk";

const tool = {
  name: "add",
  description: "Add two numbers.",
  input_schema: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
  },
};

async function main(baseURL, stream) {
  const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none" });
  const messages = [{ role: "user", content: "What is 2 plus 3?" }];
  for (;;) {
    const asked = { model: "tiny", max_tokens: 500, messages, tools: [tool] };
    const message = stream
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    messages.push({ role: "assistant", content: message.content });
    const calls = message.content.filter((block) => block.type === "tool_use");
    if (calls.length === 0) {
      return message.content.map((block) => block.text ?? "").join("");
    }
    const results = calls.map((call) => ({
      type: "tool_result",
      tool_use_id: call.id,
      content: [{ type: "text", text: String(call.input.a + call.input.b) }],
    }));
    messages.push({ role: "user", content: results });
  }
}

console.log(JSON.stringify([await main(process.argv[2], false), await main(process.argv[3], true)]));
