// One episode: conversation and tokens as one text.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { exported, imageSource, useGet } from "./data.js";
import { Branches, CopyMenu, Renderer, Siblings, Waterfall } from "./panels.js";
import { SideBySide } from "./siblings.js";
import { taskText } from "./step.js";
import { blocksOf } from "./blocks.js";
import { callText } from "./text.js";
import { COLORINGS, FLAGS, ORIGINS, scaleOf, statistics, TokenView, useTokens } from "./tokens.js";
import { api, bytes, Crumbs, duration, link, Loading, num, plural, setQuery, shade, signed, store, visible } from "./ui.js";

const BIG = 2000;

/** A text of any size without tokens: in chunks, so that the browser lays out only what is seen. */
export function PlainText({ text }) {
	const chunks = useMemo(() => {
		const all = visible(text), found = [];
		for (let at = 0; at < all.length;) {
			let end = Math.min(all.length, at + 8000);
			const line = end < all.length ? at + all.slice(at, end).lastIndexOf("\n") + 1 : end;
			const cut = line <= at;
			if (!cut) end = line;
			found.push({ text: all.slice(at, end), cut: cut && end < all.length });
			at = end;
		}
		return found;
	}, [text]);
	return html`<div class="tokens plain">${chunks.map((c) => html`<div class=${c.cut ? "chunk cut" : "chunk"}>${c.text}</div>`)}</div>`;
}

function TokenText({ block, tokens, round, look, views }) {
	const box = useRef(null), view = useRef(null);
	useLayoutEffect(() => {
		view.current = new TokenView(box.current, tokens, block.from, block.to, () => look.current);
		views.add(view.current);
		return () => { views.delete(view.current); view.current.close(); };
	}, [tokens, block.from, block.to]);
	useLayoutEffect(() => view.current.grow(), [round]);
	return html`<div class="tokens" ref=${box}></div>`;
}

function Picture({ path, part }) {
	const [source, setSource] = useState(null);
	useEffect(() => { imageSource(path).then(setSource, () => setSource("")); }, [path]);
	if (source === "") return html`<span class="quiet">[${visible(part.mime_type ?? "image")}]</span>`;
	return source && html`<img class="picture" src=${source} alt=${`${visible(part.mime_type ?? "image")}${part.bytes ? `, ${bytes(part.bytes)}` : ""}`} loading="lazy" />`;
}

const FOLDED = 5000;

function Long({ text }) {
	const [all, setAll] = useState(false);
	return html`<pre>${visible(all ? text : text.slice(0, FOLDED))}</pre>${!all && text.length > FOLDED && html`<button class="plain" onClick=${() => setAll(true)}>Show all ${bytes(text.length)}</button>`}`;
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? "", null, 2));

function Call({ call }) {
	const [opened, setOpened] = useState(false);
	return html`<details class=${`call ${call.outcome === "ok" ? "" : "failed"}`} onToggle=${(e) => setOpened(e.target.open)}>
		<summary><code>${visible(callText(call).slice(0, 300))}</code><span class="outcome">${visible(call.outcome ?? "")}</span><span class="quiet">${duration(call.seconds)}</span>${call.truncated && html`<span class="tag">truncated</span>`}</summary>
		${opened && html`<dl class="fold"><dt>arguments</dt><dd><${Long} text=${asText(call.arguments)} /></dd><dt>result</dt><dd><${Long} text=${asText(call.result)} /></dd></dl>`}</details>`;
}

