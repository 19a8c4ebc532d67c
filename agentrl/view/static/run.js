// One run: curves, search for series, and events on the same axis.
import { html, useLayoutEffect, useMemo, useState } from "./vendor/htm-preact.js";
import { useAll, useGet } from "./data.js";
import { Chart, isSparse, smooth } from "./chart.js";
import { HeldOut, Origin, Status } from "./runs.js";
import { api, Crumbs, duration, link, Loading, num, pattern, setQuery, store, Table, Tags, visible } from "./ui.js";

/** The values of some series of some runs, {found: by run, error, ready}, followed as the runs go on. */
export function useSeries(runs, names) {
	const query = `/series?${names.map((name) => `names=${encodeURIComponent(name)}`).join("&")}`;
	const { data, error } = useAll(names.length ? runs.map((run) => api.run(run, query)) : [], runs);
	const found = useMemo(() => Object.fromEntries(runs.map((run, i) => [run, data?.[i]]).filter(([, one]) => one)), [data]);
	return { found, error, ready: Boolean(data || error) };
}

/** Where a series is searched and lines are smoothed. */
export function Controls({ count, text, setText, weight, setWeight, children }) {
	const smoother = (e) => { setWeight(Number(e.target.value)); store.set("smooth", Number(e.target.value)); };
	return html`<div class="bar"><input type="search" class="find" placeholder=${`Find among ${num(count)} series …`} aria-label="Find a series" value=${text} onInput=${(e) => setText(e.target.value)} />
		<label class="slider">Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${smoother} /></label>${children}</div>`;
}

const KINDS = { note: "Note", event: "Event", change: "Change", finding: "Finding", checkpoint: "Checkpoint", evaluation: "Evaluation" };

function Happened({ run, notes, recorded }) {
	const [kind, setKind] = useState("");
	const kinds = [...new Set(notes.map((n) => n.kind))];
	const rows = notes.filter((n) => !kind || n.kind === kind);
	return html`<details class="panel" open=${notes.length < 12}><summary>Notes, events and findings <span class="quiet">${num(notes.length)}</span></summary>
		${kinds.length > 1 && html`<div class="bar">${["", ...kinds].map((k) => html`<button class="chip" aria-pressed=${kind === k} onClick=${() => setKind(k)}>${k ? KINDS[k] ?? visible(k) : "all"}</button>`)}</div>`}
		<ol class="notes">${rows.slice(-300).map((n) => html`<li class=${n.severity ?? ""}>
			${n.step == null || !recorded(n.step) ? html`<span class="at quiet">${n.step ?? "–"}</span>` : html`<a class="at" href=${link.step(run, n.step)}>${n.step}</a>`}
			<span class="kind">${KINDS[n.kind] ?? visible(n.kind ?? "")}</span><span class="text">${visible(n.text)}${n.setting && html` <code>${visible(n.setting)}</code>`}${n.episode && html` <a href=${link.episode(run, n.episode.step, n.episode.id)}>episode</a>`}</span></li>`)}</ol></details>`;
}

function Findings({ run, findings }) {
	if (!findings?.length) return null;
	return html`<section class="findings" aria-label="Findings of the doctor">${findings.map((f) => html`<div class=${`finding ${f.severity ?? ""}`}>
		<b>${visible(f.text)}</b> ${f.step != null && html`<a href=${link.step(run, f.step)}>step ${f.step}</a>`}
		${f.setting && html` <code>${visible(f.setting)}</code>`}${f.episode && html` <a href=${link.episode(run, f.episode.step, f.episode.id)}>episode</a>`}</div>`)}</section>`;
}

function Config({ config }) {
	const [text, setText] = useState("");
	const rows = useMemo(() => flatten(config), [config]);
	const wanted = pattern(text);
	const found = rows.filter((r) => !wanted || wanted.test(`${r.key} ${r.value}`));
	return html`<details class="panel"><summary>Configuration <span class="quiet">${num(rows.length)} settings</span></summary>
		<div class="bar"><input type="search" class="find" placeholder="Setting …" aria-label="Find a setting" value=${text} onInput=${(e) => setText(e.target.value)} /></div>
		<dl class="config">${found.slice(0, 400).map((r) => html`<dt>${visible(r.key)}</dt><dd>${visible(r.value)}</dd>`)}</dl></details>`;
}

export function flatten(value, prefix = "") {
	if (value === null || typeof value !== "object" || Array.isArray(value)) return [{ key: prefix, value: typeof value === "string" ? value : JSON.stringify(value) }];
	const keys = Object.keys(value);
	return keys.length ? keys.flatMap((k) => flatten(value[k], prefix ? `${prefix}.${k}` : k)) : [{ key: prefix, value: "{}" }];
}

const NOTHING = { steps: [], values: {} };
const MOST = 60; // charts of a search

