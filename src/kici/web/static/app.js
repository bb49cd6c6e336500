// The status page: asks the API every two seconds while it is looked at.  Texts of the API enter the page as text only.

const API = "/api/v1";
const PASS_MS = 2000;
const LOG_CHUNKS_MAX = 5000;
const SHORT_CHARS = 32;
const OVER = new Set(["success", "failed", "cancelled", "timed_out", "unroutable", "skipped"]);
const TONES = {
  success: "good", idle: "good", ready: "good", running: "busy", busy: "busy", booting: "busy",
  failed: "bad", timed_out: "bad", unroutable: "bad", backoff: "bad", cancelled: "warn", cancelling: "warn",
  recovering: "warn", draining: "warn", retiring: "warn", ending: "warn", away: "warn",
};

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const response = await fetch(path, { credentials: "same-origin", ...options });
  if (response.status === 204) return null;
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, answer.detail ?? response.statusText);
  return answer;
}

// What the caller may not see is left out.
async function askIfAllowed(path) {
  try {
    return await ask(path);
  } catch (error) {
    if (error.status === 403) return null;
    throw error;
  }
}

function words(status) {
  return element("span", { className: TONES[status] ?? "quiet", textContent: status.replaceAll("_", " ") });
}

function ago(text) {
  if (!text) return "";
  const seconds = Math.max(0, (Date.now() - Date.parse(text)) / 1000);
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(text).toLocaleDateString();
}

function took(job) {
  if (!job.startedAt) return "";
  const end = job.finishedAt ? Date.parse(job.finishedAt) : Date.now();
  return `${((end - Date.parse(job.startedAt)) / 1000).toFixed(1)} s`;
}

function jobLink(job) {
  return element("a", { href: `/jobs/${encodeURIComponent(job.id)}`, textContent: job.name, title: job.id });
}

function table(head, rows, empty) {
  if (!rows.length) return element("p", { className: "quiet", textContent: empty });
  const header = element("tr", {}, ...head.map((name) => element("th", { scope: "col", textContent: name })));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => {
    const isShort = typeof cell === "string" && cell.length < SHORT_CHARS;
    return element("td", { className: isShort ? "nowrap" : "" }, cell ?? "");
  })));
  const made = element("table", {}, element("thead", {}, header), element("tbody", {}, ...body));
  return element("div", { className: "scroll" }, made);
}

function show(id, content) {
  byId(id).replaceChildren(content);
}

function view(name) {
  byId("main").replaceChildren(byId(name).content.cloneNode(true));
}

// --- overview

function tile(number, name, tone = "") {
  return element("div", { className: "tile" }, element("b", { textContent: String(number), className: tone }), name);
}

async function overview() {
  const [jobs, running, queue, agents, scalers, drain] = await Promise.all([
    ask(`${API}/jobs?limit=50`),
    ask(`${API}/jobs?status=running&limit=500`),
    ask(`${API}/admin/queue?limit=20`),
    askIfAllowed(`${API}/admin/agents`),
    askIfAllowed(`${API}/admin/scalers`),
    askIfAllowed(`${API}/admin/drain`),
  ]);
  byId("draining").hidden = !drain?.draining;
  byId("tiles").replaceChildren(
    tile(queue.depth, "waiting", queue.depth ? "busy" : ""),
    tile(`${running.items.length}${running.nextCursor ? "+" : ""}`, "running", running.items.length ? "busy" : ""),
    tile(jobs.items.filter((job) => job.status === "failed").length, "failed of the last 50"),
    tile(agents ? agents.items.length : "–", "agents"),
  );
  show("queue", table(["Job", "Waits since", "Why"], queue.items.map((job) => [
    jobLink(job), ago(job.queuedAt), job.verdict ?? "",
  ]), "Nothing waits."));
  show("jobs", table(["Job", "Status", "Took", "Agent", "Created", "Ended"], jobs.items.map((job) => [
    jobLink(job), words(job.status), took(job), job.agentId ?? "", ago(job.createdAt),
    OVER.has(job.status) && job.status !== "success" ? job.verdict ?? "" : "",
  ]), "No jobs yet: kici run -- echo hello"));
  show("scalers", scalers === null ? hidden() : table(
    ["Scaler", "Type", "State", "Agents", "Starting", "Label sets", "Last error"], scalers.items.map((scaler) => [
      scaler.name, scaler.type, words(scaler.state), `${scaler.active} of ${scaler.maxAgents ?? "any"}`,
      String(scaler.booting), scaler.labelSets.map((labels) => labels.join(" ")).join(" | "), scaler.lastError ?? "",
    ]), "No scalers: only agents that register by themselves run jobs."));
  show("agents", agents === null ? hidden() : table(
    ["Agent", "State", "Scaler", "Jobs", "Since", "Labels"], agents.items.map((agent) => [
      agent.id, words(agent.state), agent.scaler ?? "", agent.jobIds.join(" "), ago(agent.since), agent.labels.join(" "),
    ]), "No agents now; scalers make them when jobs wait."));
}

