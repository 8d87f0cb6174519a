//! Text of errors with their causes.

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
}
