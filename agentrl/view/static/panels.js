// Beside an episode: rewards, branches, siblings, its own view, copying.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { imageSource, useGet } from "./data.js";
import { chatMessages, scriptedTest } from "./text.js";
import { api, copy, link, Loading, num, plural, shade, signed, visible } from "./ui.js";
import { advantageText, glyphOf } from "./step.js";

/** The steps from 0 to the total: {name, turn, add, from, to}. */
export function steps(rewards) {
	let sum = 0;
	const all = (rewards?.parts ?? []).map((p) => {
		const add = (p.value ?? 0) * (p.weight ?? 1);
		const from = sum;
		sum += add;
		return { ...p, add, from, to: sum };
	});
	const rest = rewards?.total == null ? 0 : rewards.total - sum;
	if (Math.abs(rest) > 1e-6 * Math.max(1, Math.abs(sum))) all.push({ name: all.length ? "other" : "reward", turn: null, value: rest, weight: null, add: rest, from: sum, to: sum + rest });
	return all;
}

/** The advantages of each turn's sampled tokens. */
function byTurn(episode, tokens) {
	const found = new Map();
	const turns = new Map((episode.turns ?? []).map((t, i) => [t.message, i]));
	for (const s of episode.segments ?? []) {
		if (s.origin !== "sampled") continue;
		const turn = s.turn ?? turns.get(s.message);
		for (let k = s.start; k < Math.min(s.start + s.count, tokens.loaded); k += 1) {
			const a = tokens.advantage[k];
			if (a === null || turn == null) continue;
			const [low, high] = found.get(turn) ?? [a, a];
			found.set(turn, [Math.min(low, a), Math.max(high, a)]);
		}
	}
	return [...found.entries()];
}

export function Waterfall({ rewards, episode, tokens, round }) {
	const all = steps(rewards);
	const advantages = useMemo(() => byTurn(episode, tokens), [episode, tokens, round]);
	const low = Math.min(0, ...all.map((s) => Math.min(s.from, s.to))), high = Math.max(0, ...all.map((s) => Math.max(s.from, s.to)));
	const x = (v) => (100 * (v - low)) / (high - low || 1);
	return html`<table class="waterfall"><tbody>${all.map((s) => html`<tr title=${s.weight != null && s.weight !== 1 ? `${num(s.value)} × ${num(s.weight)}` : undefined}><th scope="row">${visible(s.name)}${s.turn != null && html` <span class="quiet">turn ${s.turn + 1}</span>`}</th>
			<td class="num">${signed(s.add)}</td><td class="drop"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
			<line x1=${x(0)} x2=${x(0)} y1="0" y2="10" /><rect class=${s.add < 0 ? "less" : "more"} x=${Math.min(x(s.from), x(s.to))} width=${Math.max(0.6, Math.abs(x(s.to) - x(s.from)))} y="1.5" height="7" /></svg></td></tr>`)}
		<tr class="total"><th scope="row">total</th><td class="num">${num(rewards?.total)}</td><td></td></tr></tbody></table>
		${advantages.length > 0 && html`<table class="waterfall"><tbody>${advantages.slice(0, 40).map(([turn, range]) => html`<tr><th scope="row">advantage <span class="quiet">turn ${turn + 1}</span></th><td class="num">${advantageText(range)}</td></tr>`)}</tbody></table>`}`;
}

export function Branches({ episode, blocks, select }) {
	const parents = new Map((episode.segments ?? []).map((s) => [s.index, s.parent ?? -1]));
	const starts = new Map(episode.branches.map((b, i) => [b.segment, i]));
	const owner = (segment) => { // the branch that a segment belongs to
		for (let at = segment, n = 0; at >= 0 && n <= parents.size; at = parents.get(at) ?? -1, n += 1) if (starts.has(at)) return starts.get(at);
		return -1;
	};
	const children = new Map();
	episode.branches.forEach((b, i) => {
		const above = b.parent === -1 || b.parent === null ? -1 : owner(b.parent);
		children.set(above === i ? -1 : above, [...(children.get(above === i ? -1 : above) ?? []), i]);
	});
	const tree = (above, depth) => (children.get(above) ?? []).length > 0 && depth < 40 && html`<ul role=${depth ? "group" : "tree"} class="tree">${children.get(above).map((i) => {
		const b = episode.branches[i], block = blocks.find((x) => x.segments.includes(b.segment));
		return html`<li role="treeitem"><button class="plain" onClick=${() => block && select(block)}>${visible(b.kind ?? "branch")}</button>
			${" "}<span class="quiet">${b.tokens !== undefined ? plural(b.tokens, "token") : ""}</span>${b.reason && html`<div>${visible(b.reason)}</div>`}${tree(i, depth + 1)}</li>`;
	})}</ul>`;
	return tree(-1, 0) || null;
}

export function Siblings({ run, step, episode }) {
	const { data, error } = useGet(api.run(run, `/steps/${step}`), run);
	if (!data) return html`<${Loading} error=${error} />`;
	const group = data.groups.find((g) => g.episodes.some((e) => e.id === episode.id));
	if (!group) return html`<p class="quiet">None recorded.</p>`;
	return html`<ul class="siblings">${group.episodes.map((e) => { const glyph = glyphOf(e); return html`<li class=${e.id === episode.id ? "here" : ""}>
		<b class=${`pill ${shade(e.reward, 0, 1)}`}>${num(e.reward)}</b> <a data-sibling href=${link.episode(run, step, e.id)} aria-current=${e.id === episode.id ? "page" : undefined}>${visible(e.id)}</a>
		${glyph && html`<span title=${glyph[2]}>${glyph[1]}</span>`}<span class="grow"></span>
		${e.id !== episode.id && html`<a class="quiet" href=${`${link.episode(run, step, episode.id)}?with=${encodeURIComponent(e.id)}`}>side by side</a>`}</li>`; })}</ul>`;
}

export function Renderer({ url, episode, exported }) {
	const frame = useRef(null);
	const [page, setPage] = useState(exported ? null : { src: url });
	const [at, setAt] = useState(Math.max(0, episode.messages.length - 1));
	useEffect(() => { if (exported) imageSource(url).then((text) => setPage({ srcdoc: text }), () => setPage(null)); }, [url]);
	const tell = () => frame.current?.contentWindow?.postMessage({ type: "agentrl", episode, message: at }, "*");
	useEffect(tell, [at, episode, page]);
	return page && html`<iframe ref=${frame} class="env" title="The env's view of this episode" sandbox="allow-scripts" ...${page} onLoad=${tell}></iframe>
		<label class="slider">Message <input type="range" min="0" max=${Math.max(0, episode.messages.length - 1)} value=${at} onInput=${(e) => setAt(Number(e.target.value))} /> ${at + 1}</label>`;
}

export function CopyMenu({ episode, env }) {
	return html`<span class="quiet">Copy</span>
		<button class="button" onClick=${() => copy(JSON.stringify(episode, null, 2), "the episode as JSON")}>JSON</button>
		<button class="button" onClick=${() => copy(JSON.stringify(chatMessages(episode), null, 2), "the chat messages")}>Messages</button>
		<button class="button" onClick=${() => copy(scriptedTest(episode, env), "a test that replays the episode")}>Test</button>`;
}
