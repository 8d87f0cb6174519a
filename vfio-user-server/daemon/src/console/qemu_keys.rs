//! QEMU's key names for X11 keysyms, on a US keyboard.
//!
//! Viewers that send only keysyms work with a US layout. Viewers that also send scan codes (most
//! do) work with any layout.

/// Returns QEMU's name of the key with this keysym on a US keyboard.
pub fn qcode(keysym: u32) -> Option<&'static str> {
    if let Some(symbol) = char::from_u32(keysym).filter(char::is_ascii_graphic) {
        return of_character(symbol.to_ascii_lowercase());
    }
    NAMED.iter().find(|(number, _)| *number == keysym).map(|(_, name)| *name)
}

fn of_character(symbol: char) -> Option<&'static str> {
    let found = CHARACTERS.iter().find(|(symbols, _)| symbols.contains(symbol));
    found.map(|(_, name)| *name)
}

#[rustfmt::skip]
const CHARACTERS: &[(&str, &str)] = &[
    ("a", "a"), ("b", "b"), ("c", "c"), ("d", "d"), ("e", "e"), ("f", "f"), ("g", "g"), ("h", "h"), ("i", "i"),
    ("j", "j"), ("k", "k"), ("l", "l"), ("m", "m"), ("n", "n"), ("o", "o"), ("p", "p"), ("q", "q"), ("r", "r"),
    ("s", "s"), ("t", "t"), ("u", "u"), ("v", "v"), ("w", "w"), ("x", "x"), ("y", "y"), ("z", "z"),
    ("1!", "1"), ("2@", "2"), ("3#", "3"), ("4$", "4"), ("5%", "5"), ("6^", "6"), ("7&", "7"), ("8*", "8"),
    ("9(", "9"), ("0)", "0"), ("-_", "minus"), ("=+", "equal"), ("[{", "bracket_left"), ("]}", "bracket_right"),
    ("\\|", "backslash"), (";:", "semicolon"), ("'\"", "apostrophe"), ("`~", "grave_accent"), (",<", "comma"),
    (".>", "dot"), ("/?", "slash"),
];

#[rustfmt::skip]
const NAMED: &[(u32, &str)] = &[
    (0x20, "spc"), (0xff08, "backspace"), (0xff09, "tab"), (0xfe20, "tab"), (0xff0d, "ret"), (0xff1b, "esc"),
    (0xff13, "pause"), (0xff14, "scroll_lock"), (0xff61, "print"), (0xff15, "sysrq"), (0xff63, "insert"),
    (0xffff, "delete"), (0xff50, "home"), (0xff57, "end"), (0xff55, "pgup"), (0xff56, "pgdn"), (0xff51, "left"),
    (0xff52, "up"), (0xff53, "right"), (0xff54, "down"), (0xff67, "menu"), (0xff7f, "num_lock"),
    (0xffe1, "shift"), (0xffe2, "shift_r"), (0xffe3, "ctrl"), (0xffe4, "ctrl_r"), (0xffe5, "caps_lock"),
    (0xffe9, "alt"), (0xffea, "alt_r"), (0xfe03, "alt_r"), (0xff7e, "alt_r"), (0xffe7, "meta_l"), (0xffe8, "meta_r"),
    (0xffeb, "meta_l"), (0xffec, "meta_r"),
    (0xffbe, "f1"), (0xffbf, "f2"), (0xffc0, "f3"), (0xffc1, "f4"), (0xffc2, "f5"), (0xffc3, "f6"), (0xffc4, "f7"),
    (0xffc5, "f8"), (0xffc6, "f9"), (0xffc7, "f10"), (0xffc8, "f11"), (0xffc9, "f12"),
    (0xffaf, "kp_divide"), (0xffaa, "kp_multiply"), (0xffad, "kp_subtract"), (0xffab, "kp_add"),
    (0xff8d, "kp_enter"), (0xffae, "kp_decimal"), (0xff9f, "kp_decimal"),
    (0xffb0, "kp_0"), (0xffb1, "kp_1"), (0xffb2, "kp_2"), (0xffb3, "kp_3"), (0xffb4, "kp_4"), (0xffb5, "kp_5"),
    (0xffb6, "kp_6"), (0xffb7, "kp_7"), (0xffb8, "kp_8"), (0xffb9, "kp_9"),
    // Keypad without Num Lock.
    (0xff9e, "kp_0"), (0xff9c, "kp_1"), (0xff99, "kp_2"), (0xff9b, "kp_3"), (0xff96, "kp_4"), (0xff9d, "kp_5"),
    (0xff98, "kp_6"), (0xff95, "kp_7"), (0xff97, "kp_8"), (0xff9a, "kp_9"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ascii_character_has_a_key() {
        for symbol in (0x20_u8..0x7f).map(char::from) {
            let key = qcode(u32::from(symbol));
            assert!(key.is_some(), "{symbol:?}");
            assert_eq!(
                key,
                qcode(u32::from(symbol.to_ascii_lowercase())),
                "Shift is a separate key"
            );
        }
    }

    #[test]
    fn keysyms_are_unique() {
        let mut numbers: Vec<_> = NAMED.iter().map(|(number, _)| number).collect();
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!((qcode(0xff0d), qcode(0xfc), qcode(u32::MAX)), (Some("ret"), None, None));
    }
}
