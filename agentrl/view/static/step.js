// One step: groups and episodes as a matrix, time, and rewards.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { useGet } from "./data.js";
import { api, Crumbs, css, duration, link, Loading, num, percent, plural, rewardScale, setQuery, shade, signed, Table, useSize, visible } from "./ui.js";

const GLYPHS = [
	["failed", "✕", "infrastructure failure"],
	["set_aside", "◇", "set aside"],
	["cut", "✂", "cut at a limit"],
	["stale", "◷", "stale"],
	["no_signal", "·", "no signal"],
	["baseline", "◦", "greedy baseline"],
];
export const glyphOf = (e) => GLYPHS.find(([key]) => e[key]);
const KINDS = { engine: "--k-engine", tool: "--k-tool", env: "--k-env", wait: "--k-wait" };
const KIND_NAMES = { engine: "engine", tool: "tools", env: "env", wait: "waiting" };

/** A task, after the name of its env in a run of several. */
export const taskText = ({ env, task }) => visible(env ? `${env}: ${task}` : task);

export function advantageText(advantage) {
	if (!advantage) return "–";
	const [low, high] = advantage;
	return low === high ? signed(low) : `${signed(low)} … ${signed(high)}`;
}

function describe(e, group) {
	const glyph = glyphOf(e);
	return [`${e.id} · task ${taskText(group)}`, `reward ${num(e.reward)} · advantage ${advantageText(e.advantage)}`,
		`${e.stop_reason} · ${plural(e.turns, "turn")} · ${plural(e.tokens, "token")} · ${duration(e.seconds)}`, glyph ? glyph[2] : ""].filter(Boolean).map(visible).join("\n");
}

function Matrix({ run, step, groups, scale, wanted }) {
	const widest = Math.max(1, ...groups.map((g) => g.episodes.length));
	const all = useMemo(() => new Map(groups.flatMap((g) => g.episodes.map((e) => [link.episode(run, step, e.id), [e, g]]))), [groups]);
	const tell = ({ target }) => { // a thousand descriptions are only made where one is read
		const known = !target.title && all.get(target.getAttribute("href"));
		if (known) target.title = describe(...known);
	};
	return html`<div class="matrix" onMouseOver=${tell} data-wide=${widest > 16 ? "2" : widest > 8 ? "1" : "0"} role="grid" aria-label="Episodes by group">
		${groups.map((g) => html`<div class=${`row${g.set_aside ? " aside" : ""}`} role="row" key=${g.group}>
			<span class="label" role="rowheader" title=${`group ${g.group}, task ${taskText(g)}`}>${taskText({ env: g.env, task: g.task ?? g.group })}</span>
			${g.episodes.map((e) => {
				const glyph = glyphOf(e);
				return html`<a role="gridcell" key=${e.id} class=${`cell ${shade(e.reward, scale[0], scale[1])}${wanted(e) ? "" : " dim"}`} href=${link.episode(run, step, e.id)} aria-label=${visible(`${e.id}: reward ${num(e.reward)}${glyph ? `, ${glyph[2]}` : ""}`)}>${glyph ? glyph[1] : ""}</a>`;
			})}</div>`)}</div>`;
}

const BINS = 20;
/** Bins of rewards: {low, high, count}; the last one holds its upper end. */
export function bins(values, [low, high]) {
	const width = (high - low) / BINS || 1;
	const found = Array.from({ length: high > low ? BINS : 1 }, (_, i) => ({ low: low + i * width, high: low + (i + 1) * width, count: 0 }));
	for (const v of values) if (v !== null && Number.isFinite(v)) found[Math.max(0, Math.min(found.length - 1, Math.floor((v - low) / width)))].count += 1;
	found.at(-1).high = Math.max(high, found.at(-1).high);
	return found;
}
export const inBin = (v, bin, last) => v !== null && v >= bin.low && (last ? v <= bin.high : v < bin.high);

