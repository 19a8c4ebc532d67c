// From segments to one block per message.

/** [{index, message, from, to, segments, turn, turnIndex, version, fork, last}] */
export function blocksOf(episode) {
	const segments = [...(episode.segments ?? [])].sort((a, b) => a.start - b.start);
	const forks = new Map((episode.branches ?? []).map((b) => [b.segment, b]));
	const turnOf = new Map((episode.turns ?? []).map((t, i) => [t.message, i]));
	const blocks = [];
	let current = null;
	let waiting = null; // glue that belongs to the message after it
	const open = (segment, message) => {
		current = { message, from: segment.start, to: segment.start, segments: [], version: null, fork: null };
		blocks.push(current);
	};
	const take = (segment) => {
		current.segments.push(segment.index);
		current.to = segment.start + segment.count;
		if (segment.version != null && segment.origin === "sampled") current.version = Array.isArray(segment.version) ? segment.version[0] : segment.version;
	};
	segments.forEach((segment, i) => {
		const parent = segment.parent ?? i - 1;
		const forked = i > 0 && parent !== segments[i - 1].index;
		if (forked && waiting) { open(waiting, null); take(waiting); waiting = null; }
		if (segment.message == null) {
			if (waiting) { open(waiting, null); take(waiting); }
			waiting = segment;
			if (forked) waiting.forked = true;
			return;
		}
		const apart = forked || waiting?.forked;
		if (!current || apart || current.message !== segment.message) {
			open(waiting ?? segment, segment.message);
			if (apart) current.fork = forks.get(waiting?.index ?? segment.index) ?? forks.get(segment.index) ?? { kind: "branch", reason: null };
		}
		if (waiting) { take(waiting); waiting = null; }
		take(segment);
	});
	if (waiting) { if (current) take(waiting); else { open(waiting, null); take(waiting); } }
	const shown = new Set(blocks.map((b) => b.message));
	episode.messages.forEach((_, m) => {
		if (shown.has(m)) return;
		const at = blocks.findLastIndex((b) => b.message !== null && b.message < m);
		const place = at < 0 ? 0 : blocks[at].to;
		blocks.splice(at + 1, 0, { message: m, from: place, to: place, segments: [], version: null, fork: null });
	});
	const lastOf = new Map(blocks.map((b, i) => [b.message, i]));
	return blocks.map((b, index) => {
		const turnIndex = b.message !== null && turnOf.has(b.message) ? turnOf.get(b.message) : null;
		return { ...b, index, turnIndex, turn: turnIndex === null ? null : episode.turns[turnIndex], last: lastOf.get(b.message) === index };
	});
}
