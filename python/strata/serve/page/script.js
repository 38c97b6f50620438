// Asks /status every two seconds while somebody looks, for the key where the server wants one, and before it flushes.

import { clock, count } from "./format.js";
import { flushedSentence, flushSentence, show } from "./view.js";

const EVERY_MS = 2000;
const LIMIT_MS = 10000;
const SAID_MS = 6000;
const KEY = "strata-key";
const byId = (id) => document.getElementById(id);

let latest = null;
let timer = 0;
let asking = false;
let unreachableSince = null;
let heldUntil = 0;

/** Says how the server is; what came of an order stays for a while. */
function state(kind, text, heldMs = 0) {
  if (kind === "ok" && !heldMs && Date.now() < heldUntil) return;
  heldUntil = Date.now() + heldMs;
  const node = byId("state");
  if (node.dataset.kind !== kind) node.dataset.kind = kind;
  if (node.textContent !== text) node.textContent = text;
  document.body.classList.toggle("stale", kind === "lost");
}

/** Fetches from this server with the key, if one was given. Throws for what is no 2xx, with the server's sentence. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the server answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

async function look() {
  clearTimeout(timer);
  if (asking || paused() || document.hidden || byId("key-dialog").open) return;
  asking = true;
  try {
    latest = await ask("/status", { signal: AbortSignal.timeout(LIMIT_MS) });
    unreachableSince = null;
    show(latest);
    if (!paused()) state(latest.ok ? "ok" : "lost", latest.ok ? (latest.ready ? "serving" : "not ready") : "the engine has stopped");
    byId("forget").hidden = !sessionStorage.getItem(KEY);
  } catch (error) {
    failed(error);
  } finally {
    asking = false;
  }
  timer = setTimeout(look, EVERY_MS);
}

function failed(error) {
  if (error.status === 401) {
    askForKey(sessionStorage.getItem(KEY) ? error.message : "");
  } else if (error.status) {
    state("lost", error.message);
  } else if (error.name === "TypeError" || error.name === "TimeoutError") {
    unreachableSince ??= Date.now() / 1000;
    state("lost", `unreachable since ${clock(unreachableSince)}`);
  } else {
    // A defect of the page: say so where it is seen, and in the console.
    state("lost", `this page failed: ${error.message}`);
    console.error(error);
  }
}

const paused = () => byId("pause").getAttribute("aria-pressed") === "true";

function complain(node, text) {
  node.textContent = text;
  node.hidden = !text;
}

function askForKey(complaint) {
  state("wait", "a key is needed");
  complain(byId("key-error"), complaint);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-dialog").close();
});
byId("key-dialog").addEventListener("close", look);

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  byId("forget").hidden = true;
  look();
});

byId("pause").addEventListener("click", () => {
  byId("pause").setAttribute("aria-pressed", String(!paused()));
  byId("pause").textContent = paused() ? "Resume" : "Pause";
  if (paused()) state("wait", "paused");
  else look();
});

byId("flush").addEventListener("click", () => {
  complain(byId("flush-error"), "");
  byId("flush-text").textContent = flushSentence(latest);
  byId("flush-dialog").showModal();
});

byId("flush-confirm").addEventListener("click", async () => {
  const confirm = byId("flush-confirm");
  confirm.disabled = true;
  complain(byId("flush-error"), "");
  try {
    const { dropped } = await ask("/cache/flush", { method: "POST" });
    byId("flush-dialog").close();
    await look();
    state("ok", flushedSentence(dropped), SAID_MS);
  } catch (error) {
    if (error.status === 401) {
      byId("flush-dialog").close();
      askForKey(error.message);
    } else {
      complain(byId("flush-error"), `It was not flushed: ${error.message}`);
    }
  } finally {
    confirm.disabled = false;
  }
});

document.addEventListener("visibilitychange", look);
look();
