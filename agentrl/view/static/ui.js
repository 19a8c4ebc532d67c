// Small things every page uses: text made safe to read, numbers, colors, links, tables.
import { html, useEffect, useState } from "./vendor/htm-preact.js";

const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udc7f]/g;

/** Text with what cannot be seen, or moves what can be seen, as visible signs. */
export function visible(text) {
	return String(text).replace(HIDDEN, (c) => {
		const code = c.codePointAt(0);
		if (code < 128) return code === 13 ? "\\r" : `\\x${code.toString(16).padStart(2, "0")}`;
		return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\u{${code.toString(16)}}`;
	});
}

export function num(value, digits = 3) {
	if (value == null || value === "") return "–";
	const x = Number(value);
	if (Number.isNaN(x)) return "NaN";
	if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
	if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x).replace(/\B(?=\d{3}$)/, ",").replace("-", "−");
	const text = Math.abs(x) >= 1e6 || (Math.abs(x) < 1e-3 && x !== 0) ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
	return text.replace(/^-/, "−");
}

/** A number with its noun, which takes an s unless the number is 1. */
export const plural = (value, noun) => `${num(value)} ${noun}${Number(value) === 1 ? "" : "s"}`;
export const signed = (x) => (x == null ? "–" : (x > 0 ? "+" : "") + num(x));
export const percent = (x) => (x == null ? "–" : `${num(100 * x)} %`);
export function duration(s) {
	if (s == null) return "–";
	if (s < 1) return `${num(s * 1000)} ms`;
	if (s < 90) return `${num(s)} s`;
	if (s < 5400) return `${num(s / 60)} min`;
	return `${num(s / 3600)} h`;
}
export function bytes(n) {
	return n < 1000 ? `${n} B` : n < 1e6 ? `${num(n / 1000)} kB` : `${num(n / 1e6)} MB`;
}
export function ago(when) {
	const time = typeof when === "number" ? when * 1000 : Date.parse(when);
	if (!when || Number.isNaN(time)) return "–";
	const s = (Date.now() - time) / 1000;
	return s < 60 ? "just now" : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86400)} d ago`;
}

/** A color of the style sheet as a canvas takes it: what light-dark() chose. */
export function css(name) {
	const key = `${name} ${dark.matches} ${document.documentElement.dataset.theme}`;
	if (!colors.has(key)) {
		const probe = document.getElementById("app");
		probe.style.cssText = `outline-color:var(${name});forced-color-adjust:none`;
		colors.set(key, getComputedStyle(probe).outlineColor);
		probe.style.cssText = "";
	}
	return colors.get(key);
}
const colors = new Map();
export const dark = matchMedia("(prefers-color-scheme: dark)");

/** The class of a reward between two ends: r0 (worst) to r8 (best). */
export function shade(value, low, high) {
	if (value == null || Number.isNaN(value)) return "r-none";
	const span = high - low;
	return `r${span > 0 ? Math.max(0, Math.min(8, Math.round((8 * (value - low)) / span))) : 4}`;
}
export function range(values) {
	let low = Infinity, high = -Infinity;
	for (const v of values) if (v !== null && Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
	return low > high ? [0, 1] : [low, high];
}
/** The ends of a color scale for rewards: 0 to 1 where they lie within, else their own. */
export function rewardScale(values) {
	const [low, high] = range(values);
	return low >= 0 && high <= 1 ? [0, 1] : [low, high];
}

const enc = encodeURIComponent;
export const slashed = (id) => String(id).split("/").map(enc).join("/");
export const link = {
	runs: () => "#/",
	run: (run) => `#/run/${enc(run)}`,
	step: (run, step) => `#/run/${enc(run)}/step/${step}`,
	episode: (run, step, id, token) => `#/run/${enc(run)}/step/${step}/episode/${slashed(id)}${token === undefined ? "" : `?token=${token}`}`,
	tools: (run) => `#/run/${enc(run)}/tools`,
	search: (query) => `#/search${query ? `?${query}` : ""}`,
	compare: (runs) => `#/compare?runs=${runs.map(enc).join(",")}`,
};
export const api = {
	run: (run, rest = "") => `/api/runs/${enc(run)}${rest}`,
	episode: (run, step, id) => `/api/runs/${enc(run)}/episodes/${slashed(id)}?step=${step}`,
	tokens: (run, step, id, from, count) => `/api/runs/${enc(run)}/tokens/${slashed(id)}?step=${step}&from=${from}&count=${count}`,
	image: (run, step, id, message, part) => `/api/image/${enc(run)}/${slashed(id)}?step=${step}&message=${message}&part=${part}`,
};

/** Merge values into the query of the address without a new history entry; in a layout effect, lest it be another page's. */
export function setQuery(values) {
	const [path, old = ""] = location.hash.split("?");
	const query = new URLSearchParams(old);
	for (const [key, value] of Object.entries(values)) {
		if (value == null || value === "") query.delete(key);
		else query.set(key, value);
	}
	const text = query.toString();
	history.replaceState(null, "", `${path || "#/"}${text ? `?${text}` : ""}`);
}

const kept = window.AGENTRL_KEPT; // by the server; an export has none
export const store = {
	get(key, otherwise) {
		if (kept) return kept[key] ?? otherwise;
		try { return JSON.parse(localStorage.getItem(`agentrl.${key}`)) ?? otherwise; } catch { return otherwise; }
	},
	set(key, value) {
		if (kept) {
			kept[key] = value;
			fetch("/api/preferences", { method: "POST", body: JSON.stringify({ [key]: value }) }).catch(() => {});
			return;
		}
		try { localStorage.setItem(`agentrl.${key}`, JSON.stringify(value)); } catch { /* private window, export */ }
	},
};

let toast = () => {};
export const onToast = (f) => { toast = f; };
export async function copy(text, what) {
	try { await navigator.clipboard.writeText(text); }
	catch {
		const area = document.createElement("textarea");
		area.value = text;
		document.body.append(area);
		area.select();
		document.execCommand("copy");
		area.remove();
	}
	toast(`Copied ${what}`);
}

export function Loading({ error, what = "" }) {
	if (!error) return html`<p class="quiet wait" role="status">Loading ${what}…</p>`;
	return html`<div class="error" role="alert"><b>${visible(error.message)}</b>${error.todo && html`<div>${visible(error.todo)}</div>`}</div>`;
}

export function Crumbs({ items, children }) {
	return html`<nav class="crumbs" aria-label="Where you are">
		${items.map(([text, href], i) => html`${i > 0 && html`<span aria-hidden="true">/</span>`}${href ? html`<a href=${href}>${visible(text)}</a>` : html`<h1>${visible(text)}</h1>`}`)}
		<span class="grow"></span>${children}</nav>`;
}

export function Tags({ tags }) {
	return (tags ?? []).map((tag) => html`<span class="tag">${visible(tag)}</span>`);
}

/** A table whose columns sort: columns are {key, title, value(row), cell(row), num}; words explain titles. */
export function Table({ columns, rows, sort, caption, rowClass, words, limit = 200 }) {
	const [order, setOrder] = useState(sort ?? null);
	const [shown, setShown] = useState(limit);
	let sorted = rows;
	if (order) {
		const column = columns.find((c) => c.key === order.key);
		const value = column?.value ?? ((row) => row[order.key]);
		const sign = order.down ? -1 : 1;
		sorted = [...rows].sort((a, b) => {
			const x = value(a) ?? null, y = value(b) ?? null;
			if (x === null || y === null) return (x === null) - (y === null);
			return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
		});
	}
	const click = (c) => setOrder({ key: c.key, down: order?.key === c.key ? !order.down : Boolean(c.num) });
	return html`<div class="scroll"><table class="table">
		${caption && html`<caption>${caption}</caption>`}
		<thead><tr>${columns.map((c) => html`<th class=${c.num ? "num" : ""} title=${words?.[c.title]} aria-sort=${order?.key === c.key ? (order.down ? "descending" : "ascending") : undefined}>
			${c.title === "" || c.plain ? c.title : html`<button onClick=${() => click(c)}>${c.title}${order?.key === c.key ? (order.down ? " ↓" : " ↑") : ""}</button>`}</th>`)}</tr></thead>
		<tbody>${sorted.slice(0, shown).map((row) => html`<tr key=${row.key ?? row.id} class=${rowClass?.(row) ?? ""}>
			${columns.map((c) => html`<td class=${c.num ? "num" : c.class ?? ""}>${c.cell ? c.cell(row) : c.num ? num(row[c.key]) : visible(row[c.key] ?? "")}</td>`)}</tr>`)}</tbody>
	</table>${sorted.length > shown && html`<p><button class="plain" onClick=${() => setShown(shown + 1000)}>Show more (${num(sorted.length - shown)} left)</button></p>`}</div>`;
}

export function useSize(ref) {
	const [size, setSize] = useState([0, 0]);
	useEffect(() => {
		const watch = new ResizeObserver(([entry]) => {
			const { width, height } = entry.contentRect;
			setSize((old) => (Math.abs(old[0] - width) < 1 && Math.abs(old[1] - height) < 1 ? old : [width, height]));
		});
		watch.observe(ref.current);
		return () => watch.disconnect();
	}, []);
	return size;
}

/** A regular expression of what was typed, or of its plain text where it is not one; null for nothing. */
export function pattern(text) {
	if (!text) return null;
	try { return new RegExp(text, "i"); } catch { return new RegExp(escaped(text), "i"); }
}
export const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
