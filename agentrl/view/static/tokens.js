// Tokens as text. Whatever is far from the screen is plain text; what is near becomes one element per token, and
// what leaves stays until colors change. Chunks end at line ends, so the browser can skip their layout.
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./data.js";
import { api, visible } from "./ui.js";

export const ORIGINS = ["prompt", "sampled", "observation", "glue"];
export const FLAGS = [[1, "trained"], [2, "clipped"], [4, "masked"], [8, "rejected by correction"], [16, "vetoed"], [32, "no advantage"]];
const COLUMNS = ["ids", "pieces", "origin", "segment", "logprob", "learner_logprob", "ref_logprob", "entropy", "ratio", "advantage", "weight", "flags", "version"];
const FIRST = 2048, WINDOW = 16384;

/** The columns of an episode's tokens, filled window by window. */
export class Tokens {
	constructor() {
		this.total = null;
		this.loaded = 0;
		for (const name of COLUMNS) this[name] = [];
		this.listeners = new Set();
	}

	take(part) {
		this.total = part.total;
		const count = part.pieces.length;
		if (part.pieces.every((piece) => !piece)) part = { ...part, pieces: (part.ids ?? []).map((id) => `⟨${id}⟩`) }; // no tokenizer
		for (const name of COLUMNS) {
			const values = part[name];
			for (let i = 0; i < count; i += 1) this[name].push(values ? values[i] ?? null : null);
		}
		this.loaded += count;
		for (const listener of [...this.listeners]) listener();
	}

	async load(run, step, id, signal) {
		while (this.total === null || this.loaded < this.total) {
			const count = this.loaded ? WINDOW : FIRST;
			const part = await get(api.tokens(run, step, id, this.loaded, count), signal);
			if (signal.aborted) return;
			if (!part.pieces.length) { this.total = this.loaded; this.take({ total: this.loaded, pieces: [] }); return; }
			this.take(part);
			await new Promise((resolve) => setTimeout(resolve));
		}
	}

	trained(k) {
		if (this.origin[k] !== 1) return false;
		return this.flags[k] === null ? this.advantage[k] !== null : Boolean(this.flags[k] & 1);
	}

	kl(k) { // the estimate that is never negative
		const d = this.ref_logprob[k] === null || this.learner_logprob[k] === null ? null : this.ref_logprob[k] - this.learner_logprob[k];
		return d === null ? null : Math.exp(d) - d - 1;
	}

	mismatch(k) {
		const a = this.logprob[k], b = this.learner_logprob[k];
		return a === null || b === null ? null : b - a;
	}

	ratioOf(k) {
		if (this.ratio[k] !== null) return this.ratio[k];
		const d = this.mismatch(k);
		return d === null ? null : Math.exp(d);
	}
}

const bucket = (x) => Math.max(0, Math.min(8, Math.round(x)));
const diverging = (x, scale) => (x === null ? null : `d${bucket(4 + (4 * x) / (scale || 1))}`);
const rising = (x, scale) => (x === null ? null : `q${bucket((8 * x) / (scale || 1))}`);

/** How tokens are colored: name, value, and the class of a value (given the largest size of the values seen). */
export const COLORINGS = {
	origin: { title: "origin", value: () => null },
	advantage: { title: "advantage", value: (t, k) => t.advantage[k], shade: diverging },
	logprob: { title: "sampler log-probability", value: (t, k) => t.logprob[k], shade: (x) => rising(x === null ? null : -x, 6), fixed: true },
	learner_logprob: { title: "learner log-probability", value: (t, k) => t.learner_logprob[k], shade: (x) => rising(x === null ? null : -x, 6), fixed: true },
	mismatch: { title: "learner − sampler", value: (t, k) => t.mismatch(k), shade: diverging },
	ratio: { title: "ratio", value: (t, k) => t.ratioOf(k), shade: (x) => diverging(x === null ? null : Math.log(x), 0.3), fixed: true },
	entropy: { title: "entropy", value: (t, k) => t.entropy[k], shade: rising },
	ref_kl: { title: "reference KL", value: (t, k) => t.kl(k), shade: rising },
	weight: { title: "correction weight", value: (t, k) => t.weight[k], shade: (x, s) => diverging(x === null ? null : x - 1, s) },
	flags: { title: "what the loss did", value: (t, k) => t.flags[k], shade: (x) => (x === null ? null : `l${x & 16 ? 4 : x & 8 ? 3 : x & 4 ? 2 : x & 2 ? 1 : x & 1 ? 0 : 5}`), fixed: true },
	version: { title: "policy version", value: (t, k) => t.version[k], shade: (x) => (x === null ? null : `v${x % 6}`), fixed: true },
};

