// Messages and episodes as text: to read, to search, to copy.

export function contentText(content) {
	if (typeof content === "string") return content;
	return (content ?? []).map((part) => (typeof part === "string" ? part : `[${part.mime_type ?? "image"}]`)).join("");
}

export function callText(call) {
	const args = Object.entries(call.arguments ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
	return `${call.name}(${args.join(", ")})`;
}

export function messageText(message) {
	const calls = (message.tool_calls ?? []).map(callText);
	return [message.reasoning ?? "", contentText(message.content), ...calls].filter(Boolean).join("\n");
}

/** The conversation as an OpenAI-compatible list of messages. */
export function chatMessages(episode) {
	return episode.messages.map((m) => {
		const out = { role: m.role, content: contentText(m.content) };
		if (m.reasoning) out.reasoning_content = m.reasoning;
		if (m.tool_calls?.length) {
			out.tool_calls = m.tool_calls.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: JSON.stringify(c.arguments) } }));
		}
		if (m.tool_call_id) out.tool_call_id = m.tool_call_id;
		if (m.name) out.name = m.name;
		return out;
	});
}

// A value as Python writes it; what a reader would not see is escaped.
function py(value) {
	if (value == null) return "None";
	if (value === true) return "True";
	if (value === false) return "False";
	if (typeof value === "number") return String(value);
	if (typeof value === "string") {
		return JSON.stringify(value).replace(/[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
			(c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
	}
	if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
	return `{${Object.entries(value).map(([k, v]) => `${py(k)}: ${py(v)}`).join(", ")}}`;
}

function pyMessage(message) {
	const calls = (message.tool_calls ?? []).map((c) => `ToolCall(${py(c.id)}, ${py(c.name)}, ${py(c.arguments)})`);
	const parts = [py("assistant"), py(contentText(message.content))];
	if (calls.length) parts.push(`tool_calls=(${calls.join(", ")},)`);
	if (message.reasoning) parts.push(`reasoning=${py(message.reasoning)}`);
	return `Message(${parts.join(", ")})`;
}

/** The episode as a test that plays the policy's messages against the env again, without a model. */
export function scriptedTest(episode, env) {
	const sampled = new Set((episode.turns ?? []).map((t) => t.message));
	const script = episode.messages.filter((m, i) => m.role === "assistant" && (!sampled.size || sampled.has(i)));
	const name = String(episode.id).replace(/\W+/g, "_").replace(/^_+|_+$/g, "") || "episode";
	const [module, cls] = /^[\w.]+:\w+$/.test(env ?? "") ? env.split(":") : ["my_env", "MyEnv"];
	const reward = episode.rewards?.total;
	const called = script.some((m) => m.tool_calls?.length);
	const stop = episode.stop_reason, limit = stop === "max_turns" ? `, max_turns=${script.length}` : "";
	const same = limit || ["answered", "terminated", "stopped_by_tool"].includes(stop);
	return `import asyncio

import pytest

from ${module} import ${cls}
from agentrl.testing import ScriptedPolicy, play
from agentrl.types import Message, Task${called ? ", ToolCall" : ""}


def test_${name}():
    task = Task(${py(String(episode.task))}, ${py(episode.row ?? {})}, seed=${Number(episode.seed ?? 0)})
    policy = ScriptedPolicy(
        [
${script.map((m) => `            ${pyMessage(m)},`).join("\n")}
        ]
    )
    episode = asyncio.run(play(${cls}(), task, policy${limit}))
    ${same ? `assert episode.stop_reason == ${py(stop)}` : `# in the run: ${py(stop)}, which does not happen without a model`}
    ${reward == null ? "# in the run: no reward" : `assert episode.reward == pytest.approx(${py(reward)})`}
`;
}
