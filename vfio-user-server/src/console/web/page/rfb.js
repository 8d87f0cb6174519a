// A screen on a WebSocket: as much of RFB (RFC 6143) as this console's own server speaks to it.
import { SCAN_CODES } from "/keys.js";

const TIGHT_PNG = -260, DESKTOP_SIZE = -223, KEY_PLACES = -258;
const ENCODINGS = [TIGHT_PNG, DESKTOP_SIZE, KEY_PLACES];
const BUTTONS = [0, 1, 2];
const TEXT = new TextDecoder();

/** Bytes as they come, read as they are needed. */
class Stream {
  #chunks = [];
  #length = 0;
  #wake = null;
  #ended = null;

  push(buffer) {
    this.#chunks.push(new Uint8Array(buffer));
    this.#length += buffer.byteLength;
    this.#wake?.();
  }

  end(why) {
    this.#ended = why;
    this.#wake?.();
  }

  async read(count) {
    while (this.#length < count) {
      if (this.#ended) throw new Error(this.#ended);
      await new Promise((resolve) => { this.#wake = resolve; });
    }
    const bytes = new Uint8Array(count);
    for (let at = 0; at < count;) {
      const chunk = this.#chunks[0];
      const part = chunk.subarray(0, count - at);
      bytes.set(part, at);
      at += part.length;
      if (part.length === chunk.length) this.#chunks.shift();
      else this.#chunks[0] = chunk.subarray(part.length);
    }
    this.#length -= count;
    return bytes;
  }

  async view(count) {
    return new DataView((await this.read(count)).buffer);
  }
}

/** One screen on one canvas, until it is closed. */
export class Screen {
  #socket;
  #stream = new Stream();
  #canvas;
  #context;
  #tell;
  #places = false;
  #held = new Set();
  #listening = new AbortController();
  #updates = 0;

  /** `tell(what, {name, error})` is called with "open", "picture" and "ended". */
  constructor(canvas, uuid, session, tell) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
    this.#tell = tell;
    const url = `ws://${location.host}/api/vgpus/${uuid}/screen`;
    this.#socket = new WebSocket(url, ["tessera-rfb", `tessera-session.${session}`]);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onmessage = (event) => this.#stream.push(event.data);
    this.#socket.onclose = () => this.#stream.end("The screen is not served any more");
    this.#run().catch((error) => {
      this.close();
      this.#tell("ended", { error: error.message });
    });
  }

  close() {
    this.#listening.abort();
    this.#release();
    this.#socket.onclose = null;
    this.#socket.close();
    this.#stream.end("Closed");
  }

