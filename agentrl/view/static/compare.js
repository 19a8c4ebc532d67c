// Several runs: overlaid curves, tasks before and after, configuration differences.
import { html, useLayoutEffect, useMemo, useState } from "./vendor/htm-preact.js";
import { exported, useGet } from "./data.js";
import { Chart, isSparse, palette, smooth } from "./chart.js";
import { Controls, useSeries } from "./run.js";
import { HeldOut, Status } from "./runs.js";
import { api, Crumbs, duration, link, Loading, num, pattern, setQuery, signed, store, Table, visible } from "./ui.js";

const AS_SEED = /(^|\.)seed$|^name$/; // settings that tell runs of one experiment apart

/** Runs that differ in their seed only: [{name, runs}]. */
export function experiments(runs, diff) {
	const matter = diff.filter((d) => !AS_SEED.test(d.key));
	const groups = new Map();
	for (const run of runs) {
		const key = JSON.stringify(matter.map((d) => d.values[run.id] ?? null));
		groups.set(key, [...(groups.get(key) ?? []), run]);
	}
	const names = new Set();
	return [...groups.values()].map((all) => {
		let name = all.length > 1 ? `${all[0].name} ×${all.length}` : all[0].name;
		while (names.has(name)) name += "′";
		names.add(name);
		return { name, runs: all };
	});
}

/** The mean of several lines over the union of their steps, with the lowest and the highest. */
export function band(lines, steps) {
	const at = lines.map(({ steps: s, values }) => new Map(s.map((step, i) => [step, values[i]])));
	const low = [], high = [], mean = [];
	for (const step of steps) {
		const known = at.map((m) => m.get(step)).filter((v) => v != null && Number.isFinite(v));
		low.push(known.length ? Math.min(...known) : null);
		high.push(known.length ? Math.max(...known) : null);
		mean.push(known.length ? known.reduce((a, b) => a + b, 0) / known.length : null);
	}
	return { low, high, mean };
}

export function Compare({ query, theme }) {
	const ids = useMemo(() => (query.get("runs") ?? "").split(",").filter(Boolean), [query]);
	const asked = exported ? [...ids].sort() : ids; // an export carries one order
	const path = ids.length ? `/api/compare?runs=${asked.map(encodeURIComponent).join(",")}` : null;
	const { data, error } = useGet(path);
	const about = useGet(ids.length ? api.run(ids[0]) : null, ids[0]).data;
	const [text, setText] = useState(query.get("q") ?? "");
	const [weight, setWeight] = useState(() => store.get("smooth", 0.6));
	const [bands, setBands] = useState(query.get("bands") !== "off");
	useLayoutEffect(() => setQuery({ bands: bands ? "" : "off", q: text }), [bands, text]);
	const common = data?.series_common ?? [];
	const curated = useMemo(() => new Set((about?.series ?? []).filter((s) => s.curated).map((s) => s.name)), [about]);
	const wanted = pattern(text);
	const names = useMemo(() => {
		const order = new Map((about?.series ?? []).map((s, i) => [s.name, i]));
		return common.filter((n) => (wanted ? wanted.test(n) : curated.has(n))).sort((a, b) => (order.get(a) ?? 1e9) - (order.get(b) ?? 1e9)).slice(0, 40);
	}, [data, about, text]);
	const { found, error: lost } = useSeries(ids, names);
	const known = data?.runs ?? [];
	const diff = data?.config_diff ?? [];
	const groups = useMemo(() => (bands ? experiments(known, diff) : known.map((run) => ({ name: run.name, runs: [run] }))), [data, bands]);
	const charts = useMemo(() => names.map((name) => {
		const steps = [...new Set(Object.values(found).flatMap((f) => (f.values[name]?.some((v) => v !== null) ? f.steps : [])))].sort((a, b) => a - b);
		if (!steps.length) return null;
		const lines = groups.map((g, i) => {
			const all = g.runs.map((r) => found[r.id]).filter((f) => f?.values[name]).map((f) => ({ steps: f.steps, values: f.values[name] }));
			const { low, high, mean } = band(all, steps);
			const sparse = isSparse(mean);
			return { name: g.name, color: i, values: sparse ? mean : smooth(mean, weight), ...(all.length > 1 ? { low: sparse ? low : smooth(low, weight), high: sparse ? high : smooth(high, weight) } : {}) };
		});
		return { name, steps, lines };
	}).filter(Boolean), [found, groups, weight, names]);
	const crumbs = html`<${Crumbs} items=${[["Runs", link.runs()], ["Compare"]]} />`;
	if (!ids.length) return html`${crumbs}<p class="quiet">Pick two or more runs in the <a href="#/">table of runs</a>.</p>`;
	if (!data) return html`${crumbs}<${Loading} error=${error} what="the comparison" />`;
	return html`${crumbs}
		<div class="scroll"><table class="table"><thead><tr>${["Run", "Status", "Step", "Held out", "Wall time"].map((h, i) => html`<th class=${i > 1 ? "num" : ""} title=${data.words?.[h]}>${h}</th>`)}</tr></thead>
			<tbody>${known.map((r) => html`<tr><td><i class=${`swatch s${Math.max(0, groups.findIndex((g) => g.runs.includes(r))) % palette.length}`}></i> <a href=${link.run(r.id)}>${visible(r.name)}</a></td><td><${Status} status=${r.status} /></td><td class="num">${num(r.step)}</td><td class="num"><${HeldOut} run=${r} /></td><td class="num">${duration(r.wall_seconds)}</td></tr>`)}</tbody></table></div>
		<${Controls} count=${common.length} text=${text} setText=${setText} weight=${weight} setWeight=${setWeight}>
			<label class="check"><input type="checkbox" checked=${bands} onChange=${(e) => setBands(e.target.checked)} /> bands over seeds</label></${Controls}>
		${lost && html`<${Loading} error=${lost} />`}
		<div class="charts">${charts.map((c) => html`<${Chart} key=${c.name} title=${c.name} steps=${c.steps} lines=${c.lines} theme=${theme} legend=${charts.length < 3} height=${180} />`)}</div>
		<div class="legend">${groups.map((g, i) => html`<span><i class=${`swatch s${i % palette.length}`}></i>${visible(g.name)}</span>`)}</div>
		<${Tasks} tasks=${data.tasks} runs=${known} words=${data.words} />
		<${Difference} diff=${diff} runs=${known} words=${data.words} />`;
}

