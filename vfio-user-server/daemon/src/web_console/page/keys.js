// PC scan codes by KeyboardEvent.code (0x80 stands for the prefix 0xe0). Each row has consecutive scan codes.
const ROWS = [
  [0x01, "Escape Digit1 Digit2 Digit3 Digit4 Digit5 Digit6 Digit7 Digit8 Digit9 Digit0 Minus Equal Backspace"],
  [0x0f, "Tab KeyQ KeyW KeyE KeyR KeyT KeyY KeyU KeyI KeyO KeyP BracketLeft BracketRight Enter"],
  [0x1d, "ControlLeft KeyA KeyS KeyD KeyF KeyG KeyH KeyJ KeyK KeyL Semicolon Quote Backquote ShiftLeft Backslash"],
  [0x2c, "KeyZ KeyX KeyC KeyV KeyB KeyN KeyM Comma Period Slash ShiftRight NumpadMultiply AltLeft Space CapsLock"],
  [0x3b, "F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 NumLock ScrollLock"],
  [0x47, "Numpad7 Numpad8 Numpad9 NumpadSubtract Numpad4 Numpad5 Numpad6 NumpadAdd"],
  [0x4f, "Numpad1 Numpad2 Numpad3 Numpad0 NumpadDecimal"],
  [0x56, "IntlBackslash F11 F12"],
  [0x9c, "NumpadEnter ControlRight"],
  [0xb5, "NumpadDivide"],
  [0xb7, "PrintScreen AltRight"],
  [0xc7, "Home ArrowUp PageUp"],
  [0xcb, "ArrowLeft"],
  [0xcd, "ArrowRight"],
  [0xcf, "End ArrowDown PageDown Insert Delete"],
  [0xdb, "MetaLeft MetaRight ContextMenu"],
];

export const SCAN_CODES = new Map(
  ROWS.flatMap(([first, names]) => names.split(" ").map((name, index) => [name, first + index])));
