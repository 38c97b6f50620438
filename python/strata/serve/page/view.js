// Puts a /status object on the page. Texts go in as text, never as markup: prompts may hold anything.

import { Chart, SOURCES } from "./chart.js";
import { bytes, bytesOf, clock, compact, count, percent, rate, seconds, visible } from "./format.js";

const byId = (id) => document.getElementById(id);

/** Sets a text only where it changed, so that a selection in it outlives the update. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of `parent` one for each item, from a template; those of known keys stay where they are. */
function list(parent, template, items, keyOf, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item, index));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = byId(template).content.firstElementChild.cloneNode(true);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    fill(child, item);
  });
  known.forEach((child) => child.remove());
}

const part = (node, name) => node.querySelector(`.${name}`);

function share(bar, value, label, text) {
  const percentage = Math.round(100 * Math.min(Math.max(value, 0), 1));
  bar.setAttribute("aria-valuenow", String(percentage));
  bar.setAttribute("aria-label", label);
  bar.setAttribute("aria-valuetext", text);
}

/** Filled to the hundredth: a bar that holds anything shows it. */
function fillBar(node, value) {
  node.style.width = value > 0 ? `max(2px, ${(100 * Math.min(value, 1)).toFixed(2)}%)` : "0";
}

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** A rate over the last whole points: the present one is not over. */
function recentRate(points, secondsPerPoint) {
  const whole = points.slice(-3, -1);
  return sumOf(whole) / (whole.length * secondsPerPoint);
}

function showHead(status) {
  say(byId("model"), status.model);
  say(byId("about"), `context ${count(status.context_tokens)} tokens · up ${seconds(status.uptime_s)}`);
  say(byId("version"), `Strata ${status.version}`);
  document.title = `${status.running_count} running · ${status.model} · Strata`;
}

function showAlerts(status) {
  const alerts = [
    ...status.problems.map((text) => ["problem", text]),
    ...status.faults.map((fault) => ["fault", `${count(fault.count)} ${fault.what}`]),
    ...status.notes.map((text) => ["note", text]),
  ];
  byId("alerts").hidden = !alerts.length;
  const items = alerts.map(([kind, text]) => {
    const item = document.createElement("li");
    item.className = kind;
    item.textContent = text;
    return item;
  });
  const shown = [...byId("alert-list").children].map((item) => item.className + item.textContent).join("\n");
  if (shown !== items.map((item) => item.className + item.textContent).join("\n")) byId("alert-list").replaceChildren(...items);
}

function showNow(status) {
  say(byId("running-count"), count(status.running_count));
  say(byId("waiting-count"), count(status.waiting_count));
  const { series } = status;
  const prompts = series.device.map((_, point) => sumOf(SOURCES.map((source) => series[source][point])));
  say(byId("prompt-rate"), rate(recentRate(prompts, series.seconds_per_point)));
  say(byId("answer-rate"), rate(recentRate(series.generated, series.seconds_per_point)));
  // Those that wait have a sentence of their own below.
  const active = status.running.filter((request) => request.phase !== "waiting");
  list(byId("running"), "running-row", active, (request) => request.request_id, (row, request) => {
    const done = request.done_tokens / request.prompt_tokens;
    let sentence = `${count(request.generated_tokens)} tokens out, prompt of ${count(request.prompt_tokens)}`;
    if (request.phase === "prefill") {
      sentence = `${count(request.done_tokens)} of ${count(request.prompt_tokens)} tokens`;
      if (request.remaining_s !== null) sentence += `, about ${seconds(request.remaining_s)} left`;
    }
    say(part(row, "id"), `#${request.request_id}`);
    say(part(row, "phase"), request.phase);
    say(part(row, "said"), sentence);
    row.dataset.phase = request.phase;
    fillBar(part(row, "bar").firstElementChild, done);
    share(part(row, "bar"), done, `prompt of request ${request.request_id}`, sentence);
  });
  const unseen = status.running_count - active.length;
  say(byId("running-rest"), active.length ? (unseen > 0 ? `and ${count(unseen)} more` : "") : unseen > 0 ? "" : "Nothing is running.");
  list(byId("waiting"), "waiting-row", status.waiting, (request) => request.request_id, (row, request) => {
    say(part(row, "id"), `#${request.request_id}`);
    say(part(row, "waited"), seconds(request.waited_s));
    say(part(row, "said"), request.why);
  });
  const rest = status.waiting_count - status.waiting.length;
  const more = status.waiting.length ? `and ${count(rest)} more` : `${count(rest)} waiting`;
  say(byId("waiting-rest"), rest > 0 ? more : status.waiting.length ? "" : "Nothing is waiting.");
}

