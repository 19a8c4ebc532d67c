// The page: which part is shown, keys, light and dark, what a program shows.
import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { Compare } from "./compare.js";
import { exported, follow, live, useLive } from "./data.js";
import { EpisodePage } from "./episode.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";
import { Search } from "./search.js";
import { Step } from "./step.js";
import { Tools } from "./tools.js";
import { dark, link, Loading, onToast, store } from "./ui.js";

const decode = (text) => { try { return decodeURIComponent(text); } catch { return text; } };

/** What an address shows: {page, run, step, id, query, up}. */
export function parse(hash) {
	const [path, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
	const found = { page: "missing", query: new URLSearchParams(query), up: link.runs() };
	const deep = /^\/run\/([^/]+)\/step\/(\d+)\/episode\/(.+)$/s.exec(path);
	const parts = path.split("/").filter(Boolean).map(decode);
	if (!parts.length) return { ...found, page: "runs" };
	if (parts[0] === "search" || parts[0] === "compare") return { ...found, page: parts[0] };
	if (parts[0] !== "run" || parts.length < 2) return found;
	const run = parts[1], step = Number(parts[3]);
	if (deep) return { ...found, page: "episode", run, step, id: deep[3].split("/").map(decode).join("/"), up: link.step(run, step) };
	if (parts.length === 2) return { ...found, page: "run", run };
	if (parts[2] === "tools") return { ...found, page: "tools", run, up: link.run(run) };
	if (parts[2] === "step" && parts.length === 4 && /^\d+$/.test(parts[3])) return { ...found, page: "step", run, step, up: link.run(run) };
	return found;
}

const KEYS = [
	["?", "this list"], ["/", "search in the page"], ["s", "search all episodes"], ["g", "all runs"], ["u", "one level up"],
	["j k", "next, previous row, message or episode"], ["Enter", "open what has the focus"], ["[ ]", "previous, next step or sibling"],
	["c", "color tokens by the next value"], ["f", "fold or unfold tool results"], ["← →", "move the chosen token, or in the matrix"], ["t", "light, dark, or as the system"], ["Esc", "close"],
];

function move(by) {
	const all = [...document.querySelectorAll("main a.main, main a.cell, main [data-nav], main .notes a.at, main td a")].filter((el) => el.offsetParent);
	if (!all.length) return;
	const at = all.findIndex((el) => el === document.activeElement || el.contains(document.activeElement));
	const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by))];
	next.focus({ preventScroll: true });
	next.scrollIntoView({ block: next.matches("article") ? "start" : "nearest" });
}

function aside(by) {
	const siblings = [...document.querySelectorAll("[data-sibling]")];
	const here = siblings.findIndex((a) => a.getAttribute("aria-current"));
	const target = siblings.length ? siblings[here + by] : document.querySelector(by < 0 ? "a[rel=prev]" : "a[rel=next]");
	if (target?.getAttribute("href")) location.hash = target.getAttribute("href");
}

function grid(el, key) { // arrows in the matrix
	const row = el.parentElement, cells = [...row.querySelectorAll(".cell")], at = cells.indexOf(el);
	const rows = [...row.parentElement.children];
	const target = key === "ArrowLeft" ? cells[at - 1] : key === "ArrowRight" ? cells[at + 1]
		: rows[rows.indexOf(row) + (key === "ArrowUp" ? -1 : 1)]?.querySelectorAll(".cell")[at];
	target?.focus();
}

function press(e, place, setHelp, turn) {
	if (e.ctrlKey || e.metaKey || e.altKey) return;
	const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) && e.target.type !== "checkbox";
	if (e.key === "Escape") { setHelp(false); e.target.blur?.(); return; }
	if (typing) return;
	if (e.key.startsWith("Arrow") && e.target.matches?.(".cell")) { e.preventDefault(); grid(e.target, e.key); return; }
	const tell = (detail) => dispatchEvent(new CustomEvent("agentrl-key", { detail }));
	const act = {
		"?": () => setHelp((h) => !h), "/": () => document.querySelector("main input[type=search]")?.focus(), s: () => { location.hash = link.search(place.run ? `run=${encodeURIComponent(place.run)}` : ""); },
		g: () => { location.hash = link.runs(); }, u: () => { location.hash = place.up; }, j: () => move(1), k: () => move(-1), "[": () => aside(-1), "]": () => aside(1),
		c: () => tell("color"), f: () => tell("fold"), t: turn, ArrowLeft: () => tell("left"), ArrowRight: () => tell("right"),
	}[e.key];
	if (!act) return;
	if (!e.key.startsWith("Arrow")) e.preventDefault();
	act();
}