function Block({ block, episode, run, tokens, round, look, views, opened, toggle }) {
	const message = block.message === null ? null : episode.messages[block.message];
	const turn = block.turn;
	const size = block.to - block.from;
	const calls = block.last && message?.role === "assistant" ? episode.calls.filter((c) => c.turn === block.turnIndex && block.turnIndex !== null) : [];
	const answer = message?.role === "tool" ? episode.calls.find((c) => c.message === block.message || (c.id && c.id === message.tool_call_id)) : null;
	const role = message?.role ?? "tokens";
	const images = Array.isArray(message?.content) ? message.content.map((part, i) => ({ part, i })).filter(({ part }) => typeof part !== "string") : [];
	const plain = size === 0 && message;
	return html`<article class=${`msg ${role}${opened ? "" : " folded"}`} id=${`block-${block.index}`} data-nav tabindex="-1" aria-label=${visible(role)}>
		${block.fork && html`<div class="fork">↳ ${visible(block.fork.kind ?? "branch")}${block.fork.reason && html`: ${visible(block.fork.reason)}`}</div>`}
		<header><button class="role" aria-expanded=${opened} onClick=${() => toggle(block)}>${visible(role)}</button>
			${answer && html`<code class="clip">${visible(callText(answer).slice(0, 160))}</code><span class=${answer.outcome === "ok" ? "good" : "bad"}>${visible(answer.outcome)}</span><span class="quiet">${duration(answer.seconds)}</span>`}
			${!answer && message?.name && html`<code>${visible(message.name)}</code>`}
			<span class="grow"></span>
			${turn && html`<span class="quiet">turn ${block.turnIndex + 1} · engine ${duration(turn.engine_seconds)}${turn.env_seconds ? ` · env ${duration(turn.env_seconds)}` : ""}${turn.finish === "length" ? " · cut at its token limit" : ""}</span>`}
			${block.version !== null && html`<span class="quiet">v${block.version}</span>`}
			<span class="quiet">${plain ? "no tokens" : plural(size, "token")}</span></header>
		${opened && (plain
			? html`${message.reasoning && html`<div class="reasoning"><${PlainText} text=${message.reasoning} /></div>`}
				<${PlainText} text=${typeof message.content === "string" ? message.content : message.content.filter((p) => typeof p === "string").join("")} />`
			: html`<${TokenText} block=${block} tokens=${tokens} round=${round} look=${look} views=${views} />`)}
		${images.map(({ part, i }) => html`<${Picture} key=${i} part=${part} path=${api.image(run, episode.step, episode.id, block.message, i)} />`)}
		${(message?.parse_errors ?? []).map((text) => block.last && html`<div class="malformed">malformed: ${visible(text)}</div>`)}
		${calls.map((c, i) => html`<${Call} key=${i} call=${c} />`)}</article>`;
}

const rows = (tokens, k) => [
	["position", num(k)], ["id", num(tokens.ids[k])], ["origin", ORIGINS[tokens.origin[k]] ?? tokens.origin[k]],
	...(tokens.origin[k] !== 1 ? [] : [
		["sampler logprob", num(tokens.logprob[k], 5)], ["learner logprob", num(tokens.learner_logprob[k], 5)],
		["ratio", num(tokens.ratioOf(k), 5)], ["entropy", num(tokens.entropy[k], 4)],
		["reference logprob", num(tokens.ref_logprob[k], 5)], ["reference KL", num(tokens.kl(k), 4)],
		["advantage", signed(tokens.advantage[k])], ["weight", num(tokens.weight[k], 4)], ["version", num(tokens.version[k])],
		["loss", tokens.flags[k] === null ? (tokens.trained(k) ? "trained" : "not trained") : FLAGS.filter(([bit]) => tokens.flags[k] & bit).map(([, name]) => name).join(", ") || "not trained"]]),
];

export function TokenCard({ tokens, k, words, text = true }) {
	if (k === null || k >= tokens.loaded) return null;
	return html`<div class="token-card">${text && html`<code class="piece">${visible(tokens.pieces[k]).replace(/\n/g, "⏎").replace(/ /g, "·") || "(empty)"}</code>`}
		<dl>${rows(tokens, k).map(([name, value]) => html`<dt title=${words?.[name]}>${name}</dt><dd>${value}</dd>`)}</dl></div>`;
}

function Hover({ tokens, area }) {
	const [at, setAt] = useState(null);
	useEffect(() => {
		const box = area.current;
		const over = (e) => {
			const k = e.target.k;
			if (k === undefined) return setAt(null);
			const r = e.target.getClientRects()[0] ?? e.target.getBoundingClientRect();
			return setAt({ k, x: r.left, y: r.bottom, top: r.top });
		};
		const out = () => setAt(null);
		box.addEventListener("pointerover", over);
		box.addEventListener("pointerleave", out);
		addEventListener("scroll", out, { passive: true });
		return () => { box.removeEventListener("pointerover", over); box.removeEventListener("pointerleave", out); removeEventListener("scroll", out); };
	}, [tokens]);
	if (!at) return null;
	const below = at.y + 300 < innerHeight;
	return html`<div class="hover" role="tooltip" style=${{ left: `${Math.max(8, Math.min(at.x, innerWidth - 260))}px`, ...(below ? { top: `${at.y + 6}px` } : { bottom: `${innerHeight - at.top + 6}px` }) }}>
		<${TokenCard} tokens=${tokens} k=${at.k} /></div>`;
}