  async #run() {
    await this.#stream.read(12);
    this.#send(new TextEncoder().encode("RFB 003.008\n"));
    const [ways] = await this.#stream.read(1);
    await this.#stream.read(ways);
    this.#send([1]);
    if ((await this.#stream.view(4)).getUint32(0) !== 0) throw new Error("Refused");
    this.#send([1]);
    const init = await this.#stream.view(24);
    this.#resize(init.getUint16(0), init.getUint16(2));
    const name = TEXT.decode(await this.#stream.read(init.getUint32(20)));
    const encodings = new DataView(new ArrayBuffer(4 + 4 * ENCODINGS.length));
    encodings.setUint8(0, 2);
    encodings.setUint16(2, ENCODINGS.length);
    ENCODINGS.forEach((number, place) => encodings.setInt32(4 + 4 * place, number));
    this.#send(encodings);
    const input = !name.endsWith("(view only)");
    if (input) this.#listen();
    this.#tell("open", { name, input });
    this.#ask(false);
    for (;;) await this.#message();
  }

  async #message() {
    const [kind] = await this.#stream.read(1);
    if (kind !== 0) throw new Error(`The server sent a message of type ${kind}`);
    const count = (await this.#stream.view(3)).getUint16(1);
    for (let rect = 0; rect < count; rect++) await this.#rect();
    this.#canvas.dataset.updates = ++this.#updates;
    this.#tell("picture", {});
    // Asked for once it is drawn: a page that is slow or hidden is sent nothing.
    requestAnimationFrame(() => this.#ask(true));
  }

  async #rect() {
    const head = await this.#stream.view(12);
    const [x, y, width, height] = [0, 2, 4, 6].map((at) => head.getUint16(at));
    switch (head.getInt32(8)) {
      case DESKTOP_SIZE:
        this.#resize(width, height);
        break;
      case KEY_PLACES:
        this.#places = true;
        break;
      case TIGHT_PNG: {
        const [control] = await this.#stream.read(1);
        if (control !== 0xa0) throw new Error("A rectangle is not a PNG");
        let length = 0;
        for (const shift of [0, 7, 14]) {
          const [byte] = await this.#stream.read(1);
          length |= (shift === 14 ? byte : byte & 0x7f) << shift;
          if (!(byte & 0x80)) break;
        }
        const png = new Blob([await this.#stream.read(length)], { type: "image/png" });
        const exact = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
        const image = await createImageBitmap(png, exact);
        this.#context.drawImage(image, x, y);
        image.close();
        break;
      }
      default:
        throw new Error("The server sent an encoding that was not asked for");
    }
  }

  #resize(width, height) {
    this.#canvas.width = width;
    this.#canvas.height = height;
  }

  #send(bytes) {
    if (this.#socket.readyState !== WebSocket.OPEN) return;
    this.#socket.send(bytes instanceof DataView ? bytes : Uint8Array.from(bytes));
  }

  #ask(incremental) {
    const message = new DataView(new ArrayBuffer(10));
    message.setUint8(0, 3);
    message.setUint8(1, incremental ? 1 : 0);
    message.setUint16(6, this.#canvas.width);
    message.setUint16(8, this.#canvas.height);
    this.#send(message);
  }

  #key(code, down) {
    const place = SCAN_CODES.get(code);
    if (place === undefined || !this.#places) return false;
    if (down) this.#held.add(code);
    else if (!this.#held.delete(code)) return true;
    const message = new DataView(new ArrayBuffer(12));
    message.setUint8(0, 255);
    message.setUint16(2, down ? 1 : 0);
    message.setUint32(8, place);
    this.#send(message);
    return true;
  }

  #release() {
    for (const code of [...this.#held]) this.#key(code, false);
  }

  /** Presses keys together, and lets them go. */
  press(...codes) {
    for (const code of codes) this.#key(code, true);
    for (const code of codes.reverse()) this.#key(code, false);
  }

  #pointer(event, wheel = 0) {
    const box = this.#canvas.getBoundingClientRect();
    const along = (at, from, length, pixels) =>
      Math.max(0, Math.min(pixels - 1, Math.floor((at - from) / length * pixels)));
    const message = new DataView(new ArrayBuffer(6));
    const held = BUTTONS.filter((button) => event.buttons >> button & 1);
    // A browser's second button is the right one, RFB's is the middle one.
    const mask = held.reduce((mask, button) => mask | [1, 4, 2][button], wheel);
    message.setUint8(0, 5);
    message.setUint8(1, mask);
    message.setUint16(2, along(event.clientX, box.left, box.width, this.#canvas.width));
    message.setUint16(4, along(event.clientY, box.top, box.height, this.#canvas.height));
    this.#send(message);
  }

  #listen() {
    const on = (name, act) => this.#canvas.addEventListener(name, (event) => {
      if (act(event) !== false) event.preventDefault();
    }, { signal: this.#listening.signal, passive: false });
    // Shift-Tab leaves the screen, so that the keyboard is not caught in it.
    on("keydown", (event) => !(event.code === "Tab" && event.shiftKey) && this.#key(event.code, true));
    on("keyup", (event) => this.#key(event.code, false));
    on("blur", () => this.#release());
    on("pointermove", (event) => this.#pointer(event));
    on("pointerdown", (event) => { this.#canvas.focus(); this.#pointer(event); });
    on("pointerup", (event) => this.#pointer(event));
    on("contextmenu", () => {});
    on("wheel", (event) => {
      this.#pointer(event, event.deltaY < 0 ? 8 : 16);
      this.#pointer(event);
    });
  }
}