function Tasks({ tasks, runs, words }) {
	const columns = [
		{ key: "task", title: "Task" }, { key: "before", title: "Before", num: true }, { key: "after", title: "After", num: true },
		{ key: "delta", title: "Change", num: true, cell: (t) => html`<b class=${t.delta > 0 ? "good" : t.delta < 0 ? "bad" : "quiet"}>${signed(t.delta)}</b>` },
	];
	const rows = tasks.map((t) => ({ ...t, key: t.task }));
	const bad = rows.filter((t) => t.delta < 0);
	return rows.length > 0 && html`<p class="quiet">Tasks: before is <b>${visible(runs[0]?.name)}</b>, after is <b>${visible(runs.at(-1)?.name)}</b>.</p><div class="split">${bad.length > 0 && html`<section class="panel open"><h2>Regressions <span class="quiet">${bad.length}</span></h2><${Table} columns=${columns} words=${words} rows=${bad} sort=${{ key: "delta", down: false }} limit=${20} /></section>`}
		${rows.length > 0 && html`<section class="panel open"><h2>Same task, before and after <span class="quiet">${rows.length}</span></h2><${Table} columns=${columns} words=${words} rows=${rows} sort=${{ key: "delta", down: true }} limit=${20} /></section>`}</div>`;
}

function Difference({ diff, runs, words }) {
	const show = (v) => visible(v == null ? "–" : typeof v === "string" ? v : JSON.stringify(v));
	const columns = [{ key: "key", title: "Setting", cell: (d) => html`<code>${visible(d.key)}</code>` }, ...runs.map((r) => ({ key: `run ${r.id}`, title: visible(r.name), value: (d) => show(d.values[r.id]), cell: (d) => show(d.values[r.id]) }))];
	return html`<section class="panel open"><h2>Configuration differences <span class="quiet">${diff.length}</span></h2>${diff.length ? html`<${Table} columns=${columns} words=${words} rows=${diff} />` : html`<p class="quiet">The configurations are the same.</p>`}</section>`;
}
