// The page: signs in, asks for what is new each second while it can be seen, and opens screens.
import { ParentCard, VgpuCard, element } from "/cards.js";
import { Screen } from "/rfb.js";

const EVERY = 1000, PICTURE_EVERY = 5000, KEPT = 300, EVENTS_KEPT = 200;
const KEY = "tessera-session";
const at = (id) => document.getElementById(id);

const seen = { sample: 0, event: 0 };
const samples = [];
const parents = new Map(), vgpus = new Map();
let session = sessionStorage.getItem(KEY);
let screen = null, timer = null, pictured = 0;

class SignedOut extends Error {}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${session}`, ...options.headers };
  const answer = await fetch(path, { ...options, headers, credentials: "omit" });
  if (answer.status === 401) throw new SignedOut((await answer.json()).error.message);
  return answer;
}

async function enter(ticket) {
  const body = JSON.stringify({ ticket });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch("/api/enter", { method: "POST", body, headers, credentials: "omit" });
  const said = await answer.json();
  if (!answer.ok) return leave(said.error.message);
  session = said.session;
  sessionStorage.setItem(KEY, session);
  begin();
}

function leave(why) {
  clearTimeout(timer);
  timer = null;
  session = null;
  sessionStorage.removeItem(KEY);
  closeScreen();
  at("console").hidden = true;
  at("door").hidden = false;
  if (why) at("why").textContent = why;
  at("connection").textContent = "";
}

function begin() {
  at("door").hidden = true;
  at("console").hidden = false;
  look();
}

async function look() {
  clearTimeout(timer);
  timer = null;
  try {
    const answer = await ask(`/api/state/${seen.sample}/${seen.event}`);
    show(await answer.json());
    status("", false);
    if (Date.now() - pictured > PICTURE_EVERY) {
      pictured = Date.now();
      await Promise.all([...vgpus].map(([uuid, card]) => picture(uuid, card)));
    }
  } catch (error) {
    if (error instanceof SignedOut) return leave(error.message);
    status("vgpud does not answer", true);
  }
  if (session && !document.hidden) timer = setTimeout(look, EVERY);
}

function status(text, bad) {
  const where = at("connection");
  if (where.textContent !== text) where.textContent = text;
  where.classList.toggle("bad", bad);
}

/** Cards for what there is, in its order; those of what is gone are taken away. */
function cards(where, known, list, name, make) {
  const names = new Set(list.map(name));
  for (const [old, card] of known) {
    if (!names.has(old)) { card.node.remove(); card.picture?.(null, ""); known.delete(old); }
  }
  list.forEach((one, place) => {
    let card = known.get(name(one));
    if (!card) known.set(name(one), card = make(name(one)));
    if (where.children[place] !== card.node) where.insertBefore(card.node, where.children[place] ?? null);
  });
}

function show(told) {
  samples.push(...told.samples);
  samples.splice(0, Math.max(0, samples.length - KEPT));
  if (samples.length) seen.sample = samples.at(-1).n;
  const now = samples.at(-1)?.at ?? Date.now();
  cards(at("parents"), parents, told.parents, (one) => one.name, (name) => new ParentCard(name));
  for (const parent of told.parents) {
    const stats = told.stats.parents.find((one) => one.parent === parent.name);
    const points = samples.filter((one) => parent.name in one.parents).map((one) => [one.at, one.parents[parent.name]]);
    parents.get(parent.name).show(parent, stats, points, now);
  }
  const before = vgpus.size;
  cards(at("vgpus"), vgpus, told.vgpus, (one) => one.uuid, (uuid) => new VgpuCard(uuid, openScreen));
  if (vgpus.size !== before) pictured = 0;
  for (const vgpu of told.vgpus) {
    const stats = told.stats.vgpus.find((one) => one.uuid === vgpu.uuid);
    const points = samples.filter((one) => vgpu.uuid in one.vgpus).map((one) => [one.at, ...one.vgpus[vgpu.uuid]]);
    vgpus.get(vgpu.uuid).show(vgpu, stats, points, now);
  }
  at("none").hidden = told.vgpus.length > 0;
  const running = told.vgpus.filter((one) => one.state === "running");
  const attached = running.filter((one) => one.vm);
  at("summary").textContent =
    `${running.length} vGPUs run, ${attached.length} with a VM, on ${told.parents.length} GPU${told.parents.length === 1 ? "" : "s"}`;
  for (const event of told.events) log(event);
}

function log(event) {
  seen.event = Math.max(seen.event, event.n);
  const time = new Date(event.at);
  const list = at("events");
  const line = element("li", { className: event.kind },
    element("time", { dateTime: time.toISOString() }, time.toLocaleTimeString("en-GB")),
    element("span", { className: "kind" }, event.kind),
    element("span", { className: "about", title: event.about }, event.about.slice(0, 8)),
    element("span", {}, event.text));
  line.dataset.at = event.at;
  // Newest first; what is told late still has its place.
  const next = [...list.children].find((one) => Number(one.dataset.at) <= event.at);
  list.insertBefore(line, next ?? null);
  while (list.children.length > EVENTS_KEPT) list.lastChild.remove();
}

async function picture(uuid, card) {
  if (!card.head) return;
  const answer = await ask(`/api/vgpus/${uuid}/thumbnail`);
  if (answer.status === 204) card.picture(null, "The screen is off");
  else if (answer.ok) card.picture(URL.createObjectURL(await answer.blob()), "");
  else card.picture(null, "No picture");
}

function openScreen(uuid) {
  closeScreen();
  const card = vgpus.get(uuid);
  at("screen-title").textContent = `${card?.name.textContent ?? "vGPU"} ${uuid.slice(0, 8)}`;
  at("screen-status").textContent = "Connecting";
  at("cad").hidden = true;
  at("screen").showModal();
  at("canvas").focus();
  screen = new Screen(at("canvas"), uuid, session, (what, { input, error }) => {
    if (what === "open") {
      at("screen-status").textContent = input ? "Live, with keyboard and pointer" : "Live, view only";
      at("cad").hidden = !input;
    } else if (what === "ended" && error !== "Closed") {
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
// Escape is the guest's while its screen has the keyboard.
at("screen").addEventListener("cancel", (event) => {
  if (document.activeElement === at("canvas") && !at("cad").hidden) event.preventDefault();
});
at("full").addEventListener("click", () => at("stage").requestFullscreen());
at("cad").addEventListener("click", () => { screen?.press("ControlLeft", "AltLeft", "Delete"); at("canvas").focus(); });
at("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("ticket").value.trim();
  enter(text.split("ticket=").at(-1));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && session && !timer) look(); });

const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
if (ticket) {
  // It is used up by this, and need not stay in the history.
  history.replaceState(null, "", "/");
  enter(ticket);
} else if (session) {
  begin();
} else {
  leave();
}
