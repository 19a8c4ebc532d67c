// Search over all episodes of all runs, with filters that can be kept.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, useGet } from "./data.js";
import { Crumbs, escaped, link, Loading, num, pattern, plural, setQuery, shade, store, visible } from "./ui.js";

const FIELDS = ["q", "regex", "run", "tag", "tool", "outcome", "stop", "task", "reward_min", "reward_max", "step_min", "step_max"];
const STOPS = ["answered", "terminated", "stopped_by_tool", "max_turns", "max_tokens", "token_budget", "context_full", "tool_call_limit", "timeout", "fault", "sandbox_broken", "infra"];
const PAGE = 50;

const fromQuery = (query) => Object.fromEntries(FIELDS.map((f) => [f, query.get(f) ?? ""]));
const toText = (fields) => new URLSearchParams(Object.entries(fields).filter(([, v]) => v !== "")).toString();

function Marked({ text, wanted }) {
	const shown = visible(text ?? "");
	const found = wanted?.exec(shown);
	if (!found || !found[0]) return shown;
	return html`${shown.slice(0, found.index)}<mark>${found[0]}</mark>${shown.slice(found.index + found[0].length)}`;
}

export function Search({ query }) {
	const [fields, setFields] = useState(() => fromQuery(query));
	const [asked, setAsked] = useState(() => toText(fromQuery(query)));
	const [state, setState] = useState({ hits: [], total: null, took: null, error: null });
	const [limit, setLimit] = useState(PAGE);
	const [saved, setSaved] = useState(() => store.get("filters", []));
	const runs = useGet("/api/runs").data?.runs ?? [];
	const text = toText(fields);
	useEffect(() => { // what was typed, a moment after the last key
		if (text === asked) return;
		const timer = setTimeout(() => { setAsked(text); setLimit(PAGE); setQuery(fields); }, 150);
		return () => clearTimeout(timer);
	}, [text]);
	useEffect(() => {
		const control = new AbortController();
		get(`/api/search?${asked}${asked ? "&" : ""}limit=${limit}&offset=0`, control.signal).then(
			(data) => !control.signal.aborted && setState({ ...data, took: data.took_ms, error: null }),
			(error) => !control.signal.aborted && setState((old) => ({ ...old, error })),
		);
		return () => control.abort();
	}, [asked, limit]);
	const set = (name) => (e) => setFields((old) => ({ ...old, [name]: e.target.type === "checkbox" ? (e.target.checked ? "1" : "") : e.target.value }));
	const keep = () => {
		const name = prompt("Name of this filter", fields.q || fields.tool || fields.stop || "filter");
		if (!name) return;
		const next = [...saved.filter((s) => s.name !== name), { name, text }];
		setSaved(next);
		store.set("filters", next);
	};
	const drop = (name) => { const next = saved.filter((s) => s.name !== name); setSaved(next); store.set("filters", next); };
	const input = (name, label, type = "text") => html`<label>${label}<input type=${type} step="any" name=${name} value=${fields[name]} onInput=${set(name)} /></label>`;
	const close = (text) => text.replace(/\s*\n\s*/g, " ↵ "); // a hit has three lines
	const wanted = fields.q ? pattern(fields.regex ? fields.q : escaped(fields.q)) : null;
	return html`<${Crumbs} items=${[["Runs", link.runs()], ["Search"]]} />
		<form class="filters" role="search" onSubmit=${(e) => e.preventDefault()}>
			<div class="bar"><input type="search" class="find wide" name="q" placeholder="Text in any message, call or result …" aria-label="Text" value=${fields.q} onInput=${set("q")} />
				<label class="check"><input type="checkbox" name="regex" checked=${Boolean(fields.regex)} onChange=${set("regex")} /> regular expression</label>
				<button type="button" class="button" disabled=${!text} onClick=${keep}>Save filter</button></div>
			<div class="bar fields">
				<label>run<select name="run" value=${fields.run} onChange=${set("run")}><option value="">all</option>${runs.map((r) => html`<option value=${r.id} selected=${r.id === fields.run}>${visible(r.name)}</option>`)}</select></label>
				${input("tag", "tag")}${input("tool", "tool")}${input("outcome", "outcome")}
				<label>stopped<select name="stop" value=${fields.stop} onChange=${set("stop")}><option value="">any</option>${STOPS.map((s) => html`<option value=${s} selected=${s === fields.stop}>${s}</option>`)}</select></label>
				${input("task", "task")}${input("reward_min", "reward ≥", "number")}${input("reward_max", "reward ≤", "number")}${input("step_min", "step ≥", "number")}${input("step_max", "step ≤", "number")}
			</div></form>
		${saved.length > 0 && html`<div class="bar">${saved.map((s) => html`<span class="chip saved"><a href=${link.search(s.text)}>${visible(s.name)}</a><button aria-label=${`Delete filter ${visible(s.name)}`} onClick=${() => drop(s.name)}>×</button></span>`)}</div>`}
		${state.error ? html`<${Loading} error=${state.error} />` : html`<p class="quiet" role="status">${state.total === null ? "Searching …" : `${plural(state.total, "episode")}${state.took == null ? "" : `, ${num(state.took, 2)} ms`}${state.cut ? `; ${num(state.cut)} too long to be searched to their ends` : ""}`}</p>`}
		<ol class="hits">${state.hits.map((h) => html`<li key=${`${h.run} ${h.step} ${h.episode}`}><b class=${`pill ${shade(h.reward, 0, 1)}`}>${num(h.reward)}</b>
			<div><a data-nav href=${link.episode(h.run, h.step, h.episode)}>${visible(h.episode)}</a> <span class="quiet">${visible(h.run)} · step ${h.step} · ${visible(h.task ?? "")} · ${visible(h.stop_reason ?? "")}</span>
			${h.snippet && html`<div class="snippet"><${Marked} text=${close(h.snippet)} wanted=${wanted} /></div>`}</div></li>`)}</ol>
		${state.total > state.hits.length && html`<p><button class="button" onClick=${() => setLimit(limit + 200)}>Show more (${num(state.total - state.hits.length)} left)</button></p>`}`;
}