function Legend({ tokens, coloring, stats, words }) {
	const told = coloring === "origin" ? html`${ORIGINS.map((o, i) => html`<span><i class=${`swatch o${i}`}></i>${o}</span>`)}`
		: coloring === "flags" ? html`${["trained", "clipped", "masked", "rejected", "vetoed", "not trained"].map((n, i) => html`<span><i class=${`swatch l${i}`}></i>${n}</span>`)}`
			: html`<span>mean <b>${num(stats.mean)}</b></span><span>${num(stats.low)} … ${num(stats.high)}</span><span><i class="swatch un"></i>not trained</span>`;
	return html`<div class="legend">${told}<span class="quiet">${num(stats.trained)} of ${num(stats.sampled)} sampled tokens train${tokens.loaded < (tokens.total ?? 0) ? `, ${num(tokens.total - tokens.loaded)} still loading` : ""}. ${words?.[coloring]}</span></div>`;
}

export function EpisodePage({ run, step, id, query, visit }) {
	const { data, error } = useGet(api.episode(run, step, id), run);
	const about = useGet(api.run(run), run).data;
	const { tokens, round, error: lost } = useTokens(run, step, id, data?.segments?.length ? data.recorded : null);
	const crumbs = html`<${Crumbs} items=${[["Runs", link.runs()], [run, link.run(run)], [`Step ${step}`, link.step(run, step)], [id]]}>
		${data && html`<${CopyMenu} episode=${data} env=${about?.env} />`}</${Crumbs}>`;
	if (!data) return html`${crumbs}<${Loading} error=${error} what="the episode" />`;
	const other = query.get("with");
	return html`${crumbs}<${Facts} episode=${data} />
		${lost && html`<${Loading} error=${lost} />`}
		${other ? html`<${SideBySide} run=${run} step=${step} episode=${data} other=${other} tokens=${tokens} round=${round} />`
			: html`<${Text} key=${`${id} ${visit}`} run=${run} step=${step} episode=${data} tokens=${tokens} round=${round} query=${query} />`}`;
}

function Facts({ episode }) {
	const row = Object.entries(episode.row ?? {});
	return html`<div class="facts"><b class=${`pill ${shade(episode.rewards?.total ?? null, 0, 1)}`}>reward ${num(episode.rewards?.total)}</b>
		<span><span class="quiet">stopped</span> ${visible(episode.stop_reason ?? "")}</span><span><span class="quiet">turns</span> ${num(episode.turns?.length)}</span>
		<span><span class="quiet">task</span> ${taskText(episode)}</span><span><span class="quiet">group</span> ${num(episode.group)}</span></div>
		${row.length > 0 && html`<details class="panel"><summary>Task row</summary><dl class="config">${row.map(([k, v]) => html`<dt>${visible(k)}</dt><dd>${visible(typeof v === "string" ? v : JSON.stringify(v)).slice(0, 20000)}</dd>`)}</dl></details>`}
		${episode.hint && html`<details class="panel"><summary>Hint, which only the teacher read</summary><dl class="fold"><dd><${Long} text=${episode.hint} /></dd></dl></details>`}
		${episode.error && html`<div class="error"><b>Failed:</b> ${visible(episode.error)}</div>`}
		${episode.crash && html`<div class="error"><b>The agent crashed:</b> ${visible(episode.crash)}</div>`}
		${Object.entries(episode.faults ?? {}).map(([name, text]) => html`<div class="error"><b>Fault in ${visible(name)}:</b> ${visible(text)}</div>`)}`;
}

