// RFB client (RFC 6143) on a WebSocket, limited to the features of this console's server.
import { SCAN_CODES } from "/keys.js";

const TIGHT_PNG = -260, DESKTOP_SIZE = -223, QEMU_EXTENDED_KEY = -258;
const ENCODINGS = [TIGHT_PNG, DESKTOP_SIZE, QEMU_EXTENDED_KEY];
const BUTTONS = [0, 1, 2];
const TEXT = new TextDecoder();

/** Buffer between received messages and reads of a number of bytes. */
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

  end(reason) {
    this.#ended = reason;
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

/** A vGPU's screen on a canvas. */
export class Screen {
  #socket;
  #stream = new Stream();
  #canvas;
  #context;
  #notify;
  #extendedKeys = false;
  #held = new Set();
  #listening = new AbortController();
  #updates = 0;

  /** Calls `notify(event, {name, input, error})` with the events "open", "picture" and "ended". */
  constructor(canvas, uuid, session, notify) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
    this.#notify = notify;
    const url = `ws://${location.host}/api/vgpus/${uuid}/screen`;
    this.#socket = new WebSocket(url, ["tessera-rfb", `tessera-session.${session}`]);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onmessage = (event) => this.#stream.push(event.data);
    this.#socket.onclose = () => this.#stream.end("The server has closed the connection");
    this.#run().catch((error) => {
      this.close();
      this.#notify("ended", { error: error.message });
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
    const [count] = await this.#stream.read(1);
    await this.#stream.read(count);
    this.#send([1]);
    if ((await this.#stream.view(4)).getUint32(0) !== 0) throw new Error("The server refuses the connection");
    this.#send([1]);
    const init = await this.#stream.view(24);
    this.#resize(init.getUint16(0), init.getUint16(2));
    const name = TEXT.decode(await this.#stream.read(init.getUint32(20)));
    const encodings = new DataView(new ArrayBuffer(4 + 4 * ENCODINGS.length));
    encodings.setUint8(0, 2);
    encodings.setUint16(2, ENCODINGS.length);
    ENCODINGS.forEach((number, index) => encodings.setInt32(4 + 4 * index, number));
    this.#send(encodings);
    const input = !name.endsWith("(view only)");
    if (input) this.#listenForInput();
    this.#notify("open", { name, input });
    this.#requestUpdate(false);
    for (;;) await this.#readMessage();
  }

  async #readMessage() {
    const [kind] = await this.#stream.read(1);
    if (kind !== 0) throw new Error(`The server sent a message of type ${kind}`);
    const count = (await this.#stream.view(3)).getUint16(1);
    for (let rect = 0; rect < count; rect++) await this.#readRect();
    this.#canvas.dataset.updates = ++this.#updates;
    this.#notify("picture", {});
    // The next request follows the drawing, so that a slow or hidden page gets no updates.
    requestAnimationFrame(() => this.#requestUpdate(true));
  }

  async #readRect() {
    const head = await this.#stream.view(12);
    const [x, y, width, height] = [0, 2, 4, 6].map((at) => head.getUint16(at));
    switch (head.getInt32(8)) {
      case DESKTOP_SIZE:
        this.#resize(width, height);
        break;
      case QEMU_EXTENDED_KEY:
        this.#extendedKeys = true;
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
        throw new Error("The server sent an encoding that was not requested");
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

  #requestUpdate(incremental) {
    const message = new DataView(new ArrayBuffer(10));
    message.setUint8(0, 3);
    message.setUint8(1, incremental ? 1 : 0);
    message.setUint16(6, this.#canvas.width);
    message.setUint16(8, this.#canvas.height);
    this.#send(message);
  }

  #key(code, down) {
    const scanCode = SCAN_CODES.get(code);
    if (scanCode === undefined || !this.#extendedKeys) return false;
    if (down) this.#held.add(code);
    else if (!this.#held.delete(code)) return true;
    const message = new DataView(new ArrayBuffer(12));
    message.setUint8(0, 255);
    message.setUint16(2, down ? 1 : 0);
    message.setUint32(8, scanCode);
    this.#send(message);
    return true;
  }

  #release() {
    for (const code of [...this.#held]) this.#key(code, false);
  }

  /** Presses keys together and releases them. */
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
    // Button 2 of a browser is the right button; button 2 of RFB is the middle one.
    const mask = held.reduce((mask, button) => mask | [1, 4, 2][button], wheel);
    message.setUint8(0, 5);
    message.setUint8(1, mask);
    message.setUint16(2, along(event.clientX, box.left, box.width, this.#canvas.width));
    message.setUint16(4, along(event.clientY, box.top, box.height, this.#canvas.height));
    this.#send(message);
  }

  #listenForInput() {
    const on = (name, act) => this.#canvas.addEventListener(name, (event) => {
      if (act(event) !== false) event.preventDefault();
    }, { signal: this.#listening.signal, passive: false });
    // Shift-Tab moves the focus out of the screen.
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
