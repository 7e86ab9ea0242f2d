"use strict";
/* Asks the server once a second and hands what it says to the charts and lists. */

const PERIOD_MS = 1000;
const KEY_NAME = "stallfree-key";
const byId = (id) => document.getElementById(id);

const history_ = new StepHistory();
const charts = new StepCharts((row) => { byId("readout").textContent = stepText(row); });
const detail = new RequestDetail((stepId) => charts.showStep(stepId));
const requests = new RequestList(explain);
let cursor = 0;
let store = "";
let isPaused = false;
/* Some answers of the last seconds, for rates: counters reach the server once a second. */
let past = [];
const PAST_MS = 6000;
let newest = null;

class Refused extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers });
  if (response.status === 401 || response.status === 403) throw new Refused(key ? "That key does not open this page." : "");
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
  return body;
}

async function update() {
  try {
    if (!isPaused && !document.hidden && byId("key-form").hidden) {
      take(await ask(`dashboard/data?cursor=${cursor}&store=${encodeURIComponent(store)}`));
      state("live", "");
    }
  } catch (error) {
    if (error instanceof Refused) askForKey(error.message);
    else state("the server does not answer", "lost");
  }
  setTimeout(update, PERIOD_MS);
}

function take(data) {
  if (data.steps.store_id !== store) {
    history_.clear();
    past = [];
  }
  ({ cursor, store_id: store } = data.steps);
  for (const [worker, rows] of Object.entries(data.steps.rows)) history_.add(worker, rows);
  newest = data;
  drawWorkers(data.now.workers);
  drawTiles(data);
  requests.draw(data.requests ?? []);
  drawSteps();
}

function drawSteps() {
  const worker = byId("worker").value;
  const shown = newest?.now.workers.find((view) => view.worker === worker);
  const { rows, every } = history_.drawn(worker, Number(byId("window").value));
  charts.draw(rows, shown?.values.target_itl_ms ?? 0);
  byId("thinned").textContent = every > 1 ? `of every ${every} steps the longest is drawn` : "";
}

function drawWorkers(workers) {
  const select = byId("worker");
  const names = workers.map((view) => view.worker);
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  byId("model").textContent = [...new Set(workers.map((view) => view.model))].join(", ");
  byId("workers").replaceChildren(...workers.map(({ worker, is_up: isUp, values }) => {
    const cell = (name) => element("td", {}, name in values ? format.number(values[name]) : "");
    const state = element("td", isUp ? {} : { class: "down" }, isUp ? "up" : "silent");
    return element("tr", {}, element("th", { scope: "row" }, worker), state, cell("num_running"), cell("num_waiting"),
      cell("num_swapped"), element("td", {}, ...blocks(values)), cell("num_preemptions"));
  }));
}

function blocks(values) {
  if (!values.num_blocks) return [""];
  const share = values.num_blocks_used / values.num_blocks;
  const fill = element("i");
  fill.style.width = format.percent(share);
  return [element("span", { class: "meter" }, fill), `${format.percent(share)} of ${format.number(values.num_blocks)}`];
}

function drawTiles(data) {
  const { workers, totals } = data.now;
  const sum = (name) => workers.reduce((total, view) => total + (view.values[name] ?? 0), 0);
  const rate = (name) => {
    if (!past.length) return 0;
    return Math.max(0, (1000 * (totals[name] - past[0].totals[name])) / (data.now_ms - past[0].ms));
  };
  const tiles = [
    ["workers up", `${workers.filter((view) => view.is_up).length} of ${workers.length}`],
    ["running", format.number(sum("num_running"))], ["waiting", format.number(sum("num_waiting"))],
    ["swapped", format.number(sum("num_swapped"))],
    ["KV blocks held", format.percent(sum("num_blocks_used") / Math.max(1, sum("num_blocks")))],
    ["tokens/s answered", format.number(rate("generation_tokens"))],
    ["preemptions", format.number(sum("num_preemptions"))],
    ["failovers", format.number(totals.failovers)], ["turned away", format.number(totals.rejections)],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => (
    element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  past = [...past.filter(({ ms }) => data.now_ms - ms < PAST_MS), { ms: data.now_ms, totals }];
}

async function explain(id) {
  detail.open(id);
  try {
    detail.draw(await ask(`v1/requests/${encodeURIComponent(id)}/explain`));
  } catch (error) {
    detail.fail(error.message || "this needs a key");
  }
}

function askForKey(problem) {
  byId("key-form").hidden = false;
  byId("main").hidden = true;
  byId("key-problem").textContent = problem;
  state("a key is needed", "paused");
  byId("key").focus();
}

function state(text, kind) {
  byId("state").className = isPaused ? "paused" : kind;
  byId("state").textContent = isPaused ? "paused" : text;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("main").hidden = false;
});
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  state("live", "");
});
byId("trace").addEventListener("click", async () => {
  try {
    const trace = await ask("dashboard/trace?seconds=60");
    const url = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
    element("a", { href: url, download: "stallfree-trace.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60 * PERIOD_MS);
  } catch (error) {
    state(error.message || "no trace", "lost");
  }
});
for (const id of ["worker", "window"]) byId(id).addEventListener("change", drawSteps);
update();
