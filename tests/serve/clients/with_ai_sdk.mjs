// The Vercel AI SDK in its three dialects, each plain and streamed. Usage: with_ai_sdk.mjs PLAIN_URL STREAM_URL
import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai"

const properties = { a: { type: "integer" }, b: { type: "integer" } }
const add = tool({
  description: "Add two numbers.",
  inputSchema: jsonSchema({ type: "object", properties, required: ["a", "b"] }),
  execute: async ({ a, b }) => String(a + b),
})

async function loop(model, stream) {
  const asked = { model, tools: { add }, prompt: "What is 2 plus 3?", stopWhen: stepCountIs(4) }
  if (!stream) return (await generateText(asked)).text
  const answer = streamText({ ...asked, onError: ({ error }) => { throw error } })
  for await (const _ of answer.textStream);
  return (await answer.steps).at(-1).text
}

const said = []
for (const [n, baseURL] of process.argv.slice(2).entries()) {
  const options = { baseURL, apiKey: "none" }
  const openai = createOpenAI(options)
  for (const model of [openai.chat("tiny"), openai.responses("tiny"), createAnthropic(options)("tiny")])
    said[n] = await loop(model, n === 1)
}
console.log(JSON.stringify(said))