function Histogram({ episodes, scale, chosen, choose }) {
	const all = useMemo(() => bins(episodes.map((e) => e.reward), scale), [episodes]);
	const most = Math.max(1, ...all.map((b) => b.count));
	return html`<div class="histogram" role="group" aria-label="Rewards; a bin filters the episodes">
		${all.map((b, i) => html`<button key=${i} class="bin" aria-pressed=${chosen === i} disabled=${!b.count} title=${`${num(b.low)} to ${num(b.high)}: ${plural(b.count, "episode")}`}
			aria-label=${`${plural(b.count, "episode")} with rewards from ${num(b.low)} to ${num(b.high)}`} onClick=${() => choose(chosen === i ? null : i)}>
			<svg viewBox="0 0 10 60" preserveAspectRatio="none" aria-hidden="true"><rect class=${`${shade((b.low + b.high) / 2, scale[0], scale[1])}`} x="0.5" width="9" y=${60 - (58 * b.count) / most} height=${(58 * b.count) / most} /></svg></button>`)}
	</div><div class="ends"><span>${num(scale[0])}</span><span>${num(scale[1])}</span></div>`;
}

/** The episode that ended last, and what it spent its time on. */
export function longestPole(timings) {
	const spans = new Map();
	for (const s of timings.episodes) {
		const e = spans.get(s.episode) ?? { episode: s.episode, end: 0, kinds: {} };
		e.end = Math.max(e.end, s.end_s);
		e.kinds[s.kind] = (e.kinds[s.kind] ?? 0) + s.end_s - s.start_s;
		spans.set(s.episode, e);
	}
	const last = [...spans.values()].sort((a, b) => b.end - a.end)[0];
	const phase = timings.phases.filter((p) => !p.step).sort((a, b) => b.end_s - b.start_s - (a.end_s - a.start_s))[0];
	if (last) [last.kind, last.seconds] = Object.entries(last.kinds).sort((a, b) => b[1] - a[1])[0];
	return { last, phase };
}

const ROWS = 220;
// Above, the learner waits for episodes; below, it works, for earlier steps too.
const tone = (p) => `s${["generate", "update", "publish"].indexOf(p.name) + 8 & 7}`;
const told = (p) => visible(`${p.name}${p.step ? ` of step ${p.step}` : ""} ${duration(p.end_s - p.start_s)}`);
const PARTS = (end) => [
	{ key: "name", title: "Rank or server" },
	{ key: "lane", title: "", class: "lane", cell: (p) => html`<svg class="phases" viewBox="0 0 1000 9" preserveAspectRatio="none" aria-hidden="true"><rect class=${p.kind === "rank" ? "s1" : "s0"} x=${(1000 * p.start_s) / end} width=${Math.max(1, (1000 * (p.end_s - p.start_s)) / end)} height="9" /></svg>` },
	{ key: "end_s", title: "At work", num: true, value: (p) => p.end_s - p.start_s, cell: (p) => duration(p.end_s - p.start_s) },
	{ key: "tokens", title: "Tokens", num: true },
	{ key: "token_seconds", title: "Per token", num: true, cell: (p) => duration(p.token_seconds) },
];
function Lanes({ run, step, timings }) {
	const box = useRef(null), canvas = useRef(null), tip = useRef(null);
	const [width] = useSize(box);
	const { last, phase } = useMemo(() => longestPole(timings), [timings]);
	const lanes = useMemo(() => {
		const by = new Map();
		for (const s of timings.episodes) by.set(s.episode, [...(by.get(s.episode) ?? []), s]);
		return [...by.entries()].map(([episode, spans]) => ({ episode, spans, end: Math.max(...spans.map((s) => s.end_s)) })).sort((a, b) => b.end - a.end);
	}, [timings]);
	const end = Math.max(1e-9, ...timings.phases.map((p) => p.end_s), ...lanes.map((l) => l.end));
	const height = lanes.length ? Math.min(14, ROWS / lanes.length) : 0;
	useEffect(() => {
		if (!width) return;
		const c = canvas.current, ratio = devicePixelRatio || 1, paint = Object.fromEntries(Object.entries(KINDS).map(([kind, name]) => [kind, css(name)]));
		c.width = width * ratio; c.height = Math.max(1, lanes.length * height) * ratio;
		c.style.width = `${width}px`; c.style.height = `${lanes.length * height}px`;
		const ctx = c.getContext("2d");
		ctx.scale(ratio, ratio);
		lanes.forEach((lane, row) => {
			for (const s of lane.spans) {
				ctx.fillStyle = paint[s.kind] ?? "gray";
				ctx.fillRect((s.start_s / end) * width, row * height, Math.max(0.5, ((s.end_s - s.start_s) / end) * width), Math.max(1, height - (height > 4 ? 1 : 0)));
			}
		});
	}, [width, lanes, height]);
	const at = (e) => lanes[Math.floor((e.clientY - canvas.current.getBoundingClientRect().top) / height)];
	const hover = (e) => { const l = at(e); if (l) tip.current.textContent = visible(`${l.episode}: ${duration(l.end)}`); };
	const totals = {};
	for (const s of timings.episodes) totals[s.kind] = (totals[s.kind] ?? 0) + s.end_s - s.start_s;
	const spent = Object.values(totals).reduce((a, b) => a + b, 0) || 1;
	return html`<p class="pole">${phase && html`Longest phase: <b>${visible(phase.name)}</b>, ${duration(phase.end_s - phase.start_s)} of ${duration(end)}. `}
			${last && html`Longest pole: <a href=${link.episode(run, step, last.episode)}>${visible(last.episode)}</a>, done after ${duration(last.end)}, ${duration(last.seconds)} of it in <b>${KIND_NAMES[last.kind] ?? visible(last.kind)}</b>.`}</p>
		<svg class="phases" viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" aria-label=${timings.phases.map(told).join(", ")}>
			${timings.phases.map((p) => html`<rect class=${tone(p)} x=${(1000 * p.start_s) / end} width=${Math.max(1, (1000 * (p.end_s - p.start_s)) / end)} y=${tone(p) === "s0" ? 0 : 11} height="11"><title>${told(p)}</title></rect>`)}</svg>
		<div class="legend">${timings.phases.map((p) => !p.step && html`<span><i class=${`swatch ${tone(p)}`}></i>${told(p)}</span>`)}</div>
		<div class="lanes" ref=${box}><canvas ref=${canvas} aria-hidden="true" onMouseMove=${hover} onMouseLeave=${() => { tip.current.textContent = ""; }} onClick=${(e) => { const l = at(e); if (l) location.hash = link.episode(run, step, l.episode); }}></canvas></div>
		<div class="legend">${Object.entries(totals).map(([kind, s]) => html`<span><i class=${`swatch k-${kind}`}></i>${KIND_NAMES[kind] ?? visible(kind)} ${percent(s / spent)}</span>`)}<span class="quiet" ref=${tip}></span></div>
		${timings.parts?.length > 0 && html`<${Table} columns=${PARTS(end)} rows=${timings.parts.map((p) => ({ ...p, key: p.name }))} limit=${16} caption="Ranks: time in the layers' forward passes. Servers: time with a request; per token of a request, prompt included." />`}`;
}

