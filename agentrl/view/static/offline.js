// Search in an export: over the episodes that the export carries.
import { messageText } from "./text.js";
import { escaped } from "./ui.js";

export async function searchExport(path, carried) {
	const started = performance.now();
	const query = new URL(path, "http://x/").searchParams;
	const wanted = matcher(query), tag = query.get("tag");
	const tagged = tag && new Set((await carried("/api/runs")).runs.filter((r) => r.tags?.includes(tag)).map((r) => r.id));
	const found = [];
	for (const key of window.AGENTRL_EXPORT.keys()) {
		const place = /^\/api\/runs\/([^/]+)\/episodes\//.exec(key);
		if (!place) continue;
		const run = decodeURIComponent(place[1]);
		if ((query.get("run") && query.get("run") !== run) || (tagged && !tagged.has(run))) continue;
		const e = await carried(key), snippet = wanted(e);
		if (snippet !== null) {
			found.push({ run, step: e.step, episode: e.id, group: e.group, task: e.task, reward: e.rewards?.total ?? null, stop_reason: e.stop_reason, snippet });
		}
	}
	found.sort((a, b) => b.step - a.step);
	const offset = Number(query.get("offset") ?? 0);
	const limit = Number(query.get("limit") ?? 50);
	return { total: found.length, took_ms: performance.now() - started, hits: found.slice(offset, offset + limit) };
}

function matcher(query) {
	const q = query.get("q") ?? "";
	const text = new RegExp(query.get("regex") ? q : escaped(q), "i");
	const bound = (name, otherwise) => (query.get(name) ? Number(query.get(name)) : otherwise);
	return (e) => {
		const reward = e.rewards?.total ?? null;
		const tool = query.get("tool"), outcome = query.get("outcome");
		const unread = outcome === "parse_error" && !tool && e.messages.some((m) => m.parse_errors?.length);
		if ((tool || outcome) && !unread && !e.calls.some((c) => (!tool || c.name === tool) && (!outcome || c.outcome === outcome))) return null;
		if (query.get("stop") && e.stop_reason !== query.get("stop")) return null;
		if (query.get("task") && String(e.task) !== query.get("task")) return null;
		if (query.get("reward_min") && !(reward !== null && reward >= bound("reward_min"))) return null;
		if (query.get("reward_max") && !(reward !== null && reward <= bound("reward_max"))) return null;
		if (e.step < bound("step_min", -Infinity) || e.step > bound("step_max", Infinity)) return null;
		if (!q) return "";
		for (const message of e.messages) {
			const all = messageText(message);
			const at = all.search(text);
			if (at >= 0) return all.slice(Math.max(0, at - 60), at + 140);
		}
		return null;
	};
}
