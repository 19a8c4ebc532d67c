// All data comes through get(path): from the server, or from what an export carries.
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { searchExport } from "./offline.js";

export const exported = Boolean(window.AGENTRL_EXPORT);

const answers = new Map(); // of the server, newest last; dropped when a run changes
const KEEP = 24;

async function fetched(path, signal) {
	const response = await fetch(path, { signal, headers: { accept: "application/json" } });
	let body = null;
	try { body = await response.json(); } catch (e) { if (signal?.aborted) throw e; }
	if (response.ok && body !== null) return body;
	const told = body?.error;
	const error = new Error(told?.message ?? `${path} answered ${response.status}`);
	error.status = response.status;
	error.todo = told?.what_to_do ?? (response.status === 401 || response.status === 403
		? "Open the address that `agentrl view` printed; it holds this session's token." : "");
	throw error;
}

function carried(path) {
	const bundle = window.AGENTRL_EXPORT;
	if (path.startsWith("/api/search?")) return searchExport(path, carried);
	const key = path.replace(/^(\/api\/runs\/[^/]+\/series)\?.*/, "$1")
		.replace(/^(\/api\/runs\/[^/]+\/tokens\/.*\?step=\d+)&.*/, "$1");
	const found = bundle.get(key);
	if (found === undefined) {
		return Promise.reject(new Error(path.startsWith("/api/compare?") ? "This export compares all of its runs only; at most ten are compared." : "This export does not contain that page."));
	}
	return found;
}

export async function get(path, signal) {
	if (exported) return carried(path);
	if (answers.has(path)) return answers.get(path);
	const body = await fetched(path, signal);
	answers.set(path, body);
	if (answers.size > KEEP) answers.delete(answers.keys().next().value);
	return body;
}

/** The address of an image: the server's, or the data: URL that an export carries. */
export async function imageSource(path) {
	return exported ? carried(path) : path;
}

// Live following: the server says which runs changed, and what a program wants a person to see.
const watchers = new Set();
export const live = { state: exported ? "export" : "connecting" };

function changed(runs) {
	for (const path of [...answers.keys()]) {
		if (!runs.length || runs.some((id) => path.includes(`/runs/${encodeURIComponent(id)}`)) || !/^\/api\/runs\/./.test(path)) answers.delete(path);
	}
	for (const watcher of [...watchers]) watcher(runs);
}

function setLive(state, refused = null) {
	if (live.state === state && live.refused?.message === refused?.message) return;
	Object.assign(live, { state, refused });
	for (const watcher of [...watchers]) watcher(null);
}

// Asked again and again: a browser has six connections to a server for all tabs, and a request that waits holds one.
const EVERY = 1000, GIVEN_UP = 30000;

export async function follow(show) {
	let after = null;
	for (let failures = 0; !exported;) {
		try {
			const body = await fetched(after === null ? "/api/events" : `/api/events?after=${after}&wait=0`, AbortSignal.timeout(GIVEN_UP));
			const missed = after !== null && (failures > 0 || body.next - after !== body.events.length);
			failures = 0;
			setLive("live");
			after = body.next;
			if (missed) changed([]);
			for (const event of body.events) {
				if (event.changed) changed(event.changed);
				if (typeof event.hash === "string" && event.hash.startsWith("#/")) show(event.hash);
			}
		} catch (e) {
			failures += 1;
			setLive("offline", e.status === 401 ? e : null);
		}
		await new Promise((resolve) => setTimeout(resolve, failures ? Math.min(10000, 500 * 2 ** failures) : EVERY));
	}
}

export function useLive(watcher) {
	const current = useRef(watcher);
	current.current = watcher;
	useEffect(() => {
		const call = (runs) => current.current(runs);
		watchers.add(call);
		return () => watchers.delete(call);
	}, []);
}

/**
 * {data, error} of some paths (none: nothing to get), asked again when one of `runs` changes (not given: any run).
 * What is shown stays until newer data has arrived or there is none anymore (a run was deleted), and an answer under way is not given up for a newer one: a run that
 * changes faster than it is read would never be shown.
 */
export function useAll(paths, runs) {
	const key = paths.join("\n");
	const [state, setState] = useState({ key: null });
	const [round, setRound] = useState(0);
	const place = useRef({ key: null });
	useLive((changed) => {
		if (changed && (!runs || !changed.length || changed.some((id) => runs.includes(id)))) setRound((n) => n + 1);
	});
	useEffect(() => {
		if (place.current.key !== key) {
			place.current.control?.abort();
			place.current = { key, control: new AbortController(), asked: 0, shown: 0 };
		}
		const here = place.current, number = here.asked += 1;
		const take = (change) => {
			if (here.control.signal.aborted || number < here.shown) return;
			here.shown = number;
			setState((old) => ({ key, data: old.key === key && change.error?.status !== 404 ? old.data : null, error: null, ...change }));
		};
		Promise.all(paths.map((path) => get(path, here.control.signal))).then((data) => take({ data }), (error) => take({ error }));
	}, [key, round]);
	useEffect(() => () => place.current.control?.abort(), []);
	return state.key === key ? state : { data: null, error: null };
}

export function useGet(path, run) {
	const { data, error } = useAll(path ? [path] : [], run === undefined ? undefined : [run]);
	return { data: data?.[0] ?? null, error };
}