export function Step({ run, step, query }) {
	const { data, error } = useGet(api.run(run, `/steps/${step}`), run);
	const about = useGet(api.run(run, "/steps"), run).data;
	const [bin, setBin] = useState(query.get("bin") === null ? null : Number(query.get("bin")));
	const [only, setOnly] = useState(query.get("only") ?? "");
	const [table, setTable] = useState(query.get("view") === "table");
	useLayoutEffect(() => setQuery({ bin, only, view: table ? "table" : "" }), [bin, only, table]);
	const episodes = useMemo(() => (data?.groups ?? []).flatMap((g) => g.episodes.map((e) => ({ ...e, group: g.group, task: taskText(g) }))), [data]);
	const scale = useMemo(() => rewardScale(episodes.map((e) => e.reward)), [episodes]);
	const steps = about?.steps?.map((s) => s.step) ?? [];
	const here = steps.indexOf(step);
	const crumbs = html`<${Crumbs} items=${[["Runs", link.runs()], [run, link.run(run)], [`Step ${step}`]]}>
		<a class="button" rel="prev" href=${here > 0 ? link.step(run, steps[here - 1]) : undefined} aria-disabled=${here <= 0}>←</a>
		<a class="button" rel="next" href=${here >= 0 && here < steps.length - 1 ? link.step(run, steps[here + 1]) : undefined} aria-disabled=${here < 0 || here >= steps.length - 1}>→</a></${Crumbs}>`;
	const wanted = useMemo(() => { // in the chosen bin, with the chosen glyph
		const all = bins([], scale), chosen = bin === null ? null : all[bin];
		return (e) => (!chosen || inBin(e.reward, chosen, chosen === all.at(-1))) && (!only || e[only]);
	}, [bin, only, scale]);
	const matrix = useMemo(() => data && html`<${Matrix} run=${run} step=${step} groups=${data.groups} scale=${scale} wanted=${wanted} />`, [data, wanted]);
	if (!data) return html`${crumbs}<${Loading} error=${error} what="the step" />`;
	const counts = GLYPHS.map(([key, glyph, name]) => [key, glyph, name, episodes.filter((e) => e[key]).length]).filter((c) => c[3]);
	const played = episodes.filter((e) => !e.failed), scored = played.filter((e) => e.reward !== null && !e.set_aside && !e.baseline);
	const mean = scored.length ? scored.reduce((s, e) => s + e.reward, 0) / scored.length : null;
	const found = episodes.filter(wanted);
	const facts = [["episodes", num(episodes.length)], ["groups", num(data.groups.length)], ["mean reward", num(mean)],
		["solved", scored.some((e) => e.solved != null) ? percent(scored.filter((e) => e.solved).length / scored.length) : null],
		["sampled tokens", num(played.reduce((s, e) => s + (e.tokens ?? 0), 0))], ["trained", num(episodes.filter((e) => e.trained).length)]];
	return html`${crumbs}
		<div class="facts">${facts.map(([k, v]) => v && html`<span title=${data.words?.[k]}><span class="quiet">${k}</span> <b>${v}</b></span>`)}</div>
		<div class="split">
			<section class="panel open"><h2>Rewards</h2><${Histogram} episodes=${episodes} scale=${scale} chosen=${bin} choose=${setBin} /><${Parts} episodes=${scored} /></section>
			${data.timings && html`<section class="panel open wide"><h2>Where the time went</h2><${Lanes} run=${run} step=${step} timings=${data.timings} /></section>`}
		</div>
		<div class="bar"><h2>Episodes</h2>${counts.map(([key, glyph, name, n]) => html`<button class="chip" title=${data.words?.[key]} aria-pressed=${only === key} onClick=${() => setOnly(only === key ? "" : key)}><b class="glyph">${glyph}</b> ${name} ${n}</button>`)}
			${(bin !== null || only) && html`<span>${num(found.length)} of ${num(episodes.length)} <button class="plain" onClick=${() => { setBin(null); setOnly(""); }}>clear</button></span>`}
			<span class="grow"></span><button class="chip" aria-pressed=${table} onClick=${() => setTable(!table)}>Table</button></div>
		${table || bin !== null || only ? html`<${EpisodeTable} run=${run} step=${step} rows=${found} />` : ""}
		${!table && matrix}
		<${Metrics} metrics=${data.metrics} words=${data.words} />`;
}