function hidden() {
  return element("p", { className: "quiet", textContent: "Your role does not show this." });
}

// --- one job

let source = null;

async function jobPage(id) {
  const path = `${API}/jobs/${encodeURIComponent(id)}`;
  const job = await ask(path);
  document.title = `${job.name} – KiCI`;
  byId("job-name").textContent = job.name;
  byId("job-status").replaceChildren(words(job.status));
  byId("job-verdict").textContent = job.verdict ?? "";
  const facts = {
    id: job.id, run: job.runId, "runs on": job.runsOn.join(" "), agent: job.agentId, scaler: job.scaler,
    image: job.image, created: new Date(job.createdAt).toLocaleString(), took: took(job),
    "exit code": job.exitCode, signal: job.signal, needs: job.needs.join(" "),
  };
  byId("job-facts").replaceChildren(...Object.entries(facts)
    .filter(([, value]) => value !== null && value !== "")
    .flatMap(([name, value]) => [
      element("dt", { textContent: name }), element("dd", { textContent: String(value) }),
    ]));
  const cancel = byId("job-cancel");
  cancel.hidden = OVER.has(job.status) || !may("run.cancel");
  cancel.onclick = async () => {
    cancel.disabled = true;
    const sent = ask(`${path}/cancel`, { method: "POST" });
    await sent.catch((error) => { byId("job-verdict").textContent = error.message; });
    cancel.disabled = false;
  };
  if (["queued", "pending"].includes(job.status)) {
    const explanation = await ask(`${path}/explain`);
    byId("job-why").replaceChildren(...explanation.why.map((each) => element("li", {
      textContent: each.sentence, title: each.instance ?? "",
    })));
  } else {
    byId("job-why").replaceChildren();
  }
  if (source === null) followLog(path);
  return OVER.has(job.status);
}

function followLog(path) {
  const log = byId("log");
  const decoders = {};
  source = new EventSource(`${path}/logs`);
  for (const stream of ["stdout", "stderr", "system"]) {
    decoders[stream] = new TextDecoder();
    source.addEventListener(stream, (event) => {
      const data = JSON.parse(event.data);
      const bytes = data.base64 === undefined
        ? new TextEncoder().encode(data.text)
        : Uint8Array.from(atob(data.base64), (each) => each.charCodeAt(0));
      const text = decoders[stream].decode(bytes, { stream: true });
      append(log, stream, text);
    });
  }
  source.addEventListener("end", () => {
    source.close();
    if (!log.childNodes.length) append(log, "system", "no output\n");
  });
}

function append(log, stream, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  // eslint-disable-next-line no-control-regex
  const plain = text.replace(/\u001b\[[0-9;?]*[A-Za-z]/g, "");
  log.append(element("span", { className: stream, textContent: plain }));
  while (log.childNodes.length > LOG_CHUNKS_MAX) log.firstChild.remove();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// --- sessions

let me = null;

function may(permission) {
  return me.permissions.includes(permission);
}

async function start() {
  try {
    me = await ask(`${API}/whoami`);
  } catch (error) {
    if (error.status === 401) return login();
    throw error;
  }
  byId("who").textContent = `${me.name} (${me.role})`;
  byId("where").textContent = `${me.instance} · ${me.version}`;
  byId("logout").hidden = false;
  const match = /^\/jobs\/([^/]+)$/.exec(location.pathname);
  view(match ? "job-view" : "overview-view");
  return loop(match ? () => jobPage(decodeURIComponent(match[1])) : overview);
}

async function loop(pass) {
  for (;;) {
    if (!document.hidden) {
      try {
        const isOver = await pass();
        byId("lost").hidden = true;
        if (isOver) return undefined;
      } catch (error) {
        if (error.status === 401) return login();
        if (error.status === 404) {
          byId("main").replaceChildren(element("p", { className: "bad", textContent: error.message }));
          return undefined;
        }
        byId("lost").hidden = false;
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, PASS_MS); });
  }
}

function login() {
  byId("logout").hidden = true;
  byId("who").textContent = "";
  view("login-view");
  byId("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token: byId("token").value.trim() }),
    };
    try {
      await ask("/login", options);
      location.reload();
    } catch (error) {
      byId("login-error").textContent = error.message;
    }
  });
}

byId("logout").addEventListener("click", async () => {
  await ask("/logout", { method: "POST" });
  location.assign("/");
});

start().catch((error) => {
  byId("main").replaceChildren(element("p", { className: "bad", textContent: `The coordinator does not answer: ${error.message}` }));
  setTimeout(() => location.reload(), 5000);
});
