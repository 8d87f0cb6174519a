//! Text for a terminal or a log: from processes that are not trusted, and of errors with their
//! causes.

use std::error::Error;

/// Returns an error with its causes. A cause that the text before it contains is left out: some
/// errors name their cause, others leave it to the reader of the chain.
#[must_use]
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

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

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl std::fmt::Display for Layer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn each_cause_is_named_once() {
        let cause = || Some(Box::new(Layer("No such file", None)));
        let middle = |text| Some(Box::new(Layer(text, cause())));
        assert_eq!(with_causes(&Layer("Cannot start", cause())), "Cannot start: No such file");
        let named = Layer("Cannot start", middle("Cannot open f: No such file; create it"));
        assert_eq!(with_causes(&named), "Cannot start: Cannot open f: No such file; create it");
        assert_eq!(with_causes(&Layer("No such file", cause())), "No such file");
    }

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
