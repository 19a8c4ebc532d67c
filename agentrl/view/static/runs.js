// The runs: a table to search, sort and pick from.
import { html, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { useGet } from "./data.js";
import { ago, Crumbs, duration, link, Loading, num, pattern, percent, setQuery, signed, Table, Tags, visible } from "./ui.js";

const share = (run, x) => (run.held_out_metric !== "held_out_reward" && x != null && x >= 0 && x <= 1 ? percent(x) : num(x));
const gain = (run) => (run.held_out_before === null || run.held_out_after === null ? null : run.held_out_after - run.held_out_before);

export function Status({ status }) {
	return html`<span class=${`status ${status}`}><i aria-hidden="true"></i>${visible(status)}</span>`;
}

/** The run and step that a run was forked from. */
export function Origin({ from }) {
	const name = visible(`${from.name}@${from.step}`);
	return html`<span class="quiet">forked from</span> ${from.run ? html`<a href=${link.step(from.run, from.step)}>${name}</a>` : name}${from.weights_only && html`<span class="quiet">, weights only</span>`}`;
}

export function HeldOut({ run }) {
	if (run.held_out_before == null && run.held_out_after == null) return "–";
	const change = gain(run);
	return html`${share(run, run.held_out_before)} <span class="quiet">→</span> ${share(run, run.held_out_after)}${change != null && html` <small class=${change > 0 ? "good" : change < 0 ? "bad" : "quiet"}>${signed(Number((share(run, run.held_out_after).endsWith("%") ? 100 * change : change).toPrecision(2)))}</small>`}`;
}

export function Runs({ query }) {
	const { data, error } = useGet("/api/runs");
	const [text, setText] = useState(query.get("q") ?? "");
	const [status, setStatus] = useState(query.get("status") ?? "");
	const [picked, setPicked] = useState(() => new Set((query.get("pick") ?? "").split(",").filter(Boolean)));
	useLayoutEffect(() => setQuery({ q: text, status, pick: [...picked].join(",") }), [text, status, picked]);
	if (!data) return html`<${Crumbs} items=${[["Runs"]]} /><${Loading} error=${error} what="runs" />`;
	const wanted = pattern(text);
	const statuses = [...new Set(data.runs.map((r) => r.status))];
	const rows = data.runs.filter((r) => (!status || r.status === status)
		&& (!wanted || wanted.test([r.name, r.path, r.model, r.env, r.estimator, r.loss, ...(r.tags ?? [])].join(" "))));
	const pick = (id) => setPicked((old) => { const next = new Set(old); if (!next.delete(id)) next.add(id); return next; });
	const columns = [
		{ key: "pick", title: "", cell: (r) => html`<input type="checkbox" aria-label=${`Compare ${visible(r.name)}`} checked=${picked.has(r.id)} onChange=${() => pick(r.id)} />` },
		{ key: "name", title: "Run", cell: (r) => html`<a class="main" href=${link.run(r.id)} title=${visible(r.path ?? "")}>${visible(r.name)}</a> <${Tags} tags=${r.tags} />${r.forked_from && html` <small><${Origin} from=${r.forked_from} /></small>`}` },
		{ key: "status", title: "Status", cell: (r) => html`<${Status} status=${r.status} />` },
		{ key: "step", title: "Step", num: true, cell: (r) => html`${num(r.step)}${r.steps ? html` <span class="quiet">/ ${num(r.steps)}</span>` : ""}${r.steps > 0 && html`<progress max=${r.steps} value=${r.step} aria-hidden="true"></progress>`}` },
		{ key: "held_out", title: "Held out", num: true, value: (r) => r.held_out_after ?? null, cell: (r) => html`<${HeldOut} run=${r} />` },
		{ key: "wall_seconds", title: "Wall time", num: true, cell: (r) => duration(r.wall_seconds) },
		{ key: "model", title: "Model", class: "clip" },
		{ key: "env", title: "Env", class: "clip" },
		{ key: "estimator", title: "Estimator", cell: (r) => visible([r.estimator, r.loss].filter(Boolean).join(" / ")) },
		{ key: "updated", title: "Updated", cell: (r) => html`<span class="nowrap quiet">${ago(r.updated)}</span>` },
	];
	return html`<${Crumbs} items=${[["Runs"]]}><span class="quiet">${num(rows.length)} of ${num(data.runs.length)}</span></${Crumbs}>
		<div class="bar">
			<input type="search" class="find" placeholder="Name, tag, model, env …" aria-label="Filter runs" value=${text} onInput=${(e) => setText(e.target.value)} />
			${statuses.length > 1 && ["", ...statuses].map((s) => html`<button class="chip" aria-pressed=${status === s} onClick=${() => setStatus(s)}>${s || "all"}</button>`)}
			<span class="grow"></span>
			<a class=${picked.size > 1 ? "button primary" : "button off"} aria-disabled=${picked.size < 2} href=${picked.size > 1 ? link.compare([...picked]) : undefined}>Compare${picked.size > 1 ? ` ${picked.size}` : ""}</a>
		</div>
		${rows.length ? html`<${Table} columns=${columns} rows=${rows} words=${data.words} rowClass=${(r) => (picked.has(r.id) ? "picked" : "")} />`
			: html`<p class="quiet">${data.runs.length ? "No run matches." : "No runs in this folder yet. They appear here as soon as one starts."}</p>`}`;
}
