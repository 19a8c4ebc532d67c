// Two episodes of a group, aligned at the first token where they differ.
import { html, useLayoutEffect, useMemo, useRef } from "./vendor/htm-preact.js";
import { useGet } from "./data.js";
import { TokenView, useTokens } from "./tokens.js";
import { api, link, Loading, num, plural, shade, visible } from "./ui.js";

const BEFORE = 60;

/** The first position where two lists of ids differ; null while that is not known yet. */
export function firstDifference(a, b) {
	const shared = Math.min(a.loaded, b.loaded);
	for (let k = 0; k < shared; k += 1) if (a.ids[k] !== b.ids[k]) return k;
	if (a.total === null || b.total === null) return null;
	const shortest = Math.min(a.total, b.total);
	return shared >= shortest ? shortest : null;
}

function Side({ tokens, round, at, from }) {
	const box = useRef(null), view = useRef(null);
	useLayoutEffect(() => {
		const look = { coloring: "origin", scale: 1, key: `${at}`, marked: at };
		view.current = new TokenView(box.current, tokens, from, Infinity, () => look);
		return () => view.current.close();
	}, [tokens, at, from]);
	useLayoutEffect(() => { if (tokens.total !== null) view.current.to = Math.max(from, tokens.total); view.current.grow(); }, [round, tokens, at]);
	return html`<div class="tokens" ref=${box}></div>`;
}

export function SideBySide({ run, step, episode, other, tokens, round }) {
	const second = useGet(api.episode(run, step, other), run);
	const right = useTokens(run, step, other, second.data ? second.data.recorded : null);
	const at = useMemo(() => firstDifference(tokens, right.tokens), [tokens, round, right.tokens, right.round]);
	const error = second.error ?? right.error;
	if (error) return html`<${Loading} error=${error} />`;
	if (at === null || !second.data) return html`<${Loading} what="both episodes" />`;
	const same = at >= (tokens.total ?? 0) && at >= (right.tokens.total ?? 0);
	const from = Math.max(0, at - BEFORE);
	const said = (t) => (at < t.loaded ? `“${visible(t.pieces[at]).replace(/\n/g, "⏎")}” (${t.ids[at]})` : "its end");
	const head = (e) => html`<h2><b class=${`pill ${shade(e.rewards?.total ?? null, 0, 1)}`}>${num(e.rewards?.total)}</b> <a href=${link.episode(run, step, e.id, at)}>${visible(e.id)}</a> <span class="quiet">${visible(e.stop_reason ?? "")}</span></h2>`;
	return html`<p class="pole" id="difference">${same ? "Both episodes have the same tokens." : html`${plural(at, "token")} in common; then <b>${said(tokens)}</b> on the left, <b>${said(right.tokens)}</b> on the right.`}
			${" "}<a href=${link.episode(run, step, episode.id)}>back to one</a></p>
		<div class="sides"><section>${head(episode)}<${Side} tokens=${tokens} round=${round} at=${at} from=${from} /></section>
			<section>${head(second.data)}<${Side} tokens=${right.tokens} round=${right.round} at=${at} from=${from} /></section></div>`;
}