function Parts({ episodes }) {
	const names = [...new Set(episodes.flatMap((e) => Object.keys(e.parts ?? {})))];
	const mean = (name) => episodes.reduce((sum, e) => sum + (e.parts?.[name] ?? 0), 0) / episodes.length;
	return names.length > 0 && html`<table class="waterfall"><tbody>${names.slice(0, 12).map((name) => html`<tr><th scope="row">${visible(name)}</th><td class="num" title="mean over scored episodes">${num(mean(name))}</td></tr>`)}</tbody></table>`;
}

function EpisodeTable({ run, step, rows }) {
	const columns = [
		{ key: "id", title: "Episode", cell: (e) => html`<a href=${link.episode(run, step, e.id)}>${visible(e.id)}</a>` },
		{ key: "task", title: "Task", class: "clip" },
		{ key: "reward", title: "Reward", num: true, cell: (e) => html`<b class=${`pill ${shade(e.reward, 0, 1)}`}>${num(e.reward)}</b>` },
		{ key: "advantage", title: "Advantage", num: true, value: (e) => e.advantage?.[0] ?? null, cell: (e) => advantageText(e.advantage) },
		{ key: "turns", title: "Turns", num: true },
		{ key: "tokens", title: "Tokens", num: true },
		{ key: "seconds", title: "Time", num: true, cell: (e) => duration(e.seconds) },
		{ key: "stop_reason", title: "Stopped" },
		{ key: "why", title: "", cell: (e) => { const g = glyphOf(e); return g ? html`<span class="quiet">${g[1]} ${g[2]}</span>` : ""; } },
	];
	return html`<${Table} columns=${columns} rows=${rows} caption="Episodes of this step" limit=${100} />`;
}

function Metrics({ metrics, words }) {
	const names = Object.keys(metrics ?? {}).filter((k) => k !== "step").sort();
	if (!names.length) return null;
	return html`<details class="panel"><summary>Metrics of this step <span class="quiet">${names.length}</span></summary>
		<dl class="config">${names.map((n) => html`<dt title=${words?.[n]}>${visible(n)}</dt><dd>${num(metrics[n], 5)}</dd>`)}</dl></details>`;
}