export function Run({ run, query, theme }) {
	const { data, error } = useGet(api.run(run), run);
	const [text, setText] = useState(query.get("q") ?? "");
	const [weight, setWeight] = useState(() => store.get("smooth", 0.6));
	const [table, setTable] = useState(query.get("view") === "table");
	useLayoutEffect(() => setQuery({ q: text, view: table ? "table" : "" }), [text, table]);
	const steps = useGet(api.run(run, "/steps"), run).data?.steps.map((s) => s.step);
	const recorded = (step) => !steps || steps.includes(step);
	const all = data?.series ?? [];
	const wanted = pattern(text);
	const matching = useMemo(() => all.filter((s) => (wanted ? [s.name, s.description ?? "", s.group ?? ""].some((t) => wanted.test(t)) : s.curated)), [data, text]);
	const shown = useMemo(() => (wanted ? matching.slice(0, MOST) : matching), [matching]);
	const { found, error: lost, ready } = useSeries([run], shown.map((s) => s.name));
	const series = found[run] ?? NOTHING;
	const lines = useMemo(() => Object.fromEntries(shown.map(({ name }) => {
		const raw = series.values[name];
		if (!raw || raw.every((v) => v === null)) return [name, null];
		const sparse = isSparse(raw);
		return [name, [{ name, values: sparse ? raw : smooth(raw, weight), raw: sparse || !weight ? undefined : raw }]];
	})), [series.values, shown, weight]);
	if (!data) return html`<${Crumbs} items=${[["Runs", link.runs()], [run]]} /><${Loading} error=${error} what="the run" />`;
	const open = (step) => { if (recorded(step)) location.hash = link.step(run, step); };
	const last = steps?.length ? steps.at(-1) : data.step;
	const blank = ready ? shown.filter((s) => !lines[s.name]) : [];
	const drawn = shown.filter((s) => lines[s.name]);
	const marks = (data.notes ?? []).filter((n) => n.step != null);
	const facts = [["model", data.model], ["env", data.env], ["estimator", data.estimator], ["loss", data.loss], ["wall time", duration(data.wall_seconds)]];
	return html`<${Crumbs} items=${[["Runs", link.runs()], [data.name ?? run]]}>
			<a class="button" href=${recorded(last) && last !== 0 ? link.step(run, last) : undefined} aria-disabled=${!recorded(last) || last === 0}>Last step</a><a class="button" href=${link.tools(run)}>Tools</a>
			<a class="button" href=${link.search(`run=${encodeURIComponent(run)}`)}>Search</a></${Crumbs}>
		<div class="facts"><${Status} status=${data.status} /><span>step <b>${num(data.step)}</b>${data.steps ? ` / ${num(data.steps)}` : ""}</span>
			<span>held out <b><${HeldOut} run=${data} /></b></span>${facts.map(([k, v]) => v && html`<span><span class="quiet">${k}</span> ${visible(v)}</span>`)}${data.forked_from && html`<span><${Origin} from=${data.forked_from} /></span>`}<${Tags} tags=${data.tags} /></div>
		<${Findings} run=${run} findings=${data.findings} />
		<${Controls} count=${all.length} text=${text} setText=${setText} weight=${weight} setWeight=${setWeight}>
			<span class="grow"></span><button class="chip" aria-pressed=${table} onClick=${() => setTable(!table)}>Table</button></${Controls}>
		${lost && html`<${Loading} error=${lost} />`}
		${!ready && html`<${Loading} what="series" />`}
		${ready && !shown.length && html`<p class="quiet">${text ? "No series matches." : "No metrics yet."}</p>`}
		${table ? html`<${SeriesTable} run=${run} recorded=${recorded} series=${series} shown=${shown} />`
			: html`<div class="charts">${drawn.map((s) => html`<${Chart} key=${s.name} title=${s.name} description=${s.description} unit=${s.unit} steps=${series.steps} lines=${lines[s.name]} marks=${marks} onStep=${open} theme=${theme} />`)}</div>`}
		${matching.length > shown.length && html`<p class="quiet">${num(shown.length)} of ${num(matching.length)} matching series are shown.</p>`}
		${blank.length > 0 && html`<p class="quiet">No finite value: ${visible(blank.map((s) => s.name).join(", "))}</p>`}
		<${Happened} run=${run} notes=${data.notes ?? []} recorded=${recorded} />
		<${Config} config=${data.config ?? {}} />`;
}

function SeriesTable({ run, recorded, series, shown }) {
	const columns = [{ key: "step", title: "Step", num: true, cell: (r) => (recorded(r.step) ? html`<a href=${link.step(run, r.step)}>${r.step}</a>` : num(r.step)) },
		...shown.map((s) => ({ key: s.name, title: visible(s.name), num: true }))];
	const rows = series.steps.map((step, i) => ({ key: step, step, ...Object.fromEntries(shown.map((s) => [s.name, series.values[s.name]?.[i] ?? null])) }));
	return html`<${Table} columns=${columns} rows=${rows} sort=${{ key: "step", down: true }} caption="Values by step" />`;
}
