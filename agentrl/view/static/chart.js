// One chart: lines over steps, bands, marks; a click opens the step.
import { html, useEffect, useMemo, useRef } from "./vendor/htm-preact.js";
import { css, num, range, useSize, visible } from "./ui.js";

export const palette = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const faded = (color, alpha) => `color-mix(in srgb, ${color} ${alpha}%, transparent)`;

/** Exponential moving average that starts unbiased and passes over gaps. */
export function smooth(values, weight) {
	if (!weight) return values;
	let sum = 0, total = 0;
	return values.map((v) => {
		if (v === null || !Number.isFinite(v)) return null;
		sum = weight * sum + (1 - weight) * v;
		total = weight * total + 1 - weight;
		return sum / total;
	});
}

/** Whether a line has so few values that each of them counts: it is not smoothed. */
export function isSparse(values) {
	const known = values.filter((v) => v !== null).length;
	return known < 12 || 2 * known < values.length;
}

/** What a screen reader says about a line. */
export function summary(name, steps, values) {
	const known = values.filter((v) => v !== null);
	if (!known.length) return `${name}: no values`;
	const [low, high] = range(known);
	return `${name}: ${num(known[0])} at first, ${num(known.at(-1))} at last, between ${num(low)} and ${num(high)}, steps ${steps[0]} to ${steps.at(-1)}`;
}

/** The values of an axis as texts that differ from each other. */
export function ticks(values) {
	const known = values.filter((v) => v !== null);
	let digits = 3;
	while (digits < 6 && new Set(known.map((v) => num(v, digits))).size < known.length) digits += 1;
	return values.map((v) => (v === null ? "" : num(v, digits)));
}

const sync = "agentrl-steps";

function marksPlugin(marks) {
	const colors = { error: "--bad", warning: "--warn", evaluation: "--c2", checkpoint: "--quiet" };
	return {
		hooks: {
			draw: (u) => {
				const { ctx } = u;
				for (const mark of marks.current) {
					if (mark.step < u.scales.x.min || mark.step > u.scales.x.max) continue;
					const x = Math.round(u.valToPos(mark.step, "x", true));
					const color = css(colors[mark.severity] ?? colors[mark.kind] ?? "--quiet");
					ctx.save();
					ctx.fillStyle = color;
					if (mark.severity === "error" || mark.severity === "warning") {
						ctx.globalAlpha = 0.45;
						ctx.fillRect(x, u.bbox.top, devicePixelRatio, u.bbox.height);
						ctx.globalAlpha = 1;
					}
					const y = u.bbox.top + u.bbox.height, s = 4 * devicePixelRatio;
					ctx.beginPath();
					ctx.moveTo(x, y - s); ctx.lineTo(x - s * 0.8, y + s * 0.4); ctx.lineTo(x + s * 0.8, y + s * 0.4);
					ctx.fill();
					ctx.restore();
				}
			},
		},
	};
}

/**
 * lines: [{name, values, color?: index, raw?: faint values, low?, high?: band}]; marks: [{step, kind, severity, text}].
 */
export function Chart({ title, description, unit, steps, lines, marks = [], height = 150, onStep, legend = false, theme }) {
	const box = useRef(null), plot = useRef(null), tip = useRef(null), marked = useRef(marks), latest = useRef(null);
	const [width] = useSize(box);
	marked.current = marks;
	latest.current = { steps, lines, onStep };
	const shape = lines.map((l) => `${l.name}:${l.color ?? ""}:${Boolean(l.raw)}:${Boolean(l.low)}`).join("|") + theme;
	const data = useMemo(() => {
		const columns = [steps];
		for (const line of lines) {
			if (line.low) columns.push(line.low, line.high);
			if (line.raw) columns.push(line.raw);
			columns.push(line.values);
		}
		return columns;
	}, [steps, lines]);

	useEffect(() => {
		if (!width) return undefined;
		const series = [{}], bands = [];
		lines.forEach((line, i) => {
			const color = css(palette[(line.color ?? i) % palette.length]);
			const plain = { spanGaps: true, points: { show: false } };
			if (line.low) {
				bands.push({ series: [series.length + 1, series.length], fill: faded(color, 18) });
				series.push({ ...plain, stroke: faded(color, 25), width: 1 }, { ...plain, stroke: faded(color, 25), width: 1 });
			}
			if (line.raw) series.push({ ...plain, stroke: faded(color, 28), width: 1 });
			series.push({ label: line.name, stroke: color, width: 1.6, spanGaps: true, points: { show: steps.length < 3, size: 5, fill: color } });
		});
		const axis = { stroke: css("--quiet"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 3 };
		const u = new uPlot({
			width, height, series, bands, legend: { show: false }, padding: [6, 12, 0, 0],
			cursor: { sync: { key: sync }, drag: { x: true, y: false }, points: { size: 6 }, y: false },
			scales: { x: { time: false }, y: { range: (_, low, high) => (low === null ? [low, high] : low || high ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1]) } },
			axes: [
				{ ...axis, size: 20, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
				{ ...axis, size: 44, grid: { stroke: css("--line"), width: 1 }, values: (_, all) => ticks(all), space: 34 },
			],
			hooks: { setCursor: [(u) => say(u)] },
			plugins: [marksPlugin(marked)],
		}, data, box.current);
		plot.current = u;
		let down = 0;
		u.over.addEventListener("mousedown", (e) => { down = e.clientX; });
		u.over.addEventListener("click", (e) => {
			if (Math.abs(e.clientX - down) > 3 || u.cursor.idx === null) return;
			latest.current.onStep?.(latest.current.steps[u.cursor.idx]);
		});
		return () => { u.destroy(); plot.current = null; };
	}, [width > 0, shape, height]);

	useEffect(() => { if (plot.current && width) plot.current.setSize({ width, height }); }, [width]);
	useEffect(() => { plot.current?.setData(data); }, [data]);
	useEffect(() => { plot.current?.redraw(false); }, [marks]);

	function say(u) {
		const i = u.cursor.idx;
		if (!tip.current) return;
		if (i == null || u.cursor.left < 0) { tip.current.textContent = ""; return; }
		const { steps: s, lines: l } = latest.current;
		const values = l.length > 1 ? l.map((x) => `${x.name} ${num(x.values[i])}`).join("  ") : num((l[0].raw ?? l[0].values)[i]);
		tip.current.textContent = `step ${s[i]}: ${values}`;
	}

	return html`<figure class="chart" data-series=${title}>
		<figcaption title=${description || undefined}><b>${visible(title)}</b>${unit && html`<span class="quiet"> ${visible(unit)}</span>`}<span class="tip" ref=${tip}></span></figcaption>
		<div class=${onStep ? "plot open" : "plot"} ref=${box} role="img" aria-label=${lines.map((l) => summary(l.name, steps, l.raw ?? l.values)).join("; ")}></div>
		${legend && html`<div class="legend">${lines.map((l, i) => html`<span><i class=${`swatch s${(l.color ?? i) % palette.length}`}></i>${visible(l.name)}</span>`)}</div>`}
	</figure>`;
}
