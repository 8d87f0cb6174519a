//! Text from processes that are not trusted, for a terminal or a log.

/// Returns a text as one line without control characters, which are escaped, of at most `max`
/// characters.
#[must_use]
pub fn one_line(text: &str, max: usize) -> String {
    let mut line = String::with_capacity(text.len().min(max));
    for (index, character) in text.chars().enumerate() {
        if index == max {
            line.push('…');
            break;
        }
        if is_control(character) {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// Returns whether [`one_line`] would change a text that is short enough.
#[must_use]
pub fn has_control(text: &str) -> bool {
    text.chars().any(is_control)
}

/// Returns whether a character moves the cursor, ends the line or changes the direction of the
/// text.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_length_is_bounded() {
        for (text, line) in [
            ("plain text, grüße", "plain text, grüße"),
            ("\u{1b}[2Ja\nb\tc\u{9b}", "\\u{1b}[2Ja\\nb\\tc\\u{9b}"),
            ("a\u{202e}b\u{2028}", "a\\u{202e}b\\u{2028}"),
        ] {
            assert_eq!(one_line(text, 100), line);
            assert_eq!(has_control(text), text != line);
        }
        assert_eq!(one_line("abcdef", 3), "abc…");
        assert_eq!(one_line("abc", 3), "abc");
    }
}
