// The page: signs in, polls the state each second while visible, and opens screens.
import { ParentCard, VgpuCard, element } from "/cards.js";
import { Screen } from "/rfb.js";

const POLL_MS = 1000, THUMBNAILS_MS = 5000, MAX_SAMPLES = 300, MAX_EVENTS = 200;
const SESSION_KEY = "tessera-session";
const at = (id) => document.getElementById(id);

const seen = { sample: 0, event: 0 };
const samples = [];
const parents = new Map(), vgpus = new Map();
let session = sessionStorage.getItem(SESSION_KEY);
let screen = null, timer = null, thumbnailsAt = 0;

class SignedOut extends Error {}

async function request(path, options = {}) {
  const headers = { Authorization: `Bearer ${session}`, ...options.headers };
  const response = await fetch(path, { ...options, headers, credentials: "omit" });
  if (response.status === 401) throw new SignedOut((await response.json()).error.message);
  return response;
}

async function signIn(ticket) {
  const body = JSON.stringify({ ticket });
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/api/enter", { method: "POST", body, headers, credentials: "omit" });
  const reply = await response.json();
  if (!response.ok) return signOut(reply.error.message);
  session = reply.session;
  sessionStorage.setItem(SESSION_KEY, session);
  start();
}

function signOut(reason) {
  clearTimeout(timer);
  timer = null;
  session = null;
  sessionStorage.removeItem(SESSION_KEY);
  closeScreen();
  at("console").hidden = true;
  at("door").hidden = false;
  if (reason) at("why").textContent = reason;
  at("connection").textContent = "";
}

function start() {
  at("door").hidden = true;
  at("console").hidden = false;
  poll();
}

async function poll() {
  clearTimeout(timer);
  timer = null;
  try {
    const response = await request(`/api/state/${seen.sample}/${seen.event}`);
    show(await response.json());
    status("", false);
    if (Date.now() - thumbnailsAt > THUMBNAILS_MS) {
      thumbnailsAt = Date.now();
      await Promise.all([...vgpus].map(([uuid, card]) => thumbnail(uuid, card)));
    }
  } catch (error) {
    if (error instanceof SignedOut) return signOut(error.message);
    status("vgpud does not answer", true);
  }
  if (session && !document.hidden) timer = setTimeout(poll, POLL_MS);
}

function status(text, bad) {
  const node = at("connection");
  if (node.textContent !== text) node.textContent = text;
  node.classList.toggle("bad", bad);
}

/** Shows one card per item of a list, in its order, and removes the cards of other items. */
function showCards(parent, known, list, name, create) {
  const names = new Set(list.map(name));
  for (const [old, card] of known) {
    if (!names.has(old)) { card.node.remove(); card.showThumbnail?.(null, ""); known.delete(old); }
  }
  list.forEach((item, index) => {
    let card = known.get(name(item));
    if (!card) known.set(name(item), card = create(name(item)));
    if (parent.children[index] !== card.node) parent.insertBefore(card.node, parent.children[index] ?? null);
  });
}

function show(state) {
  samples.push(...state.samples);
  samples.splice(0, Math.max(0, samples.length - MAX_SAMPLES));
  if (samples.length) seen.sample = samples.at(-1).n;
  const now = samples.at(-1)?.at ?? Date.now();
  showCards(at("parents"), parents, state.parents, (parent) => parent.name, (name) => new ParentCard(name));
  for (const parent of state.parents) {
    const stats = state.stats.parents.find((stats) => stats.parent === parent.name);
    const points = samples.filter((sample) => parent.name in sample.parents)
      .map((sample) => [sample.at, sample.parents[parent.name]]);
    parents.get(parent.name).show(parent, stats, points, now);
  }
  const before = vgpus.size;
  showCards(at("vgpus"), vgpus, state.vgpus, (vgpu) => vgpu.uuid, (uuid) => new VgpuCard(uuid, openScreen));
  if (vgpus.size !== before) thumbnailsAt = 0;
  for (const vgpu of state.vgpus) {
    const stats = state.stats.vgpus.find((stats) => stats.uuid === vgpu.uuid);
    const points = samples.filter((sample) => vgpu.uuid in sample.vgpus)
      .map((sample) => [sample.at, ...sample.vgpus[vgpu.uuid]]);
    vgpus.get(vgpu.uuid).show(vgpu, stats, points, now);
  }
  at("none").hidden = state.vgpus.length > 0;
  const running = state.vgpus.filter((vgpu) => vgpu.state === "running");
  const attached = running.filter((vgpu) => vgpu.vm);
  at("summary").textContent =
    `${running.length} vGPUs running, ${attached.length} with a VM, on ${state.parents.length} GPU${state.parents.length === 1 ? "" : "s"}`;
  for (const event of state.events) log(event);
}

function log(event) {
  seen.event = Math.max(seen.event, event.n);
  const time = new Date(event.at);
  const list = at("events");
  const line = element("li", { className: event.kind },
    element("time", { dateTime: time.toISOString() }, time.toLocaleTimeString("en-GB")),
    element("span", { className: "kind" }, event.kind),
    element("span", { className: "about", title: event.about }, vgpus.get(event.about)?.called ?? event.about.slice(0, 8)),
    element("span", {}, event.text));
  line.dataset.at = event.at;
  // Newest first. A late event is inserted by its time.
  const next = [...list.children].find((item) => Number(item.dataset.at) <= event.at);
  list.insertBefore(line, next ?? null);
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}

async function thumbnail(uuid, card) {
  if (!card.head) return;
  const response = await request(`/api/vgpus/${uuid}/thumbnail`);
  if (response.status === 204) card.showThumbnail(null, "The screen is off");
  else if (response.ok) card.showThumbnail(URL.createObjectURL(await response.blob()), "");
  else card.showThumbnail(null, "No picture");
}

function openScreen(uuid) {
  closeScreen();
  const card = vgpus.get(uuid);
  at("screen-title").textContent = `${card?.name.textContent ?? "vGPU"} ${uuid.slice(0, 8)}`;
  at("screen-status").textContent = "Connecting";
  at("cad").hidden = true;
  at("screen").showModal();
  at("canvas").focus();
  screen = new Screen(at("canvas"), uuid, session, (event, { input, error }) => {
    if (event === "open") {
      at("screen-status").textContent = input ? "Live, with keyboard and pointer" : "Live, view only";
      at("cad").hidden = !input;
    } else if (event === "ended" && error !== "Closed") {
      at("screen-status").textContent = error;
    }
  });
}

function closeScreen() {
  screen?.close();
  screen = null;
  if (at("screen").open) at("screen").close();
}

at("close").addEventListener("click", closeScreen);
at("screen").addEventListener("close", closeScreen);
// Escape goes to the guest while the screen has the keyboard.
at("screen").addEventListener("cancel", (event) => {
  if (document.activeElement === at("canvas") && !at("cad").hidden) event.preventDefault();
});
at("full").addEventListener("click", () => at("stage").requestFullscreen());
at("cad").addEventListener("click", () => { screen?.press("ControlLeft", "AltLeft", "Delete"); at("canvas").focus(); });
at("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("ticket").value.trim();
  signIn(text.split("ticket=").at(-1));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && session && !timer) poll(); });

const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
if (ticket) {
  // The ticket is valid once; remove it from the browser's history.
  history.replaceState(null, "", "/");
  signIn(ticket);
} else if (session) {
  start();
} else {
  signOut();
}