/** Statistics over trained tokens only. */
export function statistics(tokens, name) {
	const { value } = COLORINGS[name];
	let count = 0, sum = 0, low = Infinity, high = -Infinity, trained = 0, sampled = 0;
	for (let k = 0; k < tokens.loaded; k += 1) {
		if (tokens.origin[k] === 1) sampled += 1;
		if (!tokens.trained(k)) continue;
		trained += 1;
		const x = value(tokens, k);
		if (x === null || !Number.isFinite(x)) continue;
		count += 1; sum += x; low = Math.min(low, x); high = Math.max(high, x);
	}
	return { count, trained, sampled, mean: count ? sum / count : null, low: count ? low : null, high: count ? high : null };
}

export function scaleOf(stats) {
	return stats.count ? Math.max(Math.abs(stats.low), Math.abs(stats.high)) || 1 : 1;
}

/** The classes of a token under a coloring. */
export function classOf(tokens, k, coloring, scale) {
	const origin = tokens.origin[k];
	if (coloring === "origin") return origin === 1 && !tokens.trained(k) ? "o1 un" : `o${origin}`;
	if (!tokens.trained(k) && coloring !== "version" && coloring !== "flags") return "un";
	const { value, shade } = COLORINGS[coloring];
	return shade(value(tokens, k), scale) ?? "un";
}

const CHUNK = 320, LONGEST = 1200;

/** One run of tokens [from, to) as DOM inside `box`; grows while tokens arrive, colors what is near the screen. */
export class TokenView {
	constructor(box, tokens, from, to, look) {
		Object.assign(this, { box, tokens, from, to, look, built: from, chunks: [] });
		this.near = new IntersectionObserver((entries) => {
			for (const entry of entries) {
				entry.target.near = entry.isIntersecting;
				if (entry.isIntersecting && entry.target.filled !== this.look().key) this.fill(entry.target);
			}
		}, { rootMargin: "900px 0px" });
		this.grow();
	}

	grow() {
		const end = Math.min(this.to, this.tokens.loaded);
		while (this.built < end) {
			const start = this.built;
			let stop = start, line = false;
			while (stop < end && stop - start < LONGEST && !(line && stop - start >= CHUNK)) {
				line = this.tokens.pieces[stop].endsWith("\n");
				stop += 1;
			}
			if (stop === end && end < this.to && end < this.tokens.total) return; // the rest of the line is on its way
			this.add(start, stop, line || stop === this.to || stop === this.tokens.total);
			this.built = stop;
		}
	}

	add(start, stop, whole) {
		const el = document.createElement("div");
		el.className = whole ? "chunk" : "chunk cut"; // cut: the line goes on in the next chunk
		Object.assign(el, { start, stop, filled: null });
		el.textContent = visible(this.tokens.pieces.slice(start, stop).join(""));
		this.chunks.push(el);
		this.box.append(el);
		this.near.observe(el);
	}

	fill(el) {
		const { tokens } = this, { coloring, scale, key, marked } = this.look();
		const all = document.createDocumentFragment();
		for (let k = el.start; k < el.stop; k += 1) {
			const piece = document.createElement("i");
			piece.className = classOf(tokens, k, coloring, scale) + (k === marked ? " at" : "");
			piece.textContent = visible(tokens.pieces[k]);
			piece.k = k;
			all.append(piece);
		}
		el.replaceChildren(all);
		el.filled = key;
	}

	recolor() {
		for (const el of this.chunks) if (el.near) this.fill(el);
	}

	element(k) {
		const el = this.chunks.find((c) => k >= c.start && k < c.stop);
		if (!el) return null;
		if (el.filled !== this.look().key) this.fill(el);
		return el.children[k - el.start];
	}

	close() {
		this.near.disconnect();
		this.box.replaceChildren();
	}
}

/**
 * The tokens of an episode as they arrive; `round` grows with every window. They are read again when `recorded`, which
 * is null until it is known, has changed; what is shown stays until they are there.
 */
export function useTokens(run, step, id, recorded) {
	const [state, setState] = useState({ tokens: new Tokens(), round: 0, error: null });
	const place = useRef(null);
	useEffect(() => {
		const tokens = new Tokens(), control = new AbortController(), here = `${run} ${step} ${id}`;
		const again = recorded !== null && place.current === here;
		if (!again) setState({ tokens, round: 0, error: null });
		if (recorded === null) return undefined;
		place.current = here;
		let round = 0;
		tokens.listeners.add(() => {
			round += 1;
			if (!control.signal.aborted && (!again || tokens.loaded === tokens.total)) setState({ tokens, round, error: null });
		});
		tokens.load(run, step, id, control.signal).catch((error) => { if (!control.signal.aborted) setState({ tokens, round, error }); });
		return () => control.abort();
	}, [run, step, id, recorded]);
	return state;
}
