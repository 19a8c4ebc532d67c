// The tools of a run: calls, outcomes, times, and the arguments that fail.
import { html, useState } from "./vendor/htm-preact.js";
import { exported, useGet } from "./data.js";
import { api, Crumbs, duration, link, Loading, num, percent, Table, visible } from "./ui.js";

const ms = (x) => (x == null ? "–" : duration(x / 1000));

function Outcomes({ tool }) {
	const all = Object.entries(tool.outcomes ?? {}).sort((a, b) => b[1] - a[1]);
	const total = all.reduce((s, [, n]) => s + n, 0) || 1;
	let at = 0;
	return html`<svg class="outcomes" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">${all.map(([name, n], i) => {
		const x = at; at += (100 * n) / total;
		return html`<rect class=${name === "ok" ? "ok" : `bad${i % 3}`} x=${x} width=${(100 * n) / total} height="8"><title>${visible(name)} ${n}</title></rect>`;
	})}</svg><small>${all.map(([name, n], i) => html`${i > 0 && ", "}<span class=${name === "ok" ? "" : "bad"}>${visible(name)} ${num(n)}</span>`)}</small>`;
}

export function Tools({ run }) {
	const [steps, setSteps] = useState(20);
	const { data, error } = useGet(api.run(run, exported ? "/tools" : `/tools?steps=${steps}`), run);
	const crumbs = html`<${Crumbs} items=${[["Runs", link.runs()], [run, link.run(run)], ["Tools"]]} />`;
	if (!data) return html`${crumbs}<${Loading} error=${error} what="the tools" />`;
	const failing = data.tools.flatMap((t) => (t.failing ?? []).map((f, i) => ({ ...f, tool: t.name, key: `${t.name} ${i}` })));
	const never = data.tools.filter((t) => t.never_called);
	const columns = [
		{ key: "name", title: "Tool", cell: (t) => html`<code>${visible(t.name)}</code>${t.never_called && html` <span class="tag bad">never called</span>`}` },
		{ key: "calls", title: "Calls", num: true },
		{ key: "ok", title: "OK", num: true, value: (t) => (t.calls ? (t.outcomes?.ok ?? 0) / t.calls : null), cell: (t) => (t.calls ? percent((t.outcomes?.ok ?? 0) / t.calls) : "–") },
		{ key: "outcomes", title: "Outcomes", plain: true, cell: (t) => html`<${Outcomes} tool=${t} />` },
		{ key: "p50_ms", title: "p50", num: true, cell: (t) => ms(t.p50_ms) },
		{ key: "p99_ms", title: "p99", num: true, cell: (t) => ms(t.p99_ms) },
		{ key: "truncated", title: "Truncated", num: true },
		{ key: "find", title: "", cell: (t) => t.calls > 0 && html`<a href=${link.search(`run=${encodeURIComponent(run)}&tool=${encodeURIComponent(t.name)}`)}>episodes</a>` },
	];
	const failed = [
		{ key: "tool", title: "Tool", cell: (f) => html`<code>${visible(f.tool)}</code>` },
		{ key: "arguments", title: "Arguments", cell: (f) => html`<code class="wrap">${visible(typeof f.arguments === "string" ? f.arguments : JSON.stringify(f.arguments)).slice(0, 400)}</code>` },
		{ key: "outcome", title: "Outcome" },
		{ key: "count", title: "Count", num: true },
		{ key: "example", title: "", cell: (f) => f.example && html`<a href=${link.episode(run, f.example.step, f.example.episode)}>example</a>` },
	];
	return html`${crumbs}
		${!exported && html`<label>steps <select onChange=${(e) => setSteps(e.target.value)}><option value="20">last 20</option><option value="0">all</option></select></label>`}
		${never.length > 0 && html`<p class="finding warning">Offered but never called: ${never.map((t, i) => html`${i > 0 && ", "}<code>${visible(t.name)}</code>`)}.</p>`}
		${data.tools.length ? html`<${Table} columns=${columns} words=${data.words} rows=${data.tools.map((t) => ({ ...t, key: t.name }))} sort=${{ key: "calls", down: true }} />` : html`<p class="quiet">This run offers no tools.</p>`}
		${failing.length > 0 && html`<h2>Arguments that fail</h2><${Table} columns=${failed} words=${data.words} rows=${failing} sort=${{ key: "count", down: true }} />`}`;
}
