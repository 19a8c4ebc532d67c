// Buttons, played with the official SDK for Node: `runTools` runs the loop.
import { readFileSync } from "node:fs"
import OpenAI from "openai"

const task = JSON.parse(readFileSync(0, "utf8"))
let pressed = "nothing"

async function press(given) {
  pressed = String(given.colour)
  return `It is ${pressed}.`
}

const tools = task.tools.map(({ function: { name, description, parameters } }) => ({
  type: "function",
  function: { name, description, parameters, parse: JSON.parse, function: press },
}))
const runner = new OpenAI().chat.completions.runTools({ model: "policy", messages: task.messages, tools })
await runner.done()
process.stdout.write(pressed)