let chart = null;

function showSources(status) {
  const tokens = status.prompt_tokens;
  const all = sumOf(SOURCES.map((source) => tokens[source]));
  say(byId("cached-share"), percent(all - tokens.computed, all));
  say(byId("saved"), seconds(status.saved_s));
  say(byId("saved-lately"), seconds(sumOf(status.series.saved_s)));
  list(byId("legend"), "legend-row", SOURCES, (source) => source, (row, source) => {
    row.dataset.source = source;
    say(part(row, "name"), source);
    say(part(row, "tokens"), `${count(tokens[source])} tokens`);
    say(part(row, "share"), percent(tokens[source], all));
  });
  chart ??= new Chart(byId("chart"), byId("chart-most"), byId("chart-unit"), byId("chart-read"));
  chart.show(status.series);
  const lately = SOURCES.map((source) => `${count(sumOf(status.series[source]))} ${source}`).join(", ");
  byId("chart").setAttribute("aria-label", `Prompt tokens of the last five minutes: ${lately}. Arrow keys read single bars.`);
}

/** Where a time lies between 1 ms and 100 s, by its logarithm. */
const onScale = (time) => Math.min(Math.max((Math.log10(Math.max(time, 1e-3)) + 3) / 5, 0), 1);

function showLatency(status) {
  const rows = [...SOURCES.map((source) => [source, status.ttft[source]]), ["token gaps", status.token_gaps]];
  list(byId("latency"), "latency-row", rows, ([name]) => name, (row, [name, times]) => {
    row.dataset.source = name;
    say(part(row, "name"), name);
    say(part(row, "p50"), seconds(times.p50_s));
    say(part(row, "p99"), seconds(times.p99_s));
    say(part(row, "count"), compact(times.count));
    const strip = row.querySelector(".strip i");
    strip.hidden = times.p50_s === null;
    if (times.p50_s === null) return;
    strip.style.left = `${(100 * onScale(times.p50_s)).toFixed(1)}%`;
    strip.style.width = `max(6px, ${(100 * (onScale(times.p99_s) - onScale(times.p50_s))).toFixed(1)}%)`;
  });
}