function Text({ run, step, episode, tokens, round, query }) {
	const blocks = useMemo(() => blocksOf(episode), [episode]);
	const [coloring, setColoring] = useState(() => { const c = query.get("color") ?? store.get("color", "origin"); return COLORINGS[c] ? c : "origin"; });
	const [folded, setFolded] = useState(() => new Set(blocks.filter((b) => b.to - b.from > BIG && b.message !== null && episode.messages[b.message].role === "tool").map((b) => b.index)));
	const [pinned, setPinned] = useState(() => (query.get("token") ? Number(query.get("token")) : null));
	const area = useRef(null), look = useRef({}), views = useMemo(() => new Set(), []), jumped = useRef(false);
	const stats = useMemo(() => statistics(tokens, coloring), [tokens, round, coloring]);
	const scale = scaleOf(stats);
	look.current = { coloring, scale, marked: pinned, key: `${coloring} ${COLORINGS[coloring].fixed ? "" : scale} ${pinned}` };
	useLayoutEffect(() => { for (const view of views) view.recolor(); }, [look.current.key]);
	const toggle = (b) => setFolded((old) => { const next = new Set(old); if (!next.delete(b.index)) next.add(b.index); return next; });

	useEffect(() => { // a link to a token: show it as soon as it is there
		if (pinned === null || jumped.current || pinned >= tokens.loaded) return;
		const block = blocks.find((b) => pinned >= b.from && pinned < b.to);
		if (block && folded.has(block.index)) { toggle(block); return; }
		const view = [...views].find((v) => pinned >= v.from && pinned < v.to);
		const el = view?.element(pinned);
		if (!el) return;
		jumped.current = true;
		el.scrollIntoView({ block: "center" });
		requestAnimationFrame(() => view.element(pinned)?.scrollIntoView({ block: "center" }));
	}, [pinned, round, folded]);

	const pin = (k) => { setPinned(k); setQuery({ token: k }); };
	const click = (e) => { if (e.target.k !== undefined && !String(getSelection())) { jumped.current = true; pin(e.target.k === pinned ? null : e.target.k); } };
	const color = (name) => { setColoring(name); store.set("color", name); setQuery({ color: name === "origin" ? null : name }); };
	useEffect(() => {
		const key = (e) => {
			if (e.detail === "color") { const names = Object.keys(COLORINGS); color(names[(names.indexOf(coloring) + 1) % names.length]); }
			if (e.detail === "fold") setFolded((old) => (old.size ? new Set() : new Set(blocks.filter((b) => b.message !== null && episode.messages[b.message].role === "tool").map((b) => b.index))));
			if ((e.detail === "left" || e.detail === "right") && pinned !== null) {
				const k = Math.max(0, Math.min(tokens.loaded - 1, pinned + (e.detail === "left" ? -1 : 1)));
				jumped.current = false;
				pin(k);
			}
		};
		addEventListener("agentrl-key", key);
		return () => removeEventListener("agentrl-key", key);
	});
	const select = (b) => document.getElementById(`block-${b.index}`)?.scrollIntoView({ block: "start" });
	return html`<div class="episode"><div class="reading">
			<div class="bar sticky"><label>Color by <select value=${coloring} onChange=${(e) => color(e.target.value)}>${Object.entries(COLORINGS).map(([name, c]) => html`<option value=${name} selected=${name === coloring}>${c.title}</option>`)}</select></label>
				<${Legend} tokens=${tokens} coloring=${coloring} stats=${stats} words=${episode.words} /></div>
			<div class="text" ref=${area} onClick=${click}>${blocks.map((b) => html`<${Block} key=${b.index} block=${b} episode=${episode} run=${run} tokens=${tokens} round=${round} look=${look} views=${views} opened=${!folded.has(b.index)} toggle=${toggle} />`)}</div>
			<${Hover} tokens=${tokens} area=${area} /></div>
		<aside>
			${pinned !== null && pinned < tokens.loaded && html`<section class="panel open"><h2>Token <button class="plain" onClick=${() => pin(null)}>close</button></h2><${TokenCard} tokens=${tokens} k=${pinned} words=${episode.words} /></section>`}
			<section class="panel open"><h2>Reward</h2><${Waterfall} rewards=${episode.rewards} turns=${episode.turns} tokens=${tokens} round=${round} episode=${episode} /></section>
			${episode.renderer && html`<section class="panel open"><h2>Env</h2><${Renderer} url=${episode.renderer} episode=${episode} exported=${exported} /></section>`}
			${(episode.branches ?? []).length > 1 && html`<section class="panel open"><h2>Branches</h2><${Branches} episode=${episode} blocks=${blocks} select=${select} /></section>`}
			<section class="panel open"><h2>Siblings</h2><${Siblings} run=${run} step=${step} episode=${episode} /></section>
		</aside></div>`;
}
