"use strict";
/* The steps of each worker as the server told them, and the charts of one of them. */

const FIELDS = ["step_id", "ended_ms", "duration_ms", "num_decodes", "num_prefill_tokens", "budget", "num_waiting",
  "num_running", "num_swapped", "num_blocks", "num_preemptions", "waiting_reason", "chunks", "num_blocks_swapped_out",
  "num_blocks_swapped_in"];
const FIELD = Object.fromEntries(FIELDS.map((name, place) => [name, place]));
const MAX_STEPS = 5000;
const MAX_DRAWN = 800;
/* Distances of labels: all that is drawn is counted. */
const WHOLE = [1, 2, 5].flatMap((first) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((ten) => first * ten)).sort((a, b) => a - b);

class StepHistory {
  constructor() { this.rows = new Map(); }

  clear() { this.rows.clear(); }

  add(worker, rows) {
    const kept = this.rows.get(worker) ?? [];
    // A worker that was replaced counts its steps from the beginning again.
    if (kept.length && rows.length && rows[0][0] <= kept[kept.length - 1][0]) kept.length = 0;
    kept.push(...rows);
    if (kept.length > MAX_STEPS) kept.splice(0, kept.length - MAX_STEPS);
    this.rows.set(worker, kept);
  }

  last(worker, count) { return (this.rows.get(worker) ?? []).slice(-count); }

  /* At most `MAX_DRAWN` of them: of each few neighbours the longest, as it is stalls that one looks for. */
  drawn(worker, count) {
    const rows = this.last(worker, count);
    const every = Math.ceil(rows.length / MAX_DRAWN);
    if (every <= 1) return { rows, every: 1 };
    const longest = [];
    for (const row of rows) {
      const group = Math.floor(row[FIELD.step_id] / every);
      const before = longest[longest.length - 1];
      if (before === undefined || Math.floor(before[FIELD.step_id] / every) !== group) longest.push(row);
      else if (row[FIELD.duration_ms] > before[FIELD.duration_ms]) longest[longest.length - 1] = row;
    }
    return { rows: longest, every };
  }
}

class StepCharts {
  constructor(onStep) {
    this.onStep = onStep;
    this.rows = [];
    this.target = 0;
    this.charts = [];
    this.build();
    new ResizeObserver(() => this.resize()).observe(document.getElementById("budget-chart"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    document.getElementById("budget-chart").addEventListener("keydown", (event) => this.move(event));
  }

  build() {
    for (const chart of this.charts) chart.plot.destroy();
    const bars = uPlot.paths.bars({ size: [1, Infinity], gap: 0 });
    const steps = uPlot.paths.stepped({ align: 1 });
    const fill = (name) => ({ fill: color(name), stroke: color(name), width: 0, paths: bars, points: { show: false } });
    const line = (name) => ({ stroke: color(name), width: 1.5, paths: steps, points: { show: false } });
    this.charts = [
      this.chart("budget-chart", [fill("idle"), fill("chunks"), fill("decode")], (rows) => [
        rows.map((row) => row[FIELD.budget]),
        rows.map((row) => row[FIELD.num_decodes] + row[FIELD.num_prefill_tokens]),
        rows.map((row) => row[FIELD.num_decodes]),
      ], true),
      this.chart("time-chart", [line("ink"), { ...line("target"), dash: [6, 4] }], (rows) => [
        rows.map((row) => row[FIELD.duration_ms]),
        rows.map(() => (this.target > 0 ? this.target : null)),
      ]),
      this.chart("queue-chart", [line("running"), line("waiting"), line("swapped")], (rows) => [
        rows.map((row) => row[FIELD.num_running]),
        rows.map((row) => row[FIELD.num_waiting]),
        rows.map((row) => row[FIELD.num_swapped]),
      ]),
      this.chart("blocks-chart", [line("chunks")], (rows) => [rows.map((row) => row[FIELD.num_blocks])]),
    ];
    this.draw(this.rows, this.target);
  }

  chart(id, series, columns, tells = false) {
    const holder = document.getElementById(id);
    const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false },
      font: "12px system-ui, sans-serif" };
    const hooks = tells ? { setCursor: [(plot) => this.onStep(this.rows[plot.cursor.idx])] } : {};
    const plot = new uPlot({
      width: holder.clientWidth || 300, height: holder.clientHeight || 150, pxAlign: true, hooks,
      cursor: { y: false, sync: { key: "steps" }, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [{ ...axis, size: 26, incrs: WHOLE }, { ...axis, size: 48, incrs: WHOLE }],
      series: [{}, ...series],
      legend: { show: false },
    }, [[], ...series.map(() => [])], holder);
    return { plot, columns, holder };
  }

  draw(rows, target) {
    this.rows = rows;
    this.target = target;
    const ids = rows.map((row) => row[FIELD.step_id]);
    for (const { plot, columns } of this.charts) plot.setData([ids, ...columns(rows)]);
  }

  resize() {
    for (const { plot, holder } of this.charts) {
      plot.setSize({ width: holder.clientWidth, height: holder.clientHeight });
    }
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    if (by === undefined || !this.rows.length) return;
    event.preventDefault();
    const { plot } = this.charts[0];
    const from = plot.cursor.idx ?? this.rows.length - (by < 0 ? 0 : 1);
    this.show(Math.min(this.rows.length - 1, Math.max(0, from + by)));
  }

  show(place) {
    const { plot } = this.charts[0];
    const left = plot.valToPos(this.rows[place][FIELD.step_id], "x");
    plot.setCursor({ left, top: plot.over.clientHeight / 2 });
  }

  /* False: the step is no longer among those that are shown. */
  showStep(stepId) {
    const place = this.rows.findIndex((row) => row[FIELD.step_id] === stepId);
    if (place >= 0) this.show(place);
    return place >= 0;
  }
}

function stepText(row) {
  if (row === undefined) return "";
  const parts = [`step ${row[FIELD.step_id]}`, format.ms(row[FIELD.duration_ms]),
    `${row[FIELD.num_decodes]} for running answers and ${row[FIELD.num_prefill_tokens]} of prompts, of ` +
    `${row[FIELD.budget]} tokens`];
  const chunks = row[FIELD.chunks].map(([id, tokens]) => `${format.id(id)} ${tokens}`);
  if (chunks.length) parts.push(`chunks: ${chunks.join(", ")}`);
  const reason = row[FIELD.waiting_reason];
  if (row[FIELD.num_waiting]) {
    parts.push(`${row[FIELD.num_waiting]} waiting${reason ? ` (${format.words(reason)})` : ""}`);
  }
  const [out, back] = [row[FIELD.num_blocks_swapped_out], row[FIELD.num_blocks_swapped_in]];
  if (out || back) parts.push(`blocks to the host ${out}, back ${back}`);
  if (row[FIELD.num_preemptions]) parts.push(`${row[FIELD.num_preemptions]} preempted`);
  return parts.join(" · ");
}