function showTiers(status) {
  list(byId("tiers"), "tier-row", status.tiers, (tier) => tier.name, (row, tier) => {
    row.dataset.source = tier.name;
    row.dataset.up = String(tier.up);
    say(part(row, "name"), tier.name);
    say(part(row, "up"), tier.up ? "up" : "off");
    const used = tier.up ? `${bytesOf(tier.used_bytes, tier.capacity_bytes)} (${percent(tier.used_bytes, tier.capacity_bytes)})` : "";
    say(part(row, "used"), used);
    const bar = part(row, "bar");
    bar.hidden = !tier.up;
    const most = tier.capacity_bytes || 1;
    fillBar(part(row, "kept"), Math.max(0, tier.used_bytes - tier.pinned_bytes) / most);
    fillBar(part(row, "pinned"), tier.pinned_bytes / most);
    share(bar, tier.used_bytes / most, `${tier.name} tier`, `${used}, ${bytes(tier.pinned_bytes)} pinned`);
    const facts = [
      `${count(tier.used_tokens)} tokens kept`,
      `${bytes(tier.pinned_bytes)} pinned`,
      `${count(tier.hit_tokens)} tokens served`,
      `${count(tier.evicted_pages)} pages evicted`,
    ];
    say(part(row, "facts"), tier.up ? facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ") : tier.off_reason ?? "");
    say(part(row, "detail"), tier.up ? tier.detail : "");
  });
}

function showLinks(status) {
  list(byId("links"), "link-row", status.links, (link) => link.name, (row, link) => {
    const limit = link.limit_bytes_per_s;
    row.dataset.source = link.of === "disk" || link.to === "disk" ? "disk" : "host";
    say(part(row, "name"), link.name);
    say(part(row, "way"), `${link.of} → ${link.to}`);
    const used = limit ? `${bytesOf(link.bytes_per_s, limit)}/s` : `${bytes(link.bytes_per_s)}/s, limit unknown`;
    say(part(row, "used"), used);
    fillBar(part(row, "kept"), limit ? link.bytes_per_s / limit : 0);
    share(part(row, "bar"), limit ? link.bytes_per_s / limit : 0, `${link.name}, ${link.of} to ${link.to}`, used);
  });
  say(byId("stall"), `Steps waited for loads for ${percent(status.stall_share, 1)} of the last minute. Rates are means of 10 s.`);
}

const ENDS = { stop: "stop", length: "length", abort: "aborted" };

function showRequests(status) {
  list(byId("requests"), "request-row", status.requests, (request) => `${request.request_id} ${request.unix_s}`, (row, request) => {
    say(part(row, "id"), `#${request.request_id}`);
    say(part(row, "when"), clock(request.unix_s));
    say(part(row, "client"), request.client_id ?? "");
    say(part(row, "tokens"), `${count(request.prompt_tokens)} tokens`);
    const { sources } = request;
    for (const source of SOURCES) {
      row.querySelector(`.mix .${source}`).style.flexGrow = sources ? String(sources[source]) : "0";
    }
    const parts = sources ? SOURCES.filter((source) => sources[source]) : [];
    say(part(row, "sources"), parts.map((source) => `${count(sources[source])} ${source === "computed" && request.ttft_s === null && request.finish_reason === null ? "to compute" : source}`).join(", "));
    say(part(row, "ttft"), seconds(request.ttft_s));
    say(part(row, "total"), seconds(request.total_s));
    say(part(row, "out"), count(request.generated_tokens));
    const end = request.finish_reason;
    const failed = end !== null && !(end in ENDS);
    say(part(row, "end"), end === null ? "running" : failed ? "failed" : ENDS[end]);
    part(row, "end").dataset.kind = failed ? "failed" : end ?? "running";
    say(part(row, "sentence"), failed ? end : request.why ?? "waits");
    const parting = part(row, "parting");
    const divergence = request.divergence;
    parting.hidden = !divergence || divergence.here === null;
    if (parting.hidden) return;
    parting.querySelectorAll(".before").forEach((node) => say(node, visible(divergence.before)));
    say(part(parting, "here"), visible(divergence.here));
    say(part(parting, "there"), visible(divergence.there));
    say(part(parting, "other"), `#${divergence.request_id}`);
  });
  say(byId("requests-rest"), status.requests.length ? "" : "No request yet.");
}

/** Shows everything that a /status object holds. */
export function show(status) {
  showHead(status);
  showAlerts(status);
  showNow(status);
  showSources(status);
  showLatency(status);
  showTiers(status);
  showLinks(status);
  showRequests(status);
}

/** What a flush has forgotten, from its answer. */
export function flushedSentence(done) {
  const tiers = SOURCES.slice(0, 3);
  const pages = (what) => tiers.filter((tier) => done[`${tier}_${what}`]).map((tier) => `${count(done[`${tier}_${what}`])} on ${tier}`);
  const [dropped, kept] = [pages("dropped"), pages("kept")];
  const forgotten = dropped.length ? `pages forgotten: ${dropped.join(", ")}` : "no page was free to be forgotten";
  return kept.length ? `${forgotten}; in use and kept: ${kept.join(", ")}` : dropped.length ? forgotten : "nothing was cached";
}

/** What a flush would forget, in a sentence. */
export function flushSentence(status) {
  const up = status ? status.tiers.filter((tier) => tier.up) : [];
  const kept = up.map((tier) => `${bytes(tier.used_bytes)} on ${tier.name}`).join(", ");
  return (
    `Every page that no request uses is forgotten in all tiers${kept ? ` (now ${kept})` : ""}, records on disk too. ` +
    "It cannot be undone: prompts are computed again. Running requests go on."
  );
}