function Help({ close }) {
	const button = useRef(null);
	useLayoutEffect(() => { // before what had the focus becomes inert
		const before = document.activeElement;
		button.current.focus();
		return () => before?.focus?.();
	}, []);
	return html`<div class="veil" onClick=${close}><div class="help" role="dialog" aria-modal="true" aria-label="Keys" onClick=${(e) => e.stopPropagation()}>
		<h2>Keys <button class="plain" ref=${button} onClick=${close}>close</button></h2><dl>${KEYS.map(([keys, what]) => html`<dt>${keys.split(" ").map((k) => html`<kbd>${k}</kbd> `)}</dt><dd>${what}</dd>`)}</dl></div></div>`;
}

const THEMES = ["system", "light", "dark"];

function Shown({ place, visit, theme }) { // what was chosen on a page does not outlast a link to another view of it
	const [error, reset] = useErrorBoundary();
	useEffect(() => { if (error) reset(); }, [place.page, place.run, place.step, place.id]);
	if (error) return html`<div class="error" role="alert"><b>This page could not be shown:</b> ${String(error.message ?? error)}</div>`;
	const { page, run, step, id, query } = place;
	if (page === "runs") return html`<${Runs} key=${visit} query=${query} />`;
	if (page === "run") return html`<${Run} key=${`${run} ${visit}`} run=${run} query=${query} theme=${theme} />`;
	if (page === "step") return html`<${Step} key=${`${run} ${step} ${visit}`} run=${run} step=${step} query=${query} />`;
	if (page === "episode") return html`<${EpisodePage} key=${`${run} ${step} ${id}`} run=${run} step=${step} id=${id} query=${query} visit=${visit} />`;
	if (page === "tools") return html`<${Tools} key=${run} run=${run} />`;
	if (page === "search") return html`<${Search} key=${visit} query=${query} />`;
	if (page === "compare") return html`<${Compare} key=${visit} query=${query} theme=${theme} />`;
	return html`<div class="error"><b>Nothing is shown at this address.</b> <a href="#/">All runs</a></div>`;
}

function App() {
	const [{ hash, visit }, setAddress] = useState({ hash: location.hash, visit: 0 });
	const [help, setHelp] = useState(false);
	const [theme, setTheme] = useState(() => store.get("theme", "system"));
	const [toast, setToast] = useState("");
	const [, redraw] = useState(0);
	const place = useMemo(() => parse(hash), [hash, visit]);
	useLive((runs) => { if (runs === null) redraw((n) => n + 1); });
	useLayoutEffect(() => { // before anybody can change the address unseen
		const go = () => { setAddress((old) => ({ hash: location.hash, visit: old.visit + 1 })); scrollTo(0, 0); };
		addEventListener("hashchange", go);
		return () => removeEventListener("hashchange", go);
	}, []);
	useEffect(() => {
		onToast(setToast);
		follow((shown) => { location.hash = shown; });
	}, []);
	useEffect(() => { const timer = toast && setTimeout(() => setToast(""), 2500); return () => clearTimeout(timer); }, [toast]);
	useEffect(() => {
		const change = () => redraw((n) => n + 1);
		dark.addEventListener("change", change);
		return () => dark.removeEventListener("change", change);
	}, []);
	const turn = () => setTheme((old) => { const next = THEMES[(THEMES.indexOf(old) + 1) % 3]; store.set("theme", next); return next; });
	document.documentElement.dataset.theme = theme;
	useEffect(() => {
		const key = (e) => press(e, place, setHelp, turn);
		addEventListener("keydown", key);
		return () => removeEventListener("keydown", key);
	}, [place]);
	useEffect(() => { document.title = [place.id, place.step !== undefined ? `step ${place.step}` : "", place.run ?? place.page, "agentrl"].filter(Boolean).join(" · "); }, [place]);
	const says = { live: "live", offline: "not connected", connecting: "connecting", export: "export" }[live.state];
	return html`<div class="shell"><header class="top" inert=${help}><a class="brand" href="#/">agentrl</a>
			<nav aria-label="Pages"><a href=${link.runs()} aria-current=${["runs", "run", "step", "episode", "tools"].includes(place.page) ? "page" : undefined}>Runs</a><a href=${link.search()} aria-current=${place.page === "search" ? "page" : undefined}>Search</a></nav>
			<span class="grow"></span><span class=${`live ${live.state}`} role="status"><i aria-hidden="true"></i>${says}</span>
			<button class="plain" onClick=${turn} title="Light, dark, or as the system (t)">${theme === "system" ? "auto" : theme}</button>
			<button class="plain" aria-label="Keys" title="Keys (?)" onClick=${() => setHelp(true)}>?</button></header>
		<main id="main" inert=${help}>${live.refused && html`<${Loading} error=${live.refused} />`}<${Shown} place=${place} visit=${visit} theme=${`${theme} ${dark.matches}`} /></main>
		${help && html`<${Help} close=${() => setHelp(false)} />`}
		${toast && html`<div class="toast" role="status">${toast}</div>`}</div>`;
}

document.body.classList.toggle("exported", exported);
render(html`<${App} />`, document.getElementById("app"));
